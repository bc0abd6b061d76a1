//! The simulated device's streams, events and contexts, rule by rule.
//!
//! Rules are cited from the project's notes on CUDA: "§3 record" is the row "record" of its section 3.

mod sim_common;

use pinpool::sim::Sim;
use sim_common::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

/// Runs `wait` on a thread, and tells whether it came back.
fn spawn_waiter(wait: impl FnOnce() + Send + 'static) -> (thread::JoinHandle<()>, Arc<AtomicBool>) {
    let is_done = Arc::new(AtomicBool::new(false));
    let done = Arc::clone(&is_done);
    let waiter = thread::spawn(move || {
        wait();
        done.store(true, Ordering::Release);
    });
    (waiter, is_done)
}

#[test]
fn a_pinned_copy_reads_the_host_bytes_when_the_stream_executes_it() {
    // §2: pinned asynchronous copies are fully asynchronous; the race is to be modelled, not hidden.
    let (sim, context) = device();
    let stream = context.stream();
    let dst = context.alloc(BYTES);
    let mut src = Pinned::new(&sim, 1);
    upload(&stream, &src.bytes, &dst);
    assert_ne!(dst.read(), vec![1; BYTES], "nothing is executed before a step");
    src.bytes.fill(2);
    assert!(sim.step());
    assert_eq!(dst.read(), vec![2; BYTES], "the bytes of the execution, not of the call");
    assert!(!sim.step());
}

#[test]
fn a_pinned_copy_writes_the_host_bytes_when_the_stream_executes_it() {
    let (sim, context) = device();
    let stream = context.stream();
    let (device, src) = (context.alloc(BYTES), Pinned::new(&sim, 7));
    let mut dst = Pinned::new(&sim, 0);
    upload(&stream, &src.bytes, &device);
    download(&stream, &device, &mut dst.bytes);
    assert!(sim.step());
    assert_eq!(dst.bytes, vec![0; BYTES]);
    assert!(sim.step());
    assert_eq!(dst.bytes, vec![7; BYTES]);
}

#[test]
fn a_pageable_copy_to_the_device_waits_for_the_stream_and_has_read_when_it_returns() {
    // §2: "may synchronize with the stream and stage the copy".
    let (sim, context) = device();
    let stream = context.stream();
    let (first, second) = (context.alloc(BYTES), context.alloc(BYTES));
    let pinned = Pinned::new(&sim, 1);
    let mut pageable = vec![2; BYTES];
    upload(&stream, &pinned.bytes, &first);
    upload(&stream, &pageable, &second);
    pageable.fill(3);
    assert_eq!(first.read(), vec![1; BYTES], "earlier work of the stream is done");
    assert_eq!(second.read(), vec![2; BYTES]);
    assert_eq!(sim.pending_operations(), 0);
}

#[test]
fn a_pageable_copy_to_the_host_returns_when_the_bytes_have_arrived() {
    let (sim, context) = device();
    let stream = context.stream();
    let (device, src) = (context.alloc(BYTES), Pinned::new(&sim, 5));
    let mut pageable = vec![0; BYTES];
    upload(&stream, &src.bytes, &device);
    download(&stream, &device, &mut pageable);
    assert_eq!(pageable, vec![5; BYTES]);
}

#[test]
fn a_pageable_copy_on_a_held_stream_blocks_until_its_release() {
    let (sim, context) = device();
    let stream = context.stream();
    let dst = context.alloc(BYTES);
    stream.hold();
    let handle = stream.handle();
    let (address, cuda_sim, cuda_context) = (dst.address(), sim.clone(), context.clone());
    let (waiter, is_done) = spawn_waiter(move || {
        cuda_context.bind();
        let pageable = [4; BYTES];
        assert_eq!(raw_upload(&cuda_sim, address, pageable.as_ptr(), BYTES, handle), Ok(()));
    });
    while sim.pending_operations() == 0 {
        thread::yield_now();
    }
    assert!(!sim.step(), "a held stream executes nothing");
    assert!(!is_done.load(Ordering::Acquire));
    assert_ne!(dst.read(), vec![4; BYTES]);
    stream.release();
    waiter.join().expect("the waiter goes on");
    assert_eq!(dst.read(), vec![4; BYTES]);
}

