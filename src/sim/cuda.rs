//! The signatures of the simulated driver; bodies follow.
#![allow(unsafe_code, missing_docs, clippy::missing_safety_doc)]

use super::core::Core;
use std::sync::Arc;

/// libcuda's entry points as Rust methods; for building a fake libcuda or writing conformance tests.
pub struct Cuda {
    pub(super) core: Arc<Core>,
}

#[allow(unused_variables)]
impl Cuda {
    /// `cuInit`.
    pub fn cu_init(&self, flags: u32) -> Result<(), u32> {
        todo!()
    }
    /// `cuDriverGetVersion`.
    pub fn cu_driver_get_version(&self) -> Result<i32, u32> {
        todo!()
    }
    /// `cuDeviceGetCount`.
    pub fn cu_device_get_count(&self) -> Result<i32, u32> {
        todo!()
    }
    /// `cuDeviceGet`.
    pub fn cu_device_get(&self, ordinal: i32) -> Result<i32, u32> {
        todo!()
    }
    /// `cuDeviceGetName`.
    pub fn cu_device_get_name(&self, device: i32) -> Result<String, u32> {
        todo!()
    }
    /// `cuDeviceGetUuid`.
    pub fn cu_device_get_uuid(&self, device: i32) -> Result<[u8; 16], u32> {
        todo!()
    }
    /// `cuDeviceTotalMem`.
    pub fn cu_device_total_mem(&self, device: i32) -> Result<usize, u32> {
        todo!()
    }
    /// `cuDeviceGetAttribute`.
    pub fn cu_device_get_attribute(&self, attribute: i32, device: i32) -> Result<i32, u32> {
        todo!()
    }
    /// `cuDevicePrimaryCtxRetain`.
    pub fn cu_device_primary_ctx_retain(&self, device: i32) -> Result<usize, u32> {
        todo!()
    }
    /// `cuDevicePrimaryCtxRelease`.
    pub fn cu_device_primary_ctx_release(&self, device: i32) -> Result<(), u32> {
        todo!()
    }
    /// `cuDevicePrimaryCtxReset`.
    pub fn cu_device_primary_ctx_reset(&self, device: i32) -> Result<(), u32> {
        todo!()
    }
    /// `cuDevicePrimaryCtxGetState`.
    pub fn cu_device_primary_ctx_get_state(&self, device: i32) -> Result<(u32, bool), u32> {
        todo!()
    }
    /// `cuCtxCreate`.
    pub fn cu_ctx_create(&self, flags: u32, device: i32) -> Result<usize, u32> {
        todo!()
    }
    /// `cuCtxDestroy`.
    pub fn cu_ctx_destroy(&self, context: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuCtxGetCurrent`.
    pub fn cu_ctx_get_current(&self) -> Result<usize, u32> {
        todo!()
    }
    /// `cuCtxSetCurrent`.
    pub fn cu_ctx_set_current(&self, context: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuCtxPushCurrent`.
    pub fn cu_ctx_push_current(&self, context: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuCtxPopCurrent`.
    pub fn cu_ctx_pop_current(&self) -> Result<usize, u32> {
        todo!()
    }
    /// `cuCtxGetDevice`.
    pub fn cu_ctx_get_device(&self) -> Result<i32, u32> {
        todo!()
    }
    /// `cuCtxSynchronize`.
    pub fn cu_ctx_synchronize(&self) -> Result<(), u32> {
        todo!()
    }
    /// `cuCtxGetApiVersion`.
    pub fn cu_ctx_get_api_version(&self, context: usize) -> Result<u32, u32> {
        todo!()
    }
    /// `cuMemGetInfo`.
    pub fn cu_mem_get_info(&self) -> Result<(usize, usize), u32> {
        todo!()
    }
    /// `cuMemAlloc`.
    pub fn cu_mem_alloc(&self, bytes: usize) -> Result<u64, u32> {
        todo!()
    }
    /// `cuMemFree`.
    pub fn cu_mem_free(&self, address: u64) -> Result<(), u32> {
        todo!()
    }
    /// `cuMemAllocAsync`.
    pub fn cu_mem_alloc_async(&self, bytes: usize, stream: usize) -> Result<u64, u32> {
        todo!()
    }
    /// `cuMemFreeAsync`.
    pub fn cu_mem_free_async(&self, address: u64, stream: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuMemcpyHtoD`.
    pub unsafe fn cu_memcpy_htod(&self, dst: u64, src: *const u8, bytes: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuMemcpyDtoH`.
    pub unsafe fn cu_memcpy_dtoh(&self, dst: *mut u8, src: u64, bytes: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuMemcpyHtoDAsync`.
    pub unsafe fn cu_memcpy_htod_async(
        &self,
        dst: u64,
        src: *const u8,
        bytes: usize,
        stream: usize,
    ) -> Result<(), u32> {
        todo!()
    }
    /// `cuMemcpyDtoHAsync`.
    pub unsafe fn cu_memcpy_dtoh_async(
        &self,
        dst: *mut u8,
        src: u64,
        bytes: usize,
        stream: usize,
    ) -> Result<(), u32> {
        todo!()
    }
    /// `cuMemcpyDtoD`.
    pub fn cu_memcpy_dtod(&self, dst: u64, src: u64, bytes: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuMemcpyDtoDAsync`.
    pub fn cu_memcpy_dtod_async(&self, dst: u64, src: u64, bytes: usize, stream: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuMemsetD8`.
    pub fn cu_memset_d8(&self, dst: u64, value: u8, bytes: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuMemsetD8Async`.
    pub fn cu_memset_d8_async(&self, dst: u64, value: u8, bytes: usize, stream: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuMemHostRegister`.
    pub fn cu_mem_host_register(&self, address: *mut u8, bytes: usize, flags: u32) -> Result<(), u32> {
        todo!()
    }
    /// `cuMemHostUnregister`.
    pub fn cu_mem_host_unregister(&self, address: *mut u8) -> Result<(), u32> {
        todo!()
    }
    /// `cuMemHostAlloc`.
    pub fn cu_mem_host_alloc(&self, bytes: usize, flags: u32) -> Result<*mut u8, u32> {
        todo!()
    }
    /// `cuMemFreeHost`.
    pub fn cu_mem_free_host(&self, address: *mut u8) -> Result<(), u32> {
        todo!()
    }
    /// `cuMemHostGetFlags`.
    pub fn cu_mem_host_get_flags(&self, address: *mut u8) -> Result<u32, u32> {
        todo!()
    }
    /// `cuMemHostGetDevicePointer`.
    pub fn cu_mem_host_get_device_pointer(&self, address: *mut u8, flags: u32) -> Result<u64, u32> {
        todo!()
    }
    /// `cuPointerGetAttribute`.
    pub fn cu_pointer_get_attribute(&self, attribute: u32, address: u64) -> Result<u64, u32> {
        todo!()
    }
    /// `cuStreamCreate`.
    pub fn cu_stream_create(&self, flags: u32) -> Result<usize, u32> {
        todo!()
    }
    /// `cuStreamCreateWithPriority`.
    pub fn cu_stream_create_with_priority(&self, flags: u32, priority: i32) -> Result<usize, u32> {
        todo!()
    }
    /// `cuStreamDestroy`.
    pub fn cu_stream_destroy(&self, stream: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuStreamQuery`.
    pub fn cu_stream_query(&self, stream: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuStreamSynchronize`.
    pub fn cu_stream_synchronize(&self, stream: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuStreamWaitEvent`.
    pub fn cu_stream_wait_event(&self, stream: usize, event: usize, flags: u32) -> Result<(), u32> {
        todo!()
    }
    /// `cuStreamIsCapturing`.
    pub fn cu_stream_is_capturing(&self, stream: usize) -> Result<u32, u32> {
        todo!()
    }
    /// `cuStreamGetId`.
    pub fn cu_stream_get_id(&self, stream: usize) -> Result<u64, u32> {
        todo!()
    }
    /// `cuStreamGetCtx`.
    pub fn cu_stream_get_ctx(&self, stream: usize) -> Result<usize, u32> {
        todo!()
    }
    /// `cuEventCreate`.
    pub fn cu_event_create(&self, flags: u32) -> Result<usize, u32> {
        todo!()
    }
    /// `cuEventRecord`.
    pub fn cu_event_record(&self, event: usize, stream: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuEventQuery`.
    pub fn cu_event_query(&self, event: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuEventSynchronize`.
    pub fn cu_event_synchronize(&self, event: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuEventDestroy`.
    pub fn cu_event_destroy(&self, event: usize) -> Result<(), u32> {
        todo!()
    }
    /// `cuEventElapsedTime`.
    pub fn cu_event_elapsed_time(&self, start: usize, end: usize) -> Result<f32, u32> {
        todo!()
    }
    /// `cuThreadExchangeStreamCaptureMode`.
    pub fn cu_thread_exchange_stream_capture_mode(&self, mode: u32) -> Result<u32, u32> {
        todo!()
    }
    /// `cuLaunchHostFunc`.
    pub fn cu_launch_host_func(&self, stream: usize, function: Box<dyn FnOnce() + Send>) -> Result<(), u32> {
        todo!()
    }
}
