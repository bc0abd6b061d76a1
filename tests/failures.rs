//! The driver refuses: what then happens to a block, to the accounts, and to the next take.

mod common;

use common::{KIB, PATIENCE, Rig, all_zero, lock_call, lock_symbol, locked, unlock_call};
use pinpool::Error;
use pinpool::sim::Fault;

const LEN: usize = 64 * KIB;

#[test]
fn a_refused_registration_leaves_the_block_pageable_counted_and_freed() {
    for code in [1, 2, 712, 999] {
        let rig = Rig::new();
        rig.sim.fail(lock_call(), Fault::once(code));
        rig.shelve(LEN, 1);
        let stats = rig.assert_balanced();
        assert_eq!(
            (stats.registration_failures, stats.pooled_buffers, stats.registered_bytes),
            (1, 0, 0),
            "{code}"
        );
        let mut buffer = rig.pool.take(LEN);
        assert!(!buffer.is_pinned() && all_zero(&buffer));
        buffer.fill(1);
        drop(buffer);
        rig.drain();
        assert!(rig.pool.take(LEN).is_pinned(), "the pool pins again afterwards");
        rig.finish();
    }
}

#[test]
fn a_run_of_refusals_stops_the_attempts_for_a_while_and_blocks_are_pooled_unpinned() {
    let rig = Rig::new();
    rig.sim.fail(lock_call(), Fault::always(2));
    for _ in 0..30 {
        rig.shelve(LEN, 1);
    }
    let calls = rig.sim.calls(lock_call());
    assert!(calls <= 8, "{calls} attempts");
    let buffer = rig.pool.take(LEN);
    assert!(!buffer.is_pinned() && rig.pool.stats().unpinned_hits > 0);
    drop(buffer);
    rig.finish();
}

#[test]
fn pauses_grow_while_the_driver_refuses_and_end_with_its_first_yes() {
    let rig = Rig::new();
    rig.sim.fail(lock_call(), Fault::always(2));
    let attempts_after = |seconds| {
        rig.pool.let_time_pass(std::time::Duration::from_secs(seconds));
        let before = rig.sim.calls(lock_call());
        (0..20).for_each(|_| rig.shelve(LEN, 1));
        rig.sim.calls(lock_call()) - before
    };
    assert_eq!(attempts_after(0), 8, "a run");
    assert_eq!((attempts_after(4), attempts_after(1)), (0, 1), "5 s, then one attempt");
    assert_eq!((attempts_after(9), attempts_after(1)), (0, 1), "10 s");
    assert_eq!((attempts_after(19), attempts_after(1)), (0, 1), "20 s");
    let hour: u64 = (0..3600 / 60).map(|_| attempts_after(60)).sum();
    assert!(hour <= 14, "{hour} attempts in an hour");
    let error = rig.pool.take_pinned(LEN).unwrap_err().to_string();
    assert!(error.contains("pauses") && error.contains("(2)"), "{error}");
    rig.sim.clear_faults();
    rig.pool.let_time_pass(std::time::Duration::from_secs(300));
    rig.shelve(LEN, 1);
    assert!(rig.pool.take(LEN).is_pinned(), "it page-locks again");
    rig.finish();
}

#[test]
fn a_limit_of_the_platform_leaves_what_fits_page_locked_and_the_rest_pageable() {
    let rig = Rig::with(pinpool::sim::Sim::new(), |builder| builder.max_idle_time(None));
    rig.sim.fail(lock_call(), Fault::budget(3 * LEN, 2));
    for _ in 0..20 {
        let buffers: Vec<_> = (0..6).map(|_| rig.pool.take(LEN)).collect();
        let pinned = buffers.iter().filter(|buffer| buffer.is_pinned()).count();
        assert!(pinned <= 3);
        drop(buffers);
        rig.drain();
    }
    let stats = rig.assert_balanced();
    assert_eq!((stats.registrations, stats.registered_bytes), (3, 3 * LEN), "{stats}");
    assert_eq!(stats.registration_failures, 8, "a run, and then nothing for a while");
    // Pooled all the same while the attempts pause, so that nobody has to fault pages in.
    let buffers: Vec<_> = (0..6).map(|_| rig.pool.take(LEN)).collect();
    assert_eq!(rig.pool.stats().misses, stats.misses);
    drop(buffers);
    rig.finish();
}

#[test]
fn a_failed_wait_quarantines_the_block_and_it_is_never_reused() {
    for code in [1, 400, 999] {
        let rig = Rig::new();
        let stream = rig.context.stream();
        let mut buffer = rig.pinned(LEN);
        let address = buffer.as_ptr();
        buffer.record_last_use(&stream).unwrap();
        rig.sim.fail("cuEventQuery", Fault::once(code));
        drop(buffer);
        rig.drain();
        let stats = rig.assert_balanced();
        assert_eq!((stats.quarantined_pinned_bytes, stats.wait_failures), (LEN, 1), "{code}");
        assert_ne!(rig.pool.take(LEN).as_ptr(), address);
        rig.drain();
        let report = rig.pool.shutdown();
        assert_eq!(report.registered_bytes_after, LEN);
        assert!(report.reasons.iter().any(|reason| reason.contains("cuEventQuery")), "{report:?}");
        rig.finish();
    }
}

