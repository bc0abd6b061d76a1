//! Contexts that end under the pool: reset or destroyed with buffers out, queued, pooled and waited for. Their work ends
//! with them, what was page-locked in them is leaked and counted, everything else goes on, and the pool's own retains
//! come out even.

mod common;

use common::{KIB, PATIENCE, Rig, all_zero, copy_to_device, in_time, pattern, until};
use pinpool::sim::{Fault, Sim, SimContext};
use pinpool::{PinnedPool, Stats};
use std::sync::Arc;
use std::time::Duration;

const LEN: usize = 64 * KIB;

fn two_devices() -> (Rig, SimContext) {
    let rig = Rig::with(Sim::builder().devices(2).build(), |builder| builder);
    let second = rig.sim.context(1);
    rig.context.bind();
    (rig, second)
}

fn reset(sim: &Sim, device: i32) {
    sim.cuda().cu_device_primary_ctx_reset(device).unwrap();
}

/// Fills, copies and checks a few rounds, the last of them with page-locked memory: the pool is as good as new.
fn works(rig: &Rig, context: &SimContext) {
    context.bind();
    let (stream, device) = (context.stream(), context.alloc(LEN));
    let mut pinned = 0;
    for round in 0..6 {
        let mut buffer = rig.pool.take(LEN);
        assert!(all_zero(&buffer));
        pinned += usize::from(buffer.driver_says_page_locked().unwrap());
        let bytes = pattern(round, LEN);
        buffer.copy_from_slice(&bytes);
        copy_to_device(&stream, &buffer, LEN, &device);
        buffer.record_last_use(&stream).unwrap();
        drop(buffer);
        rig.sim.run_until_idle();
        rig.drain();
        assert!(device.read() == bytes, "wrong bytes on the device");
    }
    assert!(pinned >= 3, "no page-locked memory any more: {:#?}", rig.pool.stats());
}

/// After the last application's handle: nobody retains the devices any more.
fn no_retain_is_left(sim: &Sim, devices: i32) {
    for device in 0..devices {
        let released = in_time(|| sim.primary_retains(device) == 0);
        assert!(released, "device {device} is retained {} times", sim.primary_retains(device));
    }
}

fn finish(rig: Rig, others: impl Sized, devices: i32) -> Stats {
    rig.drain();
    let before = rig.assert_balanced();
    let report = rig.pool.shutdown();
    assert!(report.completed, "{report:?}");
    let after = rig.assert_balanced();
    assert_eq!(after.registered_bytes, after.quarantined_pinned_bytes, "{after:#?}");
    let Rig { pool, context, sim } = rig;
    drop((context, others, pool));
    no_retain_is_left(&sim, devices);
    before
}

#[test]
fn a_reset_with_buffers_out_queued_and_pooled_leaks_these_alone_and_a_new_context_works() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    rig.shelve(LEN, 4);
    let mut out = rig.pool.take(LEN);
    let mut queued = rig.pool.take(LEN);
    out.record_last_use(&stream).unwrap();
    stream.hold();
    rig.sim.stall(stream.handle(), Duration::ZERO);
    queued.record_last_use(&stream).unwrap();
    drop(queued);
    reset(&rig.sim, 0);
    rig.drain();
    drop(out);
    rig.drain();
    let stats = rig.assert_balanced();
    assert_eq!((stats.quarantined_bytes, stats.quarantined_pinned_bytes), (4 * LEN, 0), "{stats:#?}");
    assert_eq!((stats.pooled_buffers, stats.registered_bytes), (0, 0), "{stats:#?}");
    // The application makes a new one, which has the old one's handle.
    let again = rig.sim.context(0);
    works(&rig, &again);
    let stats = finish(rig, (again, stream), 1);
    assert_eq!(stats.quarantined_bytes, 4 * LEN, "{stats:#?}");
}

