//! Driver calls that may be made while somebody captures a graph.

use super::{CaptureMode, Driver};
use crate::report::say;

/// Runs `action` with the calling thread's captures out of the way, and restores the thread's mode.
///
/// A query made in the default mode while a stream captures is refused (900) and invalidates the
/// application's capture, even from another thread.
pub(crate) fn with_relaxed_capture<R>(driver: &Driver, action: impl FnOnce() -> R) -> R {
    let before = driver.api().exchange_capture_mode(CaptureMode::Relaxed);
    let _restored = Restore { driver, before: before.ok() };
    action()
}

/// Gives the thread its own mode back, also when a panic passes through.
struct Restore<'a> {
    driver: &'a Driver,
    before: Option<CaptureMode>,
}

impl Drop for Restore<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.before
            && mode != CaptureMode::Relaxed
        {
            let restore = || self.driver.api().exchange_capture_mode(mode);
            // A refusal may be for the moment only; the thread would stay in our mode for good.
            if let Err(error) = restore().or_else(|_| restore()) {
                say!(DEBUG, "capture_mode_not_restored", %error, "a thread's capture mode could not be restored");
            }
        }
    }
}
