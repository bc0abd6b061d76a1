//! The journey on the real path: cudarc's contexts, streams and copies, pinpool's CUDA back end, and the
//! process-wide pool, over the fake libcuda.
//!
//! One process has one libcuda, so the tests of this file share a device and take turns at it. It moves only
//! when it is stepped.
#![cfg(all(feature = "cudarc", target_os = "linux"))]
#![allow(unsafe_code)] // `RawStream::new`, and a context that cudarc does not own.

use cudarc::driver::{CudaContext, CudaStream};
use fake_cuda::control::Control;
use pinpool::{Driver, Error, PinnedPool, RawStream};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const LEN: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

fn fake() -> MutexGuard<'static, Control> {
    static FAKE: LazyLock<Mutex<Control>> = LazyLock::new(|| {
        let control = Control::load().expect("cargo builds the fake library beside the tests");
        assert!(control.set_stepped(), "a driver function was called before the fake was loaded");
        assert!(control.set_devices(2));
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

fn pattern(seed: u8) -> Vec<u8> {
    (0..LEN).map(|index| (index as u8).wrapping_mul(13).wrapping_add(seed) | 1).collect()
}

fn shelve(pool: &PinnedPool, count: usize) {
    drop((0..count).map(|_| pool.take(LEN)).collect::<Vec<_>>());
    assert!(pool.drain(PATIENCE), "{:#?}", pool.stats());
}

#[test]
fn the_journey_through_cudarc() {
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let mut device = stream.alloc_zeros::<u8>(LEN).unwrap();
    stream.synchronize().unwrap();
    let pool = PinnedPool::builder().driver(Driver::cuda().unwrap()).build().unwrap();
    let before = fake.registered_bytes();

    let miss = pool.take(LEN);
    assert!(!miss.is_pinned());
    drop(miss);
    assert!(pool.drain(PATIENCE));
    assert_eq!(fake.registered_bytes() - before, LEN, "page-locked after its first return");
    assert_eq!(fake.portable_bytes(), fake.registered_bytes(), "for copies from every context");
    let timed_events = fake.timed_events();

    let mut buffer = pool.take(LEN);
    assert!(buffer.is_pinned() && buffer.driver_says_page_locked().unwrap());
    let address = buffer.as_ptr();
    let bytes = pattern(1);
    buffer.copy_from_slice(&bytes);
    fake.hold(handle(&stream));
    stream.memcpy_htod(&buffer[..], &mut device).unwrap();
    buffer.record_last_use(&stream).unwrap();
    assert_eq!(fake.timed_events(), timed_events, "an event of the pool takes no time");
    drop(buffer);

    fake.run_until_idle();
    let other = pool.take(LEN);
    assert_ne!(other.as_ptr(), address, "reused in flight");
    pool.set_max_pooled_bytes(0);
    pool.set_max_pooled_bytes(1 << 30);
    assert_eq!(fake.registered_bytes() - before, LEN, "unregistered in flight");

    fake.release(handle(&stream));
    fake.run_until_idle();
    assert!(pool.drain(PATIENCE));
    assert!(stream.clone_dtoh(&device).unwrap() == bytes, "wrong bytes on the device");
    let again = pool.take(LEN);
    assert_eq!(again.as_ptr(), address, "the block is back on its shelf");
    assert!(again.is_pinned() && again.iter().all(|byte| *byte == 0));
    drop((again, other));
    assert!(pool.shutdown().completed);
    assert_eq!(fake.registered_bytes(), before);
    let stats = pool.stats();
    assert!(stats.is_balanced() && stats.registered_bytes == 0, "{stats:#?}");
    fake.assert_clean();
}

#[test]
fn the_process_wide_pool_finds_cuda_by_itself() {
    let fake = fake();
    assert_eq!(fake.calls("cuInit"), 0, "nothing is initialised before somebody needs it");
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let mut device = stream.alloc_zeros::<u8>(LEN).unwrap();
    stream.synchronize().unwrap();

    // A plain take, fill, drop with no record pins too.
    let mut buffer = pinpool::take(LEN);
    buffer.fill(1);
    drop(buffer);
    assert!(pinpool::global().drain(PATIENCE));
    let mut buffer = pinpool::take(LEN - 5);
    assert!(buffer.is_pinned() && buffer.len() == LEN);
    let bytes = pattern(2);
    buffer.copy_from_slice(&bytes);
    stream.memcpy_htod(&buffer[..], &mut device).unwrap();
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);
    stream.synchronize().unwrap();
    assert!(pinpool::global().drain(PATIENCE));
    assert!(stream.clone_dtoh(&device).unwrap() == bytes);
    assert_eq!(pinpool::stats().hits + pinpool::stats().harvested, 1);
    assert!(pinpool::take_pinned(LEN).unwrap().is_pinned());
    assert!(pinpool::try_take(usize::MAX).is_err());
    pinpool::set_max_pooled_bytes(0);
    pinpool::clear();
    let report = pinpool::shutdown();
    assert!(report.completed && report.registered_bytes_after == 0, "{report:?}");
    pinpool::set_max_pooled_bytes(1 << 30);
    fake.assert_clean();
}

#[test]
fn a_forgotten_copy_from_a_slice_keeps_its_block_until_it_is_done() {
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let mut device = stream.alloc_zeros::<u8>(LEN).unwrap();
    stream.synchronize().unwrap();
    let pool = PinnedPool::builder().build().unwrap();
    shelve(&pool, 1);
    let mut buffer = pool.take(LEN);
    let address = buffer.as_ptr();
    let bytes = pattern(3);
    buffer.copy_from_slice(&bytes);
    fake.hold(handle(&stream));
    stream.memcpy_htod(&buffer[..], &mut device).unwrap();
    drop(buffer);
    fake.run_until_idle();
    assert!(!pool.drain(Duration::from_millis(50)), "not waited for");
    assert_ne!(pool.take(LEN).as_ptr(), address);
    fake.release(handle(&stream));
    assert!(pool.drain(PATIENCE));
    assert!(stream.clone_dtoh(&device).unwrap() == bytes, "wrong bytes on the device");
    assert!(pool.shutdown().completed);
    fake.assert_clean();
}

#[test]
fn default_and_per_thread_streams_are_recorded_in_their_context() {
    let fake = fake();
    let (first, second) = (CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap());
    let pool = PinnedPool::builder().context_of(&first.default_stream()).build().unwrap();
    shelve(&pool, 2);
    for context in [&first, &second] {
        for stream in [context.default_stream(), context.per_thread_stream()] {
            // Another context is current: the null stream would be that one's.
            let other = if Arc::ptr_eq(context, &first) { &second } else { &first };
            other.bind_to_thread().unwrap();
            let mut buffer = pool.take(LEN);
            buffer.record_last_use(&stream).unwrap();
            let current = cudarc::driver::result::ctx::get_current().unwrap();
            assert_eq!(current, Some(other.cu_ctx()), "the caller's context is restored");
            drop(buffer);
            fake.run_until_idle();
            assert!(pool.drain(PATIENCE));
        }
    }
    let stats = pool.stats();
    assert_eq!((stats.record_failures, stats.quarantined_bytes), (0, 0), "{stats:#?}");
    assert!(pool.shutdown().completed);
    fake.assert_clean();
}

#[test]
fn a_raw_stream_of_another_binding_is_recorded() {
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let pool = PinnedPool::builder().build().unwrap();
    shelve(&pool, 1);
    // SAFETY: both handles are cudarc's and live; the context outlives the pool's shutdown.
    let raw = unsafe { RawStream::new(context.cu_ctx().cast(), stream.cu_stream().cast()) };
    let mut buffer = pool.take(LEN);
    let address = buffer.as_ptr();
    fake.hold(handle(&stream));
    buffer.record_last_use(&raw).unwrap();
    drop(buffer);
    fake.run_until_idle();
    assert_ne!(pool.take(LEN).as_ptr(), address);
    fake.release(handle(&stream));
    fake.run_until_idle();
    assert!(pool.shutdown().completed);
    fake.assert_clean();
}

#[test]
fn an_error_that_cudarc_stored_is_not_taken_from_the_application() {
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let pool = PinnedPool::builder().build().unwrap();
    shelve(&pool, 1);
    let stored = cudarc::driver::DriverError(cudarc::driver::sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    context.record_err::<()>(Err(stored));
    let mut buffer = pool.take(LEN);
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);
    fake.run_until_idle();
    assert!(pool.drain(PATIENCE));
    assert_eq!(context.check_err(), Err(stored), "the application's error was taken");
    assert!(pool.shutdown().completed);
}

#[test]
fn the_application_may_drop_its_context_before_its_buffers() {
    let fake = fake();
    let pool = PinnedPool::builder().build().unwrap();
    let (buffer, device) = {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        shelve(&pool, 1);
        let mut buffer = pool.take(LEN);
        buffer.fill(7);
        buffer.record_last_use(&stream).unwrap();
        (buffer, context.ordinal())
    };
    assert_eq!(device, 0);
    drop(buffer);
    fake.run_until_idle();
    assert!(pool.drain(PATIENCE));
    let stats = pool.stats();
    assert_eq!(
        (stats.quarantined_bytes, stats.pooled_pinned_bytes),
        (0, LEN),
        "the pool's own retain keeps it"
    );
    assert!(pool.take(LEN).driver_says_page_locked().unwrap());
    assert!(pool.shutdown().completed);
    assert_eq!(fake.registered_bytes(), 0);
    fake.assert_clean();
}

#[test]
fn a_refusal_shows_call_name_and_number() {
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let pool = PinnedPool::builder().build().unwrap();
    let mut buffer = pool.take(LEN);
    fake.fail("cuEventRecord", 1, 999);
    let error = buffer.record_last_use(&stream).unwrap_err();
    assert_eq!(error.to_string(), "cuEventRecord: CUDA_ERROR_UNKNOWN (999)");
    assert!(matches!(error, Error::Driver(_)));
    drop(buffer);
    assert!(pool.drain(PATIENCE));
    assert!(pool.shutdown().completed);
}
