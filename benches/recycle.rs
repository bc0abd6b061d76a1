//! What it costs to give a buffer back, and how soon it is there again: record, drop, ready.
//!
//! `cargo bench --bench recycle`. The ratios, with the bars they are held to: `cargo bench --bench verdict`.
#![allow(missing_docs)] // what `criterion_group!` expands to has no docs

mod classic;
mod common;

use classic::ClassicPool;
use common::rows::{self, Before};
use common::{Pinpool, Rig, Subject, classic_constants};
use criterion::{
    BenchmarkGroup, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
    measurement::WallTime,
};
use std::time::Duration;

const BYTES: usize = 64 << 10;

fn settings(group: &mut BenchmarkGroup<'_, WallTime>) {
    // Flat: a row of the classic pool takes 100 ms an iteration, and growing counts would take minutes.
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
}

fn costs_of<S: Subject>(criterion: &mut Criterion) {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, BYTES);
    let mut group = criterion.benchmark_group("give back");
    settings(&mut group);
    group.throughput(Throughput::Elements(1));
    group.bench_function(format!("record_last_use/{}", S::NAME), |bencher| {
        bencher.iter_custom(|iterations| rows::record(&subject, &rig, BYTES, iterations));
    });
    group.bench_function(format!("drop, burst of 64/{}", S::NAME), |bencher| {
        bencher.iter_custom(|iterations| rows::drop_burst(&subject, &rig, BYTES, iterations));
    });
    group.bench_function(format!("drop, one per 200 us/{}", S::NAME), |bencher| {
        bencher.iter_custom(|iterations| {
            rows::drop_alone(&subject, &rig, BYTES, Before::Sleep(rows::PAUSE), iterations).iter().sum()
        });
    });
    group.finish();
}

fn readiness_of<S: Subject>(criterion: &mut Criterion, bytes: usize) {
    let rig = Rig::new();
    let subject: S = rows::with_one(&rig, bytes);
    let mut group = criterion.benchmark_group(format!("ready again, {} KiB dirty", bytes >> 10));
    settings(&mut group);
    group.throughput(Throughput::Bytes(bytes as u64));
    group.bench_function(format!("drop to pinned take/{}", S::NAME), |bencher| {
        bencher.iter_custom(|iterations| rows::drop_to_pinned_take(&subject, &rig, bytes, iterations));
    });
    group.bench_function(format!("drop to shelf/{}", S::NAME), |bencher| {
        bencher.iter_custom(|iterations| rows::drop_to_shelf(&subject, &rig, bytes, iterations));
    });
    group.finish();
}

fn recycle(criterion: &mut Criterion) {
    println!("{}", classic_constants());
    costs_of::<ClassicPool>(criterion);
    costs_of::<Pinpool>(criterion);
    for bytes in [64 << 10, 1 << 20] {
        readiness_of::<ClassicPool>(criterion, bytes);
        readiness_of::<Pinpool>(criterion, bytes);
    }
}

criterion_group!(benches, recycle);
criterion_main!(benches);
