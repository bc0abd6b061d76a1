//! What a caller pays between take and drop.
#![allow(unsafe_code)] // holds a thread to a core

use crate::alternatives::{FreshVec, RegisterPerUse, SyncPool};
use crate::classic::ClassicPool;
use crate::common::rows::{self, Before, Use};
use crate::common::{BURST, Pinpool, Rig, Subject};
use crate::table::{Bar, Effort, Suite, Unit, median};
use pinpool::sim::Sim;
use pinpool::{Driver, PinnedPool};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const KIB_4: usize = 4 << 10;
const KIB_64: usize = 64 << 10;
const CLASSIC: &str = ClassicPool::NAME;
/// As measured on a driver (`pytorch#78279`); recording an event that is there took 0.1 us.
const EVENT_CREATION: Duration = Duration::from_nanos(2400);
/// The floor of a record that asks whether the stream captures.
const TWO_CALLS: &str = "the device's two calls alone";
const RMW: &str = "two atomic RMWs";

/// `CU_EVENT_DISABLE_TIMING`.
const EVENT_FLAGS: u32 = 2;

/// The longer pause.
const LONG_PAUSE: Duration = Duration::from_millis(2);

/// An operation of a pool in bursts, alone after a pause, and alone with nothing in any cache. That last one has no bar of
/// its own: it is there because what a pause leaves in the caches depends on the rest of the machine.
const TAKE: [(&str, Option<Before>, Option<f64>); 4] = [
    ("take hit, burst of 64", None, Some(0.8)),
    ("take hit, one per 200 us", Some(Before::Sleep(rows::PAUSE)), Some(0.3)),
    ("take hit, one per 2 ms", Some(Before::Sleep(LONG_PAUSE)), Some(0.4)),
    ("take hit, caches cold", Some(Before::ColdCaches), None),
];
const DROP: [(&str, Option<Before>, Option<f64>); 4] = [
    ("drop, burst of 64", None, Some(0.4)),
    ("drop, one per 200 us", Some(Before::Sleep(rows::PAUSE)), Some(0.08)),
    ("drop, one per 2 ms", Some(Before::Sleep(LONG_PAUSE)), Some(0.08)),
    ("drop, caches cold", Some(Before::ColdCaches), None),
];

pub fn add(suite: &mut Suite) {
    let effort = suite.effort;
    for (name, before, most) in TAKE {
        let bars: Vec<Bar> = most.map(|most| Bar::Of(CLASSIC, most)).into_iter().collect();
        suite.add(
            name,
            Unit::Nanoseconds,
            &bars,
            vec![
                (Pinpool::NAME, Box::new(move || takes::<Pinpool>(effort, before))),
                (CLASSIC, Box::new(move || takes::<ClassicPool>(effort, before))),
                (SyncPool::NAME, Box::new(move || takes::<SyncPool>(effort, before))),
            ],
        );
    }
    for (name, before, most) in DROP {
        let bars: Vec<Bar> = most.map(|most| Bar::Of(CLASSIC, most)).into_iter().collect();
        suite.add(
            name,
            Unit::Nanoseconds,
            &bars,
            vec![
                (Pinpool::NAME, Box::new(move || drops::<Pinpool>(effort, before))),
                (CLASSIC, Box::new(move || drops::<ClassicPool>(effort, before))),
            ],
        );
    }
    suite.add(
        "record_last_use, zero-cost driver",
        Unit::Nanoseconds,
        &[Bar::Of(CLASSIC, 0.7)],
        vec![
            (Pinpool::NAME, Box::new(move || records::<Pinpool>(effort, Duration::ZERO))),
            (CLASSIC, Box::new(move || records::<ClassicPool>(effort, Duration::ZERO))),
            (TWO_CALLS, Box::new(move || device_calls_alone(effort))),
        ],
    );
    // For information, with no bar: what keeping the events saves where making one costs what it does on a driver.
    let dear = "record_last_use, an event's creation at 2.4 us";
    suite.add(
        dear,
        Unit::Nanoseconds,
        &[],
        vec![
            (Pinpool::NAME, Box::new(move || records::<Pinpool>(effort, EVENT_CREATION))),
            (CLASSIC, Box::new(move || records::<ClassicPool>(effort, EVENT_CREATION))),
        ],
    );
    suite.add(
        "events created in steady state",
        Unit::Count,
        &[Bar::AtMost(0.0)],
        vec![(Pinpool::NAME, Box::new(move || vec![events_created(effort.pick(2000, 500, 64)) as f64]))],
    );
    for (threads, factor) in [(1, 8.0), (2, 5.0)] {
        let plural = if threads == 1 { "" } else { "s" };
        for (what, between, bars) in [
            ("take, drop", Use::Nothing, vec![Bar::Of(CLASSIC, 1.0 / factor)]),
            ("take, record, drop", Use::Record, vec![Bar::Of(CLASSIC, 1.0)]),
        ] {
            let name = format!("{what} in a loop, 4 KiB, {threads} thread{plural}");
            suite.add(
                &name,
                Unit::Nanoseconds,
                &bars,
                vec![
                    (Pinpool::NAME, Box::new(move || loops::<Pinpool>(effort, threads, between))),
                    (CLASSIC, Box::new(move || loops::<ClassicPool>(effort, threads, between))),
                    (SyncPool::NAME, Box::new(move || loops::<SyncPool>(effort, threads, between))),
                    (FreshVec::NAME, Box::new(move || loops::<FreshVec>(effort, threads, between))),
                    (
                        RegisterPerUse::NAME,
                        Box::new(move || loops::<RegisterPerUse>(effort, threads, between)),
                    ),
                ],
            );
        }
    }
    suite.add(
        "shelf alone, pop and push, 1 thread",
        Unit::Nanoseconds,
        &[Bar::Of(RMW, 3.0)],
        vec![
            (Pinpool::NAME, Box::new(move || shelf_alone(effort))),
            (RMW, Box::new(move || two_rmws(effort))),
        ],
    );
    suite.add(
        "whole take and drop cycle, 1 thread, hot",
        Unit::Nanoseconds,
        &[Bar::Of(RMW, 8.0)],
        vec![
            (Pinpool::NAME, Box::new(move || on_one_core(|| whole_cycle(effort)))),
            (RMW, Box::new(move || two_rmws(effort))),
        ],
    );
    // For information, with no bar: it measures the way between two cores as much as the pool.
    suite.add(
        "whole take and drop cycle, the pool's thread on any core",
        Unit::Nanoseconds,
        &[],
        vec![
            (Pinpool::NAME, Box::new(move || whole_cycle(effort))),
            (RMW, Box::new(move || two_rmws(effort))),
        ],
    );
    suite.note(
        "Hot: the pool's thread runs on the caller's core, so that what it puts on a shelf lies in the caller's caches. \
         On another core, every block and every slot of a queue comes from that core's caches: the row behind it."
            .into(),
    );
    suite.note(
        "Operations alone after a pause are shown without the clock's own time, which is measured after the same pause."
            .into(),
    );
}

