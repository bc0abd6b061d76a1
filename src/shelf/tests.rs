//! What a block on a shelf keeps alive.

mod random;

use super::*;
use crate::block::Out;
#[cfg(feature = "sim")]
use crate::contexts::{Contexts, with_current};
use crate::driver::Driver;
#[cfg(feature = "sim")]
use crate::driver::{ContextHandle, with_relaxed_capture};
use crate::pages::Pages;
use crate::sync::thread;
use std::time::Duration;

fn ready() -> Ready {
    let class = SizeClass::of(1).unwrap();
    let out = Out::fresh(Pages::map(class.bytes()).unwrap(), class);
    out.never_handed_out().into_ready(&Driver::host_only()).unwrap()
}

#[test]
fn every_block_on_a_shelf_stands_for_one_reference_to_its_owner() {
    let owner = Arc::new(());
    let class = SizeClass::of(1).unwrap();
    let (counts, clock) = (Arc::new(Counts::default()), Arc::new(Clock::default()));
    let shelf = Shelf::new(8 * class.bytes(), counts, clock, Arc::downgrade(&owner));
    let mut gone = Vec::new();
    for _ in 0..10 {
        assert!(matches!(shelf.push(ready(), owner.clone(), |block| gone.push(block)), Placed::Kept));
    }
    assert_eq!((Arc::strong_count(&owner), gone.len()), (1 + 8, 2), "the evicted ones gave theirs back");
    let (block, reference) = shelf.pop(class).unwrap();
    assert_eq!(Arc::strong_count(&owner), 1 + 8, "taken over, not counted up");
    drop(reference);
    gone.push(block);
    assert_eq!(Arc::strong_count(&owner), 1 + 7);
    let (block, reference) = shelf.door(owner.clone()).pop(class).unwrap();
    drop(reference);
    gone.push(block);
    shelf.set_cap(0, |block| gone.push(block));
    let refused = shelf.push(ready(), owner.clone(), |_| ());
    assert!(matches!(refused, Placed::Refused(_)));
    assert_eq!(Arc::strong_count(&owner), 1);
    for block in gone {
        block.retire().release(&Driver::host_only());
    }
}

#[test]
fn what_is_not_page_locked_makes_no_room_under_the_ceiling() {
    let owner = Arc::new(());
    let class = SizeClass::of(1).unwrap();
    let shelf = Shelf::new(
        usize::MAX,
        Arc::new(Counts::default()),
        Arc::new(Clock::default()),
        Arc::downgrade(&owner),
    );
    for _ in 0..2 {
        assert!(matches!(shelf.push(ready(), owner.clone(), |_| ()), Placed::Kept));
    }
    let other = SizeClass::of(4 * class.bytes()).unwrap();
    shelf.evict_pinned_of_others(other, 1, Duration::ZERO, |_| panic!("it was pageable all along"));
    shelf.trim_to(0, |block| {
        block.retire().release(&Driver::host_only());
    });
}

#[test]
fn nothing_is_due_on_empty_shelves_and_a_block_is_when_it_is_too_old() {
    let owner = Arc::new(());
    let (counts, clock) = (Arc::new(Counts::default()), Arc::new(Clock::default()));
    let shelf = Shelf::new(usize::MAX, counts, clock, Arc::downgrade(&owner));
    let hour = Duration::from_secs(3600);
    assert_eq!(shelf.next_due(|_| hour), None);
    assert!(matches!(shelf.push(ready(), owner.clone(), |_| ()), Placed::Kept));
    let due = shelf.next_due(|_| hour).expect("there is one");
    assert!(due <= hour && due > hour / 2, "{due:?}");
    shelf.trim_to(0, |block| {
        block.retire().release(&Driver::host_only());
    });
}

