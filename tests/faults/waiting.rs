//! What callers do with a guard besides dropping it: wait, ask, write, await, promise, copy to the host.
#![allow(unsafe_code)] // `assume_quiescent` is a promise.

use crate::checks::is_promised;
use crate::stage::{LEN, Stage};
use pinpool::PinnedBuffer;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::thread::{self, Thread};

pub fn download(stage: &Stage) {
    let stream = stage.context.stream();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    let expected = stage.download(&mut buffer, &stream);
    let recorded = stage.record(&mut buffer, &stream);
    stage.device.run_until_idle();
    if recorded
        && !stage.may_stick()
        && let Some(expected) = expected
    {
        match buffer.wait() {
            Ok(()) => assert!(*buffer == *expected, "other bytes than the device had"),
            Err(error) => stage.explain(&error),
        }
    }
    drop(buffer);
    stage.settle();
}

pub fn waits(stage: &Stage) {
    let stream = stage.context.stream();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    for seed in 1..3 {
        if !write(stage, &mut buffer, seed) {
            break;
        }
        stage.upload_as_it_is(&buffer, &stream);
        stage.record(&mut buffer, &stream);
        match buffer.is_quiescent() {
            Ok(quiescent) => {
                assert!(!quiescent || stage.device.pending_operations() == 0, "pending work is done?")
            }
            Err(error) => stage.explain(&error),
        }
        stage.device.run_until_idle();
        if stage.may_stick() {
            break;
        }
        if let Err(error) = buffer.wait() {
            stage.explain(&error);
        }
    }
    stage.device.run_until_idle();
    drop(buffer);
    stage.settle();
}

pub fn write_after_record(stage: &Stage) {
    let stream = stage.context.stream();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    stage.upload(&mut buffer, &stream, 1);
    stage.record(&mut buffer, &stream);
    stage.device.run_until_idle();
    // It waits, for the event or for the context; or it panics, and the device keeps what it had.
    if !stage.may_stick() && write(stage, &mut buffer, 2) {
        stage.upload_as_it_is(&buffer, &stream);
        stage.record(&mut buffer, &stream);
    }
    stage.device.run_until_idle();
    drop(buffer);
    stage.settle();
}

/// A write that panics only as promised: when the driver cannot say whether the device has read.
fn write(stage: &Stage, buffer: &mut PinnedBuffer, seed: u8) -> bool {
    match catch_unwind(AssertUnwindSafe(|| buffer.fill(seed))) {
        Ok(()) => true,
        Err(panic) => {
            let text = panic.downcast::<String>().expect("a text");
            assert!(is_promised(&text) && stage.point.is_some(), "{text}");
            false
        }
    }
}

pub fn awaits(stage: &Stage) {
    let stream = stage.context.stream();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    stage.upload(&mut buffer, &stream, 1);
    stage.record(&mut buffer, &stream);
    if !stage.may_stick()
        && let Err(error) = block_on(stage, buffer.done())
    {
        stage.explain(&error);
    }
    stage.device.run_until_idle();
    drop(buffer);
    stage.settle();
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future here; sleeps without a timer after the first look, so that a lost wake-up is a hang.
fn block_on<F: Future>(stage: &Stage, future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Arc::new(Unpark(thread::current())).into();
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => stage.device.run_until_idle(),
        }
        thread::park();
    }
}

pub fn assumed(stage: &Stage) {
    let stream = stage.context.stream();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    stage.upload(&mut buffer, &stream, 1);
    stage.record(&mut buffer, &stream);
    stage.device.run_until_idle();
    // SAFETY: the device has just done everything.
    unsafe { buffer.assume_quiescent() };
    drop(buffer);
    stage.settle();
}
