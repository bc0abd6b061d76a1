//! A buffer that was captured into a CUDA graph: held until the graph is gone, used again afterwards; on the simulated
//! device. What a pool does to captures is `capture.rs`.

mod common;

use common::{Rig, all_zero, copy_to_device, locked_bytes, pattern, until};
use pinpool::sim::{CaptureMode, Fault, Sim, SimBuffer, SimGraph, SimStream};
use pinpool::{Error, GraphHold, PinnedBuffer};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

const LEN: usize = 64 << 10;

/// Captures a copy of the whole buffer, and shows it to the pool.
fn capture(stream: &SimStream, buffer: &mut PinnedBuffer, device: &SimBuffer) -> SimGraph {
    stream.begin_capture(CaptureMode::Relaxed);
    copy_to_device(stream, buffer, buffer.len(), device);
    assert_eq!(buffer.record_last_use(stream), Err(Error::Capturing), "no event stands for a replay");
    stream.end_capture().expect("the pool broke the capture")
}

/// A page-locked buffer with a pattern in it.
fn filled(rig: &Rig, seed: u8) -> PinnedBuffer {
    let mut buffer = rig.pinned(LEN);
    buffer.copy_from_slice(&pattern(seed, LEN));
    buffer
}

/// Takes and drops as a busy program does; none may be the one at this address.
fn rounds(rig: &Rig, stream: &SimStream, count: usize, but_not: *const u8) {
    for round in 0..count {
        let mut buffer = rig.pool.take(LEN);
        assert_ne!(buffer.as_ptr(), but_not, "handed out although a graph uses it");
        assert!(all_zero(&buffer));
        buffer.fill(round as u8);
        buffer.record_last_use(stream).unwrap();
        drop(buffer);
        rig.sim.run_until_idle();
        if round % 4 == 0 {
            rig.drain();
        }
    }
    rig.drain();
}

fn panic_of(action: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(action)).expect_err("it did not panic");
    panic
        .downcast_ref::<String>()
        .cloned()
        .or(panic.downcast_ref::<&str>().map(|text| (*text).into()))
        .unwrap()
}

#[test]
fn a_captured_buffer_is_held_until_its_graph_is_gone_and_is_used_again_afterwards() {
    let rig = Rig::new();
    let (stream, other) = (rig.context.stream(), rig.context.stream());
    let device = rig.context.alloc(LEN);
    let mut buffer = filled(&rig, 1);
    let address = buffer.as_ptr();
    let graph = capture(&stream, &mut buffer, &device);
    drop(buffer);
    rig.drain();
    let stats = rig.assert_balanced();
    assert_eq!((stats.held_buffers, stats.held_bytes, stats.quarantined_bytes), (1, LEN, 0));
    let class = stats.classes.iter().find(|class| class.class_bytes == LEN).unwrap();
    assert_eq!((class.held_buffers, class.held_pinned_buffers, class.queued_buffers), (1, 1, 0));
    assert!(stats.to_string().contains("64 KiB held for graphs"), "{stats}");

    for launch in 0..3 {
        rounds(&rig, &other, 20, address);
        graph.launch(if launch == 1 { &other } else { &stream });
        rig.sim.run_until_idle();
        assert_eq!(device.read(), pattern(1, LEN), "a replay reads what was captured");
    }
    rig.pool.clear();
    let waits = rig.pool.stats().context_waits;
    drop(graph);
    until("the buffer is released", || rig.pool.stats().held_buffers == 0);
    rig.drain();
    let stats = rig.assert_balanced();
    assert!(stats.context_waits > waits, "it waits for the contexts before it is zeroed");
    let again = rig.pool.take(LEN);
    assert_eq!(again.as_ptr(), address, "it is used again");
    assert!(again.is_pinned() && all_zero(&again));
    drop(again);
    rig.finish();
}

#[test]
fn launches_in_flight_and_a_late_driver_hold_it_too() {
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = filled(&rig, 2);
    let address = buffer.as_ptr();
    let graph = capture(&stream, &mut buffer, &device);
    drop(buffer);
    stream.hold();
    graph.launch(&stream);
    drop(graph);
    rounds(&rig, &rig.context.stream(), 20, address);
    assert_eq!(rig.pool.stats().held_bytes, LEN, "the launch reads it yet");
    rig.sim.hold_user_objects(true);
    stream.release();
    rig.sim.run_until_idle();
    assert_eq!(device.read(), pattern(2, LEN));
    rounds(&rig, &rig.context.stream(), 20, address);
    assert_eq!(rig.pool.stats().held_bytes, LEN, "the driver has not said so yet");
    rig.sim.hold_user_objects(false);
    until("the buffer is released", || rig.pool.stats().held_buffers == 0);
    rig.finish();
}

