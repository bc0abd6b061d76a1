//! What `pin` did and holds, for the whole process.

use crate::driver::exit;
use crate::sync::fixed::{AtomicU64, AtomicUsize};
use crate::sync::{Instant, Ordering, Progress, process_wide};
use std::time::Duration;

pub(super) static STATS: Counters = Counters::new();

process_wide! {
    /// Moved whenever something that was dropped has been dealt with.
    static PROGRESS: Progress = Progress::new();
}

pub(super) struct Counters {
    pinned_buffers: AtomicUsize,
    pinned_bytes: AtomicUsize,
    waiting_buffers: AtomicUsize,
    waiting_bytes: AtomicUsize,
    leaked_buffers: AtomicUsize,
    leaked_bytes: AtomicUsize,
    released_buffers: AtomicU64,
    regions: AtomicUsize,
    region_bytes: AtomicUsize,
    refusals: AtomicU64,
    unregistration_failures: AtomicU64,
}

impl Counters {
    const fn new() -> Self {
        Self {
            pinned_buffers: AtomicUsize::new(0),
            pinned_bytes: AtomicUsize::new(0),
            waiting_buffers: AtomicUsize::new(0),
            waiting_bytes: AtomicUsize::new(0),
            leaked_buffers: AtomicUsize::new(0),
            leaked_bytes: AtomicUsize::new(0),
            released_buffers: AtomicU64::new(0),
            regions: AtomicUsize::new(0),
            region_bytes: AtomicUsize::new(0),
            refusals: AtomicU64::new(0),
            unregistration_failures: AtomicU64::new(0),
        }
    }

    pub(super) fn refused(&self) {
        self.refusals.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn registered(&self, bytes: usize) {
        self.regions.fetch_add(1, Ordering::Relaxed);
        self.region_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn unregistered(&self, bytes: usize) {
        self.regions.fetch_sub(1, Ordering::Relaxed);
        self.region_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn not_unregistered(&self) {
        self.unregistration_failures.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn pinned(&self, bytes: usize) {
        self.pinned_buffers.fetch_add(1, Ordering::Relaxed);
        self.pinned_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// From its user to the release machinery.
    pub(super) fn dropped(&self, bytes: usize) {
        self.waiting_buffers.fetch_add(1, Ordering::SeqCst);
        self.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.pinned_buffers.fetch_sub(1, Ordering::Relaxed);
        self.pinned_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn released(&self, bytes: usize) {
        self.released_buffers.fetch_add(1, Ordering::Relaxed);
        self.dealt_with(bytes);
    }

    pub(super) fn leaked(&self, bytes: usize) {
        self.leaked_buffers.fetch_add(1, Ordering::Relaxed);
        self.leaked_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.dealt_with(bytes);
    }

    fn dealt_with(&self, bytes: usize) {
        self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.waiting_buffers.fetch_sub(1, Ordering::SeqCst);
        PROGRESS.announce();
    }
}

/// A snapshot of what [`pin`](super) did and holds in this process, over all drivers. Bytes are exact.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinStats {
    /// [`Pinned`](super::Pinned) values alive.
    pub pinned_buffers: usize,
    /// Bytes of them.
    pub pinned_bytes: usize,
    /// Dropped, and waited for or being unregistered.
    pub waiting_buffers: usize,
    /// Bytes of them.
    pub waiting_bytes: usize,
    /// Leaked on purpose: it could not be unregistered, or whether the device is done with it is not known.
    pub leaked_buffers: usize,
    /// Bytes of them.
    pub leaked_bytes: usize,
    /// Dropped, unregistered, and freed or given back.
    pub released_buffers: u64,
    /// Regions of the caller's that are registered (`register_region`, `pin_all`), those included that could
    /// not be unregistered.
    pub regions: usize,
    /// Bytes of them.
    pub region_bytes: usize,
    /// Refused page-lockings.
    pub refusals: u64,
    /// Failed unregistrations of regions.
    pub unregistration_failures: u64,
}

/// What was pinned, is waited for, and was leaked, in this process.
pub fn stats() -> PinStats {
    let size = |count: &AtomicUsize| count.load(Ordering::Relaxed);
    let total = |count: &AtomicU64| count.load(Ordering::Relaxed);
    PinStats {
        pinned_buffers: size(&STATS.pinned_buffers),
        pinned_bytes: size(&STATS.pinned_bytes),
        waiting_buffers: size(&STATS.waiting_buffers),
        waiting_bytes: size(&STATS.waiting_bytes),
        leaked_buffers: size(&STATS.leaked_buffers),
        leaked_bytes: size(&STATS.leaked_bytes),
        released_buffers: total(&STATS.released_buffers),
        regions: size(&STATS.regions),
        region_bytes: size(&STATS.region_bytes),
        refusals: total(&STATS.refusals),
        unregistration_failures: total(&STATS.unregistration_failures),
    }
}

/// Waits until every [`Pinned`](super::Pinned) that was dropped is freed, or leaked. False when the timeout
/// came first.
pub fn drain(timeout: Duration) -> bool {
    if exit::is_shut() {
        return false;
    }
    let done = || STATS.waiting_buffers.load(Ordering::SeqCst) == 0;
    PROGRESS.wait_until(Instant::now().checked_add(timeout), done)
}
