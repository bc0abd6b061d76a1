//! Whatever the pool does, a capture of the application stays valid: in every capture mode, on every thread, for streams
//! that the pool knows; and what is said of those that it does not. On the simulated device, which breaks a capture
//! where a driver may.

mod common;

use common::{PATIENCE, Rig, all_zero, copy_to_device, pattern, until};
use pinpool::pin::{Pinned, Region, pin_all};
use pinpool::sim::{CaptureMode, Fault, Sim, SimContext, SimStream};
use pinpool::{Error, PinnedBuffer};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

const LEN: usize = 64 << 10;
const MODES: [CaptureMode; 3] = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

/// Has another thread capture on a stream while `action` runs, and demands that the capture becomes a graph.
fn while_another_thread_captures(context: &SimContext, mode: CaptureMode, action: impl FnOnce(&SimStream)) {
    let stream = context.stream();
    let (begun, has_begun) = mpsc::channel();
    let (done, is_done) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let stream = &stream;
        let capturing = scope.spawn(move || {
            context.bind();
            stream.begin_capture(mode);
            begun.send(()).unwrap();
            // Ends also when the action panics, which drops the sender.
            let _ = is_done.recv();
            stream.end_capture().map(drop)
        });
        has_begun.recv().unwrap();
        action(stream);
        drop(done);
        assert_eq!(capturing.join().unwrap(), Ok(()), "{mode:?}: the pool broke the capture");
    });
}

/// The calling thread's capture mode.
fn mode_of_this_thread(sim: &Sim) -> u32 {
    let mode = sim.cuda().cu_thread_exchange_stream_capture_mode(2).unwrap();
    sim.cuda().cu_thread_exchange_stream_capture_mode(mode).unwrap();
    mode
}

/// Everything that a pool does on its own threads, and everything that a caller may call.
fn everything(rig: &Rig, stream: &SimStream) {
    let device = rig.context.alloc(LEN);
    // With a record, since nothing else can be waited for while somebody captures.
    let give_back = |mut buffer: PinnedBuffer| {
        buffer.record_last_use(stream).unwrap();
        rig.sim.run_until_idle();
    };
    // Registering on the lane, after a pageable return.
    let misses: Vec<PinnedBuffer> = (0..3).map(|_| rig.pool.take(LEN)).collect();
    misses.into_iter().for_each(give_back);
    rig.drain();
    // Recording, querying, zeroing, shelving.
    for seed in 0..3 {
        let mut buffer = rig.pool.take(LEN);
        assert!(buffer.is_pinned() && all_zero(&buffer));
        buffer.copy_from_slice(&pattern(seed, LEN));
        copy_to_device(stream, &buffer, LEN, &device);
        buffer.record_last_use(stream).unwrap();
        assert_eq!(buffer.is_quiescent(), Ok(false));
        drop(buffer);
        rig.sim.run_until_idle();
        assert_eq!(device.read(), pattern(seed, LEN));
        rig.drain();
    }
    // A wait of the caller's, and a write that waits.
    let mut buffer = rig.pool.take(LEN);
    buffer.record_last_use(stream).unwrap();
    rig.sim.run_until_idle();
    buffer.wait().unwrap();
    buffer[0] = 1;
    // Harvesting: the cleaner does nothing, so the taker asks.
    buffer.record_last_use(stream).unwrap();
    rig.sim.run_until_idle();
    rig.pool.clear();
    let hold = rig.pool.hold_cleaner();
    let address = buffer.as_ptr();
    drop(buffer);
    let harvested = rig.pool.take(LEN);
    assert_eq!(harvested.as_ptr(), address);
    drop(hold);
    give_back(harvested);
    // Page-locking by name, on this thread.
    give_back(rig.pool.take_pinned(2 * LEN).unwrap());
    assert_eq!(rig.pool.prewarm(4 * LEN, 2), Ok(2));
    let prewarmed = rig.pool.take(4 * LEN);
    assert!(prewarmed.driver_says_page_locked().unwrap());
    give_back(prewarmed);
    let mut own = Pinned::new(&rig.sim.driver(), vec![1u8; 4096]).unwrap();
    own.record_last_use(stream).unwrap();
    rig.sim.run_until_idle();
    drop(own);
    assert!(pinpool::pin::drain(PATIENCE));
    let memory = vec![0u8; 8192];
    #[allow(unsafe_code)]
    // SAFETY: the memory outlives the regions, and nothing copies from it.
    let regions = unsafe { pin_all(&rig.sim.driver(), &[Region::new(memory.as_ptr(), 8192)]) }.unwrap();
    drop(regions);
    // Evicting and unregistering.
    rig.pool.trim_to(LEN);
    rig.pool.set_max_pooled_bytes(0);
    rig.pool.set_max_pooled_bytes(1 << 30);
    rig.pool.clear();
}

