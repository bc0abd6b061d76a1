//! Re-zeroing: plain stores, or non-temporal ones that bypass the caches where those are faster.
//!
//! Which is faster for a large job depends on the size of the last-level cache and on the page size: on one machine
//! plain stores gave 6.3 GB/s at 16 MiB and non-temporal ones 26, on the next 74 and 50 (`docs/performance.md`). So from
//! [`MEASURED_FROM_BYTES`] on both are measured as jobs come, by size, and the faster one is used. Below it plain
//! stores always win, and after non-temporal ones the next fill would find cold cache lines.
#![allow(unsafe_code)] // Non-temporal stores are intrinsics.

use crate::sync::fixed::AtomicU32;
use crate::sync::{Instant, Ordering};

use std::time::Duration;

/// From this many bytes on, a job may bypass the caches.
pub(crate) const MEASURED_FROM_BYTES: usize = 4 << 20;

/// The most that is zeroed in one piece, so that a zeroing thread can look around in between: 0.1 ms or so.
pub(crate) const STEP_BYTES: usize = 4 << 20;

/// Shorter jobs are over sooner than a clock is read.
const TIMED_FROM_BYTES: usize = 16 << 10;

/// The first jobs of a size are done in both ways by turns.
const TRIALS: u32 = 8;

/// Of so many jobs of one size after that, one is done in the way that was slower so far.
const ONE_OF: u32 = 32;

/// One block's dirty prefix on its way to zero.
#[derive(Debug)]
pub(crate) struct Job {
    bytes: usize,
    way: Way,
    spent: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Plain,
    NonTemporal,
}

/// How fast both ways were for jobs of one power of two; 0 is not known yet.
struct Rates {
    jobs: AtomicU32,
    /// Nanoseconds a MiB, by way.
    cost: [AtomicU32; 2],
}

const SIZES: usize = usize::BITS as usize - MEASURED_FROM_BYTES.trailing_zeros() as usize;
static RATES: [Rates; SIZES] =
    [const { Rates { jobs: AtomicU32::new(0), cost: [AtomicU32::new(0), AtomicU32::new(0)] } }; SIZES];

impl Job {
    /// A job of so many bytes; how it is done is decided once, for all its steps.
    pub(crate) fn of(bytes: usize) -> Self {
        Self { bytes, way: rates(bytes).map_or(Way::Plain, Rates::choose), spent: Duration::ZERO }
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
        if let Some(rates) = rates(self.bytes) {
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

impl Rates {
    fn choose(&self) -> Way {
        let jobs = self.jobs.fetch_add(1, Ordering::Relaxed);
        let cost = |way: Way| self.cost[way as usize].load(Ordering::Relaxed);
        let (plain, streamed) = (cost(Way::Plain), cost(Way::NonTemporal));
        if jobs < TRIALS || plain == 0 || streamed == 0 {
            return if jobs.is_multiple_of(2) { Way::Plain } else { Way::NonTemporal };
        }
        // Near a draw plain: its lines are warm for the next fill.
        let (faster, slower) = match streamed < plain - plain / 8 {
            true => (Way::NonTemporal, Way::Plain),
            false => (Way::Plain, Way::NonTemporal),
        };
        if jobs.wrapping_add(1).is_multiple_of(ONE_OF) { slower } else { faster }
    }

    /// A better time counts at once, a worse one little by little: the thread may just have lost its core.
    fn note(&self, way: Way, cost: u32) {
        let known = &self.cost[way as usize];
        let before = known.load(Ordering::Relaxed);
        let after = if before == 0 { cost } else { cost.min(before.saturating_add(before / 8)) };
        known.store(after.max(1), Ordering::Relaxed);
    }
}

#[cfg(target_arch = "x86_64")]
fn zero_non_temporal(bytes: &mut [u8]) {
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
            for start in 0..17 {
                for len in [0, 1, 15, 16, 17, 63, 1000] {
                    let mut buffer = vec![7u8; 1100];
                    let mut job = Job { bytes: MEASURED_FROM_BYTES, way, spent: Duration::ZERO };
                    job.zero(&mut buffer[start..start + len]);
                    let zeros = buffer.iter().filter(|byte| **byte == 0).count();
                    assert_eq!(zeros, len);
                    assert!(buffer[start..start + len].iter().all(|byte| *byte == 0));
                }
            }
        }
    }

    fn unknown() -> Rates {
        Rates { jobs: AtomicU32::new(0), cost: [AtomicU32::new(0), AtomicU32::new(0)] }
    }

    #[test]
    fn both_ways_are_tried_and_the_faster_one_is_kept() {
        for (plain, streamed, faster) in
            [(100, 40, Way::NonTemporal), (40, 100, Way::Plain), (100, 95, Way::Plain)]
        {
            let rates = unknown();
            let of = |way| if way == Way::Plain { plain } else { streamed };
            let ways: Vec<Way> = (0..TRIALS + 2 * ONE_OF)
                .map(|_| {
                    let way = rates.choose();
                    rates.note(way, of(way));
                    way
                })
                .collect();
            assert_eq!(ways[..2], [Way::Plain, Way::NonTemporal]);
            let others = ways[TRIALS as usize..].iter().filter(|way| **way != faster).count();
            assert_eq!(others, 2, "the slower one is looked at again, seldom");
        }
    }

    #[test]
    fn one_bad_time_changes_nothing_and_a_lasting_change_is_seen() {
        let rates = unknown();
        (0..TRIALS).map(|_| rates.choose()).for_each(|_| ());
        rates.note(Way::Plain, 50);
        rates.note(Way::NonTemporal, 100);
        rates.note(Way::Plain, 5_000);
        assert_eq!(rates.choose(), Way::Plain);
        (0..20).for_each(|_| rates.note(Way::Plain, 5_000));
        assert_eq!(rates.choose(), Way::NonTemporal);
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
