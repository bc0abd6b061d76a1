//! What the crate says through `tracing`: one target, stable names, and a warning only the first time.
//!
//! Nothing is said while a lock of ours is held, since whoever listens may use the pool; and nothing at all by a take
//! that hits, by a drop, or by a record that succeeds.

use crate::sync::Ordering;
use crate::sync::fixed::AtomicU32;

/// An event by its stable name, with target `pinpool`; the names stand in `docs/operations.md`.
macro_rules! say {
    ($level:ident, $name:literal, $($fields:tt)*) => {
        tracing::event!(name: $name, target: "pinpool", tracing::Level::$level, $($fields)*)
    };
}
pub(crate) use say;

/// A warning if this is the first of its kind, for debugging if not.
macro_rules! say_failure {
    ($is_first:expr, $name:literal, $($fields:tt)*) => {
        if $is_first {
            crate::report::say!(WARN, $name, $($fields)*)
        } else {
            crate::report::say!(DEBUG, $name, $($fields)*)
        }
    };
}
pub(crate) use say_failure;

/// Kinds of failure, each of which is a warning once in the life of a pool.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    RegisterRefused,
    RegisterPaused,
    WaitFailed,
    ContextWaitFailed,
    Quarantined,
    RecordFailed,
    ThreadRefused,
    PrewarmShort,
}

/// Which kinds a pool has had.
#[derive(Debug, Default)]
pub(crate) struct Said(AtomicU32);

impl Said {
    /// Whether this is the first of its kind.
    pub(crate) fn is_first(&self, kind: Kind) -> bool {
        let bit = 1 << kind as u32;
        self.0.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }
}

/// Why a block left its shelf.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Why {
    /// A block that came back needs the room under the cap.
    Cap,
    /// `set_max_pooled_bytes`, `trim_to`, `clear`.
    Order,
    /// Nobody needed it for `max_idle_time`.
    Idle,
    /// Another class needs the room under `max_registered_bytes`.
    Ceiling,
    /// The context that it was page-locked in has ended.
    ContextEnded,
    /// The pool ends.
    Shutdown,
}

impl Why {
    fn text(self) -> &'static str {
        match self {
            Why::Cap => "cap",
            Why::Order => "order",
            Why::Idle => "idle",
            Why::Ceiling => "ceiling",
            Why::ContextEnded => "context_ended",
            Why::Shutdown => "shutdown",
        }
    }
}

/// A block left its shelf.
pub(crate) fn say_evicted(bytes: usize, pinned: bool, why: Why) {
    say!(DEBUG, "evicted", bytes, pinned, reason = why.text(), "a buffer left its shelf");
}

/// Whole microseconds, as all times in events are.
pub(crate) fn micros(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_the_first_of_its_kind_once() {
        let said = Said::default();
        assert!(said.is_first(Kind::Quarantined) && said.is_first(Kind::RegisterRefused));
        assert!(!said.is_first(Kind::Quarantined) && !said.is_first(Kind::RegisterRefused));
    }
}
