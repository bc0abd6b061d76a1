//! Streams: queues of operations, each executed in order.

use super::calls::Call;
use super::codes::{INVALID_HANDLE, INVALID_VALUE, NOT_READY};
use super::core::Core;
use super::cuda::Cuda;
use super::host_memory::HostRange;
use super::memory::DeviceRange;
use super::state::{ContextRef, Kind, Position, State};
use super::threads::Thread;
use super::user_objects::Kept;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

const NON_BLOCKING: u32 = 1;

/// How a stream relates to the legacy default stream of its context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StreamKind {
    /// It is the legacy default stream: it and the blocking ones wait for each other's earlier work.
    Null,
    Blocking,
    NonBlocking,
}

pub(super) struct Stream {
    /// Distinguishes the streams that share a slot or a handle over time.
    pub(super) id: u64,
    pub(super) context: ContextRef,
    pub(super) kind: StreamKind,
    pub(super) queue: VecDeque<Operation>,
    /// The sequence number of the newest operation, done or not.
    pub(super) enqueued: u64,
    /// The sequence number up to which everything is done.
    pub(super) completed: u64,
    pub(super) is_held: bool,
    /// The capture that it takes part in.
    pub(super) capture: Option<u64>,
    /// What `cuStreamIsCapturing` shall say although nothing is captured.
    pub(super) says_capturing: bool,
    /// The head of the queue is being executed, without the device's mutex.
    pub(super) is_running: bool,
    /// Destroyed by the application; goes away when its work is done.
    is_destroyed: bool,
}

pub(super) struct Operation {
    pub(super) sequence: u64,
    pub(super) work: Work,
    /// The host bytes that it reads or writes; kept while `work` is taken out to be executed.
    pub(super) host: Option<(usize, usize)>,
    /// When it will be done; set by the real-time engine as it starts it.
    pub(super) due: Option<Instant>,
}

#[derive(Clone)]
pub(super) enum Work {
    HostToDevice {
        src: HostRange,
        dst: DeviceRange,
    },
    DeviceToHost {
        src: DeviceRange,
        dst: HostRange,
    },
    DeviceToDevice {
        src: DeviceRange,
        dst: DeviceRange,
    },
    Fill {
        dst: DeviceRange,
        value: u8,
    },
    Record {
        event: usize,
        id: u64,
    },
    WaitFor(Position),
    HostFunction(HostFunction),
    Delay(Duration),
    /// The end of a graph's launch; the launch keeps the graph's user objects until then.
    EndLaunch(Vec<Arc<Kept>>),
    /// Nothing is left to do: it was taken out to be executed, or cancelled.
    Nothing,
}

/// A host function; a graph runs it at every replay.
pub(super) type HostFunction = Arc<Mutex<dyn FnMut() + Send>>;

impl Stream {
    pub(super) fn head(&self) -> Option<u64> {
        self.queue.front().map(|operation| operation.sequence)
    }

    pub(super) fn position(&self, slot: usize) -> Position {
        Position { slot, stream_id: self.id, sequence: self.enqueued }
    }
}

impl State {
    /// A new stream; reuses the slot, and with it the queue's storage, of one that is gone.
    pub(super) fn add_stream(&mut self, context: ContextRef, kind: StreamKind) -> usize {
        let id = self.next_number();
        let slot = self.free_stream_slots.pop().unwrap_or(self.streams.len());
        let mut stream = Stream {
            id,
            context,
            kind,
            queue: VecDeque::new(),
            enqueued: 0,
            completed: 0,
            is_held: false,
            capture: None,
            says_capturing: false,
            is_running: false,
            is_destroyed: false,
        };
        match self.streams.get_mut(slot) {
            Some(old) => {
                std::mem::swap(&mut stream.queue, &mut old.queue);
                *old = stream;
            }
            None => self.streams.push(stream),
        }
        slot
    }

    /// The position that the next operation of the stream will have.
    pub(super) fn next_position(&mut self, slot: usize) -> Position {
        let sequence = self.next_number();
        let stream = &mut self.streams[slot];
        stream.enqueued = sequence;
        Position { slot, stream_id: stream.id, sequence }
    }

    /// The stream accepts nothing more, and goes away once it has nothing left to do.
    pub(super) fn abandon_stream(&mut self, slot: usize) {
        self.leave_capture(slot);
        self.streams_change();
        self.streams[slot].is_destroyed = true;
        self.streams[slot].is_held = false;
        for handle in 0..self.stream_handles.len() {
            if self.stream_handles[handle] == Some(slot) {
                self.stream_handles[handle] = None;
                self.free_stream_handles.push(handle);
            }
        }
        self.retire_stream(slot);
    }

