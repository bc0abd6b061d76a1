//! Faults, counters and broken contexts of the simulated device: everything can be made to fail.

mod sim_common;

use pinpool::sim::{Fault, Sim};
use sim_common::*;
use std::thread;
use std::time::{Duration, Instant};

/// Registers and unregisters `bytes` bytes, and gives what registering answered.
fn register(sim: &Sim, bytes: usize) -> Result<(), u32> {
    let mut memory = vec![0; bytes];
    let registered = sim.cuda().cu_mem_host_register(memory.as_mut_ptr(), bytes, 1);
    if registered.is_ok() {
        sim.cuda().cu_mem_host_unregister(memory.as_mut_ptr()).expect("unregister");
    }
    registered
}

#[test]
fn the_nth_call_fails_and_the_others_do_not() {
    let (sim, _context) = device();
    sim.fail("cuMemHostRegister", Fault::nth(3, 2));
    let answers = [(); 5].map(|_| register(&sim, 100));
    assert_eq!(answers, [Ok(()), Ok(()), Err(2), Ok(()), Ok(())]);
    sim.fail("cuMemHostRegister_v2", Fault::once(999));
    assert_eq!([(); 2].map(|_| register(&sim, 100)), [Err(999), Ok(())]);
}

#[test]
fn a_call_that_was_made_to_fail_does_nothing() {
    let (sim, context) = device();
    let (stream, dst, src) = (context.stream(), context.alloc(BYTES), Pinned::new(&sim, 1));
    sim.fail("cuMemcpyHtoDAsync", Fault::once(700));
    let copied = raw_upload(&sim, dst.address(), src.bytes.as_ptr(), BYTES, stream.handle());
    assert_eq!(copied, Err(700));
    assert_eq!(sim.pending_operations(), 0);
    sim.fail("cuMemHostUnregister", Fault::once(999));
    drop(src);
    assert_eq!(sim.registered_bytes(), BYTES, "still registered after the failure");
}

#[test]
fn every_call_fails_until_the_faults_are_cleared() {
    let (sim, context) = device();
    let event = sim.cuda().cu_event_create(NO_TIMING).expect("event");
    sim.fail("cuEventQuery", Fault::always(600));
    assert_eq!([(); 3].map(|_| sim.cuda().cu_event_query(event)), [NOT_READY; 3]);
    assert_eq!(sim.cuda().cu_event_record(event, context.stream().handle()), Ok(()), "only the one named");
    sim.clear_faults();
    sim.run_until_idle();
    assert_eq!(sim.cuda().cu_event_query(event), Ok(()));
}

#[test]
fn random_faults_come_from_the_seed() {
    let answers_of = |seed| {
        let sim = Sim::builder().seed(seed).build();
        let _context = sim.context(0);
        sim.fail("cuEventCreate", Fault::with_probability(0.25, 2));
        (0..400).map(|_| sim.cuda().cu_event_create(NO_TIMING).is_err()).collect::<Vec<_>>()
    };
    assert_eq!(answers_of(5), answers_of(5));
    assert_ne!(answers_of(5), answers_of(6));
    let failed = answers_of(5).iter().filter(|failed| **failed).count();
    assert!((60..140).contains(&failed), "about a quarter of 400, not {failed}");
}

#[test]
fn large_calls_fail_and_budgets_are_in_bytes() {
    // §1.2 register, the rows of WSL2 (budget) and of confidential computing (always 801).
    let (sim, _context) = device();
    sim.fail("cuMemHostRegister", Fault::larger_than(4096, 2));
    assert_eq!([register(&sim, 4096), register(&sim, 4097)], [Ok(()), Err(2)]);
    sim.clear_faults();

    sim.fail("cuMemHostRegister", Fault::budget(2 * BYTES, 2));
    let (first, second) = (Pinned::new(&sim, 0), Pinned::new(&sim, 0));
    assert_eq!(register(&sim, 1), Err(2));
    drop(first);
    assert_eq!([register(&sim, BYTES), register(&sim, BYTES + 1)], [Ok(()), Err(2)]);
    drop(second);
}

#[test]
fn a_fault_lasts_from_its_call_on_and_may_end_everything() {
    let (sim, _context) = device();
    sim.fail("cuEventCreate", Fault::from_nth(2, 999));
    let create = || sim.cuda().cu_event_create(NO_TIMING).map(|_| ());
    assert_eq!([create(), create(), create()], [Ok(()), Err(999), Err(999)]);
    assert_eq!(sim.cuda().cu_ctx_synchronize(), Ok(()), "another entry point is not concerned");
    sim.clear_faults();
    sim.fail("cuEventCreate", Fault::ends_everything(2, 700));
    assert_eq!([create(), sim.cuda().cu_ctx_synchronize()], [Ok(()), Ok(())]);
    assert_eq!([create(), sim.cuda().cu_ctx_synchronize(), create()], [Err(700); 3]);
    sim.clear_faults();
    assert_eq!([create(), sim.cuda().cu_ctx_synchronize()], [Ok(()), Ok(())]);
}

#[test]
fn the_system_refuses_memory_and_threads_and_what_is_mapped_is_known() {
    let (sim, context) = device();
    let pool = pinpool::PinnedPool::builder().driver(sim.driver()).build().expect("a pool");
    sim.fail("mmap", Fault::larger_than(4096, 1));
    sim.fail("pthread_create", Fault::always(1));
    assert!(matches!(pool.try_take(8192), Err(pinpool::Error::OutOfMemory { bytes: 8192 })));
    let buffer = pool.take(4096);
    assert_eq!(sim.mapped_bytes(), 4096);
    drop(buffer);
    assert!(!pool.drain(Duration::from_millis(1)), "no thread deals with it");
    let called = |name| sim.called().iter().find(|(call, _)| *call == name).map_or(0, |(_, count)| *count);
    assert_eq!((called("mmap"), called("pthread_create") > 0), (2, true));
    assert_eq!(sim.total_calls(), called_by_the_driver(&sim), "they are no calls of the driver");
    sim.clear_faults();
    pool.set_max_pooled_bytes(0);
    pool.shutdown();
    assert_eq!(sim.mapped_bytes(), 0);
    drop(context);
}

