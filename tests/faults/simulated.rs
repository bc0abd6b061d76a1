//! The sweep on the simulated device: many runs side by side, each with a device of its own.

use crate::hangs::{self, with_a_hanging};
use crate::points::Choice;
use crate::scenarios::SCENARIOS;
use crate::sweep::{Plan, Tally, catch_panics_of_threads};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Runs side by side; most of a run's time is spent waiting for a thread to be started or woken.
const WORKERS: usize = 4;

#[test]
fn every_driver_call_can_fail() {
    catch_panics_of_threads();
    let (started, choice) = (Instant::now(), Choice::of_the_environment());
    let only = std::env::var("PINPOOL_FAULTS_ONLY").ok();
    let mut plan = Plan::default();
    for scenario in SCENARIOS.iter().filter(|scenario| only.as_ref().is_none_or(|only| scenario.name == only))
    {
        plan.add(scenario, choice);
    }
    plan.thin_out();
    let (tally, next) = (Mutex::new(Tally::default()), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|worker| {
                let (jobs, tally, next) = (&plan.jobs, &tally, &next);
                let body = move || {
                    while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                        Tally::run(tally, *job, &format!("f{worker}"));
                    }
                };
                std::thread::Builder::new().name(format!("worker{worker}")).spawn_scoped(scope, body).unwrap()
            })
            .collect();
        // One by one: what a scope itself waits with, the thread sanitizer does not see.
        workers.into_iter().for_each(|worker| worker.join().expect("a worker"));
    });
    let tally = tally.into_inner();
    println!(
        "faults: {} scenarios, {} fault points at {} entry points, {} codes, {} runs in {:.1} s ({} whose call was not made \
         that time); afterwards {:?}; {} runs quarantined memory; {choice}",
        SCENARIOS.len(),
        plan.points,
        plan.entries.len(),
        plan.codes().len(),
        tally.runs,
        started.elapsed().as_secs_f64(),
        tally.missed,
        tally.aftermaths,
        tally.leaking_runs,
    );
    assert_eq!(tally.failures, 0, "runs failed");
    assert!(tally.missed * 10 <= tally.runs, "too few of the faults struck");
}

#[test]
fn a_hanging_call_blocks_no_take_no_drop_and_no_shutdown() {
    let hung = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let threads: Vec<_> = hangs::cases()
            .map(|(entry, warm)| {
                let hung = &hung;
                scope.spawn(move || hung.lock().extend(with_a_hanging(entry, warm).then_some(entry)))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().expect("a pool that goes on"));
    });
    hangs::report(hung.into_inner());
}