#[test]
fn one_user_object_a_graph_and_a_buffer_in_two_graphs_is_held_for_both() {
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    rig.shelve(LEN, 2);
    let (mut one, mut two) = (rig.pool.take(LEN), rig.pool.take(LEN));
    rig.sim.reset_calls();
    stream.begin_capture(CaptureMode::Relaxed);
    for _ in 0..3 {
        for buffer in [&mut one, &mut two] {
            copy_to_device(&stream, buffer, LEN, &device);
            assert_eq!(buffer.record_last_use(&stream), Err(Error::Capturing));
        }
    }
    let first = stream.end_capture().unwrap();
    assert_eq!(rig.sim.calls("cuUserObjectCreate"), 1);
    let second = capture(&stream, &mut one, &device);
    assert_eq!((rig.sim.calls("cuUserObjectCreate"), rig.sim.user_objects()), (2, 2));
    drop((one, two));
    rig.drain();
    assert_eq!(rig.pool.stats().held_bytes, 2 * LEN);
    drop(first);
    until("the second buffer is released", || rig.pool.stats().held_bytes == LEN);
    rig.drain();
    assert_eq!(rig.assert_balanced().held_bytes, LEN);
    drop(second);
    until("the first buffer is released", || rig.pool.stats().held_bytes == 0);
    rig.drain();
    assert_eq!(rig.pool.stats().pooled_buffers, 2);
    rig.finish();
}

#[test]
fn a_pageable_buffer_is_held_and_page_locked_afterwards() {
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = rig.pool.take(LEN);
    assert!(!buffer.is_pinned());
    buffer.fill(7);
    let graph = capture(&stream, &mut buffer, &device);
    drop(buffer);
    rig.drain();
    let stats = rig.assert_balanced();
    assert_eq!((stats.held_buffers, stats.held_bytes, stats.registered_bytes), (1, 0, 0));
    graph.launch(&stream);
    rig.sim.run_until_idle();
    assert_eq!(device.read(), vec![7; LEN]);
    drop(graph);
    until("the buffer is released", || rig.pool.stats().held_buffers == 0);
    rig.drain();
    assert_eq!(rig.assert_balanced().registered_bytes, LEN);
    rig.finish();
}

#[test]
fn while_the_graph_exists_a_write_panics_and_when_it_is_gone_a_write_waits() {
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = filled(&rig, 3);
    let graph = capture(&stream, &mut buffer, &device);
    assert!(panic_of(|| buffer[0] = 1).contains("captured into a CUDA graph"));
    assert_eq!(buffer[0], pattern(3, LEN)[0], "a read disturbs nothing");
    assert_eq!(buffer.wait(), Err(Error::Capturing));
    assert_eq!(buffer.is_quiescent(), Ok(false));
    graph.launch(&stream);
    drop(graph);
    assert!(panic_of(|| buffer[0] = 1).contains("captured into a CUDA graph"), "a launch is in flight");
    rig.sim.run_until_idle();
    buffer.wait().unwrap();
    buffer.fill(9);
    assert_eq!(buffer.is_quiescent(), Ok(true));
    assert_eq!(device.read(), pattern(3, LEN));
    buffer.record_last_use(&stream).unwrap();
    rig.sim.run_until_idle();
    drop(buffer);
    rig.drain();
    assert_eq!(rig.pool.stats().held_buffers, 0, "it is an ordinary buffer again");
    rig.finish();
}

#[test]
fn what_was_captured_into_a_broken_capture_comes_back() {
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    rig.shelve(LEN, 2);
    let (mut before, mut after) = (rig.pool.take(LEN), rig.pool.take(LEN));
    stream.begin_capture(CaptureMode::Relaxed);
    copy_to_device(&stream, &before, LEN, &device);
    assert_eq!(before.record_last_use(&stream), Err(Error::Capturing));
    assert_eq!(rig.sim.cuda().cu_stream_query(stream.handle()), Err(900), "the application breaks it");
    assert_eq!(after.record_last_use(&stream), Err(Error::Capturing));
    drop((before, after));
    assert_eq!(stream.end_capture().err(), Some(901));
    rig.drain();
    until("both are released", || rig.pool.stats().held_buffers == 0);
    rig.drain();
    let stats = rig.assert_balanced();
    assert_eq!((stats.pooled_buffers, stats.quarantined_bytes), (2, 0));
    rig.finish();
}

