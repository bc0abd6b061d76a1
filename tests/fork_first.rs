//! Forks while another thread makes the process-wide pool: what is made once has no lock that a child could find held.
#![cfg(target_os = "linux")]

mod child;

use child::forked::forked;
use child::{in_child, is_child};
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// How long after the other thread has begun, in microseconds.
const DELAY: &str = "PINPOOL_TEST_DELAY_US";

#[test]
fn a_fork_during_the_very_first_take_hangs_no_child() {
    for delay in 0..120 {
        let delay = delay.to_string();
        in_child("child_that_forks_at_once", &[(DELAY, delay.as_ref())]);
    }
}

#[test]
#[ignore = "run by a_fork_during_the_very_first_take_hangs_no_child"]
fn child_that_forks_at_once() {
    if !is_child() {
        return;
    }
    let delay = std::env::var(DELAY).ok().and_then(|delay| delay.parse().ok()).unwrap();
    let start = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            start.wait();
            drop(pinpool::take(1));
        });
        start.wait();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_micros(delay) {
            std::hint::spin_loop();
        }
        let status = forked(|| {
            let pool = pinpool::global();
            drop(pool.take(1));
            // One pool, and not one for each look.
            i32::from(!std::ptr::eq(pool, pinpool::global()) || pinpool::stats().misses == 0)
        });
        assert_eq!(status, 0, "{delay} us after the first take began");
    });
    assert_eq!(pinpool::stats().misses, 1, "the parent's is another");
}
