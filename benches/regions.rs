//! What it costs to ask whether memory is page-locked, alone and on several threads, and to record a region.
//!
//! `cargo bench --bench regions`. The table stands in the documentation of `pinpool::regions`.
#![allow(missing_docs)] // what `criterion_group!` expands to has no docs

use criterion::{Criterion, criterion_group, criterion_main};
use pinpool::regions::{self, Coverage, ExternalRegion};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const REGION_BYTES: usize = 4096;

/// Memory of `count` regions, with a gap behind each, and what records them.
fn recorded(count: usize) -> (Vec<u8>, Vec<ExternalRegion>) {
    let bytes = vec![0; count.max(1) * REGION_BYTES * 2];
    let region =
        |index: usize| ExternalRegion::note(bytes[index * REGION_BYTES * 2..].as_ptr(), REGION_BYTES);
    let noted = (0..count).map(region).collect();
    (bytes, noted)
}

/// Asks about a part of another region each time.
fn ask(bytes: &[u8], count: usize, iterations: u64, expected: Coverage) -> Duration {
    let started = Instant::now();
    for iteration in 0..iterations as usize {
        let start = (iteration * 7919 % count.max(1)) * REGION_BYTES * 2;
        assert_eq!(regions::covering(black_box(&bytes[start..start + 1000])), expected);
    }
    started.elapsed()
}

fn ask_on_threads(bytes: &[u8], count: usize, threads: usize, iterations: u64) -> Duration {
    let start = Barrier::new(threads);
    std::thread::scope(|scope| {
        let asking: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    ask(bytes, count, iterations, Coverage::Whole)
                })
            })
            .collect();
        asking.into_iter().map(|thread| thread.join().expect("it only asks")).max().unwrap_or_default()
    })
}

fn look_ups(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("regions");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1)).sample_size(20);
    let (bytes, _) = recorded(0);
    group.bench_function("a look-up, nothing recorded", |bencher| {
        bencher.iter_custom(|iterations| ask(&bytes, 0, iterations, Coverage::None));
    });
    for count in [1, 1_000, 16_384] {
        let (bytes, _noted) = recorded(count);
        group.bench_function(format!("a look-up among {count}"), |bencher| {
            bencher.iter_custom(|iterations| ask(&bytes, count, iterations, Coverage::Whole));
        });
        group.bench_function(format!("two threads at once among {count}"), |bencher| {
            bencher.iter_custom(|iterations| ask_on_threads(&bytes, count, 2, iterations));
        });
        let one = vec![0u8; REGION_BYTES];
        group.bench_function(format!("recording and forgetting one more than {count}"), |bencher| {
            bencher.iter(|| drop(ExternalRegion::note(one.as_ptr(), one.len())));
        });
    }
    group.finish();
}

criterion_group!(benches, look_ups);
criterion_main!(benches);
