//! One class's shelf: its lock, its blocks, and what is counted under the lock.

use super::stack::{self, Stack};
use crate::stats::Split;
use crate::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// One class: what a hit touches, on one cache line that no other class shares.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(super) struct ClassShelf {
    /// Both written under the lock of `blocks` only, so without atomic read-modify-writes.
    pub(super) hits: Split,
    pub(super) pooled: Pooled,
    pub(super) blocks: Mutex<Stack>,
    /// How many blocks may lie here. Written under the budget lock and the lock of `blocks`, so read under either.
    allotted: AtomicU32,
}

#[cfg(not(loom))]
const _: () = assert!(std::mem::offset_of!(ClassShelf, blocks) == 24, "a hit touches one cache line");

impl ClassShelf {
    #[inline]
    pub(super) fn allotted(&self) -> usize {
        self.allotted.load(Ordering::Relaxed) as usize
    }

    /// One more may lie here, without the queue having to grow for it. The caller holds the budget lock.
    pub(super) fn allot(&self) {
        let allotted = self.allotted() + 1;
        stack::reserve(&self.blocks, allotted);
        let _blocks = self.blocks.lock();
        self.allotted.store(allotted as u32, Ordering::Relaxed);
    }

    /// One fewer may; the caller holds both locks.
    pub(super) fn withdraw(&self) {
        self.allotted.store(self.allotted.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
    }

    /// Takes back what no block lies on; gives what is left. The caller holds the budget lock.
    pub(super) fn take_back(&self) -> usize {
        if self.allotted() > 0 {
            let blocks = self.blocks.lock();
            self.allotted.store(blocks.len() as u32, Ordering::Relaxed);
        }
        self.allotted()
    }
}

/// How many blocks lie on a shelf: pageable ones in the lower half, pinned ones in the upper. One word, so that whoever
/// reads without the lock never counts more than there were at some moment, while one kind goes and the other comes.
#[derive(Debug, Default)]
pub(super) struct Pooled(AtomicU64);

impl Pooled {
    /// Pageable and pinned.
    pub(super) fn by_kind(&self) -> [usize; 2] {
        let both = self.0.load(Ordering::Relaxed);
        [both as u32 as usize, (both >> 32) as usize]
    }

    pub(super) fn total(&self) -> usize {
        self.by_kind().iter().sum()
    }

    /// One more; the caller holds the lock of the blocks, so no atomic read-modify-write is needed.
    #[inline]
    pub(super) fn add(&self, pinned: bool) {
        self.0.store(self.0.load(Ordering::Relaxed) + Self::one(pinned), Ordering::Relaxed);
    }

    /// One fewer; as [`Self::add`].
    #[inline]
    pub(super) fn subtract(&self, pinned: bool) {
        self.0.store(self.0.load(Ordering::Relaxed) - Self::one(pinned), Ordering::Relaxed);
    }

    #[inline]
    fn one(pinned: bool) -> u64 {
        1 << (32 * u32::from(pinned))
    }
}
