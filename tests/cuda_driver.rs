//! cudarc's own contexts, streams, copies and events run over the fake libcuda, and pinpool's CUDA back
//! end finds the same library in the process.
//!
//! One process has one libcuda, so the tests of this file share a device and take turns at it. It moves
//! only when it is stepped.
#![cfg(all(feature = "cudarc", target_os = "linux"))]
#![allow(unsafe_code)] // cudarc's unsafe functions, and a symbol of the fake

use cudarc::driver::sys::{CUcontext, CUresult};
use cudarc::driver::{CudaContext, CudaStream};
use fake_cuda::control::Control;
use pinpool::Driver;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// The device, without faults and with counters at zero, for one test at a time.
fn fake() -> MutexGuard<'static, Control> {
    static FAKE: LazyLock<Mutex<Control>> = LazyLock::new(|| {
        let control = Control::load().expect("cargo builds the fake library beside the tests");
        assert!(control.set_stepped(), "a driver function was called before the fake was loaded");
        Mutex::new(control)
    });
    let control = FAKE.lock().unwrap_or_else(PoisonError::into_inner);
    control.clear_faults();
    control.reset_calls();
    control
}

fn handle(stream: &Arc<CudaStream>) -> usize {
    stream.cu_stream() as usize
}

#[test]
fn bytes_come_back_from_the_device_as_they_went() {
    let fake = fake();
    let context = CudaContext::new(0).expect("the fake has a device");
    let stream = context.new_stream().unwrap();
    let sent: Vec<u8> = (0..100_000_u32).map(|index| (index * 7 % 251) as u8).collect();
    let mut on_device = stream.alloc_zeros::<u8>(sent.len()).unwrap();
    stream.memcpy_htod(&sent, &mut on_device).unwrap();
    let mut received = vec![0; sent.len()];
    stream.memcpy_dtoh(&on_device, &mut received).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(received, sent);

    let copy = stream.clone_dtod(&on_device).unwrap();
    assert_eq!(stream.clone_dtoh(&copy).unwrap(), sent);
    fake.assert_clean();
}

#[test]
fn a_pinned_copy_on_a_held_stream_waits_for_the_release() {
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    // SAFETY: every byte is written before it is read.
    let mut pinned = unsafe { context.alloc_pinned::<u8>(4096) }.unwrap();
    pinned.as_mut_slice().unwrap().fill(7);
    let mut on_device = stream.alloc_zeros::<u8>(4096).unwrap();
    stream.synchronize().unwrap();

    fake.hold(handle(&stream));
    stream.memcpy_htod(&pinned, &mut on_device).unwrap();
    let done = stream.record_event(None).unwrap();
    fake.run_until_idle();
    assert!(!done.try_is_complete().unwrap(), "a held stream executes nothing");
    assert!(fake.pending_operations() > 0);

    fake.release(handle(&stream));
    fake.run_until_idle();
    assert!(done.try_is_complete().unwrap());
    assert_eq!(stream.clone_dtoh(&on_device).unwrap(), vec![7; 4096]);
    fake.assert_clean();
}

