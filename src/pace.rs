//! When the cleaner looks again: as seldom as it can be without being late.
//!
//! A look costs a microsecond. Being awake for it costs much more: on a virtual machine, whose processor halts between two
//! looks, 12 to 26 us. So what the cleaner costs is how often it wakes up, and it wakes up where something is to be
//! expected.

use std::time::Duration;

/// No nap is shorter: it would end at about the same time, with half of it spent on waking up.
pub(crate) const NAP_MIN: Duration = Duration::from_micros(30);
/// So that a return is never ignored for longer: half of what a caller may be told.
pub(crate) const NAP_MAX: Duration = Duration::from_micros(500);
/// The shortest first nap with nothing pending; whoever cannot wait harvests. Not shorter: the wake-up takes its time from
/// whoever runs on that core, and the first one falls into the caller's next use of the buffer just shelved.
const IDLE_NAP_MIN: Duration = Duration::from_micros(200);

/// How much longer than this a head took is not remembered: of such a one the finest step is the longest nap already. Or
/// one that hung for a minute would have the next fifty found late.
const REMEMBERED_MAX: Duration = Duration::from_millis(32);

/// When the heads of one stream are found complete, counted from when they are first seen, and how far they are from
/// it: averages of the last few. Zero when nothing is known.
///
/// What counts is not when a look found it but when that look was meant to be: waking up takes its time, and were
/// that learned too, every look would be later than the one before it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usual {
    mean: Duration,
    spread: Duration,
    /// The age at which the present head is to be looked at.
    aim: Option<Duration>,
}

impl Usual {
    /// A head was found complete at this age.
    pub(crate) fn learn(&mut self, age: Duration) {
        let end = self.aim.take().map_or(age, |aim| aim.min(age)).min(REMEMBERED_MAX);
        if self.mean.is_zero() {
            (self.mean, self.spread) = (end, end / 8);
        } else {
            // Half of the shortest nap is as exact as it gets.
            let error = end.abs_diff(self.mean).saturating_sub(NAP_MIN / 2);
            self.spread = (self.spread * 3 + error) / 4;
            self.mean = (self.mean * 3 + end) / 4;
        }
    }

    /// A head that was pending was gone at this age: a taker had found it complete. Were nothing learned of that, takers
    /// who come between two looks would be left to do the cleaner's work for ever.
    pub(crate) fn learn_at_most(&mut self, age: Duration) {
        if age < self.mean {
            self.learn(age);
        }
        self.aim = None;
    }

    #[cfg(test)]
    pub(crate) fn mean(&self) -> Duration {
        self.mean
    }

    /// How long not to look at a head that has been pending for so long.
    ///
    /// Up to shortly before the usual end, then in steps that are as small as the ends are regular, and after the
    /// usual end in proportion to the age; where none is known, in proportion to the age from the start.
    pub(crate) fn nap_at(&mut self, age: Duration) -> Duration {
        let nap = self.wait_at(age).clamp(NAP_MIN, NAP_MAX);
        self.aim = Some(age + nap);
        nap
    }

    fn wait_at(&self, age: Duration) -> Duration {
        if self.mean.is_zero() {
            return age / 8;
        }
        let finest = NAP_MIN.max(self.mean / 64);
        let lead = finest.max(self.spread * 2);
        let step = finest.max(self.spread / 2);
        match self.mean.saturating_sub(lead).checked_sub(age) {
            Some(left) if !left.is_zero() => left,
            _ if age <= self.mean + lead => step,
            _ => step.max(age / 8),
        }
    }
}

/// The naps with nothing pending. They grow up to [`NAP_MAX`], and the first one is learned: a look in vain says that
/// it may be longer, and a taker who had to do the cleaner's work that it must be shorter.
#[derive(Debug)]
pub(crate) struct IdleNaps {
    first: Duration,
    /// In this spell.
    naps: u32,
    harvests: u64,
}

impl Default for IdleNaps {
    fn default() -> Self {
        Self { first: IDLE_NAP_MIN, naps: 0, harvests: 0 }
    }
}

impl IdleNaps {
    /// From now on nothing is pending.
    pub(crate) fn begin(&mut self) {
        self.naps = 0;
    }

    pub(crate) fn next(&mut self) -> Duration {
        let nap = self.first * 2u32.pow(self.naps.min(2));
        self.naps += 1;
        nap.min(NAP_MAX)
    }

    /// Something has arrived. `harvests` is how often takers have found it before the cleaner, ever.
    pub(crate) fn end(&mut self, harvests: u64) {
        if harvests != self.harvests {
            self.first = (self.first / 2).max(IDLE_NAP_MIN);
        } else if self.naps > 1 {
            self.first = (self.first * 5 / 4).min(NAP_MAX);
        }
        self.harvests = harvests;
        self.naps = 0;
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
