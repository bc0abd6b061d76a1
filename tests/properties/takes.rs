//! A take: which block it may give, which it has to, and what it counts.

use crate::by_name::GAVE_UP_AFTER;
use crate::ensure;
use crate::guards::{Guard, TABLE_BYTES};
use crate::model::{Block, Place, Returned};
use crate::script::How;
use crate::world::{Outcome, World, class_of};
use pinpool::PinnedBuffer;
use std::sync::LazyLock;
use std::time::Instant;

fn all_zero(bytes: &[u8]) -> bool {
    static ZEROS: LazyLock<Vec<u8>> = LazyLock::new(|| vec![0; TABLE_BYTES]);
    bytes == &ZEROS[..bytes.len()]
}

impl World {
    pub fn take_now(&mut self, how: How, size: usize) -> Outcome {
        let class = class_of(size);
        let (zeroed, model) = (how != How::Unzeroed, &self.model);
        let queued = model.of_class(class).filter(|block| matches!(block.place, Place::Queued(_))).count();
        // A take asks the driver eight questions in vain at most.
        let must_harvest =
            queued <= 8 && model.of_class(class).any(|block| model.must_be_harvested(block, zeroed));
        let pooled = model.pooled(class);
        let before = model.seen.get(&class).cloned().unwrap_or_default();
        let may_refuse = how == How::Pinned && self.may_refuse(size);
        let started = Instant::now();
        let taken = match how {
            How::Plain => Ok(self.pool.take(size)),
            How::Try => self.pool.try_take(size),
            How::Exact => self.pool.take_exact(size),
            How::Unzeroed => self.pool.take_unzeroed(size),
            How::Pinned => self.pool.take_pinned(size),
        };
        let after = self.pool.stats();
        let after =
            after.classes.iter().find(|after| after.class_bytes == class).cloned().unwrap_or_default();
        let hits = after.hits - before.hits;
        let mut unpinned_hits = after.unpinned_hits - before.unpinned_hits;
        let (misses, harvested) = (after.misses - before.misses, after.harvested - before.harvested);
        let len = if how == How::Exact { size } else { size.next_power_of_two() };
        if how == How::Pinned && unpinned_hits > 0 {
            self.passed_over(class, len, std::mem::take(&mut unpinned_hits));
        }
        let Ok(buffer) = taken else {
            let has_context = self.device.has_findable_context();
            let is_free =
                self.model.may_refuse() || !has_context || may_refuse || started.elapsed() > GAVE_UP_AFTER;
            ensure!(how == How::Pinned && is_free, "{how:?} of {size}: {taken:?}");
            return Ok(());
        };
        ensure!(how != How::Pinned || self.model.has_device, "page-locked without a device");
        ensure!(buffer.len() == len, "{how:?} of {size} gave {}", buffer.len());
        ensure!(how != How::Pinned || buffer.is_pinned(), "take_pinned gave a pageable buffer");
        let counted = [hits, unpinned_hits, harvested, misses];
        ensure!(counted.iter().sum::<u64>() == 1, "one take of {class} counted {counted:?}");
        if self.model.ended {
            let address = buffer.as_ptr() as usize;
            ensure!(self.guards.iter().all(|other| other.address != address), "handed out twice");
            ensure!(!zeroed || all_zero(&buffer), "old bytes in a buffer of {len} (counted {counted:?})");
            // Where there was another context, that one may be the one that the pool has looked at.
            let is_looked_at = self.model.noticed && self.device.has_had_one_context();
            ensure!(
                !is_looked_at || !buffer.is_pinned() || self.live().contains_key(&address),
                "page-locked in a context that is known to have ended"
            );
            let content = buffer.to_vec();
            self.guards.push(Guard::new(buffer, content));
            return Ok(());
        }
        let given = self.model.given(class);
        (given.hits, given.unpinned_hits) = (given.hits + hits, given.unpinned_hits + unpinned_hits);
        (given.harvested, given.misses) = (given.harvested + harvested, given.misses + misses);
        ensure!(
            how == How::Pinned || (pooled > 0) == (hits + unpinned_hits > 0),
            "of {pooled} pooled of class {class}, a take counted {counted:?}"
        );
        ensure!(
            misses == 0 || !must_harvest || self.model.loose(),
            "a take of {class} missed although a returned block is done"
        );
        self.identify(&buffer, class, hits + unpinned_hits > 0, harvested > 0, zeroed)?;
        let content = if zeroed { vec![0; len] } else { buffer.to_vec() };
        ensure!(!zeroed || all_zero(&buffer), "old bytes in a buffer of {len} (counted {counted:?})");
        self.guards.push(Guard::new(buffer, content));
        Ok(())
    }

    /// `take_pinned` found blocks on the shelf that are not page-locked, and dropped them to be.
    fn passed_over(&mut self, class: usize, len: usize, count: u64) {
        let given = self.model.given(class);
        given.unpinned_hits += count;
        given.returned += count;
        self.model.dirty_bytes += count * len as u64;
        let of_class =
            |block: &&mut Block| block.class == class && !block.pinned && !matches!(block.place, Place::Out);
        for block in self.model.blocks.iter_mut().filter(of_class) {
            if !matches!(block.place, Place::Quarantined) {
                block.place = Place::Unknown(Some(Returned::untouched(len)));
            }
        }
    }

    /// Which of the model's blocks was given, and whether it might have been.
    fn identify(
        &mut self,
        buffer: &PinnedBuffer,
        class: usize,
        hit: bool,
        harvested: bool,
        zeroed: bool,
    ) -> Outcome {
        let (address, pinned) = (buffer.as_ptr() as usize, buffer.is_pinned());
        let index = self.model.blocks.iter().position(|block| block.address == address);
        if !hit && !harvested {
            if let Some(index) = index {
                let known = self.model.blocks.remove(index);
                // Pageable memory may have been freed without a trace.
                let may_be_gone = !known.pinned && matches!(known.place, Place::Unknown(_));
                // Or it was let go for the ceiling, and the driver gave its address again.
                let may_be_gone = may_be_gone || self.model.allocates && known.class != class;
                ensure!(may_be_gone, "a fresh buffer at the address of {known:?}");
            }
            let place = Place::Out;
            self.model.blocks.push(Block { address, class, pinned, place, left_dirty: 0 });
            return Ok(());
        }
        let Some(index) = index else { return Err(format!("a block that nobody knows, at {address:x}")) };
        let block = &self.model.blocks[index];
        ensure!(block.class == class, "a block of another class: {block:?}");
        ensure!(block.pinned == pinned, "page-locked: {pinned}, and it should not be: {block:?}");
        let mut left_dirty = 0;
        match &block.place {
            Place::Shelved(order) if hit => {
                let later = self.model.of_class(class).find(|other| match other.place {
                    Place::Shelved(other) => other > *order,
                    _ => false,
                });
                ensure!(later.is_none(), "{block:?} was given although {later:?} lay for less time");
            }
            Place::Queued(returned) | Place::Unknown(Some(returned)) if harvested => {
                ensure!(self.model.may_be_harvested(block, returned, zeroed), "harvested: {block:?}");
                left_dirty = if zeroed { 0 } else { returned.dirty };
            }
            Place::Unknown(_) if hit => {}
            _ => return Err(format!("given (hit: {hit}, harvested: {harvested}): {block:?}")),
        }
        let block = &mut self.model.blocks[index];
        (block.place, block.left_dirty) = (Place::Out, left_dirty);
        Ok(())
    }
}
