//! What is leaked on purpose, kept within reach.
//!
//! Memory that a device may still use is never freed. It hangs here, so that a leak checker (valgrind, LeakSanitizer), ours
//! or a user's, finds it referred to, and reports what else is lost.
//!
//! A list without a lock: one that another thread held when the process was forked would never be free in the child.
//! Nothing is ever taken out, so no address comes twice.

use crate::sync::Ordering;
use crate::sync::fixed::AtomicPtr;
use std::ptr;

struct Kept {
    _thing: Box<dyn Send>,
    /// What was kept before.
    next: AtomicPtr<Kept>,
}

static NEWEST: AtomicPtr<Kept> = AtomicPtr::new(ptr::null_mut());

/// Leaks it.
pub(crate) fn keep(thing: Box<dyn Send>) {
    let kept: &'static Kept =
        Box::leak(Box::new(Kept { _thing: thing, next: AtomicPtr::new(ptr::null_mut()) }));
    let mut newest = NEWEST.load(Ordering::Relaxed);
    loop {
        kept.next.store(newest, Ordering::Relaxed);
        let place = ptr::from_ref(kept).cast_mut();
        match NEWEST.compare_exchange_weak(newest, place, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(other) => newest = other,
        }
    }
}
