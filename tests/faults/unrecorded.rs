//! Drops without a record, pageable drops, and harvests.
#![allow(unsafe_code)] // As in `stage.rs`.

use crate::device::of_the_application;
use crate::stage::{LEN, Stage};

pub fn unrecorded(stage: &Stage) {
    let stream = stage.context.stream();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    stage.upload(&mut buffer, &stream, 1);
    let cleaner = stage.pool.hold_cleaner();
    drop(buffer);
    drop(stage.take(LEN));
    drop(cleaner);
    stage.settle();
}

pub fn unrecorded_two_contexts(stage: &Stage) {
    let other = stage.other();
    let stream = other.stream();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    buffer.fill(9);
    other.bind();
    stage.upload_as_it_is(&buffer, &stream);
    // Nobody shows the second context to the pool: it has to be found.
    stage.context.bind();
    drop(buffer);
    drain_without_steps(stage);
    for _ in 0..2 {
        drop(stage.take(LEN));
    }
    stage.settle();
}

/// In a context that only the dropping thread has current.
pub fn unrecorded_own_context(stage: &Stage) {
    let cuda = stage.device.cuda();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    buffer.fill(9);
    // As the application would, which has nothing to do with the fault; where it strikes here, nothing is copied.
    let Ok(context) = cuda.cu_ctx_create(0, 0) else { return };
    let enqueued = cuda.cu_stream_create(1).and_then(|stream| {
        let device = cuda.cu_mem_alloc(LEN)?;
        // SAFETY: the pool keeps the memory valid and unchanged until the copy is done; the device checks it.
        unsafe { cuda.cu_memcpy_htod_async(device, buffer.as_ptr(), LEN, stream) }?;
        Ok(device)
    });
    drop(buffer);
    // The pool has to have asked about the context before it may hand the memory on.
    drain_without_steps(stage);
    for _ in 0..2 {
        if let Some(mut next) = stage.take(LEN) {
            next.fill(7);
        }
    }
    stage.settle();
    stage.device.run_until_idle();
    let is_a_lie = stage.point.is_some_and(|point| point.is_a_lie());
    if let Ok(device) = enqueued
        && !is_a_lie
    {
        let mut read = vec![0; LEN];
        // SAFETY: the vector has that many bytes.
        if unsafe { cuda.cu_memcpy_dtoh(read.as_mut_ptr(), device, LEN) }.is_ok() {
            assert!(read.iter().all(|byte| *byte == 9), "the device has other bytes than the buffer had");
        }
    }
    stage.restore(context);
}

pub fn unrecorded_bare_thread(stage: &Stage) {
    let stream = stage.context.stream();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    stage.upload(&mut buffer, &stream, 1);
    std::thread::scope(|scope| {
        of_the_application(|| scope.spawn(|| drop(buffer))).join().expect("a drop does not panic");
    });
    stage.settle();
}

pub fn pageable_drop(stage: &Stage) {
    let stream = stage.context.stream();
    let Some(mut buffer) = stage.take(LEN) else { return };
    stage.upload(&mut buffer, &stream, 1);
    drop(buffer);
    stage.settle();
    drop(stage.take(LEN));
    stage.settle();
}

pub fn pageable_recorded(stage: &Stage) {
    let stream = stage.context.stream();
    let Some(mut buffer) = stage.take(LEN) else { return };
    stage.upload(&mut buffer, &stream, 1);
    stage.record(&mut buffer, &stream);
    drop(buffer);
    stage.settle();
}

pub fn harvest(stage: &Stage) {
    let stream = stage.context.stream();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    stage.upload(&mut buffer, &stream, 1);
    stage.record(&mut buffer, &stream);
    let cleaner = stage.pool.hold_cleaner();
    drop(buffer);
    // Pending, and then done: the first take must have other memory, the second may have this one.
    drop(stage.take(LEN));
    stage.device.run_until_idle();
    let taken = stage.take(LEN);
    drop(cleaner);
    drop(taken);
    stage.settle();
}

pub fn harvest_of_several(stage: &Stage) {
    let streams = [stage.context.stream(), stage.context.stream(), stage.context.stream()];
    let buffers: Vec<_> = streams.iter().filter_map(|_| stage.take(LEN)).collect();
    drop(buffers);
    stage.settle();
    let mut buffers: Vec<_> = streams.iter().filter_map(|_| stage.take(LEN)).collect();
    for (buffer, stream) in buffers.iter_mut().zip(&streams) {
        stage.upload(buffer, stream, 1);
        stage.record(buffer, stream);
    }
    streams[0].hold();
    let cleaner = stage.pool.hold_cleaner();
    drop(buffers);
    stage.device.run_until_idle();
    let taken: Vec<_> = (0..3).filter_map(|_| stage.take(LEN)).collect();
    streams[0].release();
    stage.device.run_until_idle();
    drop(cleaner);
    drop(taken);
    stage.settle();
}

/// Lets the cleaner do what it can while the device does nothing by itself: a context-wide wait executes
/// what it waits for, and nothing else does.
fn drain_without_steps(stage: &Stage) {
    stage.pool.drain(if stage.may_stick() { crate::stage::STUCK } else { crate::stage::PATIENCE });
}
