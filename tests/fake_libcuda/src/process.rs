//! What the real driver does when its process forks or ends: in a forked child every call answers 3, and from its
//! own exit handler on every call answers 4, or crashes.
//!
//! `FAKE_CUDA_AFTER_EXIT` says what a call is met with that comes after the driver has gone, or that is inside
//! when it goes: `fail` names it on the error stream and ends the process with status [`CALLED_AFTER_EXIT`] or
//! [`INSIDE_AT_EXIT`], `fail-late` does so only for the former, `crash` is a segmentation fault. `FAKE_CUDA_IN_CHILD=fail`
//! ends a forked child that calls with status [`CALLED_IN_CHILD`].

use std::ffi::c_int;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const DEINITIALIZED: u32 = 4;
const NOT_INITIALIZED: u32 = 3;

/// Exit status of a process that called the driver after it had gone.
pub const CALLED_AFTER_EXIT: i32 = 86;
/// Exit status of a process that was inside a driver call when the driver went.
pub const INSIDE_AT_EXIT: i32 = 87;
/// Exit status of a forked child that called the driver of its parent.
pub const CALLED_IN_CHILD: i32 = 88;

unsafe extern "C" {
    fn atexit(handler: extern "C" fn()) -> c_int;
    fn pthread_atfork(
        before: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> c_int;
    fn _exit(status: c_int) -> !;
}

static GONE: AtomicBool = AtomicBool::new(false);
static FORKED: AtomicBool = AtomicBool::new(false);
static INSIDE: AtomicUsize = AtomicUsize::new(0);

#[derive(Clone, Copy, PartialEq, Eq)]
enum AfterExit {
    Answer,
    Fail,
    FailLate,
    Crash,
}

static AFTER_EXIT: LazyLock<AfterExit> =
    LazyLock::new(|| match std::env::var("FAKE_CUDA_AFTER_EXIT").as_deref() {
        Ok("fail") => AfterExit::Fail,
        Ok("fail-late") => AfterExit::FailLate,
        Ok("crash") => AfterExit::Crash,
        _ => AfterExit::Answer,
    });

static CHILD_FAILS: LazyLock<bool> =
    LazyLock::new(|| std::env::var("FAKE_CUDA_IN_CHILD").is_ok_and(|value| value == "fail"));

/// A call is inside for as long as it lives.
pub(crate) struct Inside;

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Every driver function passes here first; the error is its answer.
pub(crate) fn enter(function: &str) -> Result<Inside, u32> {
    if FORKED.load(Ordering::SeqCst) {
        if *CHILD_FAILS {
            eprintln!("{function} was called in a forked child");
            end(CALLED_IN_CHILD);
        }
        return Err(NOT_INITIALIZED);
    }
    INSIDE.fetch_add(1, Ordering::SeqCst);
    let inside = Inside;
    if GONE.load(Ordering::SeqCst) {
        match *AFTER_EXIT {
            AfterExit::Answer => {}
            AfterExit::Fail | AfterExit::FailLate => {
                eprintln!("{function} was called after the driver had gone");
                end(CALLED_AFTER_EXIT);
            }
            // SAFETY: there is none; this is the crash that the real driver is known for.
            AfterExit::Crash => unsafe { std::ptr::null_mut::<u8>().write_volatile(0) },
        }
        return Err(DEINITIALIZED);
    }
    Ok(inside)
}

/// `cuInit` has succeeded: from now on there is something to take down.
pub(crate) fn initialised() {
    static ONCE: AtomicBool = AtomicBool::new(false);
    if ONCE.swap(true, Ordering::SeqCst) {
        return;
    }
    LazyLock::force(&AFTER_EXIT);
    LazyLock::force(&CHILD_FAILS);
    // SAFETY: a function of this library, which is never unloaded.
    unsafe { atexit(go) };
    // SAFETY: as above.
    unsafe { pthread_atfork(None, None, Some(forked)) };
}

extern "C" fn forked() {
    FORKED.store(true, Ordering::SeqCst);
}

extern "C" fn go() {
    if FORKED.load(Ordering::SeqCst) {
        return;
    }
    GONE.store(true, Ordering::SeqCst);
    if INSIDE.load(Ordering::SeqCst) > 0 && *AFTER_EXIT == AfterExit::Fail {
        eprintln!("a call was inside when the driver went");
        end(INSIDE_AT_EXIT);
    }
}

fn end(status: i32) -> ! {
    // SAFETY: ends the process at once, as a crash would.
    unsafe { _exit(status) }
}
