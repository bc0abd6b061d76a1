//! Stream capture: who captures, what that forbids to whom, and what becomes of a capture that was disturbed.
//!
//! The rules are those of `cuStreamBeginCapture` and `cuThreadExchangeStreamCaptureMode`: a call that may
//! synchronise is refused (900) to threads that a capture forbids it, and breaks every capture that forbade it.

use super::calls::Call;
use super::codes::*;
use super::core::Core;
use super::cuda::Cuda;
use super::graphs::Node;
use super::state::{ContextRef, Kind, State};
use super::streams::{StreamKind, Work};
use super::threads::Thread;
use super::user_objects::Kept;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

// `CUstreamCaptureMode`
const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

// `CUstreamCaptureStatus`
const NONE: u32 = 0;
const ACTIVE: u32 = 1;
const INVALIDATED: u32 = 2;

/// Nodes of a graph, by their place.
type Nodes = BTreeSet<usize>;

/// A capture under way.
pub(super) struct Capture {
    /// The slot of the stream that it began on.
    origin: usize,
    thread: usize,
    mode: u32,
    is_valid: bool,
    /// The index of the graph that it makes.
    graph: usize,
    /// The streams that take part, each with the nodes that its next one comes after.
    streams: BTreeMap<usize, Nodes>,
}

/// What an event stands for that was recorded in a capture.
#[derive(Clone)]
pub(super) struct CapturedPoint {
    capture: u64,
    nodes: Nodes,
}

/// What captures forbid.
impl Core {
    /// Every call that may be unsafe during a capture passes here, once its handles are known.
    pub(super) fn capture_checked(&self, state: &mut State, thread: &Thread) -> Result<(), u32> {
        if state.captures.is_empty() {
            return Ok(());
        }
        let thread_mode = thread.capture_mode.load(Ordering::Relaxed);
        let mut result = Ok(());
        for capture in state.captures.values_mut().filter(|capture| capture.is_valid) {
            let is_own = capture.thread == thread.number && capture.mode != RELAXED;
            let forbids = match thread_mode {
                GLOBAL => is_own || capture.mode == GLOBAL,
                THREAD_LOCAL => is_own,
                _ => false,
            };
            if forbids {
                capture.is_valid = false;
                result = Err(CAPTURE_UNSUPPORTED);
            }
        }
        result
    }

    /// A wait for a context in which a stream captures, whatever the thread's mode.
    pub(super) fn context_wait_checked(&self, state: &mut State, context: ContextRef) -> Result<(), u32> {
        if !self.config.context_wait_breaks_captures {
            return Ok(());
        }
        let streams = state.streams.iter().filter(|stream| stream.context == context);
        let capturing: BTreeSet<u64> = streams.filter_map(|stream| stream.capture).collect();
        let mut result = Ok(());
        for capture in capturing {
            result = Err(CAPTURE_UNSUPPORTED);
            state.invalidate(capture);
        }
        result
    }

    /// The capture that takes what a stream is given; `None` when the stream executes it. 901 for a broken capture,
    /// 906 for the legacy stream while a stream captures that would wait for it.
    pub(super) fn use_stream(&self, state: &mut State, slot: usize) -> Result<Option<u64>, u32> {
        if state.captures.is_empty() {
            return Ok(None);
        }
        let implicit = state.captures_before_legacy(slot);
        if !implicit.is_empty() {
            implicit.into_iter().for_each(|capture| state.invalidate(capture));
            return Err(CAPTURE_IMPLICIT);
        }
        match state.streams[slot].capture {
            Some(capture) if state.captures[&capture].is_valid => Ok(Some(capture)),
            Some(_) => Err(CAPTURE_INVALIDATED),
            None => Ok(None),
        }
    }

    /// A call that a capturing stream forbids to everybody, and that breaks its capture.
    pub(super) fn refuse_while_capturing(&self, state: &mut State, slot: usize) -> Result<(), u32> {
        match self.use_stream(state, slot)? {
            Some(capture) => {
                state.invalidate(capture);
                Err(CAPTURE_UNSUPPORTED)
            }
            None => Ok(()),
        }
    }

    /// Before a question about a stream, or a wait for it.
    pub(super) fn ask_stream(&self, state: &mut State, thread: &Thread, slot: usize) -> Result<(), u32> {
        self.refuse_while_capturing(state, slot)?;
        self.capture_checked(state, thread)
    }

    /// Before a question about an event, or a wait for it.
    pub(super) fn ask_event(&self, state: &mut State, thread: &Thread, event: usize) -> Result<(), u32> {
        if let Some(point) = &state.events[event].captured {
            let capture = point.capture;
            let is_over = !state.captures.contains_key(&capture);
            if !is_over || self.config.captured_event_survives_end {
                state.invalidate(capture);
                return Err(CAPTURED_EVENT);
            }
        }
        self.capture_checked(state, thread)
    }

