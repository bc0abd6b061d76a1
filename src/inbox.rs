//! Where returned blocks wait; the only hand-over between callers and the cleaner.
//!
//! A bounded crossbeam channel per class, so that a hand-over allocates nothing and a taker can look
//! for a block of *its* class; an unbounded one takes what overflows, so that nothing is ever lost.
//! A [`Bell`] wakes the cleaner, but only when it sleeps without a timer.

use crate::size_class::{CLASS_COUNT, SizeClass};
use crate::sync::{AtomicU32, AtomicU64, Mutex, OnceLock, Ordering, thread};
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded, unbounded};
use std::time::Duration;

/// Returned blocks of one class that wait without an allocation; more go to the overflow.
const SLOTS_PER_CLASS: usize = 1024;

type Ends<T> = (Sender<T>, Receiver<T>);

/// Returned values by class, and the flags that say where to look.
///
/// Apart from its neighbours, because every drop writes the flags.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Inbox<T> {
    /// Bit `n`: something may wait in class `n`. The top bit: in the overflow.
    arrivals: AtomicU64,
    classes: Box<[OnceLock<Ends<T>>]>,
    overflow: Ends<(SizeClass, T)>,
}

const OVERFLOW_BIT: u64 = 1 << 63;

impl<T> Default for Inbox<T> {
    fn default() -> Self {
        Self {
            classes: (0..CLASS_COUNT).map(|_| OnceLock::new()).collect(),
            overflow: unbounded(),
            arrivals: AtomicU64::new(0),
        }
    }
}

impl<T> Inbox<T> {
    /// Leaves a value for the cleaner. Never blocks and never loses it.
    #[inline]
    pub(crate) fn push(&self, class: SizeClass, value: T) {
        let slot = &self.classes[class.index()];
        let (sender, _) = slot.get_or_init(|| bounded(SLOTS_PER_CLASS));
        match sender.try_send(value) {
            Ok(()) => self.flag(1 << class.index()),
            Err(TrySendError::Full(value) | TrySendError::Disconnected(value)) => {
                // The receiver lives beside the sender, so a refusal is impossible.
                let _ = self.overflow.0.send((class, value));
                self.flag(OVERFLOW_BIT);
            }
        }
    }

    /// Says that the cleaner should look at the class, without a value.
    pub(crate) fn flag_class(&self, class: SizeClass) {
        self.flag(1 << class.index());
    }

    #[inline]
    fn flag(&self, bit: u64) {
        // Set every time, even when it is set already: one atomic operation is cheaper than the fence
        // that a look before it would need to be ordered after the push.
        self.arrivals.fetch_or(bit, Ordering::SeqCst);
    }

    /// One value of the class, for a taker; never blocks.
    pub(crate) fn pop(&self, class: SizeClass) -> Option<T> {
        self.classes[class.index()].get()?.1.try_recv().ok()
    }

    /// Whether a look is worth while.
    pub(crate) fn has_arrivals(&self) -> bool {
        self.arrivals.load(Ordering::SeqCst) != 0
    }

    /// The classes in which something may wait; their flags are cleared, so look after this call.
    pub(crate) fn take_flags(&self) -> Flagged {
        let flags = self.arrivals.swap(0, Ordering::SeqCst);
        Flagged { classes: flags & !OVERFLOW_BIT, overflow: flags & OVERFLOW_BIT != 0 }
    }

    /// One value that found its class full.
    pub(crate) fn pop_overflow(&self) -> Option<T> {
        self.overflow.1.try_recv().ok().map(|(_, value)| value)
    }
}

/// The classes whose flag was set, smallest first.
pub(crate) struct Flagged {
    classes: u64,
    /// Something may wait in the overflow too.
    pub(crate) overflow: bool,
}

impl Iterator for Flagged {
    type Item = SizeClass;

    fn next(&mut self) -> Option<SizeClass> {
        if self.classes == 0 {
            return None;
        }
        let index = self.classes.trailing_zeros() as usize;
        self.classes &= self.classes - 1;
        Some(SizeClass::at(index))
    }
}

/// How the cleaner sleeps and is woken.
///
/// Three states: *stopped* (no thread), *awake* (running, or napping on a timer), *parked* (sleeping
/// without a timer). A caller that finds it awake does nothing: the cleaner will look soon anyway,
/// and a taker that cannot wait harvests. So a drop makes a system call only after a silence.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    state: AtomicU32,
    sleeper: Mutex<Option<thread::Thread>>,
}

const STOPPED: u32 = 0;
const AWAKE: u32 = 1;
const PARKED: u32 = 2;

/// What a caller that rang has to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ring {
    /// Nothing: the cleaner is awake, or was just woken.
    Heard,
    /// There was no thread; the caller now owns the duty to start one.
    StartThread,
}

impl Bell {
    /// Called after leaving something in the inbox.
    #[inline]
    pub(crate) fn ring(&self) -> Ring {
        // The flag was set before this load, and `park` says "parked" before its last look at the flags,
        // all four sequentially consistent: one of the two sides sees the other.
        if self.state.load(Ordering::SeqCst) == AWAKE { Ring::Heard } else { self.ring_hard() }
    }

    /// Ends a nap as well; for rare commands that should not wait for the timer.
    #[cold]
    pub(crate) fn ring_hard(&self) -> Ring {
        match self.state.compare_exchange(STOPPED, AWAKE, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => Ring::StartThread,
            Err(_) => {
                self.nudge();
                Ring::Heard
            }
        }
    }

