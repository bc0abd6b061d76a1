//! What is known of a guard's device work, in one word: the one test that an access makes.

use crate::sync::{AtomicU32, Ordering};

/// Something is in the block's notes. Changed under their lock.
pub(super) const NOTED: u32 = 1;
/// A use was recorded, or a record failed, or quiescence was declared.
pub(super) const RECORDED: u32 = 1 << 1;
/// The device writes the bytes, and nobody has waited for that yet. Set only by an exclusive reference.
pub(super) const WRITES: u32 = 1 << 2;
/// A copy was captured into a graph.
pub(super) const CAPTURED: u32 = 1 << 3;
/// A captured copy writes the bytes.
pub(super) const CAPTURED_WRITE: u32 = 1 << 4;
/// A use on a stream of another driver: only a wait for everything answers for it.
pub(super) const FOREIGN: u32 = 1 << 5;

/// The word. Relaxed: whoever holds an exclusive reference is ordered after the shared ones that set a flag.
#[derive(Debug, Default)]
pub(super) struct Flags(AtomicU32);

impl Flags {
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    #[inline]
    pub(super) fn has(&self, flags: u32) -> bool {
        self.0.load(Ordering::Relaxed) & flags != 0
    }

    /// As [`Self::add`], through the one reference, and so without an atomic read-modify-write.
    #[inline]
    pub(super) fn set(&mut self, flags: u32) {
        let now = self.0.load(Ordering::Relaxed);
        self.0.store(now | flags, Ordering::Relaxed);
    }

    pub(super) fn add(&self, flags: u32) {
        self.0.fetch_or(flags, Ordering::Relaxed);
    }

    pub(super) fn remove(&self, flags: u32) {
        self.0.fetch_and(!flags, Ordering::Relaxed);
    }
}
