//! What a fork costs the parent, whose page tables are copied: with page-locked buffers, which are hidden from children
//! (`MADV_DONTFORK`), and with as many that are not.
//!
//! The simulated device pins nothing in the kernel. On a real one the difference is greater by far: the kernel copies
//! pinned pages themselves at a fork, 1.6 s for 1 GiB.
#![allow(unsafe_code)] // forks

use crate::table::{Bar, Effort, Suite, Unit};
use pinpool::sim::Sim;
use pinpool::{Driver, PinnedPool};
use std::time::{Duration, Instant};

/// Small enough for pages of 4 KiB, of which a fork copies every entry.
const MIB_1: usize = 1 << 20;
const SHOWN: &str = "not page-locked";

#[allow(non_camel_case_types)]
type pid_t = i32;

unsafe extern "C" {
    fn fork() -> pid_t;
    fn _exit(status: i32) -> !;
    fn waitpid(pid: pid_t, status: *mut i32, options: i32) -> pid_t;
}

pub fn add(suite: &mut Suite) {
    let effort = suite.effort;
    let count = effort.pick(1024, 64, 2);
    // Two turns: making and ending processes with so much memory takes longer than all that is measured.
    suite.add_turns(
        &format!("a fork with {count} MiB page-locked, time in the parent"),
        Unit::Nanoseconds,
        &[Bar::Of(SHOWN, 1.0)],
        effort.pick(2, 1, 1),
        vec![
            ("pinpool", Box::new(move || forks(effort, count, true))),
            (SHOWN, Box::new(move || forks(effort, count, false))),
        ],
    );
}

/// With so many buffers of 1 MiB, all of whose pages were touched.
fn forks(effort: Effort, count: usize, page_locked: bool) -> Vec<f64> {
    let sim = Sim::zero_cost();
    let _context = sim.context(0);
    let driver = if page_locked { sim.driver() } else { Driver::host_only() };
    let pool = PinnedPool::builder().driver(driver).build().expect("the settings are right");
    if page_locked {
        assert_eq!(pool.prewarm(MIB_1, count), Ok(count));
    }
    let mut buffers: Vec<_> = (0..count).map(|_| pool.take(MIB_1)).collect();
    assert!(buffers.iter().all(|buffer| buffer.is_pinned() == page_locked));
    buffers.iter_mut().for_each(|buffer| buffer.fill(1));
    let times = (0..effort.pick(3, 2, 1)).map(|_| time_of_a_fork().as_nanos() as f64).collect();
    drop(buffers);
    pool.shutdown();
    times
}

fn time_of_a_fork() -> Duration {
    let start = Instant::now();
    // SAFETY: the child makes one call, which is allowed after a fork of several threads.
    let child = unsafe { fork() };
    if child == 0 {
        // SAFETY: ends the process at once, and runs nothing of it.
        unsafe { _exit(0) };
    }
    let time = start.elapsed();
    assert!(child > 0, "the system refuses to fork");
    // SAFETY: the child is ours, and nobody wants its status.
    unsafe { waitpid(child, std::ptr::null_mut(), 0) };
    time
}
