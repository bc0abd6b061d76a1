//! Re-zeroing: plain stores, or non-temporal ones that bypass the caches where those are faster.
//!
//! Which is faster for a large job depends on the size of the last-level cache and on the page size: on one machine
//! plain stores gave 6.3 GB/s at 16 MiB and non-temporal ones 26, on the next 86 and 56 (`docs/performance.md`). So from
//! [`MEASURED_FROM_BYTES`] on both are tried on the first jobs of a size, and the faster one is used for a while. Below
//! it plain stores always win, and after non-temporal ones the next fill would find cold cache lines.
#![allow(unsafe_code)] // Non-temporal stores are intrinsics.

use crate::os::coarse_ns;
use crate::sync::fixed::AtomicU32;
use crate::sync::{Instant, Ordering};

use std::time::Duration;

/// From this many bytes on, a job may bypass the caches.
pub(crate) const MEASURED_FROM_BYTES: usize = 4 << 20;

/// The most that is zeroed in one piece, so that a zeroing thread can look around in between: 0.1 ms or so.
pub(crate) const STEP_BYTES: usize = 4 << 20;

/// Shorter jobs are over sooner than a clock is read.
const TIMED_FROM_BYTES: usize = 16 << 10;

/// So many jobs of a size are trials, half of them in either way.
const TRIALS: u32 = 8;

/// For so long the outcome of the trials holds. Each time half of them cost up to three times as much as they need to.
const KEPT_FOR_SECONDS: u32 = 120;

/// One block's dirty prefix on its way to zero.
#[derive(Debug)]
pub(crate) struct Job {
    bytes: usize,
    way: Way,
    is_trial: bool,
    spent: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Plain,
    NonTemporal,
}

impl Way {
    /// Not by turns (the parity of the number's ones: 0, 1, 1, 0, 1, 0, 0, 1). What jobs cost may go by turns too, above
    /// all because one leaves its lines in the cache for the next, and then one way would be tried in good moments
    /// only, and the other in bad ones.
    fn of_trial(number: u32) -> Self {
        if number.count_ones().is_multiple_of(2) { Way::Plain } else { Way::NonTemporal }
    }
}

/// How fast both ways were for jobs of one power of two. Hints: threads that meet here may lose a trial.
struct Rates {
    /// Trials begun.
    trials: AtomicU32,
    /// When the first one began.
    since_seconds: AtomicU32,
    /// The least nanoseconds a MiB, by way; 0 is not known yet. The least, because a thread may lose its core.
    cost: [AtomicU32; 2],
}

const SIZES: usize = usize::BITS as usize - MEASURED_FROM_BYTES.trailing_zeros() as usize;
static RATES: [Rates; SIZES] = [const { Rates::unknown() }; SIZES];

impl Job {
    /// A job of so many bytes; how it is done is decided once, for all its steps.
    pub(crate) fn of(bytes: usize) -> Self {
        let chosen = rates(bytes).map(|rates| rates.choose(seconds()));
        let (way, is_trial) = chosen.unwrap_or((Way::Plain, false));
        Self { bytes, way, is_trial, spent: Duration::ZERO }
    }

    /// Bytes of the whole job.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sets a piece of the job to zero.
    pub(crate) fn zero(&mut self, piece: &mut [u8]) {
        if self.bytes < TIMED_FROM_BYTES {
            return piece.fill(0);
        }
        let started = Instant::now();
        match self.way {
            Way::Plain => piece.fill(0),
            Way::NonTemporal => zero_non_temporal(piece),
        }
        self.spent += started.elapsed();
    }

    /// The job is done; gives the time that its pieces took, zero for one that is too short to tell.
    pub(crate) fn finish(self) -> Duration {
        if self.is_trial
            && let Some(rates) = rates(self.bytes)
        {
            let mib = (self.bytes >> 20) as u128;
            rates.note(self.way, u32::try_from(self.spent.as_nanos() / mib).unwrap_or(u32::MAX));
        }
        self.spent
    }
}

/// Of jobs of about this size; `None` below what is measured.
fn rates(bytes: usize) -> Option<&'static Rates> {
    RATES.get((bytes / MEASURED_FROM_BYTES).checked_ilog2()? as usize)
}

/// Of a clock that needs nothing of its own: what one thread starts, a child forked meanwhile could wait for.
fn seconds() -> u32 {
    u32::try_from(coarse_ns() / 1_000_000_000).unwrap_or(u32::MAX)
}