    /// Frees the slot of a destroyed stream that has nothing left to do.
    pub(super) fn retire_stream(&mut self, slot: usize) {
        let stream = &self.streams[slot];
        if stream.is_destroyed && stream.queue.is_empty() && !stream.is_running {
            let id = self.next_number();
            let stream = &mut self.streams[slot];
            // A new identity makes every position in the old stream complete.
            stream.id = id;
            stream.is_destroyed = false;
            stream.context.epoch = 0;
            self.free_stream_slots.push(slot);
        }
    }
}

impl Core {
    /// A new stream in a context, and its handle: the one freed last, as the driver reuses them.
    pub(super) fn create_stream(&self, state: &mut State, context: ContextRef, flags: u32) -> usize {
        let is_non_blocking = flags & NON_BLOCKING != 0;
        let kind = if is_non_blocking { StreamKind::NonBlocking } else { StreamKind::Blocking };
        let slot = state.add_stream(context, kind);
        let index = state.free_stream_handles.pop().unwrap_or_else(|| {
            state.stream_handles.push(None);
            state.stream_handles.len() - 1
        });
        state.stream_handles[index] = Some(slot);
        state.handle(Kind::Stream, index)
    }

    /// The slot behind a handle. 0 and 1 are the legacy, 2 the per-thread default stream of the current context.
    pub(super) fn stream_slot(
        &self,
        state: &mut State,
        thread: &Thread,
        handle: usize,
    ) -> Result<usize, u32> {
        match handle {
            0 | 1 => {
                let context = self.current_context(state, thread)?;
                Ok(state.contexts[context.index].null_stream)
            }
            2 => {
                let context = self.current_context(state, thread)?;
                let key = (thread.number, context);
                if let Some(slot) = state.thread_streams.get(&key) {
                    return Ok(*slot);
                }
                let slot = state.add_stream(context, StreamKind::Blocking);
                state.thread_streams.insert(key, slot);
                Ok(slot)
            }
            _ => {
                let slot = state.explicit_slot(handle).ok_or(INVALID_HANDLE)?;
                state.check_context(state.streams[slot].context)?;
                Ok(slot)
            }
        }
    }

    pub(super) fn destroy_stream(&self, state: &mut State, handle: usize) -> Result<(), u32> {
        let slot = state.explicit_slot(handle).ok_or(INVALID_HANDLE)?;
        state.abandon_stream(slot);
        Ok(())
    }
}

/// Streams.
impl Cuda {
    /// `cuStreamCreate` in the current context. Flag 1: does not synchronise with the legacy default stream.
    pub fn cu_stream_create(&self, flags: u32) -> Result<usize, u32> {
        let core = self.core();
        let thread = core.enter(Call::StreamCreate, 0)?;
        let mut state = core.state.lock();
        let context = core.current_context(&state, thread)?;
        match flags & !NON_BLOCKING {
            0 => Ok(core.create_stream(&mut state, context, flags)),
            _ => Err(INVALID_VALUE),
        }
    }

    /// `cuStreamCreateWithPriority`; the priority changes nothing.
    pub fn cu_stream_create_with_priority(&self, flags: u32, _priority: i32) -> Result<usize, u32> {
        let core = self.core();
        let thread = core.enter(Call::StreamCreateWithPriority, 0)?;
        let mut state = core.state.lock();
        let context = core.current_context(&state, thread)?;
        match flags & !NON_BLOCKING {
            0 => Ok(core.create_stream(&mut state, context, flags)),
            _ => Err(INVALID_VALUE),
        }
    }

