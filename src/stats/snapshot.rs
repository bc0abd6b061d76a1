//! What a user reads: numbers of one moment, with their meaning.

use crate::config::BackingInUse;
use crate::placement::{HugePagesInUse, NumaInUse};
use std::time::Duration;

/// A snapshot of what a pool did and holds. Bytes are bytes of memory, not of requests.
///
/// While buffers move, the numbers are read one after the other; at a quiet moment they satisfy
/// [`Stats::is_balanced`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Takes served by a page-locked block from the shelf.
    pub hits: u64,
    /// Takes served by a pooled block that is not page-locked, because nothing could be.
    pub unpinned_hits: u64,
    /// Takes that mapped fresh memory.
    pub misses: u64,
    /// Takes served by a returned block that the cleaner had not shelved yet.
    pub harvested: u64,
    /// Guards dropped.
    pub returned: u64,
    /// Returned blocks that went to a shelf.
    pub recycled: u64,
    /// What is page-locked on this machine: the pool's own pages, memory of the driver's, or nothing, and why.
    pub backing: BackingInUse,
    /// Whether large buffers lie in huge pages.
    pub huge_pages: HugePagesInUse,
    /// On which NUMA node the pool's own pages lie; memory of the driver's lies where the driver puts it.
    pub numa: NumaInUse,
    /// Blocks page-locked (`cuMemHostRegister`, or `cuMemHostAlloc` as [`backing`](Self::backing) says).
    pub registrations: u64,
    /// Refused page-lockings; the block stayed pageable and was freed.
    pub registration_failures: u64,
    /// Blocks unregistered (`cuMemHostUnregister`).
    pub unregistrations: u64,
    /// Failed unregistrations; the memory is quarantined.
    pub unregistration_failures: u64,
    /// Blocks let go from a shelf: over the cap, lowered cap, `trim_to`, `clear`, `shutdown`.
    pub evictions: u64,
    /// Blocks let go from a shelf because nobody needed them for `max_idle_time`; not counted as evictions.
    pub aged_out: u64,
    /// Returned blocks that were freed without being page-locked, because the cap has no room for them.
    pub passed_over: u64,
    /// Failed `record_last_use` calls.
    pub record_failures: u64,
    /// Blocks quarantined because the driver could not say that the device is done with them.
    pub wait_failures: u64,
    /// Context-wide waits made for blocks without a record (`cuCtxSynchronize`), one a context and batch.
    pub context_waits: u64,
    /// Blocks on shelves.
    pub pooled_buffers: usize,
    /// Bytes on shelves; never above the cap.
    pub pooled_bytes: usize,
    /// Page-locked bytes on shelves.
    pub pooled_pinned_bytes: usize,
    /// Guards alive.
    pub checked_out_buffers: usize,
    /// Bytes of guards alive.
    pub checked_out_bytes: usize,
    /// Page-locked bytes of guards alive.
    pub checked_out_pinned_bytes: usize,
    /// Dropped, not yet dealt with.
    pub queued_buffers: usize,
    /// Bytes dropped, not yet dealt with.
    pub queued_bytes: usize,
    /// Page-locked bytes dropped, not yet dealt with.
    pub queued_pinned_bytes: usize,
    /// Page-locked, let go and not yet unregistered.
    pub retiring_bytes: usize,
    /// Pageable, let go and not yet unmapped.
    pub freeing_bytes: usize,
    /// Page-locked by `prewarm` or `take_pinned` and not yet on a shelf or with the caller.
    pub staging_bytes: usize,
    /// Dropped, and held because a graph that they were captured into still exists.
    pub held_buffers: usize,
    /// Page-locked bytes of these.
    pub held_bytes: usize,
    /// Deliberately leaked.
    pub quarantined_bytes: usize,
    /// Deliberately leaked and still page-locked.
    pub quarantined_pinned_bytes: usize,
    /// Page-locked now, counted where the driver is called.
    pub registered_bytes: usize,
    /// The most that was ever page-locked at once.
    pub peak_registered_bytes: usize,
    /// Bytes re-zeroed, by the cleaner and by harvesting takers.
    pub zeroed_bytes: u64,
    /// Time spent re-zeroing; prefixes below 16 KiB are not timed.
    pub zero_time: Duration,
    /// Time spent page-locking, faulting pages in included.
    pub register_time: Duration,
    /// Sum over blocks of the time between their return and the end of their wait.
    pub wait_time: Duration,
    /// The same per class, for every class that was ever used, smallest first.
    pub classes: Vec<ClassStats>,
}

