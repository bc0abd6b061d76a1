//! The cap on idle bytes, whom it evicts, and the ceiling on page-locked bytes.

mod common;

use common::{KIB, MIB, PATIENCE, Rig, lock_call, locked, unlock_call};
use pinpool::sim::Sim;

fn capped(cap_bytes: usize) -> Rig {
    Rig::with(Sim::new(), |builder| builder.max_pooled_bytes(cap_bytes))
}

/// Pooled buffers of the class.
fn pooled(rig: &Rig, class_bytes: usize) -> usize {
    let stats = rig.pool.stats();
    stats
        .classes
        .iter()
        .find(|class| class.class_bytes == class_bytes)
        .map_or(0, |class| class.pooled_buffers)
}

#[test]
fn the_largest_class_is_evicted_first() {
    let rig = capped(MIB + 3 * 64 * KIB);
    rig.shelve(64 * KIB, 2);
    rig.shelve(MIB, 1);
    rig.shelve(128 * KIB, 1);
    assert_eq!((pooled(&rig, MIB), pooled(&rig, 128 * KIB), pooled(&rig, 64 * KIB)), (0, 1, 2));
    rig.pool.set_max_pooled_bytes(64 * KIB);
    assert_eq!((pooled(&rig, 128 * KIB), pooled(&rig, 64 * KIB)), (0, 1));
    assert_eq!(rig.pool.stats().evictions, 3);
    rig.finish();
}

#[test]
fn the_cap_holds_at_its_edges() {
    for (cap_bytes, kept) in
        [(64 * KIB - 1, 0), (64 * KIB, 1), (64 * KIB + 1, 1), (128 * KIB - 1, 1), (128 * KIB, 2)]
    {
        let rig = capped(cap_bytes);
        rig.shelve(64 * KIB, 3);
        assert_eq!(pooled(&rig, 64 * KIB), kept, "cap {cap_bytes}");
        // Only what can be kept is page-locked at all.
        assert_eq!(rig.pool.stats().registrations, kept as u64, "cap {cap_bytes}");
        rig.finish();
    }
}

#[test]
fn a_block_larger_than_the_cap_is_neither_pooled_nor_registered() {
    let rig = capped(64 * KIB);
    rig.shelve(128 * KIB, 2);
    let stats = rig.pool.stats();
    assert_eq!((stats.pooled_buffers, stats.registrations, stats.recycled), (0, 0, 0));
    rig.finish();
}

#[test]
fn a_cap_of_zero_keeps_nothing() {
    let rig = capped(0);
    rig.shelve(4 * KIB, 5);
    let stats = rig.pool.stats();
    assert_eq!((stats.pooled_buffers, stats.registrations), (0, 0));
    assert!(!rig.pool.take(1).is_pinned());
    rig.finish();
}

#[test]
fn a_cap_of_everything_keeps_everything() {
    let rig = capped(usize::MAX);
    rig.shelve(4 * KIB, 50);
    assert_eq!(rig.pool.stats().pooled_buffers, 50);
    assert_eq!(rig.pool.max_pooled_bytes(), usize::MAX);
    rig.finish();
}

#[test]
fn lowering_the_cap_evicts_at_once_and_unregisters_in_the_background() {
    let rig = capped(usize::MAX);
    rig.shelve(64 * KIB, 8);
    rig.pool.set_max_pooled_bytes(2 * 64 * KIB);
    assert_eq!(rig.pool.stats().pooled_bytes, 2 * 64 * KIB, "when it returns, the shelves obey the cap");
    rig.pool.clear();
    let stats = rig.assert_balanced();
    assert_eq!((stats.pooled_bytes, stats.registered_bytes, stats.unregistrations), (0, 0, 8));
    // And it stays lowered.
    rig.shelve(64 * KIB, 8);
    assert_eq!(rig.assert_balanced().pooled_bytes, 2 * 64 * KIB);
    rig.finish();
}

#[test]
fn lowering_the_cap_under_a_hanging_driver_returns_all_the_same() {
    use pinpool::sim::Fault;
    let rig = capped(usize::MAX);
    rig.shelve(64 * KIB, 8);
    rig.sim.fail(unlock_call(), Fault::hang());
    rig.pool.set_max_pooled_bytes(0);
    let stats = rig.pool.stats();
    assert_eq!((stats.pooled_bytes, stats.retiring_bytes), (0, 8 * 64 * KIB));
    assert!(stats.is_balanced(), "{stats:#?}");
    rig.sim.clear_faults();
    rig.pool.clear();
    rig.finish();
}

#[test]
fn trimming_leaves_the_cap_as_it_is() {
    let rig = capped(usize::MAX);
    rig.shelve(64 * KIB, 4);
    rig.pool.trim_to(64 * KIB);
    assert_eq!(pooled(&rig, 64 * KIB), 1);
    assert_eq!(rig.pool.max_pooled_bytes(), usize::MAX);
    rig.shelve(64 * KIB, 4);
    assert_eq!(pooled(&rig, 64 * KIB), 4);
    rig.finish();
}

