//! The system starts no threads: the pool does without, gives nothing up, and goes on when it can have them.

mod common;

use common::{KIB, PATIENCE, Rig, all_zero, until};
use pinpool::sim::{Fault, Sim};
use std::time::Duration;

const LEN: usize = 64 * KIB;

#[test]
fn without_a_cleaner_what_was_returned_is_taken_again_and_nothing_grows() {
    let rig = Rig::new();
    rig.sim.fail("pthread_create", Fault::always(1));
    for seed in 1..=50 {
        let mut buffer = rig.pool.take(LEN);
        assert!(all_zero(&buffer), "old bytes reached a taker");
        buffer.fill(seed);
    }
    assert_eq!(rig.sim.mapped_bytes(), LEN, "every take maps fresh memory: {:#?}", rig.pool.stats());
    rig.sim.clear_faults();
    drop(rig.pool.take(LEN));
    rig.drain();
    assert!(rig.pool.take(LEN).is_pinned(), "the pool goes on");
    rig.finish();
}

#[test]
fn without_a_cleaner_nothing_is_taken_that_a_device_may_read() {
    // It reads pageable memory itself, so a forgotten copy may still do.
    let rig = Rig::with(Sim::builder().attribute(88, 1).build(), |builder| builder);
    rig.sim.fail("pthread_create", Fault::always(1));
    let first = rig.pool.take(LEN);
    let address = first.as_ptr();
    drop(first);
    assert_ne!(rig.pool.take(LEN).as_ptr(), address);
    rig.sim.clear_faults();
    rig.drain();
    rig.finish();
}

#[test]
fn without_lanes_the_cleaner_does_their_work_however_much_it_is() {
    let rig = Rig::with(Sim::builder().mapping_check(false).build(), |builder| builder);
    // The cleaner is the first thread, and the only one.
    rig.sim.fail("pthread_create", Fault::from_nth(2, 1));
    let count = 2500;
    let hold = rig.pool.hold_cleaner();
    let buffers: Vec<_> = (0..count).map(|_| rig.pool.take(4 * KIB)).collect();
    drop(buffers);
    drop(hold);
    rig.drain();
    let stats = rig.assert_balanced();
    assert_eq!((stats.registrations, stats.pooled_buffers), (count, count as usize), "{stats:#?}");
    // And without a record: the other lane's work.
    let hold = rig.pool.hold_cleaner();
    let buffers: Vec<_> = (0..count).map(|_| rig.pool.take(4 * KIB)).collect();
    drop(buffers);
    drop(hold);
    rig.drain();
    assert_eq!(rig.assert_balanced().pooled_buffers, count as usize);
    rig.finish();
}

#[test]
fn a_shutdown_without_threads_is_bounded_and_loses_nothing() {
    let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(Duration::from_millis(20)));
    rig.shelve(LEN, 1);
    rig.pool.shutdown();
    rig.sim.fail("pthread_create", Fault::always(1));
    drop(rig.pool.take(LEN));
    let report = rig.pool.shutdown();
    assert!(!report.completed && report.quarantined_bytes == 0, "{report:?}");
    rig.sim.clear_faults();
    assert!(rig.pool.drain(PATIENCE));
    rig.assert_balanced();
    rig.finish();
}

#[test]
fn memory_that_is_wanted_back_is_not_waited_for_in_vain() {
    let rig = Rig::new();
    let driver = rig.sim.driver();
    rig.sim.fail("pthread_create", Fault::always(1));
    let pinned = pinpool::pin::Pinned::new(&driver, vec![7_u8; LEN]).unwrap();
    std::thread::scope(|scope| {
        let unpin = scope.spawn(|| pinned.unpin());
        until("an attempt to start a thread", || rig.sim.calls("pthread_create") > 0);
        rig.sim.clear_faults();
        assert_eq!(unpin.join().unwrap().unwrap(), vec![7; LEN]);
    });
    rig.finish();
}
