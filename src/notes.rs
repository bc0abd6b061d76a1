//! Uses of a block that an integration noted without an event of ours: only a context can say when they are
//! over, unless a later record on the same stream covers them.
//!
//! An integration such as cudarc's `HostSlice` is called *before* it enqueues its copy, and nothing of ours
//! runs afterwards, so there is no point on the stream to record. A raw stream handle is never kept: the driver
//! reuses handles. What is kept is the stream's id (`cuStreamGetId`), which it does not reuse.

#![cfg_attr(not(feature = "cudarc"), allow(dead_code))] // Only its integration notes anything.

use crate::contexts::{Context, Contexts, with_current};
use crate::driver::{Driver, StreamHandle};
use crate::error::{CallError, Error};
use crate::events::{self, Use, with_relaxed_capture};
use crate::stream::{Keep, StreamRef};
use crate::sync::{Arc, Ordering, fixed, thread};
use smallvec::SmallVec;
use std::time::Duration;

/// The noted uses of a block; two streams fit without an allocation.
pub(crate) type Notes = SmallVec<[Note; 2]>;

/// One noted use.
#[derive(Debug, Clone)]
pub(crate) struct Note {
    context: Arc<Context>,
    /// `None` where the driver did not say; such a note is cleared by no record.
    stream_id: Option<u64>,
    /// The legacy default stream: an event recorded on it later is exact, whoever records it.
    pub(crate) on_default_stream: bool,
    /// Never the same twice, so that a note which was waited for is told from a newer one of its stream.
    sequence: u64,
}

/// What a look at the stream of a noted use gave.
pub(crate) enum Noted {
    Use(Note),
    /// The stream captures: the copy goes into a graph, which may use the block again at any time.
    Captured,
}

/// What the driver says of a stream.
enum Look {
    Captures,
    Id(Option<u64>),
}

/// Asks whether a stream captures, and only then for its id: on a capturing stream that question may break the
/// capture. Handles 0 to 2 mean something in the current context only, which must be the stream's.
fn look_at(driver: &Driver, context: &Context, stream: StreamHandle) -> Look {
    let ask = || match driver.api().is_capturing(stream) {
        Ok(true) => Look::Captures,
        Ok(false) => Look::Id(driver.api().stream_id(stream).ok()),
        // No "yes": a lost device must not look like a capture. The copy that follows meets the error too.
        Err(_) => Look::Id(None),
    };
    match stream.is_implicit() {
        true => with_current(driver, context.handle, ask).unwrap_or(Look::Id(None)),
        false => ask(),
    }
}

impl Note {
    /// Looks at a stream that is about to use a block.
    pub(crate) fn of(driver: &Driver, contexts: &Contexts, stream: &StreamRef<'_>) -> Noted {
        let context = contexts.of_stream(driver, stream);
        match look_at(driver, &context, stream.stream) {
            Look::Captures => Noted::Captured,
            Look::Id(stream_id) => Noted::Use(Note {
                context,
                stream_id,
                // 0 and 1 name the legacy default stream of the context; 2 is another one in every thread.
                on_default_stream: stream.stream.0 <= 1,
                sequence: Self::next_sequence(),
            }),
        }
    }

    /// A use that could not be recorded: something in this context, which stays known as long as the note is there.
    pub(crate) fn of_failed(context: Arc<Context>) -> Self {
        Self { context, stream_id: None, on_default_stream: false, sequence: Self::next_sequence() }
    }

    fn next_sequence() -> u64 {
        static NEXT: fixed::AtomicU64 = fixed::AtomicU64::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether both stand for the same thing: one stream, or "something in this context".
    fn is_of_the_same(&self, other: &Note) -> bool {
        self.stream_id == other.stream_id
            && self.on_default_stream == other.on_default_stream
            && Arc::ptr_eq(&self.context, &other.context)
    }
}

/// Adds a note, in place of an older one of the same stream: a buffer that is copied from in a loop keeps one.
pub(crate) fn add(notes: &mut Notes, note: Note) {
    match notes.iter_mut().find(|other| other.is_of_the_same(&note)) {
        Some(other) => other.sequence = note.sequence,
        None => notes.push(note),
    }
}

/// Drops what an event recorded on the stream just now stands for; it stands for nothing on other streams.
pub(crate) fn clear_covered(driver: &Driver, notes: &mut Notes, used: &Use, stream: StreamHandle) {
    if let Look::Id(Some(id)) = look_at(driver, &used.context, stream) {
        notes.retain(|note| note.stream_id != Some(id) || !Arc::ptr_eq(&note.context, &used.context));
    }
}

/// Drops the notes that were waited for, but not what was noted since.
pub(crate) fn clear_waited(notes: &mut Notes, waited: &[Note]) {
    notes.retain(|note| waited.iter().all(|other| other.sequence != note.sequence));
}

/// Blocks until the noted uses are done: by an event on a default stream, else by their contexts.
///
/// `may_wait` is asked before a context-wide wait; `has_ended`, whether a failed one failed because the context, and its
/// work with it, has ended.
pub(crate) fn wait_for(
    driver: &Driver,
    notes: &[Note],
    may_wait: impl Fn(&Context) -> Result<(), Error>,
    has_ended: impl Fn(&Arc<Context>, &CallError) -> bool,
) -> Result<(), Error> {
    let mut idle: SmallVec<[&Arc<Context>; 2]> = SmallVec::new();
    for note in notes {
        let exact = if note.on_default_stream { record_default_stream(driver, note).ok() } else { None };
        if let Some(used) = exact {
            nap_until(|| Ok(with_relaxed_capture(driver, || events::is_complete(driver, &used))?))?;
            events::recycle(used);
        } else if !idle.iter().any(|context| Arc::ptr_eq(context, &note.context)) {
            with_relaxed_capture(driver, || may_wait(&note.context))?;
            let waited = with_relaxed_capture(driver, || note.context.synchronize(driver));
            if let Err(error) = waited
                && !has_ended(&note.context, &error)
            {
                return Err(error.into());
            }
            idle.push(&note.context);
        }
    }
    Ok(())
}

/// An event on the legacy default stream stands for every copy made on it so far.
pub(crate) fn record_default_stream(driver: &Driver, note: &Note) -> Result<Use, Error> {
    let context = note.context.clone();
    let stream = StreamRef {
        driver: driver.api().identity(),
        context: context.handle,
        stream: StreamHandle(0),
        keep: Keep::Caller,
        watch: None,
    };
    events::record(driver, context, None, &stream, None).map_err(|(error, _)| error)
}

/// Polls with naps that grow from 2 us to 0.5 ms.
pub(crate) fn nap_until(mut done: impl FnMut() -> Result<bool, Error>) -> Result<(), Error> {
    let mut nap = Duration::from_micros(2);
    while !done()? {
        thread::sleep(nap);
        nap = (nap * 2).min(Duration::from_micros(500));
    }
    Ok(())
}
