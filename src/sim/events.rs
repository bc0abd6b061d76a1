//! Events: points in streams that can be asked about.

use super::calls::{Call, spend};
use super::captures::CapturedPoint;
use super::checks::Origin;
use super::codes::{INVALID_HANDLE, INVALID_VALUE, NOT_READY};
use super::core::Core;
use super::cuda::Cuda;
use super::state::{ContextRef, Kind, Position, State};
use super::streams::Work;
use std::time::Instant;

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

pub(super) struct Event {
    /// `None` when the slot is free.
    context: Option<ContextRef>,
    /// Distinguishes the events that share a slot over time.
    id: u64,
    flags: u32,
    /// The last record; never recorded counts as complete.
    pub(super) recorded: Option<Position>,
    /// The last record was on a capturing stream: it stands for a point of a graph.
    pub(super) captured: Option<CapturedPoint>,
    /// When the device executed the last record; kept for events with timing only.
    reached_at: Option<Instant>,
}

impl State {
    pub(super) fn timed_events(&self) -> usize {
        self.events
            .iter()
            .filter(|event| event.context.is_some() && event.flags & DISABLE_TIMING == 0)
            .count()
    }

    pub(super) fn live_events(&self) -> usize {
        self.events
            .iter()
            .filter(|event| event.context.is_some_and(|of| self.check_context(of).is_ok()))
            .count()
    }

    /// The slot of a living event: 400 for an unknown handle, 709 when its context is gone.
    pub(super) fn event_slot(&self, handle: usize) -> Result<usize, u32> {
        let slot = self.index(Kind::Event, handle).filter(|slot| *slot < self.events.len());
        let slot = slot.ok_or(INVALID_HANDLE)?;
        self.check_context(self.events[slot].context.ok_or(INVALID_HANDLE)?)?;
        Ok(slot)
    }

    fn is_event_pending(&self, slot: usize) -> bool {
        self.events[slot].recorded.is_some_and(|position| !self.is_complete(position))
    }

    /// Where a wait for this event has to get to; `None` when it is complete already.
    pub(super) fn awaited(&self, handle: usize) -> Result<Option<Position>, u32> {
        let slot = self.event_slot(handle)?;
        Ok(self.events[slot].recorded.filter(|position| !self.is_complete(*position)))
    }

    /// The device has executed a record.
    pub(super) fn event_reached(&mut self, slot: usize, id: u64, sequence: u64) {
        let event = &mut self.events[slot];
        let is_last_record = event.recorded.is_some_and(|position| position.sequence == sequence);
        if event.id == id && is_last_record && event.flags & DISABLE_TIMING == 0 {
            event.reached_at = Some(Instant::now());
        }
    }
}

impl Core {
    pub(super) fn record_event(&self, origin: Origin, event: usize, stream: usize) -> Result<(), u32> {
        let thread = self.enter(Call::EventRecord, 0)?;
        let mut state = self.state.lock();
        let slot = state.event_slot(event)?;
        self.need_context(&state, thread)?;
        let stream_slot = self.stream_slot(&mut state, thread, stream)?;
        if origin == Origin::Pool && state.is_event_pending(slot) {
            self.checks.violation(format_args!(
                "cuEventRecord: event {event:#x} is recorded again although its last record is pending"
            ));
        }
        if Some(state.streams[stream_slot].context) != state.events[slot].context {
            if origin == Origin::Pool {
                self.checks.violation(format_args!(
                    "cuEventRecord: event {event:#x} and stream {stream:#x} belong to different contexts"
                ));
            }
            return Err(INVALID_HANDLE);
        }
        if let Some(capture) = self.use_stream(&mut state, stream_slot)? {
            if origin == Origin::Pool {
                self.checks.violation(format_args!(
                    "cuEventRecord: event {event:#x} of the pool is recorded on a stream that captures"
                ));
            }
            state.record_in_capture(capture, stream_slot, slot);
            return Ok(());
        }
        let id = state.events[slot].id;
        state.events[slot].reached_at = None;
        state.events[slot].captured = None;
        // The record is stored before it is enqueued, since enqueueing may execute it at once.
        let position = state.next_position(stream_slot);
        state.events[slot].recorded = Some(position);
        if self.runs_inline() && state.executes_at_once(stream_slot) {
            state.streams[stream_slot].completed = position.sequence;
            state.event_reached(slot, id, position.sequence);
            self.changed.notify_all();
            return Ok(());
        }
        self.enqueue_at(state, position, Work::Record { event: slot, id }, None);
        Ok(())
    }