#[test]
fn a_failed_unregistration_leaks_the_memory_and_counts_it() {
    let rig = Rig::new();
    let buffer = rig.pinned(LEN);
    let address = buffer.as_ptr() as usize;
    drop(buffer);
    rig.drain();
    rig.sim.fail(unlock_call(), Fault::once(1));
    rig.pool.clear();
    let stats = rig.assert_balanced();
    assert_eq!(
        (stats.unregistration_failures, stats.quarantined_pinned_bytes, stats.registered_bytes),
        (1, LEN, LEN)
    );
    // Never freed: the driver still has it registered, and the mapping is there.
    assert_eq!(locked(&rig.sim), [(address, LEN)]);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter_map(|line| {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
    });
    assert!(mapped.into_iter().any(|range| range.contains(&address)), "freed while registered");
    let report = rig.pool.shutdown();
    assert!(report.reasons[0].contains("unregistered"), "{report:?}");
    rig.finish();
}

#[test]
fn a_failed_record_is_returned_and_the_buffer_waits_for_every_context() {
    for entry_point in ["cuEventRecord", "cuEventCreate", "cuStreamIsCapturing"] {
        let rig = Rig::new();
        let stream = rig.context.stream();
        let mut buffer = rig.pinned(LEN);
        let address = buffer.as_ptr();
        stream.hold();
        rig.sim.stall(stream.handle(), std::time::Duration::ZERO);
        rig.sim.fail(entry_point, Fault::once(999));
        let error = buffer.record_last_use(&stream).unwrap_err();
        assert!(error.to_string().contains(&format!("{entry_point}: CUDA_ERROR_UNKNOWN (999)")), "{error}");
        assert!(!buffer.is_quiescent().unwrap(), "a failed record proves nothing");
        drop(buffer);
        assert!(!rig.pool.drain(std::time::Duration::from_millis(30)), "{entry_point}: not waited for");
        assert_ne!(rig.pool.take(LEN).as_ptr(), address);
        stream.release();
        rig.drain();
        assert_eq!(rig.assert_balanced().record_failures, 1);
        rig.finish();
    }
}

/// Also where the block keeps an event of an earlier record, which is recorded by a shorter way.
#[test]
fn a_record_that_the_driver_refuses_is_not_made_again() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    for call in ["cuStreamIsCapturing", "cuEventRecord"] {
        buffer.record_last_use(&stream).expect("a record");
        rig.sim.run_until_idle();
        buffer.wait().expect("it is done");
        buffer[0] = 1; // waits, after which the block keeps the event
        rig.sim.reset_calls();
        rig.sim.fail(call, Fault::once(999));
        let error = buffer.record_last_use(&stream).expect_err("the driver refuses");
        assert!(error.to_string().contains("(999)"), "{error}");
        assert_eq!(rig.sim.calls(call), 1, "{call}");
        buffer[0] = 1;
    }
    assert_eq!(rig.sim.live_events(), 1, "one event did for all of it");
    drop(buffer);
    rig.finish();
}

#[test]
fn a_failed_context_wait_quarantines() {
    let rig = Rig::new();
    let buffer = rig.pinned(LEN);
    rig.sim.fail("cuCtxSynchronize", Fault::once(999));
    drop(buffer);
    rig.drain();
    let stats = rig.assert_balanced();
    assert_eq!((stats.quarantined_pinned_bytes, stats.wait_failures), (LEN, 1));
    rig.finish();
}

#[test]
fn a_lost_device_quarantines_what_it_may_still_touch_and_takes_go_on() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    buffer.record_last_use(&stream).unwrap();
    rig.sim.fail("cuEventQuery", Fault::always(700));
    drop(buffer);
    rig.drain();
    for _ in 0..20 {
        let mut buffer = rig.pool.take(LEN);
        assert!(all_zero(&buffer));
        buffer.fill(1);
        drop(buffer);
        rig.drain();
    }
    assert_eq!(rig.pool.stats().quarantined_pinned_bytes, LEN);
    assert_eq!(rig.sim.calls(lock_call()), 1, "a lost device is not asked to pin");
    rig.finish();
}

#[test]
fn a_write_never_overtakes_a_read_that_the_driver_cannot_be_asked_about() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    buffer.record_last_use(&stream).unwrap();
    rig.sim.fail("cuEventQuery", Fault::always(1));
    rig.sim.fail("cuCtxSynchronize", Fault::always(1));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| buffer.fill(1)));
    let message = *panicked.unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains("cannot be written") && message.contains("cuCtxSynchronize"), "{message}");
    rig.sim.clear_faults();
    rig.sim.run_until_idle();
    buffer.fill(1);
    drop(buffer);
    rig.drain();
    rig.finish();
}

