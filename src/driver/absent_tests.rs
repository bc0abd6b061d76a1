//! Drivers without a device behind them: whatever is asked of them, the refusal names the call and says why.

use super::gate::Gate;
use super::memory::Attribute;
use super::{ContextHandle, Driver, EndFlag, EventHandle, GraphHandle, StreamHandle, UserObjectHandle};
use crate::error::CallError;

/// What every call of the seam that can be refused says, by the name of the driver's function.
pub(super) fn refusals(api: &Gate) -> Vec<(&'static str, Option<CallError>)> {
    let (stream, event, context) = (StreamHandle(0), EventHandle(1), ContextHandle(1));
    vec![
        ("cuCtxSetCurrent", api.set_current_context(Some(context)).err()),
        ("cuCtxGetDevice", api.current_device().err()),
        ("cuDevicePrimaryCtxRetain", api.retain_primary(0).err()),
        ("cuDevicePrimaryCtxRelease_v2", api.release_primary(0).err()),
        ("cuCtxSynchronize", api.synchronize_context().err()),
        ("cuEventCreate", api.create_event().err()),
        ("cuEventRecord", api.record_event(event, stream).err()),
        ("cuEventQuery", api.query_event(event).err()),
        ("cuEventDestroy_v2", api.destroy_event(event).err()),
        ("cuStreamGetId", api.stream_id(stream).err()),
        ("cuMemHostRegister_v2", api.register(4096, 4096).err()),
        ("cuMemHostUnregister", api.unregister(4096).err()),
    ]
}

/// The same for what a driver may lack.
pub(super) fn lacking(api: &Gate) -> Vec<(&'static str, Option<CallError>)> {
    let (stream, object) = (StreamHandle(0), UserObjectHandle(1));
    vec![
        ("cuStreamGetCaptureInfo_v2", api.capture_info(stream).err()),
        ("cuUserObjectCreate", api.create_user_object(EndFlag::new()).err()),
        ("cuGraphRetainUserObject", api.give_user_object(GraphHandle(1), object).err()),
        ("cuUserObjectRelease", api.release_user_object(object).err()),
        ("cuDeviceGetCount", api.device_count().err()),
        ("cuDeviceGetAttribute", api.attribute(Attribute::HostRegister, 0).err()),
        ("cuMemHostAlloc", api.allocate_host(4096, false).err()),
        ("cuMemFreeHost", api.free_host(4096).err()),
        ("cuMemAllocManaged", api.allocate_managed(4096).err()),
        ("cuMemFree_v2", api.free_managed(4096).err()),
        ("cuMemAdvise", api.prefer_device(4096, 4096, 0).err()),
        ("cuCtxCreate_v2", api.create_context(0).err()),
        ("cuCtxPopCurrent_v2", api.pop_context().err()),
        ("cuCtxDestroy_v2", api.destroy_context(ContextHandle(1)).err()),
    ]
}

/// Each refusal bears its call's name, and a code of these.
pub(super) fn check(refusals: Vec<(&'static str, Option<CallError>)>, codes: &[u32]) {
    for (call, refusal) in refusals {
        let refusal = refusal.unwrap_or_else(|| panic!("{call} is not refused"));
        assert_eq!(refusal.call(), call);
        assert!(codes.contains(&refusal.code()), "{refusal}");
    }
}

#[test]
fn without_a_device_every_call_is_refused_by_its_name() {
    let driver = Driver::host_only();
    let host = driver.api();
    check(refusals(host), &[100]);
    check(lacking(host), &[500, 801]);
    assert_eq!(host.reads_pageable_memory(0).unwrap_err().call(), "cuDeviceGetAttribute");
    assert_eq!(host.is_capturing(StreamHandle(0)).unwrap_err().call(), "cuStreamIsCapturing");
    // What only asks has its plain answer: nobody works on a device.
    assert_eq!((host.is_in_use(), host.is_inherited()), (false, false));
    assert_eq!((host.current_context(), host.active_primary_devices()), (Ok(None), Ok(vec![])));
    assert_eq!(host.is_page_locked(4096), Ok(false));
    assert!(host.prepare().is_err() && host.libraries().is_empty());
}
