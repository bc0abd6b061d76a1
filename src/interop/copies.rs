//! Copies that enqueue and record by themselves: exact, and asynchronous for the caller.
#![allow(unsafe_code)] // Enqueues copies by cudarc's raw functions.

use crate::buffer::PinnedBuffer;
use crate::contexts::with_current;
use crate::driver::exit::Visit;
use crate::driver::{ContextHandle, Driver, StreamHandle};
use crate::error::{CallError, Error};
use crate::stream::sealed::AsStreamRef;
use crate::views::bytes_of;
use crate::waiting::Wait;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DriverError, result};
use std::future::{Future, IntoFuture};
use std::ops::RangeBounds;
use std::pin::Pin;
use std::sync::Arc;

impl PinnedBuffer {
    /// Enqueues a copy of a range to the device (`cuMemcpyHtoDAsync`) and records it: the pool waits for exactly
    /// this copy. The buffer may be read, and copied from again, at once; a write waits.
    ///
    /// # Errors
    ///
    /// [`Error::Range`] when the range does not lie in the buffer or the destination is shorter than it,
    /// [`Error::ForeignStream`], [`Error::Capturing`] while the stream captures (nothing is enqueued then),
    /// [`Error::ForkedChild`], [`Error::Driver`], also with an error that cudarc had stored in the context, as every copy of cudarc's
    /// does. The buffer stays safe after an error: if the copy may have been enqueued, it waits for its context.
    pub fn copy_to<D: DevicePtrMut<u8> + ?Sized>(
        &mut self,
        range: impl RangeBounds<usize>,
        stream: &Arc<CudaStream>,
        dst: &mut D,
    ) -> Result<(), Error> {
        let range = bytes_of::<u8>(self.len(), range)?;
        let room = dst.len();
        if room < range.len() {
            return Err(Error::Range { start: 0, end: range.len(), len: room });
        }
        let driver = self.driver().clone();
        self.check_driver(stream)?;
        let source = &self[range];
        if source.is_empty() {
            return Ok(());
        }
        let enqueued = enqueue(&driver, stream, || {
            let (address, _event_of_dst) = dst.device_ptr_mut(stream);
            // SAFETY: the destination is device memory of at least the source's length. The source stays
            // valid and unchanged until the copy is done: the guard is recorded below, and on an error marked.
            unsafe { result::memcpy_htod_async(address, source, stream.cu_stream()) }
        })?;
        self.after_enqueueing("cuMemcpyHtoDAsync_v2", enqueued, stream, Direction::ToDevice)
    }

    /// As [`copy_to`](Self::copy_to), and gives the buffer back to its pool, so that nobody can write into memory
    /// in flight.
    ///
    /// # Errors
    ///
    /// As [`copy_to`](Self::copy_to), with the buffer.
    #[allow(clippy::result_large_err)] // The buffer is what the caller wants back.
    pub fn upload<D: DevicePtrMut<u8> + ?Sized>(
        mut self,
        range: impl RangeBounds<usize>,
        stream: &Arc<CudaStream>,
        dst: &mut D,
    ) -> Result<(), (Error, PinnedBuffer)> {
        match self.copy_to(range, stream, dst) {
            Ok(()) => Ok(()),
            Err(error) => Err((error, self)),
        }
    }

    /// Enqueues a copy of all of `src` into the start of the buffer (`cuMemcpyDtoHAsync`) and records it.
    ///
    /// Waits first for the uses noted before, which the copy would overwrite.
    ///
    /// # Errors
    ///
    /// As [`copy_to`](Self::copy_to), with the buffer; [`Error::Range`] when the buffer is shorter than `src`.
    #[allow(clippy::result_large_err)] // The buffer is what the caller wants back.
    pub fn download<S: DevicePtr<u8> + ?Sized>(
        mut self,
        stream: &Arc<CudaStream>,
        src: &S,
    ) -> Result<Pending, (Error, PinnedBuffer)> {
        match self.enqueue_download(stream, src) {
            Ok(()) => Ok(Pending { buffer: self }),
            Err(error) => Err((error, self)),
        }
    }

