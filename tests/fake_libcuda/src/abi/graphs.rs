//! Stream capture, graphs and user objects.

use super::streams::HostFunction;
use super::{INVALID_VALUE, exports, out, out_optional};
use pinpool::sim::Cuda;
use std::ffi::c_void;

exports! { functions:
    // Without a mode, as before 10.1: the global one.
    fn cuStreamBeginCapture(stream: usize) |cuda| cuda.cu_stream_begin_capture(stream, 0);
    fn cuStreamBeginCapture_v2(stream: usize, mode: u32) |cuda| cuda.cu_stream_begin_capture(stream, mode);
    fn cuStreamEndCapture(stream: usize, graph: *mut usize) |cuda| {
        // A capture that was broken ends with no graph.
        out_optional(graph, 0);
        out(graph, || cuda.cu_stream_end_capture(stream))
    };
    fn cuStreamIsCapturing(stream: usize, status: *mut u32) |cuda|
        out(status, || cuda.cu_stream_is_capturing(stream));
    fn cuStreamGetCaptureInfo_v2(
        stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize,
        dependencies: *mut *const usize, dependency_count: *mut usize
    ) |cuda| capture_info(cuda, stream, status, id, graph, dependencies, dependency_count);
    fn cuStreamGetCaptureInfo_v3(
        stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize,
        dependencies: *mut *const usize, edges: *mut *const c_void, dependency_count: *mut usize
    ) |cuda| {
        out_optional(edges, std::ptr::null());
        capture_info(cuda, stream, status, id, graph, dependencies, dependency_count)
    };
    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) |cuda| {
        if mode.is_null() {
            return Err(INVALID_VALUE);
        }
        let wanted = mode.read();
        out(mode, || cuda.cu_thread_exchange_stream_capture_mode(wanted))
    };

    fn cuGraphGetNodes(graph: usize, _nodes: *mut usize, count: *mut usize) |cuda|
        out(count, || cuda.cu_graph_get_nodes(graph));
    fn cuGraphInstantiateWithFlags(executable: *mut usize, graph: usize, flags: u64) |cuda|
        out(executable, || cuda.cu_graph_instantiate_with_flags(graph, flags));
    fn cuGraphUpload(executable: usize, stream: usize) |cuda| cuda.cu_graph_upload(executable, stream);
    fn cuGraphLaunch(executable: usize, stream: usize) |cuda| cuda.cu_graph_launch(executable, stream);
    fn cuGraphDestroy(graph: usize) |cuda| cuda.cu_graph_destroy(graph);
    fn cuGraphExecDestroy(executable: usize) |cuda| cuda.cu_graph_exec_destroy(executable);

    fn cuUserObjectCreate(
        object: *mut usize, data: *mut c_void, destroy: HostFunction, references: u32, flags: u32
    ) |cuda| {
        let Some(destroy) = destroy else { return Err(INVALID_VALUE) };
        let data = data as usize;
        let tell = move || {
            // SAFETY: who made the object keeps its data valid until this call.
            unsafe { destroy(data as *mut c_void) }
        };
        out(object, || cuda.cu_user_object_create(tell, references, flags))
    };
    fn cuUserObjectRetain(object: usize, count: u32) |cuda| cuda.cu_user_object_retain(object, count);
    fn cuUserObjectRelease(object: usize, count: u32) |cuda| cuda.cu_user_object_release(object, count);
    fn cuGraphRetainUserObject(graph: usize, object: usize, count: u32, flags: u32) |cuda|
        cuda.cu_graph_retain_user_object(graph, object, count, flags);
    fn cuGraphReleaseUserObject(graph: usize, object: usize, count: u32) |cuda|
        cuda.cu_graph_release_user_object(graph, object, count);
}

/// What the two versions of the function have in common. Nodes have no handles here, so none are shown.
///
/// # Safety
///
/// Each pointer is NULL or valid for a write.
unsafe fn capture_info(
    cuda: &Cuda,
    stream: usize,
    status: *mut u32,
    id: *mut u64,
    graph: *mut usize,
    dependencies: *mut *const usize,
    dependency_count: *mut usize,
) -> Result<(), u32> {
    if status.is_null() {
        return Err(INVALID_VALUE);
    }
    let (status_now, id_now, graph_now) = cuda.cu_stream_get_capture_info(stream)?;
    // SAFETY: the contract.
    unsafe { out_optional(id, id_now) };
    // SAFETY: the contract.
    unsafe { out_optional(graph, graph_now) };
    // SAFETY: the contract.
    unsafe { out_optional(dependencies, std::ptr::null()) };
    // SAFETY: the contract.
    unsafe { out_optional(dependency_count, 0) };
    // SAFETY: not NULL, and valid by the contract.
    unsafe { status.write(status_now) };
    Ok(())
}
