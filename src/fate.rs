//! What is known of when the device is done with a block, and what proves it.

/// What the records say about when the device is done with a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The recorded events say it; without any, only a context-wide wait does.
    Recorded,
    /// A record failed, so a context-wide wait is needed besides the events.
    RecordFailed,
    /// Without a record, and the dropping thread's context could not be asked: nobody knows where to wait.
    Unknown,
    /// The caller proved that nothing is outstanding.
    Proven,
    /// Every context was synchronised after the return, which covers the recorded uses too.
    ContextsIdle,
    /// A use was captured into a graph: a replay may read the block again at any time.
    Captured,
}

impl Fate {
    /// Whether it says by itself that nothing is outstanding.
    pub(crate) fn is_proof(self) -> bool {
        matches!(self, Fate::Proven | Fate::ContextsIdle)
    }

    /// Whether every context will be waited for, now or when the graph is gone.
    pub(crate) fn waits_for_contexts(self) -> bool {
        matches!(self, Fate::RecordFailed | Fate::Captured)
    }
}

/// Why a returned block may be taken for quiescent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proof {
    /// Every recorded event was seen complete.
    EventsComplete,
    /// Every context that may hold work was synchronised after the return.
    ContextsIdle,
    /// The caller proved it, or no device can have touched the memory.
    NothingOutstanding,
}
