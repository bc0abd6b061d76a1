//! Which contexts the pool knows of, whence, and how long it keeps them.

mod common;

use common::{KIB, Rig, copy_to_device, in_time, locked_bytes, pattern};
use pinpool::sim::{Fault, Sim, SimBuffer, SimContext, SimStream};
use pinpool::{Error, PinnedBuffer, PinnedPool};
use std::sync::Arc;
use std::time::Duration;

const LEN: usize = 64 * KIB;

/// A simulated machine with a context that is no primary one, current on this thread, and which a pool can learn of
/// by no other way than by a drop.
fn own_context(sim: &Sim) -> usize {
    sim.cuda().cu_init(0).unwrap();
    sim.cuda().cu_ctx_create(0, 0).unwrap()
}

#[test]
fn a_pageable_drop_teaches_the_pool_where_to_page_lock() {
    let sim = Sim::new();
    let context = own_context(&sim);
    let pool = PinnedPool::builder().driver(sim.driver()).build().unwrap();
    drop(pool.take(LEN));
    assert!(pool.drain(common::PATIENCE));
    assert!(pool.take(LEN).is_pinned(), "the dropping thread's context was not learned");
    assert_eq!(sim.calls("cuDevicePrimaryCtxRetain"), 0, "a context was made");
    assert!(pool.drain(common::PATIENCE));
    assert!(pool.shutdown().completed);
    sim.cuda().cu_ctx_destroy(context).unwrap();
    sim.assert_clean();
}

#[test]
fn the_builder_teaches_the_pool_a_context_that_nobody_has_made_active() {
    let sim = Sim::builder().devices(2).build();
    let near = sim.context(0);
    let far = sim.context(1);
    let stream = Arc::new(far.stream());
    let pool = PinnedPool::builder().driver(sim.driver()).context_of(&stream).build().unwrap();
    // From here on the pool's own retain keeps it.
    drop((stream, far));
    assert!(sim.cuda().cu_device_primary_ctx_get_state(1).unwrap().1, "the pool keeps what it was shown");
    near.bind();
    drop(pool.take(LEN));
    assert!(pool.drain(common::PATIENCE));
    assert!(pool.shutdown().completed);
    assert!(!sim.cuda().cu_device_primary_ctx_get_state(1).unwrap().1, "the pool kept a retain");
}

#[test]
fn a_forgotten_use_in_an_active_primary_context_that_was_never_shown_is_waited_for() {
    let rig = Rig::with(Sim::builder().devices(2).build(), |builder| builder);
    // Registered before the other device is in use at all, so that the pool has no reason to know it.
    let mut buffer = rig.pinned(LEN);
    let address = buffer.as_ptr();
    let other = rig.sim.context(1);
    let (stream, device) = (other.stream(), other.alloc(LEN));
    let bytes = pattern(7, LEN);
    buffer.copy_from_slice(&bytes);
    stream.hold();
    copy_to_device(&stream, &buffer, LEN, &device);
    rig.context.bind();
    drop(buffer);
    rig.sim.run_until_idle();
    assert!(!rig.pool.drain(Duration::from_millis(50)), "not waited for the other device");
    assert_ne!(rig.pool.take(LEN).as_ptr(), address);
    stream.release();
    rig.drain();
    assert!(device.read() == bytes, "wrong bytes on the device");
    rig.finish();
}

#[test]
fn everything_is_page_locked_for_all_contexts_and_no_event_takes_the_time() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    rig.shelve(LEN, 3);
    rig.pool.prewarm(8 * KIB, 1).unwrap();
    assert_eq!((locked_bytes(&rig.sim), rig.sim.portable_bytes()), (3 * LEN + 8 * KIB, 3 * LEN + 8 * KIB));
    rig.pool.take(LEN).record_last_use(&stream).unwrap();
    assert_eq!(rig.sim.calls("cuEventCreate"), 1);
    assert_eq!(rig.sim.timed_events(), 0);
    rig.sim.run_until_idle();
    rig.finish();
}

#[test]
fn a_guard_that_is_out_keeps_the_context_of_its_record_over_a_shutdown() {
    let rig = Rig::new();
    let Rig { pool, context, sim } = rig;
    let stream = context.stream();
    // Pageable, so that no registration keeps the context.
    let mut buffer = pool.take(LEN);
    stream.hold();
    buffer.record_last_use(&stream).unwrap();
    sim.run_until_idle();
    assert!(pool.shutdown().completed);
    stream.release();
    drop((stream, context));
    assert!(
        sim.cuda().cu_device_primary_ctx_get_state(0).unwrap().1,
        "the event will be asked in a context that is gone"
    );
    drop(buffer);
    assert!(in_time(|| {
        sim.run_until_idle();
        pool.stats().queued_buffers == 0
    }));
    assert_eq!(pool.stats().quarantined_bytes, 0, "{:#?}", pool.stats());
    assert!(pool.shutdown().completed);
    assert!(!sim.cuda().cu_device_primary_ctx_get_state(0).unwrap().1, "the pool kept a retain");
    sim.assert_clean();
}

