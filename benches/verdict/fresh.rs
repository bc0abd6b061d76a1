//! Memory that is there for the first time: what a miss and its first fill cost, and getting many buffers ready ahead.

use crate::table::{Bar, Effort, Suite, Unit};
use pinpool::sim::Sim;
use pinpool::{Driver, HugePages, PinnedPool};
use std::hint::black_box;
use std::time::Instant;

const MIB: usize = 1 << 20;
const OURS: &str = "pinpool";
const VEC: &str = "vec![0; n]";
const WITHOUT: &str = "prefault off";
const ONE_THREAD: &str = "one thread";
const BY_HAND: &str = "map, touch and register each";
/// `CU_MEMHOSTREGISTER_PORTABLE`
const PORTABLE: u32 = 1;

pub fn add(suite: &mut Suite) {
    let effort = suite.effort;
    let allowed = huge_pages_are_allowed();
    let large = effort.pick(64 * MIB, 64 * MIB, MIB);
    let bars: &[Bar] = if allowed { &[Bar::Of(VEC, 0.35)] } else { &[] };
    suite.add(
        "first fill of a 64 MiB miss",
        Unit::Nanoseconds,
        bars,
        vec![
            (OURS, Box::new(move || misses(effort, large, HugePages::Advise, false))),
            (VEC, Box::new(move || fills(effort, || (), |()| vec![0u8; large]))),
        ],
    );
    // No bars: what these are held to is that nobody gets them without asking.
    let huge = if allowed { HugePages::Advise } else { HugePages::Never };
    for (name, bytes, pages) in [
        ("take and fill of a 1 MiB miss, prefault_misses", MIB, HugePages::Advise),
        ("take and fill of a 64 MiB miss in ordinary pages, prefault_misses", large, HugePages::Never),
        ("take and fill of a 64 MiB miss in huge pages, prefault_misses", large, huge),
    ] {
        suite.add(
            name,
            Unit::Nanoseconds,
            &[],
            vec![
                (OURS, Box::new(move || misses(effort, bytes, pages, true))),
                (WITHOUT, Box::new(move || misses(effort, bytes, pages, false))),
                (VEC, Box::new(move || fills(effort, || (), |()| vec![0u8; bytes]))),
            ],
        );
    }
    let (count, bytes) = effort.pick((16, 64 * MIB), (4, 16 * MIB), (2, 4 * MIB));
    for (what, pages) in [("huge pages", huge), ("ordinary pages", HugePages::Never)] {
        suite.add(
            &format!("prewarm({} MiB, {count}) in {what}", bytes / MIB),
            Unit::Nanoseconds,
            &[],
            vec![
                (OURS, Box::new(move || vec![prewarm(bytes, count, pages, None)])),
                (ONE_THREAD, Box::new(move || vec![prewarm(bytes, count, pages, Some(1))])),
                (BY_HAND, Box::new(move || vec![by_hand(bytes, count)])),
            ],
        );
    }
    suite.note(format!("Huge pages: {}.", if allowed { "allowed on advice" } else { "not allowed here" }));
    suite.note(
        "Page-locking by hand touches each page, as a driver does that finds it absent; registering costs the constants \
         of the simulated device in all three."
            .into(),
    );
}

fn huge_pages_are_allowed() -> bool {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    text.contains("[madvise]") || text.contains("[always]")
}

/// Of a new pool each time: what came back to an old one might be found again.
fn misses(effort: Effort, bytes: usize, pages: HugePages, prefault: bool) -> Vec<f64> {
    let pool = || {
        let builder = PinnedPool::builder().driver(Driver::host_only()).max_pooled_bytes(0);
        builder.huge_pages(pages).prefault_misses(prefault).build().expect("the settings are right")
    };
    fills(effort, pool, |pool| pool.take(bytes))
}

/// Getting the memory and filling it; letting go of it is left out.
fn fills<P, M: AsMut<[u8]>>(effort: Effort, from: impl Fn() -> P, get: impl Fn(&P) -> M) -> Vec<f64> {
    let one = |_| {
        let from = from();
        let start = Instant::now();
        let mut memory = get(&from);
        memory.as_mut().fill(1);
        let time = start.elapsed().as_nanos() as f64;
        black_box(memory.as_mut());
        time
    };
    (0..effort.pick(5, 2, 1)).map(one).collect()
}

fn device() -> Sim {
    Sim::builder().real_time().mapping_check(false).build()
}

fn prewarm(bytes: usize, count: usize, pages: HugePages, threads: Option<usize>) -> f64 {
    let sim = device();
    let _context = sim.context(0);
    let builder = PinnedPool::builder().driver(sim.driver()).huge_pages(pages);
    let builder = builder.max_pooled_bytes(2 * count * bytes);
    let builder = match threads {
        Some(threads) => builder.prewarm_threads(threads),
        None => builder,
    };
    let pool = builder.build().expect("the settings are right");
    let start = Instant::now();
    assert_eq!(pool.prewarm(bytes, count), Ok(count));
    let time = start.elapsed().as_nanos() as f64;
    assert_eq!(pool.stats().pooled_pinned_bytes, count * bytes, "all of them lie ready");
    assert!(pool.take(bytes).is_pinned(), "and can be had");
    pool.shutdown();
    time
}

/// What one would write without a pool.
fn by_hand(bytes: usize, count: usize) -> f64 {
    let sim = device();
    let context = sim.context(0);
    context.bind();
    let start = Instant::now();
    let one = |_| {
        let mut memory = vec![0u8; bytes];
        memory.iter_mut().step_by(4096).for_each(|byte| *black_box(byte) = 0);
        let registered = sim.cuda().cu_mem_host_register(memory.as_mut_ptr(), bytes, PORTABLE);
        registered.expect("the simulated device does not fail here");
        memory
    };
    let mut all: Vec<Vec<u8>> = (0..count).map(one).collect();
    let time = start.elapsed().as_nanos() as f64;
    for memory in &mut all {
        sim.cuda().cu_mem_host_unregister(memory.as_mut_ptr()).expect("it was registered once");
    }
    time
}
