//! How a pool page-locks on this machine: what its choice of backing becomes, block by block.

use crate::config::{Backing, BackingInUse};
use crate::contexts::Context;
use crate::driver::Driver;
use crate::error::CallError;
use crate::report::say;
use crate::sync::{AtomicU32, Mutex, Ordering};

/// How the next block is to be page-locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Its pages are registered.
    Register,
    /// Memory of the driver's takes the place of its pages.
    Allocate,
    /// It stays as it is, and is as good.
    NotNeeded,
    /// Nothing works here; what the driver said last.
    Impossible(CallError),
}

/// One pool's choice, and what became of it.
#[derive(Debug)]
pub(crate) struct BackingState {
    choice: Backing,
    in_use: AtomicU32,
    /// The refusal after which nothing is tried any more.
    impossible: Mutex<Option<CallError>>,
}

impl BackingState {
    pub(crate) fn new(choice: Backing) -> Self {
        Self { choice, in_use: AtomicU32::new(0), impossible: Mutex::new(None) }
    }

    pub(crate) fn in_use(&self) -> BackingInUse {
        BackingInUse::ALL[self.in_use.load(Ordering::Relaxed) as usize]
    }

    /// Whether the pool page-locks nothing by itself, and never will: then its blocks are pooled as they are.
    pub(crate) fn locks_nothing(&self) -> bool {
        matches!(self.in_use(), BackingInUse::HostPageTables | BackingInUse::Pageable)
    }

    /// What to do in this context. Asked for by name, memory is page-locked also where that adds nothing.
    pub(crate) fn plan(&self, driver: &Driver, context: &Context, by_name: bool) -> Plan {
        match (self.choice, self.in_use()) {
            (Backing::Registered, _) => Plan::Register,
            (Backing::HostPinned, _) | (Backing::Auto, BackingInUse::HostPinned) => Plan::Allocate,
            (Backing::Auto, BackingInUse::Pageable) => {
                let unsupported = CallError::new("cuMemHostRegister_v2", NOT_SUPPORTED);
                Plan::Impossible(self.impossible.lock().unwrap_or(unsupported))
            }
            (Backing::Auto, _) => {
                let can = context.registering(driver);
                if can.is_needless && !by_name {
                    self.becomes(BackingInUse::HostPageTables);
                    Plan::NotNeeded
                } else if can.is_supported {
                    Plan::Register
                } else {
                    self.becomes(BackingInUse::HostPinned);
                    Plan::Allocate
                }
            }
        }
    }

    /// What to do after a refusal in place of what was refused; `None` when the refusal stands.
    pub(crate) fn instead_of(&self, plan: Plan, error: &CallError) -> Option<Plan> {
        if !error.call().contains("Host") {
            // Not cuMemHostRegister or cuMemHostAlloc, or the runtime's: the way to them was refused, this once.
            return None;
        }
        match (self.choice, plan) {
            (Backing::Auto, Plan::Register) if error.code() == NOT_SUPPORTED => {
                self.becomes(BackingInUse::HostPinned);
                Some(Plan::Allocate)
            }
            // A driver may lack the function, too.
            (Backing::Auto, Plan::Allocate) if [NOT_SUPPORTED, NOT_FOUND].contains(&error.code()) => {
                *self.impossible.lock() = Some(*error);
                self.becomes(BackingInUse::Pageable);
                None
            }
            _ => None,
        }
    }

    /// A block was page-locked.
    pub(crate) fn worked(&self, plan: Plan) {
        match plan {
            // Asked for by name where the pool does not do it by itself, it changes nothing.
            Plan::Register if self.in_use() != BackingInUse::HostPageTables => {
                self.becomes(BackingInUse::Registered);
            }
            Plan::Allocate => self.becomes(BackingInUse::HostPinned),
            _ => {}
        }
    }

    fn becomes(&self, now: BackingInUse) {
        let before = self.in_use.swap(now as u32, Ordering::Relaxed);
        if before != now as u32 {
            say!(INFO, "backing", backing = %now, "how a pool page-locks");
        }
    }
}

const NOT_FOUND: u32 = 500;
const NOT_SUPPORTED: u32 = 801;
