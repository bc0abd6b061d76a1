//! Making a driver entry point fail, be slow or hang, on purpose.

use std::time::Duration;

/// What shall go wrong when an entry point is called.
#[derive(Clone, Debug)]
pub struct Fault {
    kind: Kind,
}

#[derive(Clone, Debug)]
#[allow(dead_code)]
enum Kind {
    Nth { nth: u64, code: u32 },
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
        Self { kind: Kind::Nth { nth, code } }
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

    /// Calls for more than `bytes` fail with `code`.
    pub fn larger_than(bytes: usize, code: u32) -> Self {
        Self { kind: Kind::LargerThan { bytes, code } }
    }

    /// Calls that would bring what is in use above `bytes` fail with `code`.
    pub fn budget(bytes: usize, code: u32) -> Self {
        Self { kind: Kind::Budget { bytes, code } }
    }

    /// Every call takes this much longer.
    pub fn slow(extra: Duration) -> Self {
        Self { kind: Kind::Slow { extra } }
    }

    /// Every call blocks until [`Sim::clear_faults`](super::Sim::clear_faults).
    pub fn hang() -> Self {
        Self { kind: Kind::Hang }
    }
}
