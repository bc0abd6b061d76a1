//! Blocks that were captured into graphs: they wait, off the queue, until the graphs are gone.
//!
//! The driver sets a flag for each graph and can wake nobody, so the flags are looked at: on the cleaner's passes, and
//! while it sleeps, by a wake-up now and then. Only while something is held.

use super::Cleaner;
use crate::block::Returned;
use crate::report::say;
use crate::sync::Instant;
use std::time::Duration;

/// How long until the next look, after a look that found something, and after many that did not.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// What the cleaner holds.
#[derive(Default)]
pub(super) struct ForGraphs {
    blocks: Vec<Returned>,
    next_look: Option<Instant>,
    pause: Duration,
}

impl ForGraphs {
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The longest that the cleaner may sleep; `None` while nothing is held.
    pub(super) fn longest_sleep(&self) -> Option<Duration> {
        (!self.is_empty()).then_some(self.pause)
    }

    fn add(&mut self, block: Returned) {
        self.blocks.push(block);
        self.look_soon();
    }

    fn look_soon(&mut self) {
        self.pause = PAUSE_MIN;
        self.next_look = None;
    }

    /// Takes out what no graph holds any more, if it is time to look.
    fn take_released(&mut self) -> Vec<Returned> {
        let now = Instant::now();
        if self.blocks.is_empty() || self.next_look.is_some_and(|next| now < next) {
            return Vec::new();
        }
        let mut released = Vec::new();
        let mut index = 0;
        while index < self.blocks.len() {
            match self.blocks[index].holds_are_over() {
                true => released.push(self.blocks.swap_remove(index)),
                false => index += 1,
            }
        }
        match released.is_empty() {
            true => self.pause = (self.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX),
            false => self.pause = PAUSE_MIN,
        }
        self.next_look = Some(now + self.pause);
        released
    }
}

impl Cleaner {
    /// A block that a replay may use at any time: dealt with, until its graphs are gone.
    pub(super) fn hold(&mut self, mut block: Returned) {
        if block.holds_are_over() {
            block.resume(block.epoch());
            return self.wait_for_contexts(block);
        }
        let (class, pinned) = (block.class(), block.is_pinned());
        let counts = self.home.counts.class(class);
        counts.held.of(pinned).add(1);
        counts.settled[block.epoch()].of(pinned).add(1);
        say!(DEBUG, "held", bytes = class.bytes(), pinned, "held for a graph that it was captured into");
        self.for_graphs.add(block);
    }

    /// What is released waits for the contexts like a block without a record, before it is zeroed and shelved.
    pub(super) fn look_at_held(&mut self) {
        if self.for_graphs.is_empty() {
            return;
        }
        for block in self.for_graphs.take_released() {
            self.idle_since = None;
            let block = self.resume(block);
            self.wait_for_contexts(block);
        }
    }

    /// Queued again, and counted so.
    fn resume(&mut self, mut block: Returned) -> Returned {
        let epoch = self.home.epoch();
        let counts = self.home.counts.class(block.class());
        let pinned = block.is_pinned();
        counts.resumed[epoch].of(pinned).add(1);
        counts.held.of(pinned).subtract(1);
        block.resume(epoch);
        block.stamp(Instant::now());
        block
    }

    /// The pool ends: what its graphs still hold is leaked, except what was returned too late for this end, which is
    /// given back.
    pub(super) fn end_held(&mut self) -> Vec<Returned> {
        let mut spared = Vec::new();
        for block in std::mem::take(&mut self.for_graphs).blocks {
            if self.home.stop_spares(block.generation()) {
                let (epoch, pinned) = (self.home.epoch(), block.is_pinned());
                let counts = self.home.counts.class(block.class());
                counts.resumed[epoch].of(pinned).add(1);
                counts.held.of(pinned).subtract(1);
                spared.push(block.queued_again(epoch));
            } else {
                let counts = self.home.counts.class(block.class());
                let (class, pinned) = (block.class(), block.is_pinned());
                counts.quarantined.of(pinned).add(1);
                counts.held.of(pinned).subtract(1);
                block.quarantine();
                let reason = "a CUDA graph that they were captured into still exists";
                self.home.note_quarantine(class.bytes(), pinned, &reason);
            }
        }
        spared
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::block::{Fate, Out};
    use crate::holds::Captured;
    use crate::pages::Pages;
    use crate::size_class::SizeClass;

    /// A block of a graph that never ends.
    fn held() -> Returned {
        let class = SizeClass::of(1).unwrap();
        let mut out = Out::fresh(Pages::map(class.bytes()).unwrap(), class);
        out.holds().lock().add(Captured::ForEver);
        out.worsen(Fate::Captured);
        out.give_back(0, None, 0, 0)
    }

    #[test]
    fn looks_in_vain_become_rarer_and_none_is_made_before_its_time() {
        let mut held_for = ForGraphs::default();
        held_for.add(held());
        let mut pauses = Vec::new();
        for _ in 0..9 {
            held_for.next_look = None;
            let before = Instant::now();
            assert_eq!(held_for.take_released().len(), 0);
            assert!(held_for.next_look.is_some_and(|next| next >= before + held_for.pause));
            pauses.push(held_for.pause.as_millis());
        }
        assert_eq!(pauses, [2, 4, 8, 16, 32, 64, 100, 100, 100]);
        // It is not time yet: nothing is looked at, and nothing changes.
        let next = Instant::now() + Duration::from_secs(3600);
        (held_for.next_look, held_for.pause) = (Some(next), PAUSE_MIN);
        assert_eq!(held_for.take_released().len(), 0);
        assert_eq!((held_for.next_look, held_for.pause), (Some(next), PAUSE_MIN));
        // Another block is looked at at once.
        held_for.pause = PAUSE_MAX;
        held_for.add(held());
        assert_eq!((held_for.next_look, held_for.longest_sleep()), (None, Some(PAUSE_MIN)));
        held_for.blocks.drain(..).for_each(Returned::quarantine);
    }
}
