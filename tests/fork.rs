//! A forked child has no cleaner and no usable driver: its takes give plain memory, its drops free it, and the
//! parent's buffers are none of its business.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // fork, waitpid and _exit.

mod common;

use common::{KIB, MIB, Rig, all_zero};

/// Runs `child` in a forked child and gives its exit code; a signal is 128 and its number.
fn in_forked_child(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls only what is under test and `_exit`; the allocator of this platform may be used
    // after a fork.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(99);
        // SAFETY: ends the child without running destructors that belong to the parent.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: waits for the child that was just made.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) }
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn a_child_takes_fills_and_drops_plain_memory_and_leaks_none_of_it() {
    let rig = Rig::new();
    rig.shelve(MIB, 2);
    let code = in_forked_child(|| {
        let mut before = 0;
        for round in 0..200 {
            let mut buffer = rig.pool.take(MIB);
            if buffer.is_pinned() || !all_zero(&buffer) {
                return 1;
            }
            buffer.fill(1);
            drop(buffer);
            if round == 10 {
                before = resident_bytes();
            }
        }
        if resident_bytes() > before + 16 * MIB { 2 } else { 0 }
    });
    assert_eq!(code, 0);
    assert!(rig.pool.take(MIB).is_pinned(), "the parent's shelf is as it was");
    rig.drain();
    rig.finish();
}

#[test]
fn a_child_may_drop_the_parents_guards_and_the_pool() {
    let rig = Rig::new();
    let mut pinned = rig.pinned(64 * KIB);
    let mut pageable = rig.pool.take(MIB);
    pinned.fill(3);
    pageable.fill(4);
    let calls = rig.sim.total_calls();
    let (pool, mut guards) = (rig.pool.clone(), Some((pinned, pageable)));
    let code = in_forked_child(|| {
        drop(guards.take());
        let report = pool.shutdown();
        pool.clear();
        let drained = pool.drain(common::PATIENCE);
        let refused = pool.take_pinned(1).is_err() && pool.prewarm(1, 1).is_err();
        drop(pool.clone());
        i32::from(drained || report.completed || !refused || rig.sim.total_calls() != calls)
    });
    assert_eq!(code, 0, "the child called the driver, or did not come back");
    let (pinned, pageable) = guards.unwrap();
    assert!(pinned.iter().all(|byte| *byte == 3) && pageable.iter().all(|byte| *byte == 4));
    drop((pinned, pageable, pool));
    rig.finish();
}
