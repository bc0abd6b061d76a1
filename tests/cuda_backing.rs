//! A machine that refuses registration, on the real path: cudarc's contexts and copies, pinpool's CUDA back end,
//! over the fake libcuda in confidential computing mode.
#![cfg(all(feature = "cudarc", target_os = "linux"))]

use cudarc::driver::CudaContext;
use fake_cuda::control::Control;
use pinpool::backend::{DeviceSupport, Registered};
use pinpool::{BackingInUse, Driver, PinnedPool};
use std::time::Duration;

const LEN: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

fn pattern(seed: u8) -> Vec<u8> {
    (0..LEN).map(|index| (index as u8).wrapping_mul(13).wrapping_add(seed) | 1).collect()
}

#[test]
fn under_confidential_computing_buffers_are_page_locked_all_the_same() {
    let fake = Control::load().expect("cargo builds the fake library beside the tests");
    assert!(fake.set_stepped() && fake.set_confidential_computing(true), "used before it was loaded");
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let driver = Driver::auto();
    let pool = PinnedPool::builder().driver(driver.clone()).build().unwrap();

    let mut device = stream.alloc_zeros::<u8>(LEN).unwrap();
    for round in 0..4 {
        let mut buffer = pool.take(LEN);
        assert_eq!(buffer.is_pinned(), round > 0, "after its first return");
        assert_eq!(buffer.driver_says_page_locked(), Ok(round > 0));
        assert!(buffer.iter().all(|byte| *byte == 0));
        buffer.copy_from_slice(&pattern(round));
        buffer.copy_to(.., &stream, &mut device).unwrap();
        drop(buffer);
        // A copy from page-locked memory is executed when the stream is stepped, and the buffer waits for it.
        fake.run_until_idle();
        assert!(pool.drain(PATIENCE), "{:#?}", pool.stats());
        assert_eq!(stream.clone_dtoh(&device).unwrap(), pattern(round));
    }
    let stats = pool.stats();
    assert!(stats.is_balanced(), "{stats:#?}");
    assert_eq!((stats.backing, stats.registered_bytes), (BackingInUse::HostPinned, LEN));
    assert_eq!((fake.allocated_host_bytes(), fake.registered_bytes()), (LEN, 0));
    assert_eq!(fake.calls("cuMemHostRegister"), 1, "asked once");
    assert!(pool.take_pinned(1 << 20).unwrap().is_pinned());
    assert!(pool.shutdown().completed);
    assert_eq!(fake.allocated_host_bytes(), 0);

    // The attribute says yes, and the call says no: an error of the allocation, with nothing in its place.
    assert!(DeviceSupport::of(&driver, 0).unwrap().host_register);
    assert!(Registered::new(&driver).is_ok());
    fake.assert_clean();
}
