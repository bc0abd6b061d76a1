//! The allocating part of the seam, over libcuda: each method makes the driver call that it names.
//!
//! All of it is optional in the table, so that a pool still works on a driver that lacks it.

#![allow(unsafe_code)] // calls the driver

use super::ContextHandle;
use super::cuda::{CudaDriver, check, table};
use super::memory::{Attribute, DriverMemory};
use super::table::{MemoryLocation, Table};
use crate::error::CallError;

const INVALID_VALUE: u32 = 1;
const NOT_FOUND: u32 = 500;

const HOST_ALLOC_PORTABLE: u32 = 1;
const HOST_ALLOC_DEVICE_MAP: u32 = 2;
const HOST_ALLOC_WRITE_COMBINED: u32 = 4;
const ATTACH_GLOBAL: u32 = 1;
const ADVISE_SET_PREFERRED_LOCATION: u32 = 3;
const LOCATION_DEVICE: i32 = 1;

fn needed<F>(call: &'static str, function: Option<F>) -> Result<F, CallError> {
    function.ok_or(CallError::new(call, NOT_FOUND))
}

impl DriverMemory for CudaDriver {
    fn device_count(&self) -> Result<i32, CallError> {
        let table = table("cuDeviceGetCount")?;
        let mut count = 0;
        // SAFETY: cuDeviceGetCount writes one int.
        check("cuDeviceGetCount", unsafe { (table.device_count)(&mut count) })?;
        Ok(count)
    }

    fn attribute(&self, attribute: Attribute, device: i32) -> Result<i32, CallError> {
        let table = table("cuDeviceGetAttribute")?;
        let mut value = 0;
        // SAFETY: cuDeviceGetAttribute writes one int.
        let code = unsafe { (table.device_attribute)(&mut value, attribute as i32, device) };
        match code {
            // A driver from before the attribute has nothing of what it stands for.
            INVALID_VALUE => Ok(attribute.when_unknown()),
            code => check("cuDeviceGetAttribute", code).map(|()| value),
        }
    }

    fn allocate_host(&self, bytes: usize, write_combined: bool) -> Result<usize, CallError> {
        let table = table("cuMemHostAlloc")?;
        let allocate = needed("cuMemHostAlloc", table.host_alloc)?;
        let combined = if write_combined { HOST_ALLOC_WRITE_COMBINED } else { 0 };
        let flags = HOST_ALLOC_PORTABLE | HOST_ALLOC_DEVICE_MAP | combined;
        let mut base = 0;
        // SAFETY: cuMemHostAlloc writes one pointer.
        check("cuMemHostAlloc", unsafe { allocate(&mut base, bytes, flags) })?;
        Ok(base)
    }

    fn free_host(&self, base: usize) -> Result<(), CallError> {
        let table = table("cuMemFreeHost")?;
        let free = needed("cuMemFreeHost", table.host_free)?;
        // SAFETY: cuMemFreeHost answers 1 for an address that cuMemHostAlloc did not give; that nobody uses the
        // memory any more is the duty of whoever frees it.
        check("cuMemFreeHost", unsafe { free(base) })
    }

    fn allocate_managed(&self, bytes: usize) -> Result<usize, CallError> {
        let table = table("cuMemAllocManaged")?;
        let allocate = needed("cuMemAllocManaged", table.managed_alloc)?;
        let mut base = 0;
        // SAFETY: cuMemAllocManaged writes one device pointer, which is a host address too.
        check("cuMemAllocManaged", unsafe { allocate(&mut base, bytes, ATTACH_GLOBAL) })?;
        Ok(base as usize)
    }

    fn free_managed(&self, base: usize) -> Result<(), CallError> {
        let table = table("cuMemFree_v2")?;
        let free = needed("cuMemFree_v2", table.free)?;
        // SAFETY: cuMemFree answers 1 for an address that is no allocation's base; that nobody uses the memory any
        // more is the duty of whoever frees it.
        check("cuMemFree_v2", unsafe { free(base as u64) })
    }

    fn prefer_device(&self, base: usize, bytes: usize, device: i32) -> Result<(), CallError> {
        prefer_device(table("cuMemAdvise")?, base, bytes, device)
    }

    fn create_context(&self, device: i32) -> Result<ContextHandle, CallError> {
        let table = table("cuCtxCreate_v2")?;
        let create = needed("cuCtxCreate_v2", table.context_create)?;
        let mut context = 0;
        // SAFETY: cuCtxCreate writes one pointer; an unknown device is an error.
        check("cuCtxCreate_v2", unsafe { create(&mut context, 0, device) })?;
        Ok(ContextHandle(context))
    }

