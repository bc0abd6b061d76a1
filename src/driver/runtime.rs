//! The seam over libcudart, for a process that carries a runtime and no driver library of its own.
//!
//! The runtime speaks of devices where the driver speaks of contexts: here the context of device `d` is the
//! number `d + 1`. What that costs:
//!
//! * The runtime cannot say which devices the application uses without using them itself. Where a libcuda is in
//!   use in the process (NVIDIA's runtime loads one), that is asked. Where none is (a runtime that forwards to
//!   another machine), the pool knows the devices that it was shown, by a stream or by
//!   [`PoolBuilder::context_of`](crate::PoolBuilder::context_of), and no others.
//! * A caller's thread whose current device nobody uses is set back to it after a call for another device, and
//!   since CUDA 12 that makes a context there. The pool's own threads are not set back.
//! * It holds no context alive: after `cudaDeviceReset` the registrations are gone, and so are the events.
//! * A failed call leaves an error on its thread, which an application would find at its next
//!   `cudaGetLastError`. Every failure here is taken back, unless one was there before: then it finds the newer.

#![allow(unsafe_code)] // calls the runtime

use super::ladder::Request;
use super::process::{DRIVER, RUNTIME};
use super::runtime_table::{PointerAttributes, RuntimeTable};
use super::{
    CaptureMode, ContextHandle, DriverApi, DriverIdentity, EventHandle, LibraryReport, StreamHandle,
};
use crate::error::{CallError, Error};
use crate::os::is_background_thread;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

const SUCCESS: u32 = 0;
const INITIALIZATION_ERROR: u32 = 3;
const INVALID_DEVICE: u32 = 101;
const NOT_READY: u32 = 600;
const NOT_SUPPORTED: u32 = 801;

const EVENT_DISABLE_TIMING: u32 = 2;
const HOST_REGISTER_PORTABLE: u32 = 1;
const ATTRIBUTE_PAGEABLE_ACCESS: i32 = 88;
const ATTRIBUTE_HOST_PAGE_TABLES: i32 = 100;
const MEMORY_TYPE_HOST: u32 = 1;

/// Devices that can be noted: one bit each.
const DEVICES_MAX: i32 = 64;

/// The devices that were shown to the pool, one bit each; of the process, like the runtime itself.
static SHOWN_DEVICES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The device that this thread had before the pool changed it, when that device is not in use: the
    /// seam says "no context" for it, and must find back.
    static DEVICE_BEFORE: Cell<Option<i32>> = const { Cell::new(None) };
}

/// libcudart, where it was chosen in place of libcuda.
#[derive(Debug, Default)]
pub(super) struct RuntimeDriver {
    request: Request,
}

impl RuntimeDriver {
    pub(super) fn new(request: Request) -> Self {
        Self { request }
    }
}

/// The context that stands for a device.
pub(crate) fn context_of_device(device: i32) -> ContextHandle {
    ContextHandle(device.unsigned_abs() as usize + 1)
}

fn device_of(context: ContextHandle) -> i32 {
    i32::try_from(context.0 - 1).unwrap_or(i32::MAX)
}

