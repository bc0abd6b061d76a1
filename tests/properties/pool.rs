//! What a script does with the pool as a whole: letting the cleaner work, drain, shutdown.

use crate::ensure;
use crate::model::{Block, Place};
use crate::world::{Outcome, TOO_SLOW, World, patience};
use pinpool::Stats;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// The pool as a whole.
impl World {
    /// Lets the cleaner finish what it can; then `during`, while it has nothing to do.
    pub fn run_cleaner(&mut self, during: impl FnOnce(&mut Self) -> Outcome) -> Outcome {
        let is_unknown = |block: &Block| matches!(block.place, Place::Unknown(Some(_)));
        let must_end_idle = self.model.loose() || self.model.blocks.iter().any(is_unknown);
        if must_end_idle {
            // Which blocks finish is not known, so all do.
            self.end_all_graphs()?;
            self.device.release_all();
            self.device.run_until_idle();
        }
        self.finish_dropped_graphs();
        let is_free = !self.device.has_held_work();
        let contexts_finish = is_free && !self.device.is_capturing();
        let model = &self.model;
        let waits_for_contexts = model
            .blocks
            .iter()
            .any(|block| !matches!(block.place, Place::Unknown(_)) && model.may_wait_for_contexts(block));
        // A wait for all contexts lets everything happen that anything could wait for.
        let all_finish = contexts_finish && waits_for_contexts && model.has_device && !model.loose();
        let must = |block: &&Block| match block.place {
            Place::Queued(ref returned) => {
                all_finish && !returned.is_held() || model.must_finish(block, contexts_finish)
            }
            Place::Held(_) => model.must_finish(block, contexts_finish),
            _ => false,
        };
        let finishing: BTreeSet<usize> =
            model.blocks.iter().filter(must).map(|block| block.address).collect();
        let to_pin = model.blocks.iter().filter(|block| {
            !block.pinned && (finishing.contains(&block.address) || matches!(block.place, Place::Unknown(_)))
        });
        let to_pin: usize = to_pin.map(|block| block.class).sum();
        let has_room = self.live().values().sum::<usize>() + to_pin <= model.ceiling;
        // By class, what stays queued, and what is held for graphs.
        let mut left = BTreeMap::<usize, (usize, usize)>::new();
        for block in model.blocks.iter().filter(|block| !finishing.contains(&block.address) && !must_end_idle)
        {
            let (queued, held) = left.entry(block.class).or_default();
            match &block.place {
                Place::Queued(returned) | Place::Held(returned) if returned.is_held() => *held += 1,
                Place::Queued(_) | Place::Held(_) => *queued += 1,
                _ => {}
            }
        }
        if is_free && self.device.captures_are_known() {
            self.waits = None;
        }
        self.cleaner = None;
        self.until("the cleaner finishes what it can", |stats| {
            let is_done = stats.classes.iter().all(|class| {
                let (queued, held) = left.get(&class.class_bytes).copied().unwrap_or_default();
                class.queued_buffers <= queued && class.held_buffers == held
            });
            // What is on its way from one to the other may be seen in neither.
            is_done && stats.retiring_bytes == 0 && stats.is_balanced()
        })?;
        self.settled(&finishing, has_room)?;
        let result = during(self);
        self.until("what was evicted is let go", |stats| stats.retiring_bytes == 0)?;
        self.waits = Some(self.pool.hold_context_waits());
        self.cleaner = Some(self.pool.hold_cleaner());
        result
    }

