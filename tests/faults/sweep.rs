//! Runs every scenario without a fault, and then once for each of its driver calls and each way to fail.

use crate::checks::{Aftermath, Outcome, check, is_promised};
use crate::points::{Point, relevant, ways};
use crate::scenarios::{SCENARIOS, Scenario};
use crate::stage::Stage;
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

/// Runs side by side; most of a run's time is spent waiting for a thread to be started or woken.
const WORKERS: usize = 4;

/// A run that takes so long is worth a look: something was waited for in vain.
const SLOW: Duration = Duration::from_secs(1);

/// Panics of other threads than the test's own, with the names of the threads.
static PANICS: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

/// What one run was, and what was wrong with it.
struct Failure {
    run: String,
    problem: String,
}

fn catch_panics_of_threads() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        std::panic::set_hook(Box::new(|panic| {
            let name = std::thread::current().name().unwrap_or("?").to_owned();
            let text = text_of(panic.payload());
            let place = panic.location().map(ToString::to_string).unwrap_or_default();
            if !is_promised(text) {
                PANICS
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push((name, format!("{place}: {text}")));
            }
        }));
    });
}

fn text_of(payload: &dyn Any) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic without a text")
}

/// One run. The name is that of the pool's threads.
fn run(
    scenario: &Scenario,
    point: Option<Point>,
    name: &str,
) -> (Result<Outcome, String>, Vec<(&'static str, u64)>) {
    let mut called = Vec::new();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let stage = Stage::new(&scenario.settings, name, point);
        (scenario.play)(&stage);
        called = stage.sim.called();
        stage.sim.clear_faults();
        check(stage)
    }));
    let mut panics = PANICS.lock().unwrap_or_else(PoisonError::into_inner);
    let here = std::thread::current().name().unwrap_or("?").to_owned();
    // The system cuts a thread's name, but std keeps it whole.
    let (ours, others) =
        panics.drain(..).partition::<Vec<_>, _>(|(of, _)| of.starts_with(name) || *of == here);
    *panics = others;
    let problem = (!ours.is_empty()).then(|| format!("{ours:?}"));
    let result = match (outcome, problem) {
        (Ok(outcome), None) => Ok(outcome),
        (Err(_), problem) => Err(problem.unwrap_or_else(|| "a promised panic that nobody caught".into())),
        (Ok(_), Some(problem)) => Err(format!("a thread panicked: {problem}")),
    };
    (result, called)
}

#[derive(Default)]
struct Tally {
    runs: usize,
    /// The fault's call was not made this time.
    missed: usize,
    failures: Vec<Failure>,
    aftermaths: BTreeMap<&'static str, usize>,
    leaking_runs: usize,
}

impl Tally {
    fn add(&mut self, run: String, struck: bool, result: Result<Outcome, String>) {
        self.runs += 1;
        self.missed += usize::from(!struck);
        match result {
            Ok(outcome) => {
                self.leaking_runs += usize::from(outcome.quarantined_bytes > 0);
                let name = match outcome.aftermath {
                    Aftermath::Usable => "usable",
                    Aftermath::Lost => "device lost",
                    Aftermath::Pauses => "pausing",
                    Aftermath::Unsupported => "without page-locking",
                    Aftermath::Full => "at its ceiling",
                };
                *self.aftermaths.entry(name).or_default() += 1;
            }
            Err(problem) => self.failures.push(Failure { run, problem }),
        }
    }
}

#[test]
fn every_driver_call_can_fail() {
    catch_panics_of_threads();
    let started = Instant::now();
    let all = std::env::var("PINPOOL_FAULTS").is_ok_and(|value| value == "all");
    let only = std::env::var("PINPOOL_FAULTS_ONLY").ok();
    let scenarios =
        SCENARIOS.iter().filter(|scenario| only.as_ref().is_none_or(|only| scenario.name == only));
    let mut jobs = Vec::new();
    let (mut points, mut entries) = (0, BTreeSet::new());
    for scenario in scenarios {
        let (result, called) = run(scenario, None, "faults-none");
        result.unwrap_or_else(|problem| panic!("{} without a fault: {problem}", scenario.name));
        for (entry, count) in relevant(called) {
            entries.insert(entry);
            for nth in 1..=count {
                jobs.extend(ways(entry, nth, points, all).into_iter().map(|point| (scenario, point)));
                points += 1;
            }
        }
    }
    let codes: BTreeSet<u32> = jobs.iter().map(|(_, point)| point.code).collect();
    let tally = Mutex::new(Tally::default());
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            let (jobs, tally, next) = (&jobs, &tally, &next);
            let body = move || {
                while let Some((scenario, point)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let name = format!("f{worker}");
                    let began = Instant::now();
                    if std::env::var_os("PINPOOL_FAULTS_TRACE").is_some() {
                        eprintln!("{name} {} with {point:?}", scenario.name);
                    }
                    let (result, called) = run(scenario, Some(*point), &name);
                    if began.elapsed() > SLOW {
                        println!("slow: {} with {point:?}: {:?}", scenario.name, began.elapsed());
                    }
                    let struck =
                        called.iter().any(|(entry, count)| *entry == point.entry && *count >= point.nth);
                    let run = format!("{} with {point:?}", scenario.name);
                    tally.lock().unwrap().add(run, struck, result);
                }
            };
            std::thread::Builder::new().name(format!("worker{worker}")).spawn_scoped(scope, body).unwrap();
        }
    });
    let tally = tally.into_inner().unwrap();
    println!(
        "faults: {} scenarios, {points} fault points at {} entry points, {} codes, {} runs in {:.1} s \
         ({} whose call was not made that time); afterwards {:?}; {} runs quarantined memory{}",
        SCENARIOS.len(),
        entries.len(),
        codes.len(),
        tally.runs,
        started.elapsed().as_secs_f64(),
        tally.missed,
        tally.aftermaths,
        tally.leaking_runs,
        if all { "" } else { "; PINPOOL_FAULTS=all runs every point with every code" },
    );
    let shown =
        tally.failures.iter().take(40).map(|Failure { run, problem }| format!("{run}\n    {problem}"));
    let shown: Vec<String> = shown.collect();
    // Printed and not only panicked with: the hook above keeps what panics say to itself.
    println!(
        "{} runs failed{}{}",
        tally.failures.len(),
        if shown.is_empty() { "" } else { ":\n" },
        shown.join("\n")
    );
    assert!(tally.failures.is_empty());
    assert!(tally.missed * 10 <= tally.runs, "too few of the faults struck");
}
