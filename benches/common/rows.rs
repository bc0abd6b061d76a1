//! The rows. Each makes `iterations` operations and gives the time they took; getting ready for them is left out.
#![allow(unsafe_code)] // copies by the raw entry points: the buffer outlives the copy because it is recorded

use super::{BURST, Guard, Rig, Subject, is_zero, wait_until_ready, warm};
use std::hint::black_box;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The shorter pause of the rows that make one operation at a time: the caller comes to it cold.
pub const PAUSE: Duration = Duration::from_micros(200);

/// Takes in bursts of 64, all hits.
pub fn take_burst<S: Subject>(subject: &S, rig: &Rig, bytes: usize, iterations: u64) -> Duration {
    in_bursts(iterations, |count| {
        wait_until_ready(subject, bytes, BURST);
        let mut taken = Vec::with_capacity(BURST);
        let start = Instant::now();
        (0..count).for_each(|_| taken.push(subject.take(bytes)));
        let elapsed = start.elapsed();
        give_back(subject, rig, bytes, taken);
        elapsed
    })
}

/// What happens before an operation that is timed alone.
#[derive(Clone, Copy)]
pub enum Before {
    /// The caller sleeps for so long; what that does to the caches depends on what else the machine does.
    Sleep(Duration),
    /// Every cache and every translation is lost: so much memory is read that nothing else is left there.
    ColdCaches,
}

impl Before {
    pub fn happen(self) {
        match self {
            Before::Sleep(pause) => std::thread::sleep(pause),
            Before::ColdCaches => read_more_than_the_caches_hold(),
        }
    }
}

/// Twice the last-level cache of a large server's core complex.
const MORE_THAN_THE_CACHES_HOLD: usize = 64 << 20;

fn read_more_than_the_caches_hold() {
    static MEMORY: OnceLock<Vec<u8>> = OnceLock::new();
    // Ones, because untouched zeros are one page for all.
    let memory = MEMORY.get_or_init(|| vec![1; MORE_THAN_THE_CACHES_HOLD]);
    let lines: u64 = memory.iter().step_by(64).map(|byte| u64::from(*byte)).sum();
    assert_eq!(black_box(lines), (MORE_THAN_THE_CACHES_HOLD / 64) as u64);
}

/// One take at a time, a hit: the time of each, in bursts of 64 so that the classic cleaner need not wait.
pub fn take_alone<S: Subject>(
    subject: &S,
    rig: &Rig,
    bytes: usize,
    before: Before,
    iterations: u64,
) -> Vec<Duration> {
    let mut times = Vec::with_capacity(iterations as usize);
    in_bursts(iterations, |count| {
        wait_until_ready(subject, bytes, BURST);
        let mut taken = Vec::with_capacity(BURST);
        for _ in 0..count {
            before.happen();
            let start = Instant::now();
            taken.push(subject.take(bytes));
            times.push(start.elapsed());
        }
        give_back(subject, rig, bytes, taken);
        Duration::ZERO
    });
    times
}

/// What the clock adds to an operation that is timed alone after the same: the time of nothing.
pub fn clock_alone(before: Before, iterations: u64) -> Vec<Duration> {
    let one = |_| {
        before.happen();
        Instant::now().elapsed()
    };
    (0..iterations).map(one).collect()
}

/// Drops in bursts of 64, of buffers whose use was recorded.
pub fn drop_burst<S: Subject>(subject: &S, rig: &Rig, bytes: usize, iterations: u64) -> Duration {
    in_bursts(iterations, |count| {
        let mut taken = take_all(subject, bytes);
        taken.iter_mut().for_each(|buffer| buffer.record(&rig.stream));
        let rest = taken.split_off(count);
        let start = Instant::now();
        taken.into_iter().for_each(drop);
        let elapsed = start.elapsed();
        drop(rest);
        elapsed
    })
}

