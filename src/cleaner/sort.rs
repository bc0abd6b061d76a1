//! What is returned, sorted by what says that the device is done with it.

use super::Cleaner;
use crate::block::{Fate, Returned};
use crate::pending::Stage;
use crate::sync::Instant;

impl Cleaner {
    /// By what says that the device is done with it.
    pub(super) fn sort(&mut self, mut block: Returned) {
        block.stamp(Instant::now());
        if let Some(seen) = block.seen_context()
            && let Err(error) = self.home.contexts.learn_current(&self.home.driver, seen)
        {
            self.home.note_device_error(&error);
            block.lost_its_context();
        }
        match block.fate() {
            Fate::Unknown if self.may_be_in_use_without_record(&block) => {
                self.home.counts.class(block.class()).wait_failures.add(1);
                self.quarantine(block, "the context that it was dropped in could not be asked for")
            }
            Fate::Unknown => self.home.pending.insert(Stage::Done, block),
            Fate::Captured if block.is_held() => self.hold(block),
            Fate::Captured => {
                self.quarantine(block, "its copy was captured into a graph, which may read it again")
            }
            Fate::Proven | Fate::ContextsIdle => self.home.pending.insert(Stage::Done, block),
            Fate::RecordFailed => self.wait_for_contexts(block),
            Fate::Recorded if block.uses().is_empty() => {
                if self.may_be_in_use_without_record(&block) {
                    self.wait_for_contexts(block);
                } else {
                    self.home.pending.insert(Stage::Done, block);
                }
            }
            Fate::Recorded => {
                let id = self.home.pending.reserve_id();
                self.queues.add(&block, id);
                self.home.pending.insert_as(id, Stage::Waiting(block.uses().len()), block);
            }
        }
    }

    /// Whether a device may be reading or writing a block that has no record.
    ///
    /// A copy from pageable memory is staged before its call returns, except where the device reads
    /// pageable memory itself.
    fn may_be_in_use_without_record(&self, block: &Returned) -> bool {
        if !self.home.device_in_use() {
            return false;
        }
        block.is_pinned() || {
            let learned = self.home.contexts.learn_active_primaries(&self.home.driver);
            learned.is_err() || self.home.contexts.any_reads_pageable(&self.home.driver)
        }
    }
}
