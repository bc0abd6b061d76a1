//! A process that carries a runtime library and no driver library: the pool over libcudart.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // the runtime's own streams, and raw calls into it

mod child;

use child::forked::forked;
use child::{copy_of, folder, in_child, is_child};
use libloading::Library;
use pinpool::backend::{BackendError, DevicePreferred, DeviceSupport, HostPinned, MemoryBackend};
use pinpool::{Backing, Driver, Error, PinnedPool, RawStream};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(20);

/// The fake runtime, as the application has it loaded.
struct Runtime(Library);

macro_rules! call {
    ($runtime:ident.$name:ident($($argument:expr => $kind:ty),*) -> $result:ty) => {{
        type Function = unsafe extern "C" fn($($kind),*) -> $result;
        // SAFETY: the type is that of the function.
        let function = unsafe { $runtime.0.get::<Function>(stringify!($name)) }.unwrap();
        // SAFETY: out-pointers are to locals.
        unsafe { function($($argument),*) }
    }};
}

impl Runtime {
    fn load(case: &str) -> Self {
        let file = copy_of("libfake_cudart.so", folder(case).join("libcudart.so.12"));
        // SAFETY: the fake library has no initialisers.
        Self(unsafe { Library::new(file) }.unwrap())
    }

    fn stream(&self) -> usize {
        let mut stream = 0;
        assert_eq!(call!(self.cudaStreamCreate(&mut stream => *mut usize) -> u32), 0);
        stream
    }

    fn has_context(&self, device: i32) -> bool {
        call!(self.fake_cudart_has_context(device => i32) -> bool)
    }

    fn last_error(&self) -> u32 {
        call!(self.cudaGetLastError() -> u32)
    }

    fn device(&self) -> i32 {
        let mut device = -1;
        assert_eq!(call!(self.cudaGetDevice(&mut device => *mut i32) -> u32), 0);
        device
    }
}

#[test]
fn a_pool_works_over_a_runtime() {
    in_child("child_with_a_runtime", &[]);
}

#[test]
#[ignore = "run by a_pool_works_over_a_runtime"]
fn child_with_a_runtime() {
    if !is_child() {
        return;
    }
    let runtime = Runtime::load("runtime-pool");
    let driver = Driver::builder().runtime().build();
    assert_eq!(driver.name(), "cudart");
    let pool = PinnedPool::builder().driver(driver.clone()).build().unwrap();

    // No device was shown: nothing is page-locked, and above all no context is made to do it.
    let Err(Error::NotPinned { reason, .. }) = pool.take_pinned(4096) else { panic!("where was it pinned?") };
    assert!(reason.contains("no CUDA context is known"), "{reason}");
    assert!(!runtime.has_context(0) && !runtime.has_context(1));

    // The application works on device 1.
    assert_eq!(call!(runtime.cudaSetDevice(1 => i32) -> u32), 0);
    let stream = runtime.stream();
    // SAFETY: a live stream of device 1, which is never reset.
    let shown = unsafe { RawStream::of_runtime(1, stream as *mut _) };
    let mut buffer = pool.take(1 << 16);
    buffer.fill(7);
    call!(runtime.fake_cudart_hold(stream => usize) -> ());
    call!(runtime.fake_cudart_enqueue(stream => usize) -> ());
    buffer.record_last_use(&shown).unwrap();
    let address = buffer.as_ptr() as usize;
    drop(buffer);
    assert!(!pool.drain(Duration::from_millis(30)), "its stream is held");
    // SAFETY: the block is pageable and out of the pool's sight until the stream has run.
    assert_eq!(unsafe { *(address as *const u8) }, 7, "it is neither zeroed nor freed meanwhile");
    call!(runtime.fake_cudart_release(stream => usize) -> ());
    assert!(pool.drain(PATIENCE));

    let buffer = pool.take(1 << 16);
    assert_eq!(buffer.as_ptr() as usize, address);
    assert!(buffer.is_pinned() && buffer.iter().all(|byte| *byte == 0));
    assert_eq!(driver.is_page_locked(&buffer), Ok(true), "asked of the runtime");
    assert_eq!(driver.is_page_locked(&vec![0; 9000]), Ok(false));
    assert_eq!(call!(runtime.fake_cudart_registered_bytes() -> usize), 1 << 16);
    assert!(!runtime.has_context(0), "the device that nobody uses was left alone");
    assert_eq!((runtime.device(), runtime.last_error()), (1, 0), "the thread is as it was");
    drop(buffer);
    assert!(pool.shutdown().completed);
    assert_eq!(call!(runtime.fake_cudart_registered_bytes() -> usize), 0);
}