pub(super) fn table(call: &'static str) -> Result<&'static RuntimeTable, CallError> {
    RUNTIME.table_in_use().ok_or(CallError::new(call, INITIALIZATION_ERROR))
}

impl RuntimeTable {
    /// Makes one call and takes its failure back from the thread, unless an earlier one is there.
    pub(super) fn call(&self, call: &'static str, function: impl FnOnce() -> u32) -> Result<(), CallError> {
        // SAFETY: cudaPeekAtLastError takes nothing and changes nothing.
        let before = unsafe { (self.peek_last_error)() };
        let code = function();
        if code == SUCCESS {
            return Ok(());
        }
        if before == SUCCESS {
            // SAFETY: cudaGetLastError takes nothing; it clears this thread's slot.
            unsafe { (self.take_last_error)() };
        }
        Err(CallError::new(call, code))
    }

    fn current_device(&self) -> Result<i32, CallError> {
        let mut device = 0;
        // SAFETY: cudaGetDevice writes one int and makes no context.
        self.call("cudaGetDevice", || unsafe { (self.device)(&mut device) })?;
        Ok(device)
    }

    fn make_current(&self, device: i32) -> Result<(), CallError> {
        if self.current_device() == Ok(device) {
            // Since CUDA 12 cudaSetDevice makes the device's context, even for the device that is set.
            return Ok(());
        }
        // SAFETY: cudaSetDevice takes a number; an unknown device is an error.
        self.call("cudaSetDevice", || unsafe { (self.set_device)(device) })
    }
}

fn shown_devices() -> Vec<i32> {
    let bits = SHOWN_DEVICES.load(Ordering::Relaxed);
    (0..DEVICES_MAX).filter(|device| bits & (1 << device) != 0).collect()
}

fn is_in_use(device: i32) -> bool {
    used_devices().contains(&device)
}

/// The devices that somebody uses: asked of the driver where one is in use, else those that were shown.
fn used_devices() -> Vec<i32> {
    let mut devices = shown_devices();
    if DRIVER.table_in_use().is_some() {
        let active = super::cuda::CudaDriver::default().active_primary_devices();
        devices.extend(active.unwrap_or_default());
        devices.sort_unstable();
        devices.dedup();
    }
    devices
}

impl DriverApi for RuntimeDriver {
    fn identity(&self) -> DriverIdentity {
        DriverIdentity::RUNTIME
    }

    fn is_in_use(&self) -> bool {
        RUNTIME.table_in_use().is_some()
    }

    fn is_inherited(&self) -> bool {
        RUNTIME.is_inherited()
    }

    fn prepare(&self) -> Result<(), Error> {
        RUNTIME.load_and_initialize(&self.request)
    }

    fn libraries(&self) -> Vec<LibraryReport> {
        let _ = self.prepare();
        vec![DRIVER.report(), RUNTIME.report()]
    }

    fn current_context(&self) -> Result<Option<ContextHandle>, CallError> {
        let Some(table) = RUNTIME.table_in_use() else { return Ok(None) };
        let device = table.current_device()?;
        Ok(is_in_use(device).then(|| context_of_device(device)))
    }

    fn set_current_context(&self, context: Option<ContextHandle>) -> Result<(), CallError> {
        let table = table("cudaSetDevice")?;
        let Some(context) = context else {
            return match DEVICE_BEFORE.take() {
                Some(device) => table.make_current(device),
                None => Ok(()),
            };
        };
        let (before, device) = (table.current_device()?, device_of(context));
        table.make_current(device)?;
        // A thread of the pool's own has nothing to find back to, and going back would make a context there.
        if before != device && !is_in_use(before) && !is_background_thread() {
            DEVICE_BEFORE.set(Some(before));
        }
        Ok(())
    }

    fn current_device(&self) -> Result<i32, CallError> {
        table("cudaGetDevice")?.current_device()
    }

    fn active_primary_devices(&self) -> Result<Vec<i32>, CallError> {
        Ok(used_devices())
    }

    /// Notes the device as used. The runtime has nothing to hold a context by.
    fn retain_primary(&self, device: i32) -> Result<ContextHandle, CallError> {
        if !(0..DEVICES_MAX).contains(&device) {
            return Err(CallError::new("cudaSetDevice", INVALID_DEVICE));
        }
        SHOWN_DEVICES.fetch_or(1 << device, Ordering::Relaxed);
        Ok(context_of_device(device))
    }

    fn release_primary(&self, _: i32) -> Result<(), CallError> {
        Ok(())
    }

    fn synchronize_context(&self) -> Result<(), CallError> {
        let table = table("cudaDeviceSynchronize")?;
        // SAFETY: cudaDeviceSynchronize takes nothing.
        table.call("cudaDeviceSynchronize", || unsafe { (table.device_synchronize)() })
    }

    fn reads_pageable_memory(&self, device: i32) -> Result<bool, CallError> {
        let table = table("cudaDeviceGetAttribute")?;
        for attribute in [ATTRIBUTE_PAGEABLE_ACCESS, ATTRIBUTE_HOST_PAGE_TABLES] {
            let mut value = 0;
            // SAFETY: cudaDeviceGetAttribute writes one int.
            let ask = || unsafe { (table.device_attribute)(&mut value, attribute, device) };
            table.call("cudaDeviceGetAttribute", ask)?;
            if value != 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn create_event(&self) -> Result<EventHandle, CallError> {
        let table = table("cudaEventCreateWithFlags")?;
        let mut event = 0;
        // SAFETY: cudaEventCreateWithFlags writes one pointer.
        let create = || unsafe { (table.event_create)(&mut event, EVENT_DISABLE_TIMING) };
        table.call("cudaEventCreateWithFlags", create)?;
        Ok(EventHandle(event))
    }

    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CallError> {
        let table = table("cudaEventRecord")?;
        // SAFETY: cudaEventRecord takes an event of ours and a stream that the caller holds.
        table.call("cudaEventRecord", || unsafe { (table.event_record)(event.0, stream.0) })
    }

    fn query_event(&self, event: EventHandle) -> Result<bool, CallError> {
        let table = table("cudaEventQuery")?;
        // SAFETY: cudaEventQuery takes an event of ours that was not destroyed. "Not ready" is a failure to
        // the runtime, so it is left on the thread too, and taken back.
        match table.call("cudaEventQuery", || unsafe { (table.event_query)(event.0) }) {
            Ok(()) => Ok(true),
            Err(error) if error.code() == NOT_READY => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn destroy_event(&self, event: EventHandle) -> Result<(), CallError> {
        let table = table("cudaEventDestroy")?;
        // SAFETY: cudaEventDestroy takes an event of ours, which its owner gives up here.
        table.call("cudaEventDestroy", || unsafe { (table.event_destroy)(event.0) })
    }

    fn is_capturing(&self, stream: StreamHandle) -> Result<bool, CallError> {
        let table = table("cudaStreamIsCapturing")?;
        let Some(is_capturing) = table.stream_is_capturing else { return Ok(false) };
        let mut status = 0;
        // SAFETY: cudaStreamIsCapturing takes a stream that the caller holds and writes one enum.
        table.call("cudaStreamIsCapturing", || unsafe { is_capturing(stream.0, &mut status) })?;
        Ok(status != 0)
    }

    /// Not asked: `cudaStreamGetId` came with CUDA 12, and who notes uses has the driver's streams.
    fn stream_id(&self, _: StreamHandle) -> Result<u64, CallError> {
        Err(CallError::new("cudaStreamGetId", NOT_SUPPORTED))
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode, CallError> {
        let table = table("cudaThreadExchangeStreamCaptureMode")?;
        let Some(exchange) = table.exchange_capture_mode else { return Ok(CaptureMode::Global) };
        let mut value = mode as u32;
        // SAFETY: cudaThreadExchangeStreamCaptureMode reads and writes one enum.
        table.call("cudaThreadExchangeStreamCaptureMode", || unsafe { exchange(&mut value) })?;
        Ok(CaptureMode::of(value))
    }

    fn register(&self, base: usize, bytes: usize) -> Result<(), CallError> {
        let table = table("cudaHostRegister")?;
        // SAFETY: cudaHostRegister validates the range; that it stays mapped is the duty of its owner.
        let register = || unsafe { (table.host_register)(base, bytes, HOST_REGISTER_PORTABLE) };
        table.call("cudaHostRegister", register)
    }

    fn unregister(&self, base: usize) -> Result<(), CallError> {
        let table = table("cudaHostUnregister")?;
        // SAFETY: cudaHostUnregister answers with an error for an address that is no registration's base.
        table.call("cudaHostUnregister", || unsafe { (table.host_unregister)(base) })
    }

    fn is_page_locked(&self, address: usize) -> Result<bool, CallError> {
        let table = table("cudaPointerGetAttributes")?;
        let mut attributes = PointerAttributes {
            memory_type: 0,
            device: 0,
            device_pointer: 0,
            host_pointer: 0,
            room: [0; 32],
        };
        // SAFETY: cudaPointerGetAttributes takes any address, and writes the structure, for which there is
        // room to spare.
        let ask = || unsafe { (table.pointer_attributes)(&mut attributes, address) };
        table.call("cudaPointerGetAttributes", ask)?;
        Ok(attributes.memory_type == MEMORY_TYPE_HOST)
    }
}
