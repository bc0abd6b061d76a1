//! Which faults are in force: a new choice every second, by the seed.

use crate::options::Faults;
use crate::world::{Device, Random, World};
use pinpool::sim::Fault;
use std::time::Duration;

/// While more than this is leaked, nothing is done that would make the pool leak more.
const QUARANTINE_MAX_BYTES: usize = 256 << 20;

type Named = (&'static str, &'static str, fn(&mut Random) -> Fault);

/// They cost time, or a buffer that stays pageable, or a wait for whole contexts.
const MILD: &[Named] = &[
    ("register refused", "cuMemHostRegister", |_| Fault::with_probability(0.05, 2)),
    ("register often refused", "cuMemHostRegister", |_| Fault::with_probability(0.5, 2)),
    ("large registers refused", "cuMemHostRegister", |_| Fault::larger_than(1 << 20, 2)),
    ("register slow", "cuMemHostRegister", |_| Fault::slow(Duration::from_millis(3))),
    ("allocate refused", "cuMemHostAlloc", |_| Fault::with_probability(0.05, 2)),
    ("allocate slow", "cuMemHostAlloc", |_| Fault::slow(Duration::from_millis(3))),
    ("unregister slow", "cuMemHostUnregister", |_| Fault::slow(Duration::from_millis(2))),
    ("not-ready storm", "cuEventQuery", |_| Fault::with_probability(0.7, 600)),
    ("query slow", "cuEventQuery", |_| Fault::slow(Duration::from_micros(200))),
    ("record fails", "cuEventRecord", |_| Fault::with_probability(0.03, 999)),
    ("no events", "cuEventCreate", |_| Fault::with_probability(0.2, 2)),
    ("capture unknown", "cuStreamIsCapturing", |_| Fault::with_probability(0.01, 999)),
    ("context wait slow", "cuCtxSynchronize", |_| Fault::slow(Duration::from_millis(10))),
];

/// They leave the pool in doubt about some memory, which it leaks and counts.
const HARD: &[Named] = &[
    ("query fails once", "cuEventQuery", |random| Fault::nth(1 + random.below(200) as u64, 999)),
    ("unregister fails once", "cuMemHostUnregister", |random| Fault::nth(1 + random.below(20) as u64, 1)),
    ("free fails once", "cuMemFreeHost", |random| Fault::nth(1 + random.below(20) as u64, 1)),
    ("context wait fails once", "cuCtxSynchronize", |random| Fault::nth(1 + random.below(8) as u64, 999)),
    ("context not set once", "cuCtxSetCurrent", |random| Fault::nth(1 + random.below(200) as u64, 999)),
];

/// Ends the faults in force and chooses others; gives their names.
pub fn choose(world: &World, quarantined_bytes: usize, random: &mut Random) -> Vec<&'static str> {
    world.sim.clear_faults();
    let mode = world.options.faults;
    if mode == Faults::None || random.one_in(4) {
        return Vec::new();
    }
    let mut chosen: Vec<&Named> = MILD.iter().filter(|_| random.one_in(5)).collect();
    if mode == Faults::Hard && quarantined_bytes < QUARANTINE_MAX_BYTES {
        chosen.extend(HARD.iter().filter(|_| random.one_in(10)));
    }
    for (_, call, fault) in &chosen {
        let fault = fault(random);
        world.sim.fail(call, fault);
    }
    chosen.iter().map(|(name, ..)| *name).collect()
}

/// Resets a device: its contexts, streams, memory and registrations are gone, and the application makes others. What was
/// page-locked there the pool leaks, so it is not done without end.
pub fn reset_a_device(world: &World, quarantined_bytes: usize, random: &mut Random) {
    if quarantined_bytes > QUARANTINE_MAX_BYTES {
        return;
    }
    let index = random.below(world.devices.len());
    let mut device = world.devices[index].write().expect("no panic holds it");
    if let Err(code) = world.sim.cuda().cu_device_primary_ctx_reset(index as i32) {
        return world.found(format!("a reset failed: {code}"));
    }
    let context = world.sim.context(index as i32);
    let streams = (0..world.options.streams).map(|_| context.stream()).collect();
    let next = Device { life: device.life + 1, context, streams, lost: false };
    let earlier = std::mem::replace(&mut *device, next);
    world.earlier.lock().expect("no panic holds it").push(earlier);
}

/// Loses device 0 for good: its unfinished work is never done, and every call in its context answers 700.
pub fn lose_a_device(world: &World) {
    let mut device = world.devices[0].write().expect("no panic holds it");
    device.context.break_with(700);
    device.lost = true;
}
