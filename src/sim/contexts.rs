//! Contexts: one primary per device, created ones, and the current one of each thread.

use super::calls::Call;
use super::codes::{INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE};
use super::core::Core;
use super::cuda::Cuda;
use super::state::{ContextRef, Kind, State};
use super::streams::StreamKind;
use super::threads::Thread;
use parking_lot::MutexGuard;
use std::sync::atomic::Ordering;

pub(super) struct Context {
    pub(super) device: i32,
    is_primary: bool,
    retains: u32,
    flags: u32,
    pub(super) is_alive: bool,
    /// Changes whenever the context comes to life, so that what belonged to an earlier life stays dead.
    pub(super) epoch: u64,
    /// An error that every further call in this context answers.
    pub(super) sticky_error: Option<u32>,
    /// The slot of its legacy default stream.
    pub(super) null_stream: usize,
}

impl Context {
    pub(super) fn retains(&self) -> u32 {
        self.retains
    }

    pub(super) fn inactive_primary(device: i32) -> Self {
        Self {
            device,
            is_primary: true,
            retains: 0,
            flags: 0,
            is_alive: false,
            epoch: 0,
            sticky_error: None,
            null_stream: usize::MAX,
        }
    }
}

impl Core {
    /// The current context of the thread: 201 for none, 709 for a dead one, or its sticky error.
    pub(super) fn current_context(&self, state: &State, thread: &Thread) -> Result<ContextRef, u32> {
        state.live_context(thread.current.load(Ordering::Relaxed))
    }

    /// [`current_context`](Self::current_context), where only a handle's call needs one.
    pub(super) fn need_context(&self, state: &State, thread: &Thread) -> Result<(), u32> {
        match self.config.handles_need_context {
            true => self.current_context(state, thread).map(|_| ()),
            false => Ok(()),
        }
    }

    /// The context index of a device's primary context.
    pub(super) fn device_index(&self, device: i32) -> Result<usize, u32> {
        match (0..self.config.devices).contains(&device) {
            true => Ok(device as usize),
            false => Err(INVALID_DEVICE),
        }
    }

    pub(super) fn retain_primary(&self, device: i32) -> Result<usize, u32> {
        let index = self.device_index(device)?;
        let mut state = self.state.lock();
        if !state.contexts[index].is_alive {
            state.bring_to_life(index);
        }
        state.contexts[index].retains += 1;
        Ok(state.handle(Kind::Context, index))
    }

    pub(super) fn is_primary_retained(&self, device: i32) -> bool {
        self.device_index(device).is_ok_and(|index| self.state.lock().contexts[index].retains > 0)
    }

    pub(super) fn release_primary(&self, device: i32) -> Result<(), u32> {
        let index = self.device_index(device)?;
        let mut state = self.state.lock();
        let context = &mut state.contexts[index];
        context.retains = context.retains.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        if context.retains == 0 && context.is_alive {
            self.end_context(state, index);
        }
        Ok(())
    }

    pub(super) fn reset_primary(&self, device: i32) -> Result<(), u32> {
        let index = self.device_index(device)?;
        let state = self.state.lock();
        if state.contexts[index].is_alive {
            self.end_context(state, index);
        }
        Ok(())
    }

    pub(super) fn create_context(&self, flags: u32, device: i32) -> Result<usize, u32> {
        self.device_index(device)?;
        let mut state = self.state.lock();
        let index = state.contexts.len();
        let context = Context { flags, is_primary: false, ..Context::inactive_primary(device) };
        state.contexts.push(context);
        state.bring_to_life(index);
        Ok(state.handle(Kind::Context, index))
    }

    pub(super) fn destroy_context(&self, context: usize) -> Result<(), u32> {
        let state = self.state.lock();
        let found = state.index(Kind::Context, context).filter(|index| *index < state.contexts.len());
        let index = found.ok_or(INVALID_CONTEXT)?;
        if state.contexts[index].is_primary || !state.contexts[index].is_alive {
            return Err(INVALID_CONTEXT);
        }
        self.end_context(state, index);
        Ok(())
    }

