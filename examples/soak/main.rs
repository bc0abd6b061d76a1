//! Pools under everything at once, for as long as you like, with every byte checked: `cargo run --release --example soak`.
//!
//! `-- --help` lists the options.

mod faults;
mod graphs;
mod options;
mod report;
mod visits;
mod worker;
mod world;

use graphs::Capturer;
use options::{Faults, HELP, Options};
use pinpool::{Backing, PinnedPool};
use report::{Process, THREAD_NAME, Ticker, settle_accounts};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use worker::Worker;
use world::{Random, World};

fn main() -> ExitCode {
    let options = match options::parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::from(2);
        }
    };
    report::keep_no_large_memory();
    println!("soak --seed {}: {options:?}", options.seed);
    // A worker catches the panics that are documented, and tells the others as a discrepancy.
    std::panic::set_hook(Box::new(|panic| {
        if !panic.to_string().contains(worker::DOCUMENTED_PANIC) {
            eprintln!("{panic}");
        }
    }));
    let found = soak(options);
    if found.is_empty() {
        println!("passed: no discrepancy");
        return ExitCode::SUCCESS;
    }
    for what in &found {
        println!("DISCREPANCY: {what}");
    }
    ExitCode::FAILURE
}

/// What was found wrong.
fn soak(options: Options) -> Vec<String> {
    let seed = options.seed;
    let world = Arc::new(World::new(options));
    let before = Process::now();
    let pools: Vec<_> = world.options.backings.iter().map(|backing| pool(&world, *backing)).collect();
    let mut workers: Vec<_> = (0..world.options.threads as u64)
        .map(|thread| {
            let worker = Worker::new(world.clone(), pools.clone(), thread);
            std::thread::Builder::new().name(format!("worker-{thread}")).spawn(|| worker.run())
        })
        .collect();
    workers.extend((0..world.options.capturers as u64).map(|thread| {
        let capturer = Capturer::new(world.clone(), pools.clone(), thread);
        std::thread::Builder::new().name(format!("capturer-{thread}")).spawn(|| capturer.run())
    }));
    std::thread::scope(|scope| {
        scope.spawn(|| tick(&world, &pools, Random(seed.rotate_left(17))));
        for (number, pool) in pools.iter().enumerate().skip(1) {
            let world = &world;
            scope.spawn(move || govern(world, pool, Random(!seed.rotate_left(number as u32))));
        }
        govern(&world, &pools[0], Random(!seed));
    });
    for worker in workers {
        if !worker.is_ok_and(|worker| worker.join().is_ok()) {
            world.found("a worker did not start, or panicked".into());
        }
    }
    world.parked.lock().expect("no panic holds it").clear();
    world.sim.clear_faults();
    settle_accounts(&world, &pools, before);
    world.all_found()
}

fn pool(world: &World, backing: Backing) -> PinnedPool {
    PinnedPool::builder()
        .driver(world.sim.driver())
        .backing(backing)
        .max_pooled_bytes(world.options.cap_bytes / world.options.backings.len())
        .thread_name(THREAD_NAME)
        .shutdown_timeout(Duration::from_secs(30))
        .build()
        .expect("the settings are right")
}

/// A line a second, and other faults; a device is lost at half-time; the end when it is time.
fn tick(world: &World, pools: &[PinnedPool], mut random: Random) {
    let started = Instant::now();
    let mut ticker = Ticker::default();
    let mut in_force = faults::choose(world, 0, &mut random);
    for second in 1..=world.options.seconds {
        while started.elapsed() < Duration::from_secs(second) && !world.is_over() {
            std::thread::sleep(Duration::from_millis(5));
        }
        ticker.line(world, pools, started.elapsed(), &in_force);
        if world.is_over() {
            return;
        }
        let quarantined_bytes = pools.iter().map(|pool| pool.stats().quarantined_bytes).sum();
        in_force = faults::choose(world, quarantined_bytes, &mut random);
        if world.options.faults == Faults::Reset && random.one_in(2) {
            faults::reset_a_device(world, quarantined_bytes, &mut random);
        }
        if world.options.faults == Faults::Lost && second == world.options.seconds.div_ceil(2) {
            println!("       device 0 is lost");
            faults::lose_a_device(world);
        }
    }
    world.over.store(true, Ordering::Relaxed);
}

/// Holds streams, moves caps, trims, clears, drains and shuts down.
fn govern(world: &World, pool: &PinnedPool, mut random: Random) {
    while !world.is_over() {
        act(world, pool, &mut random);
        let stats = pool.stats();
        // Both are read at one moment each: the cap only ever changes here.
        if stats.pooled_bytes > pool.max_pooled_bytes() {
            world.found(format!("{} pooled bytes are over the cap", stats.pooled_bytes));
        }
    }
}

fn act(world: &World, pool: &PinnedPool, random: &mut Random) {
    let nap = |random: &mut Random, us| std::thread::sleep(Duration::from_micros(random.below(us) as u64));
    let cap = world.options.cap_bytes / world.options.backings.len();
    match random.below(60) {
        0..12 => {
            let device = world.devices[random.below(world.devices.len())].read().expect("no panic holds it");
            let stream = &device.streams[random.below(device.streams.len())];
            if random.one_in(2) {
                stream.hold();
                nap(random, 8_000);
                stream.release();
            } else if !device.lost {
                world.sim.stall(stream.handle(), Duration::from_micros(random.below(20_000) as u64));
            }
        }
        12 => pool.set_max_pooled_bytes([0, cap / 64, cap / 8, cap][random.below(4)]),
        13..16 => pool.set_max_pooled_bytes(cap),
        16 => pool.trim_to(random.below(cap.max(1))),
        17 if random.one_in(4) => pool.clear(),
        18 => drop(pool.drain(Duration::from_millis(20))),
        19 if random.one_in(8) => drop(pool.shutdown()),
        20 => drop(pool.prewarm(1 + random.below(1 << 20), 3)),
        21 => {
            let hold = pool.hold_context_waits();
            nap(random, 5_000);
            drop(hold);
        }
        22 => {
            let hold = pool.hold_cleaner();
            nap(random, 5_000);
            drop(hold);
        }
        _ => nap(random, 4_000),
    }
}
