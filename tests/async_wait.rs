//! Waiting for a buffer in async code, on executors of a few lines: nothing of a runtime is needed, and no
//! wake-up is lost.
#![cfg(all(feature = "cudarc", target_os = "linux"))]

mod interop;

use interop::{LEN, Mode, Rig, pattern, until};
use pinpool::{Error, PinnedBuffer};
use std::future::{Future, IntoFuture};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

/// Wakes a thread, and counts how often.
struct Unpark(Thread, AtomicUsize);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.unpark();
    }
}

fn waker_of_this_thread() -> (Arc<Unpark>, Waker) {
    let unpark = Arc::new(Unpark(thread::current(), AtomicUsize::new(0)));
    (unpark.clone(), unpark.into())
}

/// Runs a future on this thread; sleeps without a timer in between, so that a lost wake-up is a hang.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let (_, waker) = waker_of_this_thread();
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// Runs several tasks on this thread, each with a waker of its own.
fn block_on_all<T>(mut tasks: Vec<Pin<Box<dyn Future<Output = T> + Send>>>) {
    while !tasks.is_empty() {
        let mut left = Vec::new();
        for mut task in tasks {
            let (_, waker) = waker_of_this_thread();
            if task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                left.push(task);
            }
        }
        tasks = left;
        if !tasks.is_empty() {
            thread::park();
        }
    }
}

fn assert_send<T: Send>(value: T) -> T {
    value
}

#[test]
fn a_download_is_awaited() {
    let rig = Rig::new(Mode::Tracked);
    let bytes = pattern(1, LEN);
    let device = rig.stream.clone_htod(&bytes).unwrap();
    rig.stream.synchronize().unwrap();
    let buffer = rig.filled(2 * LEN, &pattern(2, 2 * LEN));
    rig.hold();
    let pending = buffer.download(&rig.stream, &device).unwrap();
    assert!(!pending.is_done().unwrap());
    let buffer = rig.must_wait(|| block_on(assert_send(pending.into_future())).unwrap());
    assert!(buffer[..LEN] == bytes[..] && buffer[LEN..] == pattern(2, 2 * LEN)[LEN..]);
    assert!(buffer.is_quiescent().unwrap());
    block_on(buffer.done()).unwrap();
    drop(buffer);

    // The same without async, and with a buffer that is too short.
    let buffer = rig.filled(LEN, &pattern(2, LEN));
    rig.hold();
    let pending = buffer.download(&rig.stream, &device).unwrap();
    assert!(rig.must_wait(|| pending.wait().unwrap())[..] == bytes[..]);
    let (error, short) = rig.pool.take(LEN / 2).download(&rig.stream, &device).unwrap_err();
    assert_eq!((error, short.len()), (Error::Range { start: 0, end: LEN, len: LEN / 2 }, LEN / 2));
    drop(short);
    rig.finish();
}

#[test]
fn a_noted_use_is_awaited_without_blocking_the_task() {
    let rig = Rig::new(Mode::Untracked);
    let mut device = rig.device(LEN);
    let buffer = rig.filled(LEN, &pattern(1, LEN));
    rig.hold();
    rig.stream.memcpy_htod(&buffer, &mut device).unwrap();
    let mut wait = Box::pin(buffer.done());
    let (wakes, waker) = waker_of_this_thread();
    rig.fake.reset_calls();
    assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending(), "it would have blocked");
    until("the wait on another thread", || rig.fake.calls("cuCtxSynchronize") > 0);
    assert_eq!(wakes.1.load(Ordering::SeqCst), 0, "woken for nothing");
    rig.release();
    block_on(wait).unwrap();
    assert!(buffer.is_quiescent().unwrap(), "the note is settled");
    drop(buffer);
    rig.finish();
}

