//! libcuda's calls that tie something to a graph which is being captured: a user object, whose end is the graph's.

#![allow(unsafe_code)] // calls the driver, and is called by it

use super::cuda::check;
use super::table::Table;
use super::{CaptureInfo, EndFlag, GraphHandle, StreamHandle, UserObjectHandle};
use crate::error::CallError;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

const NOT_SUPPORTED: u32 = 801;
/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, which must be given.
const NO_DESTRUCTOR_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`: the reference that we have becomes the graph's.
const MOVE: u32 = 1;

/// Whichever version the library has: 12 and later have the third, 11.3 to 12 the second.
pub(super) fn capture_info(table: &Table, stream: StreamHandle) -> Result<CaptureInfo, CallError> {
    let (mut status, mut id, mut graph) = (0, 0, 0);
    let (mut dependencies, mut edges, mut count) = (std::ptr::null(), std::ptr::null(), 0);
    if let Some(capture_info) = table.capture_info_v2 {
        // SAFETY: cuStreamGetCaptureInfo_v2 takes a stream that the caller holds and writes an enum, a number, a
        // handle, a pointer into the driver's memory and a count, each of which has its variable.
        let code = unsafe {
            capture_info(stream.0, &mut status, &mut id, &mut graph, &mut dependencies, &mut count)
        };
        check("cuStreamGetCaptureInfo_v2", code)?;
    } else if let Some(capture_info) = table.capture_info_v3 {
        // SAFETY: cuStreamGetCaptureInfo_v3 is as the second version, and writes one more pointer.
        let code = unsafe {
            capture_info(
                stream.0,
                &mut status,
                &mut id,
                &mut graph,
                &mut dependencies,
                &mut edges,
                &mut count,
            )
        };
        check("cuStreamGetCaptureInfo_v3", code)?;
    } else {
        return Err(CallError::new("cuStreamGetCaptureInfo_v2", NOT_SUPPORTED));
    }
    Ok(CaptureInfo::of(status, id, graph))
}

pub(super) fn create_user_object(table: &Table, end: EndFlag) -> Result<UserObjectHandle, CallError> {
    const CALL: &str = "cuUserObjectCreate";
    let Some(create) = table.user_object_create else { return Err(CallError::new(CALL, NOT_SUPPORTED)) };
    let mut object = 0;
    // SAFETY: cuUserObjectCreate writes one handle, and keeps a pointer to a word that lives for ever and a function
    // that may be called with it from any thread.
    let code = unsafe { create(&mut object, end.address(), the_graph_is_gone, 1, NO_DESTRUCTOR_SYNC) };
    check(CALL, code)?;
    Ok(UserObjectHandle(object))
}

pub(super) fn give_user_object(
    table: &Table,
    graph: GraphHandle,
    object: UserObjectHandle,
) -> Result<(), CallError> {
    const CALL: &str = "cuGraphRetainUserObject";
    let Some(retain) = table.graph_retain_user_object else {
        return Err(CallError::new(CALL, NOT_SUPPORTED));
    };
    // SAFETY: cuGraphRetainUserObject takes a graph that is being captured by a stream which the caller holds, and an
    // object to which we have the one reference that is given away.
    check(CALL, unsafe { retain(graph.0, object.0, 1, MOVE) })
}

pub(super) fn release_user_object(table: &Table, object: UserObjectHandle) -> Result<(), CallError> {
    const CALL: &str = "cuUserObjectRelease";
    let Some(release) = table.user_object_release else { return Err(CallError::new(CALL, NOT_SUPPORTED)) };
    // SAFETY: cuUserObjectRelease takes an object and gives up the one reference that we have to it.
    check(CALL, unsafe { release(object.0, 1) })
}

/// Called by the driver, on a thread of its own, where no driver call is permitted.
unsafe extern "C" fn the_graph_is_gone(flag: *mut c_void) {
    // SAFETY: cuUserObjectCreate was given the address of an `EndFlag`'s word, which lives for ever.
    let flag = unsafe { &*flag.cast::<AtomicBool>() };
    flag.store(true, Ordering::Release);
}
