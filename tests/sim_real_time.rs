//! The simulated device in real time, and with everything free. Bounds are lower bounds wherever they can
//! be, so that a busy machine fails nothing.
#![allow(unsafe_code)] // The counting allocator.

mod sim_common;

use pinpool::sim::Sim;
use sim_common::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn a_copy_takes_its_time_and_happens_by_itself() {
    let sim = Sim::builder().real_time().copy_bytes_per_second(8_000).build();
    let context = sim.context(0);
    let (stream, dst, src) = (context.stream(), context.alloc(BYTES), Pinned::new(&sim, 1));
    let start = Instant::now();
    upload(&stream, &src.bytes, &dst);
    let enqueued = sim.pending_operations();
    stream.synchronize();
    assert!(start.elapsed() >= Duration::from_millis(8), "64 bytes at 8 kB/s");
    assert_eq!(dst.read(), vec![1; BYTES]);
    assert_eq!(enqueued, 1);
}

#[test]
fn copies_of_one_direction_share_an_engine_and_streams_do_not_wait_for_a_stall() {
    // Unregistering does not wait here, or the end of the test would wait for the stall.
    let builder = Sim::builder().real_time().unregister_waits(false);
    let sim = builder.copy_bytes_per_second(8_000).build();
    let context = sim.context(0);
    let (one, other, stalled) = (context.stream(), context.stream(), context.stream());
    let (dst, src) = (context.alloc(BYTES), Pinned::new(&sim, 1));
    sim.stall(stalled.handle(), Duration::from_secs(600));
    let start = Instant::now();
    upload(&one, &src.bytes, &dst);
    upload(&other, &src.bytes, &dst);
    one.synchronize();
    other.synchronize();
    assert!(start.elapsed() >= Duration::from_millis(16), "one after the other");
    assert_eq!(sim.cuda().cu_stream_query(stalled.handle()), NOT_READY);
}

#[test]
fn a_stall_delays_its_stream_by_its_length() {
    let sim = Sim::zero_cost();
    let context = sim.context(0);
    let stream = context.stream();
    let event = sim.cuda().cu_event_create(NO_TIMING).expect("event");
    let start = Instant::now();
    sim.stall(stream.handle(), Duration::from_millis(20));
    sim.cuda().cu_event_record(event, stream.handle()).expect("record");
    assert_eq!(sim.cuda().cu_event_query(event), NOT_READY);
    sim.cuda().cu_event_synchronize(event).expect("synchronize");
    assert!(start.elapsed() >= Duration::from_millis(20));
    assert_eq!(sim.cuda().cu_event_query(event), Ok(()));
}

#[test]
fn with_zero_cost_a_call_executes_what_it_enqueues_unless_the_stream_is_held() {
    let sim = Sim::zero_cost();
    let context = sim.context(0);
    let (stream, dst, mut src) = (context.stream(), context.alloc(BYTES), Pinned::new(&sim, 1));
    let event = sim.cuda().cu_event_create(NO_TIMING).expect("event");
    upload(&stream, &src.bytes, &dst);
    assert_eq!(dst.read(), vec![1; BYTES]);
    sim.cuda().cu_event_record(event, stream.handle()).expect("record");
    assert_eq!(sim.cuda().cu_event_query(event), Ok(()));

    src.bytes.fill(2);
    stream.hold();
    upload(&stream, &src.bytes, &dst);
    sim.cuda().cu_event_record(event, stream.handle()).expect("record");
    assert_eq!(sim.pending_operations(), 2);
    assert_eq!(sim.cuda().cu_event_query(event), NOT_READY);
    assert_eq!(dst.read(), vec![1; BYTES]);
    stream.release();
    sim.run_until_idle();
    assert_eq!(sim.cuda().cu_event_query(event), Ok(()));
    assert_eq!(dst.read(), vec![2; BYTES]);
    stream.hold();
    sim.cuda().cu_event_record(event, stream.handle()).expect("record");
    assert_eq!(sim.cuda().cu_event_query(event), NOT_READY, "held, with nothing else to do");
    stream.release();
    sim.run_until_idle();
    assert_eq!(sim.cuda().cu_event_query(event), Ok(()));
}

