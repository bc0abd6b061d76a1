//! Stream capture and graphs on the simulated device: each row of the capture table of
//! `cuda-semantics.md` section 4 is a test, named after the row.

mod sim_common;

use pinpool::sim::{CaptureMode, Cuda, Sim, SimContext, SimStream};
use sim_common::{BYTES, NO_TIMING, NOT_READY, Pinned, device, upload};
use std::sync::Arc;

const MODES: [CaptureMode; 3] = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

/// What a thread's mode is; the default is global.
fn in_mode<R>(cuda: &Cuda, mode: CaptureMode, action: impl FnOnce() -> R) -> R {
    let before = cuda.cu_thread_exchange_stream_capture_mode(mode as u32).expect("mode");
    let result = action();
    cuda.cu_thread_exchange_stream_capture_mode(before).expect("mode");
    result
}

/// The status by `cuStreamIsCapturing`: 0 none, 1 active, 2 invalidated.
fn status(sim: &Sim, stream: &SimStream) -> u32 {
    sim.cuda().cu_stream_is_capturing(stream.handle()).expect("status")
}

/// On a thread of its own, with the context current there.
fn elsewhere<R: Send>(context: &SimContext, action: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            context.bind();
            action()
        });
        thread.join().expect("the other thread")
    })
}

/// Makes a call; gives its code.
type CallIt = Box<dyn Fn() -> u32 + Send + Sync>;

/// Every call that section 4 lists as unsafe, by name, on handles that are not captured.
fn unsafe_calls(sim: &Sim, context: &SimContext) -> Vec<(&'static str, CallIt)> {
    let code = |result: Result<(), u32>| result.err().unwrap_or(0);
    let idle = context.stream();
    let event = sim.cuda().cu_event_create(NO_TIMING).expect("event");
    let cuda = sim.cuda();
    macro_rules! call {
        ($name:literal, |$cuda:ident| $body:expr) => {{
            let $cuda = cuda.clone();
            ($name, Box::new(move || code($body)) as CallIt)
        }};
    }
    let idle = Arc::new(idle);
    let (query, synchronize) = (idle.clone(), idle);
    vec![
        call!("cuMemAlloc", |cuda| cuda.cu_mem_alloc(64).map(drop)),
        call!("cuMemFree", |cuda| cuda.cu_mem_free(1).or_else(|code| if code == 1 {
            Ok(())
        } else {
            Err(code)
        })),
        call!("cuMemHostAlloc", |cuda| cuda.cu_mem_host_alloc(64, 0).map(drop)),
        call!("cuMemFreeHost", |cuda| {
            let freed = cuda.cu_mem_free_host(std::ptr::null_mut());
            freed.or_else(|code| if code == 1 { Ok(()) } else { Err(code) })
        }),
        call!("cuMemAllocManaged", |cuda| cuda.cu_mem_alloc_managed(64, 1).map(drop)),
        call!("cuMemHostRegister", |cuda| {
            let memory = Box::leak(Box::new([0u8; 64]));
            cuda.cu_mem_host_register(memory.as_mut_ptr(), 64, 1)
        }),
        call!("cuMemHostUnregister", |cuda| {
            let gone = cuda.cu_mem_host_unregister(std::ptr::dangling_mut());
            gone.or_else(|code| if code == 713 { Ok(()) } else { Err(code) })
        }),
        call!("cuEventQuery", |cuda| cuda.cu_event_query(event)),
        call!("cuEventSynchronize", |cuda| cuda.cu_event_synchronize(event)),
        call!("cuStreamQuery", |cuda| cuda.cu_stream_query(query.handle())),
        call!("cuStreamSynchronize", |cuda| cuda.cu_stream_synchronize(synchronize.handle())),
    ]
}