impl Stats {
    /// The accounting equation, true at every quiet moment: what is registered is what is pooled, checked
    /// out, queued, retiring, staged, held or quarantined, each in its page-locked part.
    pub fn is_balanced(&self) -> bool {
        self.registered_bytes
            == self.pooled_pinned_bytes
                + self.checked_out_pinned_bytes
                + self.queued_pinned_bytes
                + self.retiring_bytes
                + self.staging_bytes
                + self.held_bytes
                + self.quarantined_pinned_bytes
    }

    /// Takes served without mapping fresh memory, as a share of all takes; 1 when there were none.
    pub fn hit_rate(&self) -> f64 {
        let hits = self.hits + self.unpinned_hits + self.harvested;
        let takes = hits + self.misses;
        if takes == 0 { 1.0 } else { hits as f64 / takes as f64 }
    }
}

/// One class's part of [`Stats`]. Buffers are counted; their bytes are as many times `class_bytes`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes of every block of the class: a power of two, or a step between two of them where
    /// [`SizeClasses`](crate::SizeClasses) ask for it.
    pub class_bytes: usize,
    /// Takes served by a page-locked block from the shelf.
    pub hits: u64,
    /// Takes served by a pooled block that is not page-locked.
    pub unpinned_hits: u64,
    /// Takes that mapped fresh memory.
    pub misses: u64,
    /// Takes served by a returned block that the cleaner had not shelved yet.
    pub harvested: u64,
    /// Guards dropped.
    pub returned: u64,
    /// Returned blocks that went to the shelf.
    pub recycled: u64,
    /// Blocks let go from the shelf for the cap, or by an order.
    pub evictions: u64,
    /// Blocks let go from the shelf because nobody needed them for `max_idle_time`.
    pub aged_out: u64,
    /// Returned blocks that were freed, because the cap has no room for them.
    pub passed_over: u64,
    /// Blocks page-locked.
    pub registrations: u64,
    /// Refused page-lockings.
    pub registration_failures: u64,
    /// Blocks unregistered.
    pub unregistrations: u64,
    /// Failed unregistrations.
    pub unregistration_failures: u64,
    /// Failed `record_last_use` calls.
    pub record_failures: u64,
    /// Blocks quarantined because the driver could not say that the device is done with them.
    pub wait_failures: u64,
    /// Bytes re-zeroed.
    pub zeroed_bytes: u64,
    /// Time spent re-zeroing; prefixes below 16 KiB are not timed.
    pub zero_time: Duration,
    /// Time spent page-locking, faulting pages in included.
    pub register_time: Duration,
    /// Sum over blocks of the time between their return and the end of their wait.
    pub wait_time: Duration,
    /// Blocks on the shelf.
    pub pooled_buffers: usize,
    /// Page-locked blocks on the shelf.
    pub pooled_pinned_buffers: usize,
    /// Dropped, not yet dealt with.
    pub queued_buffers: usize,
    /// Dropped, not yet dealt with, and page-locked.
    pub queued_pinned_buffers: usize,
    /// Guards alive.
    pub checked_out_buffers: usize,
    /// Guards alive whose memory is page-locked.
    pub checked_out_pinned_buffers: usize,
    /// Page-locked, let go and not yet unregistered.
    pub retiring_buffers: usize,
    /// Pageable, let go and not yet unmapped.
    pub freeing_buffers: usize,
    /// Page-locked by `prewarm` or `take_pinned` and not yet on a shelf or with the caller.
    pub staging_buffers: usize,
    /// Dropped, and held because a graph that they were captured into still exists.
    pub held_buffers: usize,
    /// Held for a graph, and page-locked.
    pub held_pinned_buffers: usize,
    /// Deliberately leaked.
    pub quarantined_buffers: usize,
    /// Deliberately leaked and still page-locked.
    pub quarantined_pinned_buffers: usize,
}
