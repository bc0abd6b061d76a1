//! A copy to the device from any memory, whoever page-locked it.
#![allow(unsafe_code)] // Enqueues copies by cudarc's raw functions.

use crate::driver::exit::Visit;
use crate::error::{CallError, Error};
use crate::regions;
use crate::report::say;
use crate::sync::fixed::Mutex;
use cudarc::driver::sys::{
    CUresult, CUstreamCaptureMode, CUstreamCaptureStatus, cuThreadExchangeStreamCaptureMode,
};
use cudarc::driver::{CudaStream, DevicePtrMut, result};
use std::collections::BTreeSet;
use std::panic::Location;
use std::sync::Arc;

/// Copies all of `src` to the start of `dst`, from memory of any kind.
///
/// From ordinary memory this is the ordinary asynchronous copy, which has read its source when it returns.
/// From page-locked memory such a copy would return at once and read later, so code that was right until
/// somebody pinned its buffer would put wrong bytes on the device: here it waits for the stream before it
/// returns, and warns once for each place it is called from. (A `PinnedBuffer` knows its uses and needs no such
/// wait: copy from it with `copy_to`, or with cudarc's `memcpy_htod` and a view.) A source that crosses the edge
/// of a page-locked region, which the driver refuses, is copied in pieces.
///
/// So pinning a buffer somewhere can slow a forgotten copy, never corrupt it. On a stream that captures there is
/// nothing to wait for: a replay of the graph reads the source then, whatever memory it is.
///
/// # Errors
///
/// [`Error::Range`] when `dst` is shorter than `src`, [`Error::Driver`].
#[track_caller]
pub fn copy_h2d_async<D: DevicePtrMut<u8> + ?Sized>(
    stream: &Arc<CudaStream>,
    src: &[u8],
    dst: &mut D,
) -> Result<(), Error> {
    let caller = Location::caller();
    let room = dst.len();
    if room < src.len() {
        return Err(Error::Range { start: 0, end: src.len(), len: room });
    }
    if src.is_empty() {
        return Ok(());
    }
    // cudarc's calls are made for us here, so they end with ours when the process exits.
    let _inside = Visit::for_call("cuCtxSetCurrent")?;
    let pieces = regions::pieces(src);
    stream.context().bind_to_thread().map_err(|error| named("cuCtxSetCurrent", error))?;
    let (address, _event_of_dst) = dst.device_ptr_mut(stream);
    let mut copied = Ok(());
    for piece in pieces.iter().map(|piece| piece.range.clone()) {
        let target = address + piece.start as u64;
        // SAFETY: the destination has room for the whole source. The source is borrowed for the call; from
        // pageable memory it is read by its end, and from page-locked memory before the synchronisation ends.
        let enqueued = unsafe { result::memcpy_htod_async(target, &src[piece], stream.cu_stream()) };
        copied = enqueued.map_err(|error| named("cuMemcpyHtoDAsync_v2", error));
        if copied.is_err() {
            break;
        }
    }
    // Asked again: somebody may have pinned it since, before the copy was enqueued.
    let pinned = pieces.iter().any(|piece| piece.pinned) || regions::covering(src) != regions::Coverage::None;
    // SAFETY: the stream is alive while it is borrowed.
    let capturing = || unsafe { result::stream::is_capturing(stream.cu_stream()) };
    if pinned
        && !matches!(capturing(), Ok(status) if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    {
        warn_once(caller, src.len());
        // Also after an error: an earlier piece may be under way.
        // SAFETY: the stream is alive while it is borrowed.
        let synchronize = || unsafe { result::stream::synchronize(stream.cu_stream()) };
        let synchronized = in_relaxed_mode(synchronize);
        copied = copied.and(synchronized.map_err(|error| named("cuStreamSynchronize", error)));
    }
    copied
}

/// A wait for a stream that captures nothing is refused in a thread's default mode, and breaks the capture, while
/// another stream captures.
fn in_relaxed_mode<R>(action: impl FnOnce() -> R) -> R {
    let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: cuThreadExchangeStreamCaptureMode reads and writes one enum.
    let changed = unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) };
    let result = action();
    if changed == CUresult::CUDA_SUCCESS {
        // SAFETY: as above; it is the mode that the thread had.
        let _ = unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) };
    }
    result
}

fn named(call: &'static str, error: cudarc::driver::DriverError) -> Error {
    CallError::new(call, error.0 as u32).into()
}

fn warn_once(caller: &'static Location<'static>, bytes: usize) {
    static WARNED: Mutex<BTreeSet<(&'static str, u32, u32)>> = Mutex::new(BTreeSet::new());
    if WARNED.lock().insert((caller.file(), caller.line(), caller.column())) {
        say!(
            WARN,
            "untracked_copy",
            %caller,
            bytes,
            "a copy from page-locked memory that no guard tracks waits for its stream; copy from a PinnedBuffer \
             or a Pinned to keep it asynchronous"
        );
    }
}
