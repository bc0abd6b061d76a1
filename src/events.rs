//! Pooled events: one per recorded use, reused after completion, per context; a block keeps one for itself.
//!
//! An event proves only itself: that the work recorded *by it* is done. It is never recorded again
//! while an earlier use still waits on it, and never recorded in another context than its own
//! (the driver answers 400, and a pool that goes on regardless reuses memory in flight).

use crate::contexts::{Context, with_current};
pub(crate) use crate::driver::with_relaxed_capture;
use crate::driver::{ContextHandle, Driver, EventHandle, StreamHandle};
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

/// A complete event that a block keeps for its next record, so that a record in steady state wants no lock and no
/// reference count: the one of the context comes with it.
#[derive(Debug)]
pub(crate) struct Spare {
    context: Arc<Context>,
    event: EventHandle,
}

impl Spare {
    /// Whether it can be recorded on a stream of this context. A handle may be reused after its context is gone.
    #[inline]
    pub(crate) fn is_of(&self, context: ContextHandle) -> bool {
        self.context.handle == context && !self.context.is_gone()
    }

    pub(crate) fn event(&self) -> EventHandle {
        self.event
    }

    /// It was recorded on that stream.
    #[inline]
    pub(crate) fn recorded(self, key: StreamKey) -> Use {
        Use { context: self.context, event: self.event, key, sequence: next_sequence() }
    }

    /// The context, and the event for [`record`].
    pub(crate) fn split(self) -> (Arc<Context>, EventHandle) {
        (self.context, self.event)
    }

    /// To the context's pool.
    pub(crate) fn give_back(self) {
        if !self.context.is_gone() {
            return_event(&self.context, self.event);
        }
    }
}

