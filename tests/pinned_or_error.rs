//! `take_pinned` and `prewarm`: page-locked, or an error that says why not and what to do. Neither makes a
//! context on a device that the application does not use.

mod common;

use common::{KIB, Rig, lock_call, lock_symbol, locked_bytes};
use pinpool::sim::{Fault, Sim};
use pinpool::{Driver, Error, PinnedPool};

const LEN: usize = 64 * KIB;

fn pool_on(sim: &Sim) -> PinnedPool {
    PinnedPool::builder().driver(sim.driver()).build().unwrap()
}

/// Both entry points refuse alike.
fn refusals(pool: &PinnedPool) -> [Error; 2] {
    [pool.take_pinned(LEN).unwrap_err(), pool.prewarm(LEN, 3).unwrap_err()]
}

fn assert_not_pinned(pool: &PinnedPool, why: &str) {
    for error in refusals(pool) {
        assert!(matches!(error, Error::NotPinned { bytes: LEN, .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.starts_with(&format!("a buffer of {LEN} bytes could not be page-locked: ")), "{text}");
        assert!(text.contains(why), "{text}");
    }
    let stats = pool.stats();
    assert!(
        stats.is_balanced() && stats.registered_bytes == 0 && stats.checked_out_buffers == 0,
        "{stats:#?}"
    );
}

/// Which devices' primary contexts are active.
fn active(sim: &Sim, devices: i32) -> Vec<bool> {
    (0..devices).map(|device| sim.cuda().cu_device_primary_ctx_get_state(device).unwrap().1).collect()
}

#[test]
fn page_locked_at_once_as_the_driver_says() {
    let rig = Rig::new();
    let buffer = rig.pool.take_pinned(LEN).unwrap();
    assert!(buffer.is_pinned() && buffer.driver_says_page_locked().unwrap() && common::all_zero(&buffer));
    assert_eq!(locked_bytes(&rig.sim), LEN);
    drop(buffer);
    rig.drain();
    assert!(rig.pool.take_pinned(LEN).unwrap().is_pinned(), "and from the shelf");
    assert_eq!(rig.sim.calls(lock_call()), 1);
    rig.drain();
    assert_eq!(rig.pool.prewarm(LEN, 3).unwrap(), 3);
    let stats = rig.assert_balanced();
    assert_eq!((stats.pooled_buffers, stats.pooled_pinned_bytes), (4, 4 * LEN));
    let buffers: Vec<_> = (0..4).map(|_| rig.pool.take(LEN)).collect();
    assert!(buffers.iter().all(|buffer| buffer.is_pinned()), "what was page-locked ahead are hits");
    drop(buffers);
    rig.finish();
}

#[test]
fn no_cuda() {
    for driver in [Driver::host_only(), Sim::builder().devices(0).build().driver()] {
        let pool = PinnedPool::builder().driver(driver).build().unwrap();
        let [take, prewarm] = refusals(&pool);
        assert_eq!(take, prewarm);
        match take {
            Error::NoCuda { report } => assert!(report.contains("Driver::host_only()"), "{report}"),
            error => assert_eq!(error.to_string(), "cuInit: CUDA_ERROR_NO_DEVICE (100)"),
        }
    }
}

#[test]
fn no_context_is_said_with_what_to_do_and_none_is_made() {
    let sim = Sim::builder().devices(2).build();
    let pool = pool_on(&sim);
    assert_not_pinned(
        &pool,
        "no CUDA context is known and no primary context is active; create the context first",
    );
    assert_not_pinned(&pool, "`context_of`");
    assert_eq!(active(&sim, 2), [false, false], "a context was made");
    assert_eq!(sim.calls("cuDevicePrimaryCtxRetain"), 0);

    // The application comes to use the second device, on another thread.
    let context = sim.context(1);
    sim.cuda().cu_ctx_set_current(0).unwrap();
    assert_eq!(pool.prewarm(LEN, 2).unwrap(), 2);
    assert!(pool.take_pinned(LEN).unwrap().driver_says_page_locked().unwrap());
    assert_eq!(active(&sim, 2), [false, true], "a context was made on the device that nobody uses");
    assert_eq!(sim.cuda().cu_ctx_get_current().unwrap(), 0, "the thread's context is as it was");
    drop(context);
    assert!(pool.shutdown().completed);
    assert_eq!(active(&sim, 2), [false, false], "the pool's retain is given up");
    sim.assert_clean();
}

#[test]
fn the_ceiling() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_registered_bytes(2 * LEN));
    let held = [rig.pool.take_pinned(LEN).unwrap(), rig.pool.take_pinned(LEN).unwrap()];
    for error in refusals(&rig.pool) {
        assert!(error.to_string().contains("max_registered_bytes is reached; raise it, or drop"), "{error}");
    }
    assert_eq!(rig.assert_balanced().registered_bytes, 2 * LEN);
    drop(held);
    rig.drain();
    // What is idle in the class is handed out; another class takes its room from it.
    let larger = rig.pool.take_pinned(2 * LEN).unwrap();
    assert!(larger.is_pinned());
    drop(larger);
    rig.drain();
    assert_eq!(rig.pool.prewarm(LEN, 5).unwrap(), 2, "as many as fit, and no error");
    rig.finish();
}

