//! Ready blocks by class, one byte cap, and whom to evict.
//!
//! A taker wants the lock of its class for one pop. Whoever puts blocks on or takes others off holds the
//! *budget* lock, which no taker wants: under it pooled bytes can only fall, so a check against the
//! cap stays true, and `pooled_bytes <= cap` holds at every moment.
//!
//! Lock order: the budget, then one class.

use crate::block::Ready;
use crate::size_class::{CLASS_COUNT, SizeClass};
use crate::stats::{Counts, ShelfCounts, Split};
use crate::sync::{Arc, AtomicU32, Mutex, Ordering, push_reserved_then};
use std::collections::VecDeque;

/// Each mapping with advice of its own is one of the process's 65 530 map areas, and drivers stop near
/// 65 000 registrations; so many blocks at most are kept idle.
const MAX_POOLED_BLOCKS: usize = 16_384;

/// The shelves of a pool.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Shelf {
    classes: Arc<[ClassShelf]>,
    budget: Mutex<Budget>,
    counts: Arc<Counts>,
}

/// One class: what a hit touches, on one cache line that no other class shares.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct ClassShelf {
    blocks: Mutex<VecDeque<Shelved>>,
    /// Both written under the lock of `blocks` only, so without atomic read-modify-writes.
    hits: Split,
    /// Pageable and pinned blocks; at most `MAX_POOLED_BLOCKS`, so small numbers do.
    pooled: [AtomicU32; 2],
}

#[cfg(not(loom))]
const _: () = assert!(std::mem::offset_of!(ClassShelf, pooled) + 8 <= 64, "a hit touches one cache line");

impl ClassShelf {
    /// Blocks here; read without the lock, it may be a moment old.
    fn pooled_total(&self) -> usize {
        self.pooled.iter().map(|count| count.load(Ordering::Relaxed) as usize).sum()
    }

    /// Changes the number of blocks by one; the caller holds the lock of `blocks`.
    #[inline]
    fn count_pooled(&self, pinned: bool, change: impl FnOnce(u32) -> u32) {
        let count = &self.pooled[usize::from(pinned)];
        count.store(change(count.load(Ordering::Relaxed)), Ordering::Relaxed);
    }
}

/// A block with what a hit must know of it, so that the block itself is not touched before its user does.
#[derive(Debug)]
struct Shelved {
    block: Ready,
    pinned: bool,
}

#[derive(Debug)]
struct Budget {
    cap_bytes: usize,
}

/// The shelves as a take sees them. A pool's handle has one, so that on a cold take the lines of the class, of
/// the reference count and of the fork word are fetched side by side and not one after the other.
#[derive(Debug, Clone)]
pub(crate) struct Door {
    classes: Arc<[ClassShelf]>,
}

impl Door {
    /// The most recently shelved block of the class: its pages are the warmest.
    #[inline]
    pub(crate) fn pop(&self, class: SizeClass) -> Option<Ready> {
        pop(&self.classes, class)
    }
}

#[inline]
fn pop(classes: &[ClassShelf], class: SizeClass) -> Option<Ready> {
    let shelf = &classes[class.index()];
    let mut blocks = shelf.blocks.lock();
    let Shelved { block, pinned } = blocks.pop_back()?;
    shelf.hits.of(pinned).add_locked();
    shelf.count_pooled(pinned, |count| count - 1);
    Some(block)
}

/// What came of putting a block on its shelf.
#[derive(Debug)]
pub(crate) enum Placed {
    Kept,
    /// It can never fit under the cap.
    Refused(Ready),
}

impl Shelf {
    pub(crate) fn new(cap_bytes: usize, counts: Arc<Counts>) -> Self {
        Self {
            classes: (0..CLASS_COUNT).map(|_| ClassShelf::default()).collect(),
            budget: Mutex::new(Budget { cap_bytes }),
            counts,
        }
    }

    /// A way to the shelves that follows no other pointer first.
    pub(crate) fn door(&self) -> Door {
        Door { classes: self.classes.clone() }
    }

    /// See [`Door::pop`].
    #[inline]
    pub(crate) fn pop(&self, class: SizeClass) -> Option<Ready> {
        pop(&self.classes, class)
    }

    /// Hits and pooled buffers of a class, for the statistics.
    pub(crate) fn counts(&self, class: SizeClass) -> ShelfCounts {
        let shelf = &self.classes[class.index()];
        ShelfCounts {
            hits: [false, true].map(|pinned| shelf.hits.of(pinned).read()),
            pooled: [0, 1].map(|kind: usize| u64::from(shelf.pooled[kind].load(Ordering::Relaxed))),
        }
    }

