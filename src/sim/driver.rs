//! The pool's seam over the simulated device: the same counted, faultable entry points, plus the checks.

use super::calls::Call;
use super::checks::{Access, Origin};
use super::cuda::Cuda;
use crate::driver::{
    CaptureMode, ContextHandle, DriverApi, DriverIdentity, EventHandle, HostAccess, StreamHandle,
};
use crate::error::{CallError, Error};
use std::sync::atomic::Ordering;

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;
/// `CU_MEMHOSTREGISTER_PORTABLE`.
const PORTABLE: u32 = 1;
const PAGEABLE_MEMORY_ACCESS: i32 = 88;
const PAGEABLE_ACCESS_BY_HOST_TABLES: i32 = 100;
const MEMORY_TYPE: u32 = 2;
const MEMORY_TYPE_HOST: u64 = 1;

#[derive(Debug)]
pub(super) struct SimDriver {
    pub(super) cuda: Cuda,
}

/// Names the call that failed.
fn named<T>(call: Call, result: Result<T, u32>) -> Result<T, CallError> {
    result.map_err(|code| CallError::new(call.symbol(), code))
}

/// How every simulated device shows itself to the pool.
pub(super) fn identity(cuda: &Cuda) -> DriverIdentity {
    DriverIdentity { name: "simulated", instance: cuda.core().instance }
}

impl DriverApi for SimDriver {
    fn identity(&self) -> DriverIdentity {
        identity(&self.cuda)
    }

    fn is_in_use(&self) -> bool {
        self.cuda.core().is_initialised.load(Ordering::Acquire)
    }

    fn prepare(&self) -> Result<(), Error> {
        if self.is_in_use() {
            return Ok(());
        }
        Ok(named(Call::Init, self.cuda.cu_init(0))?)
    }

    fn current_context(&self) -> Option<ContextHandle> {
        if !self.is_in_use() {
            return None;
        }
        self.cuda.cu_ctx_get_current().ok().filter(|context| *context != 0).map(ContextHandle)
    }

    fn set_current_context(&self, context: Option<ContextHandle>) -> Result<(), CallError> {
        let handle = context.map_or(0, |context| context.0);
        named(Call::CtxSetCurrent, self.cuda.cu_ctx_set_current(handle))
    }

    fn current_device(&self) -> Result<i32, CallError> {
        named(Call::CtxGetDevice, self.cuda.cu_ctx_get_device())
    }

    fn active_primary_devices(&self) -> Result<Vec<i32>, CallError> {
        let mut active = Vec::new();
        for device in 0..named(Call::DeviceGetCount, self.cuda.cu_device_get_count())? {
            let state = self.cuda.cu_device_primary_ctx_get_state(device);
            let (_, is_active) = named(Call::PrimaryGetState, state)?;
            active.extend(is_active.then_some(device));
        }
        Ok(active)
    }

    fn retain_primary(&self, device: i32) -> Result<ContextHandle, CallError> {
        let retained = self.cuda.cu_device_primary_ctx_retain(device);
        named(Call::PrimaryRetain, retained).map(ContextHandle)
    }

    fn release_primary(&self, device: i32) -> Result<(), CallError> {
        named(Call::PrimaryRelease, self.cuda.cu_device_primary_ctx_release(device))
    }

    fn synchronize_context(&self) -> Result<(), CallError> {
        named(Call::CtxSynchronize, self.cuda.cu_ctx_synchronize())
    }

    fn reads_pageable_memory(&self, device: i32) -> Result<bool, CallError> {
        let ask =
            |attribute| named(Call::DeviceGetAttribute, self.cuda.cu_device_get_attribute(attribute, device));
        Ok(ask(PAGEABLE_MEMORY_ACCESS)? != 0 || ask(PAGEABLE_ACCESS_BY_HOST_TABLES)? != 0)
    }

    fn create_event(&self) -> Result<EventHandle, CallError> {
        named(Call::EventCreate, self.cuda.cu_event_create(DISABLE_TIMING)).map(EventHandle)
    }

    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CallError> {
        let recorded = self.cuda.core().record_event(Origin::Pool, event.0, stream.0);
        named(Call::EventRecord, recorded)
    }

    fn query_event(&self, event: EventHandle) -> Result<bool, CallError> {
        match self.cuda.cu_event_query(event.0) {
            Ok(()) => Ok(true),
            Err(super::codes::NOT_READY) => Ok(false),
            Err(code) => named(Call::EventQuery, Err(code)),
        }
    }

    fn destroy_event(&self, event: EventHandle) -> Result<(), CallError> {
        named(Call::EventDestroy, self.cuda.core().destroy_event(Origin::Pool, event.0))
    }

    fn is_capturing(&self, stream: StreamHandle) -> Result<bool, CallError> {
        let status = self.cuda.cu_stream_is_capturing(stream.0);
        named(Call::StreamIsCapturing, status).map(|status| status != 0)
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode, CallError> {
        let old = self.cuda.cu_thread_exchange_stream_capture_mode(mode as u32);
        named(Call::ThreadExchangeCaptureMode, old).map(|old| match old {
            0 => CaptureMode::Global,
            1 => CaptureMode::ThreadLocal,
            _ => CaptureMode::Relaxed,
        })
    }

    fn register(&self, base: usize, bytes: usize) -> Result<(), CallError> {
        let registered = self.cuda.cu_mem_host_register(base as *mut u8, bytes, PORTABLE);
        named(Call::MemHostRegister, registered)
    }

    fn unregister(&self, base: usize) -> Result<(), CallError> {
        named(Call::MemHostUnregister, self.cuda.cu_mem_host_unregister(base as *mut u8))
    }

    fn is_page_locked(&self, address: usize) -> Result<bool, CallError> {
        match self.cuda.cu_pointer_get_attribute(MEMORY_TYPE, address as u64) {
            Ok(kind) => Ok(kind == MEMORY_TYPE_HOST),
            // Plain memory, of which the driver knows nothing.
            Err(super::codes::INVALID_VALUE) => Ok(false),
            Err(code) => named(Call::PointerGetAttribute, Err(code)),
        }
    }

    fn before_host_access(&self, access: HostAccess, base: usize, bytes: usize) {
        self.cuda.core().before_host_access(Access::from(access), base, bytes);
    }
}
