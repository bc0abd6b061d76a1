//! The line of every second, and the accounts at the end.

use crate::options::Faults;
use crate::world::World;
use pinpool::{PinnedPool, Stats};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the pool may take to deal with the last returns.
const DRAIN: Duration = Duration::from_secs(60);

/// Memory that comes and goes beside the pool's: the allocator's, stacks, device memory that was freed and is kept.
const RSS_SLACK_BYTES: u64 = 64 << 20;

pub const THREAD_NAME: &str = "soak-pool";

const MIB: u64 = 1 << 20;

/// From now on the allocator gives back what is large as soon as it is freed, so that what is resident says something.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code)]
pub fn keep_no_large_memory() {
    // SAFETY: mallopt takes two numbers; no other thread runs yet.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn keep_no_large_memory() {}

/// What the system says of this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Process {
    pub rss_bytes: u64,
    pub pinned_bytes: u64,
    pub mappings: usize,
    pub pool_threads: usize,
}

impl Process {
    /// Zeros where the system does not say.
    pub fn now() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        Self {
            rss_bytes: field("VmRSS:").unwrap_or(0) << 10,
            pinned_bytes: field("VmPin:").unwrap_or(0) << 10,
            mappings: std::fs::read_to_string("/proc/self/maps").map_or(0, |maps| maps.lines().count()),
            pool_threads: names.filter(|name| name.starts_with(THREAD_NAME)).count(),
        }
    }
}

/// What one line is a difference to.
#[derive(Default)]
pub struct Ticker {
    stats: Stats,
    copies: u64,
    checked_bytes: u64,
}

impl Ticker {
    pub fn line(&mut self, world: &World, pools: &[PinnedPool], elapsed: Duration, faults: &[&str]) {
        let (stats, process) = (sum(pools), Process::now());
        let copies = world.copies.load(Ordering::Relaxed);
        let checked_bytes = world.checked_bytes.load(Ordering::Relaxed);
        let takes = |stats: &Stats| stats.hits + stats.unpinned_hits + stats.harvested + stats.misses;
        println!(
            "{:4} s  {:6} copies {:5} MB checked  {:6} takes: {} hit {} harvested {} missed  \
             {} MiB pooled {} out {} queued {} held {} quarantined {} page-locked  rss {} VmPin {} MiB  {}",
            elapsed.as_secs(),
            copies - self.copies,
            (checked_bytes - self.checked_bytes) / 1_000_000,
            takes(&stats) - takes(&self.stats),
            stats.hits + stats.unpinned_hits - self.stats.hits - self.stats.unpinned_hits,
            stats.harvested - self.stats.harvested,
            stats.misses - self.stats.misses,
            stats.pooled_bytes as u64 / MIB,
            stats.checked_out_bytes as u64 / MIB,
            stats.queued_bytes as u64 / MIB,
            stats.held_bytes as u64 / MIB,
            stats.quarantined_bytes as u64 / MIB,
            stats.registered_bytes as u64 / MIB,
            process.rss_bytes / MIB,
            process.pinned_bytes / MIB,
            faults.join(", "),
        );
        *self = Self { stats, copies, checked_bytes };
    }
}

/// What all pools together did and hold, as far as it is told here.
fn sum(pools: &[PinnedPool]) -> Stats {
    pools.iter().map(PinnedPool::stats).fold(Stats::default(), |mut sum, of| {
        sum.hits += of.hits + of.unpinned_hits;
        sum.harvested += of.harvested;
        sum.misses += of.misses;
        sum.returned += of.returned;
        sum.evictions += of.evictions;
        sum.registrations += of.registrations;
        sum.unregistrations += of.unregistrations;
        sum.registration_failures += of.registration_failures;
        sum.record_failures += of.record_failures;
        sum.wait_failures += of.wait_failures;
        sum.context_waits += of.context_waits;
        sum.pooled_bytes += of.pooled_bytes;
        sum.checked_out_bytes += of.checked_out_bytes;
        sum.queued_bytes += of.queued_bytes;
        sum.held_bytes += of.held_bytes;
        sum.quarantined_bytes += of.quarantined_bytes;
        sum.registered_bytes += of.registered_bytes;
        sum
    })
}