    fn pop_context(&self) -> Result<(), CallError> {
        let table = table("cuCtxPopCurrent_v2")?;
        let pop = needed("cuCtxPopCurrent_v2", table.context_pop)?;
        let mut context = 0;
        // SAFETY: cuCtxPopCurrent writes one pointer; without a current context it is an error.
        check("cuCtxPopCurrent_v2", unsafe { pop(&mut context) })
    }

    fn destroy_context(&self, context: ContextHandle) -> Result<(), CallError> {
        let table = table("cuCtxDestroy_v2")?;
        let destroy = needed("cuCtxDestroy_v2", table.context_destroy)?;
        // SAFETY: cuCtxDestroy takes a context that cuCtxCreate made, which its owner gives up here.
        check("cuCtxDestroy_v2", unsafe { destroy(context.0) })
    }
}

/// The second version, since 12.2, takes a location; the first one a device's number.
fn prefer_device(table: &Table, base: usize, bytes: usize, device: i32) -> Result<(), CallError> {
    if let Some(advise) = table.advise_v2 {
        let location = MemoryLocation { kind: LOCATION_DEVICE, id: device };
        // SAFETY: cuMemAdvise_v2 takes a range, an advice and a location by value; it refuses what is not managed.
        let code = unsafe { advise(base as u64, bytes, ADVISE_SET_PREFERRED_LOCATION, location) };
        return check("cuMemAdvise_v2", code);
    }
    let advise = needed("cuMemAdvise", table.advise)?;
    // SAFETY: cuMemAdvise takes a range, an advice and a device's number; it refuses what is not managed.
    check("cuMemAdvise", unsafe { advise(base as u64, bytes, ADVISE_SET_PREFERRED_LOCATION, device) })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::driver::DriverApi;
    use crate::driver::cuda_tests::{in_child_of_crate, is_child};
    use crate::driver::ladder::How;
    use crate::driver::library;
    use crate::driver::process::Entries;
    use fake_cuda::control::Control;

    #[test]
    fn each_version_of_the_advice_is_used_where_it_is_the_newest() {
        let file = Control::find().expect("cargo builds the fake library beside the tests");
        let environment = [("PINPOOL_CUDA_LIBRARY", file.to_str().unwrap())];
        in_child_of_crate("driver::cuda_memory::tests::child_that_advises", &environment);
    }

    #[test]
    #[ignore = "run by each_version_of_the_advice_is_used_where_it_is_the_newest"]
    fn child_that_advises() {
        if !is_child() {
            return;
        }
        let (driver, fake) = (CudaDriver::default(), Control::load().unwrap());
        assert_eq!(driver.allocate_managed(1).unwrap_err().code(), 3, "not initialised");
        driver.prepare().unwrap();
        assert_eq!(driver.device_count(), Ok(1));
        let context = driver.create_context(0).unwrap();
        let library = library::open(How::Load, fake.path().as_os_str()).unwrap();
        let mut table = Table::of(&library).unwrap();
        for (preferring, has_second) in [(1, true), (2, false)] {
            table.advise_v2 = table.advise_v2.filter(|_| has_second);
            let base = driver.allocate_managed(8192).unwrap();
            prefer_device(&table, base, 8192, 0).unwrap();
            assert_eq!(fake.preferring(), preferring);
            let call = if has_second { "cuMemAdvise_v2" } else { "cuMemAdvise" };
            assert_eq!(prefer_device(&table, base, 8192, 9), Err(CallError::new(call, 101)));
        }
        table.advise = None;
        assert_eq!(prefer_device(&table, 4096, 4096, 0), Err(CallError::new("cuMemAdvise", NOT_FOUND)));
        assert_eq!(driver.free_managed(4096), Err(CallError::new("cuMemFree_v2", INVALID_VALUE)));
        assert_eq!(driver.free_host(4096), Err(CallError::new("cuMemFreeHost", INVALID_VALUE)));
        assert_eq!(driver.attribute(Attribute::HostRegister, 0), Ok(1));
        assert_eq!(driver.attribute(Attribute::HostRegister, 9).unwrap_err().code(), 101);
        driver.destroy_context(context).unwrap();
        assert_eq!(driver.current_context(), Ok(None));
        assert_eq!(driver.pop_context(), Err(CallError::new("cuCtxPopCurrent_v2", 201)));
    }
}
