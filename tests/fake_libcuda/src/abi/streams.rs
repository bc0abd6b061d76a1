//! Streams, events and host functions.

use super::{INVALID_VALUE, exports, out};
use std::ffi::c_void;

/// `CUhostFn`; NULL is an error.
pub(super) type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;

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
        cuda.cu_launch_host_func(stream, move || call.run())
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
    fn run(&self) {
        // SAFETY: the caller of cuLaunchHostFunc keeps the argument valid until the function has run; where it is
        // captured, as long as the graph can be launched.
        unsafe { (self.function)(self.data) };
    }
}
