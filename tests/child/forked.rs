//! A forked child that runs a closure.
#![allow(unsafe_code)] // fork, waitpid, kill and _exit.

use std::time::{Duration, Instant};

/// Long enough that only a deadlock reaches it.
const PATIENCE: Duration = Duration::from_secs(20);

/// What [`forked`] gives for a child that does not end.
pub const HANGS: i32 = 200;

/// Runs `body` in a forked child, which ends by `_exit` without running the parent's destructors; its exit status, 101
/// after a panic, 128 and the number of a signal, or [`HANGS`].
pub fn forked(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs `body` and leaves by `_exit`; it is what is tested. The C library's allocator is usable in it.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork failed");
    if child == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(101);
        // SAFETY: ends the child.
        unsafe { libc::_exit(code) };
    }
    // What the child drops, the parent keeps.
    std::mem::forget(body);
    wait_for(child)
}

fn wait_for(child: libc::pid_t) -> i32 {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut status = 0;
        // SAFETY: waits for a child of this process.
        if unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == child {
            let exited = libc::WIFEXITED(status);
            return if exited { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
        }
        if Instant::now() > deadline {
            // SAFETY: a child of this process, not yet waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            println!("the child hangs");
            return HANGS;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