#[test]
fn a_failed_call_leaves_no_error_behind_and_takes_none_away() {
    in_child("child_with_errors", &[]);
}

#[test]
#[ignore = "run by a_failed_call_leaves_no_error_behind_and_takes_none_away"]
fn child_with_errors() {
    if !is_child() {
        return;
    }
    let runtime = Runtime::load("runtime-errors");
    let driver = Driver::builder().runtime().build();
    // SAFETY: the null stream of device 0, which is never reset.
    let shown = unsafe { RawStream::of_runtime(0, std::ptr::null_mut()) };
    // SAFETY: a device that does not exist has no streams to be destroyed.
    let nowhere = unsafe { RawStream::of_runtime(7, std::ptr::null_mut()) };
    let pool = PinnedPool::builder().driver(driver).context_of(&shown).build().unwrap();
    assert!(pool.take_pinned(4096).unwrap().is_pinned());

    let error = pool.take(64).record_last_use(&nowhere).unwrap_err();
    assert_eq!(error.to_string(), "cudaSetDevice: cudaErrorInvalidDevice (101)");
    assert_eq!(runtime.last_error(), 0, "an application's next check would have found it");

    // Where the application has one of its own, it still finds an error: the newer one, as CUDA keeps but one.
    assert_eq!(call!(runtime.cudaHostUnregister(64 => usize) -> u32), 713);
    pool.take(64).record_last_use(&nowhere).unwrap_err();
    assert_eq!(runtime.last_error(), 101);
}

#[test]
fn memory_of_the_runtimes_backs_pools_and_allocators_too() {
    in_child("child_with_memory_of_the_runtimes", &[]);
}

#[test]
#[ignore = "run by memory_of_the_runtimes_backs_pools_and_allocators_too"]
fn child_with_memory_of_the_runtimes() {
    if !is_child() {
        return;
    }
    let runtime = Runtime::load("runtime-memory");
    let driver = Driver::builder().runtime().build();
    // SAFETY: the null stream of device 0, which is never reset.
    let shown = unsafe { RawStream::of_runtime(0, std::ptr::null_mut()) };
    let builder = PinnedPool::builder().driver(driver.clone()).context_of(&shown);
    let pool = builder.backing(Backing::HostPinned).build().unwrap();
    let mut buffer = pool.take_pinned(1 << 16).unwrap();
    assert!(buffer.is_pinned() && buffer.iter().all(|byte| *byte == 0));
    assert_eq!(driver.is_page_locked(&buffer), Ok(true));
    assert_eq!(call!(runtime.fake_cudart_allocated_host_bytes() -> usize), 1 << 16);
    buffer.fill(1);
    drop(buffer);
    assert!(pool.shutdown().completed);
    assert_eq!(call!(runtime.fake_cudart_allocated_host_bytes() -> usize), 0);

    let preferring = DevicePreferred::builder(&driver).context_of(&shown).build().unwrap();
    // SAFETY: it is not used.
    let base = unsafe { preferring.allocate(4096) }.unwrap();
    assert_eq!(call!(runtime.fake_cudart_preferring() -> usize), 1);
    // SAFETY: nobody uses it.
    unsafe { preferring.deallocate(base, 4096) }.unwrap();
    let pinned = HostPinned::builder(&driver).context_of(&shown).build().unwrap();
    // SAFETY: an address of nobody's is refused.
    let refused = unsafe { pinned.deallocate(base, 4096) };
    assert!(matches!(refused, Err(BackendError::NotOurs { .. })), "{refused:?}");
    assert_eq!(runtime.last_error(), 0, "an application's next check would have found it");
}

#[test]
fn a_thread_finds_back_to_its_device_and_an_unrecorded_buffer_waits_for_the_device() {
    in_child("child_on_two_devices", &[("FAKE_CUDART_PAGEABLE_ACCESS", "1".as_ref())]);
}