    fn enqueue_download<S: DevicePtr<u8> + ?Sized>(
        &mut self,
        stream: &Arc<CudaStream>,
        src: &S,
    ) -> Result<(), Error> {
        // By the source's length: the buffer's is a power of two, which would be read past the source's end.
        let len = src.len();
        if self.len() < len {
            return Err(Error::Range { start: 0, end: len, len: self.len() });
        }
        let driver = self.driver().clone();
        self.check_driver(stream)?;
        if len == 0 {
            return Ok(());
        }
        let destination = &mut self[..len];
        let enqueued = enqueue(&driver, stream, || {
            let (address, _event_of_src) = src.device_ptr(stream);
            // SAFETY: the source is device memory of exactly the destination's length. Nobody reads or writes
            // the destination until the copy is done: the guard is inside `Pending`, and recorded or marked.
            unsafe { result::memcpy_dtoh_async(destination, address, stream.cu_stream()) }
        })?;
        self.after_enqueueing("cuMemcpyDtoHAsync_v2", enqueued, stream, Direction::ToHost)
    }

    fn check_driver(&self, stream: &Arc<CudaStream>) -> Result<(), Error> {
        if self.home().fork.is_child() {
            return Err(Error::ForkedChild);
        }
        let pool = self.driver().api().identity();
        stream.with_stream_ref(|stream| match stream.driver == pool {
            true => Ok(()),
            false => Err(pool.refusal_by("a copy", stream.driver)),
        })
    }

    /// Records the copy; where it is not known whether it was enqueued, the buffer waits for its context.
    fn after_enqueueing(
        &mut self,
        call: &'static str,
        enqueued: Result<(), DriverError>,
        stream: &Arc<CudaStream>,
        direction: Direction,
    ) -> Result<(), Error> {
        if direction == Direction::ToHost {
            self.device_writes();
        }
        match enqueued {
            Ok(()) => self.record_last_use(stream),
            Err(error) => {
                stream.with_stream_ref(|stream| _ = self.note(stream, direction == Direction::ToHost));
                Err(CallError::new(call, error.0 as u32).into())
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    ToDevice,
    ToHost,
}

/// Enqueues with the stream's context current, and the caller's restored afterwards. Refuses beforehand where the
/// copy could not be recorded, or could not be ordered after other work on its device memory.
fn enqueue(
    driver: &Driver,
    stream: &Arc<CudaStream>,
    copy: impl FnOnce() -> Result<(), DriverError>,
) -> Result<Result<(), DriverError>, Error> {
    let context = ContextHandle(stream.context().cu_ctx() as usize);
    // cudarc's calls are made for us here, so they end with ours when the process exits.
    let _inside = Visit::for_call("cuCtxSetCurrent")?;
    with_current(driver, context, || {
        // It gives out an error that is stored in the context, as before every copy of cudarc's own: with one
        // stored, cudarc would skip the waits that order the copy after earlier work on the device memory.
        stream
            .context()
            .bind_to_thread()
            .map_err(|error| CallError::new("cuCtxSetCurrent", error.0 as u32))?;
        if driver.api().is_capturing(StreamHandle(stream.cu_stream() as usize))? {
            return Err(Error::Capturing);
        }
        Ok(copy())
    })?
}

/// A copy from the device that is under way, with the buffer that it goes to.
///
/// Wait for it with [`wait`](Self::wait), or await it. Dropping it gives the buffer back to the pool, which
/// waits for the copy.
#[derive(Debug)]
#[must_use = "the bytes are there when it has been waited for"]
pub struct Pending {
    buffer: PinnedBuffer,
}

impl Pending {
    /// Whether the copy is done, without waiting.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver cannot say.
    pub fn is_done(&self) -> Result<bool, Error> {
        self.buffer.is_quiescent()
    }

    /// Blocks until the copy is done, and gives the buffer.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver cannot say, with the buffer.
    #[allow(clippy::result_large_err)] // The buffer is what the caller wants back.
    pub fn wait(self) -> Result<PinnedBuffer, (Error, PinnedBuffer)> {
        match self.buffer.wait() {
            Ok(()) => Ok(self.buffer),
            Err(error) => Err((error, self.buffer)),
        }
    }
}

impl IntoFuture for Pending {
    type Output = Result<PinnedBuffer, (Error, PinnedBuffer)>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let done: Wait<'_> = self.buffer.done();
            match done.await {
                Ok(()) => Ok(self.buffer),
                Err(error) => Err((error, self.buffer)),
            }
        })
    }
}
