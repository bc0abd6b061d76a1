//! The sweep through libcuda: a process for each scenario and for each call that hangs, some at a time.

use crate::hangs::{self, with_a_hanging};
use crate::points::Choice;
use crate::scenarios::{self, Scenario};
use crate::sweep::{Plan, Tally, catch_panics_of_threads};
use crate::{copies, device, system};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Processes side by side; most of a run's time is spent waiting for a thread to be started or woken.
const PROCESSES: usize = 4;
/// Those of hanging calls do nothing but wait.
const HANGING_PROCESSES: usize = 13;

/// Says what a child shall do: the name of a scenario, or the entry point that shall hang.
const TASK: &str = "PINPOOL_FAULTS_CHILD";
/// With which of its runs a child begins.
const FROM: &str = "PINPOOL_FAULTS_FROM";
/// Begins the line of a child's result.
const RESULT: &str = "result of the child:";

fn all_scenarios() -> impl Iterator<Item = &'static Scenario> {
    scenarios::SCENARIOS.iter().chain(copies::SCENARIOS)
}

#[test]
fn every_driver_call_can_fail_through_cudarc_and_libcuda() {
    if let Ok(name) = std::env::var(TASK) {
        return child(&name);
    }
    let (started, choice) = (Instant::now(), Choice::of_the_environment());
    let only = std::env::var("PINPOOL_FAULTS_ONLY").ok();
    let is_wanted = |scenario: &&Scenario| only.as_ref().is_none_or(|only| scenario.name == only);
    let tasks: Vec<String> = all_scenarios().filter(is_wanted).map(|scenario| scenario.name.into()).collect();
    let sum = Mutex::new(Sum::default());
    in_children("every_driver_call_can_fail_through_cudarc_and_libcuda", &tasks, PROCESSES, choice, |line| {
        sum.lock().unwrap().add(line);
    });
    let sum = sum.into_inner().unwrap();
    println!(
        "faults through libcuda: {} scenarios, {} fault points at {} entry points, {} codes, {} runs in {:.1} s ({} whose \
         call was not made that time); afterwards {:?}; {} runs quarantined memory; {choice}",
        tasks.len(),
        sum.numbers.get("points").unwrap_or(&0),
        sum.entries.len(),
        sum.codes.len(),
        sum.numbers.get("runs").unwrap_or(&0),
        started.elapsed().as_secs_f64(),
        sum.numbers.get("missed").unwrap_or(&0),
        sum.aftermaths,
        sum.numbers.get("leaking").unwrap_or(&0),
    );
    for entry in system::ENTRIES {
        assert!(only.is_some() || sum.entries.contains(entry), "{entry} was never refused");
    }
    assert_eq!(sum.numbers["failed"], 0, "runs failed");
    assert!(sum.numbers["missed"] * 10 <= sum.numbers["runs"], "too few of the faults struck");
}

#[test]
fn a_hanging_call_blocks_no_take_no_drop_and_no_shutdown_through_libcuda() {
    if let Ok(task) = std::env::var(TASK) {
        let (entry, warm) = task.split_once(' ').expect("an entry point and a word");
        let entry = crate::points::OF_THE_POOL.iter().find(|known| **known == entry).expect("an entry point");
        println!("\n{RESULT} {}", if with_a_hanging(entry, warm == "warm") { entry } else { "" });
        return;
    }
    let name = |(entry, warm)| format!("{entry} {}", if warm { "warm" } else { "cold" });
    let tasks: Vec<String> = hangs::cases().map(name).collect();
    let hung = Mutex::new(Vec::new());
    let test = "a_hanging_call_blocks_no_take_no_drop_and_no_shutdown_through_libcuda";
    in_children(test, &tasks, HANGING_PROCESSES, Choice::All, |line| {
        let entry = hangs::cases().map(|(entry, _)| entry).find(|entry| *entry == line);
        hung.lock().unwrap().extend(entry);
    });
    hangs::report(hung.into_inner().unwrap());
}

