//! Forks over the fake libcuda, which answers 3 to a child of the process that initialised it, as the real one does: the
//! child of such a process never calls it, and one whose parent has left CUDA alone may use all of it.
#![cfg(all(feature = "cudarc", target_os = "linux"))]

mod child;

use child::forked::forked;
use child::{built, in_child, is_child};
use cudarc::driver::CudaContext;
use fake_cuda::control::Control;
use pinpool::pin::Pinned;
use pinpool::{Driver, Error, PinnedPool, regions};
use std::ffi::OsStr;
use std::time::Duration;

const LEN: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

/// A child that calls the driver of its parent ends with a status of its own.
const STRICT: (&str, &str) = ("FAKE_CUDA_IN_CHILD", "fail");

fn run(case: &str) {
    let library = built("libfake_cuda.so");
    in_child(case, &[(STRICT.0, OsStr::new(STRICT.1)), ("PINPOOL_CUDA_LIBRARY", library.as_os_str())]);
}

#[test]
fn a_process_that_forks_first_and_uses_cuda_only_in_the_child_is_not_spoiled() {
    run("parent_without_cuda");
}

#[test]
#[ignore = "run in a child by the test above"]
fn parent_without_cuda() {
    if !is_child() {
        return;
    }
    // Mapped, as cudarc's or the linker's doing might have it, and not initialised.
    let fake = Control::load().unwrap();
    let pool = PinnedPool::builder().build().unwrap();
    for _ in 0..3 {
        drop((pool.take(LEN), pinpool::take(LEN)));
        assert!(pool.drain(PATIENCE) && pinpool::drain(PATIENCE));
    }
    let buffer = pinpool::take(LEN);
    assert!(
        !buffer.is_pinned()
            && !regions::is_pinned(buffer.as_ptr())
            && !buffer.driver_says_page_locked().unwrap()
    );
    assert_eq!(fake.calls("cuInit"), 0, "the parent was initialised behind its back");
    for _ in 0..2 {
        // Twice: what one child does, the other knows nothing of.
        assert_eq!(forked(|| forked(|| use_cuda(&fake)) + use_cuda(&fake)), 0);
    }
    assert_eq!(fake.calls("cuInit"), 0);
    // The parent may do it itself afterwards.
    drop(buffer);
    assert_eq!(use_cuda(&fake), 0);
    assert_eq!(forked(|| leave_cuda_alone(&fake)), 0, "a child of one that used it");
}

/// All of it, in a process that may: 0 when it works.
fn use_cuda(fake: &Control) -> i32 {
    let Ok(context) = CudaContext::new(0) else { return 1 };
    let stream = context.new_stream().unwrap();
    let mut device = stream.alloc_zeros::<u8>(LEN).unwrap();
    let pool = PinnedPool::builder().build().unwrap();
    for pool in [&pool, pinpool::global()] {
        let Ok(mut buffer) = pool.take_pinned(LEN) else { return 2 };
        buffer.fill(7);
        if !regions::is_pinned(buffer.as_ptr()) || buffer.driver_says_page_locked() != Ok(true) {
            return 3;
        }
        if buffer.copy_to(.., &stream, &mut device).is_err() || buffer.wait().is_err() {
            return 4;
        }
        drop(buffer);
        if !pool.drain(PATIENCE) || pool.stats().pooled_buffers == 0 || !pool.take(LEN).is_pinned() {
            return 5;
        }
    }
    if stream.clone_dtoh(&device).unwrap() != vec![7u8; LEN] {
        return 6;
    }
    let Ok(pinned) = Pinned::new(&Driver::auto(), vec![1u8; LEN]) else { return 7 };
    drop(pinned);
    if !pinpool::pin::drain(PATIENCE) || !pool.shutdown().completed || !pinpool::shutdown().completed {
        return 8;
    }
    if fake.violations().is_empty() { 0 } else { 9 }
}

#[test]
fn a_child_of_a_process_that_used_cuda_never_calls_it() {
    run("parent_with_cuda");
}

#[test]
#[ignore = "run in a child by the test above"]
fn parent_with_cuda() {
    if !is_child() {
        return;
    }
    let fake = Control::load().unwrap();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let mut device = stream.alloc_zeros::<u8>(LEN).unwrap();
    let pool = PinnedPool::builder().build().unwrap();
    let mut recorded = pool.take_pinned(LEN).unwrap();
    recorded.copy_to(.., &stream, &mut device).unwrap();
    let mut noted = pinpool::take_pinned(LEN).unwrap();
    stream.memcpy_htod(&noted, &mut device).unwrap();
    let pinned = Pinned::new(&Driver::auto(), vec![1u8; LEN]).unwrap();
    noted.set_dirty_len(0);
    let mut guards = Some((recorded, noted, pinned));
    let status = forked(|| {
        let (mut recorded, noted, pinned) = guards.take().unwrap();
        let mut plain = pinpool::take(LEN);
        plain.fill(1);
        let answers = [
            recorded.record_last_use(&stream),
            recorded.wait(),
            noted.wait(),
            plain.copy_to(.., &stream, &mut device),
            plain.record_last_use(&stream),
        ];
        if let Some(wrong) = answers.iter().position(|answer| *answer != Err(Error::ForkedChild)) {
            println!("answer {wrong}: {:?}", answers[wrong]);
            return 1;
        }
        if plain.upload(.., &stream, &mut device).is_ok() || Driver::cuda().is_ok() {
            return 2;
        }
        drop((recorded, noted, pinned));
        drop((pool.take(LEN), pinpool::take(LEN)));
        leave_cuda_alone(&fake)
    });
    assert_eq!(status, 0);
    drop(guards);
    assert!(pool.drain(PATIENCE) && pinpool::drain(PATIENCE) && pinpool::pin::drain(PATIENCE));
    assert!(pool.shutdown().completed);
    fake.assert_clean();
}

/// In a process that may not; a call ends it with a status of the fake's.
fn leave_cuda_alone(fake: &Control) -> i32 {
    let calls = fake.total_calls();
    let pool = PinnedPool::builder().build().unwrap();
    for pool in [&pool, pinpool::global()] {
        let buffer = pool.take(LEN);
        if buffer.is_pinned() || regions::is_pinned(buffer.as_ptr()) || pool.take_pinned(LEN).is_ok() {
            return 21;
        }
    }
    if pool.take_pinned(LEN).unwrap_err() != Error::ForkedChild {
        return 22;
    }
    if Pinned::new(&Driver::auto(), vec![1u8; LEN]).is_ok() {
        return 23;
    }
    if fake.total_calls() == calls { 0 } else { 24 }
}
