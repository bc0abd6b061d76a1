//! The allocating part of the pool's seam, over the simulated device.

use super::calls::Call;
use super::driver::{SimDriver, named};
use crate::driver::ContextHandle;
use crate::driver::memory::{Attribute, DriverMemory};
use crate::error::CallError;

/// Portable and device-mapped.
const HOST_ALLOC: u32 = 3;
const WRITE_COMBINED: u32 = 4;
const ATTACH_GLOBAL: u32 = 1;
const SET_PREFERRED_LOCATION: u32 = 3;
const LOCATION_DEVICE: i32 = 1;

impl DriverMemory for SimDriver {
    fn device_count(&self) -> Result<i32, CallError> {
        named(Call::DeviceGetCount, self.cuda.cu_device_get_count())
    }

    fn attribute(&self, attribute: Attribute, device: i32) -> Result<i32, CallError> {
        named(Call::DeviceGetAttribute, self.cuda.cu_device_get_attribute(attribute as i32, device))
    }

    fn allocate_host(&self, bytes: usize, write_combined: bool) -> Result<usize, CallError> {
        let flags = HOST_ALLOC | if write_combined { WRITE_COMBINED } else { 0 };
        named(Call::MemHostAlloc, self.cuda.cu_mem_host_alloc(bytes, flags)).map(|base| base as usize)
    }

    fn free_host(&self, base: usize) -> Result<(), CallError> {
        named(Call::MemFreeHost, self.cuda.cu_mem_free_host(base as *mut u8))
    }

    fn allocate_managed(&self, bytes: usize) -> Result<usize, CallError> {
        let base = self.cuda.cu_mem_alloc_managed(bytes, ATTACH_GLOBAL);
        named(Call::MemAllocManaged, base).map(|base| base as usize)
    }

    fn free_managed(&self, base: usize) -> Result<(), CallError> {
        named(Call::MemFree, self.cuda.cu_mem_free(base as u64))
    }

    fn prefer_device(&self, base: usize, bytes: usize, device: i32) -> Result<(), CallError> {
        let location = (LOCATION_DEVICE, device);
        let advised = self.cuda.cu_mem_advise(base as u64, bytes, SET_PREFERRED_LOCATION, location);
        named(Call::MemAdvise, advised)
    }

    fn create_context(&self, device: i32) -> Result<ContextHandle, CallError> {
        named(Call::CtxCreate, self.cuda.cu_ctx_create(0, device)).map(ContextHandle)
    }

    fn pop_context(&self) -> Result<(), CallError> {
        named(Call::CtxPopCurrent, self.cuda.cu_ctx_pop_current()).map(drop)
    }

    fn destroy_context(&self, context: ContextHandle) -> Result<(), CallError> {
        named(Call::CtxDestroy, self.cuda.cu_ctx_destroy(context.0))
    }
}