    /// Everything that belongs to the context vanishes: streams with their work, events, registrations, memory.
    fn end_context(&self, mut state: MutexGuard<'_, State>, index: usize) {
        let context = state.context_ref(index);
        // First, because it waits for what is being executed just now: nobody may hear that the context has ended, and take
        // its memory back, while something of it still reads or writes.
        self.discard_work(&mut state, |stream| stream.context == context);
        if !state.contexts[index].is_alive || state.context_ref(index) != context {
            // Another thread has ended it meanwhile.
            return;
        }
        state.contexts[index].is_alive = false;
        state.streams_change();
        state.forget_memory_of(context);
        state.thread_streams.retain(|(_, of), _| *of != context);
        for slot in 0..state.streams.len() {
            if state.streams[slot].context == context {
                state.abandon_stream(slot);
            }
        }
        self.changed.notify_all();
        drop(state);
        self.run_destructors();
    }

    /// Gives the context an error that every further call in it answers; its work is never executed.
    pub(super) fn break_context(&self, handle: usize, code: u32) -> Result<(), u32> {
        let mut state = self.state.lock();
        let context = state.live_context(handle)?;
        state.contexts[context.index].sticky_error = Some(code);
        state.streams_change();
        self.discard_work(&mut state, |stream| stream.context == context);
        self.changed.notify_all();
        Ok(())
    }
}

impl State {
    fn bring_to_life(&mut self, index: usize) {
        let epoch = self.next_number();
        let context = &mut self.contexts[index];
        context.is_alive = true;
        context.epoch = epoch;
        context.sticky_error = None;
        let context = self.context_ref(index);
        self.contexts[index].null_stream = self.add_stream(context, StreamKind::Null);
    }
}

/// Contexts.
impl Cuda {
    /// `cuDevicePrimaryCtxRetain`: brings the device's primary context to life; does not make it current.
    pub fn cu_device_primary_ctx_retain(&self, device: i32) -> Result<usize, u32> {
        let core = self.core();
        core.enter(Call::PrimaryRetain, 0)?;
        core.retain_primary(device)
    }

    /// `cuDevicePrimaryCtxRelease`: the last release ends the context and all that belongs to it.
    pub fn cu_device_primary_ctx_release(&self, device: i32) -> Result<(), u32> {
        let core = self.core();
        core.enter(Call::PrimaryRelease, 0)?;
        core.release_primary(device)
    }

    /// `cuDevicePrimaryCtxReset`: ends the context whoever retains it.
    pub fn cu_device_primary_ctx_reset(&self, device: i32) -> Result<(), u32> {
        let core = self.core();
        core.enter(Call::PrimaryReset, 0)?;
        core.reset_primary(device)
    }

    /// `cuDevicePrimaryCtxGetState`: the flags, and whether the primary context is alive.
    pub fn cu_device_primary_ctx_get_state(&self, device: i32) -> Result<(u32, bool), u32> {
        let core = self.core();
        core.enter(Call::PrimaryGetState, 0)?;
        let index = core.device_index(device)?;
        let state = core.state.lock();
        Ok((state.contexts[index].flags, state.contexts[index].is_alive))
    }

    /// `cuCtxCreate`: a context of its own, made current on the calling thread.
    pub fn cu_ctx_create(&self, flags: u32, device: i32) -> Result<usize, u32> {
        let core = self.core();
        let thread = core.enter(Call::CtxCreate, 0)?;
        let handle = core.create_context(flags, device)?;
        push(thread, handle);
        Ok(handle)
    }