#[test]
fn events_order_streams_and_measure_time() {
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    let (first, second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let timed = Some(cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT);
    let start = first.record_event(timed).unwrap();
    fake.hold(handle(&first));
    let gate = first.record_event(None).unwrap();
    second.wait(&gate).unwrap();
    let after = second.record_event(None).unwrap();
    fake.run_until_idle();
    assert!(!after.try_is_complete().unwrap(), "the second stream waits for the first");
    fake.release(handle(&first));
    fake.run_until_idle();
    assert!(after.try_is_complete().unwrap());
    let end = first.record_event(timed).unwrap();
    assert!(start.elapsed_ms(&end).unwrap() >= 0.0);
    fake.assert_clean();
}

#[test]
fn a_fault_reaches_the_caller_as_its_code_once() {
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    fake.fail("cuMemAllocAsync", 2, 2);
    assert!(stream.alloc_zeros::<u8>(64).is_ok(), "the first call is let through");
    let error = stream.alloc_zeros::<u8>(64).expect_err("the second call fails");
    assert_eq!(error.0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    assert!(format!("{error:?}").contains("out of memory"), "cudarc asks the library for the text");
    assert!(stream.alloc_zeros::<u8>(64).is_ok(), "the third call is let through");
    stream.synchronize().unwrap();
    fake.assert_clean();
}

#[test]
fn calls_are_counted_by_the_name_of_the_driver_function() {
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    let event = context.default_stream().record_event(None).unwrap();
    fake.reset_calls();
    event.try_is_complete().unwrap();
    event.try_is_complete().unwrap();
    assert_eq!(fake.calls("cuEventQuery"), 2);
    assert_eq!(fake.total_calls(), 2);
    fake.assert_clean();
}

#[test]
fn a_context_of_the_application_s_own_works_like_the_primary_one() {
    let fake = fake();
    type Create = unsafe extern "C" fn(*mut CUcontext, u32, i32) -> CUresult;
    drop(CudaContext::new(0).unwrap());
    // SAFETY: the C prototype of this version of the function.
    let create = unsafe { fake.symbol::<Create>("cuCtxCreate_v2") }.unwrap();
    let mut raw = std::ptr::null_mut();
    // SAFETY: writes one pointer.
    assert_eq!(unsafe { create(&mut raw, 0, 0) }, CUresult::CUDA_SUCCESS);
    // SAFETY: just created on device 0, and given away here.
    let context = unsafe { CudaContext::from_raw_context(0, 0, raw) }.unwrap();
    assert!(!context.is_primary());
    let stream = context.new_stream().unwrap();
    assert_eq!(stream.clone_dtoh(&stream.clone_htod(&vec![3_u8; 100]).unwrap()).unwrap(), vec![3; 100]);
    fake.assert_clean();
}

#[test]
fn a_graph_is_captured_and_replayed_by_cudarc() {
    use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, CUstreamCaptureStatus};
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    // SAFETY: everything here is on one stream. The events of cudarc's tracking would be from outside the capture.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream().unwrap();
    let mut on_device = stream.alloc_zeros::<u8>(4096).unwrap();
    let mut source = vec![1_u8; 4096];
    stream.synchronize().unwrap();
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).unwrap();
    assert_eq!(stream.capture_status(), Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE));
    stream.memcpy_htod(&source, &mut on_device).unwrap();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
    graph.upload().unwrap();
    for value in [2, 3] {
        source.fill(value);
        graph.launch().unwrap();
        fake.run_until_idle();
        assert_eq!(stream.clone_dtoh(&on_device).unwrap(), vec![value; 4096]);
    }

    stream.begin_capture(mode).unwrap();
    let refused = stream.synchronize().unwrap_err();
    assert_eq!(refused.0, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(refused.to_string().matches("STREAM_CAPTURE_UNSUPPORTED").count(), 1, "{refused}");
    assert_eq!(stream.capture_status(), Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED));
    let ended = stream.end_capture(CUgraphInstantiate_flags(0));
    assert_eq!(ended.err().unwrap().0, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    drop((graph, on_device));
    context.check_err().unwrap();
    fake.assert_clean();
}

#[test]
fn what_the_device_does_not_have_is_an_error_and_no_panic() {
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    stream.synchronize().unwrap();
    // SAFETY: the image is a text, which a driver may read.
    let loaded = unsafe { cudarc::driver::result::module::load_data(c"nothing".as_ptr().cast()) };
    assert_eq!(loaded.unwrap_err().0, CUresult::CUDA_ERROR_NOT_SUPPORTED);
    fake.assert_clean();
}

#[test]
fn pinpool_s_back_end_uses_the_library_that_the_process_has() {
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    fake.reset_calls();
    let driver = Driver::cuda().expect("cudarc has initialised the fake");
    assert_eq!(driver.name(), "cuda");
    assert_eq!(fake.calls("cuInit"), 0, "somebody has initialised CUDA already");
    assert!(fake.calls("cuCtxGetCurrent") <= 1, "looked once whether it is in use");
    drop(context);
    fake.assert_clean();
}

#[test]
fn the_file_is_beside_the_test_and_stands_for_libcuda() {
    let fake = fake();
    assert_eq!(fake.path().file_name().unwrap(), "libfake_cuda.so");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains("libfake_cuda.so"));
    // cudarc asks for this name first.
    // SAFETY: the library is open already, so no initialiser runs.
    let again = unsafe { libloading::Library::new("libcuda.so") }.expect("the fake answers to this name");
    // SAFETY: the type is that of the function.
    let step = unsafe { again.get::<unsafe extern "C" fn() -> bool>("fake_cuda_step") };
    assert!(step.is_ok());
}