    /// Wakes the thread if there is one, parked or napping.
    pub(crate) fn nudge(&self) {
        let _ = self.state.compare_exchange(PARKED, AWAKE, Ordering::SeqCst, Ordering::SeqCst);
        if let Some(thread) = &*self.sleeper.lock() {
            thread.unpark();
        }
    }

    /// The cleaner's thread announces itself.
    pub(crate) fn attach(&self) {
        *self.sleeper.lock() = Some(thread::current());
    }

    /// Sleeps for at most `duration`, or until `ring_hard`.
    pub(crate) fn nap(&self, duration: Duration) {
        thread::park_timeout(duration);
    }

    /// Sleeps until rung, unless `must_look` finds something at the last moment.
    pub(crate) fn park(&self, must_look: impl Fn() -> bool) {
        if self.state.compare_exchange(AWAKE, PARKED, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return;
        }
        while !must_look() && self.state.load(Ordering::SeqCst) == PARKED {
            thread::park();
        }
        let _ = self.state.compare_exchange(PARKED, AWAKE, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// The cleaner's last act. False when something arrived meanwhile and the thread must go on.
    pub(crate) fn stop(&self, must_look: impl Fn() -> bool) -> bool {
        *self.sleeper.lock() = None;
        self.state.store(STOPPED, Ordering::SeqCst);
        if must_look()
            && self.state.compare_exchange(STOPPED, AWAKE, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        {
            self.attach();
            return false;
        }
        true
    }

    /// Undoes the duty that `StartThread` gave, when no thread could be started.
    pub(crate) fn not_started(&self) {
        self.state.store(STOPPED, Ordering::SeqCst);
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.state.load(Ordering::SeqCst) == STOPPED
    }
}

/// A queue to a background lane, bounded so that a hand-over allocates nothing.
#[derive(Debug)]
pub(crate) struct LaneQueue<T> {
    sender: Sender<T>,
    receiver: Receiver<T>,
}

impl<T> LaneQueue<T> {
    pub(crate) fn new(slots: usize) -> Self {
        let (sender, receiver) = bounded(slots);
        Self { sender, receiver }
    }

    /// Gives the value back when the queue is full.
    pub(crate) fn try_push(&self, value: T) -> Result<(), T> {
        self.sender.try_send(value).map_err(TrySendError::into_inner)
    }

    pub(crate) fn pop(&self) -> Option<T> {
        self.receiver.try_recv().ok()
    }

    /// Waits for a value.
    pub(crate) fn pop_wait(&self) -> Option<T> {
        self.receiver.recv().ok()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.receiver.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Arc;

    #[test]
    fn an_overflowing_class_loses_nothing() {
        let inbox = Inbox::default();
        let class = SizeClass::of(1).unwrap();
        let count = SLOTS_PER_CLASS * 2 + 7;
        (0..count).for_each(|number| inbox.push(class, number));
        let flagged = inbox.take_flags();
        assert!(flagged.overflow);
        let mut seen: Vec<_> = std::iter::from_fn(|| inbox.pop_overflow()).collect();
        for class in flagged {
            seen.extend(std::iter::from_fn(|| inbox.pop(class)));
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..count).collect::<Vec<_>>());
        assert!(!inbox.has_arrivals());
    }

    #[test]
    fn only_the_first_ring_of_a_stopped_bell_starts_a_thread() {
        let bell = Bell::default();
        assert_eq!(bell.ring(), Ring::StartThread);
        assert_eq!(bell.ring(), Ring::Heard);
        assert!(bell.stop(|| false));
        assert_eq!(bell.ring(), Ring::StartThread);
        assert!(!bell.is_stopped());
    }

    #[test]
    fn a_return_during_the_stop_keeps_the_thread() {
        let bell = Bell::default();
        bell.ring();
        assert!(!bell.stop(|| true));
        assert_eq!(bell.ring(), Ring::Heard);
    }

    #[test]
    fn a_parked_bell_is_heard() {
        let bell = Arc::new(Bell::default());
        bell.ring();
        let thread = {
            let bell = bell.clone();
            thread::spawn(move || {
                bell.attach();
                bell.park(|| false);
            })
        };
        let is = |state| bell.state.load(Ordering::SeqCst) == state;
        while !is(PARKED) {
            thread::yield_now();
        }
        assert_eq!(bell.ring(), Ring::Heard);
        let heard = is(AWAKE);
        bell.nudge(); // So that a failing test ends.
        thread.join().unwrap();
        assert!(heard, "the thread sleeps on, without a timer");
    }

    #[test]
    fn a_parked_thread_is_woken_by_what_arrives() {
        let bell = Arc::new(Bell::default());
        let inbox = Arc::new(Inbox::default());
        bell.ring();
        let thread = {
            let (bell, inbox) = (bell.clone(), inbox.clone());
            thread::spawn(move || {
                bell.attach();
                let mut seen = 0;
                while seen < 1000 {
                    bell.park(|| inbox.has_arrivals());
                    for class in inbox.take_flags() {
                        seen += std::iter::from_fn(|| inbox.pop(class)).count();
                    }
                }
            })
        };
        for number in 0..1000 {
            inbox.push(SizeClass::of(1).unwrap(), number);
            bell.ring();
        }
        thread.join().unwrap();
    }
}
