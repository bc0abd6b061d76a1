//! Recording a use: the part of a caller's path that calls the driver.

use super::flags::{CAPTURED, Flags, NOTED, RECORDED};
use super::{PinnedBuffer, captured};
use crate::block::{Fate, Out};
use crate::context_end;
use crate::driver::Driver;
use crate::error::{CallError, Error};
use crate::events::{self, Spare, StreamKey, Use, with_relaxed_capture};
use crate::home::Home;
use crate::notes::{self, Note};
use crate::report::{Kind, say_failure};
use crate::stream::{AsStream, StreamRef};
use crate::sync::Arc;

impl PinnedBuffer {
    /// Notes that everything enqueued on `stream` up to now may use the buffer.
    ///
    /// Records a pooled event (`cuEventRecord`, timing disabled) that the pool waits for after the drop.
    /// May be called for several streams, and several times for one. Call it after the copy was
    /// enqueued; a copy on another stream needs a record of its own. The per-thread default stream
    /// must be recorded on the thread that uses it.
    ///
    /// # Errors
    ///
    /// [`Error::ForeignStream`] for a stream of another driver than the pool's, [`Error::Capturing`]
    /// while the stream captures a graph, [`Error::Driver`] when the driver refuses, [`Error::ForkedChild`]. The
    /// buffer stays safe after an error: it then waits for every context at its drop, and after a capture it is held
    /// until the graph is gone (see [`hold_for_graph`](Self::hold_for_graph)).
    pub fn record_last_use(&mut self, stream: &impl AsStream) -> Result<(), Error> {
        let Self { home, block, flags, .. } = self;
        if home.fork.is_child() {
            return Err(Error::ForkedChild);
        }
        flags.set(RECORDED);
        stream.with_stream_ref(|stream| record(home, block, flags, stream))
    }
}

#[inline]
fn record(home: &Arc<Home>, block: &mut Out, flags: &Flags, stream: &StreamRef<'_>) -> Result<(), Error> {
    let api = home.driver.api();
    if stream.driver != api.identity() {
        return Err(failed(home, block, api.identity().refusal(stream.driver)));
    }
    home.captures.show(stream);
    // Nearly always the block keeps an event of this context, and nothing is in the way.
    let first = match block.spare_event(stream.context) {
        Some(event) if !stream.stream.is_implicit() => {
            Some(api.record_unless_capturing(event, stream.stream))
        }
        _ => None,
    };
    match first {
        Some(Ok(true)) => block.use_spare(StreamKey::of(stream)),
        first => match record_otherwise(home, block, flags, stream, first) {
            Ok(used) => block.add_use(used),
            Err(error) => return Err(failed(home, block, error)),
        },
    }
    home.captures.seen_without(stream);
    if flags.has(NOTED) {
        clear_notes(home, block, flags, stream);
    }
    block.unprove();
    if block.uses().len() > USES_BEFORE_PRUNING {
        prune(&home.driver, block);
    }
    Ok(())
}

/// Where the block keeps no event for the stream, or the driver did not record that one.
#[cold]
#[inline(never)]
fn record_otherwise(
    home: &Arc<Home>,
    block: &mut Out,
    flags: &Flags,
    stream: &StreamRef<'_>,
    first: Option<Result<bool, CallError>>,
) -> Result<Use, Error> {
    let mut spare = block.take_spare(stream.context).map(Spare::split);
    let mut record = |first| {
        let (context, event) = match spare.take() {
            Some((context, event)) => (context, Some(event)),
            None => (home.contexts.of_stream(&home.driver, stream), None),
        };
        events::record(&home.driver, context, event, stream, first)
    };
    let recorded = match record(first) {
        // Another context has its handle now, in which the events of the old one mean nothing.
        Err((Error::Driver(error), context)) if context_end::has_ended(home, &context, &error) => {
            record(None)
        }
        recorded => recorded,
    };
    recorded.map_err(|(error, context)| {
        if error == Error::Capturing {
            captured::note(home, block, flags, stream, CAPTURED);
        } else {
            // It is to be waited for, and a shutdown forgets contexts that nothing refers to.
            notes::add(&mut block.notes().lock(), Note::of_failed(context));
            flags.add(NOTED);
        }
        error
    })
}

#[cold]
#[inline(never)]
fn failed(home: &Home, block: &mut Out, error: Error) -> Error {
    home.counts.class(block.class()).record_failures.add(1);
    let (bytes, is_first) = (block.class().bytes(), home.said.is_first(Kind::RecordFailed));
    say_failure!(is_first, "record_failed", bytes, %error, "a use could not be recorded");
    if error != Error::Capturing {
        block.worsen(Fate::RecordFailed);
    }
    error
}

/// The use that was just recorded stands for what was noted on its stream.
#[cold]
fn clear_notes(home: &Home, block: &Out, flags: &Flags, stream: &StreamRef<'_>) {
    let Some(used) = block.uses().last() else { return };
    let mut notes = block.notes().lock();
    notes::clear_covered(&home.driver, &mut notes, used, stream.stream);
    if notes.is_empty() {
        flags.remove(NOTED);
    }
}

/// A buffer recorded again and again drops the events that are complete, so that they do not pile up.
const USES_BEFORE_PRUNING: usize = 8;

#[cold]
fn prune(driver: &Driver, block: &mut Out) {
    let uses = block.take_uses();
    let checked = with_relaxed_capture(driver, || {
        uses.into_iter().map(|used| (events::is_complete(driver, &used), used)).collect::<Vec<_>>()
    });
    // One is kept in any case: a block with no use at all would wait for whole contexts.
    let last = checked.len() - 1;
    for (index, (complete, used)) in checked.into_iter().enumerate() {
        if complete == Ok(true) && index < last { events::recycle(used) } else { block.add_use(used) }
    }
}