#[test]
fn what_waits_for_the_device_is_not_evicted() {
    let rig = capped(usize::MAX);
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(64 * KIB);
    let address = buffer.as_ptr() as usize;
    stream.hold();
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);
    rig.pool.set_max_pooled_bytes(0);
    rig.pool.clear();
    rig.sim.run_until_idle();
    assert_eq!(locked(&rig.sim), [(address, 64 * KIB)]);
    stream.release();
    rig.sim.run_until_idle();
    rig.drain();
    rig.pool.clear();
    assert_eq!(rig.pool.stats().registered_bytes, 0);
    rig.finish();
}

#[test]
fn the_ceiling_on_page_locked_bytes_is_never_exceeded() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_registered_bytes(3 * 64 * KIB));
    rig.shelve(64 * KIB, 5);
    let stats = rig.assert_balanced();
    assert_eq!((stats.registrations, stats.registered_bytes), (3, 3 * 64 * KIB));
    assert_eq!(stats.pooled_buffers, 3, "what stays pageable is freed, or a hit would be pageable");
    let buffers: Vec<_> = (0..5).map(|_| rig.pool.take(64 * KIB)).collect();
    assert_eq!(
        buffers.iter().filter(|buffer| buffer.is_pinned()).count(),
        3,
        "over it a block stays pageable"
    );
    drop(buffers);
    rig.drain();
    // A class that is asked for takes from the idle blocks of another, but not what was in use a moment ago.
    rig.shelve(128 * KIB, 1);
    assert!(!rig.pool.take(128 * KIB).is_pinned());
    rig.drain();
    rig.pool.let_time_pass(std::time::Duration::from_secs(1));
    rig.shelve(128 * KIB, 1);
    assert!(rig.pool.take(128 * KIB).is_pinned());
    rig.drain();
    let stats = rig.assert_balanced();
    assert_eq!(stats.peak_registered_bytes, 3 * 64 * KIB);
    rig.finish();
}

#[test]
fn the_ceiling_leaves_buffers_that_are_out_alone() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_registered_bytes(128 * KIB));
    rig.shelve(64 * KIB, 2);
    let out = [rig.pool.take(64 * KIB), rig.pool.take(64 * KIB)];
    rig.shelve(4 * KIB, 1);
    assert!(!rig.pool.take(4 * KIB).is_pinned());
    assert!(out.iter().all(|buffer| buffer.driver_says_page_locked().unwrap()));
    drop(out);
    rig.finish();
}

#[test]
fn prewarm_page_locks_ahead_and_take_pinned_never_gives_less() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_pooled_bytes(3 * 64 * KIB));
    assert_eq!(rig.pool.prewarm(64 * KIB, 2).unwrap(), 2);
    rig.assert_balanced();
    assert!(rig.pool.take(64 * KIB).is_pinned());
    rig.drain();
    assert_eq!(rig.pool.prewarm(64 * KIB, 5).unwrap(), 1, "as many as the cap has room for");
    let buffers: Vec<_> = (0..5).map(|_| rig.pool.take_pinned(64 * KIB).unwrap()).collect();
    assert!(buffers.iter().all(|buffer| buffer.driver_says_page_locked().unwrap()));
    rig.assert_balanced();
    drop(buffers);
    rig.finish();

    let sim = Sim::new();
    let pool = pinpool::PinnedPool::builder().driver(sim.driver()).build().unwrap();
    let error = pool.take_pinned(64 * KIB).unwrap_err().to_string();
    assert!(error.contains("65536") && error.contains("no CUDA context"), "{error}");
    assert!(pool.prewarm(1, 1).is_err());
    assert_eq!(pool.stats().registered_bytes, 0);
}

#[test]
fn many_threads_changing_the_cap_never_see_it_exceeded() {
    let rig = capped(MIB);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let pool = rig.pool.clone();
            let context = rig.context.clone();
            scope.spawn(move || {
                context.bind();
                for round in 0..200 {
                    let buffer = pool.take((4 * KIB) << ((round + thread) % 5));
                    if round % 10 == 0 {
                        pool.set_max_pooled_bytes(64 * KIB * (1 + (round + thread) % 16));
                    }
                    drop(buffer);
                }
            });
        }
        for _ in 0..500 {
            let stats = rig.pool.stats();
            assert!(stats.pooled_bytes <= MIB, "{stats:#?}");
        }
    });
    assert!(rig.pool.drain(PATIENCE));
    let stats = rig.pool.stats();
    assert!(stats.pooled_bytes <= rig.pool.max_pooled_bytes(), "{stats:#?}");
    rig.finish();
}