#[test]
fn nothing_that_the_pool_does_breaks_a_capture_of_another_thread() {
    for mode in MODES {
        let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(Duration::from_millis(200)));
        while_another_thread_captures(&rig.context, mode, |_| {
            for own_mode in MODES {
                let before = rig.sim.cuda().cu_thread_exchange_stream_capture_mode(own_mode as u32).unwrap();
                everything(&rig, &rig.context.stream());
                assert_eq!(
                    mode_of_this_thread(&rig.sim),
                    own_mode as u32,
                    "the thread's mode is not restored"
                );
                rig.sim.cuda().cu_thread_exchange_stream_capture_mode(before).unwrap();
            }
            let report = rig.pool.shutdown();
            assert!(report.completed, "{report:?}");
        });
        rig.finish();
    }
}

/// The capturing thread itself goes on using the pool, as a program does that captures its first iteration.
#[test]
fn the_capturing_thread_can_use_the_pool() {
    for mode in MODES {
        let rig = Rig::new();
        let (capturing, stream) = (rig.context.stream(), rig.context.stream());
        capturing.begin_capture(mode);
        everything(&rig, &stream);
        assert_eq!(mode_of_this_thread(&rig.sim), 0, "the thread's mode is not restored");
        assert!(capturing.end_capture().is_ok(), "{mode:?}: the pool broke the capture");
        rig.finish();
    }
}

/// Ends the other threads, also when a check fails.
struct EndsOthers<'a>(&'a AtomicBool);

impl Drop for EndsOthers<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Section 0 of `cuda-semantics.md`, fact 1: a thread of the pool that is not in the relaxed mode is found whether or not
/// anything captures; see `sim/driver.rs`. Here: many threads, while captures come and go.
#[test]
fn captures_come_and_go_while_many_threads_use_the_pool() {
    let sim = Sim::builder().real_time().operation_latency(Duration::ZERO).build();
    let rig = Rig::with(sim, |builder| builder.max_pooled_bytes(16 * LEN));
    let is_over = AtomicBool::new(false);
    // A released buffer waits for the contexts, and a capture that begins between the pool's last look and that wait
    // is the stated limit: so nothing waits for them while captures begin here all the time.
    let hold = rig.pool.hold_context_waits();
    std::thread::scope(|scope| {
        let _ends = EndsOthers(&is_over);
        for _ in 0..3 {
            scope.spawn(|| {
                rig.context.bind();
                let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
                let mut seed = 0;
                while !is_over.load(Ordering::Relaxed) {
                    seed = seed % 100 + 1;
                    let mut buffer = rig.pool.take(LEN);
                    buffer.fill(seed);
                    copy_to_device(&stream, &buffer, LEN, &device);
                    buffer.record_last_use(&stream).unwrap();
                    drop(buffer);
                    if seed % 10 == 0 {
                        rig.pool.trim_to(LEN);
                    }
                }
            });
        }
        let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
        let mut graphs = Vec::new();
        for round in 0..200usize {
            let mut buffer = rig.pool.take(LEN);
            buffer.copy_from_slice(&pattern(round as u8, LEN));
            stream.begin_capture(MODES[round % 3]);
            copy_to_device(&stream, &buffer, LEN, &device);
            assert_eq!(buffer.record_last_use(&stream), Err(Error::Capturing));
            drop(buffer);
            let graph = stream.end_capture().unwrap_or_else(|code| panic!("round {round}: {code}"));
            graphs.push((round, graph));
            if graphs.len() > 4 {
                let (captured_in, graph) = graphs.remove(0);
                graph.launch(&stream);
                stream.synchronize();
                assert!(device.read() == pattern(captured_in as u8, LEN), "round {round}: wrong bytes");
            }
        }
    });
    drop(hold);
    until("nothing is held", || rig.pool.stats().held_buffers == 0);
    rig.finish();
}