    pub fn until(&self, what: &str, is_so: impl Fn(&Stats) -> bool) -> Outcome {
        let deadline = Instant::now() + patience();
        loop {
            let stats = self.pool.stats();
            if is_so(&stats) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "in vain: {what}: {stats:?}");
            std::thread::yield_now();
        }
    }

    /// What became of the blocks, after the cleaner has finished these.
    fn settled(&mut self, finishing: &BTreeSet<usize>, has_room: bool) -> Outcome {
        if self.model.ended {
            return Ok(());
        }
        let live = self.live();
        let loose = self.model.loose();
        let retired = self.model.retiring_by_class();
        let incoming: usize = self
            .model
            .blocks
            .iter()
            .filter(|block| finishing.contains(&block.address) || matches!(block.place, Place::Unknown(_)))
            .map(|block| block.class)
            .sum();
        let fits = self.model.shelved_bytes() + incoming <= self.model.cap;
        // After the cap was too small once, what is out counts as well before anything else is page-locked.
        let is_away = |block: &&Block| match block.place {
            Place::Out => block.pinned,
            Place::Queued(_) | Place::Held(_) => block.pinned && !finishing.contains(&block.address),
            _ => false,
        };
        let out = self.model.blocks.iter().filter(is_away);
        let all_fits = fits && {
            let out_bytes: usize = out.map(|block| block.class).sum();
            self.model.shelved_bytes() + incoming + out_bytes <= self.model.cap
        };
        let order = self.model.next_order();
        let has_device = self.model.has_device;
        let mut evicted = Vec::new();
        let mut left = Vec::new();
        if !loose {
            // What was evicted is let go, so what has its address now is another block.
            self.model.blocks.retain(|block| !matches!(block.place, Place::Retiring));
        }
        let mixed = self.mixed_classes(retired);
        let mut fresh = self.model.unknown_of(&live);
        for mut block in std::mem::take(&mut self.model.blocks) {
            // Pageable memory is freed without a trace, and its address used again, perhaps by a block of another class.
            let is_finishing = finishing.contains(&block.address);
            block.place = match block.place {
                Place::Held(returned) if !returned.is_held() => Place::Queued(returned),
                Place::Queued(returned) if returned.is_held() => Place::Held(returned),
                place => place,
            };
            if mixed.contains(&block.class) && !block.is_elsewhere(is_finishing) {
                continue;
            }
            let is_live = match block.place {
                _ if block.pinned => block.is_live(&live),
                Place::Queued(_) if loose || is_finishing => {
                    block.was_locked(&mut fresh, self.model.allocates)
                }
                Place::Unknown(_) => block.was_locked(&mut fresh, self.model.allocates),
                _ => false,
            };
            block.place = match block.place {
                Place::Shelved(_) if block.pinned && !is_live => {
                    ensure!(loose || !fits || !has_room, "evicted although everything fits: {block:?}");
                    evicted.push(block);
                    continue;
                }
                // Evicted, perhaps, and the driver did not unregister it.
                Place::Shelved(_) if !block.pinned || loose => Place::Unknown(None),
                Place::Retiring if is_live => Place::Unknown(None),
                Place::Retiring => continue,
                Place::Queued(returned) if loose => match (block.pinned, is_live) {
                    (true, false) => {
                        ensure!(returned.may(), "let go in flight: {block:?}", block = block.address);
                        continue;
                    }
                    _ => {
                        block.pinned |= is_live;
                        Place::Unknown(Some(returned))
                    }
                },
                Place::Queued(returned) if is_finishing => {
                    ensure!(returned.may(), "finished in flight: {:x}", block.address);
                    match is_live {
                        true => {
                            block.pinned = true;
                            Place::Shelved(order)
                        }
                        false if !has_device => Place::Unknown(None),
                        false => {
                            let class = block.class;
                            ensure!(!all_fits || !has_room, "let go although everything fits: {class}");
                            continue;
                        }
                    }
                }
                Place::Unknown(_) if block.pinned && !is_live => continue,
                Place::Unknown(returned) => {
                    block.pinned |= is_live;
                    Place::Unknown(returned)
                }
                place => place,
            };
            left.push(block);
        }
        let is_bounded = self.model.ceiling < usize::MAX;
        for one in evicted.iter().filter(|_| !loose && !is_bounded) {
            let worse = left.iter().find(|other| match (&other.place, &one.place) {
                (Place::Shelved(kept), Place::Shelved(gone)) if *kept < order => {
                    other.class > one.class || other.class == one.class && kept < gone
                }
                _ => false,
            });
            ensure!(worse.is_none(), "{one:?} was evicted rather than {worse:?}");
        }
        self.model.blocks = left;
        for (address, class) in self.model.unknown_of(&live) {
            if mixed.contains(&class) {
                let place = Place::Unknown(None);
                self.model.blocks.push(Block { address, class, pinned: true, place, left_dirty: 0 });
            }
        }
        Ok(())
    }

    /// Classes of which some were let go meanwhile, so that others that got their memory of the driver meanwhile may have
    /// their addresses: which of them is which nobody can say.
    fn mixed_classes(&self, retired: BTreeMap<usize, u64>) -> BTreeSet<usize> {
        if !self.model.allocates || self.model.loose() {
            return BTreeSet::new();
        }
        let before = |class: usize| {
            let seen = self.model.seen.get(&class).map_or(0, |seen| seen.unregistrations);
            seen + retired.get(&class).copied().unwrap_or_default()
        };
        let classes = self.pool.stats().classes.into_iter();
        let mixed = classes.filter(|now| now.unregistrations > before(now.class_bytes));
        mixed.map(|now| now.class_bytes).collect()
    }

    pub fn drain(&mut self) -> Outcome {
        let is_settled = self.pool.stats().queued_buffers == 0;
        let timeout = if is_settled { patience() } else { Duration::from_millis(1) };
        let drained = self.pool.drain(timeout);
        let is_free = self.model.loose() && !is_settled;
        // What was in transit at the look may be settled since.
        let settled_since = drained && self.pool.stats().queued_buffers == 0;
        ensure!(is_free || settled_since || drained == is_settled, "drain says {drained}");
        Ok(())
    }

    pub fn shut_down(&mut self) -> Outcome {
        let stats = self.pool.stats();
        self.model.gave_up |= stats.queued_buffers + stats.held_buffers > 0;
        let report = self.pool.shutdown();
        ensure!(report.completed, "{TOO_SLOW}");
        if self.model.ended {
            return Ok(());
        }
        let live = self.live();
        let loose = self.model.loose();
        let mut left = Vec::new();
        for mut block in std::mem::take(&mut self.model.blocks) {
            let is_live = block.is_live(&live);
            block.place = match block.place {
                Place::Out => Place::Out,
                Place::Quarantined => Place::Quarantined,
                Place::Shelved(_) if !loose && is_live => return Err(format!("still there: {block:?}")),
                Place::Queued(returned) if block.pinned && !is_live => {
                    ensure!(loose && returned.may(), "let go in flight: {:x}", block.address);
                    continue;
                }
                Place::Queued(_) | Place::Held(_) if !loose => Place::Quarantined,
                _ if block.pinned && !is_live => continue,
                _ if block.pinned => Place::Quarantined,
                _ => Place::Unknown(None),
            };
            left.push(block);
        }
        self.model.blocks = left;
        Ok(())
    }
}