/// What a driver without user objects, or one that refuses, leaves to the caller.
#[test]
fn without_a_user_object_the_caller_s_word_holds_it_and_without_either_it_is_quarantined() {
    let refusals = ["cuStreamGetCaptureInfo", "cuUserObjectCreate", "cuGraphRetainUserObject", ""];
    for refused in refusals {
        let without = refused.is_empty();
        let rig = Rig::with(Sim::builder().user_objects(!without).build(), |builder| builder);
        let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
        let captured = |seed| {
            let mut buffer = filled(&rig, seed);
            if !without {
                rig.sim.fail(refused, Fault::once(801));
            }
            let graph = capture(&stream, &mut buffer, &device);
            rig.sim.clear_faults();
            (buffer, graph)
        };
        let (mut buffer, graph) = captured(4);
        let address = buffer.as_ptr();
        let hold = hold_for_graph(&mut buffer);
        assert!(panic_of(|| buffer[0] = 1).contains("captured into a CUDA graph"));
        drop(buffer);
        rounds(&rig, &rig.context.stream(), 10, address);
        assert_eq!(rig.assert_balanced().held_bytes, LEN);
        graph.launch(&stream);
        rig.sim.run_until_idle();
        assert_eq!(device.read(), pattern(4, LEN));
        drop(graph);
        drop(hold);
        until("the buffer is released", || rig.pool.stats().held_buffers == 0);
        rig.drain();
        assert_eq!(rig.assert_balanced().quarantined_bytes, 0);

        let (buffer, graph) = captured(5);
        let address = buffer.as_ptr();
        drop(buffer);
        rounds(&rig, &rig.context.stream(), 10, address);
        let stats = rig.assert_balanced();
        assert_eq!((stats.held_bytes, stats.quarantined_pinned_bytes), (0, LEN), "{refused}");
        graph.launch(&stream);
        rig.sim.run_until_idle();
        assert_eq!(device.read(), pattern(5, LEN));
        drop(graph);
        assert_eq!(rig.sim.user_objects(), 0, "{refused}: an object is left over");
        rig.finish();
    }
}

#[allow(unsafe_code)]
fn hold_for_graph(buffer: &mut PinnedBuffer) -> GraphHold {
    // SAFETY: every test lets go of its graph and of the launches before the hold.
    unsafe { buffer.hold_for_graph() }
}

/// A graph that was built by other means than a capture that the pool sees.
#[test]
fn the_caller_s_word_holds_what_nobody_showed_and_covers_what_came_before_it() {
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = filled(&rig, 6);
    let address = buffer.as_ptr();
    let hold = hold_for_graph(&mut buffer);
    stream.begin_capture(CaptureMode::Relaxed);
    copy_to_device(&stream, &buffer, LEN, &device);
    let unseen = stream.end_capture().unwrap();
    let seen = capture(&stream, &mut buffer, &device);
    drop(buffer);
    rig.drain();
    drop(seen);
    rounds(&rig, &rig.context.stream(), 10, address);
    assert_eq!(rig.pool.stats().held_bytes, LEN, "the graph that the pool saw is not the only one");
    unseen.launch(&stream);
    rig.sim.run_until_idle();
    assert_eq!(device.read(), pattern(6, LEN));
    drop((unseen, hold));
    until("the buffer is released", || rig.pool.stats().held_buffers == 0);
    rig.finish();
}

#[test]
fn a_shutdown_waits_for_graphs_as_long_as_for_anything_and_then_leaks_and_says_so() {
    let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(Duration::from_millis(100)));
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = filled(&rig, 7);
    let graph = capture(&stream, &mut buffer, &device);
    drop(buffer);
    rig.drain();
    let started = Instant::now();
    let report = rig.pool.shutdown();
    assert!(started.elapsed() < common::PATIENCE / 2, "{:?}", started.elapsed());
    assert!(report.completed, "{report:?}");
    assert_eq!(report.quarantined_bytes, LEN);
    assert!(report.reasons.iter().any(|reason| reason.contains("a CUDA graph")), "{report:?}");
    let stats = rig.assert_balanced();
    assert_eq!((stats.held_bytes, stats.quarantined_pinned_bytes, stats.registered_bytes), (0, LEN, LEN));
    graph.launch(&stream);
    rig.sim.run_until_idle();
    assert_eq!(device.read(), pattern(7, LEN), "the memory is still there");
    drop(graph);

    // The pool goes on, and a graph that goes away in time costs nothing.
    let mut buffer = filled(&rig, 8);
    let graph = capture(&stream, &mut buffer, &device);
    drop(buffer);
    rig.drain();
    drop(graph);
    let report = rig.pool.shutdown();
    assert_eq!((report.quarantined_bytes, report.registered_bytes_after), (0, LEN), "{report:?}");
    rig.finish();
}

