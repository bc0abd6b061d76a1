//! What a result code means beyond the call that it answers.

use crate::error::CallError;

/// What a failed call says about the device, decided in one place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Severity {
    /// The context is gone, or was never there: 201, 709.
    Gone,
    /// The driver is gone, or is not called any more: 3, 4. Expected at the end of a process.
    DriverGone,
    /// The device is lost for this process; every further call gives the same code.
    Lost,
    /// A stream capture stands in the way (900 to 908); the same call may succeed later.
    Capture,
    /// Only this call failed.
    Refused,
}

impl Severity {
    pub(crate) fn of(error: &CallError) -> Self {
        match error.code() {
            201 | 709 => Severity::Gone,
            3 | 4 => Severity::DriverGone,
            214 | 220 | 226 | 700 | 702 | 710 | 714..=721 | 810 | 911 => Severity::Lost,
            900..=908 => Severity::Capture,
            _ => Severity::Refused,
        }
    }

    /// Whether the device can no longer be reading or writing host memory for us.
    pub(crate) fn ends_all_work(self) -> bool {
        matches!(self, Severity::Gone | Severity::Lost)
    }

    /// Whether nobody will ever be able to say more: not worth a panic.
    pub(crate) fn is_final(self) -> bool {
        self.ends_all_work() || self == Severity::DriverGone
    }
}