/// Keeps the event of a use that is complete, where none is kept yet; else gives it to its pool.
pub(crate) fn keep(spare: &mut Option<Spare>, used: Use) {
    match spare {
        None if !used.context.is_gone() => *spare = Some(Spare { context: used.context, event: used.event }),
        _ => recycle(used),
    }
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

impl StreamKey {
    #[inline]
    pub(crate) fn of(stream: &StreamRef<'_>) -> Self {
        Self {
            context: stream.context.0,
            stream: stream.stream,
            thread: if stream.stream.0 == 2 { thread_number() } else { 0 },
        }
    }
}

/// Records the last use on a stream of `context`, with the event that is given, or one from the context's pool. An error
/// comes with the context.
///
/// `first` is what came of a first attempt with that event, if one was made: not recorded, because the stream captures
/// or for an error.
pub(crate) fn record(
    driver: &Driver,
    context: Arc<Context>,
    mut spare: Option<EventHandle>,
    stream: &StreamRef<'_>,
    first: Option<Result<bool, CallError>>,
) -> Result<Use, (Error, Arc<Context>)> {
    let recorded = record_with(driver, &context, &mut spare, stream, first);
    // It did not come to recording it.
    if let Some(event) = spare {
        return_event(&context, event);
    }
    match recorded {
        Ok(event) => Ok(Use { event, context, key: StreamKey::of(stream), sequence: next_sequence() }),
        Err(error) => Err((error, context)),
    }
}

fn record_with(
    driver: &Driver,
    context: &Context,
    spare: &mut Option<EventHandle>,
    stream: &StreamRef<'_>,
    first: Option<Result<bool, CallError>>,
) -> Result<EventHandle, Error> {
    let mut attempt = || record_event(driver, context, spare, stream.stream);
    // The null stream means the *current* context's, so that must be the stream's. For others the
    // context need not be current; a driver that is stricter says so (201), and is asked again with it.
    if stream.stream.is_implicit() {
        return with_current(driver, context.handle, attempt)?;
    }
    let outcome = match first {
        None => attempt(),
        Some(Ok(_)) => Err(Error::Capturing),
        Some(Err(error)) => Err(error.into()),
    };
    match outcome {
        Err(Error::Driver(call)) if call.code() == NO_CONTEXT => {
            with_current(driver, context.handle, attempt)?
        }
        outcome => outcome,
    }
}

/// `CUDA_ERROR_INVALID_CONTEXT`.
const NO_CONTEXT: u32 = 201;

fn record_event(
    driver: &Driver,
    context: &Context,
    spare: &mut Option<EventHandle>,
    stream: StreamHandle,
) -> Result<EventHandle, Error> {
    if driver.api().is_capturing(stream)? {
        return Err(Error::Capturing);
    }
    let event = match spare.take() {
        Some(event) => event,
        None => pooled_event(driver, context)?,
    };
    record_or_return(driver, context, event, stream)?;
    Ok(event)
}

#[cold]
fn pooled_event(driver: &Driver, context: &Context) -> Result<EventHandle, CallError> {
    let pooled = context.idle_events.lock().pop_back();
    match pooled.or_else(|| revive(driver, context)) {
        Some(event) => Ok(event),
        // Created in the current context, which must be the stream's: a foreign event is refused (400).
        None => with_relaxed_capture(driver, || {
            with_current(driver, context.handle, || create_event(driver, context))
        })?,
    }
}

/// `CUDA_ERROR_CONTEXT_IS_DESTROYED`.
const CONTEXT_IS_DESTROYED: u32 = 709;

/// An event of this very context. Its handle may be another one's by now, a primary context's that was made anew after a
/// reset: an event of that one would be taken for over, with work of that one, as soon as the old one is found to have ended.
fn create_event(driver: &Driver, context: &Context) -> Result<EventHandle, CallError> {
    let event = driver.api().create_event()?;
    match (context.id, driver.api().context_id(context.handle)) {
        (Some(id), Ok(now)) if now != id => {
            if let Err(error) = driver.api().destroy_event(event) {
                say!(DEBUG, "event_leaked", %error, "an event of a context with another one's handle is leaked");
            }
            Err(CallError::new("cuEventCreate", CONTEXT_IS_DESTROYED))
        }
        // One failed question says nothing; whoever uses the context next hears more.
        _ => Ok(event),
    }
}

/// Gives a complete event to its context's pool.
fn return_event(context: &Context, event: EventHandle) {
    push_reserved(&context.idle_events, |events| events, event);
}

fn record_or_return(
    driver: &Driver,
    context: &Context,
    event: EventHandle,
    stream: StreamHandle,
) -> Result<(), CallError> {
    driver.api().record_event(event, stream).inspect_err(|_| {
        // A refused record leaves the event as it was: complete, so it can be used again.
        return_event(context, event);
    })
}

/// Whether the recorded work is done; asked without waiting.
pub(crate) fn is_complete(driver: &Driver, used: &Use) -> Result<bool, CallError> {
    driver.api().query_event(used.event)
}

/// Gives a *complete* event back to its context's pool.
pub(crate) fn recycle(used: Use) {
    if !used.context.is_gone() {
        return_event(&used.context, used.event);
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

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
    use super::*;
    use crate::contexts::Contexts;
    use crate::sim::{Fault, Sim};
    use crate::stream::sealed::AsStreamRef;
    use crate::sync::thread;

    #[test]
    fn a_kept_event_is_recorded_again_and_goes_to_the_pool_where_it_is_not() {
        let sim = Sim::zero_cost();
        let (context, driver) = (sim.context(0), sim.driver());
        let stream = context.stream();
        let contexts = Contexts::default();
        let mut spare = None;
        stream.with_stream_ref(|stream| {
            let known = contexts.of_stream(&driver, stream);
            let record = |event| record(&driver, known.clone(), event, stream, None);
            let used = record(None).expect("a record");
            let first = used.event;
            keep(&mut spare, used);
            let (_, event) = spare.take_if(|spare| spare.is_of(known.handle)).expect("it was kept").split();
            assert_eq!(event, first);
            let used = record(Some(event)).expect("a record");
            assert_eq!(used.event, first, "no other event was taken");
            // A second use of the same block: one event is kept, the other goes to the pool.
            let other = record(None).expect("a record");
            keep(&mut spare, used);
            keep(&mut spare, other);
            assert_eq!(known.idle_events.lock().len(), 1);
            // A record that fails, before the event is recorded and while it is.
            for call in ["cuStreamIsCapturing", "cuEventRecord"] {
                sim.fail(call, Fault::once(1));
                let (_, event) = spare.take().expect("it was kept").split();
                record(Some(event)).expect_err("the driver refuses");
                assert_eq!(known.idle_events.lock().len(), 2, "after a failed {call}");
                keep(&mut spare, record(None).expect("a record"));
                assert_eq!(known.idle_events.lock().len(), 1);
            }
            assert_eq!(sim.calls("cuEventCreate"), 2, "no event was lost");
            contexts.end(&driver, &known);
            assert!(spare.take_if(|spare| spare.is_of(known.handle)).is_none(), "gone with its context");
        });
        drop(contexts);
        // The context was never given back by this test's own table.
        let _ = sim.take_violations();
        sim.expect_violations();
    }

    #[test]
    fn the_event_of_a_context_that_is_gone_is_not_kept() {
        let sim = Sim::zero_cost();
        let (context, driver) = (sim.context(0), sim.driver());
        let contexts = Contexts::default();
        let mut spare = None;
        context.stream().with_stream_ref(|stream| {
            let known = contexts.of_stream(&driver, stream);
            let used = record(&driver, known.clone(), None, stream, None).expect("a record");
            contexts.end(&driver, &known);
            keep(&mut spare, used);
            assert!(spare.is_none(), "it would keep a context alive that is no use to anybody");
            assert_eq!(known.idle_events.lock().len(), 0);
        });
        drop(contexts);
        let _ = sim.take_violations();
        sim.expect_violations();
    }

    /// Events of one queue complete in the order of their records.
    #[test]
    fn uses_of_one_stream_have_one_key_and_the_per_thread_stream_is_another_in_each_thread() {
        let sim = Sim::zero_cost();
        let (context, driver) = (sim.context(0), sim.driver());
        let contexts = Contexts::default();
        let ordinary = context.stream();
        let used = |handle: usize| {
            context.bind();
            ordinary.with_stream_ref(|stream| {
                let known = contexts.of_stream(&driver, stream);
                let stream = StreamRef { stream: StreamHandle(handle), ..*stream };
                let used = record(&driver, known, None, &stream, None).expect("a record");
                (used.key, used.sequence)
            })
        };
        let both = || (used(ordinary.handle()), used(2));
        let (here, again) = (both(), both());
        let there = thread::scope(|scope| scope.spawn(both).join().expect("no panic"));
        assert_eq!((here.0.0, here.1.0), (again.0.0, again.1.0));
        assert_eq!(here.0.0, there.0.0, "a stream is the same for every thread");
        assert_ne!(here.1.0, there.1.0, "each thread has a default stream of its own");
        let order = [here.0.1, here.1.1, again.0.1, again.1.1, there.0.1, there.1.1];
        assert!(order.is_sorted_by(|one, next| one < next), "{order:?}");
    }
}
