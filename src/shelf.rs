//! Ready blocks by class, one byte cap, and whom to evict.
//!
//! The cap's bytes are allotted to classes, block by block, under the *budget* lock. A class keeps what it was allotted
//! when a taker takes a block off, and the next block goes there under the lock of the class alone: a round of one pop
//! and one push never asks for the budget. So `pooled <= allotted` in each class, all that is allotted is within the cap,
//! and `pooled_bytes <= cap` holds at every moment. Whoever evicts holds the budget lock and takes back first what no
//! block lies on: from there on pooled bytes can only fall, until the lock is released.
//!
//! Lock order: the budget, then one class.
//!
//! A buffer in use keeps its pool alive. That reference is not counted up by every take and down by every drop: whoever
//! puts a block on a shelf leaves one there, and whoever takes the block off takes it over.
#![allow(unsafe_code)] // Takes over references that were left behind as a number.

mod class;
mod evict;
mod stack;
#[cfg(all(test, not(loom)))]
mod tests;

use crate::block::Ready;
use crate::boundary::Boundary;
use crate::clock::Clock;
use crate::size_class::SizeClass;
use crate::stats::{Counts, ShelfCounts};
use crate::sync::{Arc, Mutex};
use class::ClassShelf;
use stack::Shelved;
use std::sync::Weak;

/// Each mapping with advice of its own is one of the process's 65 530 map areas, and drivers stop near
/// 65 000 registrations; so many blocks at most are kept idle.
const MAX_POOLED_BLOCKS: usize = 16_384;

/// The shelves of a pool, and what is kept alive by every block on them.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Shelf<T> {
    classes: Arc<[ClassShelf]>,
    owner: Weak<T>,
    /// Its address, which a weak reference looks up in several steps.
    owner_address: usize,
    budget: Mutex<Budget>,
    counts: Arc<Counts>,
    clock: Arc<Clock>,
}

#[derive(Debug)]
struct Budget {
    cap_bytes: usize,
    boundary: Boundary,
    /// What is allotted to all classes together; at most the cap, and `MAX_POOLED_BLOCKS`.
    allotted_bytes: usize,
    allotted_blocks: usize,
}

/// The shelves as a take sees them. A pool's handle has one, so that on a cold take the lines of the class and of the
/// fork word are fetched side by side and not one after the other.
#[derive(Debug)]
pub(crate) struct Door<T> {
    classes: Arc<[ClassShelf]>,
    /// The one that blocks leave references to.
    owner: Arc<T>,
}

impl<T> Clone for Door<T> {
    fn clone(&self) -> Self {
        Self { classes: self.classes.clone(), owner: self.owner.clone() }
    }
}

impl<T> Door<T> {
    /// The most recently shelved block of the class: its pages are the warmest. With the reference that it left behind.
    // Part of every hit: as a call it is twenty instructions more.
    #[inline(always)]
    pub(crate) fn pop(&self, class: SizeClass) -> Option<(Ready, Arc<T>)> {
        let block = pop(&self.classes, class)?;
        // SAFETY: the block was on a shelf of this owner, and nobody else has it.
        Some((block, unsafe { take_over(Arc::as_ptr(&self.owner)) }))
    }

    pub(crate) fn owner(&self) -> &Arc<T> {
        &self.owner
    }
}

#[inline(always)]
fn pop(classes: &[ClassShelf], class: SizeClass) -> Option<Ready> {
    let shelf = &classes[class.index()];
    let mut blocks = shelf.blocks.lock();
    let (block, pinned) = blocks.pop()?;
    shelf.hits.of(pinned).add_locked();
    shelf.pooled.subtract(pinned);
    Some(block)
}

/// The reference that a block left behind when it was shelved.
///
/// # Safety
///
/// Called once for every block that is taken off a shelf of this owner.
#[inline]
unsafe fn take_over<T>(owner: *const T) -> Arc<T> {
    // SAFETY: `Shelf::push` forgot one strong reference to the owner before the block lay on its shelf, so the value is
    // alive, and this is that reference.
    unsafe { Arc::from_raw(owner) }
}

/// What came of putting a block on its shelf.
#[derive(Debug)]
pub(crate) enum Placed {
    Kept,
    /// The cap has no room for it: it is larger than the cap, or than all that could make room for it.
    Refused(Ready),
    /// The context that it was registered in has ended.
    Stranded(Ready),
}

impl<T> Shelf<T> {
    pub(crate) fn new(cap_bytes: usize, counts: Arc<Counts>, clock: Arc<Clock>, owner: Weak<T>) -> Self {
        let budget =
            Budget { cap_bytes, boundary: Boundary::default(), allotted_bytes: 0, allotted_blocks: 0 };
        Self {
            classes: counts.all_classes().all().map(|_| ClassShelf::default()).collect(),
            owner_address: owner.as_ptr() as usize,
            owner,
            budget: Mutex::new(budget),
            counts,
            clock,
        }
    }

    /// A way to the shelves that follows no other pointer first.
    ///
    /// # Panics
    ///
    /// For another owner.
    pub(crate) fn door(&self, owner: Arc<T>) -> Door<T> {
        self.check_owner(&owner);
        Door { classes: self.classes.clone(), owner }
    }

    #[inline]
    fn check_owner(&self, owner: &Arc<T>) {
        assert!(
            std::ptr::addr_eq(Arc::as_ptr(owner), self.owner_address as *const ()),
            "another pool's block"
        );
    }

    /// See [`Door::pop`].
    #[inline]
    pub(crate) fn pop(&self, class: SizeClass) -> Option<(Ready, Arc<T>)> {
        let block = pop(&self.classes, class)?;
        Some((block, self.redeem()))
    }