/// Section 4, first table: which mode of a thread meets which capture.
#[test]
fn an_unsafe_call_is_refused_by_the_modes_of_thread_and_capture() {
    let (sim, context) = device();
    let other_device = sim.cuda().clone();
    for capture_mode in MODES {
        for thread_mode in MODES {
            for own in [true, false] {
                let forbidden = match (thread_mode, own) {
                    (CaptureMode::Global, true) => capture_mode != CaptureMode::Relaxed,
                    (CaptureMode::Global, false) => capture_mode == CaptureMode::Global,
                    (CaptureMode::ThreadLocal, true) => capture_mode != CaptureMode::Relaxed,
                    (CaptureMode::ThreadLocal, false) | (CaptureMode::Relaxed, _) => false,
                };
                for (name, call) in unsafe_calls(&sim, &context) {
                    let stream = context.stream();
                    stream.begin_capture(capture_mode);
                    let make = || in_mode(&other_device, thread_mode, &call);
                    let code = if own { make() } else { elsewhere(&context, make) };
                    let what =
                        format!("{name} by a {thread_mode:?} thread, {capture_mode:?} capture, own: {own}");
                    assert_eq!(code, if forbidden { 900 } else { 0 }, "{what}");
                    assert_eq!(status(&sim, &stream), if forbidden { 2 } else { 1 }, "{what}");
                    assert_eq!(stream.end_capture().err(), forbidden.then_some(901), "{what}");
                    assert_eq!(status(&sim, &stream), 0, "only the end leaves the capture: {what}");
                }
            }
        }
    }
}

/// "On refusal every offended capture becomes INVALIDATED: following use of those streams 901, EndCapture 901".
#[test]
fn a_refusal_breaks_every_offended_capture_and_only_the_end_leaves_it() {
    let (sim, context) = device();
    let (mine, relaxed) = (context.stream(), context.stream());
    mine.begin_capture(CaptureMode::Global);
    relaxed.begin_capture(CaptureMode::Relaxed);
    let theirs = context.stream();
    elsewhere(&context, || {
        theirs.begin_capture(CaptureMode::Global);
        assert_eq!(sim.cuda().cu_mem_alloc(64), Err(900));
        assert_eq!(status(&sim, &theirs), 2);
        assert_eq!(theirs.end_capture().err(), Some(901));
    });
    assert_eq!([status(&sim, &mine), status(&sim, &theirs), status(&sim, &relaxed)], [2, 0, 1]);
    let event = sim.cuda().cu_event_create(NO_TIMING).expect("event");
    let buffer = context.alloc(BYTES);
    for _ in 0..2 {
        assert_eq!(sim.cuda().cu_event_record(event, mine.handle()), Err(901));
        assert_eq!(sim.cuda().cu_memset_d8_async(buffer.address(), 1, BYTES, mine.handle()), Err(901));
        assert_eq!(sim.cuda().cu_stream_synchronize(mine.handle()), Err(901));
    }
    assert_eq!(mine.end_capture().err(), Some(901));
    assert_eq!(sim.cuda().cu_memset_d8_async(buffer.address(), 1, BYTES, mine.handle()), Ok(()));
    assert!(relaxed.end_capture().is_ok());
}

/// "cuStreamSynchronize/Query of a capturing stream: always illegal, invalidates, even in RELAXED".
#[test]
fn a_capturing_stream_cannot_be_asked_or_waited_for_in_any_mode() {
    let (sim, context) = device();
    type Ask = fn(&Cuda, usize) -> Result<(), u32>;
    let questions: [Ask; 3] = [
        |cuda, stream| cuda.cu_stream_query(stream),
        |cuda, stream| cuda.cu_stream_synchronize(stream),
        // May be refused, says cudarc-notes.md: the number is asked for before.
        |cuda, stream| cuda.cu_stream_get_id(stream).map(drop),
    ];
    for ask in questions {
        let stream = context.stream();
        stream.begin_capture(CaptureMode::Relaxed);
        in_mode(sim.cuda(), CaptureMode::Relaxed, || assert_eq!(ask(sim.cuda(), stream.handle()), Err(900)));
        assert_eq!(stream.end_capture().err(), Some(901));
    }
}

