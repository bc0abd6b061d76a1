//! cudarc's streams, as what `record_last_use` takes.
//!
//! Only plain getters of cudarc are called. Anything that goes through `CudaContext::check_err` (which
//! `bind_to_thread` does) takes an error that another thread of the application left there, so that the
//! application never sees it.

use crate::driver::{ContextHandle, KeepAlive, StreamHandle, cuda};
use crate::stream::{Keep, StreamRef, sealed::AsStreamRef};
use cudarc::driver::CudaStream;

impl AsStreamRef for CudaStream {
    fn with_stream_ref<R>(&self, look: impl FnOnce(&StreamRef<'_>) -> R) -> R {
        let context = self.context();
        let owner = || -> KeepAlive { context.clone() };
        let keep = match context.is_primary() {
            true => Keep::Primary(context.cu_device()),
            // A context that cudarc created is destroyed with its last `Arc`; the pool takes one.
            false => Keep::Owner(&owner),
        };
        look(&StreamRef {
            driver: cuda::IDENTITY,
            context: ContextHandle(context.cu_ctx() as usize),
            stream: StreamHandle(self.cu_stream() as usize),
            keep,
        })
    }
}
