//! The door in front of every driver: it stays open until the process exits (`exit.rs`).
//!
//! Its methods are those of [`DriverApi`], whatever driver stands behind it. Once it is shut each answers
//! `CUDA_ERROR_DEINITIALIZED`, as the driver itself would if it still could, and nothing is called.

use super::exit::{self, FirstUse, Visit};
use super::search::LibraryReport;
use super::{
    CaptureInfo, CaptureMode, ContextHandle, DriverApi, DriverIdentity, EndFlag, EventHandle, GraphHandle,
    HostAccess, Resource, StreamHandle, UserObjectHandle,
};
use crate::error::{CallError, Error};
use std::sync::Arc;

/// A driver that is called only while the process does not exit.
#[derive(Clone)]
pub(crate) struct Gate {
    behind: Arc<dyn DriverApi>,
    /// A driver's own never changes, and every record compares it.
    identity: DriverIdentity,
    has_contexts: bool,
}

impl Gate {
    pub(super) fn new(behind: Arc<dyn DriverApi>) -> Self {
        Self { identity: behind.identity(), has_contexts: behind.has_contexts(), behind }
    }

    #[inline]
    pub(super) fn pass<R>(
        &self,
        call: &'static str,
        make: impl FnOnce(&dyn DriverApi) -> Result<R, CallError>,
    ) -> Result<R, CallError> {
        let _inside = Visit::for_call(call)?;
        make(&*self.behind)
    }

    /// As [`Self::pass`], for what may make the driver register its exit handler.
    pub(super) fn pass_first<R>(
        &self,
        call: &'static str,
        first: FirstUse,
        make: impl FnOnce(&dyn DriverApi) -> Result<R, CallError>,
    ) -> Result<R, CallError> {
        let made = self.pass(call, make)?;
        exit::watch(first);
        Ok(made)
    }

    #[inline]
    pub(crate) fn identity(&self) -> DriverIdentity {
        self.identity
    }

    /// Once shut: yes. Work may be outstanding, and nobody can say that none is.
    pub(crate) fn is_in_use(&self) -> bool {
        match Visit::begin() {
            Some(_inside) => self.behind.is_in_use(),
            None => true,
        }
    }

    /// Whether a thread can have a context at all; no driver call.
    #[inline]
    pub(crate) fn has_contexts(&self) -> bool {
        self.has_contexts
    }

    /// No driver call.
    pub(crate) fn is_inherited(&self) -> bool {
        self.behind.is_inherited()
    }

    pub(crate) fn prepare(&self) -> Result<(), Error> {
        let _inside = Visit::for_call("cuInit")?;
        self.behind.prepare()?;
        exit::watch(FirstUse::Initialised);
        Ok(())
    }

    pub(crate) fn libraries(&self) -> Vec<LibraryReport> {
        Visit::begin().map(|_inside| self.behind.libraries()).unwrap_or_default()
    }

    pub(crate) fn current_context(&self) -> Result<Option<ContextHandle>, CallError> {
        self.pass("cuCtxGetCurrent", |driver| driver.current_context())
    }

    /// No call of the driver's, so it passes at any time.
    pub(crate) fn may_have(&self, resource: Resource) -> bool {
        self.behind.may_have(resource)
    }

    /// No call of the driver's either.
    pub(crate) fn memory_nodes(&self) -> Option<Vec<u32>> {
        self.behind.memory_nodes()
    }

    pub(crate) fn set_current_context(&self, context: Option<ContextHandle>) -> Result<(), CallError> {
        self.pass("cuCtxSetCurrent", |driver| driver.set_current_context(context))
    }

    pub(crate) fn current_device(&self) -> Result<i32, CallError> {
        self.pass("cuCtxGetDevice", |driver| driver.current_device())
    }

    pub(crate) fn active_primary_devices(&self) -> Result<Vec<i32>, CallError> {
        self.pass("cuDevicePrimaryCtxGetState", |driver| driver.active_primary_devices())
    }

    pub(crate) fn retain_primary(&self, device: i32) -> Result<ContextHandle, CallError> {
        self.pass_first("cuDevicePrimaryCtxRetain", FirstUse::Context, |driver| driver.retain_primary(device))
    }

