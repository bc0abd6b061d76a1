//! The context lane: one wait for all contexts, for all blocks that want it.

use super::LaneResult;
use crate::block::Returned;
use crate::context_end;
use crate::contexts::Context;
use crate::driver::Severity;
use crate::home::Home;
use crate::report::{Kind, micros, say, say_failure};
use crate::sync::{Arc, Instant, thread};
use std::time::Duration;

/// How often a lane that waits looks whether its waits are still forbidden.
const LOOK_AT_HOLD_EVERY: Duration = Duration::from_millis(100);

/// What the context lane says of a block.
pub(crate) struct ContextVerdict {
    pub(crate) block: Returned,
    /// Every context was synchronised after the block's return.
    pub(crate) idle: bool,
}

impl LaneResult for ContextVerdict {
    fn came_too_late(self, _: &Home) {
        self.block.quarantine();
    }
}

pub(crate) fn context_lane(
    home: &Arc<Home>,
    first: Returned,
    more: &dyn Fn() -> Option<Returned>,
    give: &dyn Fn(ContextVerdict),
) {
    // Whatever waits at this moment was returned before the wait begins.
    let mut batch = vec![first];
    while let Some(block) = more() {
        batch.push(block);
    }
    let started = Instant::now();
    let span = tracing::debug_span!(target: "pinpool", "context_wait", buffers = batch.len());
    let idle = span.in_scope(|| synchronize_all(home));
    let (buffers, elapsed_us) = (batch.len(), micros(started.elapsed()));
    say!(DEBUG, "contexts_waited", buffers, idle, elapsed_us, "the contexts were waited for");
    batch.into_iter().for_each(|block| give(ContextVerdict { block, idle }));
}

fn stop_is_overdue(home: &Home) -> bool {
    home.stop_deadline().is_some_and(|deadline| Instant::now() >= deadline)
}

/// While the application captures, or says that it does, the blocks wait; at the end of the pool as long as the pool
/// may wait. False when it may not wait for the context even then.
fn may_wait_for(home: &Home, context: &Context) -> bool {
    let mut nap = Duration::from_micros(50);
    loop {
        if home.context_waits_are_held() {
            // A hold of this pool's ends with an announcement, one of another pool's does not.
            let in_a_while = Instant::now() + LOOK_AT_HOLD_EVERY;
            home.progress.wait_until(Some(in_a_while), || !home.context_waits_are_held());
        } else if home.captures.may_forbid_wait_for(&home.driver, context) {
            thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(5));
        } else {
            return true;
        }
        if stop_is_overdue(home) {
            return false;
        }
    }
}

fn synchronize_all(home: &Arc<Home>) -> bool {
    let mut all_idle = true;
    if let Err(error) = home.contexts.learn_active_primaries(&home.driver) {
        // Nothing is known of the work of a context that is not known.
        home.note_device_error(&error);
        let is_first = home.said.is_first(Kind::ContextWaitFailed);
        say_failure!(is_first, "context_wait_failed", %error, "the active contexts could not be asked for");
        all_idle = false;
    }
    for context in home.contexts.usable() {
        let mut nap = std::time::Duration::from_micros(50);
        loop {
            if !may_wait_for(home, &context) {
                say!(DEBUG, "context_not_waited_for", "at the end: the wait would break a capture");
                all_idle = false;
                break;
            }
            // Held since that look: look again.
            let Some(wait) = home.begin_context_wait() else { continue };
            home.counts.context_waits.add(1);
            let waited = context.synchronize(&home.driver);
            drop(wait);
            match waited {
                Ok(()) => {
                    // The handle may be another context's by now, and that one was waited for.
                    context_end::look(home, &context);
                    break;
                }
                // A capture stands in the way: the blocks wait until it is over.
                Err(error) if Severity::of(&error) == Severity::Capture && !stop_is_overdue(home) => {
                    thread::sleep(nap);
                    nap = (nap * 2).min(std::time::Duration::from_millis(5));
                }
                // Its work ended with it.
                Err(error) if context_end::has_ended(home, &context, &error) => break,
                Err(error) => {
                    home.note_device_error(&error);
                    let is_first = home.said.is_first(Kind::ContextWaitFailed);
                    say_failure!(is_first, "context_wait_failed", %error, "a context could not be waited for");
                    all_idle = false;
                    break;
                }
            }
        }
    }
    all_idle
}
