//! The word that says that a graph is gone: shared with the driver, which sets it when it likes.

use crate::os::ProcessMark;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// A word that lives for ever, because the driver may store into it at any time until it has done so. Afterwards it
/// is used for another graph.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EndFlag(&'static AtomicBool);

/// Words that nobody uses.
static UNUSED: Mutex<Vec<&'static AtomicBool>> = Mutex::new(Vec::new());

/// Whose they are: a forked child has a copy of the lock as well, perhaps of a moment when somebody had it.
static UNUSED_IN: ProcessMark = ProcessMark::new();

impl EndFlag {
    pub(crate) fn new() -> Self {
        let unused = if UNUSED_IN.is_inherited() {
            None
        } else {
            UNUSED_IN.set();
            UNUSED.lock().pop()
        };
        Self(unused.unwrap_or_else(|| Box::leak(Box::new(AtomicBool::new(false)))))
    }

    /// All that happens when the graph is gone: no allocation, no lock, no driver call, which would not be permitted.
    pub(crate) fn set(self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_set(self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// What the driver is given, to find the word again.
    pub(super) fn address(self) -> *mut std::ffi::c_void {
        std::ptr::from_ref(self.0).cast_mut().cast()
    }

    /// For another graph: nobody will set it, or ask it, any more.
    pub(crate) fn give_back(self) {
        if UNUSED_IN.is_inherited() {
            return;
        }
        self.0.store(false, Ordering::Release);
        UNUSED.lock().push(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_used_again_and_starts_unset() {
        let flag = EndFlag::new();
        assert!(!flag.is_set());
        flag.set();
        assert!(flag.is_set());
        flag.give_back();
        let (one, other) = (EndFlag::new(), EndFlag::new());
        assert!(!one.is_set() && !other.is_set());
        assert_ne!(one.address(), other.address());
        one.give_back();
        other.give_back();
    }
}
