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

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::driver::DriverApi;
    use crate::driver::cuda::CudaDriver;
    use crate::driver::cuda_tests::{in_child_of_crate, is_child};
    use crate::driver::ladder::How;
    use crate::driver::library;
    use crate::driver::process::Entries;
    use fake_cuda::control::Control;

    #[test]
    fn a_library_of_any_age_is_asked_by_what_it_has() {
        let file = Control::find().expect("cargo builds the fake library beside the tests");
        let environment = [("PINPOOL_CUDA_LIBRARY", file.to_str().unwrap())];
        in_child_of_crate("driver::graphs::tests::child_that_captures", &environment);
    }

    #[test]
    #[ignore = "run by a_library_of_any_age_is_asked_by_what_it_has"]
    fn child_that_captures() {
        if !is_child() {
            return;
        }
        let (driver, fake) = (CudaDriver::default(), Control::load().unwrap());
        driver.prepare().unwrap();
        let context = driver.retain_primary(0).unwrap();
        driver.set_current_context(Some(context)).unwrap();
        let library = library::open(How::Load, fake.path().as_os_str()).unwrap();
        let mut table = Table::of(&library).unwrap();
        let per_thread = StreamHandle(2);
        assert_eq!(capture_info(&table, per_thread), Ok(CaptureInfo::Nothing));
        type Begin = unsafe extern "C" fn(usize, u32) -> u32;
        // SAFETY: the type is the C prototype of this function.
        let begin = unsafe { library.get::<Begin>("cuStreamBeginCapture_v2") }.unwrap();
        // SAFETY: 2 is the per-thread default stream.
        assert_eq!(unsafe { begin(per_thread.0, 2) }, 0);

        let by_the_second = capture_info(&table, per_thread).unwrap();
        assert!(matches!(by_the_second, CaptureInfo::Graph(..)), "{by_the_second:?}");
        table.capture_info_v2 = None;
        assert_eq!(capture_info(&table, per_thread), Ok(by_the_second), "by the third");
        fake.fail("cuStreamGetCaptureInfo", 1, 709);
        let refused = capture_info(&table, per_thread);
        assert_eq!(refused, Err(CallError::new("cuStreamGetCaptureInfo_v3", 709)));
        table.capture_info_v3 = None;
        let lacking = |call| CallError::new(call, NOT_SUPPORTED);
        assert_eq!(capture_info(&table, per_thread), Err(lacking("cuStreamGetCaptureInfo_v2")));

        // What no graph took ends with our reference.
        let end = EndFlag::new();
        let object = create_user_object(&table, end).unwrap();
        assert!(!end.is_set());
        release_user_object(&table, object).unwrap();
        assert!(end.is_set());
        assert_eq!(release_user_object(&table, object), Err(CallError::new("cuUserObjectRelease", 400)));
        (table.user_object_create, table.user_object_release) = (None, None);
        table.graph_retain_user_object = None;
        let CaptureInfo::Graph(_, graph) = by_the_second else { unreachable!() };
        assert_eq!(create_user_object(&table, end), Err(lacking("cuUserObjectCreate")));
        assert_eq!(give_user_object(&table, graph, object), Err(lacking("cuGraphRetainUserObject")));
        assert_eq!(release_user_object(&table, object), Err(lacking("cuUserObjectRelease")));
    }
}
