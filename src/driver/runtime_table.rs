//! libcudart's functions as a table: the part of the runtime that a pool needs.

#![allow(unsafe_code)] // looks symbols up, gives them their types

use super::ladder::Kind;
use super::process::Entries;
use super::table::{MemoryLocation, entry_points};
use crate::error::CallError;
use libloading::Library;

const SUCCESS: u32 = 0;

/// Before CUDA 11 the structure of `cudaPointerGetAttributes` was another one.
const OLDEST_VERSION: i32 = 11000;

entry_points! {
    /// libcudart's functions as addresses; every result is a plain `cudaError_t` number.
    RuntimeTable
    required {
        runtime_version = "cudaRuntimeGetVersion"(*mut i32);
        device_count = "cudaGetDeviceCount"(*mut i32);
        device = "cudaGetDevice"(*mut i32);
        set_device = "cudaSetDevice"(i32);
        device_attribute = "cudaDeviceGetAttribute"(*mut i32, i32, i32);
        device_synchronize = "cudaDeviceSynchronize"();
        event_create = "cudaEventCreateWithFlags"(*mut usize, u32);
        event_record = "cudaEventRecord"(usize, usize);
        event_query = "cudaEventQuery"(usize);
        event_destroy = "cudaEventDestroy"(usize);
        host_register = "cudaHostRegister"(usize, usize, u32);
        host_unregister = "cudaHostUnregister"(usize);
        pointer_attributes = "cudaPointerGetAttributes"(*mut PointerAttributes, usize);
        peek_last_error = "cudaPeekAtLastError"();
        take_last_error = "cudaGetLastError"();
    }
    optional {
        stream_is_capturing = "cudaStreamIsCapturing"(usize, *mut u32);
        exchange_capture_mode = "cudaThreadExchangeStreamCaptureMode"(*mut u32);
        host_alloc = "cudaHostAlloc"(*mut usize, usize, u32);
        host_free = "cudaFreeHost"(usize);
        managed_alloc = "cudaMallocManaged"(*mut usize, usize, u32);
        free = "cudaFree"(usize);
        advise = "cudaMemAdvise"(usize, usize, u32, i32);
        advise_location = "cudaMemAdvise"(usize, usize, u32, MemoryLocation);
    }
}

/// `cudaPointerAttributes` since CUDA 11, with room for what later versions append.
#[repr(C)]
pub(super) struct PointerAttributes {
    pub(super) memory_type: u32,
    pub(super) device: i32,
    pub(super) device_pointer: usize,
    pub(super) host_pointer: usize,
    pub(super) room: [u64; 32],
}

impl Entries for RuntimeTable {
    fn of(library: &Library) -> Result<Self, String> {
        let table = Self::filled_from(library)
            .map_err(|symbol| format!("is no {}: it lacks {symbol}", Kind::Runtime.stem()))?;
        match table.version() {
            Ok(version) if version < OLDEST_VERSION.unsigned_abs() => {
                Err(format!("is too old: version {version}, and 11000 is needed"))
            }
            _ => Ok(table),
        }
    }

    fn address(&self) -> usize {
        self.runtime_version as usize
    }

    /// `cudaRuntimeGetVersion`, which needs no driver.
    fn version(&self) -> Result<u32, CallError> {
        let mut version = 0;
        // SAFETY: cudaRuntimeGetVersion writes one int and initialises nothing.
        match unsafe { (self.runtime_version)(&mut version) } {
            SUCCESS => Ok(version.unsigned_abs()),
            code => Err(CallError::new("cudaRuntimeGetVersion", code)),
        }
    }

    /// A runtime cannot be asked that without being initialised by the question; one that is loaded is
    /// taken to be in use.
    fn is_initialized(&self) -> bool {
        true
    }

    /// `cudaGetDeviceCount`, which loads and initialises the driver and makes no context.
    fn initialize(&self) -> Result<(), CallError> {
        let mut count = 0;
        // SAFETY: cudaGetDeviceCount writes one int.
        let code = unsafe { (self.device_count)(&mut count) };
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: cudaGetLastError clears what this thread's failed call left, so that the application's next
        // check does not find it.
        unsafe { (self.take_last_error)() };
        Err(CallError::new("cudaGetDeviceCount", code))
    }
}
