//! What `record_last_use` takes: a stream of cudarc, of the simulated device, or a raw one.

use crate::driver::{ContextHandle, Driver, DriverIdentity, KeepAlive, StreamHandle};
use std::sync::Arc;

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
    /// How the stream can be asked later; `None` where it could be gone without anybody knowing.
    pub(crate) watch: Option<Watch<'a>>,
}

/// A stream that can be asked whether it captures, for as long as it exists, and that is not kept alive by that.
#[derive(Clone, Copy)]
pub(crate) struct Watch<'a> {
    /// No two streams have the same while one of them is watched.
    pub(crate) key: usize,
    /// What to keep of it, if anything can be kept.
    pub(crate) start: &'a dyn Fn() -> Option<Arc<dyn Watched>>,
}

impl std::fmt::Debug for Watch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Watch({:#x})", self.key)
    }
}

/// What is kept of a stream that is watched.
#[doc(hidden)]
pub trait Watched: Send + Sync + std::fmt::Debug {
    /// Whether it captures just now; `None` when it is gone.
    #[doc(hidden)]
    fn captures(&self, driver: &Driver) -> Option<bool>;

    /// Whether it is gone; asks no driver.
    #[doc(hidden)]
    fn is_gone(&self) -> bool;
}

/// How a stream's context is kept alive for as long as the pool has an event or a registration in it.
#[derive(Clone, Copy)]
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

        /// What is kept of a shared stream of this kind, so that it can be asked later.
        #[doc(hidden)]
        fn watched(_this: &std::sync::Arc<Self>) -> Option<std::sync::Arc<dyn super::Watched>>
        where
            Self: Sized,
        {
            None
        }
    }
}

impl<T: sealed::AsStreamRef> sealed::AsStreamRef for Arc<T> {
    fn with_stream_ref<R>(&self, look: impl FnOnce(&StreamRef<'_>) -> R) -> R {
        (**self).with_stream_ref(|stream| {
            let start = || T::watched(self);
            let shared = Watch { key: Arc::as_ptr(self) as usize, start: &start };
            look(&StreamRef { watch: stream.watch.or(Some(shared)), ..*stream })
        })
    }
}
