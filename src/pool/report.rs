//! What a shutdown did, from the counts before and after.

use crate::stats::Stats;

/// What a shutdown did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Whether all threads ended in time; true also where memory had to be leaked, which `quarantined_bytes` says.
    pub completed: bool,
    /// Blocks unregistered by this shutdown.
    pub unregistered_buffers: u64,
    /// Page-locked bytes before and after.
    pub registered_bytes_before: usize,
    /// Page-locked bytes afterwards: quarantined, or in guards that are still alive.
    pub registered_bytes_after: usize,
    /// Guards that are still alive; they are released when they drop.
    pub checked_out_buffers: usize,
    /// Bytes that this shutdown had to leak.
    pub quarantined_bytes: usize,
    /// Why memory was leaked since the last report, the first few.
    pub reasons: Vec<String>,
}

impl ShutdownReport {
    pub(super) fn between(before: &Stats, after: &Stats, completed: bool, reasons: Vec<String>) -> Self {
        Self {
            completed,
            unregistered_buffers: after.unregistrations - before.unregistrations,
            registered_bytes_before: before.registered_bytes,
            registered_bytes_after: after.registered_bytes,
            checked_out_buffers: after.checked_out_buffers,
            quarantined_bytes: after.quarantined_bytes.saturating_sub(before.quarantined_bytes),
            reasons,
        }
    }
}
