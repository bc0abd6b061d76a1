//! The end of the process: afterwards nothing of ours calls the driver.
//!
//! libcuda takes itself down in an exit handler that it registers at its first use, and whoever calls it
//! afterwards gets `CUDA_ERROR_DEINITIALIZED`, or crashes. So a handler of ours is registered *after* the driver's
//! first use, and therefore runs before the driver's: it shuts a door through which every driver call of this
//! library goes, whatever thread makes it, and waits for the calls that are inside, at most [`PATIENCE`]. A call
//! that finds the door shut is answered with that code; what it was for is leaked, which the system cleans up.
//!
//! A call costs a caller two plain stores on a line of its own and one load. The two sides must not miss each
//! other: a caller says that it is inside before it looks at the door, and the exit shuts the door before it looks
//! at the callers. The fence that this needs on both sides is asked of the kernel by the exit alone
//! (`membarrier`).
#![allow(unsafe_code)] // `atexit` and `membarrier`.

use crate::error::CallError;
use crate::os::ProcessMark;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, Ordering, compiler_fence, fence};
use std::time::{Duration, Instant};

/// `CUDA_ERROR_DEINITIALIZED`.
const DEINITIALIZED: u32 = 4;

/// How long the exit of the process waits for driver calls to return.
const PATIENCE: Duration = Duration::from_secs(1);

/// No driver call begins any more.
static SHUT: AtomicBool = AtomicBool::new(false);

/// Whether the process exits and the driver may be gone.
#[inline]
pub(crate) fn is_shut() -> bool {
    SHUT.load(Ordering::Acquire)
}

/// What a process does for the first time; each may be what makes the driver register an exit handler, so ours is
/// registered again after each, and the last one registered runs first.
#[derive(Clone, Copy)]
pub(super) enum FirstUse {
    /// `cuInit`.
    Initialised = 1,
    /// A primary context was retained.
    Context = 2,
    /// An event was created.
    Event = 4,
    /// Memory was registered.
    Registration = 8,
}

/// Registers the exit handler, once for every kind of first use; the driver's own handler exists by now.
#[inline]
pub(super) fn watch(first: FirstUse) {
    static WATCHED: AtomicU8 = AtomicU8::new(0);
    if WATCHED.load(Ordering::Relaxed) & first as u8 == 0 || WATCHED_IN.is_inherited() {
        register(&WATCHED, first);
    }
}

/// Where the handler was registered; a forked child has it too, and must wait for nobody.
static WATCHED_IN: ProcessMark = ProcessMark::new();

#[cold]
fn register(watched: &AtomicU8, first: FirstUse) {
    if WATCHED_IN.is_inherited() {
        // The threads that were inside are the parent's.
        slots().filter(|slot| !is_mine(slot)).for_each(|slot| slot.calls.store(0, Ordering::Relaxed));
        watched.store(0, Ordering::Relaxed);
    }
    WATCHED_IN.set();
    if watched.fetch_or(first as u8, Ordering::Relaxed) & first as u8 == 0 {
        // SAFETY: `atexit` takes a function that lives as long as this library; where it is unloaded before the
        // process ends, the C library calls the function then.
        unsafe { libc::atexit(at_exit) };
    }
}

extern "C" fn at_exit() {
    if SHUT.swap(true, Ordering::SeqCst) || WATCHED_IN.is_inherited() {
        return;
    }
    fence_in_every_thread();
    let deadline = Instant::now() + PATIENCE;
    let mut nap = Duration::from_micros(20);
    while somebody_is_inside() && Instant::now() < deadline {
        std::thread::sleep(nap);
        nap = (nap * 2).min(Duration::from_millis(2));
    }
}

/// A call of this thread, should the exit have come out of one, cannot be waited for.
fn somebody_is_inside() -> bool {
    slots().chain([&SHARED]).any(|slot| !is_mine(slot) && slot.calls.load(Ordering::Acquire) > 0)
}

fn is_mine(slot: &Slot) -> bool {
    MINE.get().is_some_and(|mine| std::ptr::eq(mine, slot))
}

/// Makes what other threads have stored before this call visible here, whatever they were doing.
fn fence_in_every_thread() {
    fence(Ordering::SeqCst);
    #[cfg(target_os = "linux")]
    {
        /// `MEMBARRIER_CMD_GLOBAL`: waits until every running thread has passed a full barrier.
        const GLOBAL: libc::c_int = 1;
        // SAFETY: membarrier takes a command and flags, and touches no memory of the process.
        if unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0, 0) } == 0 {
            return;
        }
    }
    // A kernel without it: a store leaves its core within nanoseconds.
    std::thread::sleep(Duration::from_millis(1));
}

/// One thread's driver calls; only that thread writes it. Never freed, taken over by later threads.
#[repr(align(64))]
struct Slot {
    /// Calls that the thread is inside of.
    calls: AtomicU32,
    is_taken: AtomicBool,
    next: AtomicPtr<Slot>,
}