/// "cuEventQuery/Synchronize on an event last recorded in a capturing stream: always 907, invalidates".
#[test]
fn a_captured_event_cannot_be_asked_not_even_after_the_end() {
    for survives in [true, false] {
        let sim = Sim::builder().captured_event_survives_end(survives).build();
        let context = sim.context(0);
        let event = sim.cuda().cu_event_create(NO_TIMING).expect("event");
        for synchronize in [true, false] {
            let stream = context.stream();
            let ask = || match synchronize {
                true => sim.cuda().cu_event_synchronize(event),
                false => sim.cuda().cu_event_query(event),
            };
            stream.begin_capture(CaptureMode::Relaxed);
            sim.cuda().cu_event_record(event, stream.handle()).expect("record");
            in_mode(sim.cuda(), CaptureMode::Relaxed, || assert_eq!(ask(), Err(907)));
            assert_eq!(stream.end_capture().err(), Some(901));

            stream.begin_capture(CaptureMode::Relaxed);
            sim.cuda().cu_event_record(event, stream.handle()).expect("record");
            assert!(stream.end_capture().is_ok());
            assert_eq!(ask(), if survives { Err(907) } else { Ok(()) });
            let outside = context.stream();
            let waited = sim.cuda().cu_stream_wait_event(outside.handle(), event, 0);
            assert_eq!(waited, if survives { Err(907) } else { Ok(()) });
            sim.cuda().cu_event_record(event, outside.handle()).expect("record");
            assert_eq!(sim.cuda().cu_event_query(event), NOT_READY, "recorded anew, it is an ordinary event");
            sim.run_until_idle();
            assert_eq!(sim.cuda().cu_event_query(event), Ok(()));
        }
    }
}

/// "use of the legacy NULL stream while a blocking stream captures: 906 (and sync memcpy likewise)";
/// "cuStreamIsCapturing(legacy) while a blocking stream captures: 906, capture not invalidated".
#[test]
fn the_legacy_stream_cannot_be_used_while_a_blocking_one_captures() {
    let (sim, context) = device();
    let buffer = context.alloc(BYTES);
    let bytes = [1; BYTES];
    let stream = context.blocking_stream();
    stream.begin_capture(CaptureMode::Relaxed);
    for legacy in [0, 1] {
        assert_eq!(sim.cuda().cu_stream_is_capturing(legacy), Err(906));
        assert_eq!(sim.cuda().cu_stream_get_capture_info(legacy), Err(906));
    }
    assert_eq!(status(&sim, &stream), 1, "the question breaks nothing");
    assert_eq!(sim_common::raw_upload_now(&sim, buffer.address(), &bytes), Err(906));
    assert_eq!(stream.end_capture().err(), Some(901));

    type Use = fn(&Cuda, usize, u64) -> Result<(), u32>;
    let uses: [Use; 4] = [
        |cuda, event, _| cuda.cu_event_record(event, 0),
        |cuda, event, _| cuda.cu_stream_wait_event(0, event, 0),
        |cuda, _, address| cuda.cu_memset_d8_async(address, 1, BYTES, 0),
        |cuda, _, _| cuda.cu_stream_synchronize(0),
    ];
    // The legacy stream of another context waits for none of them.
    let two = Sim::builder().devices(2).build();
    let (far, near) = (two.context(1), two.context(0));
    let blocking = near.blocking_stream();
    blocking.begin_capture(CaptureMode::Relaxed);
    far.bind();
    assert_eq!(two.cuda().cu_stream_is_capturing(0), Ok(0));
    near.bind();
    assert!(blocking.end_capture().is_ok());

    context.bind();
    let event = sim.cuda().cu_event_create(NO_TIMING).expect("event");
    for use_it in uses {
        let (blocking, not_blocking) = (context.blocking_stream(), context.stream());
        not_blocking.begin_capture(CaptureMode::Relaxed);
        assert_eq!(use_it(sim.cuda(), event, buffer.address()), Ok(()), "that one does not wait for it");
        blocking.begin_capture(CaptureMode::Relaxed);
        assert_eq!(use_it(sim.cuda(), event, buffer.address()), Err(906));
        assert_eq!(blocking.end_capture().err(), Some(901));
        assert!(not_blocking.end_capture().is_ok());
        sim.run_until_idle();
    }
}

