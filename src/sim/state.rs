//! Everything that the device's mutex guards, and how handles are told apart.

use super::allocations::HostPiece;
use super::captures::Capture;
use super::codes::{CONTEXT_IS_DESTROYED, INVALID_CONTEXT};
use super::contexts::Context;
use super::events::Event;
use super::graphs::{Executable, Graph};
use super::host_memory::HostAllocation;
use super::memory::{DeviceMemory, Registration};
use super::random::Random;
use super::streams::Stream;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Device addresses start here: above every host address, so that one kind is never taken for the other.
const DEVICE_ADDRESSES: u64 = 1 << 52;

/// What a handle's number stands for; part of the number.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Context = 1,
    Stream = 2,
    Event = 3,
    Graph = 4,
    Executable = 5,
    UserObject = 6,
}

/// An index that is valid only while the context is as old as `epoch`: a reset makes a new one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct ContextRef {
    pub(super) index: usize,
    pub(super) epoch: u64,
}

/// A point in a stream: complete when the stream has executed its operation number `sequence`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Position {
    pub(super) slot: usize,
    /// The stream that had the slot; a slot whose stream is gone has nothing left to do.
    pub(super) stream_id: u64,
    pub(super) sequence: u64,
}

pub(super) struct State {
    instance: u64,
    /// Primary contexts first, by device ordinal; created ones after them, never reused.
    pub(super) contexts: Vec<Context>,
    pub(super) streams: Vec<Stream>,
    pub(super) free_stream_slots: Vec<usize>,
    /// The slot behind each stream handle; separate from the slots, since a destroyed stream goes on working.
    pub(super) stream_handles: Vec<Option<usize>>,
    pub(super) free_stream_handles: Vec<usize>,
    /// The per-thread default streams (handle 2), by thread.
    pub(super) thread_streams: HashMap<(usize, ContextRef), usize>,
    pub(super) events: Vec<Event>,
    pub(super) free_events: Vec<usize>,
    /// Captures that no `cuStreamEndCapture` has ended, by their id.
    pub(super) captures: BTreeMap<u64, Capture>,
    pub(super) graphs: BTreeMap<usize, Graph>,
    pub(super) executables: BTreeMap<usize, Executable>,
    pub(super) registrations: BTreeMap<usize, Registration>,
    /// Registrations and allocations that vanished with their context, by address.
    pub(super) vanished: BTreeMap<usize, usize>,
    pub(super) host_allocations: BTreeMap<usize, HostPiece>,
    /// The memory of allocations that vanished with their context.
    pub(super) vanished_allocations: Vec<HostAllocation>,
    pub(super) device_memory: BTreeMap<u64, Arc<DeviceMemory>>,
    pub(super) next_device_address: u64,
    pub(super) pending_operations: usize,
    pub(super) random: Random,
    pub(super) engine_stops: bool,
    next_number: u64,
    /// Grows whenever a stream that captured nothing may answer something else from now on.
    stream_changes: Arc<AtomicU64>,
}

impl State {
    pub(super) fn new(instance: u64, devices: i32, seed: u64, stream_changes: Arc<AtomicU64>) -> Self {
        Self {
            instance,
            stream_changes,
            contexts: (0..devices).map(Context::inactive_primary).collect(),
            streams: Vec::new(),
            free_stream_slots: Vec::new(),
            stream_handles: Vec::new(),
            free_stream_handles: Vec::new(),
            thread_streams: HashMap::new(),
            events: Vec::new(),
            free_events: Vec::new(),
            captures: BTreeMap::new(),
            graphs: BTreeMap::new(),
            executables: BTreeMap::new(),
            registrations: BTreeMap::new(),
            vanished: BTreeMap::new(),
            host_allocations: BTreeMap::new(),
            vanished_allocations: Vec::new(),
            device_memory: BTreeMap::new(),
            next_device_address: DEVICE_ADDRESSES,
            pending_operations: 0,
            random: Random::new(seed),
            engine_stops: false,
            next_number: 0,
        }
    }

    /// Sequence numbers and identities: unique and growing across the whole device.
    pub(super) fn next_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// A stream goes away, begins to capture, or loses its context: what threads remember of quiet streams is void.
    pub(super) fn streams_change(&mut self) {
        self.stream_changes.fetch_add(1, Ordering::Release);
    }

    /// Handles look like pointers, and differ between simulated devices and between kinds.
    pub(super) fn handle(&self, kind: Kind, index: usize) -> usize {
        self.handle_base(kind) + index * 0x100
    }

    /// The index behind a handle of this device and kind.
    pub(super) fn index(&self, kind: Kind, handle: usize) -> Option<usize> {
        let offset = handle.checked_sub(self.handle_base(kind))?;
        (offset % 0x100 == 0 && offset < 1 << 28).then_some(offset / 0x100)
    }

    fn handle_base(&self, kind: Kind) -> usize {
        0x5500_0000_0000 + ((self.instance as usize % 64) << 32) + ((kind as usize) << 28)
    }

    pub(super) fn context_ref(&self, index: usize) -> ContextRef {
        ContextRef { index, epoch: self.contexts[index].epoch }
    }

    /// Whether what belongs to this context can still be used: 709 when it is gone, or its sticky error.
    pub(super) fn check_context(&self, context: ContextRef) -> Result<(), u32> {
        let now = &self.contexts[context.index];
        if !now.is_alive || now.epoch != context.epoch {
            return Err(CONTEXT_IS_DESTROYED);
        }
        now.sticky_error.map_or(Ok(()), Err)
    }

    /// The living context behind a handle: 201 for none or an unknown one, 709 for a dead one.
    pub(super) fn live_context(&self, handle: usize) -> Result<ContextRef, u32> {
        let index = self.index(Kind::Context, handle).filter(|index| *index < self.contexts.len());
        let context = self.context_ref(index.ok_or(INVALID_CONTEXT)?);
        self.check_context(context)?;
        Ok(context)
    }

    pub(super) fn is_complete(&self, position: Position) -> bool {
        let stream = &self.streams[position.slot];
        stream.id != position.stream_id || stream.completed >= position.sequence
    }
}
