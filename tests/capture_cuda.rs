//! Captures through the fake libcuda by cudarc's own calls, with the pool on pinpool's CUDA back end: nothing that the
//! pool does breaks one, and what cudarc copies inside one is held until its graph is gone.
//!
//! One process has one libcuda, so the tests of this file share a device and take turns at it.
#![cfg(all(feature = "cudarc", target_os = "linux"))]
#![allow(unsafe_code)] // Turning off the tracking of events, and holding for a graph, are promises.

mod child;
mod interop;

use child::{in_child, is_child};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, CUstreamCaptureStatus};
use cudarc::driver::{CudaGraph, CudaSlice, CudaStream};
use interop::{LEN, Mode, PATIENCE, Rig, panic_of, pattern, until};
use pinpool::pin::Pinned;
use pinpool::{Driver, Error, PinnedBuffer, copy_h2d_async};
use std::ffi::OsStr;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
const MODES: [CUstreamCaptureMode; 3] = [
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    RELAXED,
];

/// As CUDA-graph users have it: no tracking of events, which would be from outside the capture.
fn rig() -> Rig {
    Rig::new(Mode::Untracked)
}

fn end_capture(stream: &Arc<CudaStream>) -> CudaGraph {
    let graph = stream.end_capture(CUgraphInstantiate_flags(0));
    graph.unwrap_or_else(|error| panic!("the capture was broken: {:?}", error.0)).expect("a graph")
}

/// Captures one copy of the buffer by cudarc's own call.
fn capture(
    stream: &Arc<CudaStream>,
    mode: CUstreamCaptureMode,
    buffer: &PinnedBuffer,
    device: &mut CudaSlice<u8>,
) -> CudaGraph {
    stream.begin_capture(mode).unwrap();
    stream.memcpy_htod(buffer, device).unwrap();
    end_capture(stream)
}

fn launch(rig: &Rig, graph: &CudaGraph) {
    graph.launch().unwrap();
    rig.fake.run_until_idle();
}

/// Takes and drops as a busy program does; none may be the one at this address.
fn rounds(rig: &Rig, but_not: *const u8) {
    let mut device = rig.other.alloc_zeros::<u8>(LEN).unwrap();
    rig.fake.run_until_idle();
    for round in 1..20 {
        let mut buffer = rig.pool.take(LEN);
        assert_ne!(buffer.as_ptr(), but_not, "handed out although a graph uses it");
        assert!(buffer.iter().all(|byte| *byte == 0));
        buffer.fill(round);
        buffer.upload(.., &rig.other, &mut device).unwrap();
        rig.fake.run_until_idle();
    }
    rig.drain();
}

#[test]
fn what_cudarc_captures_is_held_until_the_graph_is_gone_in_every_mode() {
    for mode in MODES {
        let rig = rig();
        let mut device = rig.device(LEN);
        let bytes = pattern(1, LEN);
        let buffer = rig.filled(LEN, &bytes);
        let address = buffer.as_ptr();
        rig.fake.reset_calls();
        let graph = capture(&rig.stream, mode, &buffer, &mut device);
        assert_eq!(rig.fake.calls("cuStreamGetId"), 0, "asked of a stream that captures");
        assert_eq!(rig.fake.user_objects(), 1);
        drop(buffer);
        rig.drain();
        let stats = rig.pool.stats();
        assert_eq!((stats.held_bytes, stats.held_buffers, stats.quarantined_bytes), (LEN, 1, 0));
        assert!(stats.is_balanced(), "{stats:#?}");
        for _ in 0..3 {
            rounds(&rig, address);
            launch(&rig, &graph);
            assert!(rig.on_device(&device) == bytes, "{mode:?}: a replay reads what was captured");
        }
        drop(graph);
        until("it is released", || rig.pool.stats().held_buffers == 0);
        rig.drain();
        assert_eq!(rig.pool.take(LEN).as_ptr(), address, "it is used again");
        rig.finish();
    }
}

/// Views, memory that the caller owns, a copy to the host, and one graph for several buffers.
#[test]
fn every_way_to_copy_in_a_capture_is_held() {
    let rig = rig();
    let (mut device, mut second) = (rig.device(LEN), rig.device(LEN));
    let bytes = pattern(2, LEN);
    drop((0..2).map(|_| rig.pool.take(LEN)).collect::<Vec<_>>());
    rig.drain();
    let (mut source, mut target) = (rig.pool.take(LEN), rig.pool.take(LEN));
    source.copy_from_slice(&bytes);
    let own = Pinned::new(&Driver::cuda().unwrap(), pattern(3, LEN)).unwrap();
    rig.stream.begin_capture(RELAXED).unwrap();
    rig.stream.memcpy_htod(&source.view(..LEN), &mut device).unwrap();
    rig.stream.memcpy_dtoh(&device, &mut target.view_mut(..)).unwrap();
    rig.stream.memcpy_htod(&own, &mut second).unwrap();
    // Ours refuse, and say so.
    assert_eq!(source.copy_to(.., &rig.stream, &mut device).unwrap_err(), Error::Capturing);
    let graph = end_capture(&rig.stream);
    assert!(panic_of(|| _ = target[0]).contains("captured into a CUDA graph"), "a replay writes it");
    launch(&rig, &graph);
    assert!(rig.on_device(&second) == pattern(3, LEN));
    drop((source, own));
    launch(&rig, &graph);
    assert!(rig.on_device(&device) == bytes && rig.on_device(&second) == pattern(3, LEN));
    rig.drain();
    assert_eq!(rig.pool.stats().held_bytes, LEN);
    assert_eq!(rig.registered(), 3 * LEN, "memory of the caller's is held too");
    drop(graph);
    // The guard that is still alive can be read now, once the contexts were waited for.
    assert!(rig.stepping(|| target[..] == bytes[..]), "what the last replay wrote");
    drop(target);
    until("all is released", || rig.pool.stats().held_buffers == 0);
    assert!(pinpool::pin::drain(PATIENCE));
    rig.finish();
}