/// "cuCtxSynchronize ... with a capturing stream in that context is 900 and invalidates, RELAXED included".
#[test]
fn a_wait_for_a_context_breaks_its_captures_in_every_mode() {
    for breaks in [true, false] {
        let sim = Sim::builder().devices(2).context_wait_breaks_captures(breaks).build();
        let (other, context) = (sim.context(1), sim.context(0));
        let (stream, far) = (context.stream(), other.stream());
        stream.begin_capture(CaptureMode::Relaxed);
        far.begin_capture(CaptureMode::Relaxed);
        let wait = || in_mode(sim.cuda(), CaptureMode::Relaxed, || sim.cuda().cu_ctx_synchronize());
        let waited = elsewhere(&context, wait);
        assert_eq!(waited, if breaks { Err(900) } else { Ok(()) });
        assert_eq!(stream.end_capture().err(), breaks.then_some(901));
        assert!(far.end_capture().is_ok(), "another context's");
    }

    // In a context without a capture it is unsafe as any other wait.
    let sim = Sim::builder().devices(2).build();
    let (other, context) = (sim.context(1), sim.context(0));
    for mode in MODES {
        let stream = context.stream();
        stream.begin_capture(mode);
        let waited = elsewhere(&other, || sim.cuda().cu_ctx_synchronize());
        let forbidden = mode == CaptureMode::Global;
        assert_eq!(waited, if forbidden { Err(900) } else { Ok(()) }, "{mode:?}");
        context.bind();
        assert_eq!(stream.end_capture().err(), forbidden.then_some(901), "{mode:?}");
    }
}

/// "cuEventCreate/Destroy, cuEventRecord on a non-capturing stream, cuStreamCreate, cuMemcpyAsync on a
/// non-capturing stream, cuThreadExchange, cuPointerGetAttribute, cuCtxSet/GetCurrent: not checked".
#[test]
fn what_cannot_synchronise_is_not_refused() {
    let (sim, context) = device();
    let mut page = Pinned::new(&sim, 1);
    let buffer = context.alloc(BYTES);
    let (capturing, outside) = (context.stream(), context.stream());
    capturing.begin_capture(CaptureMode::Global);
    let cuda = sim.cuda();
    let event = cuda.cu_event_create(NO_TIMING).expect("create");
    cuda.cu_event_record(event, outside.handle()).expect("record");
    cuda.cu_event_destroy(event).expect("destroy");
    let created = cuda.cu_stream_create(1).expect("stream");
    cuda.cu_stream_destroy(created).expect("destroy");
    upload(&outside, &page.bytes, &buffer);
    assert_eq!(cuda.cu_pointer_get_attribute(2, page.address() as u64), Ok(1));
    let current = cuda.cu_ctx_get_current().expect("current");
    cuda.cu_ctx_set_current(current).expect("set");
    assert_eq!(cuda.cu_stream_is_capturing(outside.handle()), Ok(0));
    assert!(capturing.end_capture().is_ok());
    sim.run_until_idle();
    assert_eq!(buffer.read(), page.bytes);
}