#[test]
fn blocks_that_the_ended_context_has_only_events_of_go_on() {
    let (rig, second) = two_devices();
    // Registered in the first device's context, copied on the second's stream.
    rig.shelve(LEN, 2);
    let (held, ended) = (rig.context.stream(), second.stream());
    let addresses: Vec<_> = [&ended, &held]
        .map(|stream| {
            let mut buffer = rig.pool.take(LEN);
            stream.hold();
            rig.sim.stall(stream.handle(), Duration::ZERO);
            buffer.record_last_use(stream).unwrap();
            buffer.as_ptr()
        })
        .into();
    rig.sim.run_until_idle();
    assert!(!rig.pool.drain(Duration::from_millis(20)));
    reset(&rig.sim, 1);
    until("the work ended with its context", || rig.pool.stats().pooled_buffers == 1);
    let buffer = rig.pool.take(LEN);
    assert_eq!(buffer.as_ptr(), addresses[0], "the one whose context ended");
    assert!(buffer.driver_says_page_locked().unwrap(), "its registration is in the other context");
    assert!(!rig.pool.drain(Duration::from_millis(20)), "the other device's work was not waited for");
    held.release();
    drop(buffer);
    rig.sim.run_until_idle();
    rig.drain();
    assert_eq!(rig.pool.stats().quarantined_bytes, 0, "{:#?}", rig.pool.stats());
    finish(rig, (second, ended, held), 2);
}

#[test]
fn the_context_lane_waits_no_longer_for_a_context_that_ends_but_for_the_others() {
    let (rig, second) = two_devices();
    rig.shelve(LEN, 1);
    let (first, other) = (rig.context.stream(), second.stream());
    rig.pool.take(LEN).record_last_use(&other).unwrap();
    rig.sim.run_until_idle();
    rig.drain();
    let device = second.alloc(LEN);
    let mut buffer = rig.pool.take(LEN);
    let (address, bytes) = (buffer.as_ptr(), pattern(7, LEN));
    buffer.copy_from_slice(&bytes);
    other.hold();
    copy_to_device(&other, &buffer, LEN, &device);
    first.hold();
    rig.sim.stall(first.handle(), Duration::ZERO);
    let waits = rig.sim.calls("cuCtxSynchronize");
    drop(buffer);
    until("the lane waits", || rig.sim.calls("cuCtxSynchronize") > waits);
    reset(&rig.sim, 0);
    assert!(!rig.pool.drain(Duration::from_millis(50)), "not waited for the context that is left");
    assert_ne!(rig.pool.take(LEN).as_ptr(), address);
    other.release();
    until("the other context is waited for", || {
        rig.sim.run_until_idle();
        rig.pool.stats().queued_buffers == 0
    });
    assert!(device.read() == bytes, "wrong bytes on the device");
    let stats = rig.pool.stats();
    assert_eq!(stats.quarantined_bytes, LEN, "the one page-locked in the context that ended: {stats:#?}");
    let again = rig.sim.context(0);
    works(&rig, &again);
    finish(rig, (second, again, first, other, device), 2);
}

#[test]
fn pooled_blocks_of_a_context_that_ended_in_silence_are_let_go_at_the_next_return() {
    let rig = Rig::new();
    rig.shelve(LEN, 3);
    rig.shelve(4 * LEN, 2);
    // The cleaner sleeps: no call of its own will show it.
    until("asleep", || {
        let calls = rig.sim.total_calls();
        std::thread::sleep(Duration::from_millis(150));
        rig.sim.total_calls() == calls
    });
    reset(&rig.sim, 0);
    let again = rig.sim.context(0);
    again.bind();
    let buffer = rig.pool.take(LEN);
    assert!(!buffer.driver_says_page_locked().unwrap());
    drop(buffer);
    until("let go", || rig.pool.stats().pooled_buffers == 0);
    rig.drain();
    let stats = rig.assert_balanced();
    assert_eq!(stats.quarantined_bytes, 3 * LEN + 8 * LEN, "{stats:#?}");
    works(&rig, &again);
    finish(rig, again, 1);
}

#[test]
fn a_record_in_a_context_that_has_an_old_one_s_handle_uses_no_event_of_the_old_one() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    for _ in 0..3 {
        rig.pool.take(LEN).record_last_use(&stream).unwrap();
    }
    rig.sim.run_until_idle();
    rig.drain();
    drop(stream);
    reset(&rig.sim, 0);
    let again = rig.sim.context(0);
    let stream = again.stream();
    let mut buffer = rig.pool.take(LEN);
    buffer.record_last_use(&stream).expect("with an event of the new context");
    assert!(!buffer.is_quiescent().unwrap());
    rig.sim.run_until_idle();
    buffer.wait().unwrap();
    drop(buffer);
    rig.drain();
    works(&rig, &again);
    finish(rig, (again, stream), 1);
}

