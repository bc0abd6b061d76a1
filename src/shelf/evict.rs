//! What leaves the shelves otherwise than by a take: for the cap, for the ceiling, for age, or with its context.

use super::stack::Shelved;
use super::{Budget, MAX_POOLED_BLOCKS, Shelf};
use crate::block::Ready;
use crate::clock::Tick;
use crate::size_class::SizeClass;
use std::time::Duration;

impl<T> Shelf<T> {
    /// Counts, and evicts until a block of the class fits; false when it cannot.
    #[cold]
    pub(super) fn make_room(
        &self,
        budget: &mut Budget,
        class: SizeClass,
        pinned: bool,
        evicted: &mut impl FnMut(Ready),
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
        for (class, shelf) in self.all_classes().zip(&self.classes[..]) {
            let mut next = 0;
            loop {
                let mut stack = shelf.blocks.lock();
                let blocks = stack.all();
                let end = blocks.len().min(next + LOOKS);
                // Takers take from the other end, and what comes since is not stranded: `push` sees to that.
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
                // Takers were faster, or what is left is smaller; there is nothing to evict, and no room left there
                // into which what was taken could come back.
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
        if shelf.allotted() == 0 {
            return None;
        }
        let mut stack = shelf.blocks.lock();
        let blocks = stack.all();
        let Some(coldest) = blocks.front() else {
            // Whoever took the blocks off shall not bring them back behind the back of the one who evicts.
            while shelf.allotted() > 0 {
                self.withdraw(budget, class);
            }
            return None;
        };
        if !goes(coldest.since) {
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
        self.classes[class.index()].pooled.subtract(pinned);
        self.withdraw(budget, class);
    }

    /// One block fewer may lie there; as [`Self::took_off`].
    fn withdraw(&self, budget: &mut Budget, class: SizeClass) {
        self.classes[class.index()].withdraw();
        budget.allotted_blocks -= 1;
        budget.allotted_bytes = budget.allotted_bytes.saturating_sub(class.bytes());
    }
}
