//! Forked children and the end of a process: nothing crashes, nothing hangs, nothing calls the driver.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // fork and waitpid.

mod child;
mod common;

use child::{in_child, is_child};
use common::{KIB, MIB, PATIENCE, Rig};
use pinpool::PinnedPool;
use pinpool::sim::Sim;
use std::time::{Duration, Instant};

const LEN: usize = 64 * KIB;

/// Runs `body` in a forked child; its exit status, or a panic when it does not end.
fn forked(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child only runs `body` and leaves by `_exit`; it is what is tested.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(101);
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(code) };
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut status = 0;
        // SAFETY: waits for the child made above.
        let ended = unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) };
        if ended == pid {
            return if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -libc::WTERMSIG(status) };
        }
        if Instant::now() > deadline {
            // SAFETY: the child made above.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            panic!("the child hangs");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_child_takes_drops_and_governs_without_a_driver_call_or_a_thread() {
    assert!(in_child("the_child_of_a_process_with_a_pool", &[]).contains("1 passed"));
}

/// Alone in its process, so that no other test's thread holds a lock at the fork.
#[test]
#[ignore = "run in a child by the test above"]
fn the_child_of_a_process_with_a_pool() {
    if !is_child() {
        return;
    }
    let rig = Rig::new();
    // Page-locked on this thread: there is no cleaner yet, so a child could start one.
    assert_eq!(rig.pool.prewarm(LEN, 4).unwrap(), 4);
    let status = forked(|| govern_in_child(&rig.pool, &rig.sim));
    assert_eq!(status, 0);
    let mut out = rig.pinned(LEN);
    out.fill(1);
    let status = forked(|| {
        let status = govern_in_child(&rig.pool, &rig.sim);
        drop(out);
        status
    });
    assert_eq!(status, 0);
    rig.drain();
}

fn govern_in_child(pool: &PinnedPool, sim: &Sim) -> i32 {
    let calls = sim.total_calls();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let mut buffer = pool.take(LEN);
    if buffer.is_pinned() {
        return 2;
    }
    buffer.fill(7);
    drop(buffer);
    drop(pool.try_take(MIB));
    drop(pool.take_exact(5));
    if pool.take_pinned(LEN).is_ok() || pool.prewarm(LEN, 1).is_ok() {
        return 3;
    }
    pool.trim_to(0);
    pool.set_max_pooled_bytes(0);
    pool.clear();
    let _ = pool.drain(Duration::from_millis(1));
    drop(pool.shutdown());
    let _ = pool.stats();
    drop(pool.clone());
    std::thread::sleep(Duration::from_millis(20));
    if threads() != 1 {
        return 4;
    }
    if sim.total_calls() != calls {
        return 5;
    }
    0
}

#[test]
fn a_child_that_takes_and_drops_does_not_grow() {
    in_child("a_child_that_takes_and_drops_again_and_again", &[]);
}

#[test]
#[ignore = "run in a child by the test above"]
fn a_child_that_takes_and_drops_again_and_again() {
    if !is_child() {
        return;
    }
    let rig = Rig::new();
    rig.shelve(LEN, 1);
    let status = forked(|| {
        for _ in 0..512 {
            rig.pool.take(MIB).fill(1);
        }
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        let kib: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        i32::from(kib > 256 << 10)
    });
    assert_eq!(status, 0, "a child leaks what it takes");
    rig.finish();
}

#[test]
fn a_process_may_end_with_buffers_out_and_pools_in_statics() {
    in_child("a_process_that_ends_with_buffers_out", &[]);
}

#[test]
#[ignore = "run in a child by the test above"]
fn a_process_that_ends_with_buffers_out() {
    if !is_child() {
        return;
    }
    static POOL: std::sync::OnceLock<PinnedPool> = std::sync::OnceLock::new();
    thread_local!(static KEPT: std::cell::RefCell<Vec<pinpool::PinnedBuffer>> = const { std::cell::RefCell::new(Vec::new()) });
    let sim = Sim::real_time();
    let context = sim.context(0);
    let pool = POOL.get_or_init(|| PinnedPool::builder().driver(sim.driver()).build().unwrap());
    for _ in 0..8 {
        drop(pool.take(LEN));
    }
    let stream = context.stream();
    let mut buffer = pool.take(LEN);
    buffer.record_last_use(&stream).unwrap();
    // Dropped by this thread's end, after the test; others are still out, and one is dropped while it ends.
    KEPT.with(|kept| kept.borrow_mut().push(buffer));
    std::mem::forget(pool.take(LEN));
    drop(pool.take(MIB));
    KEPT.with(|kept| kept.borrow_mut().push(pinpool::take(LEN)));
    std::mem::forget((sim, context, stream));
}

/// The value that cannot be read is reported while the process-wide pool is made.
#[test]
fn a_subscriber_may_use_the_process_wide_pool_while_it_is_made() {
    in_child("a_subscriber_that_takes", &[("PINPOOL_MAX_POOLED_BYTES", "nonsense".as_ref())]);
}

#[test]
#[ignore = "run in a child by the test above"]
fn a_subscriber_that_takes() {
    if !is_child() {
        return;
    }
    struct Taking;
    impl tracing::Subscriber for Taking {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            thread_local!(static INSIDE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });
            if !INSIDE.replace(true) {
                drop(pinpool::take(LEN));
                INSIDE.set(false);
            }
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        tracing::subscriber::with_default(Taking, || drop(pinpool::take(LEN)));
        done.send(()).unwrap();
    });
    finished.recv_timeout(PATIENCE / 4).expect("the pool waits for itself");
}
