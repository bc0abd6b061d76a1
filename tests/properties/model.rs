//! The naive model: a plain list of blocks, each somewhere, and what the pool's own books must say of them.
//!
//! Where a promise decides the outcome, the model demands it. Where several outcomes are right, or a fault may have
//! struck, it looks at what is page-locked and at the counts, and demands that one right outcome explains them.

use crate::device::Mark;
use crate::graphs::GraphState;
use pinpool::{ClassStats, PinnedPool, Stats};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Ends the function with a sentence unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err(format!($($message)*));
        }
    };
}

/// What says that the device is done with a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fate {
    /// Its records; without any, a wait for all contexts, if the device can have touched it at all.
    Recorded,
    /// A record failed: a wait for all contexts.
    Failed,
    /// The caller's promise.
    Proven,
}

/// A block that was returned.
#[derive(Clone, Debug)]
pub struct Returned {
    pub fate: Fate,
    /// Records, made known to the pool.
    pub uses: Vec<Arc<Mark>>,
    /// Copies, whether the pool can know of them or not.
    pub copies: Vec<Arc<Mark>>,
    /// Graphs that it was captured into.
    pub graphs: Vec<Arc<GraphState>>,
    pub dirty: usize,
}

#[derive(Clone, Debug)]
pub enum Place {
    Out,
    Queued(Returned),
    /// For a graph; not queued.
    Held(Returned),
    /// With the place in the order of shelving; equal where the order is unknown.
    Shelved(u64),
    /// Evicted, not yet unregistered.
    Retiring,
    Quarantined,
    /// Queued, shelved, retiring or quarantined: a fault may have struck.
    Unknown(Option<Returned>),
}

#[derive(Clone, Debug)]
pub struct Block {
    pub address: usize,
    pub class: usize,
    pub pinned: bool,
    pub place: Place,
    /// What `take_unzeroed` may have left of the holder before.
    pub left_dirty: usize,
}

impl Block {
    /// Whether it is among what is page-locked: not some other block at the address of one that was freed.
    pub fn is_live(&self, live: &BTreeMap<usize, usize>) -> bool {
        live.get(&self.address) == Some(&self.class)
    }
}

impl Block {
    /// Neither shelved nor on its way there.
    pub fn is_elsewhere(&self, is_finishing: bool) -> bool {
        match self.place {
            Place::Out | Place::Quarantined => true,
            Place::Held(_) => !is_finishing,
            Place::Queued(_) => !is_finishing,
            _ => false,
        }
    }

    /// Whether it is among what was page-locked just now, by its address, or, if it got another one, by its class.
    pub fn was_locked(&mut self, fresh: &mut Vec<(usize, usize)>, allocates: bool) -> bool {
        let is_it = |(address, class): &(usize, usize)| {
            *class == self.class && (allocates || *address == self.address)
        };
        let Some(index) = fresh.iter().position(is_it) else { return false };
        self.address = fresh.swap_remove(index).0;
        true
    }
}

impl Returned {
    /// Whether nothing touches the bytes, as far as the pool can know: only then may the pool.
    pub fn may(&self) -> bool {
        let is_recorded_done = self.fate == Fate::Proven || self.uses.iter().all(|mark| mark.is_done());
        is_recorded_done && self.copies.iter().all(|mark| mark.is_done()) && !self.is_held()
    }

    /// A graph may use it again.
    pub fn is_held(&self) -> bool {
        self.graphs.iter().any(|graph| !graph.is_over())
    }

    fn waits_for_contexts(&self, pinned: bool, reads_pageable: bool) -> bool {
        match self.fate {
            // It will, when its graphs are gone.
            _ if !self.graphs.is_empty() => !self.is_held(),
            Fate::Failed => true,
            Fate::Recorded => self.uses.is_empty() && (pinned || reads_pageable),
            Fate::Proven => false,
        }
    }
}

/// Exact counts of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Given {
    pub hits: u64,
    pub unpinned_hits: u64,
    pub misses: u64,
    pub harvested: u64,
    pub returned: u64,
}

