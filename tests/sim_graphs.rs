//! Graphs on the simulated device: what a replay reads, in which order launches run, and how long a user object
//! lives.

mod sim_common;

use pinpool::sim::{CaptureMode, Sim};
use sim_common::{BYTES, Pinned, device, download, upload};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`.
const NO_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`.
const MOVE: u32 = 1;

#[test]
fn a_replay_reads_host_memory_again_when_it_is_executed() {
    let (sim, context) = device();
    let (stream, buffer, copy) = (context.stream(), context.alloc(BYTES), context.alloc(BYTES));
    let mut source = Pinned::new(&sim, 1);
    let mut target = Pinned::new(&sim, 0);
    let runs = Arc::new(AtomicU32::new(0));
    stream.begin_capture(CaptureMode::Global);
    upload(&stream, &source.bytes, &buffer);
    sim.cuda().cu_memcpy_dtod_async(copy.address(), buffer.address(), BYTES, stream.handle()).expect("copy");
    sim.cuda().cu_memset_d8_async(buffer.address(), 9, BYTES / 2, stream.handle()).expect("fill");
    download(&stream, &copy, &mut target.bytes);
    let counted = runs.clone();
    let count = move || _ = counted.fetch_add(1, Ordering::SeqCst);
    sim.cuda().cu_launch_host_func(stream.handle(), count).expect("function");
    let graph = stream.end_capture().expect("capture");
    assert_eq!(sim.cuda().cu_graph_get_nodes(graph.graph()), Ok(5));
    sim.run_until_idle();
    assert_eq!((buffer.read(), runs.load(Ordering::SeqCst)), (vec![0xCD; BYTES], 0), "nothing was executed");

    let elsewhere = context.stream();
    for round in 1..4 {
        graph.launch(if round == 2 { &elsewhere } else { &stream });
        source.bytes.fill(10 * round);
        sim.run_until_idle();
        assert_eq!(copy.read(), vec![10 * round; BYTES], "read when it was executed");
        assert_eq!(target.bytes, copy.read());
        assert_eq!(buffer.read()[..BYTES / 2], [9; BYTES / 2]);
        assert_eq!(runs.load(Ordering::SeqCst), u32::from(round));
    }
}

#[test]
fn launches_of_one_executable_come_one_after_the_other() {
    let (sim, context) = device();
    let (one, other, buffer) = (context.stream(), context.stream(), context.alloc(BYTES));
    one.begin_capture(CaptureMode::Relaxed);
    sim.cuda().cu_memset_d8_async(buffer.address(), 1, BYTES, one.handle()).expect("fill");
    let graph = one.end_capture().expect("capture");
    one.hold();
    graph.launch(&one);
    graph.launch(&other);
    sim.run_until_idle();
    assert_ne!(buffer.read(), vec![1; BYTES], "the second waits for the first");
    one.release();
    sim.run_until_idle();
    assert_eq!(buffer.read(), vec![1; BYTES]);
}

#[test]
fn a_launch_in_a_capture_is_captured() {
    let (sim, context) = device();
    let (stream, buffer) = (context.stream(), context.alloc(BYTES));
    stream.begin_capture(CaptureMode::Relaxed);
    sim.cuda().cu_memset_d8_async(buffer.address(), 1, BYTES, stream.handle()).expect("fill");
    let inner = stream.end_capture().expect("capture");
    stream.begin_capture(CaptureMode::Relaxed);
    inner.launch(&stream);
    let outer = stream.end_capture().expect("capture");
    drop(inner);
    outer.launch(&stream);
    sim.run_until_idle();
    assert_eq!(buffer.read(), vec![1; BYTES]);
}