#[test]
fn several_tasks_wait_for_several_buffers_and_for_the_same_one() {
    let rig = Rig::new(Mode::Tracked);
    let mut device = rig.device(LEN);
    drop((0..3).map(|_| rig.pool.take(LEN)).collect::<Vec<_>>());
    rig.drain();
    let mut buffers: Vec<PinnedBuffer> = (0..3).map(|_| rig.pool.take(LEN)).collect();
    rig.hold();
    for buffer in &mut buffers {
        buffer.copy_to(.., &rig.stream, &mut device).unwrap();
        buffer.record_last_use(&rig.stream).unwrap();
    }
    let done = AtomicUsize::new(0);
    rig.must_wait(|| {
        thread::scope(|scope| {
            scope.spawn(|| {
                for buffer in &buffers {
                    block_on(buffer.done()).unwrap();
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
            for buffer in &buffers {
                scope.spawn(|| block_on(buffer.done()).unwrap());
            }
        });
    });
    assert_eq!(done.load(Ordering::SeqCst), 3);
    let device: &'static _ = Box::leak(Box::new(device));
    let pendings: Vec<_> = buffers
        .into_iter()
        .map(|buffer| {
            let pending = buffer.download(&rig.stream, device).unwrap();
            Box::pin(pending.into_future()) as Pin<Box<dyn Future<Output = _> + Send>>
        })
        .collect();
    rig.stepping(|| block_on_all(pendings));
    rig.finish();
}

#[test]
fn whoever_polled_last_is_woken_and_a_wait_may_be_given_up() {
    let rig = Rig::new(Mode::Tracked);
    let mut device = rig.device(LEN);
    let mut buffer = rig.filled(LEN, &pattern(1, LEN));
    rig.hold();
    buffer.copy_to(.., &rig.stream, &mut device).unwrap();
    let mut wait = Box::pin(buffer.done());
    let (first, waker) = waker_of_this_thread();
    assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    until("a wake-up to ask again", || first.1.load(Ordering::SeqCst) > 0);
    let woken = first.1.load(Ordering::SeqCst);
    // Moved to another task; the first one hears no more of it.
    let (second, waker) = waker_of_this_thread();
    assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    until("a wake-up of the second", || second.1.load(Ordering::SeqCst) > 0);
    assert_eq!(first.1.load(Ordering::SeqCst), woken);
    // Given up, as by a timeout, and even forgotten: the events are asked by nobody any more.
    std::mem::forget(buffer.done());
    drop(wait);
    std::mem::forget({
        let mut forgotten = Box::pin(buffer.done());
        assert!(forgotten.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        forgotten
    });
    drop(buffer);
    rig.release();
    rig.finish();
}

#[test]
fn a_shutdown_and_the_end_of_the_pool_leave_no_task_asleep() {
    let rig = Rig::new(Mode::Tracked);
    let mut device = rig.device(LEN);
    let mut buffer = rig.filled(LEN, &pattern(1, LEN));
    rig.hold();
    buffer.copy_to(.., &rig.stream, &mut device).unwrap();
    let Rig { pool, fake, stream, registered_before, .. } = rig;
    thread::scope(|scope| {
        fake.reset_calls();
        let task = scope.spawn(|| {
            block_on(buffer.done()).unwrap();
            buffer
        });
        until("the task's question", || fake.calls("cuEventQuery") > 2);
        for _ in 0..3 {
            assert!(pool.shutdown().completed, "a shutdown does not wait for a guard that is out");
            let asked = fake.calls("cuEventQuery");
            until("the task asks again", || fake.calls("cuEventQuery") > asked + 3);
        }
        drop(pool);
        let asked = fake.calls("cuEventQuery");
        until("the task asks again", || fake.calls("cuEventQuery") > asked + 3);
        fake.release(stream.cu_stream() as usize);
        fake.run_until_idle();
        drop(task.join().unwrap());
    });
    until("its memory is let go", || fake.registered_bytes() == registered_before);
    fake.assert_clean();
}

#[test]
fn an_event_that_cannot_be_asked_is_an_error_and_a_capture_too() {
    let rig = Rig::new(Mode::Tracked);
    let mut device = rig.device(LEN);
    let mut buffer = rig.filled(LEN, &pattern(1, LEN));
    rig.hold();
    buffer.copy_to(.., &rig.stream, &mut device).unwrap();
    rig.fake.fail("cuEventQuery", 0, 999);
    assert!(matches!(block_on(buffer.done()), Err(Error::Driver(call)) if call.code() == 999));
    rig.fake.clear_faults();
    rig.release();
    rig.fake.run_until_idle();
    block_on(buffer.done()).unwrap();
    drop(buffer);
    rig.drain();
    let buffer = rig.filled(LEN, &pattern(1, LEN));
    rig.fake.pretend_capture(rig.handle(), true);
    rig.stream.memcpy_htod(&buffer, &mut device).unwrap();
    rig.fake.pretend_capture(rig.handle(), false);
    assert_eq!(block_on(buffer.done()).unwrap_err(), Error::Capturing);
}