pub struct Model {
    pub has_device: bool,
    pub reads_pageable: bool,
    /// A block gets another address when it is page-locked.
    pub allocates: bool,
    pub ceiling: usize,
    pub zero_limit: usize,
    pub cap: usize,
    pub blocks: Vec<Block>,
    pub given: BTreeMap<usize, Given>,
    pub record_failures: u64,
    /// Dirty bytes that were returned, of which each is zeroed once at most.
    pub dirty_bytes: u64,
    /// A fault is set that may strike the cleaner or a wait.
    pub faulty: bool,
    /// A fault is set that may strike a record.
    pub records_fail: bool,
    /// The device may be lost for the pool, or page-locking pauses.
    pub sticky: bool,
    /// The script has no faults, so that nothing is refused, whatever becomes of contexts.
    pub nothing_fails: bool,
    /// A context has ended, of which the pool learns sooner or later: from now on only what is always so is checked.
    pub ended: bool,
    /// The pool has page-locked something since, which it does only in a context that it has looked at.
    pub noticed: bool,
    pub registrations: u64,
    /// A shutdown ended before everything was done.
    pub gave_up: bool,
    /// A fault was set at some time.
    pub was_faulty: bool,
    pub order: u64,
    /// What was let pass, and when which order of shelving began.
    pub minutes: u64,
    pub times: Vec<u64>,
    /// Classes in which blocks may lie for longer than their order says.
    pub merged: BTreeSet<usize>,
    /// What the pool said last, by class.
    pub seen: BTreeMap<usize, ClassStats>,
}

impl Model {
    /// Whether more than one outcome is right.
    pub fn loose(&self) -> bool {
        self.faulty || self.sticky
    }

    /// What is shelved from now on came later than all that is shelved.
    pub fn next_order(&mut self) -> u64 {
        self.order += 1;
        self.times.push(self.minutes);
        self.order
    }

    /// What is page-locked, and was not when the model looked last.
    pub fn unknown_of(&self, live: &BTreeMap<usize, usize>) -> Vec<(usize, usize)> {
        let known = self.blocks.iter().filter(|block| block.pinned && block.is_live(live));
        let known: BTreeSet<usize> = known.map(|block| block.address).collect();
        let unknown = live.iter().filter(|(address, _)| !known.contains(address));
        unknown.map(|(address, bytes)| (*address, *bytes)).collect()
    }

    pub fn retiring_by_class(&self) -> BTreeMap<usize, u64> {
        let mut classes = BTreeMap::new();
        for block in self.blocks.iter().filter(|block| matches!(block.place, Place::Retiring)) {
            *classes.entry(block.class).or_default() += 1;
        }
        classes
    }

    /// Whether the pool may say that something could not be done.
    pub fn may_refuse(&self) -> bool {
        self.loose() && !self.nothing_fails
    }

    pub fn find(&mut self, address: usize) -> Option<&mut Block> {
        self.blocks.iter_mut().find(|block| block.address == address)
    }

    pub fn given(&mut self, class: usize) -> &mut Given {
        self.given.entry(class).or_default()
    }

