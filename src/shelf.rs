//! Ready blocks by class, one byte cap, and whom to evict.
//!
//! A taker wants the lock of its class for one pop. Whoever puts blocks on or takes others off holds the
//! *budget* lock, which no taker wants: under it pooled bytes can only fall, so a check against the
//! cap stays true, and `pooled_bytes <= cap` holds at every moment.
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
use crate::sync::{Arc, AtomicU32, Mutex, Ordering};
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
    /// Pageable and pinned blocks; at most `MAX_POOLED_BLOCKS`, so small numbers do.
    pooled: [AtomicU32; 2],
    blocks: Mutex<Stack>,
}

#[cfg(not(loom))]
const _: () = assert!(std::mem::offset_of!(ClassShelf, blocks) == 24, "a hit touches one cache line");

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

#[derive(Debug)]
struct Budget {
    cap_bytes: usize,
    boundary: Boundary,
    /// No more than this lies on the shelves: what did at the last count, and what was put there since. So most blocks
    /// are put there without a count.
    bytes_bound: usize,
    blocks_bound: usize,
}

/// The shelves as a take sees them. A pool's handle has one, so that on a cold take the lines of the class and of the
/// fork word are fetched side by side and not one after the other.
#[derive(Debug)]
pub(crate) struct Door<T> {
    classes: Arc<[ClassShelf]>,
    owner: Weak<T>,
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
        Some((block, unsafe { take_over(&self.owner) }))
    }
}

#[inline]
fn pop(classes: &[ClassShelf], class: SizeClass) -> Option<Ready> {
    let shelf = &classes[class.index()];
    let mut blocks = shelf.blocks.lock();
    let (block, pinned) = blocks.pop()?;
    shelf.hits.of(pinned).add_locked();
    shelf.count_pooled(pinned, |count| count - 1);
    Some(block)
}