#[test]
fn a_guard_whose_uses_ended_with_their_context_is_quiescent_and_may_be_written() {
    let (rig, second) = two_devices();
    let mut buffer = rig.pinned(LEN);
    let stream = second.stream();
    stream.hold();
    rig.sim.stall(stream.handle(), Duration::ZERO);
    buffer.record_last_use(&stream).unwrap();
    assert!(!buffer.is_quiescent().unwrap());
    reset(&rig.sim, 1);
    assert!(buffer.is_quiescent().unwrap());
    buffer.wait().unwrap();
    buffer.fill(1);
    drop(buffer);
    rig.drain();
    assert_eq!(rig.pool.stats().quarantined_bytes, 0);
    finish(rig, (second, stream), 2);
}

#[test]
fn one_answer_alone_ends_no_context() {
    let (rig, second) = two_devices();
    rig.shelve(LEN, 2);
    let stream = second.stream();
    // A context that only a drop can teach, so that nothing but the pool's memory of it lets it be waited for.
    let own = rig.sim.cuda().cu_ctx_create(0, 1).unwrap();
    let own_stream = rig.sim.cuda().cu_stream_create(1).unwrap();
    drop(rig.pool.take(LEN));
    rig.drain();
    rig.sim.cuda().cu_ctx_set_current(0).unwrap();
    for call in ["cuCtxSynchronize", "cuCtxGetId", "cuCtxSetCurrent", "cuEventQuery"] {
        // Everybody who asks this is told that the context is gone; nothing else says so.
        rig.sim.fail(call, Fault::always(709));
        let mut buffer = rig.pool.take(LEN);
        let _ = buffer.record_last_use(&stream);
        drop((buffer, rig.pool.take(LEN)));
        rig.sim.run_until_idle();
        rig.drain();
        rig.sim.clear_faults();
    }
    rig.sim.hold(own_stream);
    rig.sim.stall(own_stream, Duration::ZERO);
    let buffer = rig.pool.take_pinned(LEN).unwrap();
    drop(buffer);
    assert!(!rig.pool.drain(Duration::from_millis(50)), "a living context was forgotten");
    rig.sim.release(own_stream);
    rig.sim.run_until_idle();
    rig.drain();
    assert!(rig.pool.shutdown().completed);
    rig.sim.cuda().cu_ctx_destroy(own).unwrap();
    rig.sim.assert_clean();
}

#[test]
fn a_destroyed_context_that_was_the_only_one_leaves_a_pool_that_still_hands_out_memory() {
    let sim = Sim::new();
    sim.cuda().cu_init(0).unwrap();
    let own = sim.cuda().cu_ctx_create(0, 0).unwrap();
    let pool = PinnedPool::builder().driver(sim.driver()).build().unwrap();
    drop(pool.take(LEN));
    assert!(pool.drain(PATIENCE));
    let buffer = pool.take(LEN);
    assert!(buffer.is_pinned());
    sim.cuda().cu_ctx_destroy(own).unwrap();
    drop(buffer); // on a thread without a context
    assert!(pool.drain(PATIENCE));
    for _ in 0..5 {
        let mut buffer = pool.take(LEN);
        assert!(all_zero(&buffer) && !buffer.driver_says_page_locked().unwrap());
        buffer.fill(1);
        drop(buffer);
        assert!(pool.drain(PATIENCE));
    }
    let stats = pool.stats();
    assert!(stats.is_balanced(), "{stats:#?}");
    assert_eq!((stats.quarantined_bytes, stats.registered_bytes), (LEN, 0), "{stats:#?}");
    assert_eq!(sim.calls("cuDevicePrimaryCtxRetain"), 0, "a context was made");
    // A later one is learned by the next drop, and page-locked in.
    let later = sim.cuda().cu_ctx_create(0, 0).unwrap();
    assert_ne!(later, own);
    for _ in 0..2 {
        drop(pool.take(LEN));
        assert!(pool.drain(PATIENCE));
    }
    assert!(pool.take_pinned(LEN).unwrap().driver_says_page_locked().unwrap());
    assert!(pool.drain(PATIENCE));
    assert!(pool.shutdown().completed);
    sim.cuda().cu_ctx_destroy(later).unwrap();
    sim.assert_clean();
}

