//! What a script does with the pool as a whole: letting the cleaner work, caps, trims, prewarming, shutdown.

use crate::ensure;
use crate::model::{Block, Place};
use crate::script::How;
use crate::world::{Outcome, TOO_SLOW, World, class_of, patience};
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
            self.device.release_all();
            self.device.run_until_idle();
        }
        let contexts_finish = !self.device.has_held_work();
        let model = &self.model;
        let waits_for_contexts = model
            .blocks
            .iter()
            .any(|block| matches!(block.place, Place::Queued(_)) && model.may_wait_for_contexts(block));
        // A wait for all contexts lets everything happen that anything could wait for.
        let all_finish = contexts_finish && waits_for_contexts && model.has_device && !model.loose();
        let must = |block: &&Block| match block.place {
            Place::Queued(_) => all_finish || model.must_finish(block, contexts_finish),
            _ => false,
        };
        let finishing: BTreeSet<usize> =
            model.blocks.iter().filter(must).map(|block| block.address).collect();
        let to_pin = model.blocks.iter().filter(|block| {
            !block.pinned && (finishing.contains(&block.address) || matches!(block.place, Place::Unknown(_)))
        });
        let to_pin: usize = to_pin.map(|block| block.class).sum();
        let has_room = self.device.sim.registered_bytes() + to_pin <= model.ceiling;
        let queued = self.pool.stats().queued_buffers;
        let left = queued.checked_sub(finishing.len()).ok_or("fewer are queued than were returned")?;
        let target = if must_end_idle { 0 } else { left };
        if contexts_finish {
            self.waits = None;
        }
        self.cleaner = None;
        self.until("the cleaner finishes what it can", |stats| {
            stats.queued_buffers <= target && stats.retiring_bytes == 0
        })?;
        self.settled(&finishing, has_room)?;
        let result = during(self);
        self.until("what was evicted is let go", |stats| stats.retiring_bytes == 0)?;
        self.waits = Some(self.pool.hold_context_waits());
        self.cleaner = Some(self.pool.hold_cleaner());
        result
    }

    fn until(&self, what: &str, is_so: impl Fn(&Stats) -> bool) -> Outcome {
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
        let live = self.live();
        let loose = self.model.loose();
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
            Place::Queued(_) => block.pinned && !finishing.contains(&block.address),
            _ => false,
        };
        let out = self.model.blocks.iter().filter(is_away);
        let all_fits = fits && {
            let out_bytes: usize = out.map(|block| block.class).sum();
            self.model.shelved_bytes() + incoming + out_bytes <= self.model.cap
        };
        self.model.order += 1;
        let order = self.model.order;
        let has_device = self.model.has_device;
        let mut evicted = Vec::new();
        let mut left = Vec::new();
        for mut block in std::mem::take(&mut self.model.blocks) {
            // Pageable memory is freed without a trace, and its address used again, perhaps by a block of another class.
            let is_live = block.is_live(&live);
            block.place = match block.place {
                Place::Shelved(_) if block.pinned && !is_live => {
                    ensure!(loose || !fits || !has_room, "evicted although everything fits: {block:?}");
                    evicted.push(block);
                    continue;
                }
                // Evicted, perhaps, and the driver did not unregister it.
                Place::Shelved(_) if !block.pinned || loose => Place::Unknown(None),
                Place::Retiring if is_live => {
                    ensure!(loose, "not unregistered: {block:?}");
                    Place::Unknown(None)
                }
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
                Place::Queued(returned) if finishing.contains(&block.address) => {
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
        Ok(())
    }

    pub fn drain(&mut self) -> Outcome {
        let is_settled = self.pool.stats().queued_buffers == 0;
        let timeout = if is_settled { patience() } else { Duration::from_millis(1) };
        let drained = self.pool.drain(timeout);
        let is_free = self.model.loose() && !is_settled;
        ensure!(is_free || drained == is_settled, "drain says {drained}");
        Ok(())
    }

    /// Caps and trims are obeyed at once: largest class first, in each what lay longest.
    pub fn trim(&mut self, bytes: usize, is_cap: bool) -> Outcome {
        let before = self.model.seen.clone();
        if is_cap {
            self.pool.set_max_pooled_bytes(bytes);
            self.model.cap = bytes;
        } else {
            self.pool.trim_to(bytes);
        }
        let mut total = self.model.shelved_bytes();
        let after = self.pool.stats();
        for class in before.values().rev() {
            let mut count = 0;
            while total > bytes && count < class.pooled_buffers {
                total -= class.class_bytes;
                count += 1;
            }
            let now = after.classes.iter().find(|now| now.class_bytes == class.class_bytes);
            let evicted = now.map_or(0, |now| now.evictions) - class.evictions;
            let size = class.class_bytes;
            ensure!(evicted == count as u64, "{evicted} of class {size} were evicted, and not {count}");
            self.evict(size, count);
        }
        Ok(())
    }

    fn evict(&mut self, class: usize, mut count: usize) {
        let has_unknown = self.model.of_class(class).any(|block| matches!(block.place, Place::Unknown(_)));
        while count > 0 {
            let order_of = |block: &Block| match block.place {
                Place::Shelved(order) if block.class == class => Some(order),
                _ => None,
            };
            let Some(first) = self.model.blocks.iter().filter_map(order_of).min() else { return };
            let group = self.model.blocks.iter().filter(|block| order_of(block) == Some(first)).count();
            let is_certain = !has_unknown && group <= count;
            for block in self.model.blocks.iter_mut().filter(|block| order_of(block) == Some(first)) {
                block.place = if is_certain && block.pinned { Place::Retiring } else { Place::Unknown(None) };
            }
            if !has_unknown {
                count = count.saturating_sub(group);
            }
        }
    }

    pub fn clear(&mut self) -> Outcome {
        self.pool.clear();
        self.sweep("cleared")
    }

    /// Everything pooled is gone.
    fn sweep(&mut self, why: &str) -> Outcome {
        let live = self.live();
        let loose = self.model.loose();
        for block in &mut self.model.blocks {
            if let Place::Shelved(_) = block.place {
                ensure!(loose || !block.is_live(&live), "{why}, and still there: {block:?}");
                block.place = Place::Unknown(None);
            }
        }
        self.forget_gone(&live);
        Ok(())
    }

    fn forget_gone(&mut self, live: &BTreeMap<usize, usize>) {
        self.model.blocks.retain(|block| {
            let is_gone = block.pinned && !block.is_live(live);
            !is_gone || !matches!(block.place, Place::Unknown(_) | Place::Shelved(_) | Place::Retiring)
        });
    }

    pub fn prewarm(&mut self, size: usize, count: usize) -> Outcome {
        let class = class_of(size);
        // Up to date: the cleaner may just have shelved something.
        let stats = self.pool.stats();
        let fits = stats.pooled_bytes + count * class <= self.model.cap;
        let has_room = stats.registered_bytes + count * class <= self.model.ceiling;
        let done = self.pool.prewarm(size, count);
        let is_free = self.model.loose() || !fits || !has_room;
        ensure!(self.model.has_device || done.is_err(), "page-locked without a device");
        ensure!(is_free || !self.model.has_device || done == Ok(count), "prewarm({size}, {count}): {done:?}");
        self.until("what was evicted is let go", |stats| stats.retiring_bytes == 0)?;
        let live = self.live();
        self.forget_gone(&live);
        self.model.order += 1;
        // Pageable memory may have been freed without a trace.
        self.model.blocks.retain(|block| {
            block.pinned || !matches!(block.place, Place::Unknown(_)) || !live.contains_key(&block.address)
        });
        for (address, bytes) in &live {
            if self.model.find(*address).is_none() {
                self.model.blocks.push(Block {
                    address: *address,
                    class: *bytes,
                    pinned: true,
                    place: if self.model.loose() {
                        Place::Unknown(None)
                    } else {
                        Place::Shelved(self.model.order)
                    },
                    left_dirty: 0,
                });
            }
        }
        Ok(())
    }

    pub fn shut_down(&mut self) -> Outcome {
        self.model.gave_up |= self.pool.stats().queued_buffers > 0;
        let report = self.pool.shutdown();
        ensure!(report.completed, "{TOO_SLOW}");
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
                Place::Queued(_) if !loose => Place::Quarantined,
                _ if block.pinned && !is_live => continue,
                _ if block.pinned => Place::Quarantined,
                _ => Place::Unknown(None),
            };
            left.push(block);
        }
        self.model.blocks = left;
        Ok(())
    }

    pub fn take(&mut self, how: How, size: usize) -> Outcome {
        if how == How::Pinned && self.model.ceiling < usize::MAX {
            // It may have to wait for what it evicts.
            return self.run_cleaner(|world| {
                // The cleaner may just have shelved something.
                let stats = world.pool.stats();
                world.model.seen = stats.classes.iter().map(|of| (of.class_bytes, of.clone())).collect();
                world.take_now(how, size)?;
                world.until("what was evicted is let go", |stats| stats.retiring_bytes == 0)?;
                world.forget_gone(&world.live());
                Ok(())
            });
        }
        self.take_now(how, size)
    }
}