/// A graph's user object ends with the graph, its executables and the launches in flight, whichever is last.
#[test]
fn a_user_object_lives_as_long_as_graph_executable_and_launch() {
    let (sim, context) = device();
    let cuda = sim.cuda();
    let (stream, buffer) = (context.stream(), context.alloc(BYTES));
    let gone = Arc::new(AtomicU32::new(0));
    let is_gone = || gone.load(Ordering::SeqCst);
    let object = || {
        let (gone, cuda) = (gone.clone(), cuda.clone());
        let tell = move || {
            assert_eq!(cuda.cu_ctx_get_device(), Err(800), "no driver call is permitted here");
            gone.fetch_add(1, Ordering::SeqCst);
        };
        sim.cuda().cu_user_object_create(tell, 1, NO_SYNC).expect("object")
    };
    stream.begin_capture(CaptureMode::Global);
    let (state, id, graph) = cuda.cu_stream_get_capture_info(stream.handle()).expect("info");
    assert_eq!(state, 1);
    assert_ne!((id, graph), (0, 0));
    cuda.cu_graph_retain_user_object(graph, object(), 1, MOVE).expect("retain");
    assert_eq!(cuda.cu_graph_destroy(graph), Err(1), "it is still being captured");
    assert_eq!(cuda.cu_graph_instantiate_with_flags(graph, 0), Err(1));
    cuda.cu_memset_d8_async(buffer.address(), 1, BYTES, stream.handle()).expect("fill");
    assert_eq!(cuda.cu_stream_end_capture(stream.handle()), Ok(graph));
    let executable = cuda.cu_graph_instantiate_with_flags(graph, 0).expect("instantiate");
    cuda.cu_graph_destroy(graph).expect("destroy");
    assert_eq!((is_gone(), sim.user_objects()), (0, 1));
    cuda.cu_graph_upload(executable, stream.handle()).expect("upload");
    cuda.cu_graph_launch(executable, stream.handle()).expect("launch");
    cuda.cu_graph_exec_destroy(executable).expect("destroy");
    assert_eq!(is_gone(), 0, "a launch is in flight");
    sim.run_until_idle();
    assert_eq!((is_gone(), sim.user_objects()), (1, 0));
    assert_eq!(buffer.read(), vec![1; BYTES]);

    // A capture that is broken never becomes a graph.
    stream.begin_capture(CaptureMode::Global);
    let (_, second, graph) = cuda.cu_stream_get_capture_info(stream.handle()).expect("info");
    assert_ne!(id, second, "no two captures have one number");
    cuda.cu_graph_retain_user_object(graph, object(), 1, MOVE).expect("retain");
    assert_eq!(cuda.cu_stream_synchronize(stream.handle()), Err(900));
    assert_eq!(cuda.cu_stream_get_capture_info(stream.handle()), Ok((2, second, 0)));
    assert_eq!(is_gone(), 1);
    assert_eq!(cuda.cu_stream_end_capture(stream.handle()), Err(901));
    assert_eq!(is_gone(), 2);

    // Without MOVE the caller keeps its own reference, and gives it back itself.
    stream.begin_capture(CaptureMode::Global);
    let (_, _, graph) = cuda.cu_stream_get_capture_info(stream.handle()).expect("info");
    let shared = object();
    cuda.cu_graph_retain_user_object(graph, shared, 1, 0).expect("retain");
    cuda.cu_user_object_retain(shared, 1).expect("retain");
    cuda.cu_user_object_release(shared, 2).expect("release");
    sim.hold_user_objects(true);
    drop(stream.end_capture().expect("capture"));
    assert_eq!(is_gone(), 2, "the driver takes its time");
    sim.hold_user_objects(false);
    assert_eq!(is_gone(), 3);
    assert_eq!(cuda.cu_user_object_release(shared, 1), Err(400));
    assert_eq!(cuda.cu_user_object_create(|| (), 1, 0), Err(1));
    let without = Sim::builder().user_objects(false).build();
    let _context = without.context(0);
    assert_eq!(without.cuda().cu_user_object_create(|| (), 1, NO_SYNC), Err(801));
}

#[test]
fn a_stream_or_a_context_that_goes_away_ends_its_capture() {
    let (sim, context) = device();
    let gone = Arc::new(AtomicU32::new(0));
    for reset in [false, true] {
        let stream = context.stream();
        stream.begin_capture(CaptureMode::Global);
        let (_, _, graph) = sim.cuda().cu_stream_get_capture_info(stream.handle()).expect("info");
        let counted = gone.clone();
        let tell = move || _ = counted.fetch_add(1, Ordering::SeqCst);
        let object = sim.cuda().cu_user_object_create(tell, 1, NO_SYNC).expect("object");
        sim.cuda().cu_graph_retain_user_object(graph, object, 1, MOVE).expect("retain");
        if reset {
            sim.cuda().cu_device_primary_ctx_reset(0).expect("reset");
        }
        drop(stream);
        assert_eq!(gone.load(Ordering::SeqCst), 1 + u32::from(reset));
        if !reset {
            assert!(sim.cuda().cu_mem_alloc(64).is_ok(), "nothing captures any more");
        }
    }
}

/// A launch on a stream that captures is not made: what it would do becomes a part of the new graph. An upload there is
/// refused, as everything is that cannot be captured.
#[test]
fn a_graph_that_is_launched_into_a_capture_becomes_a_part_of_it() {
    let (sim, context) = device();
    let cuda = sim.cuda();
    let (stream, buffer) = (context.stream(), context.alloc(BYTES));
    stream.begin_capture(CaptureMode::Relaxed);
    cuda.cu_memset_d8_async(buffer.address(), 7, BYTES, stream.handle()).expect("fill");
    let graph = stream.end_capture().expect("graph");
    let inner = cuda.cu_graph_instantiate_with_flags(graph.graph(), 0).expect("instantiate");

    stream.begin_capture(CaptureMode::Relaxed);
    cuda.cu_graph_launch(inner, stream.handle()).expect("captured");
    sim.run_until_idle();
    assert_eq!(buffer.read(), vec![0xCD; BYTES], "nothing was executed");
    let graph = stream.end_capture().expect("graph");
    assert_eq!(cuda.cu_graph_get_nodes(graph.graph()), Ok(1));
    let outer = cuda.cu_graph_instantiate_with_flags(graph.graph(), 0).expect("instantiate");
    cuda.cu_graph_launch(outer, stream.handle()).expect("launch");
    sim.run_until_idle();
    assert_eq!(buffer.read(), vec![7; BYTES]);

    stream.begin_capture(CaptureMode::Relaxed);
    assert_eq!(cuda.cu_graph_upload(outer, stream.handle()), Err(900));
    assert_eq!(stream.end_capture().err(), Some(901));
    cuda.cu_graph_exec_destroy(inner).expect("destroy");
    cuda.cu_graph_exec_destroy(outer).expect("destroy");
}
