//! Several threads on one class, and many buffers behind one event that does not complete.
//!
//! `cargo bench --bench contention`. The ratios, with the bars they are held to: `cargo bench --bench verdict`.
#![allow(missing_docs)] // what `criterion_group!` expands to has no docs

mod classic;
mod common;

use classic::ClassicPool;
use common::rows::{self, Use};
use common::{Pinpool, Rig, Subject, classic_constants};
use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use std::time::Duration;

const LOOP_BYTES: usize = 4 << 10;
const BYTES: usize = 64 << 10;
/// In the verdict it is 2 s; the shape shows with less.
const PENDING: Duration = Duration::from_millis(200);

fn loops_of<S: Subject>(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("take, record and drop, 4 KiB");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    for threads in [1, 2] {
        let rig = Rig::new();
        let subject: S = rows::warmed(&rig, LOOP_BYTES);
        group.throughput(Throughput::Elements(threads as u64));
        group.bench_function(format!("{threads} threads/{}", S::NAME), |bencher| {
            bencher.iter_custom(|iterations| {
                rows::take_drop_loop(&subject, &rig, LOOP_BYTES, (threads, Use::Record), iterations)
            });
        });
    }
    group.finish();
}

fn pending_of<S: Subject>(criterion: &mut Criterion) {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, BYTES);
    let mut group = criterion.benchmark_group(format!("one event pending for {PENDING:?}"));
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.warm_up_time(Duration::from_millis(1)).measurement_time(Duration::from_secs(2));
    group.throughput(Throughput::Elements(63));
    group.bench_function(format!("63 others ready/{}", S::NAME), |bencher| {
        bencher.iter_custom(|iterations| {
            (0..iterations).map(|_| rows::others_ready(&subject, &rig, BYTES, PENDING)).sum()
        });
    });
    group.finish();
}

fn contention(criterion: &mut Criterion) {
    println!("{}", classic_constants());
    loops_of::<ClassicPool>(criterion);
    loops_of::<Pinpool>(criterion);
    pending_of::<ClassicPool>(criterion);
    pending_of::<Pinpool>(criterion);
}

criterion_group!(benches, contention);
criterion_main!(benches);
