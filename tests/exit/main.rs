//! The end of a process, in processes of its own: however it ends and whatever the pool is doing, the exit status is
//! right, it comes in bounded time, and nothing of ours calls the driver once the driver is gone.
//!
//! The fake libcuda registers an exit handler in `cuInit`, as the real one does. With `FAKE_CUDA_AFTER_EXIT=fail` it
//! ends a process that calls it afterwards, or is inside a call at that moment, with a status of its own; with
//! `crash` a late call is a segmentation fault. Not libtest's `main`, because what a child does in its own `main`, and
//! after it, is what is tested: `cargo test --test exit -- NAME` runs the cases whose name has that in it.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // The C library's ways to end a process, and the driver's functions.

mod device;
mod late;
mod scenarios;

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Names the scenario in a child.
const SCENARIO: &str = "PINPOOL_EXIT_SCENARIO";

/// The bound that the library states, and what a busy machine adds to a process of some hundred milliseconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a child's end is to be: an exit status, or a signal.
#[derive(Clone, Copy, PartialEq, Debug)]
enum End {
    Status(i32),
    Signal(i32),
}

/// How strict the fake libcuda is about its end; `Sim` runs on the simulated device instead.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Strictness {
    /// No call may come late, and none may be inside.
    Fail,
    /// A call that hangs may be inside.
    FailLate,
    Crash,
    Sim,
}

struct Case {
    scenario: &'static str,
    end: End,
    strictness: Strictness,
    /// How often, for what is a race.
    times: u32,
}

fn case(scenario: &'static str, end: End, strictness: Strictness) -> Case {
    Case { scenario, end, strictness, times: 1 }
}

fn cases() -> Vec<Case> {
    use End::{Signal, Status};
    use Strictness::{Crash, Fail, FailLate, Sim};
    let mut cases = vec![
        case("exit_from_another_thread", Status(4), Fail),
        case("exit_inside_a_thread_local_destructor", Status(6), Fail),
        case("a_panic_in_main", Status(101), Fail),
        case("abort", Signal(libc::SIGABRT), Fail),
        case("underscore_exit", Status(7), Fail),
        case("quick_exit", Status(8), Fail),
        case("shutdown_and_return", Status(0), Fail),
        case("thread_local_destructors", Status(0), Fail),
        case("handlers_that_run_before_ours", Status(0), Fail),
        case("a_fork_that_exits", Status(0), Fail),
        case("a_cleaner_inside_a_slow_call", Status(0), Sim),
        case("a_cleaner_inside_a_call_that_hangs", Status(0), Sim),
        case("a_context_wait_that_never_ends", Status(0), Sim),
        case("main_returns", Status(0), Sim),
    ];
    for strictness in [Fail, Crash] {
        cases.extend([
            case("main_returns", Status(0), strictness),
            case("main_returns_with_the_process_wide_pool", Status(0), strictness),
            case("exit_is_called", Status(3), strictness),
            case("a_static_s_destructor", Status(0), strictness),
            case("a_static_s_destructor_with_the_process_wide_pool", Status(0), strictness),
            case("a_fini_function", Status(0), strictness),
            case("a_cleaner_inside_a_slow_call", Status(0), strictness),
            case("a_release_lane_inside_a_slow_call", Status(0), strictness),
            case("a_context_lane_inside_a_slow_call", Status(0), strictness),
            Case { times: 5, ..case("threads_that_go_on", Status(5), strictness) },
            Case { times: 5, ..case("threads_that_pin_and_wait", Status(5), strictness) },
            Case { times: 5, ..case("threads_that_copy", Status(5), strictness) },
        ]);
    }
    for strictness in [FailLate, Crash] {
        cases.extend([
            case("a_cleaner_inside_a_call_that_hangs", Status(0), strictness),
            case("a_release_lane_inside_a_call_that_hangs", Status(0), strictness),
            case("a_context_wait_that_never_ends", Status(0), strictness),
            case("a_user_s_wait_that_never_ends", Status(0), strictness),
        ]);
    }
    cases
}

fn main() -> ExitCode {
    if let Ok(scenario) = std::env::var(SCENARIO) {
        return scenarios::run(&scenario);
    }
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    if std::env::args().any(|word| word == "--list") {
        cases().iter().for_each(|case| println!("{}: test", case.scenario));
        return ExitCode::SUCCESS;
    }
    let is_wanted = |case: &Case| words.is_empty() || words.iter().any(|word| case.scenario.contains(word));
    let wanted: Vec<Case> = cases().into_iter().filter(is_wanted).collect();
    println!("running {} tests", wanted.len());
    let (turn, failures) = (Mutex::new(wanted.into_iter()), Mutex::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let Some(case) = turn.lock().unwrap().next() else { return };
                    let name = format!("{} ({:?})", case.scenario, case.strictness);
                    match run(&case) {
                        Ok(longest) => println!("test {name} ... ok in {longest:?}"),
                        Err(problem) => {
                            println!("test {name} ... FAILED\n{problem}");
                            *failures.lock().unwrap() += 1;
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    println!("\ntest result: {}. {failures} failed", if failures == 0 { "ok" } else { "FAILED" });
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a case; gives how long its slowest process took.
fn run(case: &Case) -> Result<Duration, String> {
    (0..case.times).map(|_| run_once(case)).try_fold(Duration::ZERO, |longest, took| Ok(longest.max(took?)))
}

fn run_once(case: &Case) -> Result<Duration, String> {
    let started = Instant::now();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.env_clear().env(SCENARIO, case.scenario).env("RUST_BACKTRACE", "0");
    child.env("FAKE_CUDA_IN_CHILD", "fail");
    // What `.ci/coverage` tells its processes.
    child.envs(std::env::var_os("LLVM_PROFILE_FILE").map(|file| ("LLVM_PROFILE_FILE", file)));
    match case.strictness {
        Strictness::Fail => child.env("FAKE_CUDA_AFTER_EXIT", "fail"),
        Strictness::FailLate => child.env("FAKE_CUDA_AFTER_EXIT", "fail-late"),
        Strictness::Crash => child.env("FAKE_CUDA_AFTER_EXIT", "crash"),
        Strictness::Sim => child.env("PINPOOL_EXIT_ON_SIM", "1"),
    };
    let mut child =
        child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
    let ended = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break Some(status),
            None if started.elapsed() > PATIENCE => break None,
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let took = started.elapsed();
    if ended.is_none() {
        let _ = child.kill();
    }
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let Some(status) = ended else { return Err(format!("it does not end:\n{said}")) };
    let end = match (status.code(), status.signal()) {
        (Some(code), _) => End::Status(code),
        (None, signal) => End::Signal(signal.unwrap_or(0)),
    };
    match end == case.end && said.contains(scenarios::READY) {
        true => Ok(took),
        false => Err(format!("it ended with {end:?} instead of {:?}:\n{said}", case.end)),
    }
}
