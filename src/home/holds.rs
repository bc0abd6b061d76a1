//! What keeps background threads from doing something for a while, and what lets time pass for them.

use super::Home;
#[cfg(feature = "sim")]
use crate::sync::Arc;
use crate::sync::{Instant, Ordering};
use std::time::Duration;

/// Between a thread's look at the holds and its call of the driver, longer only if it loses its processor.
const WAITS_BEGIN_WITHIN: Duration =
    if cfg!(loom) { Duration::from_secs(1 << 28) } else { Duration::from_millis(20) };

impl Home {
    /// When it returns, no context-wide wait begins until `release_context_waits`. One that the driver is in already
    /// may last as long as the device works, so that is not waited for without end.
    pub(crate) fn hold_context_waits(&self) {
        self.captures.hold_waits();
        if self.is_over() {
            // Nobody waits any more, and a fork may have copied the lock as it was held.
            return;
        }
        let deadline = Instant::now() + WAITS_BEGIN_WITHIN;
        self.progress.wait_until(Some(deadline), || !self.captures.a_wait_is_under_way());
    }

    /// Before a wait for a context, and until it is over; `None` while such waits are held.
    pub(crate) fn begin_context_wait(&self) -> Option<ContextWait<'_>> {
        self.captures.wait_begins();
        let wait = ContextWait(self);
        (!self.context_waits_are_held()).then_some(wait)
    }

    pub(crate) fn release_context_waits(&self) {
        self.captures.release_waits();
        self.progress.announce();
    }

    pub(crate) fn context_waits_are_held(&self) -> bool {
        self.captures.waits_are_held()
    }

    /// When it returns, the cleaner does nothing until `release_cleaner`.
    #[cfg(feature = "sim")]
    pub(crate) fn hold_cleaner(self: &Arc<Self>) {
        self.count_hold();
        // A thread that does not exist looks at the hold before anything else when it is started.
        self.bell.nudge();
        self.progress
            .wait_until(None, || self.cleaner_rests.load(Ordering::SeqCst) || self.bell.is_stopped());
    }

    #[cfg(feature = "sim")]
    pub(crate) fn count_hold(&self) {
        self.cleaner_holds.fetch_add(1, Ordering::SeqCst);
    }

    /// Lets time pass for the pool's policies, and waits until the cleaner has looked at what that means.
    #[cfg(feature = "sim")]
    pub(crate) fn let_time_pass(self: &Arc<Self>, time: Duration) {
        self.clock.skip(time);
        let order = self.time_orders.fetch_add(1, Ordering::SeqCst) + 1;
        self.ring_hard();
        self.progress.wait_until(None, || {
            self.time_orders_obeyed.load(Ordering::SeqCst) >= order || self.bell.is_stopped()
        });
    }

    /// The number of an order to look at the time that passed, which the cleaner has not obeyed yet.
    pub(crate) fn time_order(&self) -> Option<u64> {
        let order = self.time_orders.load(Ordering::SeqCst);
        (order > self.time_orders_obeyed.load(Ordering::SeqCst)).then_some(order)
    }

    /// Said by the cleaner after it has looked.
    pub(crate) fn time_order_obeyed(&self, order: u64) {
        self.time_orders_obeyed.fetch_max(order, Ordering::SeqCst);
        self.progress.announce();
    }

    /// The cleaner says that it obeys the hold, or no longer does.
    pub(crate) fn cleaner_rests(&self, rests: bool) {
        self.cleaner_rests.store(rests, Ordering::SeqCst);
        self.progress.announce();
    }

    #[cfg(feature = "sim")]
    pub(crate) fn release_cleaner(&self) {
        self.cleaner_holds.fetch_sub(1, Ordering::SeqCst);
        self.progress.announce();
    }

    pub(crate) fn cleaner_is_held(&self) -> bool {
        self.cleaner_holds.load(Ordering::SeqCst) > 0
    }
}

/// A wait for a context that is under way.
#[derive(Debug)]
pub(crate) struct ContextWait<'a>(&'a Home);

impl Drop for ContextWait<'_> {
    fn drop(&mut self) {
        self.0.captures.wait_is_over();
        self.0.progress.announce();
    }
}