#[test]
fn within_a_class_the_block_that_lay_longest_goes_first() {
    let rig = capped(usize::MAX);
    rig.shelve(64 * KIB, 2);
    let (first, second) = (rig.pool.take(64 * KIB), rig.pool.take(64 * KIB));
    let warmest = second.as_ptr();
    drop(first);
    rig.drain();
    drop(second);
    rig.drain();
    rig.pool.trim_to(64 * KIB);
    let kept = rig.pool.take(64 * KIB);
    assert_eq!(kept.as_ptr(), warmest);
    drop(kept);
    rig.finish();
}

#[test]
fn a_cap_lowered_while_a_block_is_page_locked_holds_for_that_block() {
    use pinpool::sim::Fault;
    let rig = capped(usize::MAX);
    rig.sim.fail(lock_call(), Fault::hang());
    drop(rig.pool.take(64 * KIB));
    common::until("the registration hangs", || rig.sim.hanging_calls() > 0);
    rig.pool.set_max_pooled_bytes(4 * KIB);
    rig.sim.clear_faults();
    rig.drain();
    let stats = rig.assert_balanced();
    assert_eq!((stats.registrations, stats.pooled_buffers, stats.registered_bytes), (1, 0, 0));
    rig.finish();
}

#[test]
fn at_most_16384_blocks_are_pooled_whatever_the_cap() {
    // More than fit into one class of the inbox, too: what overflows is not lost.
    let pool = pinpool::PinnedPool::builder().driver(pinpool::Driver::host_only()).build().unwrap();
    let mut buffers: Vec<_> = (0..16_401).map(|_| pool.take(1)).collect();
    buffers.iter_mut().for_each(|buffer| buffer.set_dirty_len(0));
    drop(buffers);
    assert!(pool.drain(PATIENCE));
    let stats = pool.stats();
    assert_eq!((stats.returned, stats.recycled, stats.queued_buffers), (16_401, 16_401, 0));
    assert_eq!((stats.pooled_buffers, stats.evictions), (16_384, 17));
    assert!(pool.shutdown().completed);
}

#[test]
fn a_drain_waits_for_what_is_not_kept() {
    use pinpool::sim::Fault;
    let rig = capped(usize::MAX);
    let buffer = rig.pinned(64 * KIB);
    rig.pool.set_max_pooled_bytes(0);
    rig.sim.fail(unlock_call(), Fault::hang());
    drop(buffer);
    let settled = rig.pool.drain(std::time::Duration::from_millis(50));
    rig.sim.clear_faults();
    assert!(!settled, "neither shelved, nor freed, nor quarantined");
    rig.finish();
}

#[test]
fn the_ceiling_lets_go_of_no_more_than_is_needed() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_registered_bytes(4 * 64 * KIB));
    rig.shelve(64 * KIB, 4);
    rig.pool.let_time_pass(std::time::Duration::from_secs(2));
    rig.shelve(128 * KIB, 1);
    assert_eq!((pooled(&rig, 64 * KIB), pooled(&rig, 128 * KIB)), (2, 1));
    assert_eq!(rig.assert_balanced().registered_bytes, 4 * 64 * KIB);
    rig.finish();
}

#[test]
fn where_nothing_can_be_page_locked_the_last_ones_returned_are_kept() {
    let builder = pinpool::PinnedPool::builder().driver(pinpool::Driver::host_only());
    let pool = builder.max_pooled_bytes(2 * 64 * KIB).build().unwrap();
    let mut buffers: Vec<_> = (0..3).map(|_| pool.take(64 * KIB)).collect();
    let addresses: Vec<_> = buffers.iter().map(|buffer| buffer.as_ptr()).collect();
    while !buffers.is_empty() {
        drop(buffers.remove(0));
        assert!(pool.drain(PATIENCE));
    }
    let stats = pool.stats();
    assert_eq!((stats.evictions, stats.passed_over, stats.pooled_buffers), (1, 0, 2), "{stats}");
    assert_eq!([pool.take(1 << 16).as_ptr(), addresses[0]].map(|at| at == addresses[2]), [true, false]);
    assert!(pool.shutdown().completed);
}

#[test]
fn what_is_being_page_locked_takes_no_room_from_smaller_classes() {
    let rig = capped(MIB);
    rig.sim.fail(lock_call(), pinpool::sim::Fault::hang());
    drop(rig.pool.take(MIB));
    common::until("the lane hangs", || rig.sim.hanging_calls() == 1);
    drop(rig.pool.take(64 * KIB));
    common::until("it is with the lane", || !rig.pool.drain(std::time::Duration::from_millis(5)));
    rig.sim.clear_faults();
    rig.drain();
    let stats = rig.assert_balanced();
    assert_eq!((stats.passed_over, pooled(&rig, 64 * KIB)), (0, 1), "{stats}");
    rig.finish();
}
