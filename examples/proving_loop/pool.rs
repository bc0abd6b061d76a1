//! Staging through pinpool, with the clock held to each call.

use crate::device::text;
use crate::input::Segment;
use crate::staging::{Lane, Stager, timed};
use pinpool::PinnedBuffer;
use std::collections::HashSet;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(10);

/// What the pool's caller pays and gets, call by call.
#[derive(Default)]
pub struct PoolStager {
    pub bytes: usize,
    pub take_ns: Vec<u64>,
    pub drop_ns: Vec<u64>,
    /// For each take, whether the buffer was page-locked.
    pub hits: Vec<bool>,
    pub pinned_addresses: HashSet<usize>,
}

impl Stager for PoolStager {
    fn name(&self) -> &'static str {
        "pinpool"
    }

    fn stage(&mut self, _slot: usize, segment: &Segment<'_>, onto: &mut Lane) -> Result<(), String> {
        let start = Instant::now();
        let mut arena = pinpool::take(self.bytes);
        self.take_ns.push(start.elapsed().as_nanos() as u64);
        self.hits.push(arena.is_pinned());
        if arena.is_pinned() {
            self.pinned_addresses.insert(arena.as_ptr() as usize);
        }

        let filled = segment.fill(&mut arena);
        arena.set_dirty_len(filled);
        // A slice out of the guard is outside cudarc's and the pool's tracking: hence the record.
        onto.stream.memcpy_htod(&arena[..], &mut onto.device).map_err(text)?;
        arena.record_last_use(&onto.stream).map_err(text)?;

        let start = Instant::now();
        drop(arena);
        self.drop_ns.push(start.elapsed().as_nanos() as u64);
        Ok(())
    }
}

/// How long after its drop a buffer can be taken again, page-locked and zeroed; `rounds` times, in microseconds.
///
/// The copy is waited for before the drop, so that what is measured is the pool's own part, and every other
/// buffer of the class is held, so that it is the dropped one that comes back.
pub fn ready_us(
    bytes: usize,
    segment: &Segment<'_>,
    lane: &mut Lane,
    rounds: usize,
) -> Result<Vec<f64>, String> {
    // Buffers that are still being page-locked would come back in place of the dropped one.
    if !pinpool::drain(PATIENCE) {
        return Err(format!("the pool did not settle in {PATIENCE:?}"));
    }
    let mut aside = Vec::new();
    let mut ready = Vec::with_capacity(rounds);
    let mut arena = pinpool::take(bytes);
    loop {
        let next = pinpool::take(bytes);
        if !next.is_pinned() {
            aside.push(next);
            break;
        }
        aside.push(std::mem::replace(&mut arena, next));
    }
    for round in 0..rounds {
        let filled = segment.fill(&mut arena);
        arena.set_dirty_len(filled);
        lane.stream.memcpy_htod(&arena[..], &mut lane.device).map_err(text)?;
        arena.record_last_use(&lane.stream).map_err(text)?;
        lane.stream.synchronize().map_err(text)?;
        let address = arena.as_ptr() as usize;
        let (again, waited) = timed(|| {
            drop(arena);
            take_pinned(bytes, &mut aside)
        })?;
        arena = again;
        let stale = arena.iter().filter(|byte| **byte != 0).count();
        if stale > 0 {
            return Err(format!(
                "round {round}: {stale} of {bytes} bytes of a buffer that was taken are not zero"
            ));
        }
        // Another buffer is no mistake of the pool's; only its time says nothing about this drop.
        if arena.as_ptr() as usize == address {
            ready.push(waited.as_nanos() as f64 / 1e3);
        }
    }
    if ready.is_empty() {
        return Err("no buffer that was dropped came back at the next take".into());
    }
    Ok(ready)
}

/// Takes until a page-locked buffer comes; what comes before is laid aside.
fn take_pinned(bytes: usize, aside: &mut Vec<PinnedBuffer>) -> Result<PinnedBuffer, String> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        let taken = pinpool::take(bytes);
        if taken.is_pinned() {
            return Ok(taken);
        }
        aside.push(taken);
        std::thread::yield_now();
    }
    Err(format!("a returned buffer was not ready after {PATIENCE:?}"))
}
