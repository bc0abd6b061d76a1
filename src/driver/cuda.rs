//! The seam over libcuda: each method makes the driver call that it names.
//!
//! The functions are called through a table of our own (`table.rs` says why); which library it was filled
//! from, and when, is `process.rs`. Contexts, streams and events are pointers that are only passed back.

#![allow(unsafe_code)] // calls the driver

use super::ladder::{Kind, Request};
use super::process::{DRIVER, RUNTIME};
use super::search::{LibraryReport, not_found};
use super::table::Table;
use super::{
    CaptureInfo, CaptureMode, ContextHandle, DriverApi, DriverIdentity, EndFlag, EventHandle, GraphHandle,
    StreamHandle, UserObjectHandle, graphs,
};
use crate::error::{CallError, Error};
use std::sync::OnceLock;

const SUCCESS: u32 = 0;
const NOT_INITIALIZED: u32 = 3;
const NOT_FOUND: u32 = 500;
const NOT_READY: u32 = 600;

const EVENT_DISABLE_TIMING: u32 = 2;
const HOST_REGISTER_PORTABLE: u32 = 1;
const ATTRIBUTE_PAGEABLE_ACCESS: i32 = 88;
const ATTRIBUTE_HOST_PAGE_TABLES: i32 = 100;
const POINTER_MEMORY_TYPE: u32 = 2;
const POINTER_IS_MANAGED: u32 = 8;
const MEMORY_TYPE_HOST: u32 = 1;

/// CUDA, whether it is in use already, can be loaded at need, or is not on this machine at all.
#[derive(Debug, Default)]
pub(crate) struct CudaDriver {
    request: Request,
    /// Whether the library in use is the one that was chosen by name; asked once there is one.
    verdict: OnceLock<Result<(), Error>>,
}

impl CudaDriver {
    pub(super) fn new(request: Request) -> Self {
        Self { request, verdict: OnceLock::new() }
    }
}

/// The file of the libcuda that is in use.
#[cfg(feature = "cudarc")]
pub(crate) fn file_in_use() -> Option<std::path::PathBuf> {
    Some(DRIVER.in_use()?.file.clone())
}

