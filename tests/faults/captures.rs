//! A buffer that a graph reads, and a context that ends.
#![allow(unsafe_code)] // Copies by address.

use crate::device;
use crate::stage::{LEN, Stage};
use pinpool::Error;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: u32 = 2;

/// As long as the graph is there, nobody gets the memory; held, or leaked and counted.
pub fn captured(stage: &Stage) {
    let (stream, cuda) = (stage.context.stream(), stage.device.cuda());
    let Some(mut buffer) = stage.warm(LEN) else { return };
    buffer.fill(5);
    let memory = stage.context.alloc(LEN);
    // As the application would, which has nothing to do with the fault; where it strikes here, nothing is captured.
    let has_begun = cuda.cu_stream_begin_capture(stream.handle(), RELAXED).is_ok();
    // SAFETY: the graph is never launched.
    let copied =
        unsafe { cuda.cu_memcpy_htod_async(memory.address(), buffer.as_ptr(), LEN, stream.handle()) };
    let told = device::record(&mut buffer, &stream);
    let graph = cuda.cu_stream_end_capture(stream.handle());
    let (is_captured, address) = (has_begun && copied.is_ok() && graph.is_ok(), buffer.as_ptr());
    assert!(!is_captured || told.is_err(), "no event stands for a replay");
    if let Err(error) = &told
        && *error != Error::Capturing
    {
        stage.explain(error);
    }
    drop(buffer);
    stage.settle();
    for _ in 0..2 {
        let taken = stage.take(LEN);
        let is_other = taken.is_none_or(|taken| taken.as_ptr() != address);
        assert!(is_other || !is_captured || told != Err(Error::Capturing), "a graph reads it yet");
        stage.settle();
    }
    let stream = stream.handle();
    let destroyed = graph.and_then(|graph| cuda.cu_graph_destroy(graph));
    if destroyed.is_err() {
        stage.at_the_end_of_faults(move |device| {
            let graph = graph.or_else(|_| device.cuda().cu_stream_end_capture(stream));
            // There is none where the capture never began.
            let _ = graph.and_then(|graph| device.cuda().cu_graph_destroy(graph));
        });
    }
    stage.settle();
}

/// The context that the buffer was used in last is destroyed before the pool has looked.
pub fn ended_context(stage: &Stage) {
    let cuda = stage.device.cuda();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    buffer.fill(9);
    let Ok(context) = cuda.cu_ctx_create(0, 0) else { return };
    let cleaner = stage.pool.hold_cleaner();
    drop(buffer);
    let has_ended = cuda.cu_ctx_destroy(context).is_ok();
    stage.context.bind();
    drop(cleaner);
    stage.settle();
    drop(stage.take(LEN));
    stage.settle();
    if !has_ended {
        let _ = cuda.cu_ctx_destroy(context);
    }
}