impl Slot {
    const fn new(is_taken: bool) -> Self {
        Self {
            calls: AtomicU32::new(0),
            is_taken: AtomicBool::new(is_taken),
            next: AtomicPtr::new(std::ptr::null_mut()),
        }
    }
}

/// All slots, newest first. No lock, because a fork or an exit would find it held.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(std::ptr::null_mut());

/// For calls of threads that have lost their thread-locals.
static SHARED: Slot = Slot::new(true);

fn slots() -> impl Iterator<Item = &'static Slot> {
    // SAFETY: null, or a slot, which is never freed.
    let deref = |slot: *mut Slot| unsafe { slot.as_ref() };
    std::iter::successors(deref(SLOTS.load(Ordering::Acquire)), move |slot| {
        deref(slot.next.load(Ordering::Acquire))
    })
}

thread_local! {
    /// Without a destructor, so that a call costs no look at whether it has run.
    static MINE: Cell<Option<&'static Slot>> = const { Cell::new(None) };
    static LEASE: Lease = const { Lease };
}

/// Gives the thread's slot back when the thread ends.
struct Lease;

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(slot) = MINE.take() {
            slot.is_taken.store(false, Ordering::Release);
        }
    }
}

/// A thread is inside the driver for as long as it lives.
#[must_use]
pub(crate) struct Visit {
    slot: &'static Slot,
}

impl Visit {
    /// `None` when the process exits: the driver must not be called any more.
    #[inline]
    pub(crate) fn begin() -> Option<Self> {
        if is_shut() {
            // Before it counts: callers that are refused again and again must not look like one that stays inside.
            return None;
        }
        let visit = match MINE.get() {
            Some(slot) => {
                slot.calls.store(slot.calls.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                Self { slot }
            }
            None => Self::begin_first(),
        };
        // The exit's membarrier makes a full fence of this one.
        compiler_fence(Ordering::SeqCst);
        (!is_shut()).then_some(visit)
    }

    /// As [`Self::begin`], with the answer that the driver would give.
    #[inline]
    pub(crate) fn for_call(call: &'static str) -> Result<Self, CallError> {
        Self::begin().ok_or(CallError::new(call, DEINITIALIZED))
    }

    #[cold]
    fn begin_first() -> Self {
        if LEASE.try_with(|_| ()).is_err() {
            SHARED.calls.fetch_add(1, Ordering::SeqCst);
            return Self { slot: &SHARED };
        }
        let is_free = |slot: &&Slot| {
            let taken = slot.is_taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed);
            taken.is_ok()
        };
        let slot = slots().find(is_free).unwrap_or_else(add_slot);
        MINE.set(Some(slot));
        slot.calls.store(1, Ordering::SeqCst);
        Self { slot }
    }
}

impl Drop for Visit {
    #[inline]
    fn drop(&mut self) {
        if std::ptr::eq(self.slot, &SHARED) {
            self.slot.calls.fetch_sub(1, Ordering::Release);
        } else {
            self.slot.calls.store(self.slot.calls.load(Ordering::Relaxed) - 1, Ordering::Release);
        }
    }
}

fn add_slot() -> &'static Slot {
    let slot: &'static Slot = Box::leak(Box::new(Slot::new(true)));
    let ours = std::ptr::from_ref(slot).cast_mut();
    let _ = SLOTS.fetch_update(Ordering::AcqRel, Ordering::Acquire, |first| {
        slot.next.store(first, Ordering::Release);
        Some(ours)
    });
    slot
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_given_back_and_taken_over() {
        let slot_of_a_thread = || {
            std::thread::spawn(|| {
                let visit = Visit::begin().expect("the process does not exit");
                let nested = Visit::begin().expect("the process does not exit");
                assert_eq!(visit.slot.calls.load(Ordering::Relaxed), 2);
                drop(nested);
                let address = std::ptr::from_ref(visit.slot) as usize;
                drop(visit);
                assert_eq!(MINE.get().map(|slot| slot.calls.load(Ordering::Relaxed)), Some(0));
                address
            })
            .join()
            .unwrap()
        };
        // Other tests' threads take slots too, so that not every thread finds the same one.
        let used: std::collections::BTreeSet<usize> = (0..64).map(|_| slot_of_a_thread()).collect();
        assert!(used.len() < 64, "no slot was ever used again");
    }

    #[test]
    fn a_thread_that_has_lost_its_thread_locals_is_counted_all_the_same() {
        struct Late;
        impl Drop for Late {
            fn drop(&mut self) {
                let visit = Visit::begin().expect("the process does not exit");
                assert!(visit.slot.calls.load(Ordering::Relaxed) > 0);
            }
        }
        thread_local!(static LATE: Late = const { Late });
        // Made before the lease, so destroyed after it.
        let thread = std::thread::spawn(|| {
            LATE.with(|_| ());
            drop(Visit::begin());
        });
        thread.join().unwrap();
        assert_eq!(SHARED.calls.load(Ordering::Relaxed), 0);
    }
}
