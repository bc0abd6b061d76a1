//! Questions that the driver refuses: no refusal is taken for the answer that would suit, and what was changed for
//! a call is as before after it.
#![allow(unsafe_code)] // Enqueueing a copy promises that the memory stays valid until it is done.

mod common;

use common::{KIB, Rig, all_zero, copy_to_device, pattern};
use pinpool::sim::{CaptureMode, Fault, Sim};
use pinpool::{Error, PinnedBuffer};

const LEN: usize = 64 * KIB;

/// What the pool asks before it may take a forgotten use for done, and a use that only this question would find.
const QUESTIONS: [&str; 5] = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxGetDevice",
    "cuDeviceGetCount",
    "cuDevicePrimaryCtxGetState",
];

#[test]
fn a_context_that_cannot_be_asked_about_is_not_taken_for_idle() {
    // A copy in a context that only the dropping thread has, and no record.
    for entry in QUESTIONS {
        for nth in 1..=3 {
            let rig = Rig::new();
            let cuda = rig.sim.cuda();
            let mut buffer = rig.pinned(LEN);
            buffer.fill(9);
            let own = cuda.cu_ctx_create(0, 0).unwrap();
            let (stream, device) = (cuda.cu_stream_create(1).unwrap(), cuda.cu_mem_alloc(LEN).unwrap());
            // SAFETY: the pool keeps the memory valid and unchanged until the copy is done.
            unsafe { cuda.cu_memcpy_htod_async(device, buffer.as_ptr(), LEN, stream) }.unwrap();
            rig.sim.fail(entry, Fault::nth(nth, 999));
            let address = buffer.as_ptr();
            drop(buffer);
            rig.drain();
            let other = rig.pool.take(LEN);
            let in_flight = rig.sim.pending_operations() > 0;
            assert!(!in_flight || other.as_ptr() != address, "{entry}: reused in flight");
            rig.sim.clear_faults();
            rig.sim.run_until_idle();
            rig.assert_balanced();
            drop(other);
            cuda.cu_ctx_destroy(own).unwrap();
            rig.context.bind();
        }
    }
}

#[test]
fn an_active_context_that_cannot_be_found_is_not_taken_for_idle() {
    // A copy on a device that nobody has shown to the pool, and no record.
    for entry in ["cuDeviceGetCount", "cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain"] {
        let rig = Rig::with(Sim::builder().devices(2).build(), |builder| builder);
        let mut buffer = rig.pinned(LEN);
        buffer.fill(9);
        let other = rig.sim.context(1);
        let (stream, device) = (other.stream(), other.alloc(LEN));
        copy_to_device(&stream, &buffer, LEN, &device);
        rig.context.bind();
        rig.sim.fail(entry, Fault::always(999));
        let address = buffer.as_ptr();
        drop(buffer);
        rig.drain();
        assert_ne!(rig.pool.take(LEN).as_ptr(), address, "{entry}: reused in flight");
        rig.sim.clear_faults();
        rig.sim.run_until_idle();
        assert_eq!(device.read(), vec![9; LEN]);
        rig.finish();
    }
}

#[test]
fn the_caller_gets_its_context_and_its_capture_mode_back_after_a_refusal() {
    let rig = Rig::with(Sim::builder().devices(2).build(), |builder| builder);
    let other = rig.sim.context(1);
    let stream = other.default_stream();
    rig.context.bind();
    for entry in ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"] {
        for nth in 1..=4 {
            let mut buffer = rig.pinned(LEN);
            rig.sim.fail(entry, Fault::nth(nth, 999));
            let _ = buffer.record_last_use(&stream);
            let _ = buffer.is_quiescent();
            rig.sim.clear_faults();
            let cuda = rig.sim.cuda();
            assert_eq!(cuda.cu_ctx_get_current(), Ok(rig.context.handle()), "{entry}, call {nth}");
            assert_eq!(cuda.cu_thread_exchange_stream_capture_mode(0), Ok(0), "{entry}, call {nth}");
            rig.sim.run_until_idle();
            drop(buffer);
            rig.drain();
        }
    }
    rig.finish();
}

#[test]
fn a_refused_question_about_pageable_reads_is_asked_again() {
    let rig = Rig::new();
    rig.sim.fail("cuDeviceGetAttribute", Fault::once(999));
    drop(rig.pool.take(LEN));
    rig.drain();
    let waits = rig.pool.stats().context_waits;
    drop(rig.pool.take(2 * LEN));
    rig.drain();
    assert_eq!(
        rig.pool.stats().context_waits,
        waits,
        "one refusal makes every pageable drop wait for contexts"
    );
    rig.finish();
}

