//! What the pool's tests share: a simulated device in steps, a pool on it, and the checks after every scenario.
#![allow(dead_code)] // Each test file uses its own part.
#![allow(unsafe_code)] // Enqueueing a copy promises that the memory stays valid until it is done.

use pinpool::sim::{Sim, SimBuffer, SimContext, SimStream};
use pinpool::{Backing, PinnedBuffer, PinnedPool, PoolBuilder, SizeClasses, Stats};
use std::time::Duration;

/// Long enough that only a hang reaches it.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub const KIB: usize = 1 << 10;
pub const MIB: usize = 1 << 20;

/// What the suites' pools page-lock, by `PINPOOL_TEST_BACKING` (`registered` or `host_pinned`); the promises hold
/// with each, except that a buffer keeps its address when it is page-locked.
pub fn backing() -> Backing {
    match std::env::var("PINPOOL_TEST_BACKING").as_deref() {
        Err(_) => Backing::Auto,
        Ok("registered") => Backing::Registered,
        Ok("host_pinned") => Backing::HostPinned,
        Ok(other) => panic!("PINPOOL_TEST_BACKING={other}"),
    }
}

/// To which classes the suites' pools round, by `PINPOOL_TEST_SIZE_CLASSES` (`eighths`, from as low as they go); the
/// promises hold with each.
pub fn size_classes() -> SizeClasses {
    match std::env::var("PINPOOL_TEST_SIZE_CLASSES").as_deref() {
        Err(_) => SizeClasses::PowerOfTwo,
        Ok("eighths") => SizeClasses::Steps { per_doubling: 8, from_bytes: 1 },
        Ok(other) => panic!("PINPOOL_TEST_SIZE_CLASSES={other}"),
    }
}

/// The driver call that page-locks, with this backing.
pub fn lock_call() -> &'static str {
    if backing() == Backing::HostPinned { "cuMemHostAlloc" } else { "cuMemHostRegister" }
}

/// The same, as an error names it.
pub fn lock_symbol() -> &'static str {
    if backing() == Backing::HostPinned { "cuMemHostAlloc" } else { "cuMemHostRegister_v2" }
}

/// The driver call that ends it.
pub fn unlock_call() -> &'static str {
    if backing() == Backing::HostPinned { "cuMemFreeHost" } else { "cuMemHostUnregister" }
}

/// Whether the pool page-locks its own pages, so that a buffer stays where it is.
pub fn locks_its_own_pages() -> bool {
    backing() != Backing::HostPinned
}

/// Address and bytes of what the device says is page-locked.
pub fn locked(sim: &Sim) -> Vec<(usize, usize)> {
    let mut all = sim.live_registrations();
    all.extend(sim.live_host_allocations());
    all.sort_unstable();
    all
}

/// Bytes that the device says are page-locked.
pub fn locked_bytes(sim: &Sim) -> usize {
    sim.registered_bytes() + sim.allocated_host_bytes()
}

/// A simulated device on the stepped clock, its context current here, and a pool on it.
pub struct Rig {
    pub pool: PinnedPool,
    pub context: SimContext,
    pub sim: Sim,
}

impl Rig {
    pub fn new() -> Self {
        Self::with(Sim::new(), |builder| builder)
    }

    pub fn with(sim: Sim, settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Self {
        let context = sim.context(0);
        // On a machine so busy that the cleaner is taken off its core in mid-move, a take must not give up on it.
        let builder = PinnedPool::builder().driver(sim.driver()).harvest_wait_limit(PATIENCE);
        let builder = builder.backing(backing()).size_classes(size_classes());
        let pool = settings(builder).build().unwrap();
        Self { pool, context, sim }
    }

    /// Waits until everything returned so far is dealt with, and everything evicted so far is let go.
    pub fn drain(&self) {
        assert!(self.pool.drain(PATIENCE), "the pool did not settle: {:#?}", self.pool.stats());
        let deadline = std::time::Instant::now() + PATIENCE;
        while self.pool.stats().retiring_bytes > 0 {
            assert!(std::time::Instant::now() < deadline, "not let go: {:#?}", self.pool.stats());
            std::thread::yield_now();
        }
    }

    /// Leaves `count` page-locked buffers of the class on the shelf.
    pub fn shelve(&self, bytes: usize, count: usize) {
        let buffers: Vec<_> = (0..count).map(|_| self.pool.take(bytes)).collect();
        drop(buffers);
        self.drain();
    }

    /// A page-locked buffer, from a hit.
    pub fn pinned(&self, bytes: usize) -> PinnedBuffer {
        self.shelve(bytes, 1);
        let buffer = self.pool.take(bytes);
        assert!(buffer.is_pinned(), "the shelf gave a pageable buffer: {:#?}", self.pool.stats());
        buffer
    }

    /// The accounting equation, and the pool's books against the device's.
    pub fn assert_balanced(&self) -> Stats {
        let stats = self.pool.stats();
        assert!(stats.is_balanced(), "the accounts do not balance: {stats:#?}");
        assert_eq!(
            stats.registered_bytes,
            locked_bytes(&self.sim),
            "the driver counts otherwise: {stats:#?}"
        );
        assert!(stats.pooled_bytes <= self.pool.max_pooled_bytes(), "the cap is exceeded: {stats:#?}");
        assert_eq!(
            stats.hits + stats.unpinned_hits + stats.harvested + stats.misses,
            stats.returned + stats.checked_out_buffers as u64
        );
        self.sim.assert_clean();
        stats
    }

    /// Shuts down with no guard alive, and checks that everything came home.
    pub fn finish(self) {
        self.drain();
        self.assert_balanced();
        let report = self.pool.shutdown();
        assert!(report.completed, "{report:?}");
        let stats = self.assert_balanced();
        assert_eq!(
            stats.registered_bytes, stats.quarantined_pinned_bytes,
            "what is still registered is quarantined"
        );
        assert_eq!(
            (stats.pooled_buffers, stats.queued_buffers, stats.retiring_bytes),
            (0, 0, 0),
            "{stats:#?}"
        );
    }
}

/// Enqueues a copy of the first `len` bytes; the buffer is kept alive by the pool until it is done.
pub fn copy_to_device(stream: &SimStream, buffer: &PinnedBuffer, len: usize, device: &SimBuffer) {
    // SAFETY: the tests hand the buffer back to the pool, whose promise is that the memory stays valid and
    // unchanged until the copy is done; the simulated device checks that promise.
    unsafe { stream.copy_to_device(&buffer[..len], device) };
}

/// Waits for what some thread is about to do; false when it does not, though it had all the time.
pub fn in_time(mut is_so: impl FnMut() -> bool) -> bool {
    let deadline = std::time::Instant::now() + PATIENCE;
    while !is_so() {
        if std::time::Instant::now() > deadline {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// As [`in_time`], and panics.
pub fn until(what: &str, is_so: impl FnMut() -> bool) {
    assert!(in_time(is_so), "in vain: {what}");
}

/// A recognisable pattern.
pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index as u8).wrapping_mul(31).wrapping_add(seed) | 1).collect()
}

pub fn all_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}