/// Registering, evicting, querying, harvesting, zeroing and shutting down, while another thread captures.
#[test]
fn nothing_that_the_pool_does_breaks_a_capture_of_another_thread() {
    for mode in MODES {
        let rig = rig();
        let (capturing, context) = (rig.context.new_stream().unwrap(), rig.context.clone());
        let mut device = rig.device(LEN);
        let mut shown = rig.filled(LEN, &pattern(1, LEN));
        shown.record_last_use(&capturing).unwrap();
        rig.fake.run_until_idle();
        let (begun, has_begun) = mpsc::channel();
        let (done, is_done) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let capturing = &capturing;
            let thread = scope.spawn(move || {
                context.bind_to_thread().unwrap();
                capturing.begin_capture(mode).unwrap();
                begun.send(()).unwrap();
                let _ = is_done.recv();
                let status = capturing.capture_status().unwrap();
                assert_eq!(status, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE, "{mode:?}");
                drop(end_capture(capturing));
            });
            has_begun.recv().unwrap();
            everything(&rig, &mut device);
            // Without a record: it waits for the end of the capture.
            drop(shown);
            drop(rig.pool.take_pinned(LEN).unwrap());
            assert!(!rig.pool.drain(Duration::from_millis(30)));
            assert_eq!(rig.fake.calls("cuCtxSynchronize"), 0);
            drop(done);
            thread.join().unwrap();
        });
        rig.drain();
        assert!(rig.fake.calls("cuCtxSynchronize") > 0);
        rig.finish();
    }
}

fn everything(rig: &Rig, device: &mut CudaSlice<u8>) {
    let pool = &rig.pool;
    // Registering on the lane.
    let misses: Vec<_> = (0..3).map(|_| pool.take(LEN)).collect();
    for mut buffer in misses {
        buffer.record_last_use(&rig.stream).unwrap();
    }
    rig.fake.run_until_idle();
    rig.drain();
    rig.fake.reset_calls();
    for seed in 0..3 {
        let mut buffer = pool.take(LEN);
        buffer.copy_from_slice(&pattern(seed, LEN));
        buffer.copy_to(.., &rig.stream, device).unwrap();
        assert!(!buffer.is_quiescent().unwrap());
        rig.fake.run_until_idle();
        buffer.wait().unwrap();
        drop(buffer);
        rig.drain();
    }
    // Harvesting.
    let mut buffer = pool.take(LEN);
    buffer.record_last_use(&rig.stream).unwrap();
    rig.fake.run_until_idle();
    pool.clear();
    let hold = pool.hold_cleaner();
    let address = buffer.as_ptr();
    drop(buffer);
    let mut harvested = pool.take(LEN);
    assert_eq!(harvested.as_ptr(), address);
    drop(hold);
    harvested.record_last_use(&rig.stream).unwrap();
    rig.fake.run_until_idle();
    drop(harvested);
    // Page-locking and evicting.
    assert_eq!(pool.prewarm(2 * LEN, 2), Ok(2));
    pool.trim_to(LEN);
    pool.set_max_pooled_bytes(0);
    pool.set_max_pooled_bytes(1 << 30);
    rig.drain();
    // A copy from memory that nobody tracks waits for its stream.
    let mut own = Pinned::new(&Driver::cuda().unwrap(), pattern(9, LEN)).unwrap();
    rig.stepping(|| {
        rig.context.bind_to_thread().unwrap();
        copy_h2d_async(&rig.stream, &own[..], device).unwrap();
    });
    own.record_last_use(&rig.stream).unwrap();
    rig.fake.run_until_idle();
    drop(own);
    assert!(pinpool::pin::drain(PATIENCE));
    let report = pool.shutdown();
    assert!(report.completed && report.quarantined_bytes == 0, "{report:?}");
}