#[test]
fn a_lost_device_is_named_by_whoever_asks_for_page_locked_memory() {
    let rig = Rig::new();
    rig.shelve(LEN, 2);
    let stream = rig.context.stream();
    let mut buffer = rig.pool.take(LEN);
    buffer.record_last_use(&stream).unwrap();
    rig.sim.fail("cuEventQuery", Fault::once(700));
    drop(buffer);
    rig.drain();
    // One is page-locked still, on its shelf.
    let error = rig.pool.take_pinned(LEN).unwrap_err();
    assert!(error.to_string().contains("the device is lost"), "{error}");
    assert!(all_zero(&rig.pool.take(LEN)));
    rig.drain();
    rig.finish();
}

#[test]
fn a_refused_release_of_a_context_is_tried_again() {
    let rig = Rig::new();
    rig.shelve(LEN, 1);
    rig.sim.fail("cuDevicePrimaryCtxRelease", Fault::once(999));
    rig.sim.fail("cuEventDestroy", Fault::once(999));
    rig.pool.shutdown();
    let Rig { sim, context, pool } = rig;
    drop(context);
    assert!(!sim.cuda().cu_device_primary_ctx_get_state(0).unwrap().1, "the pool kept a retain");
    drop(pool);
}

#[test]
fn only_the_page_locking_call_itself_says_that_it_is_not_supported() {
    for entry in ["cuCtxGetCurrent", "cuCtxSetCurrent"] {
        let rig = Rig::new();
        // The context is known, and only the way into it is refused.
        rig.shelve(2 * LEN, 1);
        let buffer = rig.pool.take(LEN);
        rig.sim.fail(entry, Fault::always(801));
        drop(buffer);
        rig.pool.drain(common::PATIENCE);
        rig.sim.clear_faults();
        rig.shelve(LEN, 1);
        assert!(rig.pool.take(LEN).is_pinned(), "{entry}: the pool has given page-locking up");
        assert_eq!(rig.sim.allocated_host_bytes(), 0, "{entry}: registering is taken for unsupported");
        rig.drain();
        rig.finish();
    }
}

#[test]
fn a_driver_that_wants_the_stream_s_context_for_a_record_gets_it_and_the_caller_s_is_restored() {
    let rig = Rig::with(Sim::builder().handles_need_context(true).build(), |builder| builder);
    let (stream, mut buffer) = (rig.context.stream(), rig.pinned(LEN));
    let waits = rig.pool.stats().context_waits;
    let (sim, stream) = (&rig.sim, &stream);
    let buffer = std::thread::scope(|scope| {
        let recorder = scope.spawn(move || {
            assert_eq!(sim.cuda().cu_ctx_get_current(), Ok(0));
            buffer.record_last_use(stream).expect("it needs no context of the caller's");
            assert_eq!(sim.cuda().cu_ctx_get_current(), Ok(0), "left as it was");
            buffer
        });
        recorder.join().unwrap()
    });
    drop(buffer);
    rig.sim.run_until_idle();
    rig.drain();
    assert_eq!(rig.pool.stats().context_waits, waits, "the record says when it is over");
    rig.finish();
}

#[test]
fn a_captured_buffer_whose_context_cannot_be_asked_for_is_never_used_again() {
    for pinned in [true, false] {
        let rig = Rig::new();
        let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
        let mut buffer = if pinned { rig.pinned(LEN) } else { rig.pool.take(LEN) };
        buffer.copy_from_slice(&pattern(3, LEN));
        let address = buffer.as_ptr();
        stream.begin_capture(CaptureMode::Relaxed);
        copy_to_device(&stream, &buffer, LEN, &device);
        assert_eq!(buffer.record_last_use(&stream), Err(Error::Capturing));
        let graph = stream.end_capture().unwrap();
        drop_where_the_context_cannot_be_asked_for(&rig, buffer);
        let stats = rig.assert_balanced();
        assert_eq!((stats.held_bytes, stats.quarantined_bytes), (0, LEN), "page-locked: {pinned}");
        assert_ne!(rig.pool.take(LEN).as_ptr(), address);
        rig.drain();
        graph.launch(&stream);
        rig.sim.run_until_idle();
        assert_eq!(device.read(), pattern(3, LEN), "a replay reads what was captured");
        drop(graph);
        rig.finish();
    }
}

fn drop_where_the_context_cannot_be_asked_for(rig: &Rig, buffer: PinnedBuffer) {
    let held = rig.pool.hold_cleaner();
    rig.sim.fail("cuCtxGetCurrent", Fault::always(999));
    drop(buffer);
    rig.sim.clear_faults();
    drop(held);
    rig.drain();
}

#[test]
fn a_pageable_buffer_is_kept_although_its_context_cannot_be_asked_for() {
    let rig = Rig::new();
    let buffer = rig.pool.take(LEN);
    drop_where_the_context_cannot_be_asked_for(&rig, buffer);
    let stats = rig.assert_balanced();
    assert_eq!((stats.pooled_buffers, stats.quarantined_bytes), (1, 0), "its copies were staged: {stats}");
    rig.finish();
}
