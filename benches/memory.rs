//! What fresh memory costs, and who pays: figures for `docs/performance.md`, on the simulated device with the constants of
//! its real-time clock.
//!
//! ```text
//! cargo bench --bench memory                 everything: misses, prewarm, lanes
//! cargo bench --bench memory -- prewarm      one of them
//! ```
//!
//! Medians of turns in which every column is measured once. On a machine that does other things too, threads that run at
//! once get no more of it than one does: then the time of the processor says what sharing costs. Without cargo's `--bench` everything runs once, small.
#![allow(unsafe_code)] // registers memory by hand, for lanes that the pool does not have

use pinpool::sim::{Cuda, Sim};
use pinpool::{Driver, HugePages, PinnedBuffer, PinnedPool};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const PAGES: [(&str, HugePages); 2] =
    [("huge pages advised", HugePages::Advise), ("ordinary pages", HugePages::Never)];

fn main() {
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let (turns, bytes, count) = if is_bench { (5, 64 * MIB, 16) } else { (1, 16 * MIB, 2) };
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let wants = |name: &str| wanted.as_deref().is_none_or(|wanted| wanted == name);
    if wants("misses") {
        misses(turns, bytes);
    }
    if wants("prewarm") {
        prewarm(turns, bytes, count);
    }
    if wants("lanes") {
        lanes(turns, bytes, count);
    }
}

/// What a caller waits for who takes a miss and fills it.
fn misses(turns: usize, large: usize) {
    println!("a miss: take, fill, both");
    for (pages, huge_pages) in PAGES {
        for bytes in [MIB, large] {
            let mut columns = [false, true].map(|prefault| (prefault, Vec::new(), Vec::new()));
            for _ in 0..turns {
                for (prefault, takes, fills) in &mut columns {
                    let builder = PinnedPool::builder().driver(Driver::host_only()).huge_pages(huge_pages);
                    let pool = builder.max_pooled_bytes(0).prefault_misses(*prefault).build().expect("right");
                    let start = Instant::now();
                    let mut buffer = pool.take(bytes);
                    takes.push(start.elapsed());
                    buffer.fill(1);
                    fills.push(start.elapsed());
                    black_box(&buffer[..]);
                }
            }
            for (prefault, takes, both) in columns {
                let (take, both) = (median(takes), median(both));
                println!(
                    "  {} MiB, {pages}, prefault {}: {take:.1?}, {:.1?}, {both:.1?}",
                    bytes / MIB,
                    if prefault { "on " } else { "off" },
                    both - take,
                );
            }
        }
    }
}

fn device() -> Sim {
    Sim::builder().real_time().mapping_check(false).build()
}

/// On one thread, and on as many as the pool finds useful.
fn prewarm(turns: usize, bytes: usize, count: usize) {
    println!("prewarm({} MiB, {count})", bytes / MIB);
    for (pages, huge_pages) in PAGES {
        let mut columns = [Some(1), None].map(|threads| (threads, Vec::new(), Vec::new()));
        for _ in 0..turns {
            for (threads, times, processor) in &mut columns {
                let sim = device();
                let _context = sim.context(0);
                let builder = PinnedPool::builder().driver(sim.driver()).huge_pages(huge_pages);
                let builder = builder.max_pooled_bytes(2 * count * bytes);
                let builder = match threads {
                    Some(threads) => builder.prewarm_threads(*threads),
                    None => builder,
                };
                let pool = builder.build().expect("the settings are right");
                let (start, used) = (Instant::now(), processor_time());
                assert_eq!(pool.prewarm(bytes, count), Ok(count));
                times.push(start.elapsed());
                processor.push(processor_time() - used);
                pool.shutdown();
            }
        }
        let [one, all] = columns.map(|(_, times, processor)| (median(times), median(processor)));
        let ratio = all.0.as_secs_f64() / one.0.as_secs_f64();
        println!(
            "  {pages}: one thread {:.1?}, as many as are of use {:.1?}, ratio {ratio:.2}; of the processor {:.1?} and {:.1?}",
            one.0, all.0, one.1, all.1
        );
    }
}

/// So many lanes that touch and register what is returned, and a caller of something else that meets the driver's lock.
fn lanes(turns: usize, bytes: usize, count: usize) {
    println!("{count} buffers of {} MiB registered in the background, driver lock on", bytes / MIB);
    for (pages, huge_pages) in PAGES {
        let mut columns = [1, 2].map(|lanes| (lanes, Vec::new(), Vec::new(), Vec::new()));
        for _ in 0..turns {
            for (lanes, ready, longest, stalled) in &mut columns {
                let run = run_lanes(*lanes, huge_pages, bytes, count);
                ready.push(run.0);
                longest.push(run.1);
                stalled.push(run.2);
            }
        }
        for (lanes, ready, longest, stalled) in columns {
            println!(
                "  {pages}, {lanes} lane(s): all ready after {:.1?}; another's call waits {:.1?} at most, {:.1?} in all",
                median(ready),
                median(longest),
                median(stalled),
            );
        }
    }
}

/// Until all are ready, the longest call of somebody else's meanwhile, and the sum of those that waited.
fn run_lanes(
    lanes: usize,
    huge_pages: HugePages,
    bytes: usize,
    count: usize,
) -> (Duration, Duration, Duration) {
    let sim = device();
    let context = sim.context(0);
    // Its takes map, and touch where they are asked to: what a lane does before it registers.
    let builder = PinnedPool::builder().driver(Driver::host_only()).huge_pages(huge_pages);
    let pool = builder.max_pooled_bytes(0).prefault_misses(true).build().expect("the settings are right");
    let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let cuda: Cuda = sim.cuda().clone();
    let lane = || {
        cuda.cu_ctx_set_current(context.handle()).expect("its context");
        let mut done: Vec<PinnedBuffer> = Vec::new();
        while next.fetch_add(1, Ordering::Relaxed) < count {
            let mut buffer = pool.take(bytes);
            cuda.cu_mem_host_register(buffer.as_mut_ptr(), bytes, 0).expect("registered");
            done.push(buffer);
        }
        done
    };
    let other = || {
        cuda.cu_ctx_set_current(context.handle()).expect("its context");
        let (mut longest, mut stalled) = (Duration::ZERO, Duration::ZERO);
        while !is_over.load(Ordering::Relaxed) {
            let start = Instant::now();
            cuda.cu_ctx_get_device().expect("a cheap call");
            let time = start.elapsed();
            longest = longest.max(time);
            if time > Duration::from_micros(100) {
                stalled += time;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        (longest, stalled)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(other);
        let start = Instant::now();
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(lane)).collect();
        let buffers: Vec<_> = lanes.into_iter().flat_map(|lane| lane.join().expect("a lane")).collect();
        let ready = start.elapsed();
        is_over.store(true, Ordering::Relaxed);
        let (longest, stalled) = other.join().expect("the other");
        for buffer in &buffers {
            cuda.cu_mem_host_unregister(buffer.as_ptr().cast_mut()).expect("unregistered");
        }
        (ready, longest, stalled)
    })
}

/// What this process has used of the processor, all its threads together.
fn processor_time() -> Duration {
    // SAFETY: numbers, for which zero is as good as any.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: getrusage writes the structure that it is given.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let time = |of: libc::timeval| Duration::new(of.tv_sec as u64, of.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
