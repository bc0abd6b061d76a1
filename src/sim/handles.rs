//! Typed handles over the raw entry points: what an application holds.
//!
//! Making and dropping them is not counted among the calls and meets no faults, so that a test counts only what it
//! is about; copies and waits are counted.

use super::Sim;
use super::contexts::{pop, push};
use super::cuda::Cuda;
use super::driver::identity;
use crate::driver::{ContextHandle, Driver, StreamHandle};
use crate::stream::{Keep, StreamRef, Watch, Watched, sealed::AsStreamRef};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A retain of a device's primary context ([`Sim::context`]), or a context of its own ([`Sim::create_context`]). Clones
/// share it; the last one, and the last stream and buffer made from it, releases or destroys it.
#[derive(Clone)]
pub struct SimContext {
    retained: Arc<Retained>,
}

struct Retained {
    sim: Sim,
    device: i32,
    handle: usize,
    is_primary: bool,
}

/// A stream of the simulated device; destroyed at drop.
pub struct SimStream {
    context: SimContext,
    handle: usize,
    /// 0 for the default stream.
    id: u64,
}

/// Device memory of the simulated device; freed at drop.
pub struct SimBuffer {
    context: SimContext,
    address: u64,
    bytes: usize,
}

impl SimContext {
    /// # Panics
    /// When the device does not exist.
    pub(super) fn retain(sim: Sim, device: i32) -> Self {
        let retained = sim.cuda().core().retain_primary(device);
        let handle = retained.unwrap_or_else(|code| panic!("no simulated device {device}: {code}"));
        Self::new(Retained { sim, device, handle, is_primary: true })
    }

    /// # Panics
    /// When the device does not exist.
    pub(super) fn create(sim: Sim, device: i32) -> Self {
        let created = sim.cuda().core().create_context(0, device);
        let handle = created.unwrap_or_else(|code| panic!("no simulated device {device}: {code}"));
        Self::new(Retained { sim, device, handle, is_primary: false })
    }

    fn new(retained: Retained) -> Self {
        let context = Self { retained: Arc::new(retained) };
        context.bind();
        context
    }

    /// Ends the context now, and all that belongs to it, whoever uses it: `cuCtxDestroy`, or
    /// `cuDevicePrimaryCtxReset` for a primary one.
    pub fn end(&self) {
        let Retained { device, handle, is_primary, .. } = *self.retained;
        let core = self.cuda().core();
        // It fails only when the context has ended already.
        let _ = if is_primary { core.reset_primary(device) } else { core.destroy_context(handle) };
    }

    /// A new stream that does not synchronise with the default stream.
    pub fn stream(&self) -> SimStream {
        self.stream_with_flags(1)
    }

    /// A new stream that waits for earlier work of the legacy default stream, and the other way round.
    pub fn blocking_stream(&self) -> SimStream {
        self.stream_with_flags(0)
    }

    /// The legacy default stream of this context (handle 0).
    pub fn default_stream(&self) -> SimStream {
        SimStream { context: self.clone(), handle: 0, id: 0 }
    }

    /// Makes this the current context of the calling thread (`cuCtxSetCurrent`).
    pub fn bind(&self) {
        let thread = self.cuda().core().threads.current();
        thread.current.store(self.retained.handle, Ordering::Relaxed);
    }

    /// Device memory, filled with a pattern.
    ///
    /// # Panics
    /// When the device has not enough memory, or for zero bytes.
    pub fn alloc(&self, bytes: usize) -> SimBuffer {
        let core = self.cuda().core();
        let mut state = core.state.lock();
        let context = state.live_context(self.retained.handle);
        let address = context.and_then(|context| core.allocate(&mut state, context, bytes));
        drop(state);
        match address {
            Ok(address) => SimBuffer { context: self.clone(), address, bytes },
            Err(code) => panic!("{bytes} bytes of simulated device memory: {code}"),
        }
    }

    /// The `CUcontext` as a number.
    pub fn handle(&self) -> usize {
        self.retained.handle
    }

    /// The device ordinal.
    pub fn device(&self) -> i32 {
        self.retained.device
    }

    /// Breaks the context: from now on every call in it fails with `code`, for example 700, and its
    /// unfinished work is never executed.
    pub fn break_with(&self, code: u32) {
        // A context that is gone already cannot be broken any further.
        let _ = self.cuda().core().break_context(self.retained.handle, code);
    }

    fn stream_with_flags(&self, flags: u32) -> SimStream {
        let core = self.cuda().core();
        let mut state = core.state.lock();
        let context = state.live_context(self.retained.handle);
        let created = context.map(|context| core.create_stream(&mut state, context, flags));
        let id = created.ok().and_then(|handle| state.stream_id(handle)).unwrap_or_default();
        drop(state);
        match created {
            Ok(handle) => SimStream { context: self.clone(), handle, id },
            Err(code) => panic!("a stream in a context that is gone: {code}"),
        }
    }

