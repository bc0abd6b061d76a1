//! Memory backends, and pools whose memory is the driver's by choice.
#![allow(unsafe_code)] // Memory is used, and given back, by its address.

use crate::points::Mode;
use crate::stage::{LEN, Stage};
use pinpool::backend::kind::Kind;
use pinpool::backend::{Backend, DevicePreferred, HostPinned, MemoryBackend, Registered};

pub fn host_pinned(stage: &Stage) {
    backend::<pinpool::backend::kind::HostPinned>(stage, HostPinned::new(&stage.device.driver()).ok());
}

pub fn device_preferred(stage: &Stage) {
    backend::<pinpool::backend::kind::DevicePreferred>(
        stage,
        DevicePreferred::new(&stage.device.driver()).ok(),
    );
}

pub fn registered(stage: &Stage) {
    backend::<pinpool::backend::kind::Registered>(stage, Registered::new(&stage.device.driver()).ok());
}

/// Two pieces, one after the other; what the driver would not take back is leaked, and counted.
fn backend<K: Kind + 'static>(stage: &Stage, backend: Option<Backend<K>>) {
    let Some(backend) = backend else {
        assert!(stage.point.is_some(), "nothing failed");
        if stage.point.is_some_and(|point| point.mode != Mode::Once) {
            // It could not give its context back either.
            stage.a_pool_has_gone();
        }
        return;
    };
    for seed in 1..3 {
        // SAFETY: a size of whole pages.
        let Ok(base) = (unsafe { backend.allocate(LEN) }) else {
            assert!(stage.point.is_some(), "nothing failed");
            continue;
        };
        // SAFETY: the allocation has that many bytes, and nobody else knows of it.
        unsafe { base.as_ptr().write_bytes(seed, LEN) };
        // SAFETY: nobody uses it any more.
        if unsafe { backend.deallocate(base, LEN) }.is_err() {
            assert!(stage.point.is_some(), "nothing failed");
            // A device may still reach it.
            // SAFETY: it is leaked, not freed.
            unsafe { base.as_ptr().write_bytes(9, LEN) };
        }
    }
    let stats = backend.stats();
    assert!(stats.live == 0 && stats.leaked <= 2, "{stats:?}");
    assert_eq!(stats.leaked_bytes as usize, stats.leaked as usize * LEN, "{stats:?}");
    let of_driver = stage.device.allocated_host_bytes() + stage.device.managed_bytes();
    let kept = of_driver + stage.device.registered_bytes();
    assert_eq!(kept, stats.leaked_bytes as usize, "the driver has what is counted as leaked: {stats:?}");
    if stats.leaked > 0 {
        stage.a_pool_has_gone();
    }
    // It gives its context back when nothing fails any more: a retain that the driver keeps cannot be asked for twice.
    stage.at_the_end_of_faults(move |_| drop(backend));
}
