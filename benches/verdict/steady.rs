//! A caller that needs a buffer every so often, with some in flight: hits, buffers in use, and the pool's own CPU.
#![allow(unsafe_code)] // copies by the raw entry points, from buffers that are recorded

use crate::classic::ClassicPool;
use crate::common::{Guard, Pinpool, Rig, Subject, is_zero};
use crate::table::{Bar, Column, Effort, Row, Suite, Unit};
use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

const BYTES: usize = 64 << 10;
const CLASSIC: &str = ClassicPool::NAME;
const CLASSIC_THREADS: &str = "classic-cleaner";
const PINPOOL_THREADS: &str = "pinpool-cleaner";
const BARE_THREAD: &str = "bare-wake-ups";
const BUSY: &str = "CPU of the pool's threads, a buffer per ms";
const BUSY_PERIOD: Duration = Duration::from_millis(1);

/// What a steady caller saw.
struct Seen {
    hit_percent: f64,
    pinned_buffers: f64,
}

pub fn add(suite: &mut Suite) {
    for (period_ms, segments) in [(1, 500), (10, 150), (100, 40)] {
        let name = format!("every {period_ms} ms");
        if !suite.wants(&format!("hit rate, {name}")) && !suite.wants(&format!("pinned buffers, {name}")) {
            continue;
        }
        let segments = suite.effort.pick(segments, (segments / 4).max(24), 12);
        let period = Duration::from_millis(period_ms);
        // All four at once: they sleep most of the time.
        let (ours, theirs) = (steady::<Pinpool>(period, segments), steady::<ClassicPool>(period, segments));
        for (index, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            let k = index + 1;
            let row = |what: &str, unit, pick: fn(&Seen) -> f64, bar| Row {
                name: format!("{what}, {name}, {k} in flight"),
                unit,
                columns: vec![
                    Column { name: Pinpool::NAME, turns: vec![vec![pick(ours)]] },
                    Column { name: CLASSIC, turns: vec![vec![pick(theirs)]] },
                ],
                bars: vec![bar],
            };
            suite.add_measured(row("hit rate", Unit::Percent, |seen| seen.hit_percent, Bar::AtLeast(99.8)));
            let most = if period_ms == 1 { 2 * k + 4 } else { k + 2 };
            let bar = Bar::AtMost(most as f64);
            suite.add_measured(row("pinned buffers", Unit::Count, |seen| seen.pinned_buffers, bar));
        }
    }
    add_cpu(suite);
    suite.note("In flight: a copy ends half a period before its stream is used again.".into());
}

/// What the pool's own threads cost, and how much of that a thread costs that only wakes up as often.
fn add_cpu(suite: &mut Suite) {
    let effort = suite.effort;
    let wake_ups: [RefCell<Vec<Vec<f64>>>; 2] = Default::default();
    let per_second = Cell::new(0.0);
    suite.add(
        BUSY,
        Unit::Percent,
        &[Bar::AtMost(10.0)],
        vec![
            (
                Pinpool::NAME,
                Box::new(|| {
                    let ran = cpu::<Pinpool>(effort, true);
                    per_second.set(ran.wake_ups / ran.seconds);
                    wake_ups[0].borrow_mut().push(vec![ran.per_buffer()]);
                    vec![ran.percent()]
                }),
            ),
            (
                CLASSIC,
                Box::new(|| {
                    let ran = cpu::<ClassicPool>(effort, true);
                    wake_ups[1].borrow_mut().push(vec![ran.per_buffer()]);
                    vec![ran.percent()]
                }),
            ),
            ("as many bare wake-ups", Box::new(|| vec![bare_wake_ups(effort, per_second.get())])),
        ],
    );
    let [ours, theirs] = wake_ups.map(RefCell::into_inner);
    if !ours.is_empty() {
        suite.add_measured(Row {
            name: format!("{BUSY}: wake-ups for each"),
            unit: Unit::Count,
            columns: vec![
                Column { name: Pinpool::NAME, turns: ours },
                Column { name: CLASSIC, turns: theirs },
            ],
            bars: Vec::new(),
        });
    }
    suite.add_turns(
        "CPU of the pool's threads, idle",
        Unit::Percent,
        &[Bar::AtMost(0.05)],
        1,
        vec![
            (Pinpool::NAME, Box::new(move || vec![cpu::<Pinpool>(effort, false).percent()])),
            (CLASSIC, Box::new(move || vec![cpu::<ClassicPool>(effort, false).percent()])),
        ],
    );
    suite.note(
        "Bare wake-ups: a thread that sleeps by a timer and does nothing, as often as pinpool's.".into(),
    );
}

