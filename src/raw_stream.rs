//! A stream of any other binding, by its raw handles.
#![allow(unsafe_code)] // The constructor is an unsafe promise of the caller's.

use crate::driver::{ContextHandle, DriverIdentity, StreamHandle};
use crate::stream::sealed::AsStreamRef;
use crate::stream::{Keep, StreamRef};
use std::ffi::c_void;

/// A `CUstream` and its `CUcontext` from any binding, for `record_last_use`.
#[derive(Debug, Clone, Copy)]
pub struct RawStream {
    context: usize,
    stream: usize,
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
        Self { context: context as usize, stream: stream as usize }
    }
}

impl AsStreamRef for RawStream {
    fn with_stream_ref<R>(&self, look: impl FnOnce(&StreamRef<'_>) -> R) -> R {
        look(&StreamRef {
            driver: DriverIdentity::CUDA,
            context: ContextHandle(self.context),
            stream: StreamHandle(self.stream),
            keep: Keep::Caller,
        })
    }
}
