//! What rounding costs, and what it buys: three traces of real sizes, played through a pool on the simulated device with
//! each of the size classes that `PoolBuilder::size_classes` offers.
//!
//! ```text
//! cargo bench --bench footprint              plays them, prints the table of `benches/README.md`
//! cargo bench --bench footprint -- --quick   a round of each, the large sizes divided
//! ```
//!
//! Nothing is timed: on the stepped clock every run gives the same numbers. All sizes are the real ones, for which it needs
//! 2.2 GiB of memory; where less than twice that is free it divides the large ones, and says so. It fails where a promise is
//! broken (a buffer too small, more waste than the classes allow, a cap or a ceiling passed). Without cargo's `--bench` (so
//! under `cargo test --benches`) it is quick.

mod traces;

use pinpool::sim::{Sim, SimStream};
use pinpool::{PinnedBuffer, PinnedPool, SizeClasses, Stats};
use std::collections::VecDeque;
use std::time::Duration;
use traces::{Random, TRACES, Trace};

const SEED: u64 = 0x5eed_f007;
const PATIENCE: Duration = Duration::from_secs(120);
/// Real memory is rounded finely from here on; a trace that is scaled down, from as much lower.
const FROM_BYTES: usize = 1 << 20;
/// What has to be free for the real sizes: twice what is page-locked at most.
const ROOM_BYTES: u64 = 4400 << 20;

fn main() {
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let is_quick = !is_bench || std::env::args().any(|argument| argument == "--quick");
    let is_small = is_quick || free_bytes().is_some_and(|free| free < ROOM_BYTES);
    println!("The seed is {SEED:#x}.\n");
    println!(
        "| trace | classes | never asked for | pinned buffers | page-locked at most | times what was in use | hit rate | \
         cap as large as that: hit rate | page-locked at most | ceiling as large as that: hit rate |\n\
         |---|---|---|---|---|---|---|---|---|---|"
    );
    for trace in &TRACES {
        let rounds = if is_quick { trace.rounds_quick } else { trace.rounds };
        let scale_log2 = if is_small { trace.small_log2 } else { 0 };
        let asked = sizes(trace, rounds, scale_log2);
        let in_use = most_in_use(trace, &asked);
        for per_doubling in [1, 2, 4, 8] {
            row(trace, &Rounding { per_doubling, from_bytes: FROM_BYTES >> scale_log2 }, &asked, in_use);
        }
    }
    println!();
    for Trace { name, source, window, small_log2, .. } in &TRACES {
        let scale = match is_small && *small_log2 > 0 {
            true => format!("sizes divided by {}", 1 << small_log2),
            false => "the real sizes".into(),
        };
        println!("* {name}: {source}; {window} buffers in use at once, {scale}.");
    }
}

/// Memory that the machine says can be had; `None` where it does not say.
fn free_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Size classes, and what the documentation says that they come to.
struct Rounding {
    per_doubling: usize,
    from_bytes: usize,
}

impl Rounding {
    fn name(&self) -> String {
        if self.per_doubling == 1 { "powers of two".into() } else { format!("{} steps", self.per_doubling) }
    }

    fn classes(&self) -> SizeClasses {
        match *self {
            Self { per_doubling: 1, .. } => SizeClasses::PowerOfTwo,
            Self { per_doubling, from_bytes } => SizeClasses::Steps { per_doubling, from_bytes },
        }
    }

    /// Without a pool: the power of two below is cut into so many steps, and the next step is the length.
    fn len_of(&self, bytes: usize) -> usize {
        let next = bytes.next_power_of_two();
        if next <= self.from_bytes { next } else { bytes.next_multiple_of(next / 2 / self.per_doubling) }
    }

    /// The most that may be wasted of a buffer, and so of all: below where the steps begin little is asked for.
    fn most_wasted(&self) -> f64 {
        if self.per_doubling == 1 { 0.5 } else { 1.0 / (self.per_doubling + 1) as f64 }
    }
}

