//! What `record_last_use` takes: a stream of cudarc, of the simulated device, or a raw one.

use crate::driver::{ContextHandle, DriverIdentity, KeepAlive, StreamHandle};

/// A stream on which a buffer's last use can be recorded.
///
/// Implemented for cudarc's `CudaStream` and `Arc<CudaStream>`, for the simulated device's stream, and
/// for [`RawStream`](crate::RawStream). Sealed: the pool trusts what it says about the context's lifetime.
pub trait AsStream: sealed::AsStreamRef {}

impl<T: sealed::AsStreamRef + ?Sized> AsStream for T {}

/// What the pool needs to know of a stream, for the duration of one call.
#[derive(Debug)]
pub struct StreamRef<'a> {
    pub(crate) driver: DriverIdentity,
    pub(crate) context: ContextHandle,
    pub(crate) stream: StreamHandle,
    /// Makes an owner of the context, called once per context that the pool has not seen.
    pub(crate) keep: Keep<'a>,
}

/// How a stream's context is kept alive for as long as the pool has an event or a registration in it.
pub(crate) enum Keep<'a> {
    /// It is the primary context of this device: the pool takes a retain of its own.
    #[cfg_attr(not(any(feature = "cudarc", feature = "sim")), allow(dead_code))]
    // there is only `RawStream` then
    Primary(i32),
    /// An owner can be had by calling this.
    #[allow(dead_code)] // Only streams of a binding with owned, non-primary contexts need it.
    Owner(&'a dyn Fn() -> KeepAlive),
    /// The caller promised to keep it alive ([`RawStream::new`]).
    Caller,
}

impl std::fmt::Debug for Keep<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Keep::Primary(_) => "Primary",
            Keep::Owner(_) => "Owner",
            Keep::Caller => "Caller",
        })
    }
}

pub(crate) mod sealed {
    /// Gives the pool a look at the stream; a callback, so that owners can be borrowed lazily.
    pub trait AsStreamRef {
        #[doc(hidden)]
        fn with_stream_ref<R>(&self, look: impl FnOnce(&super::StreamRef<'_>) -> R) -> R;
    }
}

impl<T: sealed::AsStreamRef> sealed::AsStreamRef for std::sync::Arc<T> {
    fn with_stream_ref<R>(&self, look: impl FnOnce(&StreamRef<'_>) -> R) -> R {
        (**self).with_stream_ref(look)
    }
}