#[test]
fn held_streams_hold_in_real_time_too() {
    let sim = Sim::real_time();
    let context = sim.context(0);
    let (held, free) = (context.stream(), context.stream());
    held.hold();
    for stream in [&held, &free] {
        sim.stall(stream.handle(), Duration::ZERO);
    }
    sim.run_until_idle();
    assert_eq!(sim.cuda().cu_stream_query(held.handle()), NOT_READY);
    assert_eq!(sim.cuda().cu_stream_query(free.handle()), Ok(()));
    held.release();
    held.synchronize();
}

#[test]
fn elapsed_time_is_measured_between_records() {
    // §3 "never recorded" and cuEventElapsedTime.
    let sim = Sim::zero_cost();
    let context = sim.context(0);
    let (cuda, stream) = (sim.cuda(), context.stream());
    let [start, end, untimed] = [0, 0, NO_TIMING].map(|flags| cuda.cu_event_create(flags).expect("event"));
    assert_eq!(cuda.cu_event_elapsed_time(start, end), Err(400));
    cuda.cu_event_record(start, stream.handle()).expect("record");
    sim.stall(stream.handle(), Duration::from_millis(5));
    cuda.cu_event_record(end, stream.handle()).expect("record");
    cuda.cu_event_record(untimed, stream.handle()).expect("record");
    assert_eq!(cuda.cu_event_elapsed_time(start, end), Err(600));
    stream.synchronize();
    assert!(cuda.cu_event_elapsed_time(start, end).expect("milliseconds") >= 5.0);
    assert_eq!(cuda.cu_event_elapsed_time(start, untimed), Err(400));
}

/// Queries an event all the while another thread registers a page, which costs 20 ms. Gives the slowest
/// query, and how many there were meanwhile.
fn query_while_registering(driver_lock: bool) -> (Duration, u64) {
    let cost = Duration::from_millis(20);
    let sim = Sim::builder().driver_lock(driver_lock).register_cost_per_page(cost).build();
    let context = sim.context(0);
    let event = sim.cuda().cu_event_create(NO_TIMING).expect("event");
    thread::scope(|scope| {
        let registering = scope.spawn(|| {
            context.bind();
            let mut memory = vec![0; PAGE];
            let before = sim.calls("cuEventQuery");
            sim.cuda().cu_mem_host_register(memory.as_mut_ptr(), PAGE, 1).expect("register");
            let meanwhile = sim.calls("cuEventQuery") - before;
            sim.cuda().cu_mem_host_unregister(memory.as_mut_ptr()).expect("unregister");
            meanwhile
        });
        let mut slowest = Duration::ZERO;
        while !registering.is_finished() {
            let start = Instant::now();
            sim.cuda().cu_event_query(event).expect("query");
            slowest = slowest.max(start.elapsed());
        }
        (slowest, registering.join().expect("the other thread"))
    })
}

#[test]
fn registering_stalls_every_other_call_where_there_is_a_driver_lock() {
    // §0.3, §1.4: registration takes a driver-wide lock.
    let (slowest, _) = query_while_registering(true);
    assert!(slowest >= Duration::from_millis(10), "a query waits for most of the 20 ms");
    let (_, meanwhile) = query_while_registering(false);
    assert!(meanwhile > 1, "queries go on");
}

#[test]
fn recording_and_querying_allocate_nothing_in_steady_state() {
    for sim in [Sim::new(), Sim::zero_cost()] {
        let context = sim.context(0);
        let (stream, dst, src) = (context.stream(), context.alloc(BYTES), Pinned::new(&sim, 1));
        let cuda = sim.cuda();
        let event = cuda.cu_event_create(NO_TIMING).expect("event");
        let cycle = || {
            upload(&stream, &src.bytes, &dst);
            cuda.cu_event_record(event, stream.handle()).expect("record");
            let _ = cuda.cu_event_query(event);
            let _ = cuda.cu_ctx_get_current();
            sim.run_until_idle();
            cuda.cu_event_query(event).expect("query");
        };
        (0..8).for_each(|_| cycle());
        let before = ALLOCATIONS.get();
        (0..100).for_each(|_| cycle());
        assert_eq!(ALLOCATIONS.get() - before, 0);
    }
}

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts what each thread allocates.
struct Counting;

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is handed on.
        unsafe { System.dealloc(address, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;
