//! What tests of the pool, and of code that uses it, may do besides.

use super::PinnedPool;
use std::time::Duration;

impl PinnedPool {
    /// Lets time pass for the pool's policies (ageing, pauses, what counts as lately), and waits until its thread has
    /// looked once at what that means. Only with feature `sim`: for tests that do not want to wait.
    pub fn let_time_pass(&self, time: Duration) {
        self.home().let_time_pass(time);
    }
}