    /// A stream is told to wait for an event, of which one or both are captured; false when neither is.
    pub(super) fn wait_in_capture(&self, state: &mut State, slot: usize, event: usize) -> Result<bool, u32> {
        let event = state.event_slot(event)?;
        let point = state.events[event].captured.clone();
        let capture = self.use_stream(state, slot)?;
        let Some(point) = point else {
            // Before the first record there is nothing to wait for.
            let (Some(capture), Some(_)) = (capture, state.events[event].recorded) else {
                return Ok(capture.is_some());
            };
            state.invalidate(capture);
            return Err(CAPTURE_ISOLATION);
        };
        match state.captures.get_mut(&point.capture) {
            None if self.config.captured_event_survives_end => Err(CAPTURED_EVENT),
            None => Ok(false),
            Some(_) if capture.is_some_and(|capture| capture != point.capture) => {
                state.invalidate(point.capture);
                capture.into_iter().for_each(|capture| state.invalidate(capture));
                Err(CAPTURE_MERGE)
            }
            Some(fork) if !fork.is_valid => Err(CAPTURE_INVALIDATED),
            Some(fork) => {
                fork.streams.entry(slot).or_default().extend(point.nodes);
                state.streams[slot].capture = Some(point.capture);
                state.streams_change();
                Ok(true)
            }
        }
    }
}

impl State {
    fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.is_valid = false;
        }
    }

    /// The captures that an implicit wait would have to cross, if this is a legacy stream.
    fn captures_before_legacy(&self, slot: usize) -> Vec<u64> {
        let legacy = &self.streams[slot];
        if legacy.kind != StreamKind::Null {
            return Vec::new();
        }
        let waiting = self
            .streams
            .iter()
            .filter(|stream| stream.context == legacy.context && stream.kind == StreamKind::Blocking);
        waiting
            .filter_map(|stream| stream.capture)
            .filter(|capture| self.captures[capture].is_valid)
            .collect()
    }

    /// An operation becomes a node, after what its stream has captured so far.
    pub(super) fn capture(&mut self, capture: u64, slot: usize, work: Work, host: Option<(usize, usize)>) {
        let Some(capture) = self.captures.get_mut(&capture) else { return };
        let Some(graph) = self.graphs.get_mut(&capture.graph) else { return };
        capture.streams.entry(slot).or_default().insert(graph.nodes.len());
        graph.nodes.push(Node::new(work, host));
    }

    /// A launch becomes a part of the graph that is captured.
    pub(super) fn capture_graph(
        &mut self,
        capture: u64,
        slot: usize,
        nodes: Vec<Node>,
        kept: Vec<Arc<Kept>>,
    ) -> Result<(), u32> {
        let capture = self.captures.get_mut(&capture).ok_or(INVALID_VALUE)?;
        let graph = self.graphs.get_mut(&capture.graph).ok_or(INVALID_VALUE)?;
        let places = graph.nodes.len()..graph.nodes.len() + nodes.len();
        capture.streams.entry(slot).or_default().extend(places);
        graph.nodes.extend(nodes);
        graph.kept.extend(kept);
        Ok(())
    }

    pub(super) fn record_in_capture(&mut self, capture: u64, slot: usize, event: usize) {
        let Some(nodes) = self.captures.get(&capture).and_then(|capture| capture.streams.get(&slot)) else {
            return;
        };
        let point = CapturedPoint { capture, nodes: nodes.clone() };
        self.events[event].recorded = None;
        self.events[event].captured = Some(point);
    }

    /// The stream goes away: its capture is broken, and ends with the stream that it began on.
    pub(super) fn leave_capture(&mut self, slot: usize) {
        let Some(id) = self.streams[slot].capture.take() else { return };
        self.invalidate(id);
        let Some(capture) = self.captures.get_mut(&id) else { return };
        capture.streams.remove(&slot);
        if capture.origin == slot {
            self.forget_capture(id);
        }
    }

    /// All its streams leave the capture; gives the index of its graph, which is nobody's yet.
    fn end_capture(&mut self, id: u64) -> Option<usize> {
        let capture = self.captures.remove(&id)?;
        for stream in self.streams.iter_mut().filter(|stream| stream.capture == Some(id)) {
            stream.capture = None;
        }
        Some(capture.graph)
    }

    fn forget_capture(&mut self, id: u64) {
        let graph = self.end_capture(id);
        drop(graph.and_then(|graph| self.graphs.remove(&graph)));
    }
}

