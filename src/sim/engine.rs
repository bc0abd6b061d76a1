//! Executing what streams hold: by steps, for a call that waits, at once, or (`realtime.rs`) when it is due.

use super::builder::Clock;
use super::core::Core;
use super::state::{ContextRef, Position, State};
use super::streams::{Operation, Stream, StreamKind, Work};
use parking_lot::MutexGuard;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Core {
    /// Gives the stream an operation at a position taken by [`State::next_position`], under the same lock.
    ///
    /// `host` is the address and size of the host memory that it uses.
    pub(super) fn enqueue_at(
        &self,
        mut state: MutexGuard<'_, State>,
        position: Position,
        work: Work,
        host: Option<(usize, usize)>,
    ) {
        let slot = position.slot;
        let stream = &mut state.streams[slot];
        let was_empty = stream.queue.is_empty();
        stream.queue.push_back(Operation { sequence: position.sequence, work, host, due: None });
        state.pending_operations += 1;
        if host.is_some() {
            self.host_operations.fetch_add(1, Ordering::Release);
        }
        let takes_time = matches!(state.streams[slot].queue.back(), Some(last) if last.takes_time());
        if self.runs_inline() && was_empty && !takes_time && state.can_run(slot) {
            self.execute_head(&mut state, slot);
        } else if self.config.clock != Clock::Stepped {
            drop(state);
            self.wake_engine();
        }
    }

    /// Executes the head of a stream for which [`State::can_run`] was just true.
    pub(super) fn execute_head(&self, state: &mut MutexGuard<'_, State>, slot: usize) {
        let stream = &mut state.streams[slot];
        stream.is_running = true;
        let Some(head) = stream.queue.front_mut() else { return };
        let sequence = head.sequence;
        match std::mem::replace(&mut head.work, Work::Nothing) {
            Work::Record { event, id } => state.event_reached(event, id, sequence),
            Work::WaitFor(_) | Work::Delay(_) | Work::Nothing => {}
            work => MutexGuard::unlocked(state, || self.perform(work)),
        }
        let stream = &mut state.streams[slot];
        stream.is_running = false;
        stream.completed = sequence;
        let done = stream.queue.pop_front();
        state.pending_operations -= 1;
        if done.is_some_and(|operation| operation.host.is_some()) {
            self.host_operations.fetch_sub(1, Ordering::Release);
        }
        state.retire_stream(slot);
        self.changed.notify_all();
        if self.config.clock != Clock::Stepped && state.pending_operations > 0 {
            // What waited for this operation may run now, and only the engine looks for it.
            self.engine_wake.notify_all();
        }
    }

    fn perform(&self, work: Work) {
        match work {
            Work::HostToDevice { src, dst } => dst.write(|bytes| src.read_into(bytes)),
            Work::DeviceToHost { src, dst } => src.read(|bytes| dst.write_from(bytes)),
            Work::DeviceToDevice { src, dst } => {
                // By way of a copy, since both may be the same memory.
                let copied = src.read(<[u8]>::to_vec);
                dst.write(|bytes| bytes.copy_from_slice(&copied));
            }
            Work::Fill { dst, value } => dst.write(|bytes| bytes.fill(value)),
            Work::HostFunction(function) => {
                let thread = self.threads.current();
                thread.in_host_function.store(true, Ordering::Relaxed);
                // A panic has to leave the stream able to go on, and to fail the test rather than a thread.
                if catch_unwind(AssertUnwindSafe(|| (function.lock())())).is_err() {
                    self.checks.violation(format_args!("a host function panicked"));
                }
                thread.in_host_function.store(false, Ordering::Relaxed);
            }
            Work::EndLaunch(kept) => {
                drop(kept);
                self.run_destructors();
            }
            Work::Record { .. } | Work::WaitFor(_) | Work::Delay(_) | Work::Nothing => {}
        }
    }

    /// Waits until all positions are complete. On the stepped clock it executes what they need, and only that.
    ///
    /// Answers the error of the context if it is broken or goes away meanwhile.
    pub(super) fn wait_for(
        &self,
        mut state: MutexGuard<'_, State>,
        context: ContextRef,
        positions: &[Position],
    ) -> Result<(), u32> {
        loop {
            state.check_context(context)?;
            let mut unfinished =
                positions.iter().filter(|position| !state.is_complete(**position)).peekable();
            if unfinished.peek().is_none() {
                return Ok(());
            }
            let next = match self.config.clock {
                Clock::Stepped => unfinished.find_map(|position| state.runnable_towards(position.slot)),
                _ => None,
            };
            match next {
                Some(slot) => self.execute_head(&mut state, slot),
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// Drops the unfinished work of some streams, and waits for what is being executed just now.
    pub(super) fn discard_work(&self, state: &mut MutexGuard<'_, State>, of: impl Fn(&Stream) -> bool) {
        loop {
            let mut dropped = 0;
            let mut is_any_running = false;
            for stream in state.streams.iter_mut().filter(|stream| of(stream)) {
                let keep = usize::from(stream.is_running);
                is_any_running |= stream.is_running;
                for operation in stream.queue.drain(keep..) {
                    dropped += 1;
                    if operation.host.is_some() {
                        self.host_operations.fetch_sub(1, Ordering::Release);
                    }
                }
                if keep == 0 {
                    stream.completed = stream.enqueued;
                }
            }
            state.pending_operations -= dropped;
            if !is_any_running {
                return;
            }
            self.changed.wait(state);
        }
    }

    /// Tells everybody who might go on that a stream was released or destroyed.
    pub(super) fn work_became_runnable(&self) {
        self.changed.notify_all();
        if self.config.clock != Clock::Stepped {
            self.wake_engine();
        }
    }

    /// Holds or releases a stream, for a control call.
    pub(super) fn set_held(&self, stream: usize, is_held: bool) {
        let mut state = self.state.lock();
        let slot = self.controlled_slot(&mut state, stream);
        state.streams[slot].is_held = is_held;
        drop(state);
        self.work_became_runnable();
    }

    /// What the stream says of itself when it is asked whether it captures.
    pub(super) fn pretend_capture(&self, stream: usize, is_capturing: bool) {
        let mut state = self.state.lock();
        let slot = self.controlled_slot(&mut state, stream);
        state.streams[slot].says_capturing = is_capturing;
        state.streams_change();
    }

    /// Enqueues an operation that only takes time.
    pub(super) fn stall(&self, stream: usize, duration: Duration) {
        let mut state = self.state.lock();
        let slot = self.controlled_slot(&mut state, stream);
        let position = state.next_position(slot);
        self.enqueue_at(state, position, Work::Delay(duration), None);
    }

    /// The slot of a stream, also in a broken context.
    fn controlled_slot(&self, state: &mut State, stream: usize) -> usize {
        let slot = match stream {
            0..=2 => self.stream_slot(state, self.threads.current(), stream).ok(),
            _ => state.explicit_slot(stream),
        };
        slot.unwrap_or_else(|| panic!("there is no stream {stream:#x} in the current context"))
    }

    /// Nobody is left who could step, release or clear: lets everything go that waits for one of these.
    ///
    /// Unfinished work is dropped rather than executed, since the host memory may be gone with the test.
    pub(super) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Relaxed);
        self.faults.clear();
        let mut state = self.state.lock();
        state.streams.iter_mut().for_each(|stream| stream.is_held = false);
        self.discard_work(&mut state, |_| true);
        self.changed.notify_all();
        drop(state);
        self.run_destructors();
    }

    /// Executes one operation of a stream picked by the seed; false when nothing can run.
    ///
    /// Off the stepped clock it waits for the engine to finish one.
    pub(super) fn step(&self) -> bool {
        let mut state = self.state.lock();
        let runnable = (0..state.streams.len()).filter(|slot| state.can_run(*slot)).count();
        if runnable == 0 && !state.is_any_running() {
            return false;
        }
        if self.config.clock == Clock::Stepped && runnable > 0 {
            let pick = state.random.below(runnable);
            let slot = (0..state.streams.len()).filter(|slot| state.can_run(*slot)).nth(pick);
            slot.inspect(|slot| self.execute_head(&mut state, *slot));
        } else {
            self.changed.wait(&mut state);
        }
        true
    }
}

impl Operation {
    fn takes_time(&self) -> bool {
        matches!(self.work, Work::Delay(_))
    }
}

impl State {
    pub(super) fn is_any_running(&self) -> bool {
        self.streams.iter().any(|stream| stream.is_running)
    }

    /// Whether the head of the stream can be executed now.
    pub(super) fn can_run(&self, slot: usize) -> bool {
        let stream = &self.streams[slot];
        let is_free = !stream.is_held && !stream.is_running && !stream.queue.is_empty();
        is_free && self.blocker(slot).is_none()
    }

    /// Whether what the stream is given now could be executed at once: it has nothing else to do and waits for nobody.
    pub(super) fn executes_at_once(&self, slot: usize) -> bool {
        let stream = &self.streams[slot];
        stream.kind == StreamKind::NonBlocking
            && stream.queue.is_empty()
            && !stream.is_held
            && !stream.is_running
    }

    /// A stream that can run and brings this one forward: itself, or one that it waits for.
    ///
    /// Ends, because a head waits only for operations that were enqueued before it.
    fn runnable_towards(&self, mut slot: usize) -> Option<usize> {
        while let Some(blocker) = self.blocker(slot) {
            slot = blocker;
        }
        self.can_run(slot).then_some(slot)
    }

    /// The stream that has to do something before the head of this one can run.
    fn blocker(&self, slot: usize) -> Option<usize> {
        let stream = &self.streams[slot];
        let head = stream.queue.front()?;
        if let Work::WaitFor(position) = head.work
            && !self.is_complete(position)
        {
            return Some(position.slot);
        }
        let is_earlier = |other: &Stream| other.head().is_some_and(|sequence| sequence < head.sequence);
        match stream.kind {
            StreamKind::NonBlocking => None,
            StreamKind::Blocking => {
                let null = self.contexts[stream.context.index].null_stream;
                let null_stream = self.streams.get(null)?;
                (null_stream.context == stream.context && is_earlier(null_stream)).then_some(null)
            }
            StreamKind::Null => self.streams.iter().position(|other| {
                other.kind == StreamKind::Blocking && other.context == stream.context && is_earlier(other)
            }),
        }
    }
}
