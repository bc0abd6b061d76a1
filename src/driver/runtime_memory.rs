//! The allocating part of the seam, over libcudart: each method makes the call that it names.
//!
//! Contexts of one's own the runtime does not have.

#![allow(unsafe_code)] // calls the runtime

use super::memory::{Attribute, DriverMemory};
use super::process::Entries;
use super::runtime::{RuntimeDriver, table};
use super::table::MemoryLocation;
use crate::error::CallError;

const INVALID_VALUE: u32 = 1;
const NOT_FOUND: u32 = 500;

const HOST_ALLOC_PORTABLE: u32 = 1;
const HOST_ALLOC_MAPPED: u32 = 2;
const HOST_ALLOC_WRITE_COMBINED: u32 = 4;
const ATTACH_GLOBAL: u32 = 1;
const ADVISE_SET_PREFERRED_LOCATION: u32 = 3;
const LOCATION_DEVICE: i32 = 1;
/// Since CUDA 13 `cudaMemAdvise` takes a location where it took a device's number before.
const ADVICE_TAKES_A_LOCATION: u32 = 13_000;

fn needed<F>(call: &'static str, function: Option<F>) -> Result<F, CallError> {
    function.ok_or(CallError::new(call, NOT_FOUND))
}

impl DriverMemory for RuntimeDriver {
    fn device_count(&self) -> Result<i32, CallError> {
        let table = table("cudaGetDeviceCount")?;
        let mut count = 0;
        // SAFETY: cudaGetDeviceCount writes one int.
        table.call("cudaGetDeviceCount", || unsafe { (table.device_count)(&mut count) })?;
        Ok(count)
    }

    fn attribute(&self, attribute: Attribute, device: i32) -> Result<i32, CallError> {
        let table = table("cudaDeviceGetAttribute")?;
        let mut value = 0;
        // SAFETY: cudaDeviceGetAttribute writes one int.
        let ask = || unsafe { (table.device_attribute)(&mut value, attribute as i32, device) };
        match table.call("cudaDeviceGetAttribute", ask) {
            // A runtime from before the attribute knows nothing of what it stands for.
            Err(error) if error.code() == INVALID_VALUE => Ok(attribute.when_unknown()),
            asked => asked.map(|()| value),
        }
    }

    fn allocate_host(&self, bytes: usize, write_combined: bool) -> Result<usize, CallError> {
        let table = table("cudaHostAlloc")?;
        let allocate = needed("cudaHostAlloc", table.host_alloc)?;
        let combined = if write_combined { HOST_ALLOC_WRITE_COMBINED } else { 0 };
        let flags = HOST_ALLOC_PORTABLE | HOST_ALLOC_MAPPED | combined;
        let mut base = 0;
        // SAFETY: cudaHostAlloc writes one pointer.
        table.call("cudaHostAlloc", || unsafe { allocate(&mut base, bytes, flags) })?;
        Ok(base)
    }

    fn free_host(&self, base: usize) -> Result<(), CallError> {
        let table = table("cudaFreeHost")?;
        let free = needed("cudaFreeHost", table.host_free)?;
        // SAFETY: cudaFreeHost refuses an address that cudaHostAlloc did not give; that nobody uses the memory any
        // more is the duty of whoever frees it.
        table.call("cudaFreeHost", || unsafe { free(base) })
    }

    fn allocate_managed(&self, bytes: usize) -> Result<usize, CallError> {
        let table = table("cudaMallocManaged")?;
        let allocate = needed("cudaMallocManaged", table.managed_alloc)?;
        let mut base = 0;
        // SAFETY: cudaMallocManaged writes one pointer.
        table.call("cudaMallocManaged", || unsafe { allocate(&mut base, bytes, ATTACH_GLOBAL) })?;
        Ok(base)
    }

    fn free_managed(&self, base: usize) -> Result<(), CallError> {
        let table = table("cudaFree")?;
        let free = needed("cudaFree", table.free)?;
        // SAFETY: cudaFree refuses an address that is no allocation's base; that nobody uses the memory any more is
        // the duty of whoever frees it.
        table.call("cudaFree", || unsafe { free(base) })
    }

    fn prefer_device(&self, base: usize, bytes: usize, device: i32) -> Result<(), CallError> {
        let table = table("cudaMemAdvise")?;
        if table.version()? >= ADVICE_TAKES_A_LOCATION {
            let advise = needed("cudaMemAdvise", table.advise_location)?;
            let location = MemoryLocation { kind: LOCATION_DEVICE, id: device };
            // SAFETY: from this version on cudaMemAdvise takes a location by value; it refuses what is not managed.
            let call = || unsafe { advise(base, bytes, ADVISE_SET_PREFERRED_LOCATION, location) };
            return table.call("cudaMemAdvise", call);
        }
        let advise = needed("cudaMemAdvise", table.advise)?;
        // SAFETY: before that it takes a device's number; it refuses what is not managed.
        let call = || unsafe { advise(base, bytes, ADVISE_SET_PREFERRED_LOCATION, device) };
        table.call("cudaMemAdvise", call)
    }
}
