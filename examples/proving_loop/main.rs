//! The main job: stages segments like a prover does, through pinpool and in two other ways, and checks every byte.
//!
//! `cargo run --release --example proving_loop -- --help`. Where there is no GPU it runs on the simulated
//! device behind a `libcuda` of its own, through the same cudarc, and says so.

mod device;
mod input;
mod options;
mod others;
mod pool;
mod report;
mod staging;

use cudarc::driver::CudaContext;
use device::{Device, text};
use input::Input;
use options::Options;
use others::{RegisterStager, VecStager};
use pool::PoolStager;
use staging::{Outcome, lanes, run};
use std::process::ExitCode;

const READY_ROUNDS: usize = 200;

/// Everything that was found out.
pub struct Summary {
    device: Device,
    options: Options,
    input_bytes: usize,
    input_files: usize,
    /// The first segments, which the hit rate leaves out: the pool has to get its buffers first.
    warm_up: usize,
    pool: PoolStager,
    pinned_bytes: usize,
    ready_us: Vec<f64>,
    /// pinpool, `vec![0; n]`, register per use.
    outcomes: [Outcome; 3],
}

impl Summary {
    fn mismatches(&self) -> usize {
        self.outcomes.iter().map(|outcome| outcome.mismatches).sum()
    }

    fn staged(&self) -> usize {
        self.outcomes.iter().map(|outcome| outcome.stage_ns.len()).sum()
    }

    fn hit_rate(&self) -> f64 {
        let warm = &self.pool.hits[self.warm_up.min(self.pool.hits.len())..];
        warm.iter().filter(|hit| **hit).count() as f64 / warm.len().max(1) as f64
    }
}

fn main() -> ExitCode {
    let options = match options::parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            println!("{}", options::HELP);
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("proving_loop: {why}");
            return ExitCode::from(2);
        }
    };
    match stage_all(options) {
        Ok(summary) => {
            println!(
                "{}",
                if summary.options.json { report::as_json(&summary) } else { report::as_table(&summary) }
            );
            let violations = summary.device.violations();
            violations.iter().for_each(|violation| eprintln!("proving_loop: {violation}"));
            ExitCode::from(u8::from(summary.mismatches() > 0 || !violations.is_empty()))
        }
        Err(why) => {
            eprintln!("proving_loop: {why}");
            ExitCode::FAILURE
        }
    }
}

fn stage_all(options: Options) -> Result<Summary, String> {
    let input = Input::read(&options.inputs)?;
    let mut device = Device::find()?;
    let context = CudaContext::new(0).map_err(text)?;
    device.name = context.name().map_err(text)?;
    if !options.json {
        let kind = if device.is_simulated() { "simulated: no usable CUDA driver here" } else { "real" };
        println!("device: {} ({kind})", device.name);
    }

    let bytes = options.bytes;
    let mut lanes = lanes(&context, &options)?;
    let mut pool = PoolStager { bytes, ..PoolStager::default() };
    let pooled = run(&mut pool, &input, &options, &mut lanes)?;
    let pinned_bytes = pinpool::stats().peak_registered_bytes;
    let ready_us = pool::ready_us(bytes, &input.segment(0, bytes), &mut lanes[0], READY_ROUNDS)?;
    let end = pinpool::shutdown();
    if !end.completed || end.registered_bytes_after > 0 || end.quarantined_bytes > 0 {
        return Err(format!("the pool did not let go of everything: {end:?}"));
    }

    let in_flight = (0..options.in_flight).map(|_| None).collect();
    let vec = run(&mut VecStager { bytes }, &input, &options, &mut lanes)?;
    let register = run(&mut RegisterStager { bytes, in_flight }, &input, &options, &mut lanes)?;

    let warm_up = (options.segments / 20).max(2 * options.in_flight + 2).min(options.segments / 2);
    Ok(Summary {
        device,
        input_bytes: input.len(),
        input_files: input.files,
        warm_up,
        pool,
        pinned_bytes,
        ready_us,
        outcomes: [pooled, vec, register],
        options,
    })
}
