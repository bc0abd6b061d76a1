//! The lock that a driver takes process-wide while it registers or unregisters.

use super::calls::spend;
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(super) struct DriverLock {
    /// A copy of `is_held`, for the one load that an ordinary call pays.
    hint: AtomicBool,
    is_held: Mutex<bool>,
    freed: Condvar,
}

impl DriverLock {
    pub(super) fn new() -> Self {
        Self { hint: AtomicBool::new(false), is_held: Mutex::new(false), freed: Condvar::new() }
    }

    /// Waits while another call holds the lock; ordinary calls do not exclude each other.
    pub(super) fn pass(&self) {
        if self.hint.load(Ordering::Acquire) {
            let mut is_held = self.is_held.lock();
            while *is_held {
                self.freed.wait(&mut is_held);
            }
        }
    }

    /// Holds the lock for as long as the work costs.
    pub(super) fn hold_for(&self, cost: Duration) {
        let mut is_held = self.is_held.lock();
        while *is_held {
            self.freed.wait(&mut is_held);
        }
        *is_held = true;
        self.hint.store(true, Ordering::Release);
        drop(is_held);
        spend(cost);
        let mut is_held = self.is_held.lock();
        *is_held = false;
        self.hint.store(false, Ordering::Release);
        self.freed.notify_all();
    }
}
