//! Page-locking one block: the ceiling, the context, the driver call, and what is counted.

use crate::backing::Plan;
use crate::block::Quiescent;
use crate::context_end;
use crate::contexts::{Context, with_current};
use crate::error::CallError;
use crate::home::Home;
use crate::sync::{Arc, Instant};

/// Why a block was not page-locked.
#[derive(Debug)]
pub(crate) enum NotRegistered {
    /// No context is known and no primary context is active; none is made.
    NoContext,
    /// `max_registered_bytes` is reached, and no other class has an idle block to give.
    Ceiling,
    /// Refusals in a row, the last of which this was; tried again after a pause.
    Paused(CallError),
    /// The device is lost for this process.
    Lost,
    /// The device goes by the host's page tables, so it would add nothing.
    NotNeeded,
    /// The driver supports neither way.
    Impossible(CallError),
    /// The driver refused.
    Driver(CallError),
}

impl std::fmt::Display for NotRegistered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NotRegistered::NoContext => f.write_str(
                "no CUDA context is known and no primary context is active; create the context first, \
                 or name one with the builder's `context_of`",
            ),
            NotRegistered::Ceiling => {
                f.write_str("max_registered_bytes is reached; raise it, or drop buffers that are still out")
            }
            NotRegistered::Paused(error) => write!(
                f,
                "the driver refused several times in a row, so page-locking pauses for some seconds; \
                 the last refusal was {error}"
            ),
            NotRegistered::Lost => f.write_str(
                "the device is lost: a call failed for good earlier in this process, and nothing is \
                 page-locked any more",
            ),
            NotRegistered::NotNeeded => {
                f.write_str("the device goes by the host's page tables, so page-locking would add nothing")
            }
            NotRegistered::Impossible(error) => write!(
                f,
                "the driver supports neither registering memory nor allocating it page-locked; it said {error}"
            ),
            NotRegistered::Driver(error) => error.fmt(f),
        }
    }
}

/// A context to register in that has not ended; it is asked, because its handle may be another one's by now.
fn living_context(home: &Arc<Home>) -> Result<Arc<Context>, NotRegistered> {
    loop {
        if home.contexts.for_registration().is_none() {
            home.contexts.learn_active_primaries(&home.driver).map_err(NotRegistered::Driver)?;
        }
        let context = home.contexts.for_registration().ok_or(NotRegistered::NoContext)?;
        if !context_end::look(home, &context) {
            return Ok(context);
        }
    }
}

/// Whether page-locking by name would, as far as can be known before, register the pool's own pages.
pub(crate) fn registers_pages(home: &Arc<Home>) -> bool {
    let plan = |context: Arc<Context>| home.backing.plan(&home.driver, &context, true);
    !home.is_lost()
        && home.registration_pause().is_none()
        && living_context(home).map(plan).is_ok_and(|plan| plan == Plan::Register)
}

/// Page-locks a block in a context of the application. Blocks in the driver; for lanes and for calls
/// that ask for it `by_name`.
///
/// `evict` makes room under the ceiling and is called at most once.
pub(crate) fn register(
    home: &Arc<Home>,
    block: &mut Quiescent,
    by_name: bool,
    evict: impl FnOnce(usize),
) -> Result<(), NotRegistered> {
    if home.is_lost() {
        return Err(NotRegistered::Lost);
    }
    if let Some(error) = home.registration_pause() {
        return Err(NotRegistered::Paused(error));
    }
    let context = living_context(home)?;
    let plan = match home.backing.plan(&home.driver, &context, by_name) {
        Plan::NotNeeded => return Err(NotRegistered::NotNeeded),
        Plan::Impossible(error) => return Err(NotRegistered::Impossible(error)),
        plan => plan,
    };
    let bytes = block.class().bytes();
    let ceiling = home.settings.max_registered_bytes;
    if bytes > ceiling {
        // No eviction could make room for it.
        return Err(NotRegistered::Ceiling);
    }
    if !home.counts.reserve(bytes, ceiling) {
        let over = home.counts.reserved_bytes().saturating_add(bytes).saturating_sub(ceiling);
        evict(over);
        if !home.counts.reserve(bytes, ceiling) {
            return Err(NotRegistered::Ceiling);
        }
    }
    let started = Instant::now();
    let span = tracing::debug_span!(target: "pinpool", "register", bytes);
    let result = span.in_scope(|| page_lock(home, block, &context, plan));
    home.counts.class(block.class()).register_ns.add(started.elapsed().as_nanos() as u64);
    match result {
        Ok(()) => {
            home.counts.registered(block.class());
            home.note_registered(bytes, started.elapsed());
            Ok(())
        }
        Err(error) => {
            home.counts.unreserve(bytes);
            home.counts.class(block.class()).registration_failures.add(1);
            if !context_end::has_ended(home, &context, &error) {
                home.note_device_error(&error);
            }
            if home.backing.locks_nothing() {
                return Err(NotRegistered::Impossible(error));
            }
            home.note_refused(bytes, &error);
            Err(NotRegistered::Driver(error))
        }
    }
}

/// As planned, or in the way that is left when that one is not supported.
fn page_lock(
    home: &Arc<Home>,
    block: &mut Quiescent,
    context: &Arc<Context>,
    mut plan: Plan,
) -> Result<(), CallError> {
    let driver = &home.driver;
    loop {
        let locked = match plan {
            Plan::Allocate => with_current(driver, context.handle, || block.replace(driver, context.clone())),
            _ => {
                block.populate();
                with_current(driver, context.handle, || block.register(driver, context.clone()))
            }
        };
        match locked.and_then(|locked| locked) {
            Ok(()) => {
                home.backing.worked(plan);
                return Ok(());
            }
            Err(error) => plan = home.backing.instead_of(plan, &error).ok_or(error)?,
        }
    }
}