/// Sweeps one scenario.
fn child(name: &str) {
    catch_panics_of_threads();
    let scenario = all_scenarios().find(|scenario| scenario.name == name).expect("a scenario");
    let mut plan = Plan::default();
    // What the process needs once is there from the second run on.
    plan.add(scenario, Choice::Spread(0));
    plan = Plan::default();
    plan.add(scenario, Choice::of_the_environment());
    plan.thin_out();
    let tally = parking_lot::Mutex::new(Tally::default());
    let from = std::env::var(FROM).map_or(0, |from| from.parse().expect("a number"));
    for (at, job) in plan.jobs.iter().enumerate().skip(from) {
        Tally::run(&tally, *job, "f0");
        if !device::is_as_before() {
            report(&plan, from == 0, &tally.lock());
            // In a process that knows of nothing. It is this one's successor: it only returns if it cannot be.
            let error = this_binary("every_driver_call_can_fail_through_cudarc_and_libcuda", name)
                .env(FROM, (at + 1).to_string())
                .exec();
            panic!("no process any more: {error}");
        }
    }
    report(&plan, from == 0, &tally.into_inner());
}

/// Prints what the parent adds up; the plan's part once only.
fn report(plan: &Plan, is_first: bool, tally: &Tally) {
    let (points, failed) = (if is_first { plan.points } else { 0 }, tally.failures);
    let entries: Vec<_> = plan.entries.iter().map(|entry| format!("entry={entry}")).collect();
    let codes: Vec<_> = plan.codes().iter().map(|code| format!("code={code}")).collect();
    let after: Vec<_> = tally.aftermaths.iter().map(|(name, count)| format!("{name}={count}")).collect();
    println!(
        "\n{RESULT} points={points};failed={failed};runs={};missed={};leaking={};{};{};{}",
        tally.runs,
        tally.missed,
        tally.leaking_runs,
        entries.join(";"),
        codes.join(";"),
        after.join(";"),
    );
}

/// What the children report, added up.
#[derive(Default)]
struct Sum {
    numbers: BTreeMap<String, u64>,
    aftermaths: BTreeMap<String, u64>,
    entries: BTreeSet<String>,
    codes: BTreeSet<String>,
}

impl Sum {
    fn add(&mut self, line: &str) {
        for (key, value) in line.split(';').filter_map(|part| part.split_once('=')) {
            let number = value.parse::<u64>().unwrap_or_default();
            match key {
                "entry" => drop(self.entries.insert(value.into())),
                "code" => drop(self.codes.insert(value.into())),
                "points" | "runs" | "missed" | "leaking" | "failed" => {
                    *self.numbers.entry(key.into()).or_default() += number;
                }
                _ => *self.aftermaths.entry(key.into()).or_default() += number,
            }
        }
    }
}

fn this_binary(test: &str, task: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command.args(["--exact", &format!("children::{test}"), "--nocapture"]).env(TASK, task);
    command
}

/// Runs a test of this binary once for each task, `side_by_side` at a time; `take` gets each result.
fn in_children(
    test: &str,
    tasks: &[String],
    side_by_side: usize,
    choice: Choice,
    take: impl Fn(&str) + Sync,
) {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..side_by_side {
            scope.spawn(|| {
                while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut command = this_binary(test, task);
                    if let Choice::Spread(seed) = choice {
                        command.env("PINPOOL_FAULTS_SEED", seed.to_string());
                    }
                    let output = command.stdin(Stdio::null()).output().expect("a process");
                    let (out, err) =
                        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
                    for line in out.lines() {
                        match line.strip_prefix(RESULT) {
                            Some(result) => take(result.trim()),
                            None if line.starts_with("slow:") || line.starts_with("failed:") => {
                                println!("{line}")
                            }
                            None => {}
                        }
                    }
                    if !output.status.success() || !out.contains(RESULT) {
                        println!("{task}: {}\n{out}\n{err}", output.status);
                        failed.lock().unwrap().push(task);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "failed: {failed:?}");
}
