//! Making a driver entry point fail, be slow or hang, on purpose.

use super::calls::{Call, spend};
use super::random::Random;
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What shall go wrong when an entry point is called; see [`Sim::fail`](super::Sim::fail).
///
/// A failing call does nothing. Several faults of one entry point act in the order in which they were set.
#[derive(Clone, Debug)]
pub struct Fault {
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Nth { calls_left: u64, code: u32 },
    FromNth { calls_left: u64, code: u32, spreads: bool },
    Always { code: u32 },
    Probability { probability: f64, code: u32 },
    LargerThan { bytes: usize, code: u32 },
    Budget { bytes: usize, code: u32 },
    Slow { extra: Duration },
    Hang,
}

impl Fault {
    /// The `nth` call from now (1 is the next one) fails with `code`; the others are let through.
    pub fn nth(nth: u64, code: u32) -> Self {
        Self { kind: Kind::Nth { calls_left: nth, code } }
    }

    /// The `nth` call from now (1 is the next one) and all later ones fail with `code`.
    pub fn from_nth(nth: u64, code: u32) -> Self {
        Self { kind: Kind::FromNth { calls_left: nth, code, spreads: false } }
    }

    /// As [`from_nth`](Self::from_nth), and from that moment on every entry point answers `code`: a device
    /// that is lost, or a driver that is gone.
    pub fn ends_everything(nth: u64, code: u32) -> Self {
        Self { kind: Kind::FromNth { calls_left: nth, code, spreads: true } }
    }

    /// Every call fails with `code`.
    pub fn always(code: u32) -> Self {
        Self { kind: Kind::Always { code } }
    }

    /// The next call fails with `code`.
    pub fn once(code: u32) -> Self {
        Self::nth(1, code)
    }

    /// Each call fails with this probability (0 to 1), drawn from the seed of the simulated device.
    pub fn with_probability(probability: f64, code: u32) -> Self {
        Self { kind: Kind::Probability { probability, code } }
    }

    /// Calls for more than `bytes` fail with `code`: registrations, allocations, copies.
    pub fn larger_than(bytes: usize, code: u32) -> Self {
        Self { kind: Kind::LargerThan { bytes, code } }
    }

    /// Calls that would bring the bytes in use above `bytes` fail with `code`.
    ///
    /// For `cuMemHostRegister` and `cuMemHostAlloc` that is all page-locked memory (as WSL limits it), for
    /// the others all device memory.
    pub fn budget(bytes: usize, code: u32) -> Self {
        Self { kind: Kind::Budget { bytes, code } }
    }

    /// Every call takes this much longer.
    pub fn slow(extra: Duration) -> Self {
        Self { kind: Kind::Slow { extra } }
    }

    /// Every call blocks until [`Sim::clear_faults`](super::Sim::clear_faults), then goes on as usual.
    pub fn hang() -> Self {
        Self { kind: Kind::Hang }
    }
}

/// The faults of one simulated device.
pub(super) struct Faults {
    is_armed: AtomicBool,
    set: Mutex<Set>,
    cleared: Condvar,
}

struct Set {
    faults: Vec<(Call, Kind)>,
    random: Random,
    /// What every call answers since a fault of [`Fault::ends_everything`] struck.
    everything: Option<u32>,
    /// Grows with every `clear`, so that a hanging call notices one although new faults were set since.
    generation: u64,
    hanging: usize,
}

impl Faults {
    pub(super) fn new(seed: u64) -> Self {
        let set = Set {
            faults: Vec::new(),
            random: Random::new(seed ^ 0xFA17),
            everything: None,
            generation: 0,
            hanging: 0,
        };
        Self { is_armed: AtomicBool::new(false), set: Mutex::new(set), cleared: Condvar::new() }
    }

    pub(super) fn is_armed(&self) -> bool {
        self.is_armed.load(Ordering::Relaxed)
    }

    pub(super) fn arm(&self, call: Call, fault: Fault) {
        self.set.lock().faults.push((call, fault.kind));
        self.is_armed.store(true, Ordering::Relaxed);
    }

    pub(super) fn clear(&self) {
        let mut set = self.set.lock();
        set.faults.clear();
        set.everything = None;
        set.generation += 1;
        self.is_armed.store(false, Ordering::Relaxed);
        self.cleared.notify_all();
    }

    /// Calls that hang now.
    pub(super) fn hanging(&self) -> usize {
        self.set.lock().hanging
    }

    /// Lets the faults of `call` happen: waits, or answers the code to fail with.
    pub(super) fn strike(
        &self,
        call: Call,
        bytes: usize,
        bytes_in_use: impl Fn() -> usize,
    ) -> Result<(), u32> {
        // Looked up before the set is locked: it takes the device's lock.
        let bytes_after = bytes_in_use().saturating_add(bytes);
        let mut set = self.set.lock();
        let Set { faults, random, everything, .. } = &mut *set;
        let (mut extra, mut hangs) = (Duration::ZERO, false);
        let mut failed = everything.filter(|_| call.is_of_the_driver());
        for (_, kind) in faults.iter_mut().filter(|(of, _)| *of == call) {
            let code = match kind {
                Kind::Nth { calls_left, code } => {
                    let strikes = *calls_left == 1;
                    *calls_left = calls_left.saturating_sub(1);
                    strikes.then_some(*code)
                }
                Kind::FromNth { calls_left, code, spreads } => {
                    *calls_left = calls_left.saturating_sub(1);
                    let strikes = *calls_left == 0;
                    if strikes && *spreads {
                        *everything = Some(*code);
                    }
                    strikes.then_some(*code)
                }
                Kind::Always { code } => Some(*code),
                Kind::Probability { probability, code } => {
                    (random.fraction() < *probability).then_some(*code)
                }
                Kind::LargerThan { bytes: limit, code } => (bytes > *limit).then_some(*code),
                Kind::Budget { bytes: limit, code } => (bytes_after > *limit).then_some(*code),
                Kind::Slow { extra: more } => {
                    extra += *more;
                    None
                }
                Kind::Hang => {
                    hangs = true;
                    None
                }
            };
            failed = failed.or(code);
        }
        if hangs {
            let generation = set.generation;
            set.hanging += 1;
            while set.generation == generation {
                self.cleared.wait(&mut set);
            }
            set.hanging -= 1;
        }
        drop(set);
        spend(extra);
        failed.map_or(Ok(()), Err)
    }
}
