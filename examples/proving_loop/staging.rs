//! The loop that all three ways of staging run in: K segments on the device, each read back and checked.

use crate::device::text;
use crate::input::{Input, Segment, checksum};
use crate::options::Options;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One way of getting a segment's bytes from the host to the device.
pub trait Stager {
    fn name(&self) -> &'static str;

    /// Gets memory, fills it, enqueues the copy. The copy need not be done when this returns.
    fn stage(&mut self, slot: usize, segment: &Segment<'_>, onto: &mut Lane) -> Result<(), String>;

    /// The copy that was staged in this slot is done.
    fn copied(&mut self, _slot: usize) -> Result<(), String> {
        Ok(())
    }
}

/// A stream, and the device memory that its segments go to.
pub struct Lane {
    pub stream: Arc<CudaStream>,
    pub device: CudaSlice<u8>,
    /// What the checksum of the segment on its way has to be.
    expected: Option<u64>,
}

pub struct Outcome {
    pub name: &'static str,
    pub mismatches: usize,
    /// The caller's time per segment: get memory, fill, enqueue the copy, let go.
    pub stage_ns: Vec<u64>,
    /// Bytes staged over the caller's time and the waits for the device; the checking is left out.
    pub mb_s: f64,
}

pub fn lanes(context: &Arc<CudaContext>, options: &Options) -> Result<Vec<Lane>, String> {
    let lane = |_| {
        let stream = context.new_stream().map_err(text)?;
        let device = stream.alloc_zeros(options.bytes).map_err(text)?;
        Ok(Lane { stream, device, expected: None })
    };
    (0..options.in_flight).map(lane).collect()
}

pub fn run(
    stager: &mut dyn Stager,
    input: &Input,
    options: &Options,
    lanes: &mut [Lane],
) -> Result<Outcome, String> {
    let mut came_back = vec![0; options.bytes];
    let mut outcome = Outcome {
        name: stager.name(),
        mismatches: 0,
        stage_ns: Vec::with_capacity(options.segments),
        mb_s: 0.0,
    };
    let mut progress = Progress::new(stager.name(), options.segments);
    let mut working = Duration::ZERO;
    let start = Instant::now();
    for number in 0..options.segments + options.in_flight {
        let slot = number % options.in_flight;
        let lane = &mut lanes[slot];
        if let Some(expected) = lane.expected.take() {
            working += timed(|| lane.stream.synchronize().map_err(text))?.1;
            stager.copied(slot)?;
            let sum = read_back(lane, &mut came_back)?;
            outcome.mismatches += usize::from(sum != expected);
        }
        if number < options.segments {
            let segment = input.segment(number, options.bytes);
            lane.expected = Some(segment.checksum());
            let due = Duration::from_secs_f64(number as f64 * options.period_ms / 1e3);
            std::thread::sleep(due.saturating_sub(start.elapsed()));
            let ((), caller) = timed(|| stager.stage(slot, &segment, lane))?;
            outcome.stage_ns.push(caller.as_nanos() as u64);
            working += caller;
            progress.show(number + 1);
        }
    }
    outcome.mb_s = (options.segments * options.bytes) as f64 / 1e6 / working.as_secs_f64();
    Ok(outcome)
}

pub fn timed<T>(work: impl FnOnce() -> Result<T, String>) -> Result<(T, Duration), String> {
    let start = Instant::now();
    let value = work()?;
    Ok((value, start.elapsed()))
}

fn read_back(lane: &Lane, into: &mut [u8]) -> Result<u64, String> {
    into.fill(0xA5); // so that a copy that did not happen cannot pass for the last one
    lane.stream.memcpy_dtoh(&lane.device, into).map_err(text)?;
    lane.stream.synchronize().map_err(text)?;
    Ok(checksum(into))
}

/// A line that overwrites itself, on a terminal only.
struct Progress {
    name: &'static str,
    total: usize,
    last: Option<Instant>,
}

impl Progress {
    fn new(name: &'static str, total: usize) -> Self {
        Self { name, total, last: std::io::stderr().is_terminal().then(Instant::now) }
    }

    fn show(&mut self, done: usize) {
        let Some(last) = self.last else { return };
        if last.elapsed() < Duration::from_millis(100) && done < self.total {
            return;
        }
        self.last = Some(Instant::now());
        let end = if done == self.total { "\r\x1b[K" } else { "" };
        let mut stderr = std::io::stderr();
        // A terminal that went away is no reason to stop.
        let _ = write!(stderr, "\r{}: {done} of {} segments{end}", self.name, self.total);
        let _ = stderr.flush();
    }
}
