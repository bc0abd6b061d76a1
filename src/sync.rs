//! Locks, atomics, threads and the clock, chosen here only, so that loom's can stand in: under `cfg(loom)` all of
//! the crate runs on `sync/model.rs`, and `tests/loom.rs` runs every interleaving of its protocols.
//!
//! `push_reserved` is here because it is about locks: it appends to a guarded queue without ever
//! allocating while the lock is held.

#[cfg(loom)]
mod model;

#[cfg(loom)]
pub(crate) use self::model::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Condvar, Instant, Mutex, RwLock, thread,
};
#[cfg(loom)]
pub(crate) use loom::{hint::spin_loop, sync::atomic::fence};
#[cfg(not(loom))]
pub(crate) use parking_lot::{Condvar, Mutex, RwLock};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, fence};
#[cfg(not(loom))]
pub(crate) use std::{hint::spin_loop, thread, time::Instant};

pub(crate) use std::sync::atomic::Ordering;
pub(crate) use std::sync::{Arc, OnceLock};

/// The real ones, under loom too: for statics, which outlive a model, and for what no model is about.
pub(crate) mod fixed {
    pub(crate) use parking_lot::Mutex;
    pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};
}

/// A static of modelled parts. Under loom there is a fresh one in every interleaving.
#[cfg(not(loom))]
macro_rules! process_wide {
    ($(#[$doc:meta])* static $name:ident: $type:ty = $value:expr;) => {
        $(#[$doc])* static $name: $type = $value;
    };
}
#[cfg(loom)]
macro_rules! process_wide {
    ($(#[$doc:meta])* static $name:ident: $type:ty = $value:expr;) => {
        loom::lazy_static! { $(#[$doc])* static ref $name: $type = $value; }
    };
}
pub(crate) use process_wide;

use std::collections::VecDeque;
use std::time::Duration;

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

/// How many threads can run at once.
pub(crate) fn parallelism() -> usize {
    // A model has one.
    #[cfg(loom)]
    return 1;
    #[cfg(not(loom))]
    thread::available_parallelism().map_or(1, std::num::NonZero::get)
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
    #[cfg(not(loom))]
    pub(crate) const fn new() -> Self {
        Self { waiters: AtomicUsize::new(0), lock: Mutex::new(()), moved: Condvar::new() }
    }

    #[cfg(loom)]
    pub(crate) fn new() -> Self {
        Self::default()
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
    pub(crate) fn wait_until(&self, deadline: Option<Instant>, mut done: impl FnMut() -> bool) -> bool {
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
