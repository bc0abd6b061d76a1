//! What can grow: a device that never gets done, a driver that hangs, and callers who go on all the same.

mod common;

use common::{KIB, MIB, Rig, unlock_call, until};
use pinpool::sim::{Fault, Sim};

const LEN: usize = 64 * KIB;

#[test]
fn behind_a_stuck_device_waits_what_callers_dropped_and_nothing_more() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_pooled_bytes(4 * LEN));
    let stream = rig.context.stream();
    stream.hold();
    rig.sim.stall(stream.handle(), std::time::Duration::ZERO);
    const DROPS: usize = 3_000;
    for _ in 0..DROPS {
        let mut buffer = rig.pool.take(LEN);
        buffer.record_last_use(&stream).unwrap();
        drop(buffer);
    }
    let stats = rig.assert_balanced();
    // More than the inbox has slots for; each is a buffer that a caller took, and none is lost or used again.
    assert_eq!((stats.queued_buffers, stats.queued_bytes), (DROPS, DROPS * LEN), "{stats}");
    assert_eq!((stats.checked_out_buffers, stats.hits, stats.harvested), (0, 0, 0), "{stats}");
    assert_eq!(stats.registered_bytes, 0, "what was never page-locked is not page-locked while it waits");
    stream.release();
    rig.sim.run_until_idle();
    rig.drain();
    until("what is not kept is freed", || rig.pool.stats().freeing_bytes == 0);
    let stats = rig.assert_balanced();
    assert_eq!((stats.queued_buffers, stats.pooled_bytes), (0, 4 * LEN), "{stats}");
    rig.finish();
}

#[test]
fn behind_a_stuck_device_a_take_asks_little() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    rig.shelve(LEN, 100);
    stream.hold();
    rig.sim.stall(stream.handle(), std::time::Duration::ZERO);
    let buffers: Vec<_> = (0..100)
        .map(|_| {
            let mut buffer = rig.pool.take(LEN);
            buffer.record_last_use(&stream).unwrap();
            buffer
        })
        .collect();
    let idle = rig.pool.hold_cleaner();
    drop(buffers);
    for _ in 0..50 {
        let before = rig.sim.calls("cuEventQuery");
        let fresh = rig.pool.take(LEN);
        assert!(!fresh.is_pinned());
        assert!(rig.sim.calls("cuEventQuery") - before <= 8);
        std::mem::drop(fresh);
    }
    drop(idle);
    stream.release();
    rig.sim.run_until_idle();
    rig.finish();
}

#[test]
fn behind_a_driver_that_hangs_pageable_memory_is_freed_all_the_same() {
    let rig = Rig::new();
    rig.shelve(MIB, 1);
    rig.sim.fail(unlock_call(), Fault::hang());
    rig.pool.set_max_pooled_bytes(0);
    until("the release lane hangs", || rig.sim.hanging_calls() > 0);
    // 3 GiB, mapped and not touched, one after the other.
    for _ in 0..3_000 {
        drop(rig.pool.take(MIB));
        let stats = rig.pool.stats();
        assert!(stats.freeing_bytes <= 258 * MIB, "{stats}");
    }
    until("all are dealt with", || rig.pool.stats().queued_buffers == 0);
    let stats = rig.pool.stats();
    assert_eq!(
        stats.freeing_bytes,
        256 * MIB,
        "so much waits for the lane, the cleaner did the rest: {stats}"
    );
    assert_eq!(stats.passed_over, 3_000, "{stats}");
    rig.sim.clear_faults();
    rig.drain();
    until("what waited is freed", || rig.pool.stats().freeing_bytes == 0);
    rig.finish();
}

#[test]
fn the_cap_covers_what_is_idle_and_the_rest_is_counted() {
    // ucx#6840: a limit that does not count what waits must at least show it.
    let rig = Rig::with(Sim::new(), |builder| builder.max_pooled_bytes(4 * LEN));
    let stream = rig.context.stream();
    rig.shelve(LEN, 4);
    let out = rig.pool.take(LEN);
    stream.hold();
    rig.sim.stall(stream.handle(), std::time::Duration::ZERO);
    let mut waiting = rig.pool.take(LEN);
    waiting.record_last_use(&stream).unwrap();
    drop(waiting);
    rig.sim.fail(unlock_call(), Fault::hang());
    rig.pool.trim_to(LEN);
    until("the release lane hangs", || rig.sim.hanging_calls() > 0);
    let stats = rig.pool.stats();
    assert_eq!(
        (stats.pooled_bytes, stats.checked_out_bytes, stats.queued_bytes, stats.retiring_bytes),
        (LEN, LEN, LEN, LEN),
        "{stats}"
    );
    assert_eq!(stats.registered_bytes, 4 * LEN, "all of it is page-locked");
    rig.sim.clear_faults();
    stream.release();
    rig.sim.run_until_idle();
    drop(out);
    rig.finish();
}

#[test]
fn behind_a_driver_that_hangs_the_cleaner_leaves_page_locked_memory_to_the_lane() {
    let rig = Rig::new();
    // More than the lane has slots for.
    rig.shelve(4 * KIB, 1_100);
    let pinned = rig.pool.take(4 * KIB);
    assert!(pinned.is_pinned());
    rig.sim.fail(unlock_call(), Fault::hang());
    rig.pool.set_max_pooled_bytes(0);
    until("the release lane hangs", || rig.sim.hanging_calls() > 0);
    drop(pinned);
    until("it is dealt with", || rig.pool.stats().queued_pinned_bytes == 0);
    drop(rig.pool.take(LEN));
    until("the cleaner goes on", || rig.pool.stats().queued_buffers == 0);
    assert_eq!(rig.sim.hanging_calls(), 1);
    rig.sim.clear_faults();
    rig.finish();
}

#[test]
fn what_the_lane_had_no_slot_for_is_let_go_though_nothing_is_returned_any_more() {
    let rig = Rig::new();
    rig.shelve(4 * KIB, 1_100);
    rig.sim.fail(unlock_call(), Fault::hang());
    rig.pool.trim_to(0);
    until("the release lane hangs", || rig.sim.hanging_calls() > 0);
    // Longer than the cleaner stays awake for nothing.
    std::thread::sleep(std::time::Duration::from_millis(300));
    rig.sim.clear_faults();
    until("all is let go", || rig.pool.stats().retiring_bytes == 0);
    rig.finish();
}
