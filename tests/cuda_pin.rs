//! Memory that the caller owns on the real path: cudarc's contexts and copies, pinpool's CUDA back end, over the
//! fake libcuda. It is asked, not our own books, what is page-locked.
#![cfg(all(feature = "cudarc", target_os = "linux"))]
#![allow(unsafe_code)] // The functions under test ask for promises; the tests keep the memory.

use cudarc::driver::{CudaContext, CudaStream};
use fake_cuda::control::Control;
use pinpool::pin::{self, Pinned, Region, pin_all, register_region, unregister_region};
use pinpool::regions::{self, Coverage};
use pinpool::{Driver, PinnedPool};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const LEN: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(20);
const A_WHILE: Duration = Duration::from_millis(30);

/// One process has one libcuda, so the tests of this file take turns at it. It moves only when it is stepped.
fn fake() -> MutexGuard<'static, Control> {
    static FAKE: LazyLock<Mutex<Control>> = LazyLock::new(|| {
        let control = Control::load().expect("cargo builds the fake library beside the tests");
        assert!(control.set_stepped() && control.set_devices(2), "used before it was loaded");
        Mutex::new(control)
    });
    let control = FAKE.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(pin::drain(PATIENCE), "{:?}", pin::stats());
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

#[test]
fn all_or_none_and_the_driver_is_asked() {
    let fake = fake();
    let _context = CudaContext::new(0).unwrap();
    let driver = Driver::auto();
    let buffers: Vec<_> = (0..5).map(pattern).collect();
    let list: Vec<_> = buffers.iter().map(|buffer| Region::of(buffer)).collect();
    let says = |buffer: &Vec<u8>| pin::driver_says_page_locked(&driver, buffer.as_ptr(), LEN).unwrap();
    let before = fake.registered_bytes();

    fake.fail("cuMemHostRegister", 3, 2);
    // SAFETY: the buffers outlive the call, which leaves none of them registered.
    let error = unsafe { pin_all(&driver, &list) }.unwrap_err();
    let base = list[2].base();
    assert_eq!(
        error.to_string(),
        format!("region 2 ({LEN} bytes at {base:#x}): cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")
    );
    assert_eq!((fake.calls("cuMemHostRegister"), fake.calls("cuMemHostUnregister")), (3, 2));
    assert_eq!(fake.registered_bytes(), before);
    assert!(!buffers.iter().any(says));

    fake.clear_faults();
    // SAFETY: the buffers outlive the regions, and no device work uses them.
    let pinned = unsafe { pin_all(&driver, &list) }.unwrap();
    assert!(buffers.iter().all(says));
    assert_eq!(fake.registered_bytes(), before + 5 * LEN);
    pinned.unpin_all().unwrap();
    assert!(!buffers.iter().any(says));

    let twice = [list[0], list[1], list[0]];
    // SAFETY: the buffers outlive the call, which leaves none of them registered.
    let error = unsafe { pin_all(&driver, &twice) }.unwrap_err();
    assert_eq!((error.index(), error.code()), (Some(2), Some(712)));
    // SAFETY: as above.
    let error = unsafe { pin_all(&driver, &[list[0], Region::new(buffers[1].as_ptr(), 0)]) }.unwrap_err();
    assert_eq!((error.index(), error.code()), (Some(1), Some(1)));
    assert_eq!(fake.registered_bytes(), before);
    fake.assert_clean();
}

#[test]
fn a_registration_keeps_the_context_that_its_application_drops() {
    let fake = fake();
    let driver = Driver::auto();
    let bytes = pattern(1);
    let context = CudaContext::new(1).unwrap();
    // SAFETY: the memory outlives the registration.
    unsafe { register_region(&driver, bytes.as_ptr(), LEN) }.unwrap();
    drop(context);
    assert!(pin::driver_says_page_locked(&driver, bytes.as_ptr(), LEN).unwrap());
    assert_eq!(regions::covering(&bytes), Coverage::Whole);
    // SAFETY: no device work uses it.
    unsafe { unregister_region(&driver, bytes.as_ptr()) }.unwrap();
    assert!(!pin::driver_says_page_locked(&driver, bytes.as_ptr(), LEN).unwrap());
    // SAFETY: it is not registered, which is what is tested.
    let error = unsafe { unregister_region(&driver, bytes.as_ptr()) }.unwrap_err();
    assert!(error.to_string().ends_with("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED (713)"), "{error}");
    fake.assert_clean();
}

