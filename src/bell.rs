//! How the cleaner sleeps and is woken: the only place where a caller may wake a thread.

use crate::sync::{AtomicU32, Instant, Mutex, Ordering, from_now, thread};
use std::time::Duration;

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

    /// As [`Self::park`], for at most `longest`. True when it was rung, or found something.
    pub(crate) fn park_for(&self, longest: Duration, must_look: impl Fn() -> bool) -> bool {
        if self.state.compare_exchange(AWAKE, PARKED, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return true;
        }
        let deadline = from_now(longest);
        let mut found = must_look();
        while !found && self.state.load(Ordering::SeqCst) == PARKED {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            thread::park_timeout(left);
            found = must_look();
        }
        let timed_out =
            self.state.compare_exchange(PARKED, AWAKE, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        found || !timed_out
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::inbox::Inbox;
    use crate::size_class::SizeClass;
    use crate::sync::Arc;

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
    fn a_sleep_with_a_timer_ends_by_itself_or_when_rung() {
        let bell = Arc::new(Bell::default());
        bell.ring();
        bell.attach();
        assert!(!bell.park_for(Duration::from_millis(1), || false), "nobody rang");
        assert!(bell.park_for(Duration::from_secs(600), || true), "there is something to look at");
        let ringer = {
            let bell = bell.clone();
            thread::spawn(move || {
                while bell.state.load(Ordering::SeqCst) != PARKED {
                    thread::yield_now();
                }
                bell.ring()
            })
        };
        assert!(bell.park_for(Duration::from_secs(600), || false), "rung");
        assert_eq!(ringer.join().unwrap(), Ring::Heard);
        assert_eq!(bell.ring(), Ring::Heard, "awake again, so a ring starts no other thread");
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