fn bursts(effort: Effort) -> usize {
    effort.pick(300, 40, 1)
}

/// How many operations alone a turn has.
fn alone(effort: Effort, before: Before) -> u64 {
    let many = if matches!(before, Before::Sleep(pause) if pause < LONG_PAUSE) { 3 } else { 2 };
    BURST as u64 * effort.pick(many, 1, 1)
}

fn of_bursts(effort: Effort, mut burst: impl FnMut(u64) -> Duration) -> Vec<f64> {
    let one = |_| burst(BURST as u64).as_nanos() as f64 / BURST as f64;
    (0..bursts(effort)).map(one).collect()
}

/// Less the clock's own part.
fn of_alone(times: &[Duration], before: Before) -> Vec<f64> {
    let clock = rows::clock_alone(before, BURST as u64);
    let clock = median(clock.iter().map(|time| time.as_nanos() as f64));
    times.iter().map(|time| (time.as_nanos() as f64 - clock).max(1.0)).collect()
}

fn takes<S: Subject>(effort: Effort, before: Option<Before>) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    match before {
        None => of_bursts(effort, |count| rows::take_burst(&subject, &rig, KIB_64, count)),
        Some(before) => {
            let times = rows::take_alone(&subject, &rig, KIB_64, before, alone(effort, before));
            of_alone(&times, before)
        }
    }
}

fn drops<S: Subject>(effort: Effort, before: Option<Before>) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    match before {
        None => of_bursts(effort, |count| rows::drop_burst(&subject, &rig, KIB_64, count)),
        Some(before) => {
            let times = rows::drop_alone(&subject, &rig, KIB_64, before, alone(effort, before));
            of_alone(&times, before)
        }
    }
}

fn records<S: Subject>(effort: Effort, event_create_cost: Duration) -> Vec<f64> {
    let rig = Rig::with(Sim::builder().zero_cost().event_create_cost(event_create_cost));
    let subject: S = rows::warmed(&rig, KIB_64);
    of_bursts(effort, |count| rows::record(&subject, &rig, KIB_64, count))
}

/// What a record asks of the device, without any pool: does the stream capture, and the record of an event.
fn device_calls_alone(effort: Effort) -> Vec<f64> {
    let rig = Rig::with(Sim::builder().zero_cost());
    let (cuda, stream) = (rig.sim.cuda(), rig.stream.handle());
    let new_event = |_| cuda.cu_event_create(EVENT_FLAGS).expect("an event");
    let events: Vec<usize> = (0..BURST).map(new_event).collect();
    of_bursts(effort, |_| {
        // As before the records that it is compared with.
        std::thread::sleep(Duration::from_millis(2));
        let start = Instant::now();
        for event in &events {
            assert_eq!(cuda.cu_stream_is_capturing(black_box(stream)), Ok(0));
            cuda.cu_event_record(black_box(*event), stream).expect("a record");
        }
        let elapsed = start.elapsed();
        rig.stream.synchronize();
        elapsed
    })
}