    /// `cuStreamDestroy`: returns at once; the work goes on, also when the stream was held.
    pub fn cu_stream_destroy(&self, stream: usize) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::StreamDestroy, 0)?;
        let mut state = core.state.lock();
        core.need_context(&state, thread)?;
        core.destroy_stream(&mut state, stream)?;
        drop(state);
        core.run_destructors();
        core.work_became_runnable();
        Ok(())
    }

    /// `cuStreamQuery`: 600 while there is unfinished work.
    pub fn cu_stream_query(&self, stream: usize) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::StreamQuery, 0)?;
        let mut state = core.state.lock();
        let slot = core.stream_slot(&mut state, thread, stream)?;
        core.need_context(&state, thread)?;
        core.ask_stream(&mut state, thread, slot)?;
        match state.streams[slot].queue.is_empty() {
            true => Ok(()),
            false => Err(NOT_READY),
        }
    }

    /// `cuStreamSynchronize`: waits for what the stream has been given so far.
    pub fn cu_stream_synchronize(&self, stream: usize) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::StreamSynchronize, 0)?;
        let mut state = core.state.lock();
        let slot = core.stream_slot(&mut state, thread, stream)?;
        core.need_context(&state, thread)?;
        core.ask_stream(&mut state, thread, slot)?;
        let context = state.streams[slot].context;
        let position = state.streams[slot].position(slot);
        core.wait_for(state, context, &[position])
    }

    /// `cuCtxSynchronize`: waits for what all streams of the current context have been given so far.
    pub fn cu_ctx_synchronize(&self) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::CtxSynchronize, 0)?;
        let mut state = core.state.lock();
        let context = core.current_context(&state, thread)?;
        core.capture_checked(&mut state, thread)?;
        core.context_wait_checked(&mut state, context)?;
        let positions = state.outstanding(context);
        core.wait_for(state, context, &positions)
    }

    /// `cuStreamWaitEvent`: later work of the stream waits for what the event stands for now. Contexts may differ.
    pub fn cu_stream_wait_event(&self, stream: usize, event: usize, flags: u32) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::StreamWaitEvent, 0)?;
        let mut state = core.state.lock();
        let slot = core.stream_slot(&mut state, thread, stream)?;
        state.event_slot(event)?;
        core.need_context(&state, thread)?;
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        if core.wait_in_capture(&mut state, slot, event)? {
            return Ok(());
        }
        if let Some(awaited) = state.awaited(event)? {
            let position = state.next_position(slot);
            core.enqueue_at(state, position, Work::WaitFor(awaited), None);
        }
        Ok(())
    }

    /// `cuStreamGetId`: never reused, unlike the handle. On a capturing stream it answers 900 and invalidates the
    /// capture, as the driver may.
    pub fn cu_stream_get_id(&self, stream: usize) -> Result<u64, u32> {
        let core = self.core();
        let thread = core.enter(Call::StreamGetId, 0)?;
        let mut state = core.state.lock();
        let slot = core.stream_slot(&mut state, thread, stream)?;
        core.refuse_while_capturing(&mut state, slot)?;
        Ok(state.streams[slot].id)
    }

    /// `cuStreamGetCtx`.
    pub fn cu_stream_get_ctx(&self, stream: usize) -> Result<usize, u32> {
        let core = self.core();
        let thread = core.enter(Call::StreamGetCtx, 0)?;
        let mut state = core.state.lock();
        let slot = core.stream_slot(&mut state, thread, stream)?;
        Ok(state.handle(Kind::Context, state.streams[slot].context.index))
    }

    /// `cuLaunchHostFunc`: runs the function when the stream gets there. A driver call inside it answers 800.
    /// Captured, it runs at every replay.
    pub fn cu_launch_host_func(
        &self,
        stream: usize,
        function: impl FnMut() + Send + 'static,
    ) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::LaunchHostFunc, 0)?;
        let mut state = core.state.lock();
        let slot = core.stream_slot(&mut state, thread, stream)?;
        core.need_context(&state, thread)?;
        let work = Work::HostFunction(Arc::new(Mutex::new(function)));
        if let Some(capture) = core.use_stream(&mut state, slot)? {
            state.capture(capture, slot, work, None);
            return Ok(());
        }
        let position = state.next_position(slot);
        core.enqueue_at(state, position, work, None);
        Ok(())
    }
}

impl State {
    /// The slot behind the handle of a stream that was created and not destroyed.
    pub(super) fn explicit_slot(&self, handle: usize) -> Option<usize> {
        *self.stream_handles.get(self.index(Kind::Stream, handle)?)?
    }

    /// The identity of the stream that has a handle now.
    pub(super) fn stream_id(&self, handle: usize) -> Option<u64> {
        self.explicit_slot(handle).map(|slot| self.streams[slot].id)
    }

    /// Where every stream of a context that has unfinished work has to get to.
    pub(super) fn outstanding(&self, context: ContextRef) -> Vec<Position> {
        let streams = self.streams.iter().enumerate();
        let busy = streams.filter(|(_, stream)| stream.context == context && !stream.queue.is_empty());
        busy.map(|(slot, stream)| stream.position(slot)).collect()
    }
}
