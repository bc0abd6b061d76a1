//! What a pool asks of the operating system, as far as a test wants to see it or make it fail.

use super::Sim;
use super::calls::Call;
use super::checks::Access;
use super::core::Core;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// Memory by address, with its bytes.
pub(super) type Mapped = BTreeMap<usize, usize>;

impl Core {
    /// Whether the system grants it; a fault of its name is a refusal.
    pub(super) fn may_have(&self, call: Call, bytes: usize) -> bool {
        self.count(call, bytes).is_ok()
    }

    /// A pool has mapped fresh memory, or is about to unmap some.
    pub(super) fn note_mapping(&self, access: Access, base: usize, bytes: usize) {
        match access {
            Access::Mapped => {
                self.mapped.lock().insert(base, bytes);
            }
            Access::Unmap => {
                self.mapped.lock().remove(&base);
            }
            _ => {}
        }
    }
}

/// Memory and calls, for tests that look for what was left behind.
impl Sim {
    /// Bytes that pools on this device have mapped and not unmapped: whether with a caller, idle, or leaked.
    pub fn mapped_bytes(&self) -> usize {
        self.core().mapped.lock().values().sum()
    }

    /// The same memory by address, with its bytes; in order.
    pub fn mapped(&self) -> Vec<(usize, usize)> {
        self.core().mapped.lock().iter().map(|(address, bytes)| (*address, *bytes)).collect()
    }

    /// Pages that nobody had touched when they were registered, so far: a driver faults such pages in while it holds its
    /// lock, and all other calls of the process wait. Counted where the mapping is looked at
    /// ([`SimBuilder::mapping_check`](super::SimBuilder::mapping_check)).
    pub fn pages_faulted_in(&self) -> usize {
        self.core().pages_faulted_in.load(Ordering::Relaxed)
    }

    /// Every entry point that was called, with how often, in a fixed order; `"mmap"` and `"pthread_create"` too.
    pub fn called(&self) -> Vec<(&'static str, u64)> {
        let counts = Call::all().iter().map(|call| call.symbol()).zip(self.core().threads.all_calls());
        counts.filter(|(_, count)| *count > 0).collect()
    }

    /// Events that exist, whoever made them.
    pub fn live_events(&self) -> usize {
        self.core().state.lock().live_events()
    }
}