    pub fn of_class(&self, class: usize) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(move |block| block.class == class)
    }

    /// Blocks on the shelf of a class, by the pool's last word.
    pub fn pooled(&self, class: usize) -> usize {
        self.seen.get(&class).map_or(0, |class| class.pooled_buffers)
    }

    pub fn may_wait_for_contexts(&self, block: &Block) -> bool {
        match &block.place {
            Place::Queued(returned) => returned.waits_for_contexts(block.pinned, self.reads_pageable),
            Place::Held(returned) => !returned.is_held(),
            Place::Unknown(_) => true,
            _ => false,
        }
    }

    /// Whether the cleaner has to finish the block when it is let work. `contexts_finish`: all contexts can be waited for.
    pub fn must_finish(&self, block: &Block, contexts_finish: bool) -> bool {
        let (Place::Queued(returned) | Place::Held(returned)) = &block.place else { return false };
        if returned.is_held() {
            return false;
        }
        match returned.waits_for_contexts(block.pinned, self.reads_pageable) && self.has_device {
            true => contexts_finish,
            false => returned.fate == Fate::Proven || returned.uses.iter().all(|mark| mark.is_done()),
        }
    }

    /// Whether a taker that would miss has to find the block.
    pub fn must_be_harvested(&self, block: &Block, zeroed: bool) -> bool {
        let Place::Queued(returned) = &block.place else { return false };
        self.may_be_harvested(block, returned, zeroed)
            && match returned.fate {
                Fate::Proven => true,
                Fate::Failed => false,
                Fate::Recorded if !self.has_device => true,
                Fate::Recorded => !returned.uses.is_empty() && returned.may(),
            }
    }

    pub fn may_be_harvested(&self, block: &Block, returned: &Returned, zeroed: bool) -> bool {
        (block.pinned || !self.has_device)
            && returned.graphs.is_empty()
            && (!zeroed || returned.dirty <= self.zero_limit)
            && returned.may()
    }

    pub fn shelved_bytes(&self) -> usize {
        self.seen.values().map(|class| class.pooled_buffers * class.class_bytes).sum()
    }

    /// The pool's books, the device's, and the model's.
    pub fn audit(&mut self, pool: &PinnedPool, live: &BTreeMap<usize, usize>) -> Result<(), String> {
        let registered: usize = live.values().sum();
        let stats = pool.stats();
        ensure!(stats.is_balanced(), "the accounts do not balance: {stats:?}");
        ensure!(
            stats.pooled_bytes <= pool.max_pooled_bytes(),
            "{} pooled bytes are over the cap",
            stats.pooled_bytes
        );
        ensure!(stats.peak_registered_bytes <= self.ceiling, "the ceiling was exceeded");
        ensure!(pool.max_pooled_bytes() == self.cap, "the cap is {}", pool.max_pooled_bytes());
        if self.ended {
            self.noticed |= stats.registrations > self.registrations;
            self.seen = stats.classes.into_iter().map(|class| (class.class_bytes, class)).collect();
            ensure!(stats.registered_bytes >= registered, "more is page-locked than the pool counts");
            return Ok(());
        }
        ensure!(
            stats.registered_bytes == registered,
            "the pool counts {} registered bytes and the device {registered}",
            stats.registered_bytes
        );
        ensure!(
            stats.registrations - stats.unregistrations == live.len() as u64,
            "{} registrations, {} unregistrations, and {} are left",
            stats.registrations,
            stats.unregistrations,
            live.len()
        );
        ensure!(
            stats.record_failures == self.record_failures,
            "{} failed records, not {}",
            stats.record_failures,
            self.record_failures
        );
        ensure!(
            stats.zeroed_bytes <= self.dirty_bytes,
            "{} bytes were zeroed, and {} were dirty",
            stats.zeroed_bytes,
            self.dirty_bytes
        );
        self.audit_failures(&stats)?;
        self.seen = stats.classes.iter().map(|class| (class.class_bytes, class.clone())).collect();
        let pinned: BTreeSet<usize> =
            self.blocks.iter().filter(|block| block.pinned).map(|block| block.address).collect();
        let live: BTreeSet<usize> = live.keys().copied().collect();
        ensure!(pinned == live, "page-locked are {live:x?}, and should be {pinned:x?}");
        let classes: BTreeSet<usize> =
            self.seen.keys().copied().chain(self.blocks.iter().map(|block| block.class)).collect();
        classes.into_iter().try_for_each(|class| self.audit_class(class))
    }

    fn audit_failures(&self, stats: &Stats) -> Result<(), String> {
        ensure!(
            self.was_faulty || (stats.registration_failures, stats.unregistration_failures) == (0, 0),
            "failures without a fault: {stats:?}"
        );
        ensure!(
            self.was_faulty || self.gave_up || (stats.wait_failures, stats.quarantined_bytes) == (0, 0),
            "quarantined without a fault: {stats:?}"
        );
        Ok(())
    }

    /// One class: unknown blocks are made known if the counts say what they are.
    fn audit_class(&mut self, class: usize) -> Result<(), String> {
        let given = *self.given(class);
        let seen = self.seen.get(&class).cloned().unwrap_or_default();
        let counts = Given {
            hits: seen.hits,
            unpinned_hits: seen.unpinned_hits,
            misses: seen.misses,
            harvested: seen.harvested,
            returned: seen.returned,
        };
        ensure!(counts == given, "class {class}: counted {counts:?}, and it should be {given:?}");
        for pinned in [true, false] {
            let of = |place: fn(&Place) -> bool| {
                self.of_class(class).filter(|block| block.pinned == pinned && place(&block.place)).count()
            };
            let out = of(|place| matches!(place, Place::Out));
            let queued = of(|place| matches!(place, Place::Queued(_)));
            let shelved = of(|place| matches!(place, Place::Shelved(_)));
            let held = of(|place| matches!(place, Place::Held(_)));
            let retiring = of(|place| matches!(place, Place::Retiring));
            let quarantined = of(|place| matches!(place, Place::Quarantined));
            let unknown = of(|place| matches!(place, Place::Unknown(_)));
            let [seen_out, seen_queued, seen_shelved, seen_quarantined] = if pinned {
                [
                    seen.checked_out_pinned_buffers,
                    seen.queued_pinned_buffers,
                    seen.pooled_pinned_buffers,
                    seen.quarantined_pinned_buffers,
                ]
            } else {
                [
                    seen.checked_out_buffers - seen.checked_out_pinned_buffers,
                    seen.queued_buffers - seen.queued_pinned_buffers,
                    seen.pooled_buffers - seen.pooled_pinned_buffers,
                    seen.quarantined_buffers - seen.quarantined_pinned_buffers,
                ]
            };
            let seen_held =
                if pinned { seen.held_pinned_buffers } else { seen.held_buffers - seen.held_pinned_buffers };
            ensure!(
                seen_held == held,
                "class {class}: {seen_held} held (pinned: {pinned}), and it should be {held}"
            );
            let seen_retiring = if pinned { seen.retiring_buffers } else { 0 };
            ensure!(
                seen_out == out,
                "class {class}: {seen_out} out (pinned: {pinned}), and it should be {out}"
            );
            let more = |name: &str, seen: usize, known: usize| {
                seen.checked_sub(known).ok_or(format!(
                    "class {class}: {seen} {name} (pinned: {pinned}), and it should be {known}"
                ))
            };
            let queued = more("queued", seen_queued, queued)?;
            let shelved = more("shelved", seen_shelved, shelved)?;
            let retiring = more("retiring", seen_retiring, if pinned { retiring } else { 0 })?;
            let quarantined = more("quarantined", seen_quarantined, quarantined)?;
            let sum = queued + shelved + retiring + quarantined;
            // Pageable blocks are freed without a trace.
            ensure!(
                sum == unknown || !pinned && sum < unknown,
                "class {class}: {unknown} blocks are to explain {queued} queued, {shelved} shelved, {retiring} \
                 retiring, {quarantined} quarantined (pinned: {pinned})"
            );
            self.resolve(class, pinned, unknown, [queued, shelved, retiring, quarantined]);
        }
        Ok(())
    }

    fn resolve(&mut self, class: usize, pinned: bool, unknown: usize, counts: [usize; 4]) {
        let Some(what) = counts.iter().position(|count| *count == unknown && unknown > 0) else {
            if counts == [0; 4] && !pinned {
                // All of them were freed.
                self.blocks.retain(|block| {
                    block.pinned || block.class != class || !matches!(block.place, Place::Unknown(_))
                });
            }
            return;
        };
        let order = self.order;
        for block in self.blocks.iter_mut().filter(|block| block.class == class && block.pinned == pinned) {
            if let Place::Unknown(returned) = &mut block.place {
                block.place = match (what, returned.take()) {
                    (0, Some(returned)) => Place::Queued(returned),
                    (1, _) => Place::Shelved(order),
                    (2, _) => Place::Retiring,
                    (3, _) => Place::Quarantined,
                    (_, returned) => Place::Unknown(returned),
                };
            }
        }
        if what == 1 {
            self.merged.insert(class);
            // Where they stand among the others is not known either.
            let shelved = self.blocks.iter_mut().filter(|block| block.class == class);
            for block in shelved.filter(|block| matches!(block.place, Place::Shelved(_))) {
                block.place = Place::Shelved(order);
            }
        }
    }
}