    pub(super) fn cuda(&self) -> &Cuda {
        self.retained.sim.cuda()
    }

    /// Makes a call with this context current, and brings back the one that was.
    fn with_context<R>(&self, call: impl FnOnce(&Cuda) -> R) -> R {
        let thread = self.cuda().core().threads.current();
        push(thread, self.retained.handle);
        let result = call(self.cuda());
        pop(thread);
        result
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        let core = self.sim.cuda().core();
        // It fails only after a test ended or released the context itself.
        let _ = if self.is_primary {
            core.release_primary(self.device)
        } else {
            core.destroy_context(self.handle)
        };
    }
}

impl SimStream {
    /// From now on the stream executes nothing, until [`release`](Self::release).
    pub fn hold(&self) {
        self.set_held(true);
    }

    /// Ends [`hold`](Self::hold).
    pub fn release(&self) {
        self.set_held(false);
    }

    /// Waits for the stream (`cuStreamSynchronize`). Blocks while it is held.
    ///
    /// # Panics
    /// When the call fails.
    pub fn synchronize(&self) {
        let done = self.with_context(|cuda| cuda.cu_stream_synchronize(self.handle));
        done.unwrap_or_else(|code| panic!("cuStreamSynchronize failed: {code}"));
    }

    /// The `CUstream` as a number.
    pub fn handle(&self) -> usize {
        self.handle
    }

    /// The context that it belongs to.
    pub fn context(&self) -> &SimContext {
        &self.context
    }

    pub(super) fn with_context<R>(&self, call: impl FnOnce(&Cuda) -> R) -> R {
        self.context.with_context(call)
    }

    fn set_held(&self, is_held: bool) {
        self.context.with_context(|cuda| cuda.core().set_held(self.handle, is_held));
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        if self.handle != 0 {
            let core = self.context.cuda().core();
            let mut state = core.state.lock();
            // When the context has ended, the stream is gone already, and its handle may be another stream's.
            if state.stream_id(self.handle) == Some(self.id) {
                let _ = core.destroy_stream(&mut state, self.handle);
            }
            drop(state);
            core.run_destructors();
            core.work_became_runnable();
        }
    }
}

impl SimBuffer {
    /// What device memory holds now. Does not synchronise, so it shows whether a copy was executed.
    ///
    /// # Panics
    /// When the context was ended meanwhile.
    pub fn read(&self) -> Vec<u8> {
        let range = self.context.cuda().core().state.lock().device_range(self.address, self.bytes);
        match range {
            Ok(range) => range.read(<[u8]>::to_vec),
            Err(code) => panic!("device memory is gone: {code}"),
        }
    }

    /// Whether device memory begins with these bytes now; as [`read`](Self::read), without a copy.
    ///
    /// # Panics
    /// When the context was ended meanwhile.
    pub fn starts_with(&self, bytes: &[u8]) -> bool {
        let range = self.context.cuda().core().state.lock().device_range(self.address, self.bytes);
        match range {
            Ok(range) => range.read(|contents| contents.starts_with(bytes)),
            Err(code) => panic!("device memory is gone: {code}"),
        }
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes; it never is.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The `CUdeviceptr`.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for SimBuffer {
    fn drop(&mut self) {
        self.context.cuda().core().state.lock().device_memory.remove(&self.address);
    }
}

impl AsStreamRef for SimStream {
    fn with_stream_ref<R>(&self, look: impl FnOnce(&StreamRef<'_>) -> R) -> R {
        let start = || -> Option<Arc<dyn Watched>> {
            let cuda = self.context.cuda().clone();
            Some(Arc::new(WatchedStream { cuda, handle: self.handle, id: self.id }))
        };
        look(&StreamRef {
            driver: identity(self.context.cuda()),
            context: ContextHandle(self.context.handle()),
            stream: StreamHandle(self.handle),
            keep: match self.context.retained.is_primary {
                true => Keep::Primary(self.context.device()),
                false => Keep::Caller,
            },
            watch: Some(Watch { key: self.id as usize, start: &start }),
        })
    }
}

/// A stream that may be destroyed, and whose handle may be another stream's by then.
#[derive(Debug)]
struct WatchedStream {
    cuda: Cuda,
    handle: usize,
    id: u64,
}

impl Watched for WatchedStream {
    fn captures(&self, driver: &Driver) -> Option<bool> {
        if self.is_gone() {
            return None;
        }
        Some(driver.api().is_capturing(StreamHandle(self.handle)).unwrap_or(false))
    }

    fn is_gone(&self) -> bool {
        self.cuda.core().state.lock().stream_id(self.handle) != Some(self.id)
    }
}

impl fmt::Debug for SimContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimContext").field("device", &self.device()).finish_non_exhaustive()
    }
}

impl fmt::Debug for SimStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimStream({:#x})", self.handle)
    }
}

impl fmt::Debug for SimBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimBuffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
