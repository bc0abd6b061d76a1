//! What a block on a shelf keeps alive.

use super::*;
use crate::block::Out;
use crate::driver::Driver;
use crate::pages::Pages;

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