/// A block without a record waits for the end of a capture on a stream that was shown to the pool.
#[test]
fn no_context_is_waited_for_while_a_known_stream_captures() {
    for shown_before in [true, false] {
        let rig = Rig::new();
        let stream = rig.context.stream();
        rig.shelve(LEN, 2);
        let (mut known, dropped) = (rig.pool.take(LEN), rig.pool.take(LEN));
        if shown_before {
            known.record_last_use(&stream).unwrap();
            rig.sim.run_until_idle();
        }
        stream.begin_capture(CaptureMode::Relaxed);
        if !shown_before {
            assert_eq!(known.record_last_use(&stream), Err(Error::Capturing));
        }
        rig.sim.reset_calls();
        drop(dropped);
        // Asked again and again, in vain.
        until("the lane asks", || rig.sim.calls("cuStreamIsCapturing") > 20);
        assert_eq!(rig.sim.calls("cuCtxSynchronize"), 0, "the capture would be broken");
        assert_eq!(rig.pool.stats().queued_buffers, 1);
        let graph = stream.end_capture().expect("the pool broke the capture");
        rig.drain();
        assert!(rig.sim.calls("cuCtxSynchronize") > 0);
        drop((graph, known));
        rig.drain();
        until("nothing is held", || rig.pool.stats().held_buffers == 0);
        rig.finish();
    }
}

/// A stream that is gone, or whose handle is another stream's, forbids nothing.
#[test]
fn a_known_stream_that_is_gone_keeps_nothing_waiting() {
    let rig = Rig::new();
    let known = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    buffer.record_last_use(&known).unwrap();
    rig.sim.run_until_idle();
    let handle = known.handle();
    drop(known);
    let other = rig.context.stream();
    assert_eq!(other.handle(), handle, "the driver uses it again");
    drop(buffer);
    rig.drain();
    drop(rig.pinned(LEN));
    rig.drain();
    // Another context's captures are no obstacle either.
    let far = Sim::new();
    let _elsewhere = far.context(0);
    rig.context.bind();
    rig.finish();
}

#[test]
fn the_legacy_stream_tells_of_captures_that_the_pool_was_never_shown() {
    let rig = Rig::new();
    let blocking = rig.context.blocking_stream();
    let dropped = rig.pinned(LEN);
    blocking.begin_capture(CaptureMode::Relaxed);
    rig.sim.reset_calls();
    drop(dropped);
    until("the lane asks", || rig.sim.calls("cuStreamIsCapturing") > 20);
    assert_eq!(rig.sim.calls("cuCtxSynchronize"), 0);
    assert!(blocking.end_capture().is_ok(), "the pool broke the capture");
    rig.drain();
    rig.finish();
}

/// The stated limit: a non-blocking stream that was never shown; `hold_context_waits` is for that.
#[test]
fn a_capture_that_nobody_showed_needs_the_hold() {
    for holds in [true, false] {
        let rig = Rig::new();
        let unknown = rig.context.stream();
        let (dropped, later) = (rig.pinned(LEN), rig.pinned(LEN));
        unknown.begin_capture(CaptureMode::Relaxed);
        let hold = holds.then(|| rig.pool.hold_context_waits());
        drop(dropped);
        match holds {
            true => assert!(!rig.pool.drain(Duration::from_millis(20))),
            false => until("it is waited for", || rig.sim.calls("cuCtxSynchronize") > 0),
        }
        assert_eq!(unknown.end_capture().err(), (!holds).then_some(901));
        drop((hold, later));
        rig.drain();
        rig.finish();
    }
}

/// A caller's own wait for a context would break it just the same: it is an error, at once.
#[test]
fn a_caller_s_wait_for_a_context_is_refused_while_a_known_stream_captures() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    rig.shelve(LEN, 2);
    let (mut known, mut failed) = (rig.pool.take(LEN), rig.pool.take(LEN));
    known.record_last_use(&stream).unwrap();
    rig.sim.fail("cuEventRecord", pinpool::sim::Fault::once(999));
    assert!(failed.record_last_use(&stream).is_err());
    rig.sim.run_until_idle();
    stream.begin_capture(CaptureMode::Global);
    assert_eq!(failed.wait(), Err(Error::ContextWaitsHeld));
    known.wait().expect("an event needs no such wait");
    assert!(stream.end_capture().is_ok(), "the pool broke the capture");
    failed.wait().unwrap();
    drop((known, failed));
    rig.drain();
    rig.finish();
}

