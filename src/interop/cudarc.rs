//! cudarc's streams, as what `record_last_use` takes.
//!
//! Only plain getters of cudarc are called. Anything that goes through `CudaContext::check_err` (which
//! `bind_to_thread` does) takes an error that another thread of the application left there, so that the
//! application never sees it.

use super::cudarc_library::identity_of_streams;
use crate::driver::exit::Visit;
use crate::driver::{ContextHandle, Driver, KeepAlive, StreamHandle};
use crate::stream::{Keep, StreamRef, Watched, sealed::AsStreamRef};
use cudarc::driver::CudaStream;
use std::fmt;
use std::sync::{Arc, Weak};

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
            driver: identity_of_streams(),
            context: ContextHandle(context.cu_ctx() as usize),
            stream: StreamHandle(self.cu_stream() as usize),
            keep,
            watch: None,
        })
    }

    fn watched(this: &Arc<Self>) -> Option<Arc<dyn Watched>> {
        Some(Arc::new(WeakStream(Arc::downgrade(this))))
    }
}

/// A stream of cudarc's that is not kept alive. While it is watched, its address is no other stream's.
struct WeakStream(Weak<CudaStream>);

impl Watched for WeakStream {
    fn captures(&self, driver: &Driver) -> Option<bool> {
        // Alive during the question. Should this be its last owner by then, cudarc destroys it here as it would there:
        // before the visit ends, so that a process which exits meanwhile waits for that too.
        let _inside = Visit::begin()?;
        let stream = self.0.upgrade()?;
        let capturing = driver.api().is_capturing(StreamHandle(stream.cu_stream() as usize));
        // No "yes": a lost device must not look like a capture.
        Some(capturing.unwrap_or(false))
    }

    fn is_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

impl fmt::Debug for WeakStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakStream")
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::driver::DriverIdentity;
    use crate::driver::cuda_tests::{in_child_of_crate, is_child};
    use cudarc::driver::{CudaContext, DriverError, sys::CUresult};
    use fake_cuda::control::Control;

    #[test]
    fn a_stream_is_looked_at_without_a_driver_call_and_without_taking_an_error() {
        in_child_of_crate("interop::cudarc::tests::child_that_looks_at_streams", &[]);
    }

    #[test]
    #[ignore = "run by a_stream_is_looked_at_without_a_driver_call_and_without_taking_an_error"]
    fn child_that_looks_at_streams() {
        if !is_child() {
            return;
        }
        let fake = Control::load().unwrap();
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        // The first look asks, once, which library cudarc calls.
        stream.with_stream_ref(|seen| assert_eq!(seen.driver, DriverIdentity::CUDA));
        context.record_err(Err::<(), _>(DriverError(CUresult::CUDA_ERROR_LAUNCH_FAILED)));
        fake.reset_calls();
        let owners = Arc::strong_count(&context);
        stream.with_stream_ref(|seen| {
            assert_eq!(seen.driver, DriverIdentity::CUDA);
            assert_eq!(seen.context, ContextHandle(context.cu_ctx() as usize));
            assert_eq!(seen.stream, StreamHandle(stream.cu_stream() as usize));
            assert!(matches!(seen.keep, Keep::Primary(device) if device == context.cu_device()));
        });
        context.default_stream().with_stream_ref(|seen| assert_eq!(seen.stream, StreamHandle(0)));
        assert_eq!(fake.total_calls(), 0);
        assert_eq!(Arc::strong_count(&context), owners);
        let kept = context.check_err().unwrap_err();
        assert_eq!(kept.0, CUresult::CUDA_ERROR_LAUNCH_FAILED, "the application's error is still there");
    }
}
