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
    let (block, reference) = shelf.door().pop(class).unwrap();
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
