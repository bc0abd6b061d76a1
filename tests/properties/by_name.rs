//! What is asked for by name: page-locked buffers, prewarmed shelves; what is given back by name or by age.

use crate::ensure;
use crate::model::{Block, Place};
use crate::script::How;
use crate::world::{MAX_IDLE_MINUTES, Outcome, World, class_of};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The pool waits two seconds for what it evicted to be unregistered; a call that took as long may have given up.
pub const GAVE_UP_AFTER: Duration = Duration::from_millis(1900);

impl World {
    /// How many of so many more blocks of a class can be page-locked and kept; `None` where it depends on how fast what is
    /// evicted is let go.
    fn room_for(&self, class: usize, count: usize) -> Option<usize> {
        let stats = self.pool.stats();
        let mut registered = stats.registered_bytes;
        let mut pooled: BTreeMap<usize, usize> =
            stats.classes.iter().map(|of| (of.class_bytes, of.pooled_buffers)).collect();
        let bytes_of = |pooled: &BTreeMap<usize, usize>, most: usize| -> usize {
            pooled.range(..=most).map(|(class, count)| class * count).sum()
        };
        let mut pushes_out = false;
        for done in 0..count {
            if bytes_of(&pooled, class) + class > self.model.cap {
                return Some(done);
            }
            let mut over = (registered + class).saturating_sub(self.model.ceiling);
            if over > 0 && pushes_out {
                return None;
            }
            // The largest of the others go first, for the ceiling.
            for (other, idle) in pooled.iter_mut().rev().filter(|(other, _)| **other != class) {
                while over > 0 && *idle > 0 {
                    *idle -= 1;
                    registered -= other;
                    over = over.saturating_sub(*other);
                }
            }
            if over > 0 {
                return Some(done);
            }
            registered += class;
            *pooled.entry(class).or_default() += 1;
            // And for the cap, in the background.
            for (other, idle) in pooled.clone().into_iter().rev() {
                for _ in 0..idle {
                    if bytes_of(&pooled, usize::MAX) > self.model.cap {
                        *pooled.entry(other).or_default() -= 1;
                        pushes_out = true;
                    }
                }
            }
        }
        Some(count)
    }

    pub fn prewarm(&mut self, size: usize, count: usize) -> Outcome {
        let class = class_of(size);
        // Of now: the cleaner may just have shelved something.
        let expected = if self.model.has_device { self.room_for(class, count) } else { Some(0) };
        let started = Instant::now();
        let done = self.pool.prewarm(size, count);
        let is_free = self.model.loose() || started.elapsed() > GAVE_UP_AFTER;
        ensure!(self.model.has_device || done.is_err(), "page-locked without a device");
        let is_right = |expected| match &done {
            Ok(done) => *done == expected && expected > 0,
            Err(_) => expected == 0,
        };
        ensure!(
            is_free || expected.is_none_or(is_right),
            "prewarm({size}, {count}): {done:?}, and {expected:?} have room"
        );
        self.until("what was evicted is let go", |stats| stats.retiring_bytes == 0)?;
        if self.model.ended {
            return Ok(());
        }
        let live = self.live();
        self.forget_gone(&live);
        self.model.next_order();
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

    /// Whether `take_pinned` may fail, asked before it is called.
    pub fn may_refuse(&self, size: usize) -> bool {
        let class = class_of(size);
        let stats = self.pool.stats();
        let (same, others): (Vec<_>, Vec<_>) = stats.classes.iter().partition(|of| of.class_bytes == class);
        let idle: usize = others.iter().map(|of| of.pooled_pinned_buffers * of.class_bytes).sum();
        let is_shelved = same.iter().any(|of| of.pooled_pinned_buffers > 0);
        let has_room = (stats.registered_bytes - idle).saturating_add(class) <= self.model.ceiling;
        !self.model.has_device || !is_shelved && !has_room
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
        if self.model.ended {
            return Ok(());
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

    pub fn forget_gone(&mut self, live: &BTreeMap<usize, usize>) {
        self.model.blocks.retain(|block| {
            let is_gone = block.pinned && !block.is_live(live);
            !is_gone || !matches!(block.place, Place::Unknown(_) | Place::Shelved(_) | Place::Retiring)
        });
    }

    /// Only what lay for as long goes, the coldest first and bit by bit; of each class at least one that did.
    pub fn let_time_pass(&mut self, minutes: u64) -> Outcome {
        let before = self.pool.stats();
        self.model.minutes += minutes;
        self.pool.let_time_pass(Duration::from_secs(60 * minutes));
        self.until("what was too old is let go", |stats| stats.retiring_bytes == 0)?;
        let after = self.pool.stats();
        let aged_out = after.aged_out - before.aged_out;
        // Where something was passed over, what lies idle goes after an eighth of the time.
        let bound = if after.passed_over == 0 { MAX_IDLE_MINUTES } else { MAX_IDLE_MINUTES / 8 };
        ensure!(aged_out == 0 || self.model.minutes >= bound, "aged out before its time");
        let live = self.live();
        if self.model.loose() || !self.model.has_device {
            for block in self.model.blocks.iter_mut().filter(|_| aged_out > 0) {
                if let Place::Shelved(_) = block.place {
                    block.place = Place::Unknown(None);
                }
            }
            self.forget_gone(&live);
            return Ok(());
        }
        for class in after.classes.iter().map(|class| class.class_bytes) {
            // What is unknown may be what went.
            if !self.model.of_class(class).any(|block| matches!(block.place, Place::Unknown(_))) {
                self.check_age(class, bound, &live)?;
            }
        }
        let gone = self.model.blocks.len();
        self.forget_gone(&live);
        let gone = gone - self.model.blocks.len();
        ensure!(gone as u64 == aged_out, "{aged_out} aged out, and {gone} are gone");
        Ok(())
    }

    fn check_age(&self, class: usize, bound: u64, live: &BTreeMap<usize, usize>) -> Outcome {
        let model = &self.model;
        let shelved = model.of_class(class).filter_map(|block| match block.place {
            Place::Shelved(order) => Some((order, block.is_live(live))),
            _ => None,
        });
        let (kept, gone): (Vec<_>, Vec<_>) = shelved.partition(|(_, is_live)| *is_live);
        let is_older = |order: u64, than: u64| model.minutes - model.times[order as usize] >= than;
        let may_be_old = |order: u64| model.merged.contains(&class) || is_older(order, bound);
        let all = || kept.iter().chain(&gone);
        let old = all().filter(|(order, _)| may_be_old(*order)).count();
        let too_old = all().filter(|(order, _)| is_older(*order, MAX_IDLE_MINUTES)).count();
        ensure!(gone.iter().all(|(order, _)| may_be_old(*order)), "class {class}: aged out before its time");
        ensure!(too_old == 0 || !gone.is_empty(), "class {class}: {too_old} are too old, and none went");
        // The cleaner looks once when it is told, and perhaps once by itself just before.
        let once = old.div_ceil(8);
        let most = once + (old - once).div_ceil(8);
        ensure!(gone.len() <= most, "class {class}: {} of {old} old ones went at once", gone.len());
        let coldest_kept = kept.iter().map(|(order, _)| order).min();
        let warmest_gone = gone.iter().map(|(order, _)| order).max();
        let is_in_order = warmest_gone.zip(coldest_kept).is_none_or(|(gone, kept)| gone <= kept);
        ensure!(is_in_order, "class {class}: one that lay for less time went first");
        Ok(())
    }
}