/// The table of a driver that is in use, or the answer that an uninitialised driver gives.
pub(super) fn table(call: &'static str) -> Result<&'static Table, CallError> {
    DRIVER.table_in_use().ok_or(CallError::new(call, NOT_INITIALIZED))
}

pub(super) fn check(call: &'static str, code: u32) -> Result<(), CallError> {
    if code == SUCCESS { Ok(()) } else { Err(CallError::new(call, code)) }
}

impl DriverApi for CudaDriver {
    fn identity(&self) -> DriverIdentity {
        DriverIdentity::CUDA
    }

    fn is_in_use(&self) -> bool {
        DRIVER.table_in_use().is_some()
    }

    fn is_inherited(&self) -> bool {
        DRIVER.is_inherited()
    }

    fn prepare(&self) -> Result<(), Error> {
        match DRIVER.in_use() {
            Some(found) => {
                let check = || DRIVER.is_the_chosen(&self.request, &found.file);
                self.verdict.get_or_init(check).clone()
            }
            None => DRIVER.load_and_initialize(&self.request),
        }
    }

    fn libraries(&self) -> Vec<LibraryReport> {
        let driver = match self.prepare() {
            Ok(()) | Err(Error::NoCuda { .. }) => DRIVER.report(),
            Err(error) => not_found(Kind::Driver, vec![super::search::remark(error.to_string())]),
        };
        let _ = RUNTIME.load_and_initialize(&self.request);
        vec![driver, RUNTIME.report()]
    }

    fn current_context(&self) -> Result<Option<ContextHandle>, CallError> {
        let Some(table) = DRIVER.table_in_use() else { return Ok(None) };
        let mut context = 0;
        // SAFETY: cuCtxGetCurrent writes one pointer.
        check("cuCtxGetCurrent", unsafe { (table.context_current)(&mut context) })?;
        Ok((context != 0).then_some(ContextHandle(context)))
    }

    fn set_current_context(&self, context: Option<ContextHandle>) -> Result<(), CallError> {
        let table = table("cuCtxSetCurrent")?;
        let handle = context.map_or(0, |context| context.0);
        // SAFETY: cuCtxSetCurrent takes NULL or a context, which whoever holds the handle keeps alive.
        check("cuCtxSetCurrent", unsafe { (table.context_set_current)(handle) })
    }

    fn current_device(&self) -> Result<i32, CallError> {
        let table = table("cuCtxGetDevice")?;
        let mut device = 0;
        // SAFETY: cuCtxGetDevice writes one int.
        check("cuCtxGetDevice", unsafe { (table.context_device)(&mut device) })?;
        Ok(device)
    }

    fn active_primary_devices(&self) -> Result<Vec<i32>, CallError> {
        let table = table("cuDeviceGetCount")?;
        let mut count = 0;
        // SAFETY: cuDeviceGetCount writes one int.
        check("cuDeviceGetCount", unsafe { (table.device_count)(&mut count) })?;
        let mut active_devices = Vec::new();
        for ordinal in 0..count {
            let mut device = 0;
            // SAFETY: cuDeviceGet writes one int.
            check("cuDeviceGet", unsafe { (table.device)(&mut device, ordinal) })?;
            let (mut flags, mut active) = (0, 0);
            // SAFETY: cuDevicePrimaryCtxGetState writes two ints and makes no context.
            let code = unsafe { (table.primary_state)(device, &mut flags, &mut active) };
            check("cuDevicePrimaryCtxGetState", code)?;
            if active != 0 {
                active_devices.push(device);
            }
        }
        Ok(active_devices)
    }

    fn retain_primary(&self, device: i32) -> Result<ContextHandle, CallError> {
        let table = table("cuDevicePrimaryCtxRetain")?;
        let mut context = 0;
        // SAFETY: cuDevicePrimaryCtxRetain writes one pointer; an unknown device is an error.
        check("cuDevicePrimaryCtxRetain", unsafe { (table.primary_retain)(&mut context, device) })?;
        Ok(ContextHandle(context))
    }

    fn release_primary(&self, device: i32) -> Result<(), CallError> {
        let table = table("cuDevicePrimaryCtxRelease_v2")?;
        // SAFETY: cuDevicePrimaryCtxRelease takes a device number; without a retain it is an error.
        check("cuDevicePrimaryCtxRelease_v2", unsafe { (table.primary_release)(device) })
    }

    fn context_id(&self, context: ContextHandle) -> Result<u64, CallError> {
        let table = table("cuCtxGetId")?;
        // Drivers before 12.0 lack it.
        let Some(context_id) = table.context_id else { return Err(CallError::new("cuCtxGetId", NOT_FOUND)) };
        let mut id = 0;
        // SAFETY: cuCtxGetId writes one number; the context is one that the pool was shown, and which its
        // keeper, or the caller's promise, keeps; of a destroyed one it says that it is.
        check("cuCtxGetId", unsafe { context_id(context.0, &mut id) })?;
        Ok(id)
    }

    fn synchronize_context(&self) -> Result<(), CallError> {
        let table = table("cuCtxSynchronize")?;
        // SAFETY: cuCtxSynchronize takes nothing; without a current context it is an error.
        check("cuCtxSynchronize", unsafe { (table.context_synchronize)() })
    }

    fn reads_pageable_memory(&self, device: i32) -> Result<bool, CallError> {
        let table = table("cuDeviceGetAttribute")?;
        for attribute in [ATTRIBUTE_PAGEABLE_ACCESS, ATTRIBUTE_HOST_PAGE_TABLES] {
            let mut value = 0;
            // SAFETY: cuDeviceGetAttribute writes one int.
            let code = unsafe { (table.device_attribute)(&mut value, attribute, device) };
            check("cuDeviceGetAttribute", code)?;
            if value != 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn create_event(&self) -> Result<EventHandle, CallError> {
        let table = table("cuEventCreate")?;
        let mut event = 0;
        // SAFETY: cuEventCreate writes one pointer.
        check("cuEventCreate", unsafe { (table.event_create)(&mut event, EVENT_DISABLE_TIMING) })?;
        Ok(EventHandle(event))
    }

    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CallError> {
        let table = table("cuEventRecord")?;
        // SAFETY: cuEventRecord takes an event of ours and a stream that the caller holds.
        check("cuEventRecord", unsafe { (table.event_record)(event.0, stream.0) })
    }

    fn query_event(&self, event: EventHandle) -> Result<bool, CallError> {
        let table = table("cuEventQuery")?;
        // SAFETY: cuEventQuery takes an event of ours that was not destroyed.
        match unsafe { (table.event_query)(event.0) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => Err(CallError::new("cuEventQuery", code)),
        }
    }

    fn destroy_event(&self, event: EventHandle) -> Result<(), CallError> {
        let table = table("cuEventDestroy_v2")?;
        // SAFETY: cuEventDestroy takes an event of ours, which its owner gives up here.
        check("cuEventDestroy_v2", unsafe { (table.event_destroy)(event.0) })
    }

    fn is_capturing(&self, stream: StreamHandle) -> Result<bool, CallError> {
        let table = table("cuStreamIsCapturing")?;
        // A driver without this function is older than stream capture itself.
        let Some(is_capturing) = table.stream_is_capturing else { return Ok(false) };
        let mut status = 0;
        // SAFETY: cuStreamIsCapturing takes a stream that the caller holds and writes one enum.
        check("cuStreamIsCapturing", unsafe { is_capturing(stream.0, &mut status) })?;
        Ok(status != 0)
    }

    fn capture_info(&self, stream: StreamHandle) -> Result<CaptureInfo, CallError> {
        graphs::capture_info(table("cuStreamGetCaptureInfo_v2")?, stream)
    }

    fn create_user_object(&self, end: EndFlag) -> Result<UserObjectHandle, CallError> {
        graphs::create_user_object(table("cuUserObjectCreate")?, end)
    }

    fn give_user_object(&self, graph: GraphHandle, object: UserObjectHandle) -> Result<(), CallError> {
        graphs::give_user_object(table("cuGraphRetainUserObject")?, graph, object)
    }

    fn release_user_object(&self, object: UserObjectHandle) -> Result<(), CallError> {
        graphs::release_user_object(table("cuUserObjectRelease")?, object)
    }

    fn stream_id(&self, stream: StreamHandle) -> Result<u64, CallError> {
        let table = table("cuStreamGetId")?;
        // Drivers before 12.0 lack it; a note is then cleared by no record, and waits for its context.
        let Some(stream_id) = table.stream_id else { return Err(CallError::new("cuStreamGetId", NOT_FOUND)) };
        let mut id = 0;
        // SAFETY: cuStreamGetId takes a stream that the caller holds and writes one number.
        check("cuStreamGetId", unsafe { stream_id(stream.0, &mut id) })?;
        Ok(id)
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode, CallError> {
        let table = table("cuThreadExchangeStreamCaptureMode")?;
        let Some(exchange) = table.exchange_capture_mode else { return Ok(CaptureMode::Global) };
        let mut value = mode as u32;
        // SAFETY: cuThreadExchangeStreamCaptureMode reads and writes one enum.
        check("cuThreadExchangeStreamCaptureMode", unsafe { exchange(&mut value) })?;
        Ok(CaptureMode::of(value))
    }

    fn register(&self, base: usize, bytes: usize) -> Result<(), CallError> {
        let table = table("cuMemHostRegister_v2")?;
        // SAFETY: cuMemHostRegister validates the range; that it stays mapped is the duty of its owner.
        let code = unsafe { (table.host_register)(base, bytes, HOST_REGISTER_PORTABLE) };
        check("cuMemHostRegister_v2", code)
    }

    fn unregister(&self, base: usize) -> Result<(), CallError> {
        let table = table("cuMemHostUnregister")?;
        // SAFETY: cuMemHostUnregister answers 713 or 1 for an address that is no registration's base.
        check("cuMemHostUnregister", unsafe { (table.host_unregister)(base) })
    }

    fn is_page_locked(&self, address: usize) -> Result<bool, CallError> {
        let table = table("cuPointerGetAttributes")?;
        let Some(pointer_attributes) = table.pointer_attributes else {
            return Err(CallError::new("cuPointerGetAttributes", NOT_FOUND));
        };
        // The plural function answers 0 with type 0 for plain memory, where the singular one fails.
        let attributes = [POINTER_MEMORY_TYPE, POINTER_IS_MANAGED];
        let (mut memory_type, mut is_managed) = (0_u64, 0_u64);
        let values = [&raw mut memory_type, &raw mut is_managed];
        // SAFETY: cuPointerGetAttributes reads two attributes and writes each value, at most eight
        // bytes, through the pointer at the same index.
        let code = unsafe { pointer_attributes(2, attributes.as_ptr(), values.as_ptr(), address as u64) };
        check("cuPointerGetAttributes", code)?;
        // The low half is the enum; managed memory migrates, so it is not page-locked for our purpose.
        Ok(memory_type as u32 == MEMORY_TYPE_HOST && is_managed as u32 == 0)
    }
}