#[test]
fn the_drivers_refusal_and_the_pause_after_several() {
    let rig = Rig::new();
    rig.sim.fail(lock_call(), Fault::always(2));
    let refusal = format!("{}: CUDA_ERROR_OUT_OF_MEMORY (2)", lock_symbol());
    for _ in 0..4 {
        assert_not_pinned(&rig.pool, &refusal);
    }
    let asked = rig.sim.calls(lock_call());
    assert_eq!(asked, 8, "after eight refusals in a row it pauses");
    assert_not_pinned(&rig.pool, "refused several times in a row, so page-locking pauses for some seconds");
    assert_not_pinned(&rig.pool, &format!("the last refusal was {refusal}"));
    assert_eq!(rig.sim.calls(lock_call()), asked, "while it pauses nothing is asked");
    assert_eq!(rig.assert_balanced().registration_failures, 8);
    rig.finish();
}

#[test]
fn a_lost_device() {
    let rig = Rig::new();
    rig.sim.fail(lock_call(), Fault::once(700));
    let error = rig.pool.take_pinned(LEN).unwrap_err();
    assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{error}");
    assert_not_pinned(&rig.pool, "the device is lost");
    rig.finish();
}

#[test]
fn a_context_that_is_gone_is_asked_for_again() {
    let rig = Rig::new();
    rig.sim.fail(lock_call(), Fault::once(709));
    let error = rig.pool.take_pinned(LEN).unwrap_err();
    assert!(error.to_string().contains("CUDA_ERROR_CONTEXT_IS_DESTROYED (709)"), "{error}");
    assert!(rig.pool.take_pinned(LEN).unwrap().is_pinned(), "it is active, so it is learned again");
    rig.drain();
    assert!(rig.pool.stats().is_balanced());
}

#[test]
fn prewarm_stops_at_the_cap_and_says_how_many() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_pooled_bytes(5 * LEN));
    assert_eq!(rig.pool.prewarm(LEN, 0).unwrap(), 0);
    assert_eq!(rig.pool.prewarm(LEN, 100).unwrap(), 5);
    for bytes in [LEN, 8 * LEN] {
        let refused = rig.pool.prewarm(bytes, 1).unwrap_err().to_string();
        assert!(refused.contains("max_pooled_bytes is 327680"), "{refused}");
    }
    assert_eq!(rig.sim.calls(lock_call()), 5, "nothing is page-locked that could not be kept");
    assert_eq!(rig.assert_balanced().pooled_bytes, 5 * LEN);
    rig.finish();
}

#[test]
fn prewarm_reports_what_it_could_do_before_a_refusal() {
    let rig = Rig::new();
    rig.sim.fail(lock_call(), Fault::nth(3, 2));
    assert_eq!(rig.pool.prewarm(LEN, 5).unwrap(), 2);
    assert_eq!(rig.assert_balanced().registration_failures, 1);
    rig.finish();
}

#[test]
fn impossible_sizes() {
    let rig = Rig::new();
    for bytes in [usize::MAX, isize::MAX as usize] {
        assert_eq!(rig.pool.take_pinned(bytes).unwrap_err(), Error::TooLarge { bytes });
        assert_eq!(rig.pool.prewarm(bytes, 1).unwrap_err(), Error::TooLarge { bytes });
    }
    assert_eq!(rig.pool.take_pinned(1 << 47).unwrap_err(), Error::OutOfMemory { bytes: 1 << 47 });
    rig.finish();
}