fn called_by_the_driver(sim: &Sim) -> u64 {
    sim.called().iter().filter(|(call, _)| call.starts_with("cu")).map(|(_, count)| count).sum()
}

#[test]
fn a_slow_call_takes_at_least_as_long() {
    let (sim, _context) = device();
    sim.fail("cuCtxSynchronize", Fault::slow(Duration::from_millis(3)));
    let start = Instant::now();
    sim.cuda().cu_ctx_synchronize().expect("synchronize");
    assert!(start.elapsed() >= Duration::from_millis(3));
}

#[test]
fn a_hanging_call_blocks_nobody_else_and_goes_on_when_cleared() {
    let (sim, context) = device();
    sim.fail("cuMemHostRegister", Fault::hang());
    thread::scope(|scope| {
        let hanging = scope.spawn(|| {
            context.bind();
            register(&sim, 100)
        });
        while sim.hanging_calls() == 0 {
            thread::yield_now();
        }
        let event = sim.cuda().cu_event_create(NO_TIMING).expect("another call");
        assert_eq!(sim.cuda().cu_event_query(event), Ok(()));
        assert!(!hanging.is_finished());
        sim.clear_faults();
        assert_eq!(hanging.join().expect("the other thread"), Ok(()));
    });
}

#[test]
fn a_hanging_call_goes_on_when_the_last_handle_goes() {
    let sim = Sim::new();
    let context = sim.context(0);
    let event = sim.cuda().cu_event_create(NO_TIMING).expect("event");
    sim.fail("cuEventQuery", Fault::hang());
    let cuda = sim.cuda().clone();
    let hanging = thread::spawn(move || cuda.cu_event_query(event));
    while sim.hanging_calls() == 0 {
        thread::yield_now();
    }
    drop((sim, context));
    assert_eq!(hanging.join().expect("the other thread"), Err(709), "the context went with its handle");
}

#[test]
fn initialisation_can_fail() {
    // §9, codes 802 to 804: cuInit.
    let sim = Sim::new();
    sim.fail("cuInit", Fault::once(803));
    assert_eq!([(); 2].map(|_| sim.cuda().cu_init(0)), [Err(803), Ok(())]);
}

#[test]
#[should_panic(expected = "no entry point \"cuMemHostRegistre\"")]
fn a_misspelt_entry_point_fails_the_test() {
    Sim::new().fail("cuMemHostRegistre", Fault::always(2));
}

#[test]
fn calls_are_counted_by_name_and_thread() {
    let (sim, context) = device();
    sim.reset_calls();
    let event = sim.cuda().cu_event_create(NO_TIMING).expect("event");
    for _ in 0..3 {
        let _ = sim.cuda().cu_event_query(event);
    }
    let elsewhere = thread::scope(|scope| {
        let elsewhere = scope.spawn(|| {
            let _ = sim.cuda().cu_event_query(event);
            let _ = sim.cuda().cu_event_query(0);
            sim.calls_by_this_thread("cuEventQuery")
        });
        elsewhere.join().expect("the other thread")
    });
    assert_eq!(elsewhere, 2, "failed calls count, too");
    assert_eq!([sim.calls_by_this_thread("cuEventQuery"), sim.calls("cuEventQuery")], [3, 5]);
    assert_eq!(sim.total_calls(), 6);
    let _stream = context.stream();
    assert_eq!(sim.total_calls(), 6, "making typed handles is not counted");
    sim.reset_calls();
    assert_eq!([sim.calls_by_this_thread("cuEventQuery"), sim.total_calls()], [0, 0]);
}

#[test]
fn a_sticky_error_is_answered_by_every_call_of_the_context() {
    // §3 "error", §5: an asynchronous error never becomes 0 again, and the work is never done.
    let sim = Sim::builder().devices(2).build();
    let (broken, sound) = (sim.context(0), sim.context(1));
    broken.bind();
    let (stream, dst) = (broken.stream(), broken.alloc(BYTES));
    let mut src = Pinned::new(&sim, 1);
    let cuda = sim.cuda();
    let event = cuda.cu_event_create(NO_TIMING).expect("event");
    upload(&stream, &src.bytes, &dst);
    cuda.cu_event_record(event, stream.handle()).expect("record");
    thread::scope(|scope| {
        stream.hold();
        let waiting = scope.spawn(|| {
            broken.bind();
            cuda.cu_event_synchronize(event)
        });
        broken.break_with(700);
        assert_eq!(waiting.join().expect("the other thread"), Err(700), "a waiting call, too");
    });
    assert_eq!(cuda.cu_event_query(event), Err(700));
    assert_eq!(cuda.cu_ctx_synchronize(), Err(700));
    assert_eq!(cuda.cu_event_create(NO_TIMING), Err(700));
    assert_eq!(cuda.cu_stream_query(stream.handle()), Err(700));
    assert_eq!(cuda.cu_mem_host_unregister(src.address()), Err(700));
    assert_eq!(register(&sim, 100), Err(700));
    stream.release();
    sim.run_until_idle();
    assert_ne!(dst.read(), vec![1; BYTES]);
    sound.bind();
    assert_eq!(cuda.cu_ctx_synchronize(), Ok(()), "another context is not concerned");
}