/// cudarc shows its stream by reference only, so the pool cannot ask it later. It waits until the graph is gone, the
/// stream is seen again, or for some seconds.
#[test]
fn a_capture_that_only_cudarcs_copies_showed_is_waited_for_too() {
    for seen_again in [true, false] {
        let rig = rig();
        let mut device = rig.device(LEN);
        drop((0..3).map(|_| rig.pool.take(LEN)).collect::<Vec<_>>());
        rig.drain();
        let buffers: Vec<_> = (0..3).map(|_| rig.pool.take(LEN)).collect();
        rig.stream.begin_capture(RELAXED).unwrap();
        rig.stream.memcpy_htod(&buffers[0], &mut device).unwrap();
        let mut buffers = buffers.into_iter();
        let (captured, unrecorded, last) = (buffers.next(), buffers.next(), buffers.next().unwrap());
        rig.fake.reset_calls();
        drop(unrecorded);
        assert!(!rig.pool.drain(Duration::from_millis(30)));
        assert_eq!(rig.fake.calls("cuCtxSynchronize"), 0, "the capture would be broken");
        let graph = end_capture(&rig.stream);
        let started = Instant::now();
        let graph = match seen_again {
            true => {
                rig.stream.memcpy_htod(&last, &mut device).unwrap();
                Some(graph)
            }
            false => {
                drop(graph);
                None
            }
        };
        rig.fake.run_until_idle();
        rig.drain();
        assert!(
            started.elapsed() < Duration::from_secs(4),
            "only the time ended it: {:?}",
            started.elapsed()
        );
        drop((captured, last, graph));
        rig.drain();
        until("it is released", || rig.pool.stats().held_buffers == 0);
        rig.finish();
    }
}

/// A stream that was shown and is gone keeps nothing waiting, and is not kept alive.
#[test]
fn a_stream_that_is_gone_keeps_nothing_waiting() {
    let rig = rig();
    let mut buffer = rig.filled(LEN, &pattern(1, LEN));
    let shown = rig.context.new_stream().unwrap();
    buffer.record_last_use(&shown).unwrap();
    rig.fake.run_until_idle();
    assert_eq!(Arc::strong_count(&shown), 1);
    shown.begin_capture(RELAXED).unwrap();
    drop(buffer);
    rig.drain();
    drop(rig.pool.take(LEN));
    assert!(!rig.pool.drain(Duration::from_millis(30)), "it captures");
    drop(shown);
    rig.drain();
    rig.context.check_err().unwrap();
    rig.finish();
}

/// Reads do not wait for a graph that copies from the buffer, but for a copy into it, recorded or not.
#[test]
fn a_capture_hides_no_copy_into_the_buffer_whose_record_failed() {
    let rig = rig();
    let bytes = pattern(6, LEN);
    let mut device = rig.device(LEN);
    rig.stream.memcpy_htod(&bytes, &mut device).unwrap();
    rig.fake.run_until_idle();
    let buffer = rig.filled(LEN, &pattern(1, LEN));
    rig.hold();
    rig.fake.fail("cuEventRecord", 1, 999);
    let (_, mut buffer) = buffer.download(&rig.stream, &device).expect_err("the record failed");
    rig.other.begin_capture(RELAXED).unwrap();
    assert_eq!(buffer.record_last_use(&rig.other), Err(Error::Capturing));
    let graph = end_capture(&rig.other);
    assert!(rig.must_wait(|| buffer[..] == bytes[..]), "read before the device has written");
    drop((buffer, graph));
    until("it is released", || rig.pool.stats().held_buffers == 0);
    rig.finish();
}

#[test]
fn without_user_objects_the_caller_s_word_holds_it() {
    let none = [("FAKE_CUDA_USER_OBJECTS", OsStr::new("0"))];
    in_child("child_without_user_objects", &none);
}

#[test]
#[ignore = "run by without_user_objects_the_caller_s_word_holds_it"]
fn child_without_user_objects() {
    if !is_child() {
        return;
    }
    let rig = rig();
    let mut device = rig.device(LEN);
    let bytes = pattern(1, LEN);
    let mut buffer = rig.filled(LEN, &bytes);
    let address = buffer.as_ptr();
    let graph = capture(&rig.stream, RELAXED, &buffer, &mut device);
    // SAFETY: the graph is let go of first, with no launch in flight.
    let hold = unsafe { buffer.hold_for_graph() };
    drop(buffer);
    rounds(&rig, address);
    assert_eq!(rig.pool.stats().held_bytes, LEN);
    launch(&rig, &graph);
    assert!(rig.on_device(&device) == bytes);
    drop(graph);
    drop(hold);
    until("it is released", || rig.pool.stats().held_buffers == 0);
    rig.drain();
    assert_eq!(rig.pool.stats().quarantined_bytes, 0);

    let buffer = rig.filled(LEN, &bytes);
    let graph = capture(&rig.stream, RELAXED, &buffer, &mut device);
    drop(buffer);
    rig.drain();
    let stats = rig.pool.stats();
    assert_eq!((stats.held_bytes, stats.quarantined_bytes), (0, LEN), "nobody would say when it is gone");
    launch(&rig, &graph);
    assert!(rig.on_device(&device) == bytes);
    rig.fake.assert_clean();
}
