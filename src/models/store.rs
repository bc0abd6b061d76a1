//! Models of what threads share and look things up in: shelves, events, the record of regions, reservations.

use super::check;
use super::device::{Device, stream_ref};
use crate::block::{Fate, Out, Proof, Ready};
use crate::clock::Clock;
use crate::contexts::Contexts;
use crate::driver::Driver;
use crate::events;
use crate::pages::Pages;
use crate::regions::{self, ExternalRegion};
use crate::shelf::{Placed, Shelf};
use crate::size_class::{Classes, SizeClass};
use crate::stats::Counts;
use crate::sync::{Arc, AtomicBool, Ordering, Progress, thread};

/// A shelf, and what every block on it keeps alive.
#[derive(Clone)]
struct Shelves {
    owner: Arc<()>,
    shelf: Arc<Shelf<()>>,
}

impl Shelves {
    fn new(cap_bytes: usize) -> Self {
        let (owner, clock) = (Arc::new(()), Arc::new(Clock::default()));
        let counts = Arc::new(Counts::default());
        let shelf = Shelf::new(cap_bytes, counts, clock, Arc::downgrade(&owner));
        Self { owner, shelf: Arc::new(shelf) }
    }

    fn push(&self, class: SizeClass) {
        let mut evicted = Vec::new();
        let placed = self.shelf.push(ready(class), self.owner.clone(), |block| evicted.push(block));
        evicted.into_iter().for_each(free);
        if let Placed::Refused(block) | Placed::Stranded(block) = placed {
            free(block);
        }
    }

    fn pop(&self, class: SizeClass) -> Option<Ready> {
        // With the reference that it left behind, which ends here.
        self.shelf.pop(class).map(|(block, _)| block)
    }

    /// At the end: nothing is on the shelf, and no reference to its owner is lost or given twice.
    fn end(self) {
        self.shelf.trim_to(0, free);
        assert_eq!(self.shelf.pooled_bytes(), 0);
        assert_eq!(Arc::strong_count(&self.owner), 1, "references to the owner");
    }
}

fn ready(class: SizeClass) -> Ready {
    let out = Out::fresh(Pages::map(class.bytes()).expect("a page"), class);
    assert_eq!(out.fate(), Fate::Recorded);
    let driver = Driver::host_only();
    let block = out.give_back(0, None, 0, 0).settle(&driver, Proof::NothingOutstanding);
    block.into_ready(&driver).expect("nothing is dirty")
}

fn free(block: Ready) {
    block.retire().release(&Driver::host_only());
}

pub fn a_shelved_block_is_popped_once_and_the_counts_stay_right() {
    check(Some(3), || {
        let (shelves, class) = (Shelves::new(8), Classes::POWERS_OF_TWO.at(0));
        shelves.push(class);
        let popper = {
            let shelves = shelves.clone();
            thread::spawn(move || shelves.pop(class))
        };
        let pusher = {
            let shelves = shelves.clone();
            thread::spawn(move || shelves.push(class))
        };
        let popped = [shelves.pop(class), popper.join().unwrap()];
        pusher.join().unwrap();
        let left = 2 - popped.iter().flatten().count();
        assert!(left <= 1, "a block was on the shelf all the time");
        assert_eq!(shelves.shelf.pooled_bytes(), left * class.bytes());
        popped.into_iter().flatten().for_each(free);
        shelves.end();
    });
}

pub fn the_cap_holds_at_every_moment() {
    check(Some(2), || {
        let (shelves, small, large) =
            (Shelves::new(2), Classes::POWERS_OF_TWO.at(0), Classes::POWERS_OF_TWO.at(1));
        shelves.push(small);
        let pushers = [small, large].map(|class| {
            let shelves = shelves.clone();
            thread::spawn(move || shelves.push(class))
        });
        let popper = {
            let shelves = shelves.clone();
            thread::spawn(move || shelves.pop(small).into_iter().for_each(free))
        };
        // As the statistics are read.
        let pooled_bytes = shelves.shelf.while_within_the_cap(|| shelves.shelf.pooled_bytes());
        assert!(pooled_bytes <= 2, "{pooled_bytes} bytes are pooled");
        pushers.into_iter().for_each(|pusher| pusher.join().unwrap());
        popper.join().unwrap();
        assert!(shelves.shelf.pooled_bytes() <= 2);
        shelves.end();
    });
}

