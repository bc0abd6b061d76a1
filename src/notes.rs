//! Uses of a block that an integration noted without an event of ours: only a context can say when they are
//! over, unless a later record on the same stream covers them.
//!
//! An integration such as cudarc's `HostSlice` is called *before* it enqueues its copy, and nothing of ours
//! runs afterwards, so there is no point on the stream to record. A raw stream handle is never kept: the driver
//! reuses handles. What is kept is the stream's id (`cuStreamGetId`), which it does not reuse.

use crate::contexts::{Context, Contexts};
use crate::driver::Driver;
use crate::stream::StreamRef;
use crate::sync::Arc;
use smallvec::SmallVec;

/// The noted uses of a block; two streams fit without an allocation.
pub(crate) type Notes = SmallVec<[Note; 2]>;

/// One noted use.
#[derive(Debug, Clone)]
pub(crate) struct Note {
    pub(crate) context: Arc<Context>,
    /// `None` where the driver did not say; such a note is cleared by no record.
    stream_id: Option<u64>,
    /// The legacy default stream: an event recorded on it later is exact, whoever records it.
    pub(crate) on_default_stream: bool,
    /// The device writes the block; otherwise it reads it.
    pub(crate) writes: bool,
}

/// What a look at the stream of a noted use gave.
pub(crate) enum Noted {
    Use(Note),
    /// The stream captures: the copy goes into a graph, which may read the block again at any time.
    Captured,
}

impl Note {
    /// Looks at a stream that is about to use a block.
    pub(crate) fn of(driver: &Driver, contexts: &Contexts, stream: &StreamRef<'_>, writes: bool) -> Noted {
        let context = contexts.of_stream(driver, stream);
        // Asked first: on a capturing stream another question may break the capture. An error is no "yes";
        // the copy that follows will meet it too.
        if driver.api().is_capturing(stream.stream) == Ok(true) {
            return Noted::Captured;
        }
        // Handle 0 and 1 name the legacy default stream of the context; 2 is another one in every thread.
        let on_default_stream = stream.stream.0 <= 1;
        let stream_id = driver.api().stream_id(stream.stream).ok();
        Noted::Use(Note { context, stream_id, on_default_stream, writes })
    }

    fn is_covered_by(&self, other: &Note) -> bool {
        self.stream_id.is_some()
            && self.stream_id == other.stream_id
            && Arc::ptr_eq(&self.context, &other.context)
    }

    /// Whether a record on a stream with this id, in this context, stands for the noted use too.
    pub(crate) fn is_of(&self, context: &Arc<Context>, stream_id: u64) -> bool {
        self.stream_id == Some(stream_id) && Arc::ptr_eq(&self.context, context)
    }
}

/// Adds a note, unless one of the same stream says as much: a buffer that is copied from in a loop keeps one.
pub(crate) fn add(notes: &mut Notes, note: Note) {
    if let Some(other) = notes.iter_mut().find(|other| other.is_covered_by(&note)) {
        other.writes |= note.writes;
    } else if !notes.iter().any(|other| other.is_as_vague_as(&note)) {
        notes.push(note);
    }
}

impl Note {
    /// Both only say "something in this context".
    fn is_as_vague_as(&self, other: &Note) -> bool {
        self.stream_id.is_none()
            && other.stream_id.is_none()
            && self.writes == other.writes
            && Arc::ptr_eq(&self.context, &other.context)
    }
}