impl Rates {
    const fn unknown() -> Self {
        Self {
            trials: AtomicU32::new(0),
            since_seconds: AtomicU32::new(0),
            cost: [AtomicU32::new(0), AtomicU32::new(0)],
        }
    }

    /// How the next job is to be done, and whether that is a trial. What an ordinary job takes is not noted: the way
    /// that is in use would be judged by its bad moments too, and the other one by its best.
    fn choose(&self, now_seconds: u32) -> (Way, bool) {
        let cost = |way: Way| self.cost[way as usize].load(Ordering::Relaxed);
        let begun = self.trials.load(Ordering::Relaxed);
        let is_old =
            now_seconds.saturating_sub(self.since_seconds.load(Ordering::Relaxed)) >= KEPT_FOR_SECONDS;
        if begun == 0 || is_old {
            self.since_seconds.store(now_seconds, Ordering::Relaxed);
            self.cost.iter().for_each(|cost| cost.store(0, Ordering::Relaxed));
            self.trials.store(1, Ordering::Relaxed);
            return (Way::of_trial(0), true);
        }
        let (plain, streamed) = (cost(Way::Plain), cost(Way::NonTemporal));
        if begun < TRIALS || plain == 0 || streamed == 0 {
            self.trials.store(begun.saturating_add(1), Ordering::Relaxed);
            return (Way::of_trial(begun), true);
        }
        // Near a draw plain: its lines are warm for the next fill.
        (if streamed < plain - plain / 16 { Way::NonTemporal } else { Way::Plain }, false)
    }

    fn note(&self, way: Way, cost: u32) {
        let known = &self.cost[way as usize];
        let before = known.load(Ordering::Relaxed);
        known.store(if before == 0 { cost.max(1) } else { cost.clamp(1, before) }, Ordering::Relaxed);
    }
}

#[cfg(target_arch = "x86_64")]
fn zero_non_temporal(bytes: &mut [u8]) {
    if std::is_x86_feature_detected!("avx") {
        // SAFETY: the processor has AVX.
        unsafe { stream_half_lines(bytes) };
    } else {
        stream_quarter_lines(bytes);
    }
}

/// With 32 bytes a store: on a Zen 4 a third faster than with 16, where only plain stores in one piece come near.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
fn stream_half_lines(bytes: &mut [u8]) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_setzero_si256, _mm256_stream_si256};

    // SAFETY: thirty-two zero bytes are a valid `__m256i`, and the other way round.
    let (head, body, tail) = unsafe { bytes.align_to_mut::<__m256i>() };
    head.fill(0);
    tail.fill(0);
    let nothing = _mm256_setzero_si256();
    for vector in body {
        // SAFETY: the reference is to thirty-two writable bytes, aligned to thirty-two by `align_to_mut`.
        unsafe { _mm256_stream_si256(vector, nothing) };
    }
    // Streaming stores are weakly ordered; the fence makes them visible before the block changes hands.
    _mm_sfence();
}

