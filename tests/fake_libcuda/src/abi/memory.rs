//! Device memory, page-locked host memory, and copies.

use super::{INVALID_VALUE, exports, out, out_optional};
use crate::device;
use pinpool::sim::Cuda;
use std::ffi::c_void;

// `CUpointer_attribute`
const CONTEXT: u32 = 1;
const MEMORY_TYPE: u32 = 2;
const DEVICE_POINTER: u32 = 3;
const HOST_POINTER: u32 = 4;
const BUFFER_ID: u32 = 7;
const IS_MANAGED: u32 = 8;
const DEVICE_ORDINAL: u32 = 9;
const RANGE_START: u32 = 11;
const RANGE_SIZE: u32 = 12;
const MAPPED: u32 = 13;

/// `CU_DEVICE_CPU`, how the first version of the advice names the host.
const CPU: i32 = -1;

/// `CUmemLocation`.
#[repr(C)]
pub struct Location {
    kind: i32,
    id: i32,
}

exports! { functions:
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |cuda| {
        let (free_now, total_now) = cuda.cu_mem_get_info()?;
        out_optional(free, free_now);
        out_optional(total, total_now);
        Ok(())
    };
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) |cuda| out(address, || cuda.cu_mem_alloc(bytes));
    fn cuMemFree_v2(address: u64) |cuda| cuda.cu_mem_free(address);
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: usize) |cuda|
        out(address, || cuda.cu_mem_alloc_async(bytes, stream));
    fn cuMemFreeAsync(address: u64, stream: usize) |cuda| cuda.cu_mem_free_async(address, stream);

    fn cuMemcpyHtoD_v2(to: u64, from: *const u8, bytes: usize) |cuda| cuda.cu_memcpy_htod(to, from, bytes);
    fn cuMemcpyDtoH_v2(to: *mut u8, from: u64, bytes: usize) |cuda| cuda.cu_memcpy_dtoh(to, from, bytes);
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) |cuda| cuda.cu_memcpy_dtod(to, from, bytes);
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, bytes: usize, stream: usize) |cuda|
        cuda.cu_memcpy_htod_async(to, from, bytes, stream);
    fn cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, bytes: usize, stream: usize) |cuda|
        cuda.cu_memcpy_dtoh_async(to, from, bytes, stream);
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) |cuda|
        cuda.cu_memcpy_dtod_async(to, from, bytes, stream);
    fn cuMemcpyPeerAsync(to: u64, _to_context: usize, from: u64, _from_context: usize, bytes: usize, stream: usize)
        |cuda| cuda.cu_memcpy_dtod_async(to, from, bytes, stream);
    fn cuMemsetD8_v2(to: u64, value: u8, bytes: usize) |cuda| cuda.cu_memset_d8(to, value, bytes);
    fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: usize) |cuda|
        cuda.cu_memset_d8_async(to, value, bytes, stream);

    fn cuMemHostRegister(address: *mut u8, bytes: usize, flags: u32) |cuda|
        cuda.cu_mem_host_register(address, bytes, flags);
    fn cuMemHostRegister_v2(address: *mut u8, bytes: usize, flags: u32) |cuda|
        instead_of_registering().unwrap_or_else(|| cuda.cu_mem_host_register(address, bytes, flags));
    fn cuMemHostUnregister(address: *mut u8) |cuda|
        instead_of_registering().unwrap_or_else(|| cuda.cu_mem_host_unregister(address));
    fn cuMemHostAlloc(address: *mut *mut u8, bytes: usize, flags: u32) |cuda|
        out(address, || cuda.cu_mem_host_alloc(bytes, flags));
    fn cuMemAllocHost_v2(address: *mut *mut u8, bytes: usize) |cuda|
        out(address, || cuda.cu_mem_host_alloc(bytes, 0));
    fn cuMemFreeHost(address: *mut u8) |cuda| cuda.cu_mem_free_host(address);
    fn cuMemAllocManaged(address: *mut u64, bytes: usize, flags: u32) |cuda|
        out(address, || cuda.cu_mem_alloc_managed(bytes, flags));
    fn cuMemAdvise(address: u64, bytes: usize, advice: u32, device: i32) |cuda|
        cuda.cu_mem_advise(address, bytes, advice, if device == CPU { (2, 0) } else { (1, device) });
    fn cuMemAdvise_v2(address: u64, bytes: usize, advice: u32, location: Location) |cuda|
        cuda.cu_mem_advise(address, bytes, advice, (location.kind, location.id));
    fn cuMemHostGetFlags(flags: *mut u32, address: *mut u8) |cuda|
        out(flags, || cuda.cu_mem_host_get_flags(address));
    fn cuMemHostGetDevicePointer_v2(device: *mut u64, address: *mut u8, flags: u32) |cuda|
        out(device, || cuda.cu_mem_host_get_device_pointer(address, flags));

    fn cuPointerGetAttribute(to: *mut c_void, attribute: u32, address: u64) |cuda| {
        if to.is_null() {
            return Err(INVALID_VALUE);
        }
        let value = cuda.cu_pointer_get_attribute(attribute, address)?;
        write_attribute(attribute, to, value);
        Ok(())
    };
    fn cuPointerGetAttributes(count: u32, attributes: *const u32, values: *const *mut c_void, address: u64) |cuda|
        all_attributes(cuda, count, attributes, values, address);
}

