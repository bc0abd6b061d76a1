//! Initialisation, devices and contexts.

use super::{exports, out, out_optional};
use std::ffi::{c_char, c_void};

exports! { functions:
    fn cuInit(flags: u32) |cuda| cuda.cu_init(flags).inspect(|()| crate::process::initialised());
    fn cuDriverGetVersion(version: *mut i32) |cuda| out(version, || cuda.cu_driver_get_version());

    fn cuDeviceGetCount(count: *mut i32) |cuda| out(count, || cuda.cu_device_get_count());
    fn cuDeviceGet(device: *mut i32, ordinal: i32) |cuda| out(device, || cuda.cu_device_get(ordinal));
    fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) |cuda|
        out(value, || cuda.cu_device_get_attribute(attribute, device));
    fn cuDeviceGetName(name: *mut c_char, capacity: i32, device: i32) |cuda| {
        let text = cuda.cu_device_get_name(device)?;
        copy_text(&text, name, capacity)
    };
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32) |cuda| out(uuid, || cuda.cu_device_get_uuid(device));
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) |cuda| out(uuid, || cuda.cu_device_get_uuid(device));
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) |cuda| out(bytes, || cuda.cu_device_total_mem(device));

    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) |cuda|
        out(context, || cuda.cu_device_primary_ctx_retain(device));
    fn cuDevicePrimaryCtxRelease(device: i32) |cuda| cuda.cu_device_primary_ctx_release(device);
    fn cuDevicePrimaryCtxRelease_v2(device: i32) |cuda| cuda.cu_device_primary_ctx_release(device);
    fn cuDevicePrimaryCtxReset(device: i32) |cuda| cuda.cu_device_primary_ctx_reset(device);
    fn cuDevicePrimaryCtxReset_v2(device: i32) |cuda| cuda.cu_device_primary_ctx_reset(device);
    fn cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) |cuda| {
        let (flags_now, active_now) = cuda.cu_device_primary_ctx_get_state(device)?;
        out_optional(flags, flags_now);
        out(active, || Ok(i32::from(active_now)))
    };

    fn cuCtxCreate_v2(context: *mut usize, flags: u32, device: i32) |cuda|
        out(context, || cuda.cu_ctx_create(flags, device));
    fn cuCtxCreate_v3(context: *mut usize, _affinity: *const c_void, _count: i32, flags: u32, device: i32) |cuda|
        out(context, || cuda.cu_ctx_create(flags, device));
    fn cuCtxCreate_v4(context: *mut usize, _parameters: *const c_void, flags: u32, device: i32) |cuda|
        out(context, || cuda.cu_ctx_create(flags, device));
    fn cuCtxDestroy_v2(context: usize) |cuda| cuda.cu_ctx_destroy(context);
    fn cuCtxGetCurrent(context: *mut usize) |cuda| out(context, || cuda.cu_ctx_get_current());
    fn cuCtxSetCurrent(context: usize) |cuda| cuda.cu_ctx_set_current(context);
    fn cuCtxPushCurrent_v2(context: usize) |cuda| cuda.cu_ctx_push_current(context);
    fn cuCtxPopCurrent_v2(context: *mut usize) |cuda| {
        let popped = cuda.cu_ctx_pop_current()?;
        out_optional(context, popped);
        Ok(())
    };
    fn cuCtxGetDevice(device: *mut i32) |cuda| out(device, || cuda.cu_ctx_get_device());
    fn cuCtxSynchronize() |cuda| cuda.cu_ctx_synchronize();
    fn cuCtxGetId(context: usize, id: *mut u64) |cuda| out(id, || cuda.cu_ctx_get_id(context));
    fn cuCtxGetApiVersion(context: usize, version: *mut u32) |cuda|
        out(version, || cuda.cu_ctx_get_api_version(context));

    // Settings of a context that have no effect on a simulated one: accepted where a context is current.
    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) |cuda| {
        cuda.cu_ctx_get_device()?;
        out_optional(least, 0);
        out_optional(greatest, -5);
        Ok(())
    };
    fn cuCtxGetLimit(value: *mut usize, _limit: u32) |cuda| out(value, || cuda.cu_ctx_get_device().map(|_| 0));
    fn cuCtxSetLimit(_limit: u32, _value: usize) |cuda| cuda.cu_ctx_get_device().map(drop);
    fn cuCtxGetCacheConfig(value: *mut u32) |cuda| out(value, || cuda.cu_ctx_get_device().map(|_| 0));
    fn cuCtxSetCacheConfig(_value: u32) |cuda| cuda.cu_ctx_get_device().map(drop);
    fn cuCtxGetFlags(value: *mut u32) |cuda| out(value, || cuda.cu_ctx_get_device().map(|_| 0));
    fn cuCtxSetFlags(_value: u32) |cuda| cuda.cu_ctx_get_device().map(drop);
    fn cuProfilerStart() |cuda| cuda.cu_ctx_get_device().map(drop);
    fn cuProfilerStop() |cuda| cuda.cu_ctx_get_device().map(drop);
}

/// Copies as much of the text as fits, always with a terminating zero, as `cuDeviceGetName` does.
///
/// # Safety
///
/// `to` is NULL or valid for `capacity` bytes.
unsafe fn copy_text(text: &str, to: *mut c_char, capacity: i32) -> Result<(), u32> {
    let Some(room) = usize::try_from(capacity).ok().and_then(|capacity| capacity.checked_sub(1)) else {
        return Err(super::INVALID_VALUE);
    };
    if to.is_null() {
        return Err(super::INVALID_VALUE);
    }
    let bytes = &text.as_bytes()[..text.len().min(room)];
    // SAFETY: `bytes` and the zero after them fit in the `capacity` bytes of the contract.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len()) };
    // SAFETY: as above.
    unsafe { to.add(bytes.len()).write(0) };
    Ok(())
}
