//! What a guard knows of the graphs that its buffer was captured into.
#![allow(unsafe_code)] // `hold_for_graph` is an unsafe promise of the caller's.

use super::PinnedBuffer;
use super::flags::{CAPTURED, CAPTURED_WRITE, FOREIGN, Flags, WRITES};
use crate::block::Out;
use crate::holds::GraphHold;
use crate::home::Home;
use crate::stream::StreamRef;

impl PinnedBuffer {
    /// Holds the memory for a CUDA graph for as long as the returned value lives: after its drop the buffer is neither
    /// zeroed, used again, unregistered nor freed before that.
    ///
    /// Copies that are captured from a guard or its views (cudarc's, or any that [`record_last_use`](Self::record_last_use)
    /// was called for on the capturing stream) are held by the graph itself, where the driver has user objects (CUDA 11.3
    /// and later). This is for where it has not, and for uses that the pool does not see: graphs that are built node by
    /// node, or copies from slices. It answers for every use in a graph so far; a later one needs another call. Until
    /// then a write to the buffer panics, as after every capture.
    ///
    /// # Safety
    ///
    /// The value is dropped only after the graph, everything made of it (executables, clones, graphs that contain it)
    /// and every launch in flight are gone, or when none of them uses the buffer any more and none will. Otherwise the
    /// pool zeroes, reuses or frees memory that a replay still reads or writes.
    pub unsafe fn hold_for_graph(&mut self) -> GraphHold {
        let hold = GraphHold::new();
        self.block().holds().lock().cover(&hold);
        self.flags.add(CAPTURED);
        hold
    }
}

impl PinnedBuffer {
    /// Whether a graph that it was captured into may still exist.
    pub(crate) fn is_captured(&self) -> bool {
        end_if_over(self.block(), &self.flags);
        self.flags.has(CAPTURED)
    }
}

/// A use on a stream that captures: the graph holds the block, if anything can.
#[cold]
pub(super) fn note(home: &Home, block: &Out, flags: &Flags, stream: &StreamRef<'_>, kind: u32) {
    let captured = home.captures.seen(&home.driver, stream);
    let mut holds = block.holds().lock();
    holds.add(captured);
    flags.add(kind);
}

/// Once every graph is gone, what is left is a use that only a wait for everything answers for.
pub(super) fn end_if_over(block: &Out, flags: &Flags) {
    if !flags.has(CAPTURED) {
        return;
    }
    let mut holds = block.holds().lock();
    if holds.are_over() {
        holds.clear();
        let writes = if flags.has(CAPTURED_WRITE) { WRITES } else { 0 };
        flags.add(FOREIGN | writes);
        flags.remove(CAPTURED | CAPTURED_WRITE);
    }
}