#[test]
fn a_stream_works_in_order_and_streams_are_picked_by_the_seed() {
    let order_of = |seed| {
        let sim = Sim::builder().seed(seed).build();
        let context = sim.context(0);
        let streams = [context.stream(), context.stream(), context.stream()];
        let (sender, receiver) = mpsc::channel();
        for round in 0..8 {
            for (index, stream) in streams.iter().enumerate() {
                let sender = sender.clone();
                let note = Box::new(move || sender.send((index, round)).expect("the test receives"));
                sim.cuda().cu_launch_host_func(stream.handle(), note).expect("launch");
            }
        }
        sim.run_until_idle();
        let order: Vec<(usize, i32)> = receiver.try_iter().collect();
        for stream in 0..3 {
            let rounds: Vec<i32> =
                order.iter().filter(|(of, _)| *of == stream).map(|(_, round)| *round).collect();
            assert_eq!(rounds, (0..8).collect::<Vec<_>>(), "first in, first out");
        }
        order
    };
    assert_eq!(order_of(3), order_of(3), "one seed, one order");
    assert!((4..20).any(|seed| order_of(seed) != order_of(3)), "the order depends on the seed");
}

#[test]
fn synchronising_executes_what_the_stream_needs_and_nothing_else() {
    let (sim, context) = device();
    let (other, needed) = (context.stream(), context.stream());
    let src = Pinned::new(&sim, 9);
    let (to_needed, to_other) = (context.alloc(BYTES), context.alloc(BYTES));
    let event = sim.cuda().cu_event_create(NO_TIMING).expect("event");
    upload(&other, &src.bytes, &to_other);
    upload(&needed, &src.bytes, &to_needed);
    sim.cuda().cu_event_record(event, needed.handle()).expect("record");
    sim.cuda().cu_event_synchronize(event).expect("synchronize");
    assert_eq!(to_needed.read(), vec![9; BYTES]);
    assert_ne!(to_other.read(), vec![9; BYTES]);
    sim.cuda().cu_ctx_synchronize().expect("synchronize");
    assert_eq!(to_other.read(), vec![9; BYTES]);
}

#[test]
fn an_event_never_recorded_is_complete() {
    // §3 "never recorded".
    let (sim, _context) = device();
    let event = sim.cuda().cu_event_create(NO_TIMING).expect("event");
    assert_eq!(sim.cuda().cu_event_query(event), Ok(()));
    assert_eq!(sim.cuda().cu_event_synchronize(event), Ok(()));
}

#[test]
fn a_record_stands_for_the_work_so_far_and_a_second_one_replaces_it() {
    // §3 "record".
    let (sim, context) = device();
    let (stream, held) = (context.stream(), context.stream());
    let cuda = sim.cuda();
    let event = cuda.cu_event_create(NO_TIMING).expect("event");
    cuda.cu_event_record(event, stream.handle()).expect("record");
    assert_eq!(cuda.cu_event_query(event), NOT_READY);
    sim.stall(stream.handle(), std::time::Duration::ZERO);
    assert!(sim.step());
    assert_eq!(cuda.cu_event_query(event), Ok(()), "later work does not alter it");

    held.hold();
    cuda.cu_event_record(event, held.handle()).expect("record");
    sim.run_until_idle();
    assert_eq!(cuda.cu_event_query(event), NOT_READY, "a held stream is not done");
    cuda.cu_event_record(event, stream.handle()).expect("record");
    sim.run_until_idle();
    assert_eq!(cuda.cu_event_query(event), Ok(()), "the new record counts, the old one does not");
    held.release();
}

#[test]
fn a_wait_keeps_what_the_event_stood_for() {
    // §3 "record": earlier waits keep the old state.
    let (sim, context) = device();
    let (source, waiting, other) = (context.stream(), context.stream(), context.stream());
    let cuda = sim.cuda();
    let event = cuda.cu_event_create(NO_TIMING).expect("event");
    source.hold();
    cuda.cu_event_record(event, source.handle()).expect("record");
    cuda.cu_stream_wait_event(waiting.handle(), event, 0).expect("wait");
    cuda.cu_event_record(event, other.handle()).expect("record");
    sim.run_until_idle();
    assert_eq!(cuda.cu_event_query(event), Ok(()));
    assert_eq!(cuda.cu_stream_query(waiting.handle()), NOT_READY);
    source.release();
    waiting.synchronize();
    assert_eq!(cuda.cu_stream_query(source.handle()), Ok(()), "the wait brought its source forward");
}