    /// `cuCtxDestroy`: ends a created context. Other threads that have it current get 709 from then on.
    pub fn cu_ctx_destroy(&self, context: usize) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::CtxDestroy, 0)?;
        core.destroy_context(context)?;
        if thread.current.load(Ordering::Relaxed) == context {
            pop(thread);
        }
        Ok(())
    }

    /// `cuCtxGetCurrent`: 0 when there is none.
    pub fn cu_ctx_get_current(&self) -> Result<usize, u32> {
        let core = self.core();
        // Not `enter`: a thread-local read in the real driver, which no driver lock stalls.
        let thread = core.count(Call::CtxGetCurrent, 0)?;
        self.check_initialised()?;
        Ok(thread.current.load(Ordering::Relaxed))
    }

    /// `cuCtxSetCurrent`: replaces the top of the thread's stack; 0 unbinds.
    pub fn cu_ctx_set_current(&self, context: usize) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::CtxSetCurrent, 0)?;
        if context != 0 {
            self.check_bindable(context)?;
        }
        thread.current.store(context, Ordering::Relaxed);
        Ok(())
    }

    /// `cuCtxPushCurrent`.
    pub fn cu_ctx_push_current(&self, context: usize) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::CtxPushCurrent, 0)?;
        self.check_bindable(context)?;
        push(thread, context);
        Ok(())
    }

    /// `cuCtxPopCurrent`: the context that was current; 201 when there was none.
    pub fn cu_ctx_pop_current(&self) -> Result<usize, u32> {
        let core = self.core();
        let thread = core.enter(Call::CtxPopCurrent, 0)?;
        match thread.current.load(Ordering::Relaxed) {
            0 => Err(INVALID_CONTEXT),
            context => {
                pop(thread);
                Ok(context)
            }
        }
    }

    /// `cuCtxGetDevice`.
    pub fn cu_ctx_get_device(&self) -> Result<i32, u32> {
        let core = self.core();
        let thread = core.enter(Call::CtxGetDevice, 0)?;
        let state = core.state.lock();
        let context = core.current_context(&state, thread)?;
        Ok(state.contexts[context.index].device)
    }

    /// `cuCtxGetApiVersion`: 3020; a way to ask whether a context is alive.
    pub fn cu_ctx_get_api_version(&self, context: usize) -> Result<u32, u32> {
        let core = self.core();
        let thread = core.enter(Call::CtxGetApiVersion, 0)?;
        let asked = if context == 0 { thread.current.load(Ordering::Relaxed) } else { context };
        core.state.lock().live_context(asked)?;
        Ok(3020)
    }

    /// `cuCtxGetId`: a number that no other context ever has, also none that has the same handle later.
    pub fn cu_ctx_get_id(&self, context: usize) -> Result<u64, u32> {
        let core = self.core();
        let thread = core.enter(Call::CtxGetId, 0)?;
        let asked = if context == 0 { thread.current.load(Ordering::Relaxed) } else { context };
        let found = core.state.lock().live_context(asked)?;
        Ok((core.instance << 32) + found.epoch)
    }

    /// `cuThreadExchangeStreamCaptureMode`: sets the thread's mode (0 global, 1 thread-local, 2 relaxed), gives the old one.
    pub fn cu_thread_exchange_stream_capture_mode(&self, mode: u32) -> Result<u32, u32> {
        let core = self.core();
        let thread = core.count(Call::ThreadExchangeCaptureMode, 0)?;
        self.check_initialised()?;
        if mode > 2 {
            return Err(INVALID_VALUE);
        }
        thread.mode_was_refused.store(false, Ordering::Relaxed);
        // Only the thread itself changes its mode.
        let old = thread.capture_mode.load(Ordering::Relaxed);
        thread.capture_mode.store(mode, Ordering::Relaxed);
        Ok(old)
    }

    /// A context with a sticky error can still be bound; a dead one cannot.
    fn check_bindable(&self, context: usize) -> Result<(), u32> {
        let core = self.core();
        let state = core.state.lock();
        match state.live_context(context) {
            Err(INVALID_CONTEXT) => Err(INVALID_CONTEXT),
            Err(super::codes::CONTEXT_IS_DESTROYED) => Err(super::codes::CONTEXT_IS_DESTROYED),
            _ => Ok(()),
        }
    }
}

pub(super) fn push(thread: &Thread, context: usize) {
    thread.below.lock().push(thread.current.swap(context, Ordering::Relaxed));
}

pub(super) fn pop(thread: &Thread) {
    let below = thread.below.lock().pop().unwrap_or(0);
    thread.current.store(below, Ordering::Relaxed);
}
