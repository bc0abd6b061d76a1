//! Instruction counts of the hot paths, by callgrind, each held to a bound: times are noisy, these are not.
//!
//! `cargo bench --bench instructions` runs itself under `valgrind --tool=callgrind` for each path, prints the table and
//! fails where a bound is passed. Where there is no valgrind it says so and passes. Without cargo's `--bench` (so
//! under `cargo test --benches`) each path runs once, uncounted.
//!
//! Counted is what one function below executes on its own thread; the pool's threads are held meanwhile. A second table
//! has the cache lines that a cold call touches, beside those of the other pools (`instructions/cold.rs`).
#![allow(unsafe_code)] // vouches for buffers that were never used

#[path = "verdict/alternatives.rs"]
#[allow(dead_code)]
mod alternatives;
mod classic;
#[path = "instructions/cold.rs"]
mod cold;
mod common;

use pinpool::sim::Sim;
use pinpool::{Driver, PinnedBuffer, PinnedPool, SizeClasses};
use std::hint::black_box;
use std::process::{Command, ExitCode};
use std::time::Duration;

const BYTES: usize = 64 << 10;
/// Between two powers of two, where [`SizeClasses::steps`] has classes.
const FINER_BYTES: usize = 9 << 17;
const BURST: usize = 64;
/// Counted bursts; the ones before them warm caches of the allocator and the pool's queues.
const BURSTS: usize = 8;
const WARM_UP: usize = 4;
const PATH: &str = "PINPOOL_COUNTED_PATH";

/// A path: its name, the function that callgrind counts, and the most instructions that one operation may take.
///
/// The bounds are a tenth above what was counted when they were set (take 137, drop 191 to 206, recorded drop 201 to 214, harvest 623 to 683, a finer class 211: by what of the channel the compiler inlines). A small
/// function in the midst of a path is a call in one build and none in the next, twenty instructions apart: that is
/// what once made 189 of 164 for a take (`Stack::put`), so such a function says what it is to be.
const PATHS: [(&str, &str, u64); 8] = [
    ("take, a hit", "counted_takes", 151),
    ("the same, of a class between two powers of two", "counted_finer_takes", 232),
    ("drop, nothing recorded", "counted_drops", 226),
    ("record_last_use, the simulated device's part included", "counted_records", 895),
    ("the simulated device's part of that", "counted_device_calls", 617),
    ("drop, recorded", "counted_recorded_drops", 236),
    ("take of what was just returned (harvest), nothing dirty", "counted_harvests", 751),
    ("the same, recorded, the simulated device's part included", "counted_recorded_harvests", 1703),
];

fn main() -> ExitCode {
    if let Ok(path) = std::env::var(PATH) {
        run(&path);
        return ExitCode::SUCCESS;
    }
    if !std::env::args().any(|argument| argument == "--bench") {
        PATHS.iter().for_each(|(_, function, _)| run(function));
        cold::OPERATIONS[0].1.iter().for_each(|function| run(function));
        println!("{} paths ran once, uncounted.", PATHS.len() + cold::OPERATIONS.len());
        return ExitCode::SUCCESS;
    }
    match count_all() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) if why.is_empty() => {
            println!("nothing is counted: there is no valgrind here");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// Prints both tables; whether every bound is kept.
fn count_all() -> Result<bool, String> {
    let mut is_kept = true;
    let mut verdict = |count: u64, most: u64| {
        is_kept &= count <= most;
        if count > most { " PASSED" } else { "" }
    };
    println!("| path | instructions | at most |\n|---|---|---|");
    for (name, function, most) in PATHS {
        let each = count(function)? / (BURST * BURSTS) as u64;
        println!("| {name} | {each} | {most}{} |", verdict(each, most));
    }
    println!(
        "\n| cold: cache lines of code + data | pinpool | classic | plain sync pool | at most |\n|---|---|---|---|---|"
    );
    for (name, functions, most) in cold::OPERATIONS {
        let [ours, classic, sync] = functions.map(cold::lines_of);
        let (ours, shown) = (ours?, |(code, data): (u64, u64)| format!("{code} + {data} = {}", code + data));
        let verdict = verdict(ours.0 + ours.1, most);
        println!("| {name} | {} | {} | {} | {most}{verdict} |", shown(ours), shown(classic?), shown(sync?));
    }
    Ok(is_kept)
}

/// What callgrind counts in that function, all calls together; an empty error where there is no valgrind.
fn count(function: &str) -> Result<u64, String> {
    let text = callgrind(function, &[])?;
    read_count(&text, "Collected :").ok_or_else(|| format!("callgrind said:\n{text}"))
}

/// Runs this program for one path; gives what callgrind says.
fn callgrind(function: &str, options: &[&str]) -> Result<String, String> {
    let binary = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--collect-atstart=no", "--callgrind-out-file=/dev/null"])
        .args(options)
        .arg(format!("--toggle-collect=*{function}*"))
        .arg(binary)
        .env(PATH, function)
        .output()
        .map_err(|_| String::new())?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(text) } else { Err(format!("{function}: callgrind said:\n{text}")) }
}

