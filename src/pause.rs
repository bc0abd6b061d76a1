//! Refused page-lockings: a run of them stops the attempts for a while, a longer while each time.
//!
//! An attempt that fails is not free: it faults the pages in and takes the driver's process-wide lock. What
//! refuses it (another program, the platform's limit, a driver in trouble) may last for hours, and may end.

use crate::error::CallError;
use crate::sync::{Instant, Mutex};
use std::time::Duration;

/// Refusals in a row after which the attempts pause.
const REFUSALS_BEFORE_PAUSE: u32 = 8;

/// The first pause, and the longest; each is twice as long as the one before it, until a success.
const PAUSE_MIN: Duration = Duration::from_secs(5);
const PAUSE_MAX: Duration = Duration::from_secs(300);

/// What came of noting an outcome.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Noted {
    /// Nothing that anybody need be told.
    Quiet,
    /// The first refusal since a success.
    FirstRefusal,
    /// The attempts pause from now on, for so long.
    Pause(Duration),
    /// A success after at least one pause.
    Resumed,
}

/// The refusals of one pool's driver.
#[derive(Debug, Default)]
pub(crate) struct RegistrationPause(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    refusals_in_a_row: u32,
    /// Until when, and what the driver said last.
    pause: Option<(Instant, CallError)>,
    /// The last pause since the last success.
    length: Option<Duration>,
}

impl RegistrationPause {
    /// The last of the refusals for which the attempts pause now.
    pub(crate) fn now(&self, now: Instant) -> Option<CallError> {
        self.0.lock().pause.filter(|(until, _)| now < *until).map(|(_, error)| error)
    }

    /// The driver page-locked something.
    pub(crate) fn succeeded(&self) -> Noted {
        let before = std::mem::take(&mut *self.0.lock());
        if before.length.is_some() { Noted::Resumed } else { Noted::Quiet }
    }

    /// The driver refused. After a pause one refusal is enough for the next one.
    pub(crate) fn refused(&self, now: Instant, error: CallError) -> Noted {
        let mut state = self.0.lock();
        state.refusals_in_a_row = state.refusals_in_a_row.saturating_add(1);
        if state.refusals_in_a_row < REFUSALS_BEFORE_PAUSE {
            return if state.refusals_in_a_row == 1 { Noted::FirstRefusal } else { Noted::Quiet };
        }
        if state.pause.is_some_and(|(until, _)| now < until) {
            // An attempt that began before the pause did.
            return Noted::Quiet;
        }
        let length = state.length.map_or(PAUSE_MIN, |last| (last * 2).min(PAUSE_MAX));
        state.length = Some(length);
        state.pause = Some((now + length, error));
        Noted::Pause(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal() -> CallError {
        CallError::new("cuMemHostRegister_v2", 2)
    }

    #[test]
    fn pauses_double_up_to_five_minutes_and_a_success_ends_the_run() {
        let pause = RegistrationPause::default();
        let mut now = Instant::now();
        let notes: Vec<_> = (0..8).map(|_| pause.refused(now, refusal())).collect();
        assert_eq!(notes[0], Noted::FirstRefusal);
        assert!(notes[1..7].iter().all(|noted| *noted == Noted::Quiet));
        assert_eq!(notes[7], Noted::Pause(PAUSE_MIN));
        let mut lengths = Vec::new();
        let mut length = PAUSE_MIN;
        for _ in 0..8 {
            assert_eq!(pause.now(now + (length - Duration::from_millis(1))), Some(refusal()));
            assert_eq!(pause.refused(now, refusal()), Noted::Quiet, "it pauses already");
            now += length;
            assert_eq!(pause.now(now), None);
            let Noted::Pause(next) = pause.refused(now, refusal()) else { panic!("one refusal is enough") };
            lengths.push(next.as_secs());
            length = next;
        }
        assert_eq!(lengths, [10, 20, 40, 80, 160, 300, 300, 300]);
        assert_eq!(pause.succeeded(), Noted::Resumed);
        assert_eq!(pause.now(now), None);
        assert_eq!(pause.succeeded(), Noted::Quiet);
        assert_eq!(pause.refused(now, refusal()), Noted::FirstRefusal);
    }
}
