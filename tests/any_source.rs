//! `copy_h2d_async`: a source that somebody pinned is as safe as it was before; and streams of other bindings.
#![cfg(all(feature = "cudarc", target_os = "linux"))]
#![allow(unsafe_code)] // Registers memory of the tests' own, and calls the driver's functions by hand.

mod interop;

use interop::{LEN, Mode, Rig, pattern, until};
use pinpool::pin::{register_region, unregister_region};
use pinpool::regions::ExternalRegion;
use pinpool::{Driver, Error, RawStream, copy_h2d_async, regions};
use std::io;
use std::sync::{Arc, Mutex};

#[test]
fn from_pageable_memory_it_is_the_ordinary_copy() {
    let rig = Rig::new(Mode::Tracked);
    let mut device = rig.device(LEN);
    let mut bytes = pattern(1, LEN);
    rig.fake.reset_calls();
    copy_h2d_async(&rig.stream, &bytes, &mut device).unwrap();
    assert_eq!(rig.fake.calls("cuMemcpyHtoDAsync"), 1);
    assert_eq!(rig.fake.calls("cuStreamSynchronize"), 0);
    bytes.fill(0);
    assert!(rig.on_device(&device) == pattern(1, LEN));
    let error = copy_h2d_async(&rig.stream, &pattern(1, LEN + 1), &mut device).unwrap_err();
    assert_eq!(error, Error::Range { start: 0, end: LEN + 1, len: LEN });
    copy_h2d_async(&rig.stream, &[], &mut device).unwrap();
    rig.finish();
}

#[test]
fn from_pinned_memory_that_no_guard_tracks_it_waits_and_the_source_may_be_overwritten() {
    let rig = Rig::new(Mode::Untracked);
    let driver = Driver::cuda().unwrap();
    let mut device = rig.device(LEN);
    let mut bytes = pattern(1, LEN);
    // SAFETY: the memory outlives the registration.
    unsafe { register_region(&driver, bytes.as_ptr(), LEN) }.unwrap();
    rig.hold();
    rig.must_wait(|| copy_h2d_async(&rig.stream, &bytes, &mut device).unwrap());
    bytes.fill(0);
    assert!(rig.on_device(&device) == pattern(1, LEN), "read after the call had returned");
    // SAFETY: no device work uses it.
    unsafe { unregister_region(&driver, bytes.as_ptr()) }.unwrap();
    assert!(!regions::is_pinned(bytes.as_ptr()));
    rig.fake.reset_calls();
    copy_h2d_async(&rig.stream, &bytes, &mut device).unwrap();
    assert_eq!(rig.fake.calls("cuStreamSynchronize"), 0, "the region is not forgotten");

    // A slice of a guard, and memory that was page-locked by another route.
    let mut buffer = rig.filled(LEN, &pattern(2, LEN));
    rig.hold();
    rig.must_wait(|| copy_h2d_async(&rig.stream, &buffer[..], &mut device).unwrap());
    buffer.fill(0);
    assert!(rig.on_device(&device) == pattern(2, LEN));
    drop(buffer);
    let noted = ExternalRegion::note(bytes.as_ptr(), LEN);
    rig.fake.reset_calls();
    copy_h2d_async(&rig.stream, &bytes, &mut device).unwrap();
    assert_eq!(rig.fake.calls("cuStreamSynchronize"), 1);
    drop(noted);
    rig.finish();
}

#[test]
fn a_source_that_crosses_the_edge_of_a_region_is_copied_in_pieces() {
    let rig = Rig::new(Mode::Untracked);
    let driver = Driver::cuda().unwrap();
    let mut bytes = pattern(3, LEN);
    let mut device = rig.device(LEN);
    // Pageable, pinned, pinned by itself, pageable.
    for (start, end) in [(100, 5000), (5000, 9000)] {
        // SAFETY: the memory outlives the registration.
        unsafe { register_region(&driver, bytes[start..].as_ptr(), end - start) }.unwrap();
    }
    let plain = rig.stream.memcpy_htod(&bytes, &mut device);
    assert!(plain.is_err(), "the driver takes it, so nothing is shown");
    rig.fake.reset_calls();
    copy_h2d_async(&rig.stream, &bytes, &mut device).unwrap();
    assert_eq!(rig.fake.calls("cuMemcpyHtoDAsync"), 4);
    bytes.fill(0);
    assert!(rig.on_device(&device) == pattern(3, LEN));
    // A piece is refused: the earlier ones may be under way, so it waits all the same.
    rig.fake.reset_calls();
    rig.fake.fail("cuMemcpyHtoDAsync", 3, 999);
    let error = copy_h2d_async(&rig.stream, &bytes, &mut device).unwrap_err();
    assert_eq!(error.to_string(), "cuMemcpyHtoDAsync_v2: CUDA_ERROR_UNKNOWN (999)");
    assert_eq!(rig.fake.calls("cuStreamSynchronize"), 1);
    rig.fake.clear_faults();
    for start in [100, 5000] {
        // SAFETY: no device work uses it.
        unsafe { unregister_region(&driver, bytes[start..].as_ptr()) }.unwrap();
    }
    rig.finish();
}

