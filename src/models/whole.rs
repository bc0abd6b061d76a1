//! Models of a whole pool: its cleaner and its lanes are the real threads.

use super::device::{Device, Stream};
use super::{FOREVER, check, check_without};
use crate::buffer::PinnedBuffer;
use crate::driver::Driver;
use crate::home::Home;
use crate::pool::{PinnedPool, PoolBuilder};
use crate::sync::{Arc, AtomicBool, Instant, Ordering, thread};
use std::future::Future;
use std::task::{Context, Wake, Waker};
use std::time::Duration;

/// How their names end.
const LANES: [&str; 2] = ["-release", "-contexts"];

fn builder(driver: Driver) -> PoolBuilder {
    PinnedPool::builder().driver(driver).harvest_wait_limit(FOREVER).shutdown_timeout(FOREVER)
}

fn pool(driver: Driver) -> PinnedPool {
    builder(driver).build().expect("valid settings")
}

/// Takes a page-locked buffer and uses it on the device, which is done with it at its `finish`.
fn take_and_use(pool: &PinnedPool, device: &Device) -> PinnedBuffer {
    let mut buffer = pool.take_pinned(1).expect("the device pins");
    device.next_record_uses(buffer.as_ptr() as usize);
    buffer.record_last_use(&Stream).expect("the device records");
    buffer
}

/// Ends the pool for good, and checks that nothing is left.
fn end(pool: &PinnedPool) {
    let report = pool.shutdown();
    assert!(report.completed, "{report:?}");
    nothing_is_left(pool);
}

fn nothing_is_left(pool: &PinnedPool) {
    let stats = pool.stats();
    assert!(stats.is_balanced(), "{stats:?}");
    assert_eq!((stats.pooled_buffers, stats.queued_buffers, stats.retiring_bytes), (0, 0, 0), "{stats:?}");
    assert_eq!((stats.registered_bytes, stats.quarantined_bytes), (0, 0), "{stats:?}");
}

pub fn a_returned_buffer_is_there_for_the_next_take() {
    check(Some(2), || {
        let pool = pool(Driver::host_only());
        drop(pool.take(1));
        drop(pool.take(1));
        assert_eq!(pool.stats().misses, 1, "a take mapped fresh memory while its buffer was on its way");
        end(&pool);
    });
}

pub fn a_buffer_whose_work_is_done_is_there_for_the_next_take() {
    check(Some(1), || {
        let device = Device::new();
        let pool = pool(device.driver());
        drop(take_and_use(&pool, &device));
        device.finish();
        drop(take_and_use(&pool, &device));
        assert_eq!(pool.stats().misses, 1, "a take mapped fresh memory while its buffer was on its way");
        device.finish();
        end(&pool);
        assert_eq!(device.registered_bytes(), 0);
    });
}

pub fn no_buffer_is_given_out_while_the_device_uses_it() {
    check(Some(1), || {
        let device = Device::new();
        let pool = pool(device.driver());
        drop(take_and_use(&pool, &device));
        let finisher = {
            let device = device.clone();
            thread::spawn(move || device.finish())
        };
        // Each hands out or zeroes, which the device checks against what it uses.
        drop(take_and_use(&pool, &device));
        let buffer = take_and_use(&pool, &device);
        finisher.join().unwrap();
        drop(buffer);
        device.finish();
        end(&pool);
    });
}

pub fn a_drop_during_a_shutdown_is_dealt_with() {
    check_without(&LANES, Some(1), || {
        let pool = pool(Driver::host_only());
        drop(pool.take(1));
        let buffer = pool.take(2);
        // Now, for whoever takes another one for it rings once more when that is dropped.
        let home = buffer.home().clone();
        let other = thread::spawn(move || drop(buffer));
        assert!(pool.shutdown().completed);
        other.join().unwrap();
        // Whether a thread was still there for it or a new one was started; nobody rings again.
        assert!(home.progress.wait_until(None, || pool.stats().queued_buffers == 0));
        assert_eq!(pool.stats().quarantined_bytes, 0);
        end(&pool);
    });
}

pub fn two_shutdowns_at_once_are_both_obeyed() {
    check_without(&LANES, Some(1), || {
        let pool = pool(Driver::host_only());
        drop(pool.take(1));
        let other = {
            let pool = pool.clone();
            thread::spawn(move || assert!(pool.shutdown().completed))
        };
        assert!(pool.shutdown().completed);
        other.join().unwrap();
        nothing_is_left(&pool);
    });
}

fn wait_for_the_end(home: &Home) {
    let is_over = || home.bell.is_stopped() && home.stats().queued_buffers == 0;
    assert!(home.progress.wait_until(None, is_over));
}

