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

mod stack;
#[cfg(all(test, not(loom)))]
mod tests;

use crate::block::Ready;
use crate::boundary::Boundary;
use crate::clock::{Clock, Tick};
use crate::size_class::SizeClass;
use crate::stats::{Counts, ShelfCounts, Split};
use crate::sync::{Arc, AtomicU32, AtomicU64, Mutex, Ordering};
use stack::{Shelved, Stack};
use std::sync::Weak;
use std::time::Duration;

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

/// One class: what a hit touches, on one cache line that no other class shares.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct ClassShelf {
    /// Both written under the lock of `blocks` only, so without atomic read-modify-writes.
    hits: Split,
    pooled: Pooled,
    blocks: Mutex<Stack>,
    /// How many blocks may lie here. Written under the budget lock and the lock of `blocks`, so read under either.
    allotted: AtomicU32,
}

#[cfg(not(loom))]
const _: () = assert!(std::mem::offset_of!(ClassShelf, blocks) == 24, "a hit touches one cache line");

impl ClassShelf {
    #[inline]
    fn allotted(&self) -> usize {
        self.allotted.load(Ordering::Relaxed) as usize
    }

    /// Takes back what no block lies on; gives what is left. The caller holds the budget lock.
    fn take_back(&self) -> usize {
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
struct Pooled(AtomicU64);

impl Pooled {
    /// Pageable and pinned.
    fn by_kind(&self) -> [usize; 2] {
        let both = self.0.load(Ordering::Relaxed);
        [both as u32 as usize, (both >> 32) as usize]
    }

    fn total(&self) -> usize {
        self.by_kind().iter().sum()
    }

    /// One more; the caller holds the lock of the blocks, so no atomic read-modify-write is needed.
    #[inline]
    fn add(&self, pinned: bool) {
        self.0.store(self.0.load(Ordering::Relaxed) + Self::one(pinned), Ordering::Relaxed);
    }

    /// One fewer; as [`Self::add`].
    #[inline]
    fn subtract(&self, pinned: bool) {
        self.0.store(self.0.load(Ordering::Relaxed) - Self::one(pinned), Ordering::Relaxed);
    }

    #[inline]
    fn one(pinned: bool) -> u64 {
        1 << (32 * u32::from(pinned))
    }
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
    #[inline]
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
        assert!(std::ptr::addr_eq(Arc::as_ptr(owner), self.owner_address as *const ()), "another pool's block");
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
    pub(crate) fn push(&self, block: Ready, owner: Arc<T>, evicted: impl FnMut(Ready)) -> Placed {
        self.check_owner(&owner);
        let shelf = &self.classes[block.class().index()];
        let pinned = block.is_pinned();
        let since = self.clock.recent();
        let mut blocks = shelf.blocks.lock();
        if blocks.len() >= shelf.allotted() {
            drop(blocks);
            return self.push_beyond(Shelved { block, pinned, since }, owner, evicted);
        }
        // Before anybody can take the block off.
        std::mem::forget(owner);
        blocks.push(Shelved { block, pinned, since });
        shelf.pooled.add(pinned);
        Placed::Kept
    }

    /// More than was ever there since the last count: the class is allotted one more, if the cap has it.
    #[cold]
    #[inline(never)]
    fn push_beyond(&self, place: Shelved, owner: Arc<T>, evicted: impl FnMut(Ready)) -> Placed {
        let (class, pinned) = (place.block.class(), place.pinned);
        let mut budget = self.budget.lock();
        let Some(room_bytes) = budget.cap_bytes.checked_sub(class.bytes()) else {
            return Placed::Refused(place.block);
        };
        let may_be_full =
            budget.allotted_bytes > room_bytes || budget.allotted_blocks >= MAX_POOLED_BLOCKS;
        if may_be_full && !self.make_room(&mut budget, class, pinned, evicted) {
            return Placed::Refused(place.block);
        }
        budget.allotted_bytes = budget.allotted_bytes.saturating_add(class.bytes());
        budget.allotted_blocks += 1;
        std::mem::forget(owner);
        let shelf = &self.classes[class.index()];
        stack::push(&shelf.blocks, place, || {
            shelf.allotted.store(shelf.allotted.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            shelf.pooled.add(pinned);
        });
        Placed::Kept
    }

    /// Counts, and evicts until a block of the class fits; false when it cannot.
    #[cold]
    fn make_room(
        &self,
        budget: &mut Budget,
        class: SizeClass,
        pinned: bool,
        mut evicted: impl FnMut(Ready),
    ) -> bool {
        let room_bytes = budget.cap_bytes - class.bytes();
        let mut overflowed = false;
        self.evict_until(budget, room_bytes, MAX_POOLED_BLOCKS - 1, class.index(), |other| {
            overflowed |= other.is_pinned();
            evicted(other);
        });
        let fits = budget.allotted_bytes <= room_bytes;
        if overflowed || (pinned && !fits) {
            budget.boundary.overflowed(self.clock.now());
        }
        fits
    }

    /// Takes back from every class what no block lies on: what is allotted is what is pooled then, or was a moment ago.
    fn take_back(&self, budget: &mut Budget) {
        (budget.allotted_bytes, budget.allotted_blocks) = (0, 0);
        for (class, shelf) in self.all_classes().zip(&self.classes[..]) {
            let blocks = shelf.take_back();
            budget.allotted_blocks += blocks;
            budget.allotted_bytes =
                budget.allotted_bytes.saturating_add(blocks.saturating_mul(class.bytes()));
        }
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

    /// Changes the cap; when it returns, the shelves obey it.
    pub(crate) fn set_cap(&self, cap_bytes: usize, evicted: impl FnMut(Ready)) {
        let mut budget = self.budget.lock();
        // First the shelves, then the cap: whoever reads both never sees more pooled than allowed.
        self.evict_until(&mut budget, cap_bytes, MAX_POOLED_BLOCKS, 0, evicted);
        budget.cap_bytes = cap_bytes;
    }

    /// Evicts to at most `bytes`, leaving the cap as it is.
    pub(crate) fn trim_to(&self, bytes: usize, evicted: impl FnMut(Ready)) {
        self.evict_until(&mut self.budget.lock(), bytes, MAX_POOLED_BLOCKS, 0, evicted);
    }

    /// Evicts pinned blocks of other classes, largest first, until `bytes` page-locked bytes are freed; only
    /// such as lie on their shelf for at least `rested`.
    ///
    /// For the ceiling on page-locked memory: a class that is asked for takes from those that are not.
    pub(crate) fn evict_pinned_of_others(
        &self,
        class: SizeClass,
        bytes: usize,
        rested: Duration,
        mut evicted: impl FnMut(Ready),
    ) {
        let now = self.clock.tick();
        let mut budget = self.budget.lock();
        let mut freed_bytes = 0;
        for other in self.all_classes().rev().filter(|other| *other != class) {
            let has_pinned = || self.classes[other.index()].pooled.by_kind()[1] > 0;
            while freed_bytes < bytes
                && has_pinned()
                && let Some(block) = self.pop_coldest(&mut budget, other, |since| since.age(now) >= rested)
            {
                self.counts.class(block.class()).evictions.add(1);
                if block.is_pinned() {
                    freed_bytes += block.class().bytes();
                }
                evicted(block);
            }
        }
    }

    /// Evicts blocks whose registration vanished with its context, wherever they lie.
    pub(crate) fn evict_stranded(&self, mut evicted: impl FnMut(Ready)) {
        /// Blocks looked at under one hold of a lock that takers want.
        const LOOKS: usize = 64;
        let mut budget = self.budget.lock();
        // So that nobody puts any on while the budget is held.
        self.take_back(&mut budget);
        for (class, shelf) in self.all_classes().zip(&self.classes[..]) {
            let mut next = 0;
            loop {
                let mut stack = shelf.blocks.lock();
                let blocks = stack.all();
                let end = blocks.len().min(next + LOOKS);
                // Takers take from the other end, and what is put on since goes there too.
                let found = (next..end).find(|place| blocks[*place].block.is_stranded());
                next = found.unwrap_or(end);
                let Some(Shelved { block, pinned, .. }) = found.and_then(|place| blocks.remove(place)) else {
                    if end >= blocks.len() {
                        break;
                    }
                    continue;
                };
                self.took_off(&mut budget, class, pinned);
                drop(stack);
                drop(self.redeem());
                self.counts.class(class).evictions.add(1);
                evicted(block);
            }
        }
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

    /// Lets go of blocks that lie on a shelf for `max_age(class)` or longer, bit by bit: an eighth of those of each
    /// class, at least one.
    ///
    /// Shelves are last in, first out, so a block at the cold end that has lain for a time was not needed at any
    /// moment of it: it is what the shelf never fell below. That costs a hit nothing.
    pub(crate) fn age_out(&self, max_age: impl Fn(SizeClass) -> Duration, mut aged: impl FnMut(Ready)) {
        let now = self.clock.tick();
        let mut budget = self.budget.lock();
        for class in self.all_classes() {
            let shelf = &self.classes[class.index()];
            if shelf.pooled.total() == 0 {
                continue;
            }
            let is_old = |since: Tick| since.age(now) >= max_age(class);
            let old = shelf.blocks.lock().all().partition_point(|shelved| is_old(shelved.since));
            for _ in 0..old.div_ceil(8) {
                let Some(block) = self.pop_coldest(&mut budget, class, is_old) else { break };
                self.counts.class(class).aged_out.add(1);
                aged(block);
            }
        }
    }

    /// The time until a block is too old for [`Self::age_out`]; `None` when the shelves are empty.
    pub(crate) fn next_due(&self, max_age: impl Fn(SizeClass) -> Duration) -> Option<Duration> {
        let now = self.clock.tick();
        let used = self.all_classes().filter(|class| self.classes[class.index()].pooled.total() > 0);
        used.filter_map(|class| {
            let since = self.classes[class.index()].blocks.lock().all().front()?.since;
            Some(max_age(class).saturating_sub(since.age(now)))
        })
        .min()
    }

    /// Largest class first, none below the class at `lowest`, in each the block that lay longest; below it only to
    /// have fewer blocks. What is allotted afterwards is within these bounds, unless there was nothing more to evict.
    fn evict_until(
        &self,
        budget: &mut Budget,
        bytes_max: usize,
        blocks_max: usize,
        lowest: usize,
        mut evicted: impl FnMut(Ready),
    ) {
        loop {
            // Every time: what a taker took off meanwhile need not be evicted.
            self.take_back(budget);
            let lowest = match (budget.allotted_bytes > bytes_max, budget.allotted_blocks > blocks_max) {
                (_, true) => 0,
                (true, false) => lowest,
                (false, false) => return,
            };
            let mut classes = self.all_classes().rev().take_while(|class| class.index() >= lowest);
            let Some(block) = classes.find_map(|class| self.pop_coldest(budget, class, |_| true)) else {
                // Takers were faster, or what is left is smaller; there is nothing to evict.
                self.take_back(budget);
                return;
            };
            self.counts.class(block.class()).evictions.add(1);
            evicted(block);
        }
    }

    /// The block that lay longest, if it is to go; its room in the budget goes with it.
    fn pop_coldest(
        &self,
        budget: &mut Budget,
        class: SizeClass,
        goes: impl Fn(Tick) -> bool,
    ) -> Option<Ready> {
        let shelf = &self.classes[class.index()];
        if shelf.pooled.total() == 0 {
            return None;
        }
        let mut stack = shelf.blocks.lock();
        let blocks = stack.all();
        if !goes(blocks.front()?.since) {
            return None;
        }
        let Shelved { block, pinned, .. } = blocks.pop_front()?;
        self.took_off(budget, class, pinned);
        drop(stack);
        drop(self.redeem());
        Some(block)
    }

    /// A block was evicted; the caller holds the lock of its class as well.
    fn took_off(&self, budget: &mut Budget, class: SizeClass, pinned: bool) {
        let shelf = &self.classes[class.index()];
        shelf.pooled.subtract(pinned);
        shelf.allotted.store(shelf.allotted.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
        budget.allotted_blocks -= 1;
        budget.allotted_bytes = budget.allotted_bytes.saturating_sub(class.bytes());
    }
}
