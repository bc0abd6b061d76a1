//! What a take costs when a page-locked buffer is ready: in bursts, and alone after a pause.
//!
//! `cargo bench --bench take`. The ratios, with the bars they are held to: `cargo bench --bench verdict`.
#![allow(missing_docs)] // what `criterion_group!` expands to has no docs

mod classic;
mod common;

use classic::ClassicPool;
use common::rows::{self, Before};
use common::{Pinpool, Rig, Subject, classic_constants};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::time::Duration;

const BYTES: usize = 64 << 10;

fn rows_of<S: Subject>(criterion: &mut Criterion) {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, BYTES);
    let mut group = criterion.benchmark_group("take hit");
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2)).sample_size(20);
    group.throughput(Throughput::Elements(1));
    group.bench_function(format!("burst of 64/{}", S::NAME), |bencher| {
        bencher.iter_custom(|iterations| rows::take_burst(&subject, &rig, BYTES, iterations));
    });
    group.bench_function(format!("one per 200 us/{}", S::NAME), |bencher| {
        bencher.iter_custom(|iterations| {
            rows::take_alone(&subject, &rig, BYTES, Before::Sleep(rows::PAUSE), iterations).iter().sum()
        });
    });
    group.finish();
}

fn take(criterion: &mut Criterion) {
    println!("{}", classic_constants());
    rows_of::<ClassicPool>(criterion);
    rows_of::<Pinpool>(criterion);
}

criterion_group!(benches, take);
criterion_main!(benches);