/// Cycles of as many buffers as are warm, counted by the device.
fn events_created(cycles: u64) -> u64 {
    let rig = Rig::new();
    let subject: Pinpool = rows::warmed(&rig, KIB_64);
    let rounds = cycles / BURST as u64;
    rows::drop_burst(&subject, &rig, KIB_64, 4 * BURST as u64);
    rig.sim.reset_calls();
    rows::drop_burst(&subject, &rig, KIB_64, rounds * BURST as u64);
    assert_eq!(rig.sim.calls("cuEventRecord"), rounds * BURST as u64, "every use was recorded");
    rig.sim.calls("cuEventCreate")
}

/// Nanoseconds a cycle of one thread, so that two threads that do not disturb each other show half.
fn loops<S: Subject>(effort: Effort, threads: usize, between: Use) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S =
        if S::NAME == Pinpool::NAME || S::NAME == CLASSIC { rows::warmed(&rig, KIB_4) } else { S::new(&rig) };
    let cycles: u64 = effort.pick(20_000, 5_000, 200);
    let one = |_| {
        let time = rows::take_drop_loop(&subject, &rig, KIB_4, (threads, between), cycles);
        time.as_nanos() as f64 / (cycles * threads as u64) as f64
    };
    (0..effort.pick(5, 2, 1)).map(one).collect()
}

fn host_pool() -> PinnedPool {
    PinnedPool::builder().driver(Driver::host_only()).build().expect("the settings are right")
}

/// Runs on a thread that is held to the core it is on; the pool's thread, which its first drop starts, inherits that.
fn on_one_core<R: Send>(measure: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| {
        let held = scope.spawn(|| {
            hold_to_core();
            measure()
        });
        held.join().expect("no panic")
    })
}

#[cfg(target_os = "linux")]
fn hold_to_core() {
    // SAFETY: an all-zero set is the empty set.
    let mut cores: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: sched_getcpu takes nothing and writes nothing.
    let core = unsafe { libc::sched_getcpu() };
    // SAFETY: CPU_SET writes within the set; a number beyond it, as after an error, is ignored.
    unsafe { libc::CPU_SET(usize::try_from(core).unwrap_or(usize::MAX), &mut cores) };
    // SAFETY: 0 is the calling thread, and the set outlives the call; after a refusal the row shows another core's caches.
    unsafe { libc::sched_setaffinity(0, size_of_val(&cores), &cores) };
}

#[cfg(not(target_os = "linux"))]
fn hold_to_core() {}

/// Takes and drops of nothing but the pool's own: no device, nothing dirty.
fn whole_cycle(effort: Effort) -> Vec<f64> {
    let pool = host_pool();
    let settle = || assert!(pool.drain(Duration::from_secs(20)), "the pool does not settle");
    drop((0..BURST).map(|_| pool.take(KIB_4)).collect::<Vec<_>>());
    settle();
    let mut taken = Vec::with_capacity(BURST);
    let mut samples = Vec::new();
    for _ in 0..bursts(effort) {
        let start = Instant::now();
        (0..BURST).for_each(|_| taken.push(pool.take(KIB_4)));
        let taking = start.elapsed();
        taken.iter_mut().for_each(|buffer| buffer.set_dirty_len(0));
        let start = Instant::now();
        taken.clear();
        samples.push((taking + start.elapsed()).as_nanos() as f64 / BURST as f64);
        settle();
    }
    let stats = pool.stats();
    assert_eq!(stats.misses, BURST as u64, "every take was a hit: {stats:?}");
    samples
}

fn shelf_alone(effort: Effort) -> Vec<f64> {
    let pool = host_pool();
    drop((0..BURST).map(|_| pool.take(KIB_4)).collect::<Vec<_>>());
    assert!(pool.drain(Duration::from_secs(20)), "the pool does not settle");
    let cycles = effort.pick(100_000, 20_000, 100);
    let one = |_| {
        let start = Instant::now();
        let done = pool.shelf_cycles(KIB_4, cycles);
        assert_eq!(done, cycles, "there is always one to pop");
        start.elapsed().as_nanos() as f64 / cycles as f64
    };
    (0..effort.pick(9, 3, 1)).map(one).collect()
}

/// The floor of anything that takes out and puts back.
fn two_rmws(effort: Effort) -> Vec<f64> {
    let word = AtomicU64::new(0);
    let pairs = effort.pick(1_000_000, 200_000, 100);
    let one = |_| {
        let start = Instant::now();
        for _ in 0..pairs {
            black_box(&word).fetch_add(1, Ordering::SeqCst);
            black_box(&word).fetch_sub(1, Ordering::SeqCst);
        }
        start.elapsed().as_nanos() as f64 / f64::from(pairs)
    };
    (0..effort.pick(9, 3, 1)).map(one).collect()
}
