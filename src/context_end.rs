//! A context that ends under the pool: destroyed, or its primary context reset, with blocks, events or a retain of
//! the pool's in it.
//!
//! Its work ends with it, so whoever waits for that work waits no longer; its events are asked nothing any more; the
//! registrations made in it vanish, so blocks that were page-locked there are let go. The handle may come back with
//! another context behind it (a primary context that is retained again after a reset has the same one), so the
//! pool compares `cuCtxGetId`, which never comes back.

use crate::contexts::Context;
use crate::driver::Severity;
use crate::error::CallError;
use crate::home::Home;
use crate::report::{Why, say};
use crate::sync::Arc;

/// Whether a context has ended, after a call in it failed with `error`. It is asked again, by another call: one
/// answer alone is not believed, since memory will be reused on the strength of it.
#[cold]
pub(crate) fn has_ended(home: &Arc<Home>, context: &Arc<Context>, error: &CallError) -> bool {
    if context.is_gone() {
        return true;
    }
    let ended = match (context.id, Severity::of(error)) {
        // The stale handle of an event, or of the context itself; which of them, the id says.
        (Some(id), Severity::Gone) => {
            let answer = home.driver.api().context_id(context.handle);
            answer.map_or_else(|error| Severity::of(&error) == Severity::Gone, |now| now != id)
        }
        (Some(id), Severity::Refused) if error.code() == INVALID_HANDLE => {
            home.driver.api().context_id(context.handle).is_ok_and(|now| now != id)
        }
        // A driver without ids: its code for exactly this.
        (None, Severity::Gone) => error.code() == CONTEXT_IS_DESTROYED,
        _ => false,
    };
    if ended {
        end(home, context);
    }
    ended
}

/// Looks at a context that nothing has failed in: it may have ended, and another may have its handle.
pub(crate) fn look(home: &Arc<Home>, context: &Arc<Context>) -> bool {
    let Some(id) = context.id else { return context.is_gone() };
    let ended = context.is_gone()
        || match home.driver.api().context_id(context.handle) {
            Ok(now) => now != id,
            Err(error) => Severity::of(&error) == Severity::Gone && !context.can_be_current(&home.driver),
        };
    if ended {
        end(home, context);
    }
    ended
}

/// Looks at every context that is known; for moments when the pool has not looked for long.
pub(crate) fn look_at_all(home: &Arc<Home>) {
    for context in home.contexts.usable() {
        look(home, &context);
    }
}

/// `CUDA_ERROR_INVALID_HANDLE`.
const INVALID_HANDLE: u32 = 400;
/// `CUDA_ERROR_CONTEXT_IS_DESTROYED`.
const CONTEXT_IS_DESTROYED: u32 = 709;

fn end(home: &Arc<Home>, context: &Arc<Context>) {
    if !home.contexts.end(&home.driver, context) {
        return;
    }
    say!(
        WARN,
        "context_ended",
        ?context,
        "a CUDA context was destroyed, or its device reset, while the pool used it; what was page-locked there is leaked"
    );
    let mut stranded = Vec::new();
    home.shelf.evict_stranded(|block| stranded.push(block));
    home.let_go(stranded, Why::ContextEnded);
}
