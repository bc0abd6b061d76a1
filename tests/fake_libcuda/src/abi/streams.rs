//! Streams, events, host functions, and what there is of stream capture.

use super::{INVALID_VALUE, exports, out, out_optional};
use std::ffi::c_void;

const NOT_SUPPORTED: u32 = 801;

/// `CUhostFn`; NULL is an error.
type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;

exports! { functions:
    fn cuStreamCreate(stream: *mut usize, flags: u32) |cuda| out(stream, || cuda.cu_stream_create(flags));
    fn cuStreamCreateWithPriority(stream: *mut usize, flags: u32, priority: i32) |cuda|
        out(stream, || cuda.cu_stream_create_with_priority(flags, priority));
    fn cuStreamDestroy_v2(stream: usize) |cuda| cuda.cu_stream_destroy(stream);
    fn cuStreamQuery(stream: usize) |cuda| cuda.cu_stream_query(stream);
    fn cuStreamSynchronize(stream: usize) |cuda| cuda.cu_stream_synchronize(stream);
    fn cuStreamWaitEvent(stream: usize, event: usize, flags: u32) |cuda|
        cuda.cu_stream_wait_event(stream, event, flags);
    fn cuStreamGetId(stream: usize, id: *mut u64) |cuda| out(id, || cuda.cu_stream_get_id(stream));
    fn cuStreamGetCtx(stream: usize, context: *mut usize) |cuda| out(context, || cuda.cu_stream_get_ctx(stream));

    fn cuStreamIsCapturing(stream: usize, status: *mut u32) |cuda|
        out(status, || cuda.cu_stream_is_capturing(stream));
    fn cuStreamGetCaptureInfo_v2(stream: usize, status: *mut u32, id: *mut u64) |cuda| {
        out_optional(id, 0);
        out(status, || cuda.cu_stream_is_capturing(stream))
    };
    fn cuStreamGetCaptureInfo_v3(stream: usize, status: *mut u32, id: *mut u64) |cuda| {
        out_optional(id, 0);
        out(status, || cuda.cu_stream_is_capturing(stream))
    };
    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) |cuda| {
        if mode.is_null() {
            return Err(INVALID_VALUE);
        }
        let wanted = mode.read();
        out(mode, || cuda.cu_thread_exchange_stream_capture_mode(wanted))
    };
    // The simulated device cannot capture yet.
    fn cuStreamBeginCapture(_stream: usize, _mode: u32) |_| Err(NOT_SUPPORTED);
    fn cuStreamBeginCapture_v2(_stream: usize, _mode: u32) |_| Err(NOT_SUPPORTED);
    fn cuStreamEndCapture(_stream: usize, _graph: *mut usize) |_| Err(NOT_SUPPORTED);

    fn cuEventCreate(event: *mut usize, flags: u32) |cuda| out(event, || cuda.cu_event_create(flags));
    fn cuEventRecord(event: usize, stream: usize) |cuda| cuda.cu_event_record(event, stream);
    fn cuEventQuery(event: usize) |cuda| cuda.cu_event_query(event);
    fn cuEventSynchronize(event: usize) |cuda| cuda.cu_event_synchronize(event);
    fn cuEventDestroy_v2(event: usize) |cuda| cuda.cu_event_destroy(event);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) |cuda|
        out(milliseconds, || cuda.cu_event_elapsed_time(start, end));
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: usize, end: usize) |cuda|
        out(milliseconds, || cuda.cu_event_elapsed_time(start, end));

    fn cuLaunchHostFunc(stream: usize, function: HostFunction, data: *mut c_void) |cuda| {
        let Some(function) = function else { return Err(INVALID_VALUE) };
        let call = HostCall { function, data };
        cuda.cu_launch_host_func(stream, Box::new(move || call.run()))
    };
}

/// A host function with its argument, on its way to the device's thread.
struct HostCall {
    function: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
}

// SAFETY: cuLaunchHostFunc says that the function runs on another thread, so its caller allows it.
unsafe impl Send for HostCall {}

impl HostCall {
    fn run(self) {
        // SAFETY: the caller of cuLaunchHostFunc keeps the argument valid until the function has run.
        unsafe { (self.function)(self.data) };
    }
}
