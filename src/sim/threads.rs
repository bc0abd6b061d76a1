//! What the driver keeps per thread: the current context, the capture mode, and our call counts.
//!
//! A thread has a number in a thread-local without a destructor, so that a call made while the thread
//! is exiting still works; what belongs to the number lives in the simulated device. Looking it up takes no
//! lock while a thread stays with one device, which keeps `cuCtxGetCurrent` as cheap as the real one.
//!
//! Each device counts its own threads: a process that makes thousands of devices, each with a few threads, would
//! otherwise pay at every device for all the threads that there ever were.

use super::calls::Call;
use parking_lot::Mutex;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// The first bucket holds this many threads, each further one twice as many.
const FIRST_BUCKET: usize = 64;
const BUCKETS: usize = 32;

type Bucket = Box<[OnceLock<Box<Thread>>]>;

/// Grows without moving what it holds.
pub(super) struct Threads {
    /// Distinguishes the devices of one process; never 0.
    id: u64,
    /// The place of each thread that has called, by its number in the process.
    places: Mutex<HashMap<usize, usize>>,
    buckets: [OnceLock<Bucket>; BUCKETS],
}

/// One thread as this driver sees it. Only its own thread changes the contexts and the mode.
pub(super) struct Thread {
    /// Distinguishes the threads of one device; never 0.
    pub(super) number: usize,
    /// The handle of the current context, 0 for none.
    pub(super) current: AtomicUsize,
    /// What `cuCtxPopCurrent` brings back, newest last.
    pub(super) below: Mutex<Vec<usize>>,
    /// `CUstreamCaptureMode`.
    pub(super) capture_mode: AtomicU32,
    /// The pool asked for a mode, in vain.
    pub(super) mode_was_refused: AtomicBool,
    /// Set while the thread runs a host function, where no call is permitted.
    pub(super) in_host_function: AtomicBool,
    /// The stream that last answered that it captures nothing, 0 for none; see `Cuda::cu_stream_is_capturing`.
    pub(super) quiet_stream: AtomicUsize,
    /// The number of the change of streams that the answer came after.
    pub(super) quiet_since: AtomicU64,
    /// Written by the thread itself only, so that counting is no atomic read-modify-write.
    counts: [AtomicU64; Call::COUNT],
    /// What the counts were when somebody set them to zero.
    counted_before: [AtomicU64; Call::COUNT],
}

impl Thread {
    #[inline]
    pub(super) fn count(&self, call: Call) {
        let count = &self.counts[call as usize];
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    pub(super) fn calls(&self, call: Call) -> u64 {
        let before = self.counted_before[call as usize].load(Ordering::Relaxed);
        self.counts[call as usize].load(Ordering::Relaxed) - before
    }

    fn reset_calls(&self) {
        for (before, count) in self.counted_before.iter().zip(&self.counts) {
            before.store(count.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

impl Threads {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, places: Mutex::default(), buckets: [const { OnceLock::new() }; BUCKETS] }
    }

    /// The calling thread; allocates at a thread's first call only.
    #[inline]
    pub(super) fn current(&self) -> &Thread {
        let place = self.place();
        let index = place + FIRST_BUCKET;
        let bucket_index = (index / FIRST_BUCKET).ilog2() as usize;
        let bucket_size = FIRST_BUCKET << bucket_index;
        let bucket = self.buckets[bucket_index]
            .get_or_init(|| (0..bucket_size).map(|_| OnceLock::new()).collect::<Vec<_>>().into_boxed_slice());
        bucket[index - bucket_size].get_or_init(|| {
            Box::new(Thread {
                number: place + 1,
                current: AtomicUsize::new(0),
                below: Mutex::new(Vec::new()),
                capture_mode: AtomicU32::new(0),
                mode_was_refused: AtomicBool::new(false),
                in_host_function: AtomicBool::new(false),
                counts: [const { AtomicU64::new(0) }; Call::COUNT],
                counted_before: [const { AtomicU64::new(0) }; Call::COUNT],
                quiet_stream: AtomicUsize::new(0),
                quiet_since: AtomicU64::new(0),
            })
        })
    }

    /// The calling thread's place, from 0 on, which it keeps. Remembered for the device that was called last.
    #[inline]
    fn place(&self) -> usize {
        LAST.with(|last| {
            let (id, place) = last.get();
            if id == self.id {
                return place;
            }
            let mut places = self.places.lock();
            let next = places.len();
            let place = *places.entry(thread_number()).or_insert(next);
            last.set((self.id, place));
            place
        })
    }

    /// How often all threads together made a call.
    pub(super) fn calls(&self, call: Call) -> u64 {
        self.all().map(|thread| thread.calls(call)).sum()
    }

    /// How often all threads together made each call.
    pub(super) fn all_calls(&self) -> [u64; Call::COUNT] {
        let mut sums = [0; Call::COUNT];
        for thread in self.all() {
            for (sum, call) in sums.iter_mut().zip(Call::all()) {
                *sum += thread.calls(*call);
            }
        }
        sums
    }

    pub(super) fn total_calls(&self) -> u64 {
        let counts = Call::all().iter().zip(self.all_calls());
        counts.filter(|(call, _)| call.is_of_the_driver()).map(|(_, count)| count).sum()
    }

    pub(super) fn reset_calls(&self) {
        self.all().for_each(Thread::reset_calls);
    }

    fn all(&self) -> impl Iterator<Item = &Thread> {
        let buckets = self.buckets.iter().filter_map(OnceLock::get);
        buckets.flat_map(|bucket| bucket.iter().filter_map(OnceLock::get)).map(|thread| &**thread)
    }
}

thread_local! {
    /// The device that the thread called last, and its place there.
    static LAST: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
}

fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    thread_local! {
        static NUMBER: Cell<usize> = const { Cell::new(0) };
    }
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_keep_their_own_counts_beyond_the_first_bucket() {
        let threads = Threads::new();
        std::thread::scope(|scope| {
            for _ in 0..3 * FIRST_BUCKET {
                scope.spawn(|| {
                    threads.current().count(Call::EventQuery);
                    assert_eq!(threads.current().calls(Call::EventQuery), 1);
                });
            }
        });
        assert_eq!(threads.calls(Call::EventQuery), 3 * FIRST_BUCKET as u64);
        assert_eq!(threads.total_calls(), 3 * FIRST_BUCKET as u64);
        threads.reset_calls();
        assert_eq!([threads.calls(Call::EventQuery), threads.total_calls()], [0; 2]);
        threads.current().count(Call::EventQuery);
        assert_eq!([threads.calls(Call::EventQuery), threads.total_calls()], [1; 2]);
    }

    #[test]
    fn a_device_has_room_for_its_own_threads_only_and_finds_each_again() {
        let (first, second) = (Threads::new(), Threads::new());
        std::thread::scope(|scope| {
            for _ in 0..3 * FIRST_BUCKET {
                scope.spawn(|| first.current().count(Call::EventQuery));
            }
        });
        let number = second.current().number;
        assert_eq!(number, 1, "as many as called this device");
        first.current().count(Call::EventQuery);
        assert_eq!(second.current().number, number, "after a call of another device");
        assert_eq!(second.buckets.iter().filter(|bucket| bucket.get().is_some()).count(), 1);
    }
}