    /// For a block that was just taken off.
    fn redeem(&self) -> Arc<T> {
        // SAFETY: called where a block was just taken off a shelf of this owner, and nowhere else.
        unsafe { take_over(self.owner.as_ptr()) }
    }

    /// Hits and pooled buffers of a class, for the statistics.
    pub(crate) fn counts(&self, class: SizeClass) -> ShelfCounts {
        let shelf = &self.classes[class.index()];
        ShelfCounts {
            hits: [false, true].map(|pinned| shelf.hits.of(pinned).read()),
            pooled: shelf.pooled.by_kind().map(|blocks| blocks as u64),
        }
    }

    /// Puts a block on its shelf, evicting largest-first until it fits; what was evicted goes to `evicted`. The block
    /// leaves the reference to its owner there.
    ///
    /// Smaller blocks are not evicted for it: it would be the largest, and so the first to go.
    ///
    /// # Panics
    ///
    /// For a reference to another owner.
    pub(crate) fn push(&self, block: Ready, owner: Arc<T>, mut evicted: impl FnMut(Ready)) -> Placed {
        self.check_owner(&owner);
        let shelf = &self.classes[block.class().index()];
        let (pinned, since) = (block.is_pinned(), self.clock.recent());
        loop {
            let mut blocks = shelf.blocks.lock();
            // Under the lock: whoever ends a context marks it first, and then looks through every shelf.
            if block.is_stranded() {
                return Placed::Stranded(block);
            }
            if blocks.len() < shelf.allotted() {
                // Before anybody can take the block off.
                std::mem::forget(owner);
                blocks.push(Shelved { block, pinned, since });
                shelf.pooled.add(pinned);
                return Placed::Kept;
            }
            drop(blocks);
            if !self.allot(block.class(), pinned, &mut evicted) {
                return Placed::Refused(block);
            }
        }
    }

    /// Allots one more block to a class, if the cap has it.
    #[cold]
    #[inline(never)]
    fn allot(&self, class: SizeClass, pinned: bool, evicted: &mut impl FnMut(Ready)) -> bool {
        let mut budget = self.budget.lock();
        let Some(room_bytes) = budget.cap_bytes.checked_sub(class.bytes()) else { return false };
        let may_be_full = budget.allotted_bytes > room_bytes || budget.allotted_blocks >= MAX_POOLED_BLOCKS;
        if may_be_full && !self.make_room(&mut budget, class, pinned, evicted) {
            return false;
        }
        budget.allotted_bytes = budget.allotted_bytes.saturating_add(class.bytes());
        budget.allotted_blocks += 1;
        self.classes[class.index()].allot();
        true
    }

    /// Whether a block that is not page-locked yet is worth it: it fits under the cap without pushing
    /// out a block of its own class or a smaller one, which is page-locked already.
    /// `promised_bytes` are on their way to those shelves already.
    pub(crate) fn has_room_for(&self, class: SizeClass, promised_bytes: usize) -> bool {
        self.fits(&self.budget.lock(), class, promised_bytes)
    }

    /// As [`Self::has_room_for`], and where the cap was too small lately, all that is page-locked has to fit:
    /// besides what is promised, `off_shelf` blocks of a class are out or on their way.
    pub(crate) fn admits(
        &self,
        class: SizeClass,
        promised_bytes: usize,
        off_shelf: impl Fn(SizeClass) -> usize,
    ) -> bool {
        let now = self.clock.now();
        let mut budget = self.budget.lock();
        self.fits(&budget, class, promised_bytes) && {
            let all_fits = || {
                let smaller = self.all_classes().take_while(|other| *other <= class);
                let off_shelf_bytes = smaller.map(|other| off_shelf(other).saturating_mul(other.bytes()));
                let claimed_bytes = off_shelf_bytes.fold(promised_bytes, usize::saturating_add);
                self.fits(&budget, class, claimed_bytes)
            };
            let mut boundary = budget.boundary;
            let admitted = boundary.admits(now, all_fits);
            budget.boundary = boundary;
            admitted
        }
    }

    fn fits(&self, budget: &Budget, class: SizeClass, promised_bytes: usize) -> bool {
        let kept = self.pooled_by_class().filter(|(other, _)| *other <= class).map(|(_, bytes)| bytes);
        let kept_bytes = kept.fold(promised_bytes, usize::saturating_add);
        kept_bytes.saturating_add(class.bytes()) <= budget.cap_bytes
    }

    pub(crate) fn cap_bytes(&self) -> usize {
        self.budget.lock().cap_bytes
    }

    /// Runs `look` while no class is allotted anything, so that what it adds up, class by class, is never above the cap.
    pub(crate) fn while_within_the_cap<R>(&self, look: impl FnOnce() -> R) -> R {
        let _budget = self.budget.lock();
        look()
    }

    /// Bytes on all shelves.
    #[cfg(loom)]
    pub(crate) fn pooled_bytes(&self) -> usize {
        self.pooled_by_class().map(|(_, bytes)| bytes).fold(0, usize::saturating_add)
    }

    /// Smallest first.
    fn all_classes(&self) -> impl DoubleEndedIterator<Item = SizeClass> {
        self.counts.all_classes().all()
    }

    fn pooled_by_class(&self) -> impl Iterator<Item = (SizeClass, usize)> {
        self.all_classes().map(|class| {
            let buffers = self.classes[class.index()].pooled.total();
            (class, buffers.saturating_mul(class.bytes()))
        })
    }
}