/// The first number behind a label, as in "==123== LLd misses:        4,711  (  4,000 rd   +   711 wr)".
fn read_count(text: &str, label: &str) -> Option<u64> {
    let (_, number) = text.lines().find_map(|line| line.split_once(label))?;
    number.split_whitespace().next()?.replace(',', "").parse().ok()
}

fn run(function: &str) {
    match function {
        "counted_takes" => host(SizeClasses::PowerOfTwo, BYTES, counted_takes, Vec::clear),
        "counted_finer_takes" => host(SizeClasses::steps(8), FINER_BYTES, counted_finer_takes, Vec::clear),
        "counted_drops" => {
            host(SizeClasses::PowerOfTwo, BYTES, |pool, taken| take_all(pool, taken, BYTES), counted_drops)
        }
        "counted_harvests" => harvests(),
        "counted_recorded_harvests" => recorded_harvests(),
        "counted_device_calls" => device_calls(),
        "counted_records" => records(counted_records, Vec::clear),
        "counted_recorded_drops" => records(record_all, counted_recorded_drops),
        other => assert!(cold::run(other), "there is no path {other:?}"),
    }
}

#[inline(never)]
fn counted_takes(pool: &PinnedPool, taken: &mut Vec<PinnedBuffer>) {
    take_all(pool, taken, BYTES);
}

#[inline(never)]
fn counted_finer_takes(pool: &PinnedPool, taken: &mut Vec<PinnedBuffer>) {
    take_all(pool, taken, FINER_BYTES);
}

#[inline(never)]
fn counted_drops(taken: &mut Vec<PinnedBuffer>) {
    black_box(taken).clear();
}

/// The constant keeps the linker from making one function of the two, of which neither would then be found.
#[inline(never)]
fn counted_recorded_drops(taken: &mut Vec<PinnedBuffer>) {
    black_box(1);
    black_box(taken).clear();
}

#[inline(never)]
fn counted_records(taken: &mut [PinnedBuffer], stream: &pinpool::sim::SimStream) {
    record_all(taken, stream);
}

#[inline(never)]
fn counted_harvests(pool: &PinnedPool, taken: &mut Vec<PinnedBuffer>) {
    black_box(2);
    take_all(pool, taken, BYTES);
}

#[inline(never)]
fn counted_recorded_harvests(pool: &PinnedPool, taken: &mut Vec<PinnedBuffer>) {
    black_box(3);
    take_all(pool, taken, BYTES);
}

/// What a record asks of the driver where nothing captures.
#[inline(never)]
fn counted_device_calls(sim: &Sim, stream: usize, event: usize) {
    for _ in 0..BURST {
        let status = sim.cuda().cu_stream_is_capturing(black_box(stream));
        assert_eq!(status, Ok(0));
        sim.cuda().cu_event_record(black_box(event), stream).expect("a record");
    }
}

#[inline(always)]
fn take_all(pool: &PinnedPool, taken: &mut Vec<PinnedBuffer>, bytes: usize) {
    (0..BURST).for_each(|_| taken.push(black_box(pool).take(bytes)));
}

#[inline(always)]
fn record_all(taken: &mut [PinnedBuffer], stream: &pinpool::sim::SimStream) {
    taken.iter_mut().for_each(|buffer| buffer.record_last_use(black_box(stream)).expect("a record"));
}

