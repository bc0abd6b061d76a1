//! The door for the allocating part of the seam; `gate.rs` tells when it is shut.

use super::ContextHandle;
use super::exit::FirstUse;
use super::gate::Gate;
use super::memory::Attribute;
use crate::error::CallError;

impl Gate {
    pub(crate) fn device_count(&self) -> Result<i32, CallError> {
        self.pass("cuDeviceGetCount", |driver| driver.device_count())
    }

    pub(crate) fn attribute(&self, attribute: Attribute, device: i32) -> Result<i32, CallError> {
        self.pass("cuDeviceGetAttribute", |driver| driver.attribute(attribute, device))
    }

    pub(crate) fn allocate_host(&self, bytes: usize, write_combined: bool) -> Result<usize, CallError> {
        self.pass_first("cuMemHostAlloc", FirstUse::Registration, |driver| {
            driver.allocate_host(bytes, write_combined)
        })
    }

    pub(crate) fn free_host(&self, base: usize) -> Result<(), CallError> {
        self.pass("cuMemFreeHost", |driver| driver.free_host(base))
    }

    pub(crate) fn allocate_managed(&self, bytes: usize) -> Result<usize, CallError> {
        self.pass_first("cuMemAllocManaged", FirstUse::Registration, |driver| driver.allocate_managed(bytes))
    }

    pub(crate) fn free_managed(&self, base: usize) -> Result<(), CallError> {
        self.pass("cuMemFree_v2", |driver| driver.free_managed(base))
    }

    pub(crate) fn prefer_device(&self, base: usize, bytes: usize, device: i32) -> Result<(), CallError> {
        self.pass("cuMemAdvise", |driver| driver.prefer_device(base, bytes, device))
    }

    pub(crate) fn create_context(&self, device: i32) -> Result<ContextHandle, CallError> {
        self.pass_first("cuCtxCreate_v2", FirstUse::Context, |driver| driver.create_context(device))
    }

    pub(crate) fn pop_context(&self) -> Result<(), CallError> {
        self.pass("cuCtxPopCurrent_v2", |driver| driver.pop_context())
    }

    pub(crate) fn destroy_context(&self, context: ContextHandle) -> Result<(), CallError> {
        self.pass("cuCtxDestroy_v2", |driver| driver.destroy_context(context))
    }
}
