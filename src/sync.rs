//! Locks, atomics and threads, chosen here only, so that another implementation can stand in.
//!
//! `push_reserved` is here because it is about locks: it appends to a guarded queue without ever
//! allocating while the lock is held.

pub(crate) use parking_lot::{Condvar, Mutex, RwLock};
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
pub(crate) use std::sync::{Arc, OnceLock};
pub(crate) use std::thread;

/// What `inbox.rs` and `bell.rs` stand on: the same as above, or loom's, so that every interleaving of
/// their protocol can be run.
#[cfg(not(loom))]
pub(crate) mod modelled {
    pub(crate) use super::{AtomicU32, AtomicU64, Mutex, thread};

    /// Nothing: the sequentially consistent accesses around it are ordered by themselves.
    #[inline]
    pub(crate) fn ordered() {}

    /// Sleeps for at most `duration`, or until unparked.
    pub(crate) fn nap(duration: std::time::Duration) {
        thread::park_timeout(duration);
    }
}

#[cfg(loom)]
pub(crate) mod modelled {
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};
    pub(crate) use loom::thread;

    /// parking_lot's interface on loom's mutex.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().expect("a model that panics has failed already")
        }
    }

    /// loom takes sequentially consistent accesses for acquire and release ones; the order that the language
    /// gives them is spelled out by a fence.
    pub(crate) fn ordered() {
        loom::sync::atomic::fence(loom::sync::atomic::Ordering::SeqCst);
    }

    /// There is no time in a model.
    pub(crate) fn nap(_: std::time::Duration) {
        thread::yield_now();
    }
}

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Appends `value`; the queue grows outside the lock, since `take` and `drop` may want that lock.
pub(crate) fn push_reserved<T, G>(lock: &Mutex<G>, queue: impl Fn(&mut G) -> &mut VecDeque<T>, value: T) {
    push_reserved_then(lock, queue, value, |_| ());
}

/// As [`push_reserved`], and runs `then` under the same lock right after the append.
pub(crate) fn push_reserved_then<T, G, R>(
    lock: &Mutex<G>,
    queue: impl Fn(&mut G) -> &mut VecDeque<T>,
    value: T,
    then: impl FnOnce(&mut G) -> R,
) -> R {
    let mut spare: VecDeque<T> = VecDeque::new();
    loop {
        let wanted = {
            let mut guard = lock.lock();
            let items = queue(&mut guard);
            if items.len() == items.capacity() && spare.capacity() > items.capacity() {
                spare.append(items);
                std::mem::swap(items, &mut spare);
            }
            if items.len() < items.capacity() {
                items.push_back(value);
                let result = then(&mut guard);
                drop(guard);
                // The outgrown storage, if any, is freed here, after the lock.
                drop(spare);
                return result;
            }
            items.capacity()
        };
        spare = VecDeque::with_capacity((wanted * 2).max(16));
    }
}

/// The moment that is so far away; one that cannot be represented is a generation away.
pub(crate) fn from_now(time: Duration) -> Instant {
    const GENERATION: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
    Instant::now() + time.min(GENERATION)
}

/// Lets threads wait for background progress; costs the background one load when nobody waits.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    waiters: AtomicUsize,
    lock: Mutex<()>,
    moved: Condvar,
}

impl Progress {
    /// One that nobody waits for yet.
    pub(crate) const fn new() -> Self {
        Self { waiters: AtomicUsize::new(0), lock: Mutex::new(()), moved: Condvar::new() }
    }

    /// Called by background threads after anything moved on.
    pub(crate) fn announce(&self) {
        // The fence orders the caller's counters before the look at `waiters`; a waiter announces
        // itself before it looks at the counters, so one of the two sees the other.
        fence(Ordering::SeqCst);
        if self.waiters.load(Ordering::Relaxed) > 0 {
            drop(self.lock.lock());
            self.moved.notify_all();
        }
    }

    /// Waits until `done` or the deadline; true when done.
    pub(crate) fn wait_until(
        &self,
        deadline: Option<std::time::Instant>,
        mut done: impl FnMut() -> bool,
    ) -> bool {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let mut guard = self.lock.lock();
        let outcome = loop {
            if done() {
                break true;
            }
            match deadline {
                Some(at) => {
                    if self.moved.wait_until(&mut guard, at).timed_out() {
                        break done();
                    }
                }
                None => self.moved.wait(&mut guard),
            }
        };
        drop(guard);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_grows_and_keeps_its_order() {
        let lock = Mutex::new(VecDeque::new());
        for number in 0..100 {
            push_reserved(&lock, |queue| queue, number);
        }
        assert_eq!(lock.into_inner(), (0..100).collect::<VecDeque<_>>());
    }
}