    pub(super) fn destroy_event(&self, origin: Origin, event: usize) -> Result<(), u32> {
        let thread = self.enter(Call::EventDestroy, 0)?;
        let mut state = self.state.lock();
        let slot = state.event_slot(event)?;
        self.need_context(&state, thread)?;
        if origin == Origin::Pool && state.is_event_pending(slot) {
            self.checks.violation(format_args!(
                "cuEventDestroy: event {event:#x} is destroyed although its record is pending"
            ));
        }
        state.events[slot].context = None;
        state.free_events.push(slot);
        Ok(())
    }
}

/// Events.
impl Cuda {
    /// `cuEventCreate` in the current context. Flags: 1 blocking sync, 2 no timing, 4 interprocess (needs 2).
    pub fn cu_event_create(&self, flags: u32) -> Result<usize, u32> {
        let core = self.core();
        let thread = core.enter(Call::EventCreate, 0)?;
        spend(core.config.event_create_cost);
        let mut state = core.state.lock();
        let context = core.current_context(&state, thread)?;
        let is_odd_interprocess = flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0;
        if flags > 7 || is_odd_interprocess {
            return Err(INVALID_VALUE);
        }
        let id = state.next_number();
        let event =
            Event { context: Some(context), id, flags, recorded: None, captured: None, reached_at: None };
        let slot = match state.free_events.pop() {
            Some(slot) => {
                state.events[slot] = event;
                slot
            }
            None => {
                state.events.push(event);
                state.events.len() - 1
            }
        };
        Ok(state.handle(Kind::Event, slot))
    }

    /// `cuEventRecord`: the event now stands for what the stream has been given so far, and for nothing
    /// that it stood for before. 400 when the stream is of another context.
    pub fn cu_event_record(&self, event: usize, stream: usize) -> Result<(), u32> {
        let core = self.core();
        core.record_event(Origin::Application, event, stream)
    }

    /// `cuEventQuery`: 600 while pending. Needs no current context; 400 for a null handle even before `cuInit`.
    pub fn cu_event_query(&self, event: usize) -> Result<(), u32> {
        let core = self.core();
        if event == 0 {
            core.count(Call::EventQuery, 0)?;
            return Err(INVALID_HANDLE);
        }
        let thread = core.enter(Call::EventQuery, 0)?;
        let mut state = core.state.lock();
        let slot = state.event_slot(event)?;
        core.ask_event(&mut state, thread, slot)?;
        match state.is_event_pending(slot) {
            true => Err(NOT_READY),
            false => Ok(()),
        }
    }

    /// `cuEventSynchronize`: waits for the record that the event stands for now.
    pub fn cu_event_synchronize(&self, event: usize) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::EventSynchronize, 0)?;
        let mut state = core.state.lock();
        let slot = state.event_slot(event)?;
        core.need_context(&state, thread)?;
        core.ask_event(&mut state, thread, slot)?;
        let context = state.events[slot].context.ok_or(INVALID_HANDLE)?;
        let awaited = state.awaited(event)?;
        core.wait_for(state, context, awaited.as_slice())
    }

    /// `cuEventDestroy`: allowed while pending; the stream's work goes on.
    pub fn cu_event_destroy(&self, event: usize) -> Result<(), u32> {
        let core = self.core();
        core.destroy_event(Origin::Application, event)
    }

    /// `cuEventElapsedTime`: milliseconds between two records. 400 for events without timing or record,
    /// 600 while one is pending.
    pub fn cu_event_elapsed_time(&self, start: usize, end: usize) -> Result<f32, u32> {
        let core = self.core();
        core.enter(Call::EventElapsedTime, 0)?;
        let state = core.state.lock();
        let (start, end) = (state.event_slot(start)?, state.event_slot(end)?);
        for slot in [start, end] {
            if state.events[slot].recorded.is_none() || state.events[slot].flags & DISABLE_TIMING != 0 {
                return Err(INVALID_HANDLE);
            }
        }
        match (state.events[start].reached_at, state.events[end].reached_at) {
            (Some(start), Some(end)) if end >= start => Ok((end - start).as_secs_f32() * 1e3),
            (Some(start), Some(end)) => Ok(-((start - end).as_secs_f32() * 1e3)),
            _ => Err(NOT_READY),
        }
    }
}