#[test]
fn an_event_and_its_stream_share_a_context() {
    // §3 "record, event and stream of different contexts"; waits across contexts are allowed.
    let sim = Sim::builder().devices(2).build();
    let (zero, one) = (sim.context(0), sim.context(1));
    let (on_zero, on_one) = (zero.stream(), one.stream());
    let cuda = sim.cuda();
    let event = cuda.cu_event_create(NO_TIMING).expect("an event of device 1, the current one");
    assert_eq!(cuda.cu_event_record(event, on_zero.handle()), Err(400));
    assert_eq!(cuda.cu_event_record(event, on_one.handle()), Ok(()));
    assert_eq!(cuda.cu_stream_wait_event(on_zero.handle(), event, 0), Ok(()));
    on_zero.synchronize();
    assert_eq!(cuda.cu_event_query(event), Ok(()));
}

#[test]
fn a_query_needs_no_context_whereas_record_and_destroy_do() {
    // §3 "query" and "synchronize / record / destroy / create"; §9, check 5.
    let (sim, context) = device();
    let (cuda, stream) = (sim.cuda(), context.stream());
    let event = cuda.cu_event_create(NO_TIMING).expect("event");
    cuda.cu_ctx_set_current(0).expect("unbinding is a success");
    assert_eq!(cuda.cu_event_query(event), Ok(()));
    assert_eq!(cuda.cu_event_record(event, stream.handle()), Err(201));
    assert_eq!(cuda.cu_event_synchronize(event), Err(201));
    assert_eq!(cuda.cu_event_create(NO_TIMING), Err(201));
    assert_eq!(cuda.cu_event_destroy(event), Err(201));

    let lenient = Sim::builder().handles_need_context(false).build();
    let stream = lenient.context(0).stream();
    let event = lenient.cuda().cu_event_create(NO_TIMING).expect("event");
    lenient.cuda().cu_ctx_set_current(0).expect("unbind");
    assert_eq!(lenient.cuda().cu_event_record(event, stream.handle()), Ok(()));
    assert_eq!(lenient.cuda().cu_event_destroy(event), Ok(()));
}

#[test]
fn null_and_unknown_handles_are_refused() {
    // §3 "NULL handle": 400, for a query even before cuInit. §1.2: anything else before cuInit is 3.
    let sim = Sim::new();
    let cuda = sim.cuda();
    assert_eq!(cuda.cu_event_query(0), Err(400));
    assert_eq!(cuda.cu_event_query(1234), Err(3));
    assert_eq!(cuda.cu_ctx_get_current(), Err(3));
    assert_eq!(cuda.cu_thread_exchange_stream_capture_mode(2), Err(3));
    assert!(cuda.cu_driver_get_version().is_ok());
    assert_eq!(cuda.cu_init(1), Err(1));
    let _context = sim.context(0);
    for handle in [0, 3, 1234, usize::MAX] {
        assert_eq!(cuda.cu_event_query(handle), Err(400));
        assert_eq!(cuda.cu_event_destroy(handle), Err(400));
    }
    assert_eq!(cuda.cu_stream_synchronize(1234), Err(400));
    assert_eq!(cuda.cu_stream_destroy(0), Err(400), "the default stream cannot be destroyed");
}

#[test]
fn no_device_answers_100_every_time() {
    // §1.2: cuInit(0) without a device.
    let sim = Sim::builder().devices(0).build();
    assert_eq!(sim.cuda().cu_init(0), Err(100));
    assert_eq!(sim.cuda().cu_init(0), Err(100));
    assert_eq!(sim.cuda().cu_device_get_count(), Err(3));
}