#[test]
#[cfg(feature = "sim")]
fn a_block_whose_context_ended_on_the_way_is_not_shelved() {
    let sim = crate::sim::Sim::zero_cost();
    let (device, driver) = (sim.context(0), sim.driver());
    let contexts = Contexts::default();
    let context =
        contexts.learn_current(&driver, ContextHandle(device.handle())).unwrap().expect("it is alive");
    let class = SizeClass::of(1).unwrap();
    let registered = || {
        let mut block = Out::fresh(Pages::map(class.bytes()).unwrap(), class).never_handed_out();
        let register = || block.register(&driver, context.clone());
        with_relaxed_capture(&driver, || with_current(&driver, context.handle, register)).unwrap().unwrap();
        block.into_ready(&driver).unwrap()
    };
    let owner = Arc::new(());
    let (counts, clock) = (Arc::new(Counts::default()), Arc::new(Clock::default()));
    let shelf = Shelf::new(usize::MAX, counts, clock, Arc::downgrade(&owner));
    // One that was shelved and taken, so that its room is there still, and one that needs more.
    for _ in 0..2 {
        assert!(matches!(shelf.push(registered(), owner.clone(), |_| ()), Placed::Kept));
    }
    let mut out: Vec<_> = (0..2).map(|_| shelf.pop(class).expect("a block").0).collect();
    out.push(registered());
    assert!(contexts.end(&driver, &context));
    shelf.evict_stranded(|_| panic!("none lies there"));
    for block in out {
        let Placed::Stranded(block) = shelf.push(block, owner.clone(), |_| ()) else {
            panic!("its memory is not page-locked any more, and the next taker would be told that it is");
        };
        with_relaxed_capture(&driver, || block.retire().release(&driver));
    }
    assert_eq!((shelf.counts(class).pooled, Arc::strong_count(&owner)), ([0, 0], 1));
}

#[test]
fn room_that_nobody_lies_on_is_used_before_anything_is_evicted() {
    let owner = Arc::new(());
    let class = SizeClass::of(1).unwrap();
    let double = SizeClass::of(2 * class.bytes()).unwrap();
    let (counts, clock) = (Arc::new(Counts::default()), Arc::new(Clock::default()));
    let shelf = Shelf::new(4 * class.bytes(), counts, clock, Arc::downgrade(&owner));
    let push = |block| shelf.push(block, owner.clone(), |_| panic!("evicted, and there was room"));
    for _ in 0..4 {
        assert!(matches!(push(ready()), Placed::Kept));
    }
    let mut out: Vec<_> = (0..2).map(|_| shelf.pop(class).expect("a block").0).collect();
    let large = Out::fresh(Pages::map(double.bytes()).unwrap(), double);
    let large = large.never_handed_out().into_ready(&Driver::host_only()).unwrap();
    assert!(matches!(push(large), Placed::Kept), "two of the four places are free");
    out.extend((0..2).map(|_| shelf.pop(class).expect("a block").0));
    shelf.set_cap(double.bytes(), |_| panic!("evicted, and what lies there fits"));
    out.push(shelf.pop(double).expect("the large one").0);
    // Nobody has taken its room back.
    assert!(matches!(push(out.pop().unwrap()), Placed::Kept));
    assert_eq!(shelf.counts(double).pooled, [1, 0]);
    shelf.trim_to(0, |block| out.push(block));
    for block in out {
        block.retire().release(&Driver::host_only());
    }
}

#[test]
fn while_somebody_adds_up_what_is_pooled_no_class_gets_more_room() {
    let owner = Arc::new(());
    let class = SizeClass::of(1).unwrap();
    let (counts, clock) = (Arc::new(Counts::default()), Arc::new(Clock::default()));
    let shelf = Shelf::new(2 * class.bytes(), counts, clock, Arc::downgrade(&owner));
    let push = |block| assert!(matches!(shelf.push(block, owner.clone(), |_| ()), Placed::Kept));
    push(ready());
    // A push that needs none waits for nobody.
    let one = shelf.pop(class).expect("a block").0;
    shelf.while_within_the_cap(|| push(one));
    let (say, said) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        shelf.while_within_the_cap(|| {
            scope.spawn(|| {
                push(ready());
                say.send(()).unwrap();
            });
            assert!(
                said.recv_timeout(Duration::from_millis(50)).is_err(),
                "a sum of before and after is of no moment"
            );
        });
    });
    shelf.trim_to(0, |block| _ = block.retire().release(&Driver::host_only()));
}
