//! No device: nothing pins, nothing is outstanding.

use super::memory::DriverMemory;
use super::{CaptureMode, ContextHandle, DriverApi, DriverIdentity, EventHandle, StreamHandle};
use crate::error::{CallError, Error};

/// `CUDA_ERROR_NO_DEVICE`, what a real driver answers on a machine without a device.
const NO_DEVICE: u32 = 100;

#[derive(Debug)]
pub(crate) struct HostDriver {
    /// Why there is no device, for whoever asks for page-locked memory all the same.
    pub(crate) reason: &'static str,
}

fn no_device<T>(call: &'static str) -> Result<T, CallError> {
    Err(CallError::new(call, NO_DEVICE))
}

impl DriverMemory for HostDriver {}

impl DriverApi for HostDriver {
    fn identity(&self) -> DriverIdentity {
        DriverIdentity { name: "host", instance: 0 }
    }
    fn is_in_use(&self) -> bool {
        false
    }
    fn has_contexts(&self) -> bool {
        false
    }
    fn prepare(&self) -> Result<(), Error> {
        Err(Error::NoCuda { report: self.reason.into() })
    }
    fn current_context(&self) -> Result<Option<ContextHandle>, CallError> {
        Ok(None)
    }
    fn set_current_context(&self, _: Option<ContextHandle>) -> Result<(), CallError> {
        no_device("cuCtxSetCurrent")
    }
    fn current_device(&self) -> Result<i32, CallError> {
        no_device("cuCtxGetDevice")
    }
    fn active_primary_devices(&self) -> Result<Vec<i32>, CallError> {
        Ok(Vec::new())
    }
    fn retain_primary(&self, _: i32) -> Result<ContextHandle, CallError> {
        no_device("cuDevicePrimaryCtxRetain")
    }
    fn release_primary(&self, _: i32) -> Result<(), CallError> {
        no_device("cuDevicePrimaryCtxRelease_v2")
    }
    fn synchronize_context(&self) -> Result<(), CallError> {
        no_device("cuCtxSynchronize")
    }
    fn reads_pageable_memory(&self, _: i32) -> Result<bool, CallError> {
        no_device("cuDeviceGetAttribute")
    }
    fn create_event(&self) -> Result<EventHandle, CallError> {
        no_device("cuEventCreate")
    }
    fn record_event(&self, _: EventHandle, _: StreamHandle) -> Result<(), CallError> {
        no_device("cuEventRecord")
    }
    fn query_event(&self, _: EventHandle) -> Result<bool, CallError> {
        no_device("cuEventQuery")
    }
    fn destroy_event(&self, _: EventHandle) -> Result<(), CallError> {
        no_device("cuEventDestroy_v2")
    }
    fn is_capturing(&self, _: StreamHandle) -> Result<bool, CallError> {
        no_device("cuStreamIsCapturing")
    }
    fn stream_id(&self, _: StreamHandle) -> Result<u64, CallError> {
        no_device("cuStreamGetId")
    }
    fn exchange_capture_mode(&self, _: CaptureMode) -> Result<CaptureMode, CallError> {
        Ok(CaptureMode::Global)
    }
    fn register(&self, _: usize, _: usize) -> Result<(), CallError> {
        no_device("cuMemHostRegister_v2")
    }
    fn unregister(&self, _: usize) -> Result<(), CallError> {
        no_device("cuMemHostUnregister")
    }
    fn is_page_locked(&self, _: usize) -> Result<bool, CallError> {
        Ok(false)
    }
}
