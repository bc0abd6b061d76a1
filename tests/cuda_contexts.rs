//! Contexts that end, and contexts that must not be made, through the driver's C interface: cudarc's contexts and streams,
//! pinpool's CUDA back end, the fake libcuda with two devices. `tests/contexts_ended.rs` has the details.
#![cfg(all(feature = "cudarc", target_os = "linux"))]
#![allow(unsafe_code)] // The driver's own functions, by their C prototypes.

mod child;

use child::{in_child, is_child};
use cudarc::driver::CudaContext;
use fake_cuda::control::Control;
use pinpool::{Driver, PinnedPool};
use std::time::{Duration, Instant};

const LEN: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

/// Declares a test that runs its body in a process of its own, on a device that moves only when it is stepped.
macro_rules! alone {
    ($($name:ident => $case:ident($fake:ident) $body:block)*) => {$(
        #[test]
        fn $name() {
            in_child(stringify!($case), &[]);
        }

        #[test]
        #[ignore = "run in a child by the test above"]
        fn $case() {
            if is_child() {
                let $fake = Control::load().unwrap();
                assert!($fake.set_stepped() && $fake.set_devices(2));
                $body
                assert_eq!($fake.violations(), Vec::<String>::new());
            }
        }
    )*};
}

alone! {
    a_context_that_is_not_primary_lives_as_long_as_the_pool_has_something_in_it => child_with_its_own_context(fake) {
        assert_eq!(fake.initialize(), 0);
        // SAFETY: the C prototype.
        let create: unsafe extern "C" fn(*mut usize, u32, i32) -> u32 = unsafe { fake.symbol("cuCtxCreate_v2") }.unwrap();
        let mut handle = 0;
        // SAFETY: writes one handle.
        assert_eq!(unsafe { create(&mut handle, 0, 0) }, 0);
        // SAFETY: a context of device 0 that nobody else owns.
        let context = unsafe { CudaContext::from_raw_context(0, 0, handle as *mut _) }.unwrap();
        let stream = context.new_stream().unwrap();
        let pool = pool();
        let mut buffer = pool.take(LEN);
        buffer.record_last_use(&stream).unwrap();
        fake.run_until_idle();
        drop(buffer);
        settle(&pool);
        // The application gives both up. What is page-locked there, and the pool's events, are to be undone in it.
        drop((stream, context));
        assert_eq!(fake.calls("cuCtxDestroy"), 0, "the pool has something in it");
        let buffer = pool.take(LEN);
        assert!(buffer.is_pinned(), "{:#?}", pool.stats());
        drop(buffer);
        settle(&pool);
        assert_eq!(fake.primary_retains(0), 0, "and no primary context was made instead");
        let report = pool.shutdown();
        assert!(report.completed, "{report:?}");
        assert_eq!((report.registered_bytes_after, report.quarantined_bytes), (0, 0), "{report:?}");
        assert_eq!((fake.calls("cuCtxDestroy"), fake.registered_bytes()), (1, 0), "its last owner was the pool");
    }

    a_reset_under_the_pool_leaks_what_was_page_locked_there_and_a_new_context_works => child_that_resets(fake) {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let pool = pool();
        pool.prewarm(LEN, 3).unwrap();
        let mut buffers = [(); 2].map(|()| pool.take(LEN));
        fake.hold(stream.cu_stream() as usize);
        fake.stall(stream.cu_stream() as usize, Duration::ZERO);
        buffers.iter_mut().for_each(|buffer| buffer.record_last_use(&stream).unwrap());
        let [out, queued] = buffers;
        drop(queued);
        // SAFETY: the C prototype.
        let reset: unsafe extern "C" fn(i32) -> u32 = unsafe { fake.symbol("cuDevicePrimaryCtxReset_v2") }.unwrap();
        // SAFETY: resets a device of which nothing here is inside a call.
        assert_eq!(unsafe { reset(0) }, 0);
        assert!(out.is_quiescent().unwrap(), "its work ended with its context");
        settle(&pool);
        drop(out);
        settle(&pool);
        let stats = pool.stats();
        assert!(stats.is_balanced(), "{stats:#?}");
        assert_eq!((stats.quarantined_bytes, stats.registered_bytes, stats.pooled_buffers), (3 * LEN, 0, 0), "{stats:#?}");
        drop((stream, context));
        let again = CudaContext::new(0).unwrap();
        let stream = again.new_stream().unwrap();
        let mut device = stream.alloc_zeros::<u8>(LEN).unwrap();
        for round in 0..3 {
            let mut buffer = pool.take(LEN);
            assert_eq!(buffer.driver_says_page_locked().unwrap(), round > 0, "page-locked at its first return");
            buffer.fill(round + 1);
            buffer.copy_to(.., &stream, &mut device).unwrap();
            drop(buffer);
            fake.run_until_idle();
            settle(&pool);
        }
        fake.run_until_idle();
        assert_eq!(stream.clone_dtoh(&device).unwrap(), vec![3; LEN]);
        assert!(pool.shutdown().completed);
        drop((device, stream, again, pool));
        assert_eq!(fake.primary_retains(0), 0, "a retain is left");
    }

    the_first_gpu_is_left_alone_when_the_application_uses_the_second => child_on_the_second(fake) {
        let context = CudaContext::new(1).unwrap();
        let stream = context.new_stream().unwrap();
        let pool = pool();
        for _ in 0..4 {
            let mut buffer = pool.take(LEN);
            buffer.record_last_use(&stream).unwrap();
            drop((buffer, pool.take(LEN), pool.take_pinned(LEN / 2).unwrap()));
            fake.run_until_idle();
            settle(&pool);
        }
        assert_eq!(fake.primary_retains(0), 0, "a context was made on a GPU that nobody uses");
        // Its last handle, without a shutdown.
        drop((pool, stream, context));
        let deadline = Instant::now() + PATIENCE;
        while fake.primary_retains(1) > 0 {
            assert!(Instant::now() < deadline, "a retain is left");
            std::thread::yield_now();
        }
        assert_eq!(fake.calls("cuCtxCreate"), 0);
    }

    a_created_context_that_is_destroyed_ends_no_pool => child_that_destroys(fake) {
        assert_eq!(fake.initialize(), 0);
        let mut own = 0;
        // SAFETY: the C prototype.
        let create: unsafe extern "C" fn(*mut usize, u32, i32) -> u32 = unsafe { fake.symbol("cuCtxCreate_v2") }.unwrap();
        // SAFETY: the C prototype.
        let destroy: unsafe extern "C" fn(usize) -> u32 = unsafe { fake.symbol("cuCtxDestroy_v2") }.unwrap();
        // SAFETY: writes one pointer.
        assert_eq!(unsafe { create(&mut own, 0, 1) }, 0);
        let pool = pool();
        drop(pool.take(LEN));
        settle(&pool);
        let buffer = pool.take(LEN);
        assert!(buffer.is_pinned(), "the context is learned from the drop");
        // SAFETY: nothing is inside a call in it.
        assert_eq!(unsafe { destroy(own) }, 0);
        drop(buffer);
        settle(&pool);
        drop(pool.take(LEN));
        settle(&pool);
        let stats = pool.stats();
        assert!(stats.is_balanced() && stats.quarantined_bytes == LEN, "{stats:#?}");
        assert_eq!(fake.calls("cuDevicePrimaryCtxRetain"), 0, "a context was made");
        assert!(pool.shutdown().completed);
    }
}

fn pool() -> PinnedPool {
    PinnedPool::builder().driver(Driver::auto()).build().unwrap()
}

fn settle(pool: &PinnedPool) {
    assert!(pool.drain(PATIENCE), "{:#?}", pool.stats());
}
