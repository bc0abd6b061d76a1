//! A device for models: one context, one stream, and checks that panic, which fails the model.

use crate::driver::{
    CaptureMode, ContextHandle, Driver, DriverApi, DriverIdentity, DriverMemory, EventHandle, HostAccess,
    LibraryReport, StreamHandle,
};
use crate::error::{CallError, Error};
use crate::stream::{Keep, StreamRef, sealed::AsStreamRef};
use crate::sync::{Arc, AtomicBool, Mutex, Ordering};
use std::collections::BTreeMap;

/// Every call is a step of the model, because it takes the lock.
#[derive(Debug, Default)]
pub(super) struct Device {
    state: Mutex<State>,
    /// The caller holds context-wide waits: the device checks that none is made.
    pub(super) must_not_synchronize: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    events_made: usize,
    /// Recorded, and the work before the record is not done.
    pending: Vec<EventHandle>,
    registered: BTreeMap<usize, usize>,
    /// Memory that work uses which the next record stands for.
    about_to_use: Vec<usize>,
    /// Memory that pending work uses.
    in_use: Vec<(usize, EventHandle)>,
}

const IDENTITY: DriverIdentity = DriverIdentity { name: "model", instance: 1 };

impl Device {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    pub(super) fn driver(self: &Arc<Self>) -> Driver {
        Driver::from_api(self.clone())
    }

    /// The work that was enqueued so far is done.
    pub(super) fn finish(&self) {
        let mut state = self.state.lock();
        state.pending.clear();
        state.in_use.clear();
    }

    /// The next event that is recorded stands for work that uses the memory.
    pub(super) fn next_record_uses(&self, base: usize) {
        self.state.lock().about_to_use.push(base);
    }

    pub(super) fn registered_bytes(&self) -> usize {
        self.state.lock().registered.values().sum()
    }
}

/// The device's only stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stream;

impl AsStreamRef for Stream {
    fn with_stream_ref<R>(&self, look: impl FnOnce(&StreamRef<'_>) -> R) -> R {
        look(&stream_ref())
    }
}

pub(super) fn stream_ref() -> StreamRef<'static> {
    let (context, stream) = (ContextHandle(7), StreamHandle(100));
    StreamRef { driver: IDENTITY, context, stream, keep: Keep::Primary(0), watch: None }
}

impl DriverMemory for Device {}

impl DriverApi for Device {
    fn identity(&self) -> DriverIdentity {
        IDENTITY
    }
    fn is_in_use(&self) -> bool {
        true
    }
    fn prepare(&self) -> Result<(), Error> {
        Ok(())
    }
    fn libraries(&self) -> Vec<LibraryReport> {
        Vec::new()
    }
    fn current_context(&self) -> Result<Option<ContextHandle>, CallError> {
        Ok(Some(ContextHandle(7)))
    }
    fn set_current_context(&self, _: Option<ContextHandle>) -> Result<(), CallError> {
        Ok(())
    }
    fn current_device(&self) -> Result<i32, CallError> {
        Ok(0)
    }
    fn active_primary_devices(&self) -> Result<Vec<i32>, CallError> {
        Ok(vec![0])
    }
    fn retain_primary(&self, _: i32) -> Result<ContextHandle, CallError> {
        Ok(ContextHandle(7))
    }
    fn release_primary(&self, _: i32) -> Result<(), CallError> {
        Ok(())
    }
    fn synchronize_context(&self) -> Result<(), CallError> {
        let forbidden = || self.must_not_synchronize.load(Ordering::SeqCst);
        assert!(!forbidden(), "a context-wide wait begins while they are held");
        self.finish();
        assert!(!forbidden(), "a context-wide wait is under way while they are held");
        Ok(())
    }
    fn reads_pageable_memory(&self, _: i32) -> Result<bool, CallError> {
        Ok(false)
    }
    fn create_event(&self) -> Result<EventHandle, CallError> {
        let mut state = self.state.lock();
        state.events_made += 1;
        Ok(EventHandle(state.events_made))
    }
    fn record_event(&self, event: EventHandle, _: StreamHandle) -> Result<(), CallError> {
        let mut state = self.state.lock();
        assert!(!state.pending.contains(&event), "recorded again while its earlier work is pending");
        state.pending.push(event);
        let used = std::mem::take(&mut state.about_to_use);
        state.in_use.extend(used.into_iter().map(|base| (base, event)));
        Ok(())
    }
    fn query_event(&self, event: EventHandle) -> Result<bool, CallError> {
        Ok(!self.state.lock().pending.contains(&event))
    }
    fn destroy_event(&self, event: EventHandle) -> Result<(), CallError> {
        assert!(!self.state.lock().pending.contains(&event), "destroyed while its work is pending");
        Ok(())
    }
    fn is_capturing(&self, _: StreamHandle) -> Result<bool, CallError> {
        Ok(false)
    }
    fn stream_id(&self, _: StreamHandle) -> Result<u64, CallError> {
        Ok(1)
    }
    fn exchange_capture_mode(&self, _: CaptureMode) -> Result<CaptureMode, CallError> {
        Ok(CaptureMode::Relaxed)
    }
    fn register(&self, base: usize, bytes: usize) -> Result<(), CallError> {
        let earlier = self.state.lock().registered.insert(base, bytes);
        assert_eq!(earlier, None, "registered twice");
        Ok(())
    }
    fn unregister(&self, base: usize) -> Result<(), CallError> {
        let registered = self.state.lock().registered.remove(&base);
        assert!(registered.is_some(), "unregistered twice");
        Ok(())
    }
    fn is_page_locked(&self, address: usize) -> Result<bool, CallError> {
        Ok(self.state.lock().registered.contains_key(&address))
    }
    fn before_host_access(&self, access: HostAccess, base: usize, _: usize) {
        let state = self.state.lock();
        assert!(state.in_use.iter().all(|(other, _)| *other != base), "{access:?} of memory in use");
        let unmapped_early = access == HostAccess::Unmap && state.registered.contains_key(&base);
        assert!(!unmapped_early, "unmapped while registered");
    }
}
