//! What all handles of one simulated device share, and how they hold it.
//!
//! ```text
//! Sim, SimContext, ... -> Session (checks at drop) -> Cuda -> Owner (stops the engine at drop) -> Core
//! Driver of a pool ------------------------------------^
//! engine thread ------------------------------------------------------------------------------> Core
//! ```
//!
//! One mutex guards the whole state. It is never held while bytes are copied, a host function runs, or a
//! call waits.

use super::builder::{Clock, SimBuilder};
use super::checks::Checks;
use super::driver_lock::DriverLock;
use super::faults::Faults;
use super::resources::Mapped;
use super::state::State;
use super::threads::Threads;
use super::user_objects::UserObjects;
use crate::os::ProcessMark;
use parking_lot::{Condvar, Mutex};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

pub(super) struct Core {
    /// Distinguishes the simulated devices of one process; never 0.
    pub(super) instance: u64,
    pub(super) config: SimBuilder,
    pub(super) is_initialised: AtomicBool,
    /// A forked child of the process that initialised it is answered 3 by every call.
    pub(super) initialised_in: ProcessMark,
    pub(super) threads: Threads,
    pub(super) faults: Faults,
    pub(super) driver_lock: DriverLock,
    pub(super) checks: Checks,
    /// How many unfinished operations use host memory; lets a check pass without the mutex.
    pub(super) host_operations: AtomicUsize,
    /// Set when nobody is left who could step: then everything runs when it is enqueued.
    pub(super) is_abandoned: AtomicBool,
    /// Set by the first capture; lets a check pass without the mutex.
    pub(super) has_captured: AtomicBool,
    /// A mutex of its own, since a launch gives its references back wherever its last operation is dropped.
    pub(super) user_objects: Arc<UserObjects>,
    pub(super) state: Mutex<State>,
    /// The state's count of changes, readable without its mutex.
    pub(super) stream_changes: Arc<AtomicU64>,
    /// Memory that pools on this device have mapped and not unmapped.
    pub(super) mapped: Mutex<Mapped>,
    /// Pages that were not there yet when they were registered.
    pub(super) pages_faulted_in: AtomicUsize,
    /// Told whenever an operation is done, a stream is released, or a stream goes away.
    pub(super) changed: Condvar,
    /// Told when the engine thread has something new to look at.
    pub(super) engine_wake: Condvar,
    pub(super) engine: Mutex<Option<JoinHandle<()>>>,
    pub(super) this: Weak<Core>,
}

impl Core {
    pub(super) fn new(config: SimBuilder) -> Arc<Self> {
        static NEXT_INSTANCE: AtomicU64 = AtomicU64::new(1);
        let instance = NEXT_INSTANCE.fetch_add(1, Ordering::Relaxed);
        let stream_changes = Arc::new(AtomicU64::new(1));
        Arc::new_cyclic(|this| Self {
            instance,
            is_initialised: AtomicBool::new(false),
            initialised_in: ProcessMark::new(),
            threads: Threads::new(),
            faults: Faults::new(config.seed),
            driver_lock: DriverLock::new(),
            checks: Checks::new(config.seed),
            host_operations: AtomicUsize::new(0),
            is_abandoned: AtomicBool::new(false),
            has_captured: AtomicBool::new(false),
            user_objects: Arc::default(),
            state: Mutex::new(State::new(instance, config.devices, config.seed, stream_changes.clone())),
            stream_changes,
            mapped: Mutex::default(),
            pages_faulted_in: AtomicUsize::new(0),
            changed: Condvar::new(),
            engine_wake: Condvar::new(),
            engine: Mutex::new(None),
            this: this.clone(),
            config,
        })
    }

    pub(super) fn runs_inline(&self) -> bool {
        self.config.clock == Clock::Inline || self.is_abandoned.load(Ordering::Relaxed)
    }
}

/// Keeps the device going: while it lives, the engine thread runs.
pub(super) struct Owner {
    core: Arc<Core>,
}

impl Owner {
    pub(super) fn new(config: SimBuilder) -> Arc<Self> {
        Arc::new(Self { core: Core::new(config) })
    }
}

impl Deref for Owner {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.core.stop_engine();
    }
}