    pub(crate) fn release_primary(&self, device: i32) -> Result<(), CallError> {
        self.pass("cuDevicePrimaryCtxRelease_v2", |driver| driver.release_primary(device))
    }

    pub(crate) fn context_id(&self, context: ContextHandle) -> Result<u64, CallError> {
        self.pass("cuCtxGetId", |driver| driver.context_id(context))
    }

    pub(crate) fn synchronize_context(&self) -> Result<(), CallError> {
        self.pass("cuCtxSynchronize", |driver| driver.synchronize_context())
    }

    pub(crate) fn reads_pageable_memory(&self, device: i32) -> Result<bool, CallError> {
        self.pass("cuDeviceGetAttribute", |driver| driver.reads_pageable_memory(device))
    }

    pub(crate) fn create_event(&self) -> Result<EventHandle, CallError> {
        self.pass_first("cuEventCreate", FirstUse::Event, |driver| driver.create_event())
    }

    #[inline]
    pub(crate) fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CallError> {
        self.pass("cuEventRecord", |driver| driver.record_event(event, stream))
    }

    /// Asks whether the stream captures, and records the event if not, through the door once; gives whether it did.
    #[inline]
    pub(crate) fn record_unless_capturing(
        &self,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<bool, CallError> {
        let _inside = Visit::for_call("cuStreamIsCapturing")?;
        if self.behind.is_capturing(stream)? {
            return Ok(false);
        }
        self.behind.record_event(event, stream).map(|()| true)
    }

    #[inline]
    pub(crate) fn query_event(&self, event: EventHandle) -> Result<bool, CallError> {
        self.pass("cuEventQuery", |driver| driver.query_event(event))
    }

    pub(crate) fn destroy_event(&self, event: EventHandle) -> Result<(), CallError> {
        self.pass("cuEventDestroy_v2", |driver| driver.destroy_event(event))
    }

    #[inline]
    pub(crate) fn is_capturing(&self, stream: StreamHandle) -> Result<bool, CallError> {
        self.pass("cuStreamIsCapturing", |driver| driver.is_capturing(stream))
    }

    pub(crate) fn capture_info(&self, stream: StreamHandle) -> Result<CaptureInfo, CallError> {
        self.pass("cuStreamGetCaptureInfo_v2", |driver| driver.capture_info(stream))
    }

    pub(crate) fn create_user_object(&self, end: EndFlag) -> Result<UserObjectHandle, CallError> {
        self.pass("cuUserObjectCreate", |driver| driver.create_user_object(end))
    }

    pub(crate) fn give_user_object(
        &self,
        graph: GraphHandle,
        object: UserObjectHandle,
    ) -> Result<(), CallError> {
        self.pass("cuGraphRetainUserObject", |driver| driver.give_user_object(graph, object))
    }

    pub(crate) fn release_user_object(&self, object: UserObjectHandle) -> Result<(), CallError> {
        self.pass("cuUserObjectRelease", |driver| driver.release_user_object(object))
    }

    pub(crate) fn stream_id(&self, stream: StreamHandle) -> Result<u64, CallError> {
        self.pass("cuStreamGetId", |driver| driver.stream_id(stream))
    }

    #[inline]
    pub(crate) fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode, CallError> {
        self.pass("cuThreadExchangeStreamCaptureMode", |driver| driver.exchange_capture_mode(mode))
    }

    pub(crate) fn register(&self, base: usize, bytes: usize) -> Result<(), CallError> {
        self.pass_first("cuMemHostRegister_v2", FirstUse::Registration, |driver| driver.register(base, bytes))
    }

    pub(crate) fn unregister(&self, base: usize) -> Result<(), CallError> {
        self.pass("cuMemHostUnregister", |driver| driver.unregister(base))
    }

    pub(crate) fn is_page_locked(&self, address: usize) -> Result<bool, CallError> {
        self.pass("cuPointerGetAttributes", |driver| driver.is_page_locked(address))
    }

    /// No driver call, so it needs no open door.
    #[inline]
    pub(crate) fn before_host_access(&self, access: HostAccess, base: usize, bytes: usize) {
        self.behind.before_host_access(access, base, bytes);
    }
}
