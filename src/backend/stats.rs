//! What one backend did and holds.

use super::record::AllocationRecord;
use crate::stats::Count;

#[derive(Debug, Default)]
pub(super) struct Counters {
    allocated: Count,
    released: Count,
    refused: Count,
    rolled_back: Count,
    release_refused: Count,
    leaked: Count,
    leaked_bytes: Count,
}

impl Counters {
    pub(super) fn allocated(&self) {
        self.allocated.add(1);
    }

    pub(super) fn refused(&self) {
        self.refused.add(1);
    }

    pub(super) fn rolled_back(&self) {
        self.rolled_back.add(1);
    }

    pub(super) fn released(&self) {
        self.released.add(1);
    }

    pub(super) fn release_refused(&self) {
        self.release_refused.add(1);
    }

    pub(super) fn leaked(&self, bytes: usize) {
        self.leaked.add(1);
        self.leaked_bytes.add(bytes as u64);
    }

    pub(super) fn snapshot(&self, record: &AllocationRecord) -> BackendStats {
        BackendStats {
            live: record.len(),
            live_bytes: record.bytes(),
            allocated: self.allocated.read(),
            released: self.released.read(),
            refused: self.refused.read(),
            rolled_back: self.rolled_back.read(),
            release_refused: self.release_refused.read(),
            leaked: self.leaked.read(),
            leaked_bytes: self.leaked_bytes.read(),
        }
    }
}

/// A snapshot of what a backend did and holds. At every quiet moment `allocated` is the sum of `live`, `released`,
/// and those of `leaked` that a caller had.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackendStats {
    /// Allocations that are not given back.
    pub live: usize,
    /// Bytes of them.
    pub live_bytes: usize,
    /// Allocations that a caller got.
    pub allocated: u64,
    /// Allocations that were given back and released.
    pub released: u64,
    /// Allocations that failed, rolled back ones included.
    pub refused: u64,
    /// Allocations that the driver gave and the record had no room for.
    pub rolled_back: u64,
    /// Releases that failed: not ours, of another size, given back before, or refused by the driver.
    pub release_refused: u64,
    /// Leaked: the driver refused to take it back, or its user did not know whether a device is done with it.
    pub leaked: u64,
    /// Bytes of them.
    pub leaked_bytes: u64,
}
