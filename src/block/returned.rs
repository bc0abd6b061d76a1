//! A block between its return and the end of the device work on it.

use super::{Fate, Proof, Quiescent, Returned, Uses};
use crate::driver::{ContextHandle, Driver};
use crate::events;
use crate::quarantine;
use crate::sync::Instant;

impl Returned {
    pub(crate) fn uses(&self) -> &Uses {
        &self.0.uses
    }

    pub(crate) fn fate(&self) -> Fate {
        self.0.fate
    }

    pub(crate) fn seen_context(&self) -> Option<ContextHandle> {
        self.0.seen_context
    }

    pub(crate) fn dirty_bytes(&self) -> usize {
        self.0.dirty_bytes
    }

    /// Captured, into graphs whose end somebody will tell.
    pub(crate) fn is_held(&mut self) -> bool {
        self.0.fate == Fate::Captured && self.0.holds.get_mut().can_end()
    }

    /// Whether the graphs that it is held for are gone.
    pub(crate) fn holds_are_over(&mut self) -> bool {
        self.0.holds.get_mut().are_over()
    }

    /// The graphs are gone: from now on it is like a block without a record, returned now.
    pub(crate) fn resume(&mut self, epoch: usize) {
        self.0.holds.get_mut().clear();
        self.0.fate = Fate::RecordFailed;
        self.0.epoch = epoch as u8;
    }

    /// Queued in this drain epoch, held as it is.
    pub(crate) fn queued_again(mut self, epoch: usize) -> Self {
        self.0.epoch = epoch as u8;
        self
    }

    /// The context that was current at the drop could not be asked for.
    pub(crate) fn lost_its_context(&mut self) {
        self.0.lose_its_context();
    }

    /// Every context that may hold work of the block was synchronised after its return.
    pub(crate) fn contexts_are_idle(&mut self) {
        self.0.fate = Fate::ContextsIdle;
    }

    /// What a block that is done may be settled by.
    pub(crate) fn proof(&self) -> Proof {
        match self.0.fate {
            Fate::Proven => Proof::NothingOutstanding,
            Fate::ContextsIdle => Proof::ContextsIdle,
            Fate::Recorded | Fate::RecordFailed | Fate::Unknown | Fate::Captured => Proof::EventsComplete,
        }
    }

    pub(crate) fn generation(&self) -> u32 {
        self.0.generation
    }

    pub(crate) fn stamp(&mut self, now: Instant) {
        self.0.returned_at = Some(now);
    }

    pub(crate) fn returned_at(&self) -> Option<Instant> {
        self.0.returned_at
    }

    /// The only way to [`Quiescent`]; events that the proof covers go back to their pools.
    pub(crate) fn settle(mut self, driver: &Driver, proof: Proof) -> Quiescent {
        for used in std::mem::take(&mut self.0.uses) {
            match proof {
                Proof::EventsComplete => events::keep(&mut self.0.spare, used),
                Proof::ContextsIdle | Proof::NothingOutstanding => events::discard(driver, used),
            }
        }
        // What was noted is over; a block that was recorded alone has no notes, and they are on a line of their own.
        if self.0.fate != Fate::Recorded {
            self.0.notes.get_mut().clear();
        }
        self.0.fate = Fate::Recorded;
        self.0.seen_context = None;
        self.0.returned_at = None;
        Quiescent(self.0)
    }

    /// Leaks the block with its events; the caller counts it.
    pub(crate) fn quarantine(mut self) {
        if let Some(spare) = self.0.spare.take() {
            spare.give_back();
        }
        self.0.pages.leak();
        quarantine::keep(self.0);
    }
}
