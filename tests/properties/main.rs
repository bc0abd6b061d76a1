//! Random scripts against a naive model, on the stepped simulator: what may be handed out, what must be zero, what is
//! page-locked, every count, the cap, and every byte on the device.
//!
//! `PINPOOL_PROPERTY_SEED=7` repeats the cases of a run, which prints its seed; `PINPOOL_PROPERTY_CASES=5000` runs more of
//! them. A script that fails is made as short as it gets, and is printed as a test for `regressions.rs`.

mod by_name;
#[path = "../common/mod.rs"]
#[allow(unused)]
mod common;
mod contexts;
mod device;
mod graphs;
mod guards;
mod model;
mod own;
mod pool;
mod regressions;
mod script;
mod takes;
mod world;

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use script::{KIB, Op, Profile, Setup};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;
use world::World;

/// Cases of each test.
const CASES: u32 = 500;

/// Runs one script; the number of the operation that went wrong, and how.
fn run(setup: &Setup, script: &[Op]) -> Result<(), String> {
    let all = || {
        let mut world = World::new(setup);
        for (number, op) in script.iter().enumerate() {
            world.run(op).map_err(|why| format!("operation {number}, {op:?}: {why}"))?;
        }
        world.finish().map_err(|why| format!("at the end: {why}"))
    };
    catch_unwind(AssertUnwindSafe(all)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
        Err(format!("a panic: {}", text.unwrap_or_default()))
    })
}

/// Runs one script that failed once.
#[allow(dead_code)] // `regressions.rs` may be empty.
fn replay(setup: Setup, script: &[Op]) {
    if let Err(why) = run(&setup, script) {
        panic!("{why}");
    }
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

fn check(profile: Profile) {
    let seed = setting("PINPOOL_PROPERTY_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let cases = setting("PINPOOL_PROPERTY_CASES").map_or(CASES, |cases| cases as u32);
    eprintln!("{}: PINPOOL_PROPERTY_SEED={seed} PINPOOL_PROPERTY_CASES={cases}", profile.name);
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_time: 60_000,
        max_shrink_iters: 20_000,
        ..Config::default()
    };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let started = Instant::now();
    let (slow, tried, failed) = (Cell::new(0), Cell::new(0), Cell::new(false));
    let mut runner = TestRunner::new_with_rng(config, random);
    let result = runner.run(&script::scripts(profile), |(setup, script)| {
        // What comes after the first that fails are shorter forms of it.
        tried.set(tried.get() + u32::from(!failed.get()));
        match run(&setup, &script) {
            Err(why) if why.ends_with(world::TOO_SLOW) => {
                slow.set(slow.get() + 1);
                Ok(())
            }
            outcome => outcome.map_err(|why| {
                failed.set(true);
                world::PATIENCE_MS.set(500);
                TestCaseError::fail(why)
            }),
        }
    });
    assert!(slow.get() <= 1 + cases / 50, "{}: {} shutdowns did not end in time", profile.name, slow.get());
    match result {
        Ok(()) => eprintln!(
            "{}: {cases} cases in {:?} ({} without a verdict)",
            profile.name,
            started.elapsed(),
            slow.get()
        ),
        Err(TestError::Fail(why, (setup, script))) => panic!(
            "{} (PINPOOL_PROPERTY_SEED={seed}): after {} scripts; {} operations fail: {why}\n\n{}",
            profile.name,
            tried.get(),
            script.len(),
            script::as_a_test(&setup, &script)
        ),
        Err(error) => panic!("{} (PINPOOL_PROPERTY_SEED={seed}): {error}", profile.name),
    }
}

const ROOMY: &[usize] = &[64 << 20];
const TIGHT: &[usize] = &[16 * KIB, 24 * KIB, 64 * KIB, 8 * KIB];

#[test]
fn with_room_for_all_the_pool_does_what_the_model_says() {
    check(Profile {
        name: "roomy",
        devices: &[1, 2],
        caps: ROOMY,
        has_ceiling: false,
        has_faults: false,
        has_contexts: false,
        has_graphs: false,
        has_own: true,
        operations: 40,
    });
}

#[test]
fn under_a_tight_cap_the_largest_and_coldest_go_first() {
    check(Profile {
        name: "tight",
        devices: &[1, 2],
        caps: TIGHT,
        has_ceiling: false,
        has_faults: false,
        has_contexts: false,
        has_graphs: false,
        has_own: true,
        operations: 40,
    });
}

#[test]
fn under_a_ceiling_never_more_is_page_locked() {
    check(Profile {
        name: "ceiling",
        devices: &[1],
        caps: &[64 << 20, 24 * KIB],
        has_ceiling: true,
        has_faults: false,
        has_contexts: false,
        has_graphs: false,
        has_own: false,
        operations: 40,
    });
}

#[test]
fn whatever_the_driver_refuses_no_byte_is_wrong_and_no_account_unbalanced() {
    check(Profile {
        name: "faults",
        devices: &[1, 2],
        caps: &[64 << 20, 24 * KIB],
        has_ceiling: false,
        has_faults: true,
        has_contexts: false,
        has_graphs: false,
        has_own: false,
        operations: 40,
    });
}

#[test]
fn contexts_come_and_go_and_what_they_leave_is_never_given_to_anybody() {
    check(Profile {
        name: "contexts",
        devices: &[1, 2],
        caps: &[64 << 20, 24 * KIB],
        has_ceiling: false,
        has_faults: false,
        has_contexts: true,
        has_graphs: false,
        has_own: false,
        operations: 50,
    });
}

#[test]
fn what_a_graph_may_replay_is_held_until_the_graph_is_gone() {
    check(Profile {
        name: "graphs",
        devices: &[1, 1, 2],
        caps: &[64 << 20, 64 << 20, 24 * KIB],
        has_ceiling: false,
        has_faults: false,
        has_contexts: false,
        has_graphs: true,
        has_own: true,
        operations: 60,
    });
}

#[test]
fn without_a_device_the_pool_recycles_plain_memory() {
    check(Profile {
        name: "plain",
        devices: &[0],
        caps: &[64 << 20, 24 * KIB],
        has_ceiling: false,
        has_faults: false,
        has_contexts: false,
        has_graphs: false,
        has_own: false,
        operations: 40,
    });
}