#[test]
fn a_buffer_dropped_on_a_thread_with_no_context_or_another_one_waits_for_its_own() {
    for elsewhere in [None, Some(1)] {
        let (rig, second) = two_devices();
        let stream = rig.context.stream();
        let mut buffer = rig.pinned(LEN);
        let (device, bytes) = (rig.context.alloc(LEN), pattern(3, LEN));
        buffer.copy_from_slice(&bytes);
        stream.hold();
        copy_to_device(&stream, &buffer, LEN, &device);
        let address = buffer.as_ptr();
        let there = second.clone();
        let dropper = std::thread::spawn(move || {
            if elsewhere.is_some() {
                there.bind();
            }
            drop(buffer);
        });
        dropper.join().unwrap();
        assert!(!rig.pool.drain(Duration::from_millis(30)), "not waited for its context");
        assert_ne!(rig.pool.take(LEN).as_ptr(), address);
        stream.release();
        rig.sim.run_until_idle();
        rig.drain();
        assert!(device.read() == bytes, "wrong bytes on the device");
        finish(rig, (second, stream, device), 2);
    }
}

#[test]
fn the_first_gpu_is_left_alone_when_the_application_uses_the_second() {
    for last_handle_drops in [true, false] {
        let sim = Sim::builder().devices(3).build();
        let context = sim.context(1);
        let pool = PinnedPool::builder().driver(sim.driver()).build().unwrap();
        pool.prewarm(LEN, 2).unwrap();
        let stream = Arc::new(context.stream());
        for _ in 0..4 {
            let mut buffer = pool.take(LEN);
            buffer.record_last_use(&stream).unwrap();
            drop((buffer, pool.take(LEN)));
            sim.run_until_idle();
            assert!(pool.drain(PATIENCE));
        }
        for device in [0, 2] {
            assert_eq!(sim.primary_retains(device), 0, "a context was made on device {device}");
            assert!(!sim.cuda().cu_device_primary_ctx_get_state(device).unwrap().1);
        }
        if !last_handle_drops {
            assert!(pool.shutdown().completed);
            assert_eq!(sim.primary_retains(1), 1, "the application's own is left");
        }
        drop((pool, stream, context));
        no_retain_is_left(&sim, 3);
        sim.assert_clean();
    }
}

#[test]
fn a_reset_that_is_first_heard_of_when_blocks_are_let_go_is_no_refusal_to_unregister_them() {
    let rig = Rig::new();
    rig.shelve(LEN, 2);
    // While the cleaner is held nothing looks whether the context is still there.
    let idle_cleaner = rig.pool.hold_cleaner();
    reset(&rig.sim, 0);
    rig.pool.trim_to(0);
    drop(idle_cleaner);
    until("let go", || rig.pool.stats().retiring_bytes == 0);
    // What vanished is not page-locked any more, and counted as leaked.
    let stats = rig.assert_balanced();
    assert_eq!((stats.quarantined_pinned_bytes, stats.quarantined_bytes), (0, 2 * LEN), "{stats:#?}");
    let again = rig.sim.context(0);
    works(&rig, &again);
    finish(rig, again, 1);
}

#[test]
fn memory_that_the_driver_says_is_not_registered_is_unmapped_where_its_context_has_ended() {
    if !common::locks_its_own_pages() {
        return;
    }
    for ended in [true, false] {
        let rig = Rig::new();
        rig.shelve(LEN, 1);
        // CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
        rig.sim.fail("cuMemHostUnregister", Fault::once(713));
        if ended {
            reset(&rig.sim, 0);
            // The first return shows that the context is gone.
            drop(rig.pool.take(4 * KIB));
            until("what was registered in it is let go", || rig.pool.stats().registered_bytes == 0);
            rig.drain();
        }
        rig.pool.trim_to(0);
        let is_gone = |stats: Stats| stats.retiring_bytes + stats.freeing_bytes == 0;
        until("let go", || is_gone(rig.pool.stats()));
        let stats = rig.assert_balanced();
        let kept = if ended { 0 } else { LEN };
        assert_eq!((stats.quarantined_bytes, stats.quarantined_pinned_bytes), (kept, kept), "{ended}");
        assert_eq!(
            rig.sim.mapped_bytes(),
            kept,
            "of a context that lives: whoever unregistered it knows why"
        );
    }
}
