//! Pooled events: one per recorded use, reused after completion, per context.
//!
//! An event proves only itself: that the work recorded *by it* is done. It is never recorded again
//! while an earlier use still waits on it, and never recorded in another context than its own
//! (the driver answers 400, and a pool that goes on regardless reuses memory in flight).

use crate::contexts::{Context, with_current};
pub(crate) use crate::driver::with_relaxed_capture;
use crate::driver::{Driver, EventHandle, StreamHandle};
use crate::error::{CallError, Error};
use crate::report::say;
use crate::stream::StreamRef;
use crate::sync::{Arc, Ordering, fixed, push_reserved};

/// One recorded use of a buffer: the device is done with it when the event is complete.
#[derive(Debug)]
pub(crate) struct Use {
    pub(crate) context: Arc<Context>,
    pub(crate) event: EventHandle,
    pub(crate) key: StreamKey,
    /// Order of records in this process; a queue of one stream is kept by it.
    pub(crate) sequence: u64,
}

/// Groups uses that complete in order. Only a hint for whom to ask first, never a proof, because the
/// driver reuses stream handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamKey {
    context: usize,
    stream: StreamHandle,
    /// The per-thread default stream has one handle value in every thread; 0 for other streams.
    thread: u64,
}

/// Records the last use on a stream of `context`, with an event from the context's pool.
pub(crate) fn record(driver: &Driver, context: Arc<Context>, stream: &StreamRef<'_>) -> Result<Use, Error> {
    // The null stream means the *current* context's, so that must be the stream's. For others the
    // context need not be current; a driver that is stricter says so (201), and is asked again with it.
    let event = if stream.stream.is_implicit() {
        with_current(driver, context.handle, || record_event(driver, &context, stream.stream))?
    } else {
        match record_event(driver, &context, stream.stream) {
            Err(Error::Driver(call)) if call.code() == NO_CONTEXT => {
                with_current(driver, context.handle, || record_event(driver, &context, stream.stream))?
            }
            outcome => outcome,
        }
    }?;
    let key = StreamKey {
        context: context.handle.0,
        stream: stream.stream,
        thread: if stream.stream.0 == 2 { thread_number() } else { 0 },
    };
    Ok(Use { context, event, key, sequence: next_sequence() })
}

/// `CUDA_ERROR_INVALID_CONTEXT`.
const NO_CONTEXT: u32 = 201;

fn record_event(driver: &Driver, context: &Context, stream: StreamHandle) -> Result<EventHandle, Error> {
    if driver.api().is_capturing(stream)? {
        return Err(Error::Capturing);
    }
    let pooled = context.idle_events.lock().pop_back();
    let event = match pooled.or_else(|| revive(driver, context)) {
        Some(event) => event,
        // Created in the current context, which must be the stream's: a foreign event is refused (400).
        None => with_relaxed_capture(driver, || {
            with_current(driver, context.handle, || driver.api().create_event())
        })??,
    };
    record_or_return(driver, context, event, stream)?;
    Ok(event)
}

fn record_or_return(
    driver: &Driver,
    context: &Context,
    event: EventHandle,
    stream: StreamHandle,
) -> Result<(), CallError> {
    driver.api().record_event(event, stream).inspect_err(|_| {
        // A refused record leaves the event as it was: complete, so it can be used again.
        push_reserved(&context.idle_events, |events| events, event);
    })
}

/// Whether the recorded work is done; asked without waiting.
pub(crate) fn is_complete(driver: &Driver, used: &Use) -> Result<bool, CallError> {
    driver.api().query_event(used.event)
}

/// Gives a *complete* event back to its context's pool.
pub(crate) fn recycle(used: Use) {
    if !used.context.is_gone() {
        push_reserved(&used.context.idle_events, |events| events, used.event);
    }
}

/// Gives back an event that need not be waited for. While it is pending it is neither recorded again nor
/// destroyed: another thread may have copied the handle and ask it at any moment.
///
/// In the relaxed capture mode, because it also runs on a taker's thread.
pub(crate) fn discard(driver: &Driver, used: Use) {
    if used.context.is_gone() {
        return;
    }
    with_relaxed_capture(driver, || match is_complete(driver, &used) {
        Ok(true) => recycle(used),
        Ok(false) => push_reserved(&used.context.unwanted_events, |events| events, used.event),
        Err(error) => {
            say!(DEBUG, "event_leaked", %error, "an event is leaked with the context that it belongs to")
        }
    });
}

/// The longest unwanted event of the context, if it is complete by now.
#[cold]
fn revive(driver: &Driver, context: &Context) -> Option<EventHandle> {
    let event = context.unwanted_events.lock().pop_front()?;
    match with_relaxed_capture(driver, || driver.api().query_event(event)) {
        Ok(true) => Some(event),
        Ok(false) => {
            push_reserved(&context.unwanted_events, |events| events, event);
            None
        }
        Err(error) => {
            say!(DEBUG, "event_leaked", %error, "an event is leaked with the context that it belongs to");
            None
        }
    }
}

fn next_sequence() -> u64 {
    static NEXT: fixed::AtomicU64 = fixed::AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A number for the calling thread that no other thread of the process ever has.
fn thread_number() -> u64 {
    static NEXT: fixed::AtomicU64 = fixed::AtomicU64::new(1);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    // A thread that is exiting may have lost its number; a fresh one only means one more query.
    NUMBER.try_with(|number| *number).unwrap_or_else(|_| NEXT.fetch_add(1, Ordering::Relaxed))
}