/// A page-locked buffer that a held stream of a context reads, and whose record failed; that context is none that a pool
/// could find by itself.
fn unrecorded_in_a_context_of_its_own(rig: &Rig) -> (PinnedBuffer, SimContext, SimStream, SimBuffer) {
    let own = rig.sim.create_context(0);
    let (stream, device) = (own.stream(), own.alloc(LEN));
    rig.context.bind();
    let mut buffer = rig.pinned(LEN);
    buffer.copy_from_slice(&pattern(5, LEN));
    stream.hold();
    copy_to_device(&stream, &buffer, LEN, &device);
    rig.sim.fail("cuEventRecord", Fault::once(1));
    buffer.record_last_use(&stream).unwrap_err();
    (buffer, own, stream, device)
}

#[test]
fn a_buffer_whose_record_failed_waits_for_its_context_over_a_shutdown() {
    let rig = Rig::new();
    let (buffer, own, stream, device) = unrecorded_in_a_context_of_its_own(&rig);
    assert!(rig.pool.shutdown().completed);
    drop(buffer);
    assert!(!rig.pool.drain(Duration::from_millis(200)), "the device still reads it");
    rig.sim.assert_clean();
    stream.release();
    rig.drain();
    assert!(device.read() == pattern(5, LEN), "wrong bytes on the device");
    // It is over, so the context is forgotten.
    assert!(rig.pool.shutdown().completed);
    let waits = rig.pool.stats().context_waits;
    drop(rig.pool.take_pinned(LEN).unwrap());
    rig.drain();
    assert_eq!(rig.pool.stats().context_waits - waits, 1, "only the primary one is waited for");
    drop((stream, device, own));
    rig.finish();
}

#[test]
fn a_write_waits_for_the_context_of_a_failed_record_over_a_shutdown() {
    let rig = Rig::new();
    let (buffer, own, stream, device) = unrecorded_in_a_context_of_its_own(&rig);
    assert!(rig.pool.shutdown().completed);
    let asked_before = rig.sim.calls("cuCtxSynchronize");
    let mut buffer = std::thread::scope(|scope| {
        let waits = scope.spawn(move || {
            buffer.wait().unwrap();
            buffer
        });
        // The primary context, in which it is page-locked, and then this one.
        let are_asked = || rig.sim.calls("cuCtxSynchronize") == asked_before + 2;
        let is_asked = in_time(|| waits.is_finished() || are_asked());
        assert!(is_asked && !waits.is_finished(), "the device still reads it");
        stream.release();
        waits.join().unwrap()
    });
    buffer.fill(0);
    assert!(device.read() == pattern(5, LEN), "wrong bytes on the device");
    drop((buffer, stream, device, own));
    rig.finish();
}

#[test]
fn a_pool_that_did_nothing_gives_back_what_the_builder_taught_it() {
    let sim = Sim::new();
    let context = sim.context(0);
    let stream = Arc::new(context.stream());
    let pool = PinnedPool::builder().driver(sim.driver()).context_of(&stream).build().unwrap();
    drop((stream, context, pool));
    let released = in_time(|| !sim.cuda().cu_device_primary_ctx_get_state(0).unwrap().1);
    assert!(released, "the pool kept a retain");
}

/// A context that the pool knows from nothing but the drop, with a copy in it that nobody recorded.
fn is_waited_for_where_only_the_dropping_thread_has_the_context(before_drop: impl FnOnce(&mut PinnedBuffer)) {
    let rig = Rig::new();
    let cuda = rig.sim.cuda();
    rig.shelve(LEN, 1);
    // A context that is no primary one and was never shown to the pool.
    let context = cuda.cu_ctx_create(0, 0).unwrap();
    let stream = cuda.cu_stream_create(1).unwrap();
    let mut buffer = rig.pool.take(LEN);
    let address = buffer.as_ptr();
    rig.sim.hold(stream);
    rig.sim.stall(stream, Duration::ZERO);
    before_drop(&mut buffer);
    drop(buffer);
    assert!(!rig.pool.drain(Duration::from_millis(50)), "not waited for");
    assert_ne!(rig.pool.take(LEN).as_ptr(), address);
    rig.sim.release(stream);
    rig.drain();
    rig.drain();
    assert!(rig.pool.shutdown().completed);
    cuda.cu_stream_destroy(stream).unwrap();
    cuda.cu_ctx_destroy(context).unwrap();
    rig.context.bind();
    rig.finish();
}

#[test]
fn a_forgotten_use_in_a_context_that_only_the_dropping_thread_has_is_waited_for() {
    is_waited_for_where_only_the_dropping_thread_has_the_context(|_| ());
}

/// The refusal teaches no context.
#[test]
fn a_use_whose_record_was_refused_in_a_context_that_only_the_dropping_thread_has_is_waited_for() {
    let elsewhere = Sim::new();
    let stream = elsewhere.context(0).stream();
    is_waited_for_where_only_the_dropping_thread_has_the_context(|buffer| {
        assert!(matches!(buffer.record_last_use(&stream), Err(Error::ForeignStream { .. })));
    });
}