pub fn a_lowered_cap_is_obeyed_when_the_call_returns() {
    check(Some(3), || {
        let (shelves, class) = (Shelves::new(2), Classes::POWERS_OF_TWO.at(0));
        shelves.push(class);
        let pusher = {
            let shelves = shelves.clone();
            thread::spawn(move || {
                shelves.push(class);
                let cap_bytes = shelves.shelf.cap_bytes();
                let pooled_bytes = shelves.shelf.while_within_the_cap(|| shelves.shelf.pooled_bytes());
                assert!(pooled_bytes <= cap_bytes, "whoever reads both sees {pooled_bytes} of {cap_bytes}");
            })
        };
        shelves.shelf.set_cap(1, free);
        assert!(shelves.shelf.pooled_bytes() <= 1, "the call has returned");
        pusher.join().unwrap();
        assert!(shelves.shelf.pooled_bytes() <= 1, "what is pushed later obeys too");
        shelves.end();
    });
}

pub fn the_room_that_a_taker_made_goes_with_the_cap() {
    check(Some(3), || {
        let (shelves, class) = (Shelves::new(2), Classes::POWERS_OF_TWO.at(0));
        shelves.push(class);
        let user = {
            let shelves = shelves.clone();
            thread::spawn(move || {
                if let Some(block) = shelves.pop(class) {
                    free(block);
                    shelves.push(class);
                }
            })
        };
        shelves.shelf.set_cap(0, free);
        assert_eq!(shelves.shelf.pooled_bytes(), 0, "the call has returned");
        user.join().unwrap();
        assert_eq!(shelves.shelf.pooled_bytes(), 0, "what is pushed later obeys too");
        shelves.end();
    });
}

pub fn an_event_is_never_given_to_two_uses() {
    check(Some(2), || {
        let device = Device::new();
        let driver = device.driver();
        let context = Contexts::default().of_stream(&driver, &stream_ref());
        let record = move || {
            let new_use = || {
                let recorded = events::record(&driver, context.clone(), None, &stream_ref(), None);
                recorded.unwrap_or_else(|_| panic!("the device records"))
            };
            let used = new_use();
            // Not waited for by anybody any more; perhaps pending.
            events::discard(&driver, used);
            new_use()
        };
        let other = {
            let record = record.clone();
            thread::spawn(move || record().event)
        };
        let finisher = {
            let device = device.clone();
            thread::spawn(move || device.finish())
        };
        let mine = record().event;
        assert_ne!(mine, other.join().unwrap(), "both wait for the same event");
        finisher.join().unwrap();
    });
}

pub fn what_is_registered_is_never_missed_by_a_look_up() {
    check(Some(3), || {
        let (ours, others) = (4096 as *const u8, 8192 as *const u8);
        let registered = Arc::new(AtomicBool::new(false));
        let writer = {
            let registered = registered.clone();
            thread::spawn(move || {
                let ours = ExternalRegion::note(4096 as *const u8, 4096);
                registered.store(true, Ordering::Release);
                drop(ExternalRegion::note(8192 as *const u8, 4096));
                ours
            })
        };
        let is_registered = registered.load(Ordering::Acquire);
        assert!(regions::is_pinned(ours) || !is_registered, "registered, and the record says no");
        drop(writer.join().unwrap());
        assert_eq!((regions::live_count(), regions::is_pinned(others)), (0, false));
    });
}

pub fn a_waiter_never_misses_an_announcement() {
    check(None, || {
        let shared = Arc::new((Progress::default(), AtomicBool::new(false)));
        let other = {
            let shared = shared.clone();
            thread::spawn(move || {
                // Relaxed, as the counters are.
                shared.1.store(true, Ordering::Relaxed);
                shared.0.announce();
            })
        };
        assert!(shared.0.wait_until(None, || shared.1.load(Ordering::Relaxed)));
        other.join().unwrap();
    });
}

pub fn no_more_is_reserved_than_the_ceiling_allows() {
    check(None, || {
        let counts = Arc::new(Counts::default());
        let other = {
            let counts = counts.clone();
            thread::spawn(move || counts.reserve(1, 1))
        };
        let mine = counts.reserve(1, 1);
        assert!(mine != other.join().unwrap(), "one of two fits");
        counts.unreserve(1);
        assert_eq!(counts.reserved_bytes(), 0);
    });
}
