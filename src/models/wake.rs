//! Models of the wake-up: the bell with the inbox, and the waits for progress.

use super::{FOREVER, check, take_all};
use crate::bell::{Bell, Ring};
use crate::inbox::Inbox;
use crate::size_class::Classes;
use crate::sync::{Arc, thread};

type Shared = Arc<(Bell, Inbox<u32>)>;

fn shared() -> Shared {
    Arc::new((Bell::default(), Inbox::default()))
}

fn drop_one(shared: &Shared) -> Ring {
    shared.1.push(Classes::POWERS_OF_TWO.at(0), 1);
    shared.0.ring()
}

pub fn a_return_is_never_slept_through() {
    check(Some(2), || {
        let shared = shared();
        assert_eq!(shared.0.ring(), Ring::StartThread);
        let cleaner = {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.0.attach();
                let mut seen = 0;
                while seen < 2 {
                    shared.0.park(|| shared.1.has_arrivals());
                    seen += take_all(&shared.1).len();
                }
            })
        };
        let other = {
            let shared = shared.clone();
            thread::spawn(move || assert_eq!(drop_one(&shared), Ring::Heard))
        };
        assert_eq!(drop_one(&shared), Ring::Heard);
        other.join().unwrap();
        cleaner.join().unwrap();
    });
}

pub fn a_return_during_the_stop_is_dealt_with_by_exactly_one_thread() {
    check(None, || {
        let shared = shared();
        assert_eq!(shared.0.ring(), Ring::StartThread);
        let cleaner = {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.0.attach();
                let mut seen = take_all(&shared.1).len();
                while !shared.0.stop(|| shared.1.has_arrivals()) {
                    seen += take_all(&shared.1).len();
                }
                seen
            })
        };
        let mut seen = 0;
        if drop_one(&shared) == Ring::StartThread {
            // This thread plays the one that it has the duty to start.
            shared.0.attach();
            // The old one may have seen the return before it stopped; then this one was started for nothing.
            seen = take_all(&shared.1).len();
        }
        seen += cleaner.join().unwrap();
        assert_eq!(seen, 1, "nobody saw the return");
    });
}

pub fn only_one_of_two_first_returns_starts_the_thread() {
    check(None, || {
        let shared = shared();
        let other = {
            let shared = shared.clone();
            thread::spawn(move || drop_one(&shared))
        };
        let mine = drop_one(&shared);
        let rings = [mine, other.join().unwrap()];
        assert_eq!(rings.iter().filter(|ring| **ring == Ring::StartThread).count(), 1);
        assert_eq!(take_all(&shared.1).len(), 2);
    });
}

pub fn a_return_ends_a_long_sleep_with_a_timer() {
    check(None, || {
        let shared = shared();
        assert_eq!(shared.0.ring(), Ring::StartThread);
        let cleaner = {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.0.attach();
                while take_all(&shared.1).is_empty() {
                    shared.0.park_for(FOREVER, || shared.1.has_arrivals());
                }
            })
        };
        assert_eq!(drop_one(&shared), Ring::Heard);
        cleaner.join().unwrap();
    });
}