/// "BeginCapture on legacy stream / already capturing: 1".
#[test]
fn not_every_stream_can_begin_a_capture() {
    let (sim, context) = device();
    let stream = context.stream();
    let begin = |stream, mode| sim.cuda().cu_stream_begin_capture(stream, mode);
    assert_eq!([begin(0, 0), begin(1, 0), begin(stream.handle(), 3)], [Err(1); 3]);
    assert_eq!(sim.cuda().cu_stream_end_capture(stream.handle()), Err(1));
    stream.begin_capture(CaptureMode::Relaxed);
    assert_eq!(begin(stream.handle(), 0), Err(1));
    assert!(stream.end_capture().is_ok());
    assert_eq!(begin(2, 0), Ok(()), "the per-thread default stream can");
    let graph = sim.cuda().cu_stream_end_capture(2).expect("end");
    sim.cuda().cu_graph_destroy(graph).expect("destroy");
}

/// "EndCapture from another thread (non-RELAXED): 908; on a non-origin stream 903; fork not joined 904".
#[test]
fn a_capture_ends_where_it_began_with_everything_joined() {
    let (sim, context) = device();
    let buffer = context.alloc(BYTES);
    let (origin, fork) = (context.stream(), context.stream());
    let cuda = sim.cuda();
    let (there, back) = (cuda.cu_event_create(NO_TIMING).unwrap(), cuda.cu_event_create(NO_TIMING).unwrap());
    let begin_and_fork = || {
        origin.begin_capture(CaptureMode::ThreadLocal);
        cuda.cu_event_record(there, origin.handle()).expect("record");
        cuda.cu_stream_wait_event(fork.handle(), there, 0).expect("fork");
        cuda.cu_memset_d8_async(buffer.address(), 7, BYTES, fork.handle()).expect("fill");
        assert_eq!(status(&sim, &fork), 1, "it takes part");
    };
    begin_and_fork();
    assert_eq!(cuda.cu_stream_end_capture(fork.handle()), Err(903));
    assert_eq!(elsewhere(&context, || cuda.cu_stream_end_capture(origin.handle())), Err(908));
    assert_eq!(origin.end_capture().err(), Some(904));
    assert_eq!([status(&sim, &origin), status(&sim, &fork)], [0, 0], "ended, without a graph");

    begin_and_fork();
    cuda.cu_event_record(back, fork.handle()).expect("record");
    cuda.cu_stream_wait_event(origin.handle(), back, 0).expect("join");
    let graph = origin.end_capture().expect("joined");
    assert_eq!(cuda.cu_graph_get_nodes(graph.graph()), Ok(1));
    origin.begin_capture(CaptureMode::Relaxed);
    let ended = elsewhere(&context, || origin.end_capture());
    assert!(ended.is_ok(), "a relaxed one ends on any thread");
}

/// 905 and 902: a capture depends on nothing outside it, and two captures do not meet.
#[test]
fn captures_are_isolated() {
    let (sim, context) = device();
    let cuda = sim.cuda();
    let event = cuda.cu_event_create(NO_TIMING).expect("event");
    let (one, other) = (context.stream(), context.stream());
    one.begin_capture(CaptureMode::Relaxed);
    assert_eq!(
        cuda.cu_stream_wait_event(one.handle(), event, 0),
        Ok(()),
        "never recorded: nothing to wait for"
    );
    cuda.cu_event_record(event, other.handle()).expect("record");
    assert_eq!(cuda.cu_stream_wait_event(one.handle(), event, 0), Err(905));
    assert_eq!(one.end_capture().err(), Some(901));

    one.begin_capture(CaptureMode::Relaxed);
    other.begin_capture(CaptureMode::Relaxed);
    cuda.cu_event_record(event, one.handle()).expect("record");
    assert_eq!(cuda.cu_stream_wait_event(other.handle(), event, 0), Err(902));
    assert_eq!([one.end_capture().err(), other.end_capture().err()], [Some(901); 2]);

    // A broken capture takes nobody along any more.
    one.begin_capture(CaptureMode::Relaxed);
    cuda.cu_event_record(event, one.handle()).expect("record");
    assert_eq!(cuda.cu_stream_query(one.handle()), Err(900));
    assert_eq!(cuda.cu_stream_wait_event(other.handle(), event, 0), Err(901));
    assert_eq!([status(&sim, &one), status(&sim, &other)], [2, 0]);
    assert_eq!(one.end_capture().err(), Some(901));
}