#[test]
#[ignore = "run by a_thread_finds_back_to_its_device_and_an_unrecorded_buffer_waits_for_the_device"]
fn child_on_two_devices() {
    if !is_child() {
        return;
    }
    let runtime = Runtime::load("runtime-devices");
    let driver = Driver::builder().runtime().build();
    // The application works on device 1, and this thread is on device 0, which nobody uses.
    assert_eq!(call!(runtime.cudaSetDevice(1 => i32) -> u32), 0);
    let stream = runtime.stream();
    assert_eq!(call!(runtime.cudaSetDevice(0 => i32) -> u32), 0);
    // SAFETY: a live stream of device 1, which is never reset.
    let shown = unsafe { RawStream::of_runtime(1, stream as *mut _) };
    // SAFETY: a device that does not exist has no streams to be destroyed.
    let nowhere = unsafe { RawStream::of_runtime(64, std::ptr::null_mut()) };
    // The devices read pageable memory themselves, so a copy may read it after the call has returned.
    let pool = PinnedPool::builder().driver(driver.clone()).context_of(&shown).build().unwrap();
    let pinned = pool.take_pinned(4096).unwrap();
    assert!(pinned.is_pinned());
    assert_eq!(runtime.device(), 0, "page-locked in device 1's context, and back");

    let mut buffer = pool.take(1 << 16);
    assert!(!buffer.is_pinned());
    buffer.fill(7);
    let address = buffer.as_ptr() as usize;
    call!(runtime.fake_cudart_hold(stream => usize) -> ());
    call!(runtime.fake_cudart_enqueue(stream => usize) -> ());
    // Dropped without a record while the device is busy: only its context can say when it is done.
    drop(buffer);
    assert!(!pool.drain(Duration::from_millis(30)), "its device is busy");
    // SAFETY: the block is out of the pool's sight until the device is idle.
    assert_eq!(unsafe { *(address as *const u8) }, 7, "it is neither zeroed nor freed meanwhile");
    call!(runtime.fake_cudart_release(stream => usize) -> ());
    assert!(pool.drain(PATIENCE));
    let error = pool.take(64).record_last_use(&nowhere).unwrap_err();
    assert_eq!(error.to_string(), "cudaSetDevice: cudaErrorInvalidDevice (101)");
    drop(pinned);
    assert!(pool.shutdown().completed);

    let all = DeviceSupport::of_all(&driver).unwrap();
    let read: Vec<_> = all.iter().map(|one| (one.device, one.pageable_access)).collect();
    assert_eq!(read, [(0, true), (1, true)], "asked of the runtime, which has two devices");
    let none = DeviceSupport::of(&driver, 2).unwrap_err();
    assert_eq!(none.to_string(), "cudaDeviceGetAttribute: cudaErrorInvalidDevice (101)");
    assert_eq!(runtime.last_error(), 0, "an application's next check would have found it");
}

#[test]
fn a_forked_child_never_calls_the_runtime() {
    in_child("child_that_forks", &[]);
}

#[test]
#[ignore = "run by a_forked_child_never_calls_the_runtime"]
fn child_that_forks() {
    if !is_child() {
        return;
    }
    let runtime = Runtime::load("runtime-fork");
    let driver = Driver::builder().runtime().build();
    // SAFETY: the null stream of device 0, which is never reset.
    let shown = unsafe { RawStream::of_runtime(0, std::ptr::null_mut()) };
    let pool = PinnedPool::builder().driver(driver.clone()).context_of(&shown).build().unwrap();
    let pinned = pool.take_pinned(4096).unwrap();
    let calls = || call!(runtime.fake_cudart_calls() -> u64);
    let before = calls();
    let status = forked(|| {
        let mut buffer = pool.take(64);
        assert_eq!(buffer.record_last_use(&shown), Err(Error::ForkedChild));
        assert!(!buffer.is_pinned() && pool.take_pinned(64).is_err());
        drop((buffer, pinned));
        // A pool of the child's own has plain memory, too: its runtime is the parent's.
        let own = PinnedPool::builder().driver(Driver::builder().runtime().build()).build().unwrap();
        assert!(own.take_pinned(64).is_err() && !own.take(64).is_pinned());
        assert_eq!(calls(), before, "the runtime was called");
        0
    });
    assert_eq!(status, 0);
    assert!(pool.take_pinned(64).unwrap().is_pinned(), "the parent goes on");
}
