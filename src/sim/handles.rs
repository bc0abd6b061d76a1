//! Typed handles over the raw entry points: what an application holds.
#![allow(unsafe_code)]

use super::Sim;
use crate::stream::{StreamRef, sealed::AsStreamRef};

/// A retained primary context, bound to the thread that made it; released at drop.
#[derive(Clone)]
pub struct SimContext {
    _sim: Sim,
}

/// A stream of the simulated device.
pub struct SimStream {
    _sim: Sim,
}

/// Device memory of the simulated device; freed at drop.
pub struct SimBuffer {
    _sim: Sim,
}

#[allow(unused_variables)]
impl SimContext {
    /// A new non-blocking stream.
    pub fn stream(&self) -> SimStream {
        todo!()
    }
    /// The legacy default stream of this context (handle 0).
    pub fn default_stream(&self) -> SimStream {
        todo!()
    }
    /// Makes this the current context of the calling thread.
    pub fn bind(&self) {
        todo!()
    }
    /// Device memory.
    pub fn alloc(&self, bytes: usize) -> SimBuffer {
        todo!()
    }
    /// The `CUcontext` as a number.
    pub fn handle(&self) -> usize {
        todo!()
    }
    /// The device ordinal.
    pub fn device(&self) -> i32 {
        todo!()
    }
}

#[allow(unused_variables)]
impl SimStream {
    /// From now on the stream executes nothing.
    pub fn hold(&self) {
        todo!()
    }
    /// Ends [`hold`](Self::hold).
    pub fn release(&self) {
        todo!()
    }
    /// `cuStreamSynchronize`.
    pub fn synchronize(&self) {
        todo!()
    }
    /// The `CUstream` as a number.
    pub fn handle(&self) -> usize {
        todo!()
    }
    /// `cuMemcpyHtoDAsync`.
    ///
    /// # Safety
    /// `src` stays valid until the stream has executed the copy.
    pub unsafe fn copy_to_device(&self, src: &[u8], dst: &SimBuffer) {
        todo!()
    }
    /// `cuMemcpyDtoHAsync`.
    ///
    /// # Safety
    /// `dst` stays valid, and nothing else uses it, until the stream has executed the copy.
    pub unsafe fn copy_to_host(&self, src: &SimBuffer, dst: *mut [u8]) {
        todo!()
    }
}

#[allow(clippy::len_without_is_empty)]
impl SimBuffer {
    /// What device memory holds now; does not synchronise.
    pub fn read(&self) -> Vec<u8> {
        todo!()
    }
    /// Size in bytes.
    pub fn len(&self) -> usize {
        todo!()
    }
    /// The `CUdeviceptr`.
    pub fn address(&self) -> u64 {
        todo!()
    }
}

impl AsStreamRef for SimStream {
    fn with_stream_ref<R>(&self, _look: impl FnOnce(&StreamRef<'_>) -> R) -> R {
        todo!()
    }
}