#[cfg(target_arch = "x86_64")]
fn stream_quarter_lines(bytes: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_setzero_si128, _mm_sfence, _mm_stream_si128};

    // SAFETY: sixteen zero bytes are a valid `__m128i`, and the other way round.
    let (head, body, tail) = unsafe { bytes.align_to_mut::<__m128i>() };
    head.fill(0);
    tail.fill(0);
    // SAFETY: SSE2 is part of every x86-64 processor.
    let nothing = unsafe { _mm_setzero_si128() };
    for vector in body {
        // SAFETY: the reference is to sixteen writable bytes, aligned to sixteen by `align_to_mut`.
        unsafe { _mm_stream_si128(vector, nothing) };
    }
    // Streaming stores are weakly ordered; the fence makes them visible before the block changes hands.
    // SAFETY: SSE is part of every x86-64 processor.
    unsafe { _mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn zero_non_temporal(bytes: &mut [u8]) {
    bytes.fill(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_and_no_other_is_zeroed_at_any_alignment() {
        for way in [Way::Plain, Way::NonTemporal] {
            for start in 0..33 {
                for len in [0, 1, 15, 16, 17, 33, 63, 1000] {
                    let mut buffer = vec![7u8; 1100];
                    let (bytes, is_trial) = (MEASURED_FROM_BYTES, false);
                    let mut job = Job { bytes, way, is_trial, spent: Duration::ZERO };
                    job.zero(&mut buffer[start..start + len]);
                    let zeros = buffer.iter().filter(|byte| **byte == 0).count();
                    assert_eq!(zeros, len);
                    assert!(buffer[start..start + len].iter().all(|byte| *byte == 0));
                }
            }
        }
    }

    /// The processors here have AVX, so nothing else comes by.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn so_does_the_way_without_avx() {
        for start in 0..17 {
            let mut buffer = [7u8; 200];
            stream_quarter_lines(&mut buffer[start..start + 150]);
            assert!(buffer[start..start + 150].iter().all(|byte| *byte == 0));
            assert_eq!(buffer.iter().filter(|byte| **byte == 0).count(), 150);
        }
    }

    /// The ways of so many jobs, one after the other, each of which takes what `cost` says.
    fn ways(rates: &Rates, now_seconds: u32, count: u32, cost: impl Fn(Way) -> u32) -> Vec<Way> {
        let one = |_| {
            let (way, is_trial) = rates.choose(now_seconds);
            if is_trial {
                rates.note(way, cost(way));
            }
            way
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn both_ways_are_tried_and_the_faster_one_is_kept() {
        for (plain, streamed, faster) in
            [(100, 40, Way::NonTemporal), (40, 100, Way::Plain), (100, 95, Way::Plain)]
        {
            let rates = Rates::unknown();
            let of = |way| if way == Way::Plain { plain } else { streamed };
            let ways = ways(&rates, 7, TRIALS + 200, of);
            assert_eq!(ways[..2], [Way::Plain, Way::NonTemporal]);
            let others = ways[TRIALS as usize..].iter().filter(|way| **way != faster).count();
            assert_eq!(others, 0, "no job is done in the slower way once that is known");
        }
    }

    /// Every other job finds its lines in the cache; by turns the slower way would have had all of those.
    #[test]
    fn jobs_that_cost_by_turns_are_told_right() {
        for first_is_warm in [true, false] {
            let rates = Rates::unknown();
            for number in 0..TRIALS {
                let (way, _) = rates.choose(0);
                let is_warm = number.is_multiple_of(2) == first_is_warm;
                rates.note(
                    way,
                    if way == Way::NonTemporal {
                        20
                    } else if is_warm {
                        10
                    } else {
                        40
                    },
                );
            }
            assert_eq!(rates.choose(0), (Way::Plain, false), "first is warm: {first_is_warm}");
        }
    }

    #[test]
    fn one_bad_time_changes_nothing() {
        let rates = Rates::unknown();
        let mut plain = [50, 5_000].into_iter().cycle();
        for _ in 0..TRIALS {
            let (way, _) = rates.choose(0);
            rates.note(way, if way == Way::Plain { plain.next().unwrap() } else { 100 });
        }
        assert_eq!(rates.choose(0), (Way::Plain, false));
    }

    #[test]
    fn a_lasting_change_is_seen_when_the_trials_are_made_again() {
        let rates = Rates::unknown();
        ways(&rates, 5, TRIALS, |way| if way == Way::Plain { 50 } else { 100 });
        assert_eq!(rates.choose(5 + KEPT_FOR_SECONDS - 1), (Way::Plain, false));
        let later = 5 + KEPT_FOR_SECONDS;
        let seen = ways(&rates, later, TRIALS, |way| if way == Way::Plain { 5_000 } else { 100 });
        assert_eq!(seen[..2], [Way::Plain, Way::NonTemporal], "trials again");
        assert_eq!(rates.choose(later), (Way::NonTemporal, false));
    }

    #[test]
    fn small_jobs_are_plain_and_sizes_are_told_apart() {
        assert!(rates(MEASURED_FROM_BYTES - 1).is_none());
        assert_eq!(Job::of(MEASURED_FROM_BYTES - 1).way, Way::Plain);
        let same = |a, b| std::ptr::eq(rates(a).unwrap(), rates(b).unwrap());
        assert!(same(MEASURED_FROM_BYTES, 2 * MEASURED_FROM_BYTES - 1));
        assert!(!same(MEASURED_FROM_BYTES, 2 * MEASURED_FROM_BYTES));
        assert!(rates(usize::MAX).is_some());
    }
}
