//! A stream of any other binding, by its raw handles.
#![allow(unsafe_code)] // The constructor is an unsafe promise of the caller's.

use crate::driver::{ContextHandle, DriverIdentity, StreamHandle, runtime};
use crate::stream::sealed::AsStreamRef;
use crate::stream::{Keep, StreamRef};
use std::ffi::c_void;

/// A `CUstream` and its `CUcontext` from any binding, for `record_last_use`.
#[derive(Debug, Clone, Copy)]
pub struct RawStream {
    context: Home,
    stream: usize,
}

/// Where a stream lives.
#[derive(Debug, Clone, Copy)]
enum Home {
    /// A `CUcontext`.
    Context(usize),
    /// A device of the runtime.
    Device(i32),
}

// SAFETY: two numbers; CUDA's handles may be used from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// Takes a context (`CUcontext`, not null) and a stream (`CUstream`; null is the context's null stream,
    /// 1 the legacy stream, 2 the per-thread default stream).
    ///
    /// # Safety
    ///
    /// * `context` is a live context of the libcuda that the pool uses, and `stream` a live stream of that
    ///   context, whenever the value is passed to a pool.
    /// * The context stays alive until the pool that saw it is shut down, or until `PinnedPool::shutdown`
    ///   has returned: the pool keeps events, and perhaps registrations, in it. (The stream may be
    ///   destroyed right after the call it was passed to.)
    pub unsafe fn new(context: *mut c_void, stream: *mut c_void) -> Self {
        Self { context: Home::Context(context as usize), stream: stream as usize }
    }

    /// Takes a device and a stream of the runtime (`cudaStream_t`; null is the device's null stream), for a pool
    /// whose driver is a runtime ([`DriverBuilder::runtime`](crate::driver::DriverBuilder::runtime)).
    ///
    /// # Safety
    ///
    /// * `stream` is a live stream of that device, in the libcudart that the pool uses, whenever the value is passed
    ///   to a pool.
    /// * `cudaDeviceReset` is not called for the device until [`PinnedPool::shutdown`](crate::PinnedPool::shutdown)
    ///   has returned: the pool keeps events and registrations there.
    /// * Where the process has no libcuda in use, every device on which work touches the pool's buffers is shown to
    ///   the pool before such a buffer is dropped.
    pub unsafe fn of_runtime(device: i32, stream: *mut c_void) -> Self {
        Self { context: Home::Device(device), stream: stream as usize }
    }
}

impl AsStreamRef for RawStream {
    fn with_stream_ref<R>(&self, look: impl FnOnce(&StreamRef<'_>) -> R) -> R {
        let (driver, context, keep) = match self.context {
            Home::Context(context) => (DriverIdentity::CUDA, ContextHandle(context), Keep::Caller),
            Home::Device(device) => {
                (DriverIdentity::RUNTIME, runtime::context_of_device(device), Keep::Primary(device))
            }
        };
        look(&StreamRef { driver, context, stream: StreamHandle(self.stream), keep, watch: None })
    }
}