fn steady<S: Subject>(period: Duration, segments: usize) -> Vec<Seen> {
    std::thread::scope(|scope| {
        let one = |k| scope.spawn(move || stage::<S>(k, period, segments));
        let threads: Vec<_> = (1..=4).map(one).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// One buffer a period; its copy takes so long that `k` are in flight. The first takes, before the pool has its
/// buffers, are left out of the hit rate.
fn stage<S: Subject>(k: usize, period: Duration, segments: usize) -> Seen {
    let rig = Rig::new();
    let subject = S::new(&rig);
    let lanes: Vec<_> = (0..k).map(|_| (rig.context.stream(), rig.context.alloc(BYTES))).collect();
    let copy_time = period.mul_f64(k as f64 - 0.5);
    let warm_up = (2 * k + 4).min(segments / 2);
    let mut hits = 0;
    let start = Instant::now();
    for number in 0..segments {
        let due = period * number as u32;
        std::thread::sleep(due.saturating_sub(start.elapsed()));
        let (stream, device) = &lanes[number % k];
        // A device that is late, on a busy machine, is no fault of the pool's.
        stream.synchronize();
        if number >= k {
            check(device, number - k);
        }
        let mut buffer = subject.take(BYTES);
        assert!(is_zero(buffer.bytes()), "{}: taken, not zero", S::NAME);
        hits += usize::from(number >= warm_up && buffer.is_pinned());
        buffer.bytes_mut()[..512].fill(number as u8);
        buffer.set_dirty_len(512);
        rig.sim.stall(stream.handle(), copy_time);
        // SAFETY: cuMemcpyHtoDAsync: the buffer is recorded on the stream and goes back to its pool.
        unsafe { stream.copy_to_device(buffer.bytes(), device) };
        buffer.record(stream);
    }
    lanes.iter().for_each(|(stream, _)| stream.synchronize());
    let pinned_buffers = rig.sim.calls("cuMemHostRegister") as f64;
    Seen { hit_percent: 100.0 * hits as f64 / (segments - warm_up) as f64, pinned_buffers }
}

fn check(device: &pinpool::sim::SimBuffer, number: usize) {
    let bytes = device.read();
    let (written, rest) = bytes.split_at(512);
    assert!(written.iter().all(|byte| *byte == number as u8), "segment {number} did not arrive");
    // From pageable memory the copy was made before the stall, and from page-locked memory after it; both whole.
    assert!(is_zero(rest), "segment {number} has bytes of another");
}

/// What threads did in a time.
struct Ran {
    cpu_seconds: f64,
    wake_ups: f64,
    seconds: f64,
}

impl Ran {
    /// Of one core.
    fn percent(&self) -> f64 {
        100.0 * self.cpu_seconds / self.seconds
    }

    fn per_buffer(&self) -> f64 {
        self.wake_ups * BUSY_PERIOD.as_secs_f64() / self.seconds
    }
}

/// What the pool's threads, and nobody else's, do for a caller with a buffer every period, or for none.
fn cpu<S: Subject>(effort: Effort, busy: bool) -> Ran {
    let names = if S::NAME == Pinpool::NAME { PINPOOL_THREADS } else { CLASSIC_THREADS };
    let rig = Rig::new();
    let subject = S::new(&rig);
    let use_for = |time: Duration| {
        let start = Instant::now();
        for number in 0.. {
            let due = BUSY_PERIOD * number;
            if due > time {
                break;
            }
            std::thread::sleep(due.saturating_sub(start.elapsed()));
            let mut buffer = subject.take(BYTES);
            buffer.bytes_mut()[..512].fill(1);
            buffer.set_dirty_len(512);
            rig.sim.stall(rig.stream.handle(), BUSY_PERIOD / 2);
            buffer.record(&rig.stream);
        }
    };
    use_for(Duration::from_millis(effort.pick(200, 50, 5)));
    let time = if busy { busy_time(effort) } else { Duration::from_millis(effort.pick(3000, 500, 20)) };
    if !busy {
        // It goes to sleep for good after 100 ms of idleness.
        std::thread::sleep(Duration::from_millis(300));
    }
    let ran = watch(names, || if busy { use_for(time) } else { std::thread::sleep(time) });
    rig.stream.synchronize();
    ran
}

fn busy_time(effort: Effort) -> Duration {
    Duration::from_millis(effort.pick(1200, 500, 20))
}

/// The share of a core of a thread that does nothing but wake up so often.
fn bare_wake_ups(effort: Effort, per_second: f64) -> f64 {
    if per_second <= 0.0 {
        return f64::NAN; // The system does not say how often.
    }
    let (period, time) = (Duration::from_secs_f64(1.0 / per_second), busy_time(effort));
    let bare = move || {
        let start = Instant::now();
        for number in 1.. {
            let due = period * number;
            if due > time {
                break;
            }
            std::thread::sleep(due.saturating_sub(start.elapsed()));
        }
        let (cpu_ns, _) = ran_so_far(BARE_THREAD);
        100.0 * cpu_ns as f64 / start.elapsed().as_nanos() as f64
    };
    let thread = std::thread::Builder::new().name(BARE_THREAD.into()).spawn(bare);
    thread.expect("a thread").join().expect("no panic")
}

/// What threads of that name do meanwhile.
fn watch(name: &str, meanwhile: impl FnOnce()) -> Ran {
    let (before, start) = (ran_so_far(name), Instant::now());
    meanwhile();
    let after = ran_so_far(name);
    Ran {
        cpu_seconds: (after.0 - before.0) as f64 / 1e9,
        wake_ups: (after.1 - before.1) as f64,
        seconds: start.elapsed().as_secs_f64(),
    }
}

/// The nanoseconds that the threads of that name have run, and how often they were given a core; 0 where the system does
/// not say.
fn ran_so_far(name: &str) -> (u64, u64) {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return (0, 0) };
    let of_task = |task: std::fs::DirEntry| {
        let comm = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let ran = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        let numbers: Vec<u64> = ran.split_whitespace().map_while(|number| number.parse().ok()).collect();
        comm.starts_with(name).then_some((*numbers.first()?, *numbers.get(2)?))
    };
    tasks.filter_map(|task| of_task(task.ok()?)).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}
