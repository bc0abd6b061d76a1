//! What the device checks about its user: the bug that a real device would turn into wrong bytes.

use super::core::Core;
use super::state::State;
use super::streams::{Operation, Work};
use crate::driver::HostAccess;
use parking_lot::{Mutex, MutexGuard};
use std::fmt;
use std::sync::atomic::Ordering;

/// Whose call it is: some checks hold for the pool only, since an application may do what it likes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Application,
    Pool,
}

/// What is about to be done to host memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Unregister,
    FreeHost,
    FreeManaged,
    Zero,
    Unmap,
    HandOut,
    Mapped,
}

impl From<HostAccess> for Access {
    fn from(access: HostAccess) -> Self {
        match access {
            HostAccess::Zero => Access::Zero,
            HostAccess::Unmap => Access::Unmap,
            HostAccess::HandOut => Access::HandOut,
            HostAccess::Mapped => Access::Mapped,
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Access::Unregister => "cuMemHostUnregister of",
            Access::FreeHost => "cuMemFreeHost of",
            Access::FreeManaged => "cuMemFree of managed memory,",
            Access::Zero => "zeroing of",
            Access::Unmap => "unmapping of",
            Access::HandOut => "handing out of",
            Access::Mapped => "mapping of",
        })
    }
}

/// The violations found so far.
pub(super) struct Checks {
    seed: u64,
    found: Mutex<Found>,
}

struct Found {
    violations: Vec<String>,
    are_expected: bool,
}

impl Checks {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, found: Mutex::new(Found { violations: Vec::new(), are_expected: false }) }
    }

    /// Notes a violation. It does not panic here, because this may be a thread of the pool, where a panic
    /// would be lost and leave the test hanging.
    pub(super) fn violation(&self, what: fmt::Arguments<'_>) {
        let mut found = self.found.lock();
        if !found.are_expected {
            eprintln!("simulated device: violation: {what}");
        }
        found.violations.push(what.to_string());
    }

    pub(super) fn expect(&self) {
        self.found.lock().are_expected = true;
    }

    pub(super) fn violations(&self) -> Vec<String> {
        self.found.lock().violations.clone()
    }

    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.found.lock().violations)
    }

    /// Panics if there are violations that nobody expects; once, so that a second panic does not abort.
    pub(super) fn report(&self) {
        if !self.found.lock().are_expected {
            self.assert_clean();
        }
    }

    pub(super) fn assert_clean(&self) {
        let violations = self.take();
        assert!(
            violations.is_empty(),
            "the simulated device (seed {}) found {} violation(s):\n  {}",
            self.seed,
            violations.len(),
            violations.join("\n  ")
        );
    }
}

impl Core {
    /// Told by the pool before it touches memory; costs one load while nothing is in flight.
    pub(super) fn before_host_access(&self, access: Access, base: usize, bytes: usize) {
        self.note_mapping(access, base, bytes);
        let has_graphs = self.has_captured.load(Ordering::Relaxed);
        if self.host_operations.load(Ordering::Acquire) == 0 && !has_graphs {
            return;
        }
        let mut state = self.state.lock();
        self.check_access(&state, access, base, bytes);
        if has_graphs {
            state.make_nodes_stale(access, base, bytes);
        }
        if access == Access::Unmap {
            self.cancel_operations_on(&mut state, base, bytes);
        }
    }

    /// Notes a violation for each unfinished operation that uses the range.
    pub(super) fn check_access(&self, state: &State, access: Access, base: usize, bytes: usize) {
        for (slot, stream) in state.streams.iter().enumerate() {
            for operation in stream.queue.iter().filter(|operation| operation.uses(base, bytes)) {
                let (from, of) = operation.host.unwrap_or_default();
                let handle = state.handle_of_stream(slot);
                self.checks.violation(format_args!(
                    "{access} {bytes} bytes at {base:#x} while stream {handle:#x} has not finished {} of \
                     {of} bytes at {from:#x}",
                    operation.work
                ));
            }
        }
    }

    /// Takes the sting out of operations whose host memory is about to go, so that a test which made the
    /// mistake ends with the report of it and not with a segmentation fault.
    pub(super) fn cancel_operations_on(&self, state: &mut MutexGuard<'_, State>, base: usize, bytes: usize) {
        loop {
            let mut is_any_running = false;
            for stream in &mut state.streams {
                let is_running = stream.is_running;
                for (index, operation) in stream.queue.iter_mut().enumerate() {
                    if !operation.uses(base, bytes) {
                        continue;
                    }
                    if is_running && index == 0 {
                        is_any_running = true;
                        continue;
                    }
                    operation.work = Work::Nothing;
                    operation.host = None;
                    self.host_operations.fetch_sub(1, Ordering::Release);
                }
            }
            if !is_any_running {
                return;
            }
            self.changed.wait(state);
        }
    }
}

impl Operation {
    fn uses(&self, base: usize, bytes: usize) -> bool {
        self.host.is_some_and(|(from, of)| from < base.saturating_add(bytes) && base < from + of)
    }
}

impl State {
    /// The handle of a stream for a message; 0 for default streams and destroyed ones.
    fn handle_of_stream(&self, slot: usize) -> usize {
        let index = self.stream_handles.iter().position(|of| *of == Some(slot));
        index.map_or(0, |index| self.handle(super::state::Kind::Stream, index))
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Work::HostToDevice { .. } => "a copy to the device",
            Work::DeviceToHost { .. } => "a copy to the host",
            Work::DeviceToDevice { .. } => "a copy on the device",
            Work::Fill { .. } => "a fill",
            Work::Record { .. } => "an event record",
            Work::WaitFor(_) => "a wait for an event",
            Work::HostFunction(_) => "a host function",
            Work::Delay(_) => "a delay",
            Work::EndLaunch(_) => "the end of a graph's launch",
            Work::Nothing => "an operation that is running",
        })
    }
}
