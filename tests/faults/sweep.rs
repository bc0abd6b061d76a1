//! Runs a scenario without a fault, and then once for each of its driver calls and each way to fail.

use crate::checks::{Aftermath, Outcome, check, is_promised};
use crate::points::{Choice, Point, relevant, ways};
use crate::scenarios::Scenario;
use crate::stage::Stage;
use parking_lot::Mutex; // Compiled here, so that the thread sanitizer sees what it orders.
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::time::{Duration, Instant};

/// A run that takes so long is worth a look: something was waited for in vain.
const SLOW: Duration = Duration::from_secs(1);

/// Panics of other threads than the test's own, with the names of the threads.
static PANICS: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

pub fn catch_panics_of_threads() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        std::panic::set_hook(Box::new(|panic| {
            let name = std::thread::current().name().unwrap_or("?").to_owned();
            let text = text_of(panic.payload());
            let place = panic.location().map(ToString::to_string).unwrap_or_default();
            if !is_promised(text) {
                PANICS.lock().push((name, format!("{place}: {text}")));
            }
        }));
    });
}

fn text_of(payload: &dyn Any) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic without a text")
}

/// One run. The name is that of the pool's threads.
pub fn run(
    scenario: &Scenario,
    point: Option<Point>,
    name: &str,
) -> (Result<Outcome, String>, Vec<(&'static str, u64)>) {
    let mut called = Vec::new();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let stage = Stage::new(&scenario.settings, name, point);
        (scenario.play)(&stage);
        called = stage.device.called();
        stage.end_faults();
        check(stage)
    }));
    let mut panics = PANICS.lock();
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

/// What shall be run, and what it covers.
#[derive(Default)]
pub struct Plan {
    pub jobs: Vec<(&'static Scenario, Point)>,
    pub points: usize,
    pub entries: BTreeSet<&'static str>,
}

impl Plan {
    /// Plays the scenario without a fault, and adds a job for each of its calls and each way to fail.
    ///
    /// # Panics
    /// When the scenario fails although nothing else does.
    pub fn add(&mut self, scenario: &'static Scenario, choice: Choice) {
        let (result, called) = run(scenario, None, "faults-none");
        if let Err(problem) = result {
            // Printed, because the hook above keeps what panics say to itself.
            println!("{} without a fault: {problem}", scenario.name);
            panic!("nothing failed, and yet something did");
        }
        for (entry, count) in relevant(called) {
            self.entries.insert(entry);
            for nth in 1..=count {
                let ways = ways(entry, nth, self.points, choice);
                self.jobs.extend(ways.into_iter().map(|point| (scenario, point)));
                self.points += 1;
            }
        }
    }

    /// Leaves out all but every so many-th run, where `PINPOOL_FAULTS_SHARE` says so: for tools that make a run slow.
    pub fn thin_out(&mut self) {
        let share = std::env::var("PINPOOL_FAULTS_SHARE").map_or(1, |share| share.parse().expect("a number"));
        self.jobs = self.jobs.drain(..).step_by(share).collect();
    }

    pub fn codes(&self) -> BTreeSet<u32> {
        self.jobs.iter().map(|(_, point)| point.code).collect()
    }
}

/// What became of the runs.
#[derive(Default)]
pub struct Tally {
    pub runs: usize,
    /// The fault's call was not made this time.
    pub missed: usize,
    pub failures: usize,
    pub aftermaths: BTreeMap<&'static str, usize>,
    pub leaking_runs: usize,
}

impl Tally {
    /// Runs a job and adds what became of it; `name` is that of the pool's threads.
    pub fn run(tally: &Mutex<Self>, (scenario, point): (&Scenario, Point), name: &str) {
        let began = Instant::now();
        if std::env::var_os("PINPOOL_FAULTS_TRACE").is_some() {
            eprintln!("{name} {} with {point:?}", scenario.name);
        }
        let (result, called) = run(scenario, Some(point), name);
        let took = began.elapsed();
        let struck = called.iter().any(|(entry, count)| *entry == point.entry && *count >= point.nth);
        let mut tally = tally.lock();
        if took > SLOW {
            // Under the lock: standard output's own is one that the thread sanitizer does not see.
            println!("slow: {} with {point:?}: {took:?}", scenario.name);
        }
        tally.runs += 1;
        tally.missed += usize::from(!struck);
        match result {
            Ok(outcome) => {
                tally.leaking_runs += usize::from(outcome.quarantined_bytes > 0);
                *tally.aftermaths.entry(in_words(outcome.aftermath)).or_default() += 1;
            }
            Err(problem) => {
                // At once, and not with a panic alone: the hook above keeps what panics say to itself.
                println!("failed: {} with {point:?}: {problem}", scenario.name);
                tally.failures += 1;
            }
        }
    }
}

fn in_words(aftermath: Aftermath) -> &'static str {
    match aftermath {
        Aftermath::Usable => "usable",
        Aftermath::Lost => "device lost",
        Aftermath::Pauses => "pausing",
        Aftermath::Unsupported => "without page-locking",
        Aftermath::Full => "at its ceiling",
    }
}