/// Bursts of takes and drops with the cleaner held in between, on a pool without a device.
fn host(
    classes: SizeClasses,
    bytes: usize,
    take: impl Fn(&PinnedPool, &mut Vec<PinnedBuffer>),
    give_back: impl Fn(&mut Vec<PinnedBuffer>),
) {
    let builder = PinnedPool::builder().driver(Driver::host_only()).size_classes(classes);
    let pool = builder.build().expect("the settings are right");
    let mut taken = Vec::with_capacity(BURST);
    warm_up(&pool, &mut taken, bytes);
    for _ in 0..BURSTS {
        let held = pool.hold_cleaner();
        take(&pool, &mut taken);
        taken.iter_mut().for_each(|buffer| buffer.set_dirty_len(0));
        give_back(&mut taken);
        drop(held);
        settle(&pool);
    }
    let stats = pool.stats();
    assert_eq!(stats.misses, BURST as u64, "every take after the first burst was a hit");
    assert_eq!(stats.classes.iter().map(|class| class.class_bytes).collect::<Vec<_>>(), [bytes]);
}

fn records(
    record: impl Fn(&mut [PinnedBuffer], &pinpool::sim::SimStream),
    give_back: impl Fn(&mut Vec<PinnedBuffer>),
) {
    let sim = Sim::zero_cost();
    let context = sim.context(0);
    let stream = context.stream();
    let pool = PinnedPool::builder().driver(sim.driver()).build().expect("the settings are right");
    let mut taken = Vec::with_capacity(BURST);
    warm_up(&pool, &mut taken, BYTES);
    for burst in 0..WARM_UP + BURSTS {
        let held = pool.hold_cleaner();
        take_all(&pool, &mut taken, BYTES);
        taken.iter_mut().for_each(|buffer| buffer.set_dirty_len(0));
        if burst < WARM_UP {
            record_all(&mut taken, &stream);
            taken.clear();
        } else {
            record(&mut taken, &stream);
            give_back(&mut taken);
        }
        drop(held);
        settle(&pool);
    }
    pool.shutdown();
}

fn harvests() {
    let pool = PinnedPool::builder().driver(Driver::host_only()).build().expect("the settings are right");
    let mut taken = Vec::with_capacity(BURST);
    warm_up(&pool, &mut taken, BYTES);
    let _held = pool.hold_cleaner();
    take_all(&pool, &mut taken, BYTES);
    for _ in 0..BURSTS {
        taken.iter_mut().for_each(|buffer| buffer.set_dirty_len(0));
        taken.clear();
        counted_harvests(&pool, &mut taken);
    }
    assert_eq!(pool.stats().harvested, (BURST * BURSTS) as u64, "every counted take was a harvest");
}

fn recorded_harvests() {
    let sim = Sim::zero_cost();
    let context = sim.context(0);
    let stream = context.stream();
    let pool = PinnedPool::builder().driver(sim.driver()).build().expect("the settings are right");
    let mut taken = Vec::with_capacity(BURST);
    warm_up(&pool, &mut taken, BYTES);
    let _held = pool.hold_cleaner();
    take_all(&pool, &mut taken, BYTES);
    for burst in 0..WARM_UP + BURSTS {
        taken.iter_mut().for_each(|buffer| buffer.set_dirty_len(0));
        record_all(&mut taken, &stream);
        taken.clear();
        match burst < WARM_UP {
            true => take_all(&pool, &mut taken, BYTES),
            false => counted_recorded_harvests(&pool, &mut taken),
        }
    }
    let harvests = (BURST * (WARM_UP + BURSTS)) as u64;
    assert_eq!(pool.stats().harvested, harvests, "every counted take was a harvest");
}

fn device_calls() {
    let sim = Sim::zero_cost();
    let context = sim.context(0);
    let stream = context.stream();
    let event = sim.cuda().cu_event_create(2).expect("an event");
    (0..BURSTS).for_each(|_| counted_device_calls(&sim, stream.handle(), event));
}

fn warm_up(pool: &PinnedPool, taken: &mut Vec<PinnedBuffer>, bytes: usize) {
    for _ in 0..WARM_UP {
        take_all(pool, taken, bytes);
        taken.iter_mut().for_each(|buffer| {
            buffer.set_dirty_len(0);
            // SAFETY: nobody has used the buffer.
            unsafe { buffer.assume_quiescent() };
        });
        taken.clear();
        settle(pool);
    }
}

fn settle(pool: &PinnedPool) {
    assert!(pool.drain(Duration::from_secs(60)), "the pool does not settle");
}