#[test]
fn destroying_a_stream_returns_at_once_and_its_work_goes_on() {
    // §3 "stream destroyed while event pending", and handles are reused, newest first.
    let (sim, context) = device();
    let cuda = sim.cuda();
    let event = cuda.cu_event_create(NO_TIMING).expect("event");
    let (src, dst) = (Pinned::new(&sim, 6), context.alloc(BYTES));
    let [older, newer] = [(); 2].map(|_| cuda.cu_stream_create(1).expect("stream"));
    raw_upload(&sim, dst.address(), src.bytes.as_ptr(), BYTES, newer).expect("copy");
    cuda.cu_event_record(event, newer).expect("record");
    let old_id = cuda.cu_stream_get_id(newer).expect("id");
    cuda.cu_stream_destroy(older).expect("destroy");
    cuda.cu_stream_destroy(newer).expect("destroy");
    assert_eq!(cuda.cu_stream_query(newer), Err(400));
    assert_eq!(cuda.cu_event_query(event), NOT_READY);

    let reused = cuda.cu_stream_create(1).expect("stream");
    assert_eq!(reused, newer, "the handle freed last is given out first");
    assert_ne!(cuda.cu_stream_get_id(reused), Ok(old_id));
    sim.run_until_idle();
    assert_eq!(cuda.cu_event_query(event), Ok(()));
    assert_eq!(dst.read(), vec![6; BYTES]);
}

#[test]
fn destroying_an_event_that_is_pending_is_allowed_to_an_application() {
    // §3 "destroy while pending".
    let (sim, context) = device();
    let (cuda, stream) = (sim.cuda(), context.stream());
    let event = cuda.cu_event_create(NO_TIMING).expect("event");
    cuda.cu_event_record(event, stream.handle()).expect("record");
    assert_eq!(cuda.cu_event_destroy(event), Ok(()));
    assert_eq!(cuda.cu_event_query(event), Err(400));
    sim.run_until_idle();
    sim.assert_clean();
}

#[test]
fn the_legacy_default_stream_and_blocking_streams_wait_for_each_other() {
    let (sim, context) = device();
    let (null, blocking, free) = (context.default_stream(), context.blocking_stream(), context.stream());
    let (sender, receiver) = mpsc::channel();
    let note = |stream: usize, name: &'static str| {
        let sender = sender.clone();
        let function = Box::new(move || sender.send(name).expect("the test receives"));
        sim.cuda().cu_launch_host_func(stream, function).expect("launch");
    };
    blocking.hold();
    note(blocking.handle(), "blocking 1");
    note(null.handle(), "null");
    note(blocking.handle(), "blocking 2");
    note(free.handle(), "non-blocking");
    sim.run_until_idle();
    assert_eq!(receiver.try_iter().collect::<Vec<_>>(), ["non-blocking"]);
    blocking.release();
    sim.run_until_idle();
    assert_eq!(receiver.try_iter().collect::<Vec<_>>(), ["blocking 1", "null", "blocking 2"]);

    null.hold();
    note(null.handle(), "null");
    note(blocking.handle(), "blocking");
    note(free.handle(), "non-blocking");
    sim.run_until_idle();
    assert_eq!(receiver.try_iter().collect::<Vec<_>>(), ["non-blocking"]);
    null.release();
}

#[test]
fn per_thread_default_streams_differ_between_threads() {
    let (sim, context) = device();
    let here = sim.cuda().cu_stream_get_id(2).expect("id");
    assert_eq!(sim.cuda().cu_stream_get_id(2), Ok(here));
    let there = thread::scope(|scope| {
        let there = scope.spawn(|| {
            assert_eq!(sim.cuda().cu_stream_get_id(2), Err(201), "no context on a new thread");
            context.bind();
            sim.cuda().cu_stream_get_id(2).expect("id")
        });
        there.join().expect("the other thread")
    });
    assert_ne!(here, there);
}

#[test]
fn a_host_function_may_not_call_the_driver() {
    // §3: no CUDA calls inside a host function (800).
    let (sim, context) = device();
    let stream = context.stream();
    let (sender, receiver) = mpsc::channel();
    let cuda = sim.cuda().clone();
    let function = Box::new(move || sender.send(cuda.cu_stream_create(0)).expect("the test receives"));
    sim.cuda().cu_launch_host_func(stream.handle(), function).expect("launch");
    stream.synchronize();
    assert_eq!(receiver.recv(), Ok(Err(800)));
    assert!(sim.cuda().cu_stream_create(0).is_ok());
}

#[test]
fn a_panic_of_a_host_function_is_a_violation_and_the_stream_goes_on() {
    let (sim, context) = device();
    sim.expect_violations();
    let stream = context.stream();
    let function = Box::new(|| panic!("on purpose"));
    sim.cuda().cu_launch_host_func(stream.handle(), function).expect("launch");
    sim.stall(stream.handle(), std::time::Duration::ZERO);
    stream.synchronize();
    assert_eq!(sim.take_violations().len(), 1);
}