/// Ends the pools, and holds their books against the devices' and the system's. Everything is dropped and nothing is held.
pub fn settle_accounts(world: &World, pools: &[PinnedPool], before: Process) {
    let demand = |is_so: bool, what: String| {
        if !is_so {
            world.found(what);
        }
    };
    // What graphs held comes back a moment after they are gone; those of a lost device may hold it for ever.
    let deadline = Instant::now() + Duration::from_secs(5);
    while sum(pools).held_bytes > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    for pool in pools {
        demand(pool.drain(DRAIN), format!("the pool did not settle: {:?}", pool.stats()));
    }
    check_books(world, pools, false, &demand);
    for pool in pools {
        let report = pool.shutdown();
        demand(report.completed, format!("the shutdown did not end in time: {report:?}"));
        report.reasons.iter().for_each(|reason| println!("leaked, for example: {reason}"));
        let stats = pool.stats();
        demand(
            stats.registered_bytes == stats.quarantined_pinned_bytes,
            format!(
                "{} bytes are page-locked, and {} quarantined",
                stats.registered_bytes, stats.quarantined_pinned_bytes
            ),
        );
        demand(
            (stats.pooled_bytes, stats.retiring_bytes, stats.staging_bytes, stats.held_bytes) == (0, 0, 0, 0),
            format!("something is left: {stats:?}"),
        );
    }
    check_books(world, pools, true, &demand);
    // A mild fault is no reason to leak.
    let may_leak = matches!(world.options.faults, Faults::Hard | Faults::Lost | Faults::Reset);
    let stats = sum(pools);
    let quarantined = stats.quarantined_bytes;
    demand(may_leak || quarantined == 0, format!("{quarantined} bytes were leaked"));
    let mut violations = world.sim.take_violations();
    if world.options.faults == Faults::Reset {
        // After a reset a pool has events whose handles may be another context's, until the driver refuses one.
        violations.retain(|violation| !violation.contains("belong to different contexts"));
    }
    demand(violations.is_empty(), format!("the simulated devices found {violations:?}"));
    check_graphs(world, &demand);
    check_process(quarantined as u64, before, &demand);
    println!(
        "copies {}, checked on the devices {} MB, checked to be zero {} MB; contexts that came and went {}",
        world.copies.load(Ordering::Relaxed),
        world.checked_bytes.load(Ordering::Relaxed) / 1_000_000,
        world.zero_checked_bytes.load(Ordering::Relaxed) / 1_000_000,
        world.visits.load(Ordering::Relaxed)
    );
    println!(
        "takes: {} hit, {} harvested, {} missed, {} returned; {} evictions",
        stats.hits, stats.harvested, stats.misses, stats.returned, stats.evictions
    );
    println!(
        "page-locked {} times and let go {} times; refused {}; records failed {}; waits failed {}, for contexts {}",
        stats.registrations,
        stats.unregistrations,
        stats.registration_failures,
        stats.record_failures,
        stats.wait_failures,
        stats.context_waits
    );
    println!(
        "left: {} bytes page-locked in the books of {} pools, {} on the devices, {} quarantined",
        stats.registered_bytes,
        pools.len(),
        locked_bytes(world),
        quarantined
    );
}

/// Hardly any capture is broken: only by a wait for a context that had begun, and for long, before waits were forbidden.
fn check_graphs(world: &World, demand: &dyn Fn(bool, String)) {
    let captures = world.captures.load(Ordering::Relaxed);
    let broken = world.broken_captures.load(Ordering::Relaxed);
    demand(broken <= 2 + captures / 20, format!("{broken} of {captures} captures were broken"));
    println!(
        "graphs captured {captures}, broken {broken}, replays compared {}",
        world.replays.load(Ordering::Relaxed)
    );
}

/// What the devices have page-locked, by whichever call.
fn locked_bytes(world: &World) -> usize {
    world.sim.registered_bytes() + world.sim.allocated_host_bytes()
}

fn check_books(world: &World, pools: &[PinnedPool], is_over: bool, demand: &dyn Fn(bool, String)) {
    for stats in pools.iter().map(PinnedPool::stats) {
        demand(stats.is_balanced(), format!("the accounts do not balance: {stats:?}"));
        let given = stats.hits + stats.unpinned_hits + stats.harvested + stats.misses;
        demand(
            given == stats.returned,
            format!("{given} buffers were given and {} came back", stats.returned),
        );
        demand(
            (stats.checked_out_buffers, stats.queued_buffers) == (0, 0),
            format!("{} buffers are out and {} queued", stats.checked_out_buffers, stats.queued_buffers),
        );
    }
    let (stats, locked) = (sum(pools), locked_bytes(world));
    let counted = stats.registered_bytes;
    let may_differ = world.options.faults == Faults::Reset
        && match counted > locked {
            // Of a reset that came last the pool learns when it calls the driver again.
            true => !is_over,
            // What was allocated in the moment of a reset is leaked as part of what ended, and is of the new context.
            false => locked - counted <= stats.quarantined_bytes,
        };
    demand(
        counted == locked || may_differ,
        format!("the pools count {counted} page-locked bytes and the devices {locked}"),
    );
}

fn check_process(quarantined_bytes: u64, before: Process, demand: &dyn Fn(bool, String)) {
    // A thread that has said that it ends may be seen for a moment.
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut now = Process::now();
    while now.pool_threads > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
        now = Process::now();
    }
    demand(now.pool_threads == 0, format!("{} threads of the pool are left", now.pool_threads));
    let bound = before.rss_bytes + quarantined_bytes + RSS_SLACK_BYTES;
    demand(
        now.rss_bytes <= bound,
        format!("{} MiB are resident, and {} were at the start", now.rss_bytes / MIB, before.rss_bytes / MIB),
    );
    println!(
        "resident {} MiB at the start and {} at the end; {} mappings and {}; no thread is left",
        before.rss_bytes / MIB,
        now.rss_bytes / MIB,
        before.mappings,
        now.mappings
    );
}