/// Stream capture.
impl Cuda {
    /// `cuStreamBeginCapture`: from now on the stream executes nothing, what it is given becomes a graph. Modes: 0
    /// global, 1 thread-local, 2 relaxed. 1 for the legacy stream, and for one that captures already.
    pub fn cu_stream_begin_capture(&self, stream: usize, mode: u32) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::StreamBeginCapture, 0)?;
        let mut state = core.state.lock();
        let slot = core.stream_slot(&mut state, thread, stream)?;
        core.need_context(&state, thread)?;
        let is_legacy = state.streams[slot].kind == StreamKind::Null;
        if mode > RELAXED || is_legacy || state.streams[slot].capture.is_some() {
            return Err(INVALID_VALUE);
        }
        core.has_captured.store(true, Ordering::Relaxed);
        let (id, graph) = (state.next_number(), state.add_graph());
        let streams = BTreeMap::from([(slot, Nodes::new())]);
        let capture = Capture { origin: slot, thread: thread.number, mode, is_valid: true, graph, streams };
        state.captures.insert(id, capture);
        state.streams[slot].capture = Some(id);
        state.streams_change();
        Ok(())
    }

    /// `cuStreamEndCapture`: the graph. 903 on another stream than the one it began on, 908 from another thread
    /// (unless it began relaxed); the capture goes on then. 901 when it was broken and 904 when a stream that it
    /// forked to was not joined; it ends then, with no graph.
    pub fn cu_stream_end_capture(&self, stream: usize) -> Result<usize, u32> {
        let core = self.core();
        let thread = core.enter(Call::StreamEndCapture, 0)?;
        let mut state = core.state.lock();
        let slot = core.stream_slot(&mut state, thread, stream)?;
        core.need_context(&state, thread)?;
        let id = state.streams[slot].capture.ok_or(INVALID_VALUE)?;
        let capture = state.captures.get(&id).ok_or(INVALID_VALUE)?;
        if capture.origin != slot {
            return Err(CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && capture.thread != thread.number {
            return Err(CAPTURE_WRONG_THREAD);
        }
        let nodes = state.graphs.get(&capture.graph).map_or(0, |graph| graph.nodes.len());
        let is_joined = capture.streams.get(&slot).is_some_and(|joined| joined.len() == nodes);
        let outcome = match (capture.is_valid, is_joined) {
            (false, _) => Err(CAPTURE_INVALIDATED),
            (true, false) => Err(CAPTURE_UNJOINED),
            (true, true) => Ok(()),
        };
        if let Err(code) = outcome {
            state.forget_capture(id);
            drop(state);
            core.run_destructors();
            return Err(code);
        }
        let index = state.end_capture(id).ok_or(INVALID_VALUE)?;
        if let Some(graph) = state.graphs.get_mut(&index) {
            graph.is_being_captured = false;
        }
        Ok(state.handle(Kind::Graph, index))
    }

    /// `cuStreamIsCapturing`: 0 none, 1 active, 2 broken and not yet ended. 906 for the legacy stream while a stream
    /// captures that would wait for it; nothing is broken by the question. 1 also while
    /// [`Sim::pretend_capture`](super::Sim::pretend_capture) says so.
    ///
    /// The answer "none" is remembered for the thread until any stream changes, so that to ask before every record
    /// takes no lock, as on a real driver, where it is a look at a flag.
    pub fn cu_stream_is_capturing(&self, stream: usize) -> Result<u32, u32> {
        let core = self.core();
        let thread = core.enter(Call::StreamIsCapturing, 0)?;
        // Before the look at the stream: a change in between makes the answer too old at once.
        let changes = core.stream_changes.load(Ordering::Acquire);
        let is_known = thread.quiet_stream.load(Ordering::Relaxed) == stream
            && thread.quiet_since.load(Ordering::Relaxed) == changes;
        if is_known && !is_default_stream(stream) {
            return Ok(NONE);
        }
        let (status, _, _) = self.capture_info(thread, stream)?;
        if status == NONE {
            thread.quiet_stream.store(stream, Ordering::Relaxed);
            thread.quiet_since.store(changes, Ordering::Relaxed);
        }
        Ok(status)
    }

    /// `cuStreamGetCaptureInfo`: status, the number of the capture (no two have the same), and the graph that it
    /// makes; the latter two 0 where nothing is captured, also where it is only pretended.
    pub fn cu_stream_get_capture_info(&self, stream: usize) -> Result<(u32, u64, usize), u32> {
        let thread = self.core().enter(Call::StreamGetCaptureInfo, 0)?;
        self.capture_info(thread, stream)
    }

    fn capture_info(&self, thread: &Thread, stream: usize) -> Result<(u32, u64, usize), u32> {
        let core = self.core();
        let mut state = core.state.lock();
        let slot = core.stream_slot(&mut state, thread, stream)?;
        if !state.captures_before_legacy(slot).is_empty() {
            return Err(CAPTURE_IMPLICIT);
        }
        let id = state.streams[slot].capture;
        match id.and_then(|id| Some((id, state.captures.get(&id)?))) {
            Some((id, capture)) if capture.is_valid => {
                Ok((ACTIVE, id, state.handle(Kind::Graph, capture.graph)))
            }
            Some((id, _)) => Ok((INVALIDATED, id, 0)),
            None => Ok((if state.streams[slot].says_capturing { ACTIVE } else { NONE }, 0, 0)),
        }
    }
}

/// Which stream it is depends on the thread's current context, and what the legacy one says on others besides.
fn is_default_stream(stream: usize) -> bool {
    stream <= 2
}
