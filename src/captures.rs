//! Which captures are known of, so that no wait of a pool's disturbs one: one record per driver, for all its pools.
//!
//! A wait for a context while one of its streams captures is refused and breaks the capture. Streams that were shown
//! to the pool in an `Arc` can be asked at any time (a weak reference is kept, never a handle). What shows itself by
//! reference only, as cudarc does in its own copies, cannot be asked later: a capture that was seen there is taken for
//! over when its graph is gone, when the stream is seen again without one, or after a while.

use crate::contexts::{Context, with_current};
use crate::driver::{ContextHandle, Driver, DriverIdentity, StreamHandle};
use crate::holds::{Captured, Holds};
use crate::os::ProcessMark;
use crate::stream::{StreamRef, Watch, Watched};
use crate::sync::{Arc, AtomicUsize, Instant, Mutex, Ordering, fixed};
use std::sync::Weak;
use std::time::Duration;

/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`.
const IMPLICIT: u32 = 906;

/// `CU_STREAM_LEGACY`.
const LEGACY: StreamHandle = StreamHandle(1);

/// How long a capture that cannot be asked about is waited for: longer than nearly every capture lasts. Longer ones
/// are what `hold_context_waits` is for.
const LONGEST_UNSEEN_CAPTURE: Duration = Duration::from_secs(5);

/// How many of the streams shown last are recognised without a lock.
const RECENT: usize = 8;

/// The captures that are known of.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    /// How many callers forbid every wait for a context.
    wait_holds: AtomicUsize,
    /// How many threads are in such a wait, or about to see that they may not be.
    waits_under_way: AtomicUsize,
    /// The graphs that blocks are held for.
    pub(crate) holds: Holds,
    streams: Mutex<Vec<Stream>>,
    /// Keys of streams that are in the list, so that a record of a known stream costs one load.
    recent: [AtomicUsize; RECENT],
    unseen: Mutex<Vec<Unseen>>,
    /// How many those are.
    unseen_count: AtomicUsize,
}

/// A stream that can be asked.
#[derive(Debug, Clone)]
struct Stream {
    key: usize,
    context: ContextHandle,
    watched: Arc<dyn Watched>,
}

/// A capture on a stream that cannot be asked.
#[derive(Debug)]
struct Unseen {
    context: ContextHandle,
    /// Only compared with that of a stream which is there: if it captures nothing, nor does the one that had the
    /// handle before.
    stream: StreamHandle,
    captured: Captured,
    since: Instant,
}

impl Unseen {
    fn is_over(&self) -> bool {
        self.captured.is_over() || self.since.elapsed() >= LONGEST_UNSEEN_CAPTURE
    }
}

type All = fixed::Mutex<Vec<(DriverIdentity, Weak<Captures>)>>;

/// The records of the drivers that have pools.
static ALL: All = fixed::Mutex::new(Vec::new());

/// Whose they are: a forked child, in which pools can be made, has a copy of the lock as well, perhaps of a moment when
/// somebody had it.
static ALL_IN: ProcessMark = ProcessMark::new();

/// That child's.
static ALL_OF_A_CHILD: All = fixed::Mutex::new(Vec::new());

impl Captures {
    /// The record of a driver, which its pools share.
    pub(crate) fn of(driver: &Driver) -> Arc<Self> {
        if cfg!(loom) {
            return Arc::default(); // A model must not see what another one does.
        }
        let identity = driver.api().identity();
        let all = if ALL_IN.is_inherited() {
            &ALL_OF_A_CHILD
        } else {
            ALL_IN.set();
            &ALL
        };
        let mut all = all.lock();
        all.retain(|(_, captures)| captures.strong_count() > 0);
        let known = all.iter().find(|(of, _)| *of == identity).and_then(|(_, captures)| captures.upgrade());
        known.unwrap_or_else(|| {
            let captures = Arc::new(Self::default());
            all.push((identity, Arc::downgrade(&captures)));
            captures
        })
    }

    pub(crate) fn hold_waits(&self) {
        self.wait_holds.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn release_waits(&self) {
        self.wait_holds.fetch_sub(1, Ordering::SeqCst);
    }

    pub(crate) fn waits_are_held(&self) -> bool {
        self.wait_holds.load(Ordering::SeqCst) > 0
    }

    /// Said before the look at the holds, and a hold is counted before the look at the waits: one of the two sees
    /// the other.
    pub(crate) fn wait_begins(&self) {
        self.waits_under_way.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn wait_is_over(&self) {
        self.waits_under_way.fetch_sub(1, Ordering::SeqCst);
    }

    pub(crate) fn a_wait_is_under_way(&self) -> bool {
        self.waits_under_way.load(Ordering::SeqCst) > 0
    }

    /// A stream is shown. Not the default ones: the legacy one cannot capture, and the other is another one in every
    /// thread.
    #[inline]
    pub(crate) fn show(&self, stream: &StreamRef<'_>) {
        if let Some(watch) = &stream.watch
            && !stream.stream.is_implicit()
            && self.recent[place(watch.key)].load(Ordering::Relaxed) != watch.key
        {
            self.watch(stream, watch);
        }
    }

    #[cold]
    fn watch(&self, stream: &StreamRef<'_>, watch: &Watch<'_>) {
        let watched = (watch.start)();
        let mut gone = Vec::new();
        {
            let mut streams = self.streams.lock();
            streams.retain(|known| {
                let is_gone = known.watched.is_gone();
                if is_gone {
                    gone.push(known.clone());
                }
                !is_gone
            });
            let is_known = streams.iter().any(|known| known.key == watch.key);
            if let (false, Some(watched)) = (is_known, watched) {
                streams.push(Stream { key: watch.key, context: stream.context, watched });
            }
        }
        for known in &gone {
            // Before its key can be another stream's.
            let _ = self.recent[place(known.key)].compare_exchange(
                known.key,
                0,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
        }
        self.recent[place(watch.key)].store(watch.key, Ordering::Relaxed);
    }

    /// A stream was seen that captures; gives what that makes of a block which is used there.
    pub(crate) fn seen(&self, driver: &Driver, stream: &StreamRef<'_>) -> Captured {
        let look = || self.holds.of_capture(driver, stream.stream);
        let captured = match stream.stream.is_implicit() {
            true => with_current(driver, stream.context, look).unwrap_or(Captured::ForEver),
            false => look(),
        };
        let can_be_asked = stream.watch.is_some() && !stream.stream.is_implicit();
        self.change_unseen(stream, |unseen| {
            if !can_be_asked {
                let (context, stream) = (stream.context, stream.stream);
                unseen.push(Unseen { context, stream, captured: captured.clone(), since: Instant::now() });
            }
        });
        captured
    }

    /// A stream was seen that captures nothing.
    #[inline]
    pub(crate) fn seen_without(&self, stream: &StreamRef<'_>) {
        if self.unseen_count.load(Ordering::Relaxed) > 0 {
            self.change_unseen(stream, |_| ());
        }
    }

    /// Forgets what is over, and what is known of this stream.
    #[cold]
    fn change_unseen(&self, stream: &StreamRef<'_>, add: impl FnOnce(&mut Vec<Unseen>)) {
        let mut unseen = self.unseen.lock();
        unseen.retain(|one| !one.is_over() && (one.context, one.stream) != (stream.context, stream.stream));
        add(&mut unseen);
        self.unseen_count.store(unseen.len(), Ordering::Relaxed);
    }

    /// Whether a stream of the context is known to capture, so that a wait for the context would break a capture.
    pub(crate) fn forbid_wait_for(&self, driver: &Driver, context: &Context) -> bool {
        let watched: Vec<Arc<dyn Watched>> = {
            let streams = self.streams.lock();
            let of_context = streams.iter().filter(|stream| stream.context == context.handle);
            of_context.map(|stream| stream.watched.clone()).collect()
        };
        watched.iter().any(|stream| stream.captures(driver) == Some(true))
            || legacy_stream_is_captured_before(driver, context)
    }

    /// As [`Self::forbid_wait_for`], and also whether a capture may still go on that cannot be asked about. For a
    /// thread that can wait.
    pub(crate) fn may_forbid_wait_for(&self, driver: &Driver, context: &Context) -> bool {
        let may = |unseen: &Unseen| unseen.context == context.handle && !unseen.is_over();
        let unseen = self.unseen_count.load(Ordering::Relaxed) > 0 && self.unseen.lock().iter().any(may);
        unseen || self.forbid_wait_for(driver, context)
    }
}

fn place(key: usize) -> usize {
    (key ^ (key >> 4) ^ (key >> 9)) % RECENT
}

/// A blocking stream of the context captures, whether or not it was ever shown: the legacy stream says so, and that
/// question disturbs nothing.
fn legacy_stream_is_captured_before(driver: &Driver, context: &Context) -> bool {
    let asked = with_current(driver, context.handle, || driver.api().is_capturing(LEGACY));
    matches!(asked, Ok(Err(error)) if error.code() == IMPLICIT)
}
