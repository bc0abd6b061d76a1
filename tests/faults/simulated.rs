//! The sweep on the simulated device: many runs side by side, each with a device of its own.

use crate::hangs::{self, with_a_hanging};
use crate::points::Choice;
use crate::scenarios::SCENARIOS;
use crate::sweep::{Plan, Tally, catch_panics_of_threads};
use std::sync::Mutex;
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
    let (tally, next) = (Mutex::new(Tally::default()), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            let (jobs, tally, next) = (&plan.jobs, &tally, &next);
            let body = move || {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    Tally::run(tally, *job, &format!("f{worker}"));
                }
            };
            std::thread::Builder::new().name(format!("worker{worker}")).spawn_scoped(scope, body).unwrap();
        }
    });
    let tally = tally.into_inner().unwrap();
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
        for (entry, warm) in hangs::cases() {
            let hung = &hung;
            scope.spawn(move || {
                if with_a_hanging(entry, warm) {
                    hung.lock().unwrap().push(entry);
                }
            });
        }
    });
    hangs::report(hung.into_inner().unwrap());
}