/// One drop at a time, of a buffer whose use was recorded: the time of each.
pub fn drop_alone<S: Subject>(
    subject: &S,
    rig: &Rig,
    bytes: usize,
    before: Before,
    iterations: u64,
) -> Vec<Duration> {
    let mut times = Vec::with_capacity(iterations as usize);
    in_bursts(iterations, |count| {
        let mut taken = take_all(subject, bytes);
        taken.iter_mut().for_each(|buffer| buffer.record(&rig.stream));
        let rest = taken.split_off(count);
        for buffer in taken {
            before.happen();
            let start = Instant::now();
            drop(buffer);
            times.push(start.elapsed());
        }
        drop(rest);
        Duration::ZERO
    });
    times
}

/// `record_last_use`, once per buffer; the device's own part is in both.
///
/// After a moment in which the cleaners come to rest: a thread that wakes up in the middle costs more than all 64.
pub fn record<S: Subject>(subject: &S, rig: &Rig, bytes: usize, iterations: u64) -> Duration {
    in_bursts(iterations, |count| {
        let mut taken = take_all(subject, bytes);
        std::thread::sleep(Duration::from_millis(2));
        let start = Instant::now();
        taken[..count].iter_mut().for_each(|buffer| buffer.record(&rig.stream));
        start.elapsed()
    })
}

/// What a loop does with a buffer between take and drop.
#[derive(Clone, Copy)]
pub enum Use {
    /// Nothing: the caller vouches that no device touches it.
    Nothing,
    /// Records a use, on a stream of the thread's own.
    Record,
}

/// Take and drop, again and again, on so many threads at once: `iterations` on each.
///
/// Without the one or the other pinpool would wait for whole contexts, as it must; the classic pool waits
/// for nothing then, and would reuse memory in flight.
pub fn take_drop_loop<S: Subject>(
    subject: &S,
    rig: &Rig,
    bytes: usize,
    (threads, between): (usize, Use),
    iterations: u64,
) -> Duration {
    let streams: Vec<_> = (0..threads).map(|_| rig.context.stream()).collect();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for stream in &streams {
            scope.spawn(move || {
                rig.context.bind();
                for _ in 0..iterations {
                    let mut buffer = subject.take(bytes);
                    // Nobody wrote, which the classic pool knows by itself.
                    buffer.set_dirty_len(0);
                    match between {
                        Use::Nothing => buffer.vouch_for_quiescence(),
                        Use::Record => buffer.record(stream),
                    }
                }
            });
        }
    });
    start.elapsed()
}

/// From the drop of a dirty buffer whose copy is done to the take that gives it back, page-locked.
///
/// The subject has one buffer of this size and no more; what a take gives that is not page-locked is laid aside.
pub fn drop_to_pinned_take<S: Subject>(subject: &S, rig: &Rig, bytes: usize, iterations: u64) -> Duration {
    let mut aside = Vec::new();
    let mut total = Duration::ZERO;
    for iteration in 0..iterations {
        wait_until_ready(subject, bytes, 1);
        let mut buffer = subject.take(bytes);
        let (address, pattern) = (buffer.bytes().as_ptr(), iteration as u8 | 1);
        buffer.bytes_mut().fill(pattern);
        buffer.set_dirty_len(bytes);
        copy(rig, buffer.bytes());
        buffer.record(&rig.stream);
        rig.stream.synchronize();

        let start = Instant::now();
        drop(buffer);
        let again = loop {
            // Looking first keeps the classic pool from a `vec![0; n]` for every look.
            if S::NAME == "pinpool" || subject.ready(bytes) > 0 {
                let taken = subject.take(bytes);
                match taken.is_pinned() {
                    true => break taken,
                    false => aside.push(taken),
                }
            }
            std::thread::yield_now();
        };
        total += start.elapsed();
        assert_eq!(again.bytes().as_ptr(), address, "{}: another buffer than the one dropped", S::NAME);
        assert!(is_zero(again.bytes()), "{}: taken again, not zero", S::NAME);
        let on_device = rig.device.read();
        assert!(
            on_device[..bytes].iter().all(|byte| *byte == pattern),
            "{}: wrong bytes on the device",
            S::NAME
        );
    }
    assert!(aside.len() < 64, "{}: {} buffers laid aside", S::NAME, aside.len());
    total
}