/// What `FAKE_CUDA_REFUSE` makes of a registration: a code, or with 0 a success that does nothing.
fn instead_of_registering() -> Option<Result<(), u32>> {
    let code: u32 = device::refusal()?;
    Some(if code == 0 { Ok(()) } else { Err(code) })
}

/// The plural query succeeds on memory that the driver does not know, with values that say so.
///
/// # Safety
///
/// `attributes` and `values` are NULL or hold `count` entries, each value pointer being valid.
unsafe fn all_attributes(
    cuda: &Cuda,
    count: u32,
    attributes: *const u32,
    values: *const *mut c_void,
    address: u64,
) -> Result<(), u32> {
    if count == 0 || attributes.is_null() || values.is_null() {
        return Err(INVALID_VALUE);
    }
    for index in 0..count as usize {
        // SAFETY: within the `count` entries of the contract.
        let attribute = unsafe { attributes.add(index).read() };
        // SAFETY: as above.
        let to = unsafe { values.add(index).read() };
        if to.is_null() {
            return Err(INVALID_VALUE);
        }
        let value = match (cuda.cu_pointer_get_attribute(attribute, address), attribute) {
            (Ok(value), _) => value,
            (Err(INVALID_VALUE), DEVICE_POINTER | HOST_POINTER) => address,
            (Err(INVALID_VALUE), CONTEXT | MEMORY_TYPE | IS_MANAGED | MAPPED | BUFFER_ID) => 0,
            (Err(INVALID_VALUE), DEVICE_ORDINAL) => -1_i64 as u64,
            (Err(INVALID_VALUE), RANGE_START | RANGE_SIZE) => continue,
            (Err(code), _) => return Err(code),
        };
        // SAFETY: not NULL, and valid for this attribute's type by the contract.
        unsafe { write_attribute(attribute, to, value) };
    }
    Ok(())
}

/// Writes a value in the width that the attribute has.
///
/// # Safety
///
/// `to` is valid for a write of that width.
unsafe fn write_attribute(attribute: u32, to: *mut c_void, value: u64) {
    match attribute {
        CONTEXT | DEVICE_POINTER | HOST_POINTER | BUFFER_ID | RANGE_START | RANGE_SIZE => {
            // SAFETY: these are pointers, sizes and 64-bit numbers.
            unsafe { to.cast::<u64>().write(value) };
        }
        _ => {
            // SAFETY: the others are enums, ints and booleans, which callers keep in an int.
            unsafe { to.cast::<u32>().write(value as u32) };
        }
    }
}