pub fn a_closed_pool_keeps_nothing_and_ends_its_threads() {
    check_without(&LANES, Some(1), || {
        let pool = pool(Driver::host_only());
        let (kept, dropped) = (pool.take(1), pool.take(1));
        let home = kept.home().clone();
        drop(dropped);
        let other = thread::spawn(move || drop(kept));
        drop(pool); // the last handle
        other.join().unwrap();
        wait_for_the_end(&home);
        let stats = home.stats();
        assert_eq!((stats.pooled_buffers, stats.quarantined_bytes), (0, 0), "{stats:?}");
    });
}

pub fn a_drain_waits_for_everything_returned_before_it() {
    check(Some(1), || {
        let pool = pool(Driver::host_only());
        let (mine, others) = (pool.take(1), pool.take(2));
        let other = thread::spawn(move || drop(others));
        drop(mine);
        assert!(pool.drain(FOREVER));
        let queued = |class: usize| pool.stats().classes.get(class).map_or(0, |class| class.queued_buffers);
        assert_eq!(queued(0), 0, "returned before the drain and not dealt with");
        other.join().unwrap();
        assert!(pool.drain(FOREVER));
        assert_eq!(queued(1), 0, "returned before the drain and not dealt with");
        end(&pool);
    });
}

pub fn what_a_caller_evicts_is_unregistered_and_freed() {
    check_without(&LANES, Some(1), || {
        let device = Device::new();
        let pool = pool(device.driver());
        assert_eq!(pool.prewarm(1, 1).expect("the device pins"), 1);
        let home = pool.take(2).home().clone();
        // The cleaner may be anywhere, parked too.
        pool.set_max_pooled_bytes(0);
        let retired = || pool.stats().retiring_bytes == 0;
        assert!(home.progress.wait_until(None, retired));
        end(&pool);
        assert_eq!(device.registered_bytes(), 0);
    });
}

/// A task's waker: a flag and the thread that looks at it.
struct Task {
    is_woken: AtomicBool,
    thread: thread::Thread,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        // Not a store, which loom does not order against the other side's `swap`.
        self.is_woken.swap(true, Ordering::SeqCst);
        self.thread.unpark();
    }
}

impl Task {
    fn of_this_thread() -> Arc<Self> {
        Arc::new(Self { is_woken: AtomicBool::new(false), thread: thread::current() })
    }

    fn sleep(&self) {
        while !self.is_woken.swap(false, Ordering::SeqCst) {
            thread::park();
        }
    }
}

pub fn a_waiting_task_is_always_woken() {
    check(Some(1), || {
        let pool = pool(Driver::host_only());
        let home = pool.take(1).home().clone(); // the drop starts the cleaner
        let task = Task::of_this_thread();
        let waker = Waker::from(task.clone());
        for _ in 0..2 {
            home.wake_at(1, Instant::now() + Duration::from_micros(20), &waker);
            task.sleep();
        }
        end(&pool);
    });
}

pub fn a_waiting_task_is_woken_in_spite_of_a_shutdown() {
    check_without(&LANES, Some(1), || {
        let pool = pool(Driver::host_only());
        let home = pool.take(1).home().clone();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || assert!(pool.shutdown().completed))
        };
        let task = Task::of_this_thread();
        home.wake_at(1, Instant::now() + Duration::from_micros(20), &Waker::from(task.clone()));
        task.sleep();
        other.join().unwrap();
        end(&pool);
    });
}

pub fn a_waiting_task_is_woken_where_no_thread_can_be_started() {
    check_without(&["-cleaner"], None, || {
        let pool = pool(Driver::host_only());
        let task = Task::of_this_thread();
        let home = pool.take(1).home().clone();
        home.wake_at(1, Instant::now() + Duration::from_micros(20), &Waker::from(task.clone()));
        task.sleep();
        std::mem::forget(pool); // Its shutdown would wait for a thread.
    });
}

pub fn a_held_cleaner_does_nothing_and_goes_on_afterwards() {
    check(Some(2), || {
        let pool = pool(Driver::host_only());
        drop(pool.take(1));
        let home = pool.take(2).home().clone();
        home.hold_cleaner();
        let before = pool.stats();
        thread::yield_now();
        assert_eq!(pool.stats(), before, "the cleaner works while it is held");
        home.release_cleaner();
        assert!(pool.drain(FOREVER));
        end(&pool);
    });
}

pub fn the_outcome_of_a_slow_wait_reaches_its_task() {
    check(Some(2), || {
        let device = Device::new();
        let pool = pool(device.driver());
        let buffer = pool.take_pinned(1).expect("the device pins");
        // Only a context-wide wait can answer for it, which a thread of its own makes.
        buffer.note_device_read(&Stream);
        let task = Task::of_this_thread();
        let waker = Waker::from(task.clone());
        let mut done = Box::pin(buffer.done());
        while done.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            task.sleep();
        }
        drop(done);
        std::mem::forget((buffer, pool)); // So that no cleaner is part of it.
    });
}