/// From the drop of a dirty buffer to its place on the shelf, when nobody asks for it.
pub fn drop_to_shelf<S: Subject>(subject: &S, rig: &Rig, bytes: usize, iterations: u64) -> Duration {
    let mut total = Duration::ZERO;
    for _ in 0..iterations {
        wait_until_ready(subject, bytes, 1);
        let mut buffer = subject.take(bytes);
        buffer.bytes_mut().fill(1);
        copy(rig, buffer.bytes());
        buffer.record(&rig.stream);
        rig.stream.synchronize();
        let start = Instant::now();
        drop(buffer);
        wait_until_ready(subject, bytes, 1);
        total += start.elapsed();
    }
    total
}

/// One buffer's event takes `pending` to complete; how long until the 63 that were dropped after it are ready.
pub fn others_ready<S: Subject>(subject: &S, rig: &Rig, bytes: usize, pending: Duration) -> Duration {
    let mut taken = take_all(subject, bytes);
    let slow = rig.context.stream();
    slow.hold();
    let mut first = taken.remove(0);
    copy_on(&slow, rig, first.bytes());
    first.record(&slow);
    for buffer in &mut taken {
        copy(rig, buffer.bytes());
        buffer.record(&rig.stream);
    }
    rig.stream.synchronize();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(pending);
            slow.release();
        });
        drop(first);
        drop(taken);
        let start = Instant::now();
        wait_until_ready(subject, bytes, BURST - 1);
        start.elapsed()
    })
}

/// Splits `iterations` into bursts and adds up what each took.
fn in_bursts(iterations: u64, mut burst: impl FnMut(usize) -> Duration) -> Duration {
    let (full, rest) = (iterations / BURST as u64, (iterations % BURST as u64) as usize);
    let times = (0..full).map(|_| BURST).chain((rest > 0).then_some(rest)).map(&mut burst);
    times.sum()
}

fn take_all<S: Subject>(subject: &S, bytes: usize) -> Vec<S::Buffer> {
    wait_until_ready(subject, bytes, BURST);
    let taken: Vec<_> = (0..BURST).map(|_| subject.take(bytes)).collect();
    assert!(taken.iter().all(Guard::is_pinned), "{}: a miss among what was ready", S::NAME);
    taken
}

/// Takes the rest of the burst, records and drops: 64 at once, so that the classic cleaner need not wait for more.
fn give_back<S: Subject>(subject: &S, rig: &Rig, bytes: usize, mut taken: Vec<S::Buffer>) {
    taken.extend((taken.len()..BURST).map(|_| subject.take(bytes)));
    assert!(taken.iter().all(Guard::is_pinned), "{}: a miss among what was ready", S::NAME);
    taken.iter_mut().for_each(|buffer| buffer.record(&rig.stream));
}

fn copy(rig: &Rig, bytes: &[u8]) {
    copy_on(&rig.stream, rig, bytes);
}

fn copy_on(stream: &pinpool::sim::SimStream, rig: &Rig, bytes: &[u8]) {
    // SAFETY: cuMemcpyHtoDAsync: the buffer goes back to its pool with a record of this stream, and a pool
    // leaves the bytes alone until the record is complete.
    unsafe { stream.copy_to_device(bytes, &rig.device) };
}

/// A subject with 64 ready buffers.
pub fn warmed<S: Subject>(rig: &Rig, bytes: usize) -> S {
    let subject = S::new(rig);
    warm(&subject, bytes, BURST);
    subject
}

/// A subject with one ready buffer.
pub fn with_one<S: Subject>(rig: &Rig, bytes: usize) -> S {
    let subject = S::new(rig);
    drop(subject.take(bytes));
    wait_until_ready(&subject, bytes, 1);
    subject
}