fn row(trace: &Trace, rounding: &Rounding, asked: &[usize], in_use: usize) {
    let free =
        play(trace, rounding, asked, Limits { pooled_bytes: usize::MAX, registered_bytes: usize::MAX });
    // As much as is in use at the busiest moment, so that what one class keeps idle another one lacks.
    let capped = play(trace, rounding, asked, Limits { pooled_bytes: in_use, registered_bytes: 2 * in_use });
    // Less than is in use, rounded up: something has to stay pageable.
    let tight = play(trace, rounding, asked, Limits { pooled_bytes: usize::MAX, registered_bytes: in_use });
    let (waste, of_in_use) =
        (1.0 - ratio(asked.iter().sum(), free.given_bytes), ratio(free.stats.peak_registered_bytes, in_use));
    let percent = |part: f64| format!("{:.1} %", part * 100.0);
    println!(
        "| {} | {} | {} | {} | {} | {of_in_use:.2} | {} | {} | {} | {} |",
        trace.name,
        rounding.name(),
        percent(waste),
        free.stats.registrations,
        mib(free.stats.peak_registered_bytes),
        percent(free.hit_rate()),
        percent(capped.hit_rate()),
        mib(capped.stats.peak_registered_bytes),
        percent(tight.hit_rate()),
    );
    assert!(waste <= rounding.most_wasted(), "{}, {}: {waste} was wasted", trace.name, rounding.name());
}

/// What a trace asks for, one round after the other.
fn sizes(trace: &Trace, rounds: usize, scale_log2: u32) -> Vec<usize> {
    let mut random = Random::new(SEED);
    (0..rounds).flat_map(|_| (trace.round)(&mut random)).map(|bytes| bytes >> scale_log2).collect()
}

/// The most bytes that were asked for and are in use at one moment: no pool can lock less.
fn most_in_use(trace: &Trace, asked: &[usize]) -> usize {
    asked.windows(trace.window).map(|window| window.iter().sum()).max().unwrap_or(0)
}

/// The pool's cap on what is idle, and its ceiling on everything page-locked.
struct Limits {
    pooled_bytes: usize,
    registered_bytes: usize,
}

struct Played {
    given_bytes: usize,
    stats: Stats,
}

impl Played {
    fn hit_rate(&self) -> f64 {
        let hits = self.stats.hits + self.stats.harvested;
        hits as f64 / (hits + self.stats.misses + self.stats.unpinned_hits) as f64
    }
}

/// Every buffer is written to a little, recorded when it is the oldest of those in use, and dropped; the device is done
/// with it, and the pool has dealt with it, before the next one is taken.
fn play(trace: &Trace, rounding: &Rounding, asked: &[usize], limits: Limits) -> Played {
    let sim = Sim::new();
    let context = sim.context(0);
    let builder = PinnedPool::builder().driver(sim.driver()).size_classes(rounding.classes());
    let builder = builder.max_pooled_bytes(limits.pooled_bytes).max_registered_bytes(limits.registered_bytes);
    let pool = builder.build().expect("the settings are right");
    let device = Device { stream: context.stream(), sim };
    let mut in_use: VecDeque<PinnedBuffer> = VecDeque::new();
    let mut given_bytes = 0;
    for bytes in asked {
        while in_use.len() >= trace.window {
            device.use_up(&pool, in_use.pop_front());
        }
        let buffer = pool.take(*bytes);
        assert_eq!(buffer.len(), rounding.len_of(*bytes), "{bytes} asked, {}", rounding.name());
        given_bytes += buffer.len();
        in_use.push_back(buffer);
    }
    in_use.into_iter().for_each(|buffer| device.use_up(&pool, Some(buffer)));
    let stats = pool.stats();
    assert!(stats.is_balanced() && stats.registered_bytes == device.sim.registered_bytes(), "{stats}");
    assert!(stats.peak_registered_bytes <= limits.registered_bytes, "the ceiling is hard: {stats}");
    assert!(stats.pooled_bytes <= limits.pooled_bytes, "the cap is hard: {stats}");
    pool.shutdown();
    assert_eq!(device.sim.registered_bytes(), 0, "something stayed page-locked: {}", pool.stats());
    device.sim.assert_clean();
    Played { given_bytes, stats }
}

struct Device {
    stream: SimStream,
    sim: Sim,
}

impl Device {
    fn use_up(&self, pool: &PinnedPool, buffer: Option<PinnedBuffer>) {
        let Some(mut buffer) = buffer else { return };
        buffer[0] = 1;
        buffer.set_dirty_len(1);
        buffer.record_last_use(&self.stream).expect("a record");
        drop(buffer);
        self.sim.run_until_idle();
        assert!(pool.drain(PATIENCE), "the pool does not settle: {}", pool.stats());
    }
}

fn ratio(part: usize, whole: usize) -> f64 {
    part as f64 / whole as f64
}

fn mib(bytes: usize) -> String {
    format!("{} MiB", bytes >> 20)
}