#[test]
fn a_context_destroyed_under_the_pool_ends_no_take() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    stream.hold();
    buffer.record_last_use(&stream).unwrap();
    rig.sim.cuda().cu_device_primary_ctx_reset(0).unwrap();
    drop(buffer);
    assert!(rig.pool.drain(PATIENCE));
    for _ in 0..5 {
        drop(rig.pool.take(LEN));
        assert!(rig.pool.drain(PATIENCE));
    }
    let stats = rig.pool.stats();
    assert!(stats.is_balanced(), "{stats:#?}");
    let report = rig.pool.shutdown();
    assert!(report.completed, "{report:?}");
}

#[test]
fn a_foreign_error_from_the_driver_is_shown_with_call_name_and_number() {
    let rig = Rig::new();
    rig.sim.fail(lock_call(), Fault::once(2));
    let error = rig.pool.take_pinned(LEN).unwrap_err();
    assert!(matches!(&error, Error::NotPinned { bytes: LEN, .. }));
    assert!(
        error.to_string().contains(&format!("{}: CUDA_ERROR_OUT_OF_MEMORY (2)", lock_symbol())),
        "{error}"
    );
    rig.finish();
}

#[test]
fn a_refused_registration_takes_no_room_under_the_ceiling() {
    let rig = Rig::with(pinpool::sim::Sim::new(), |builder| builder.max_registered_bytes(LEN));
    rig.sim.fail(lock_call(), Fault::once(2));
    rig.shelve(LEN, 1);
    assert_eq!(rig.assert_balanced().registration_failures, 1);
    assert!(rig.pinned(LEN).driver_says_page_locked().unwrap());
    rig.finish();
}

#[test]
fn refusals_with_successes_between_them_pause_nothing() {
    let rig = Rig::new();
    for _ in 0..3 {
        for nth in 0..5 {
            rig.sim.fail(lock_call(), Fault::once(2));
            rig.shelve(LEN << nth, 1);
        }
        let buffer = rig.pinned(LEN);
        assert!(buffer.is_pinned());
        drop(buffer);
        rig.drain();
        rig.pool.clear();
    }
    assert_eq!(rig.assert_balanced().registration_failures, 15);
    rig.finish();
}

#[test]
fn a_taker_does_not_harvest_what_the_driver_cannot_be_asked_about() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    let address = buffer.as_ptr();
    let idle_cleaner = rig.pool.hold_cleaner();
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);
    rig.sim.fail("cuEventQuery", Fault::always(999));
    let other = rig.pool.take(LEN);
    assert_ne!(other.as_ptr(), address, "an error was taken for an answer");
    rig.sim.clear_faults();
    rig.sim.run_until_idle();
    drop((idle_cleaner, other));
    rig.finish();
}

#[test]
fn a_lost_device_quarantines_the_blocks_that_were_out() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    rig.shelve(LEN, 2);
    let (mut first, mut second) = (rig.pool.take(LEN), rig.pool.take(LEN));
    first.record_last_use(&stream).unwrap();
    second.record_last_use(&stream).unwrap();
    rig.sim.run_until_idle();
    rig.sim.fail("cuEventQuery", Fault::once(700));
    drop(first);
    rig.drain();
    // Its own event is complete, but what a lost device still does to pinned memory is unknown.
    drop(second);
    rig.drain();
    assert_eq!(rig.assert_balanced().quarantined_pinned_bytes, 2 * LEN);
    rig.finish();
}

#[test]
fn a_block_that_was_never_taken_is_in_the_books_when_it_cannot_be_unregistered() {
    let rig = Rig::new();
    rig.pool.prewarm(LEN, 1).unwrap();
    rig.sim.fail(unlock_call(), Fault::once(1));
    rig.pool.clear();
    let stats = rig.assert_balanced();
    assert_eq!((stats.evictions, stats.quarantined_pinned_bytes), (1, LEN));
    rig.finish();
}

#[test]
fn a_block_that_is_quarantined_gives_back_the_event_that_it_keeps() {
    let rig = Rig::with(pinpool::sim::Sim::builder().devices(2).build(), |builder| builder);
    let second = rig.sim.context(1);
    rig.context.bind();
    let (stream, other) = (rig.context.stream(), second.stream());
    let mut buffer = rig.pinned(LEN);
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);
    rig.sim.run_until_idle();
    rig.drain();
    // Its event is of the first device, so another one is made for the second.
    let mut buffer = rig.pool.take(LEN);
    buffer.record_last_use(&other).unwrap();
    rig.sim.fail("cuEventQuery", Fault::once(1));
    drop(buffer);
    rig.drain();
    assert_eq!((rig.pool.stats().quarantined_bytes, rig.sim.calls("cuEventCreate")), (LEN, 2));
    let mut buffer = rig.pool.take(LEN);
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);
    assert_eq!(rig.sim.calls("cuEventCreate"), 2, "the first one is used again");
    rig.sim.run_until_idle();
    rig.finish();
}
