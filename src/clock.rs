//! The time by which a pool's policies go: what lay idle for long, how long a pause lasts, what was lately.
//!
//! A clock of its own, so that a test can let an hour pass without waiting for it.

use crate::sync::fixed::{AtomicU32, AtomicU64};
use crate::sync::{Instant, Ordering};
use std::time::Duration;

/// A moment, in steps of [`TICK`] since the pool was made. It wraps; ages up to eight months are right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Tick(u32);

/// What a [`Tick`] counts: fine enough for every policy, and small enough to lie beside a block for nothing.
pub(crate) const TICK: Duration = Duration::from_millis(10);

impl Tick {
    /// How long ago it was. Nothing for what is later than `now`: whoever looks may have asked for the time, and then
    /// lost its processor, before somebody else shelved a block.
    pub(crate) fn age(self, now: Tick) -> Duration {
        let ticks = now.0.wrapping_sub(self.0).cast_signed();
        TICK * ticks.max(0).unsigned_abs()
    }
}

/// The clock of one pool.
#[derive(Debug)]
pub(crate) struct Clock {
    started: Instant,
    /// What tests let pass.
    skipped_ms: AtomicU64,
    /// The last tick that anybody asked for.
    recent: AtomicU32,
}

impl Default for Clock {
    fn default() -> Self {
        Self { started: Instant::now(), skipped_ms: AtomicU64::new(0), recent: AtomicU32::new(0) }
    }
}

impl Clock {
    pub(crate) fn now(&self) -> Instant {
        Instant::now() + Duration::from_millis(self.skipped_ms.load(Ordering::Relaxed))
    }

    pub(crate) fn tick(&self) -> Tick {
        let tick = self.tick_of(self.now());
        self.recent.store(tick.0, Ordering::Relaxed);
        tick
    }

    /// The last tick that was asked for; the cleaner asks at the start of every pass, since before it the cleaner may have
    /// slept for long. Costs no look at a clock.
    pub(crate) fn recent(&self) -> Tick {
        Tick(self.recent.load(Ordering::Relaxed))
    }

    pub(crate) fn tick_of(&self, now: Instant) -> Tick {
        let ticks = (now - self.started).as_millis() / TICK.as_millis();
        // Cut off on purpose: only differences count.
        Tick(ticks as u32)
    }

    /// Lets time pass; like time itself, nobody notices it who does not look.
    #[cfg(feature = "sim")]
    pub(crate) fn skip(&self, time: Duration) {
        self.skipped_ms.fetch_add(time.as_millis() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_right_across_the_wrap() {
        assert_eq!(Tick(u32::MAX).age(Tick(1)), TICK * 2);
        assert_eq!(Tick(7).age(Tick(7)), Duration::ZERO);
    }

    #[test]
    fn what_was_shelved_after_the_look_at_the_clock_is_not_old() {
        assert_eq!(Tick(8).age(Tick(7)), Duration::ZERO);
        assert_eq!(Tick(1).age(Tick(u32::MAX)), Duration::ZERO);
    }

    #[test]
    #[cfg(feature = "sim")]
    fn skipped_time_has_passed() {
        let clock = Clock::default();
        let before = clock.tick();
        clock.skip(Duration::from_secs(3600));
        assert!(before.age(clock.tick()) >= Duration::from_secs(3600));
    }
}