#[test]
fn it_warns_once_for_each_place_it_is_called_from() {
    let rig = Rig::new(Mode::Untracked);
    let bytes = pattern(1, LEN);
    let mut device = rig.device(LEN);
    let noted = ExternalRegion::note(bytes.as_ptr(), LEN);
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, || {
        for _ in 0..3 {
            copy_h2d_async(&rig.stream, &bytes, &mut device).unwrap();
        }
        copy_h2d_async(&rig.stream, &bytes, &mut device).unwrap();
    });
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert_eq!(text.matches("no guard tracks").count(), 2, "{text}");
    assert_eq!(text.matches("any_source.rs").count(), 2, "it names the caller: {text}");
    drop(noted);
    rig.finish();
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Another binding: the driver's functions, declared by hand.
mod other_binding {
    use fake_cuda::control::Control;
    use std::ffi::c_void;

    pub type Handle = *mut c_void;

    pub struct Api {
        pub stream_create: unsafe extern "C" fn(*mut Handle, u32) -> u32,
        pub stream_destroy: unsafe extern "C" fn(Handle) -> u32,
        pub context: unsafe extern "C" fn(*mut Handle) -> u32,
        pub copy: unsafe extern "C" fn(u64, *const c_void, usize, Handle) -> u32,
        pub alloc: unsafe extern "C" fn(*mut u64, usize) -> u32,
        pub free: unsafe extern "C" fn(u64) -> u32,
        pub read: unsafe extern "C" fn(*mut c_void, u64, usize) -> u32,
    }

    impl Api {
        pub fn load(fake: &Control) -> Self {
            /// # Safety
            ///
            /// `F` is the type of the function's C prototype.
            unsafe fn find<F: Copy>(fake: &Control, name: &str) -> F {
                // SAFETY: the contract.
                unsafe { fake.symbol::<F>(name) }.expect("an exported function")
            }
            Self {
                // SAFETY: its C prototype.
                stream_create: unsafe { find(fake, "cuStreamCreate") },
                // SAFETY: its C prototype.
                stream_destroy: unsafe { find(fake, "cuStreamDestroy_v2") },
                // SAFETY: its C prototype.
                context: unsafe { find(fake, "cuCtxGetCurrent") },
                // SAFETY: its C prototype.
                copy: unsafe { find(fake, "cuMemcpyHtoDAsync_v2") },
                // SAFETY: its C prototype.
                alloc: unsafe { find(fake, "cuMemAlloc_v2") },
                // SAFETY: its C prototype.
                free: unsafe { find(fake, "cuMemFree_v2") },
                // SAFETY: its C prototype.
                read: unsafe { find(fake, "cuMemcpyDtoH_v2") },
            }
        }
    }
}

#[test]
fn a_stream_of_hand_declared_functions_is_recorded_and_may_be_destroyed_at_once() {
    let rig = Rig::new(Mode::DefaultStream);
    let api = other_binding::Api::load(&rig.fake);
    let (mut context, mut stream, mut device) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
    // SAFETY: writes one pointer.
    assert_eq!(unsafe { (api.context)(&mut context) }, 0);
    // SAFETY: writes one pointer.
    assert_eq!(unsafe { (api.stream_create)(&mut stream, 1) }, 0);
    // SAFETY: writes one address.
    assert_eq!(unsafe { (api.alloc)(&mut device, LEN) }, 0);
    let bytes = pattern(5, LEN);
    for destroyed in [false, true] {
        let mut buffer = rig.filled(LEN, &bytes);
        let address = buffer.as_ptr();
        rig.fake.hold(stream as usize);
        // SAFETY: the guard is recorded below, so the memory stays until the copy is done.
        assert_eq!(unsafe { (api.copy)(device, address.cast(), LEN, stream) }, 0);
        // SAFETY: both handles are live, and the context outlives the pool's shutdown.
        let raw = unsafe { RawStream::new(context, stream) };
        buffer.record_last_use(&raw).unwrap();
        rig.fake.run_until_idle();
        assert!(!buffer.is_quiescent().unwrap());
        drop(buffer);
        assert!((0..4).all(|_| rig.pool.take(LEN).as_ptr() != address), "reused in flight");
        match destroyed {
            false => rig.fake.release(stream as usize),
            // Its work goes on; the handle means nothing any more.
            // SAFETY: used by nobody any more.
            true => assert_eq!(unsafe { (api.stream_destroy)(stream) }, 0),
        }
        rig.fake.run_until_idle();
        let mut back = vec![0u8; LEN];
        // SAFETY: reads as many bytes as there is room for.
        assert_eq!(unsafe { (api.read)(back.as_mut_ptr().cast(), device, LEN) }, 0);
        assert!(back == bytes, "wrong bytes on the device");
        until("the block's return", || rig.pool.take(LEN).as_ptr() == address);
        rig.drain();
    }
    // A record on the destroyed stream is an error, and the buffer stays safe.
    let mut buffer = rig.filled(LEN, &bytes);
    // SAFETY: not live, which is what is tested; the fake checks its handles.
    let dead = unsafe { RawStream::new(context, stream) };
    assert!(matches!(buffer.record_last_use(&dead), Err(Error::Driver(call)) if call.code() == 400));
    drop(buffer);
    // SAFETY: allocated above, and used by nothing any more.
    assert_eq!(unsafe { (api.free)(device) }, 0);
    rig.finish();
}
