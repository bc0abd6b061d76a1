//! What happened to a pool that somebody should know: counted, remembered, and said.

use super::{Home, REASONS_KEPT};
use crate::driver::Severity;
use crate::error::CallError;
use crate::pause::Noted;
use crate::report::{Kind, micros, say, say_failure};
use crate::sync::Ordering;
use std::fmt::Display;
use std::time::Duration;

impl Home {
    /// A device error was seen; the answer says what it means for the block that was asked about.
    pub(crate) fn note_device_error(&self, error: &CallError) -> Severity {
        let severity = Severity::of(error);
        if severity == Severity::Lost && !self.lost.swap(true, Ordering::Relaxed) {
            say!(WARN, "device_lost", %error, "the device is lost; pinned buffers are quarantined from now on");
        }
        severity
    }

    /// Remembers why memory was leaked, for the shutdown report, and says so. The caller counts it.
    pub(crate) fn note_quarantine(&self, bytes: usize, pinned: bool, reason: &dyn Display) {
        {
            let mut reasons = self.reasons.lock();
            if reasons.len() < REASONS_KEPT {
                reasons.push(format!("{bytes} bytes: {reason}"));
            }
        }
        let is_first = self.said.is_first(Kind::Quarantined);
        say_failure!(is_first, "quarantined", bytes, pinned, %reason, "memory is leaked on purpose");
    }

    pub(crate) fn take_reasons(&self) -> Vec<String> {
        std::mem::take(&mut *self.reasons.lock())
    }

    /// The last of the refusals for which registering pauses now.
    pub(crate) fn registration_pause(&self) -> Option<CallError> {
        self.registrations.now(self.clock.now())
    }

    /// Counts a success of registering.
    pub(crate) fn note_registered(&self, bytes: usize, elapsed: Duration) {
        if self.registrations.succeeded() == Noted::Resumed {
            say!(INFO, "register_resumed", bytes, "page-locking works again");
        }
        say!(DEBUG, "registered", bytes, elapsed_us = micros(elapsed), "page-locked");
    }

    /// Counts a refusal of registering; a run of refusals pauses it.
    pub(crate) fn note_refused(&self, bytes: usize, error: &CallError) {
        let noted = self.registrations.refused(self.clock.now(), *error);
        let is_first = self.said.is_first(Kind::RegisterRefused);
        say_failure!(is_first, "register_refused", bytes, %error, "page-locking was refused; the buffer stays pageable");
        if let Noted::Pause(pause) = noted {
            let is_first = self.said.is_first(Kind::RegisterPaused);
            let pause_s = pause.as_secs();
            say_failure!(is_first, "register_paused", pause_s, %error, "page-locking was refused again and again; it pauses");
        }
    }
}
