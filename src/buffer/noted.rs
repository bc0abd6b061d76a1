//! What an integration notes on a guard: uses without an event of ours.

use super::flags::{CAPTURED, CAPTURED_WRITE, FOREIGN, NOTED, WRITES};
use super::{PinnedBuffer, captured};
use crate::dirty::Dirty;
use crate::notes::{self, Note, Noted};
use crate::stream::{AsStream, StreamRef};

#[cfg_attr(not(feature = "cudarc"), allow(dead_code))] // cudarc's is the only one.
impl PinnedBuffer {
    /// Notes that a copy from the buffer is about to be enqueued on `stream`, by code that is not ours.
    pub(crate) fn note_device_read(&self, stream: &impl AsStream) {
        stream.with_stream_ref(|stream| _ = self.note(stream, false));
    }

    /// Notes that a copy into the buffer is about to be enqueued on `stream`, by code that is not ours. Waits
    /// for the uses noted before, whose bytes the copy would overwrite. True when the stream captures it.
    pub(crate) fn note_device_write(&mut self, stream: &impl AsStream) -> bool {
        self.before_write();
        self.dirty = Dirty::Everything;
        stream.with_stream_ref(|stream| self.note(stream, true))
    }

    /// A copy into the buffer that will be recorded was enqueued: reads wait for it.
    pub(crate) fn device_writes(&mut self) {
        self.flags.add(WRITES);
    }

    /// True when the stream captures the use.
    pub(crate) fn note(&self, stream: &StreamRef<'_>, writes: bool) -> bool {
        let home = &self.home;
        if home.fork.is_child() {
            return false;
        }
        let ours = stream.driver == home.driver.api().identity();
        let noted = ours.then(|| {
            home.captures.show(stream);
            Note::of(&home.driver, &home.contexts, stream)
        });
        match noted {
            // Also from pageable memory: a replay reads that too.
            Some(Noted::Captured) => {
                let kind = if writes { CAPTURED | CAPTURED_WRITE } else { CAPTURED };
                captured::note(home, self.block(), &self.flags, stream, kind);
                return true;
            }
            Some(Noted::Use(_)) => home.captures.seen_without(stream),
            None => {}
        }
        // A copy of pageable memory is over with the host's side when its call returns, except where the
        // device reaches pageable memory itself; without a device there is none.
        let is_over_at_once = !self.block().is_pinned() && !home.contexts.any_reads_pageable(&home.driver);
        if is_over_at_once || !home.device_in_use() {
            return false;
        }
        let also = if writes { WRITES } else { 0 };
        match noted {
            Some(Noted::Use(note)) => {
                let mut notes = self.block().notes().lock();
                notes::add(&mut notes, note);
                self.flags.add(NOTED | also);
            }
            // It may be the same device under another name, for example with a pool over the runtime.
            _ => self.flags.add(FOREIGN | also),
        }
        false
    }
}
