//! What runs after `main`: handlers that were registered before the driver's, and so run after it is gone.
#![allow(unsafe_code)] // `atexit`, and the promise of `pin_all`.

use crate::device::{Device, LEN};
use pinpool::pin::{self, Pinned, PinnedRegions, Region};
use pinpool::{Error, PinnedBuffer, PinnedPool};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a program keeps in its statics, to be dropped when it ends.
pub struct Kept {
    pub device: &'static Device,
    pub pool: Option<PinnedPool>,
    pub buffers: Vec<PinnedBuffer>,
    pub regions: Option<PinnedRegions>,
    pub pinned: Option<Pinned<Vec<u8>>>,
    pub unpinned: Option<Pinned<Vec<u8>>>,
}

pub static KEPT: Mutex<Option<Kept>> = Mutex::new(None);
static FINI: AtomicBool = AtomicBool::new(false);

/// Fills `KEPT` with everything that there is to keep.
pub fn keep(device: &'static Device, pool: &PinnedPool) {
    pool.prewarm(LEN, 4).expect("a context is current");
    let mut buffers: Vec<PinnedBuffer> = (0..4).map(|_| pool.take(LEN)).collect();
    assert!(buffers[0].is_pinned());
    device.record(&mut buffers[0]).unwrap();
    device.hold();
    device.stall();
    device.record(&mut buffers[1]).unwrap();
    let driver = device.driver();
    let memory: &'static [u8] = vec![1; LEN].leak();
    // SAFETY: leaked memory.
    let regions = unsafe { pin::pin_all(&driver, &[Region::of(memory)]) }.unwrap();
    let new = || Pinned::new(&driver, vec![1u8; LEN]).unwrap();
    let (pinned, unpinned) = (Some(new()), Some(new()));
    let kept = Kept { device, pool: Some(pool.clone()), buffers, regions: Some(regions), pinned, unpinned };
    *KEPT.lock().unwrap() = Some(kept);
}

/// Registered first of all, so that it runs last, as the destructor of a static does that was made before CUDA.
pub fn at_the_very_end() {
    // SAFETY: a function of this program.
    unsafe { libc::atexit(last) };
}

pub fn in_the_fini_function() {
    FINI.store(true, Ordering::SeqCst);
}

extern "C" fn last() {
    use_everything();
}

extern "C" fn fini() {
    if FINI.load(Ordering::SeqCst) {
        use_everything();
    }
}

/// Runs after every exit handler.
#[used]
#[unsafe(link_section = ".fini_array")]
static FINI_FUNCTION: extern "C" fn() = fini;

/// Whatever a caller can do, with the driver gone: it ends, with an error where there is one to give.
fn use_everything() {
    let Some(mut kept) = KEPT.lock().unwrap().take() else { return };
    let pool = kept.pool.take().unwrap();
    let mut buffer = pool.take(LEN);
    buffer.fill(1);
    is_gone(kept.device.record(&mut buffer));
    is_gone(buffer.wait());
    assert!(buffer.is_quiescent().is_ok_and(|quiescent| !quiescent), "nothing is known of it");
    let mut pending = kept.buffers.swap_remove(1);
    is_gone(pending.wait());
    is_gone(pending.is_quiescent().map(drop));
    is_gone(block_on(pending.done()));
    pending[0] = 1; // Waits for nothing any more, and does not panic.
    drop((buffer, pending));
    kept.buffers.clear();
    let region = kept.pinned.as_ref().unwrap();
    let _ = region.driver_says_page_locked();
    assert!(kept.unpinned.take().unwrap().unpin().is_err());
    drop((kept.pinned.take(), kept.regions.take()));
    let driver = kept.device.driver_again();
    assert!(pin::Pinned::new(&driver, vec![1u8; LEN]).is_err());
    assert!(!pin::drain(std::time::Duration::from_secs(60)));
    assert!(pool.take_pinned(LEN).is_err() && pool.prewarm(LEN, 1).is_err());
    assert!(!pool.drain(std::time::Duration::from_secs(60)));
    pool.trim_to(0);
    pool.set_max_pooled_bytes(1);
    pool.clear();
    assert!(!pool.shutdown().completed);
    let _ = pool.stats();
    drop(pool);
    println!("used to the end");
}

fn is_gone(result: Result<(), Error>) {
    match result {
        Err(Error::Driver(call)) if call.code() == 4 => {}
        other => panic!("expected CUDA_ERROR_DEINITIALIZED, got {other:?}"),
    }
}

/// A future that is ready at its first look.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    match future.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => panic!("it waits for a pool that is gone"),
    }
}
