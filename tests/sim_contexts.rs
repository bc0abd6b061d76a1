//! The simulated device's contexts: who keeps them alive, and what is left when they are gone.
//!
//! Rules are cited from the project's notes on CUDA: "§5" is their section 5.

mod sim_common;

use pinpool::sim::Sim;
use sim_common::*;
use std::thread;

#[test]
fn a_primary_context_lives_from_the_first_retain_to_the_last_release() {
    // §5: retain makes it active but does not push; the last release resets it; one too many is 201.
    let sim = Sim::builder().devices(2).build();
    let cuda = sim.cuda();
    cuda.cu_init(0).expect("init");
    assert_eq!(cuda.cu_device_primary_ctx_get_state(0), Ok((0, false)));
    let context = cuda.cu_device_primary_ctx_retain(0).expect("retain");
    assert_eq!(cuda.cu_device_primary_ctx_retain(0), Ok(context), "one for each device");
    assert_eq!(cuda.cu_device_primary_ctx_get_state(0), Ok((0, true)));
    assert_eq!(cuda.cu_device_primary_ctx_get_state(1), Ok((0, false)));
    assert_eq!(cuda.cu_ctx_get_current(), Ok(0), "retaining does not bind");
    cuda.cu_device_primary_ctx_release(0).expect("release");
    assert_eq!(cuda.cu_ctx_get_api_version(context), Ok(3020), "one retain is left");
    cuda.cu_device_primary_ctx_release(0).expect("release");
    assert_eq!(cuda.cu_ctx_get_api_version(context), Err(709));
    assert_eq!(cuda.cu_ctx_set_current(context), Err(709));
    assert_eq!(cuda.cu_device_primary_ctx_release(0), Err(201));
    assert_eq!(cuda.cu_device_primary_ctx_retain(2), Err(101), "no such device");
}

#[test]
fn a_reset_kills_streams_and_events_and_leaves_the_context_current() {
    // §5: reset by anyone; current contexts stay current and yield 709.
    let (sim, context) = device();
    let (cuda, stream) = (sim.cuda(), context.stream());
    let event = cuda.cu_event_create(NO_TIMING).expect("event");
    let (src, dst) = (Pinned::new(&sim, 1), context.alloc(BYTES));
    upload(&stream, &src.bytes, &dst);
    cuda.cu_event_record(event, stream.handle()).expect("record");
    cuda.cu_device_primary_ctx_reset(0).expect("reset");
    assert_eq!(sim.pending_operations(), 0, "its work is gone");
    assert_eq!(cuda.cu_ctx_get_current(), Ok(context.handle()));
    assert_eq!(cuda.cu_ctx_synchronize(), Err(709));
    assert_eq!(cuda.cu_event_query(event), Err(709));
    assert_eq!(cuda.cu_event_destroy(event), Err(709));
    assert_eq!(cuda.cu_stream_query(stream.handle()), Err(400), "the stream's handle is free again");

    cuda.cu_device_primary_ctx_retain(0).expect("retain");
    assert_eq!(cuda.cu_ctx_synchronize(), Ok(()), "the same handle lives again");
    assert_eq!(cuda.cu_event_query(event), Err(709), "what belonged to its earlier life does not");
}

#[test]
fn created_contexts_are_pushed_and_dead_when_destroyed() {
    let (sim, primary) = device();
    let cuda = sim.cuda();
    let created = cuda.cu_ctx_create(0, 0).expect("create");
    assert_eq!(cuda.cu_ctx_get_current(), Ok(created));
    let event = cuda.cu_event_create(NO_TIMING).expect("event");
    let elsewhere = thread::scope(|scope| {
        let elsewhere = scope.spawn(|| {
            cuda.cu_ctx_set_current(created).expect("bind");
            cuda.cu_ctx_destroy(created).expect("destroy");
            cuda.cu_ctx_get_current()
        });
        elsewhere.join().expect("the other thread")
    });
    assert_eq!(elsewhere, Ok(0), "popped from the thread that destroyed it");
    assert_eq!(cuda.cu_ctx_get_current(), Ok(created), "and left on the others");
    assert_eq!(cuda.cu_ctx_synchronize(), Err(709));
    assert_eq!(cuda.cu_event_query(event), Err(709));
    assert_eq!(cuda.cu_ctx_pop_current(), Ok(created));
    assert_eq!(cuda.cu_ctx_get_current(), Ok(primary.handle()));
    assert_eq!(cuda.cu_ctx_destroy(created), Err(201), "destroyed already");
    assert_eq!(
        cuda.cu_ctx_destroy(primary.handle()),
        Err(201),
        "a primary context is released, not destroyed"
    );
}

#[test]
fn every_thread_has_its_own_stack_of_contexts() {
    let sim = Sim::builder().devices(2).build();
    let (zero, one) = (sim.context(0), sim.context(1));
    let cuda = sim.cuda();
    assert_eq!(cuda.cu_ctx_get_device(), Ok(1));
    cuda.cu_ctx_push_current(zero.handle()).expect("push");
    assert_eq!(cuda.cu_ctx_get_device(), Ok(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(cuda.cu_ctx_get_current(), Ok(0));
            assert_eq!(cuda.cu_ctx_get_device(), Err(201));
            assert_eq!(cuda.cu_ctx_pop_current(), Err(201));
        });
    });
    assert_eq!(cuda.cu_ctx_pop_current(), Ok(zero.handle()));
    assert_eq!(cuda.cu_ctx_get_current(), Ok(one.handle()));
    cuda.cu_ctx_set_current(0).expect("unbinding is a success");
    assert_eq!(cuda.cu_ctx_synchronize(), Err(201));
}

#[test]
fn the_capture_mode_belongs_to_the_thread() {
    // §4: GLOBAL (0) is every thread's default; the exchange gives the old mode.
    let (sim, _context) = device();
    let cuda = sim.cuda();
    assert_eq!(cuda.cu_thread_exchange_stream_capture_mode(2), Ok(0));
    assert_eq!(cuda.cu_thread_exchange_stream_capture_mode(3), Err(1));
    thread::scope(|scope| {
        scope.spawn(|| assert_eq!(cuda.cu_thread_exchange_stream_capture_mode(1), Ok(0)));
    });
    assert_eq!(cuda.cu_thread_exchange_stream_capture_mode(0), Ok(2));
}

#[test]
fn two_devices_of_one_process_share_nothing() {
    let ((one, _of_one), (other, _of_other)) = (device(), device());
    let event = one.cuda().cu_event_create(NO_TIMING).expect("event");
    assert_eq!(other.cuda().cu_event_query(event), Err(400));
    assert_eq!(other.calls("cuEventCreate"), 0);
    assert_eq!([one.driver().name(), other.driver().name()], ["simulated"; 2]);
}

#[test]
fn a_stream_that_ended_with_its_context_takes_no_other_with_it() {
    let sim = Sim::new();
    let (first, second) = (sim.create_context(0), sim.context(0));
    let ended = first.stream();
    first.end();
    let stream = second.stream();
    assert_eq!(stream.handle(), ended.handle(), "handles are used again");
    drop(ended);
    stream.synchronize();
}