/// Shutting down while a stream captures: what needs a wait for the context is leaked at the deadline, and said so.
#[test]
fn a_shutdown_leaves_a_capture_valid() {
    for mode in MODES {
        let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(Duration::from_millis(100)));
        rig.shelve(LEN, 3);
        let (mut known, unrecorded, out) = (rig.pool.take(LEN), rig.pool.take(LEN), rig.pool.take(LEN));
        while_another_thread_captures(&rig.context, mode, |stream| {
            assert_eq!(known.record_last_use(stream), Err(Error::Capturing));
            drop((known, unrecorded));
            let report = rig.pool.shutdown();
            assert_eq!(report.quarantined_bytes, 2 * LEN, "{report:?}");
            assert_eq!(report.checked_out_buffers, 1);
        });
        drop(out);
        rig.finish();
    }
}

/// Memory of the caller's: `unpin` does not wait for a graph, which may be the caller's own; the memory does.
#[test]
fn unpin_is_refused_while_a_graph_exists_and_the_memory_is_freed_afterwards() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    for gone_first in [true, false] {
        let mut own = Pinned::new(&rig.sim.driver(), vec![1u8; LEN]).unwrap();
        stream.begin_capture(CaptureMode::Relaxed);
        assert_eq!(own.record_last_use(&stream), Err(Error::Capturing));
        let graph = stream.end_capture().unwrap();
        assert_eq!(rig.sim.registered_bytes(), LEN);
        if gone_first {
            drop(graph);
            assert_eq!(own.unpin().unwrap(), vec![1u8; LEN]);
        } else {
            let refused = own.unpin().unwrap_err();
            assert_eq!(refused.cause(), &Error::Capturing, "{refused}");
            assert_eq!(rig.sim.registered_bytes(), LEN, "it is held");
            drop(graph);
        }
        until("it is unregistered", || rig.sim.registered_bytes() == 0);
        assert!(pinpool::pin::drain(PATIENCE));
    }
    rig.finish();
}

/// A page-locked buffer that was captured, with its graph; and a context, current here, that is no primary one and was
/// never shown to the pool, with a stream of it that is held in the middle of something.
fn captured_and_used_elsewhere(rig: &Rig) -> (PinnedBuffer, pinpool::sim::SimGraph, usize, usize) {
    let (captures, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = rig.pinned(LEN);
    captures.begin_capture(CaptureMode::Relaxed);
    copy_to_device(&captures, &buffer, LEN, &device);
    assert_eq!(buffer.record_last_use(&captures), Err(Error::Capturing));
    let graph = captures.end_capture().expect("nothing breaks it");
    let own = rig.sim.cuda().cu_ctx_create(0, 0).unwrap();
    let stream = rig.sim.cuda().cu_stream_create(1).unwrap();
    rig.sim.hold(stream);
    rig.sim.stall(stream, Duration::ZERO);
    (buffer, graph, own, stream)
}

fn finish_with(rig: Rig, own: usize, stream: usize) {
    rig.sim.release(stream);
    rig.drain();
    assert!(rig.pool.shutdown().completed);
    rig.sim.cuda().cu_stream_destroy(stream).unwrap();
    rig.sim.cuda().cu_ctx_destroy(own).unwrap();
    rig.context.bind();
    rig.finish();
}

/// The end of the graph says nothing of a use without a record, in a context that the drop alone can teach.
#[test]
fn what_else_uses_a_captured_buffer_is_waited_for_when_the_graph_is_gone() {
    let rig = Rig::new();
    let (buffer, graph, own, stream) = captured_and_used_elsewhere(&rig);
    let address = buffer.as_ptr();
    drop(buffer);
    rig.drain();
    assert_eq!(rig.pool.stats().held_buffers, 1);
    drop(graph);
    until("it is released", || rig.pool.stats().held_buffers == 0);
    assert!(!rig.pool.drain(Duration::from_millis(50)), "not waited for");
    assert_ne!(rig.pool.take(LEN).as_ptr(), address);
    finish_with(rig, own, stream);
}

#[test]
fn a_captured_buffer_whose_other_uses_cannot_be_known_is_not_given_back_with_its_graph() {
    for call in ["cuCtxGetCurrent", "cuCtxGetDevice"] {
        let rig = Rig::new();
        let (buffer, graph, own, stream) = captured_and_used_elsewhere(&rig);
        rig.sim.fail(call, Fault::once(999));
        drop(buffer);
        rig.drain();
        rig.sim.clear_faults();
        let stats = rig.assert_balanced();
        assert_eq!((stats.held_buffers, stats.quarantined_pinned_bytes), (0, LEN), "{call}: {stats:#?}");
        drop(graph);
        finish_with(rig, own, stream);
    }
}