/// What a capture frees is for its replays still.
#[test]
fn memory_that_a_capture_frees_can_be_used_until_its_graph_is_gone() {
    let (sim, context) = device();
    let cuda = sim.cuda();
    let stream = context.stream();
    let address = cuda.cu_mem_alloc_async(BYTES, stream.handle()).expect("memory");
    stream.begin_capture(CaptureMode::Relaxed);
    cuda.cu_mem_free_async(address, stream.handle()).expect("captured");
    assert!(stream.end_capture().is_ok());
    assert_eq!(cuda.cu_memset_d8_async(address, 1, BYTES, stream.handle()), Ok(()), "nothing was freed");
    sim.run_until_idle();
    cuda.cu_mem_free_async(address, stream.handle()).expect("freed");
    assert_eq!(cuda.cu_memset_d8_async(address, 1, BYTES, stream.handle()), Err(1));
    // On a stream whose capture is broken neither is possible.
    stream.begin_capture(CaptureMode::Relaxed);
    assert_eq!(cuda.cu_stream_query(stream.handle()), Err(900));
    assert_eq!(cuda.cu_mem_alloc_async(BYTES, stream.handle()), Err(901));
    assert_eq!(cuda.cu_mem_free_async(address, stream.handle()), Err(901));
    assert_eq!(stream.end_capture().err(), Some(901));
}

/// "None" is remembered for the thread that asked. Each of these makes another answer right, from any thread.
#[test]
fn a_quiet_stream_is_asked_again_after_whatever_may_have_changed_it() {
    let (sim, context) = device();
    let cuda = sim.cuda();
    let stream = context.stream();
    let asked = || cuda.cu_stream_is_capturing(stream.handle());
    let quiet = || assert_eq!([asked(), asked()], [Ok(0); 2]);
    quiet();
    elsewhere(&context, || stream.begin_capture(CaptureMode::Relaxed));
    assert_eq!(asked(), Ok(1), "a capture began on another thread");
    elsewhere(&context, || drop(stream.end_capture()));
    quiet();
    sim.pretend_capture(stream.handle(), true);
    assert_eq!(asked(), Ok(1), "it says that it captures");
    sim.pretend_capture(stream.handle(), false);
    quiet();

    // Joined to another stream's capture, by an event that was recorded there.
    let origin = context.stream();
    let event = cuda.cu_event_create(NO_TIMING).expect("event");
    origin.begin_capture(CaptureMode::Relaxed);
    quiet();
    cuda.cu_event_record(event, origin.handle()).expect("record");
    cuda.cu_stream_wait_event(stream.handle(), event, 0).expect("wait");
    assert_eq!(asked(), Ok(1), "it was forked to");
    cuda.cu_event_record(event, stream.handle()).expect("record");
    cuda.cu_stream_wait_event(origin.handle(), event, 0).expect("wait");
    drop(origin.end_capture().expect("joined"));
    quiet();

    let gone = context.stream();
    let handle = gone.handle();
    assert_eq!(cuda.cu_stream_is_capturing(handle), Ok(0));
    drop(gone);
    assert_eq!(cuda.cu_stream_is_capturing(handle), Err(400), "destroyed");
    quiet();
    context.break_with(700);
    assert_eq!(asked(), Err(700), "its context is broken");

    let (other, context) = device();
    let stream = context.stream();
    let cuda = other.cuda();
    assert_eq!(cuda.cu_stream_is_capturing(stream.handle()), Ok(0));
    cuda.cu_device_primary_ctx_reset(0).expect("reset");
    assert_ne!(cuda.cu_stream_is_capturing(stream.handle()), Ok(0), "its context ended");
}
