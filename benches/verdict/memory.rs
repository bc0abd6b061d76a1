//! Memory that is made zero again.
#![allow(unsafe_code)] // non-temporal stores are intrinsics

use crate::table::{Bar, Effort, Suite, Unit};
use pinpool::{Driver, PinnedPool};
use std::hint::black_box;
use std::time::{Duration, Instant};

const BETTER: &str = "better of plain and non-temporal";

pub fn add(suite: &mut Suite) {
    let effort = suite.effort;
    for shift in effort.pick(vec![16, 18, 20, 22, 23, 24, 26, 28], vec![16, 20, 24], vec![16]) {
        let bytes = 1usize << shift;
        let name = format!(
            "re-zeroing {}",
            if shift < 20 { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) }
        );
        let bars = [Bar::AtLeastOf(BETTER, 0.9)];
        // What does not fit into the last-level cache depends on what everybody else does with the memory.
        let turns = if shift < 26 { effort.turns() } else { effort.pick(9, 2, 1) };
        suite.add_turns(
            &name,
            Unit::GigabytesPerSecond,
            &bars,
            turns,
            vec![
                ("pinpool", Box::new(move || zeroing_of_the_pool(effort, bytes))),
                (BETTER, Box::new(move || better_zeroing(effort, bytes))),
            ],
        );
    }
}

fn host_pool() -> PinnedPool {
    let builder = PinnedPool::builder().driver(Driver::host_only()).max_pooled_bytes(usize::MAX >> 1);
    builder.build().expect("the settings are right")
}

fn rounds(effort: Effort, bytes: usize) -> usize {
    effort.pick(((256 << 20) / bytes).clamp(3, 64), 3, 1)
}

/// As the pool's own statistics have it, on the caller's thread: the cleaner is held, so a take zeroes.
fn zeroing_of_the_pool(effort: Effort, bytes: usize) -> Vec<f64> {
    let pool = host_pool();
    drop(pool.take(bytes));
    assert!(pool.drain(Duration::from_secs(20)), "the pool does not settle");
    let _held = pool.hold_cleaner();
    let one = |_| {
        let mut buffer = pool.take(bytes);
        assert!(buffer.iter().all(|byte| *byte == 0), "taken again, not zero");
        buffer.fill(1);
        drop(buffer);
        let before = pool.stats();
        drop(pool.take(bytes));
        let after = pool.stats();
        assert_eq!(after.zeroed_bytes - before.zeroed_bytes, bytes as u64, "this take zeroed it");
        bytes as f64 / (after.zero_time - before.zero_time).as_nanos() as f64
    };
    (0..rounds(effort, bytes)).map(one).collect()
}

/// On memory of the same kind, filled right before: the better of the two medians.
fn better_zeroing(effort: Effort, bytes: usize) -> Vec<f64> {
    let pool = host_pool();
    let mut buffer = pool.take(bytes);
    let mut of = |zero: fn(&mut [u8])| -> f64 {
        buffer.fill(1);
        let start = Instant::now();
        zero(&mut buffer);
        bytes as f64 / start.elapsed().as_nanos() as f64
    };
    let both = |_| (of(zero_plain), of(zero_non_temporal));
    let (plain, streamed): (Vec<f64>, Vec<f64>) = (0..rounds(effort, bytes)).map(both).unzip();
    let median = |samples: &[f64]| crate::table::median(samples.iter().copied());
    if median(&plain) >= median(&streamed) { plain } else { streamed }
}

fn zero_plain(bytes: &mut [u8]) {
    black_box(bytes).fill(0);
}

/// With the widest stores that a compiler's user would write by hand without asking for more than AVX.
#[cfg(target_arch = "x86_64")]
fn zero_non_temporal(bytes: &mut [u8]) {
    if std::is_x86_feature_detected!("avx") {
        // SAFETY: the processor has AVX.
        unsafe { zero_streaming(bytes) };
    } else {
        zero_plain(bytes);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
fn zero_streaming(bytes: &mut [u8]) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_setzero_si256, _mm256_stream_si256};
    // SAFETY: thirty-two zero bytes are a valid `__m256i`, and the other way round.
    let (_, body, _) = unsafe { bytes.align_to_mut::<__m256i>() };
    let nothing = _mm256_setzero_si256();
    for vector in body {
        // SAFETY: the reference is to thirty-two writable bytes, aligned to thirty-two by `align_to_mut`.
        unsafe { _mm256_stream_si256(vector, nothing) };
    }
    _mm_sfence();
}

#[cfg(not(target_arch = "x86_64"))]
fn zero_non_temporal(bytes: &mut [u8]) {
    zero_plain(bytes);
}