#[test]
fn a_shutdown_waits_for_the_launches_of_a_graph_that_is_gone() {
    let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(common::PATIENCE));
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = filled(&rig, 7);
    let graph = capture(&stream, &mut buffer, &device);
    drop(buffer);
    rig.drain();
    stream.hold();
    graph.launch(&stream);
    drop(graph);
    let report = std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| rig.pool.shutdown());
        std::thread::sleep(Duration::from_millis(100));
        stream.release();
        rig.sim.run_until_idle();
        shutdown.join().unwrap()
    });
    assert_eq!((report.quarantined_bytes, report.registered_bytes_after), (0, 0), "{report:?}");
    assert_eq!(device.read(), pattern(7, LEN));
    rig.finish();
}

#[test]
fn a_pool_that_is_dropped_waits_for_the_graph_in_the_background() {
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = filled(&rig, 9);
    let graph = capture(&stream, &mut buffer, &device);
    let Rig { pool, sim, context } = rig;
    drop(pool);
    drop(buffer);
    graph.launch(&stream);
    sim.run_until_idle();
    assert_eq!(device.read(), pattern(9, LEN));
    assert_eq!(locked_bytes(&sim), LEN);
    drop(graph);
    until("the memory is let go", || locked_bytes(&sim) == 0);
    sim.assert_clean();
    drop(context);
}

#[test]
fn buffers_that_were_returned_after_a_shutdown_began_stay_held() {
    let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(Duration::from_millis(100)));
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    stream.hold();
    // Nobody says when a shutdown has begun, so it is tried until one had when the buffer came back.
    let spared = (0..50).any(|_| {
        let mut late = filled(&rig, 1);
        let graph = capture(&rig.context.stream(), &mut late, &device);
        // Device work that does not end keeps the shutdown waiting.
        let mut stuck = rig.pinned(LEN);
        stuck.record_last_use(&stream).unwrap();
        drop(stuck);
        let report = std::thread::scope(|scope| {
            let shutdown = scope.spawn(|| rig.pool.shutdown());
            (0..1000).for_each(|_| std::thread::yield_now());
            drop(late);
            shutdown.join().unwrap()
        });
        let spared = report.quarantined_bytes == LEN;
        if spared {
            until("it is held", || rig.pool.stats().held_bytes == LEN);
            rig.assert_balanced();
        }
        drop(graph);
        until("nothing is held", || rig.pool.stats().held_buffers == 0);
        spared
    });
    assert!(spared, "no shutdown left alone what came back after it had begun");
    stream.release();
    rig.sim.run_until_idle();
    rig.finish();
}

#[test]
fn a_cleaner_that_sleeps_notices_the_end_of_a_graph() {
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = filled(&rig, 1);
    let graph = capture(&stream, &mut buffer, &device);
    drop(buffer);
    rig.drain();
    rig.pool.clear();
    // Longer than it stays awake for nothing.
    std::thread::sleep(Duration::from_millis(300));
    drop(graph);
    until("it is released", || rig.pool.stats().held_buffers == 0);
    rig.finish();
}

/// The simulated device's own check, which the tests above stand on.
#[test]
#[allow(unsafe_code)]
fn a_replay_of_memory_that_the_pool_took_back_is_found() {
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = filled(&rig, 1);
    let graph = capture(&stream, &mut buffer, &device);
    // SAFETY: a lie, to show that it is found; the simulated device reads only mapped memory.
    unsafe { buffer.assume_quiescent() };
    drop(buffer);
    rig.drain();
    rig.sim.expect_violations();
    assert_eq!(rig.sim.violations(), [""; 0], "nothing was replayed yet");
    graph.launch(&stream);
    let found = rig.sim.take_violations();
    assert!(found.iter().any(|found| found.contains("is replayed after the")), "{found:?}");
    rig.sim.run_until_idle();
    rig.pool.clear();
    graph.launch(&stream);
    rig.sim.run_until_idle();
    assert!(
        rig.sim
            .take_violations()
            .iter()
            .any(|found| found.contains("unmapping") || found.contains("cuMemFreeHost"))
    );
}