#[test]
fn a_context_that_is_not_a_primary_one_will_do_when_it_is_current() {
    let fake = fake();
    type Create = unsafe extern "C" fn(*mut usize, u32, i32) -> u32;
    type Destroy = unsafe extern "C" fn(usize) -> u32;
    // SAFETY: the type is the function's.
    let create = unsafe { fake.symbol::<Create>("cuCtxCreate_v2") }.unwrap();
    // SAFETY: the type is the function's.
    let destroy = unsafe { fake.symbol::<Destroy>("cuCtxDestroy_v2") }.unwrap();
    Driver::cuda().unwrap();
    let mut context = 0;
    // SAFETY: writes one pointer.
    assert_eq!(unsafe { create(&mut context, 0, 1) }, 0);

    let memory = Pinned::new(&Driver::auto(), pattern(1)).unwrap();
    assert!(memory.driver_says_page_locked().unwrap());
    let pool = PinnedPool::builder().build().unwrap();
    assert!(pool.take_pinned(LEN).unwrap().driver_says_page_locked().unwrap());
    assert_eq!(pool.prewarm(LEN, 1).unwrap(), 1);
    assert_eq!(fake.calls("cuDevicePrimaryCtxRetain"), 0, "no other context was made");
    assert_eq!(memory.unpin().unwrap(), pattern(1));
    assert!(pool.drain(PATIENCE) && pool.shutdown().completed);
    // SAFETY: everything that was registered in it is unregistered.
    assert_eq!(unsafe { destroy(context) }, 0);
    fake.assert_clean();
}

/// A replay buffer: slots that live long, are filled by the host and read by the device in turn.
#[test]
fn a_ring_through_cudarcs_copies() {
    const SLOTS: usize = 4;
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let before = (fake.registered_bytes(), pin::stats());
    let mut ring: Vec<_> = (0..SLOTS)
        .map(|_| Pinned::new(&Driver::auto(), vec![0u8; LEN].into_boxed_slice()).unwrap())
        .collect();
    let mut devices: Vec<_> = (0..SLOTS).map(|_| stream.alloc_zeros::<u8>(LEN).unwrap()).collect();
    stream.synchronize().unwrap();
    for round in 0..3 * SLOTS {
        let slot = round % SLOTS;
        if round >= SLOTS {
            fake.run_until_idle();
        }
        ring[slot].copy_from_slice(&pattern(round as u8)); // waits for the noted read
        stream.memcpy_htod(&ring[slot][..], &mut devices[slot]).unwrap();
        ring[slot].record_last_use(&stream).unwrap();
    }
    assert!(ring.iter().all(|memory| memory.driver_says_page_locked().unwrap()));
    fake.run_until_idle();
    for (slot, device) in devices.iter().enumerate() {
        assert!(stream.clone_dtoh(device).unwrap() == pattern((2 * SLOTS + slot) as u8), "slot {slot}");
    }

    // The end, in flight: one of the slots cannot be unregistered.
    fake.hold(handle(&stream));
    for (memory, device) in ring.iter_mut().zip(&mut devices) {
        stream.memcpy_htod(&memory[..], device).unwrap();
        memory.record_last_use(&stream).unwrap();
    }
    fake.fail("cuMemHostUnregister", 3, 999);
    drop(ring);
    assert!(!pin::drain(A_WHILE), "let go in flight");
    assert_eq!(fake.registered_bytes(), before.0 + SLOTS * LEN);
    fake.release(handle(&stream));
    fake.run_until_idle();
    assert!(pin::drain(PATIENCE));
    let after = pin::stats();
    assert_eq!(after.leaked_buffers, before.1.leaked_buffers + 1);
    assert_eq!(after.released_buffers, before.1.released_buffers + SLOTS as u64 - 1);
    assert_eq!(fake.registered_bytes(), before.0 + LEN);
    drop(devices);
    fake.run_until_idle();
    fake.assert_clean();
}

#[test]
fn dropped_without_a_record_it_waits_for_cudarcs_copy() {
    let fake = fake();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let mut device = stream.alloc_zeros::<u8>(LEN).unwrap();
    stream.synchronize().unwrap();
    let memory = Pinned::new(&Driver::auto(), pattern(9)).unwrap();
    let base = memory.as_ptr();
    fake.hold(handle(&stream));
    stream.memcpy_htod(&memory[..], &mut device).unwrap();
    drop(memory);
    assert!(!pin::drain(A_WHILE), "let go in flight");
    assert!(pin::driver_says_page_locked(&Driver::auto(), base, LEN).unwrap());
    fake.release(handle(&stream));
    fake.run_until_idle();
    assert!(pin::drain(PATIENCE));
    assert!(stream.clone_dtoh(&device).unwrap() == pattern(9));
    fake.assert_clean();
}