    /// Puts a block on its shelf, evicting largest-first until it fits; what was evicted goes to `evicted`.
    pub(crate) fn push(&self, block: Ready, evicted: impl FnMut(Ready)) -> Placed {
        let class = block.class();
        let budget = self.budget.lock();
        if class.bytes() > budget.cap_bytes {
            return Placed::Refused(block);
        }
        self.evict_until(budget.cap_bytes - class.bytes(), MAX_POOLED_BLOCKS - 1, evicted);
        let shelf = &self.classes[class.index()];
        let pinned = block.is_pinned();
        let place = Shelved { block, pinned };
        push_reserved_then(
            &shelf.blocks,
            |blocks| blocks,
            place,
            |_| shelf.count_pooled(pinned, |count| count + 1),
        );
        Placed::Kept
    }

    /// Whether a block that is not page-locked yet is worth it: it fits under the cap without pushing
    /// out a block of its own class or a smaller one, which is page-locked already.
    /// `promised_bytes` are on their way to those shelves already.
    pub(crate) fn has_room_for(&self, class: SizeClass, promised_bytes: usize) -> bool {
        let cap_bytes = self.budget.lock().cap_bytes;
        let kept: usize =
            self.pooled_by_class().filter(|(other, _)| *other <= class).map(|(_, bytes)| bytes).sum();
        kept.saturating_add(promised_bytes).saturating_add(class.bytes()) <= cap_bytes
    }

    pub(crate) fn cap_bytes(&self) -> usize {
        self.budget.lock().cap_bytes
    }

    /// Changes the cap; when it returns, the shelves obey it.
    pub(crate) fn set_cap(&self, cap_bytes: usize, evicted: impl FnMut(Ready)) {
        let mut budget = self.budget.lock();
        // First the shelves, then the cap: whoever reads both never sees more pooled than allowed.
        self.evict_until(cap_bytes, MAX_POOLED_BLOCKS, evicted);
        budget.cap_bytes = cap_bytes;
    }

    /// Evicts to at most `bytes`, leaving the cap as it is.
    pub(crate) fn trim_to(&self, bytes: usize, evicted: impl FnMut(Ready)) {
        let _budget = self.budget.lock();
        self.evict_until(bytes, MAX_POOLED_BLOCKS, evicted);
    }

    /// Evicts pinned blocks of other classes, largest first, until `bytes` page-locked bytes are freed.
    ///
    /// For the ceiling on page-locked memory: a class that is asked for takes from those that are not.
    pub(crate) fn evict_pinned_of_others(
        &self,
        class: SizeClass,
        bytes: usize,
        mut evicted: impl FnMut(Ready),
    ) {
        let _budget = self.budget.lock();
        let mut freed_bytes = 0;
        for index in (0..CLASS_COUNT).rev().filter(|index| *index != class.index()) {
            let has_pinned = || self.classes[index].pooled[1].load(Ordering::Relaxed) > 0;
            while freed_bytes < bytes
                && has_pinned()
                && let Some(block) = self.pop_coldest(SizeClass::at(index))
            {
                if block.is_pinned() {
                    freed_bytes += block.class().bytes();
                }
                evicted(block);
            }
        }
    }

    /// Runs `look` while pooled bytes can only fall, so that what it adds up, class by class, is never above the cap.
    pub(crate) fn while_only_shrinking<R>(&self, look: impl FnOnce() -> R) -> R {
        let _budget = self.budget.lock();
        look()
    }

    /// Bytes on all shelves.
    pub(crate) fn pooled_bytes(&self) -> usize {
        self.pooled_by_class().map(|(_, bytes)| bytes).fold(0, usize::saturating_add)
    }

    fn pooled_by_class(&self) -> impl Iterator<Item = (SizeClass, usize)> {
        (0..CLASS_COUNT).map(SizeClass::at).map(|class| {
            let buffers = self.classes[class.index()].pooled_total();
            (class, buffers.saturating_mul(class.bytes()))
        })
    }

    /// Largest class first, in each the block that lay longest. The caller holds the budget lock.
    fn evict_until(&self, bytes_max: usize, blocks_max: usize, mut evicted: impl FnMut(Ready)) {
        while self.pooled_bytes() > bytes_max || self.pooled_blocks() > blocks_max {
            let victim = (0..CLASS_COUNT).rev().find_map(|index| self.pop_coldest(SizeClass::at(index)));
            match victim {
                Some(block) => evicted(block),
                // Takers were faster; there is nothing left to evict.
                None => return,
            }
        }
    }

    fn pooled_blocks(&self) -> usize {
        self.classes.iter().map(ClassShelf::pooled_total).sum()
    }

    fn pop_coldest(&self, class: SizeClass) -> Option<Ready> {
        let shelf = &self.classes[class.index()];
        if shelf.pooled_total() == 0 {
            return None;
        }
        let mut blocks = shelf.blocks.lock();
        let Shelved { block, pinned } = blocks.pop_front()?;
        shelf.count_pooled(pinned, |count| count - 1);
        drop(blocks);
        self.counts.class(class).evictions.add(1);
        Some(block)
    }
}