/// The reference that a block left behind when it was shelved.
///
/// # Safety
///
/// Called once for every block that is taken off a shelf of this owner.
#[inline]
unsafe fn take_over<T>(owner: &Weak<T>) -> Arc<T> {
    // SAFETY: `Shelf::push` forgot one strong reference to the owner before the block lay on its shelf, so the value is
    // alive, and this is that reference.
    unsafe { Arc::from_raw(owner.as_ptr()) }
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
        let budget = Budget { cap_bytes, boundary: Boundary::default(), bytes_bound: 0, blocks_bound: 0 };
        Self {
            classes: counts.all_classes().all().map(|_| ClassShelf::default()).collect(),
            owner,
            budget: Mutex::new(budget),
            counts,
            clock,
        }
    }

    /// A way to the shelves that follows no other pointer first.
    pub(crate) fn door(&self) -> Door<T> {
        Door { classes: self.classes.clone(), owner: self.owner.clone() }
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
        unsafe { take_over(&self.owner) }
    }

    /// Hits and pooled buffers of a class, for the statistics.
    pub(crate) fn counts(&self, class: SizeClass) -> ShelfCounts {
        let shelf = &self.classes[class.index()];
        ShelfCounts {
            hits: [false, true].map(|pinned| shelf.hits.of(pinned).read()),
            pooled: [0, 1].map(|kind: usize| u64::from(shelf.pooled[kind].load(Ordering::Relaxed))),
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
        assert!(std::ptr::eq(Arc::as_ptr(&owner), self.owner.as_ptr()), "the block of another pool");
        let (class, pinned) = (block.class(), block.is_pinned());
        let mut budget = self.budget.lock();
        let Some(room_bytes) = budget.cap_bytes.checked_sub(class.bytes()) else {
            return Placed::Refused(block);
        };
        let may_be_full = budget.bytes_bound > room_bytes || budget.blocks_bound >= MAX_POOLED_BLOCKS;
        if may_be_full && !self.make_room(&mut budget, class, pinned, evicted) {
            return Placed::Refused(block);
        }
        budget.bytes_bound = budget.bytes_bound.saturating_add(class.bytes());
        budget.blocks_bound += 1;
        // Before anybody can take the block off.
        std::mem::forget(owner);
        let shelf = &self.classes[class.index()];
        let place = Shelved { block, pinned, since: self.clock.recent() };
        stack::push(&shelf.blocks, place, || shelf.count_pooled(pinned, |count| count + 1));
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
        self.evict_until(room_bytes, MAX_POOLED_BLOCKS - 1, class.index(), |other| {
            overflowed |= other.is_pinned();
            evicted(other);
        });
        (budget.bytes_bound, budget.blocks_bound) = (self.pooled_bytes(), self.pooled_blocks());
        let fits = budget.bytes_bound <= room_bytes;
        if overflowed || (pinned && !fits) {
            budget.boundary.overflowed(self.clock.now());
        }
        fits
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
        self.evict_until(cap_bytes, MAX_POOLED_BLOCKS, 0, evicted);
        budget.cap_bytes = cap_bytes;
    }

    /// Evicts to at most `bytes`, leaving the cap as it is.
    pub(crate) fn trim_to(&self, bytes: usize, evicted: impl FnMut(Ready)) {
        let _budget = self.budget.lock();
        self.evict_until(bytes, MAX_POOLED_BLOCKS, 0, evicted);
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
        let _budget = self.budget.lock();
        let mut freed_bytes = 0;
        for other in self.all_classes().rev().filter(|other| *other != class) {
            let has_pinned = || self.classes[other.index()].pooled[1].load(Ordering::Relaxed) > 0;
            while freed_bytes < bytes
                && has_pinned()
                && let Some(block) = self.pop_coldest(other, |since| since.age(now) >= rested)
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
        let _budget = self.budget.lock();
        for (class, shelf) in self.all_classes().zip(&self.classes[..]) {
            let mut next = 0;
            loop {
                let mut stack = shelf.blocks.lock();
                let blocks = stack.all();
                let end = blocks.len().min(next + LOOKS);
                // Takers take from the other end, and nobody puts any on while the budget is held.
                let found = (next..end).find(|place| blocks[*place].block.is_stranded());
                next = found.unwrap_or(end);
                let Some(Shelved { block, pinned, .. }) = found.and_then(|place| blocks.remove(place)) else {
                    if end >= blocks.len() {
                        break;
                    }
                    continue;
                };
                shelf.count_pooled(pinned, |count| count - 1);
                drop(stack);
                drop(self.redeem());
                self.counts.class(class).evictions.add(1);
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

    /// Smallest first.
    fn all_classes(&self) -> impl DoubleEndedIterator<Item = SizeClass> {
        self.counts.all_classes().all()
    }

    fn pooled_by_class(&self) -> impl Iterator<Item = (SizeClass, usize)> {
        self.all_classes().map(|class| {
            let buffers = self.classes[class.index()].pooled_total();
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
        let _budget = self.budget.lock();
        for class in self.all_classes() {
            let shelf = &self.classes[class.index()];
            if shelf.pooled_total() == 0 {
                continue;
            }
            let is_old = |since: Tick| since.age(now) >= max_age(class);
            let old = shelf.blocks.lock().all().partition_point(|shelved| is_old(shelved.since));
            for _ in 0..old.div_ceil(8) {
                let Some(block) = self.pop_coldest(class, is_old) else { break };
                self.counts.class(class).aged_out.add(1);
                aged(block);
            }
        }
    }

    /// The time until a block is too old for [`Self::age_out`]; `None` when the shelves are empty.
    pub(crate) fn next_due(&self, max_age: impl Fn(SizeClass) -> Duration) -> Option<Duration> {
        let now = self.clock.tick();
        let used = self.all_classes().filter(|class| self.classes[class.index()].pooled_total() > 0);
        used.filter_map(|class| {
            let since = self.classes[class.index()].blocks.lock().all().front()?.since;
            Some(max_age(class).saturating_sub(since.age(now)))
        })
        .min()
    }

    /// Largest class first, none below the class at `lowest`, in each the block that lay longest; below it only to
    /// have fewer blocks. The caller holds the budget lock.
    fn evict_until(
        &self,
        bytes_max: usize,
        blocks_max: usize,
        lowest: usize,
        mut evicted: impl FnMut(Ready),
    ) {
        loop {
            let lowest = match (self.pooled_bytes() > bytes_max, self.pooled_blocks() > blocks_max) {
                (_, true) => 0,
                (true, false) => lowest,
                (false, false) => return,
            };
            let mut classes = self.all_classes().rev().take_while(|class| class.index() >= lowest);
            let Some(block) = classes.find_map(|class| self.pop_coldest(class, |_| true)) else {
                // Takers were faster, or what is left is smaller; there is nothing to evict.
                return;
            };
            self.counts.class(block.class()).evictions.add(1);
            evicted(block);
        }
    }

    fn pooled_blocks(&self) -> usize {
        self.classes.iter().map(ClassShelf::pooled_total).sum()
    }

    /// The block that lay longest, if it is to go. The caller holds the budget lock.
    fn pop_coldest(&self, class: SizeClass, goes: impl Fn(Tick) -> bool) -> Option<Ready> {
        let shelf = &self.classes[class.index()];
        if shelf.pooled_total() == 0 {
            return None;
        }
        let mut stack = shelf.blocks.lock();
        let blocks = stack.all();
        if !goes(blocks.front()?.since) {
            return None;
        }
        let Shelved { block, pinned, .. } = blocks.pop_front()?;
        shelf.count_pooled(pinned, |count| count - 1);
        drop(stack);
        drop(self.redeem());
        Some(block)
    }
}
