//! A library's functions as a table of addresses, looked up in one opened library; here libcuda's.
//!
//! Why a table of our own and not the functions of `cudarc::driver::sys`: cudarc panics when the library
//! or a single symbol is missing, it opens whichever of its own candidates comes first, and its result
//! type is an enum, so that a code added by a newer driver would be undefined behaviour. Here a missing
//! library is an error, a missing optional symbol costs one feature, and a result is a `u32`. It also
//! means that the CUDA back end does not need the `cudarc` feature.

#![allow(unsafe_code)] // looks symbols up, gives them their types

use super::ladder::Kind;
use super::process::Entries;
use crate::error::CallError;
use libloading::Library;
use std::ffi::c_void;

const SUCCESS: u32 = 0;
const NOT_INITIALIZED: u32 = 3;

/// Declares a table of functions and how it is filled from an opened library.
macro_rules! entry_points {
    (
        $(#[$doc:meta])* $table:ident
        required { $($needed:ident = $needed_symbol:literal($($needed_argument:ty),*);)* }
        optional { $($extra:ident = $extra_symbol:literal($($extra_argument:ty),* $(,)?);)* }
    ) => {
        $(#[$doc])*
        pub(super) struct $table {
            $(pub(super) $needed: unsafe extern "C" fn($($needed_argument),*) -> u32,)*
            $(pub(super) $extra: Option<unsafe extern "C" fn($($extra_argument),*) -> u32>,)*
        }

        impl $table {
            /// The table of this library, or the name of a required function that it lacks.
            fn filled_from(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($needed: {
                        type Function = unsafe extern "C" fn($($needed_argument),*) -> u32;
                        // SAFETY: the type is the C prototype of this function.
                        let symbol = unsafe { library.get::<Function>($needed_symbol) };
                        *symbol.map_err(|_| $needed_symbol)?
                    },)*
                    $($extra: {
                        type Function = unsafe extern "C" fn($($extra_argument),*) -> u32;
                        // SAFETY: the type is the C prototype of this function.
                        let symbol = unsafe { library.get::<Function>($extra_symbol) };
                        symbol.ok().map(|found| *found)
                    },)*
                })
            }
        }
    };
}
pub(super) use entry_points;

/// `CUhostFn`, as the function of a user object.
pub(super) type UserObjectEnd = unsafe extern "C" fn(*mut c_void);

// Contexts, streams and events are pointers that are only passed back, so they are numbers here.
entry_points! {
    /// libcuda's functions as addresses; every result is a plain `CUresult` number.
    Table
    required {
        init = "cuInit"(u32);
        driver_version = "cuDriverGetVersion"(*mut i32);
        device_count = "cuDeviceGetCount"(*mut i32);
        device = "cuDeviceGet"(*mut i32, i32);
        device_attribute = "cuDeviceGetAttribute"(*mut i32, i32, i32);
        primary_retain = "cuDevicePrimaryCtxRetain"(*mut usize, i32);
        primary_release = "cuDevicePrimaryCtxRelease_v2"(i32);
        primary_state = "cuDevicePrimaryCtxGetState"(i32, *mut u32, *mut i32);
        context_current = "cuCtxGetCurrent"(*mut usize);
        context_set_current = "cuCtxSetCurrent"(usize);
        context_device = "cuCtxGetDevice"(*mut i32);
        context_synchronize = "cuCtxSynchronize"();
        event_create = "cuEventCreate"(*mut usize, u32);
        event_record = "cuEventRecord"(usize, usize);
        event_query = "cuEventQuery"(usize);
        event_destroy = "cuEventDestroy_v2"(usize);
        host_register = "cuMemHostRegister_v2"(usize, usize, u32);
        host_unregister = "cuMemHostUnregister"(usize);
    }
    optional {
        stream_is_capturing = "cuStreamIsCapturing"(usize, *mut u32);
        stream_id = "cuStreamGetId"(usize, *mut u64);
        context_id = "cuCtxGetId"(usize, *mut u64);
        capture_info_v2 = "cuStreamGetCaptureInfo_v2"(
            usize, *mut u32, *mut u64, *mut usize, *mut *const usize, *mut usize);
        capture_info_v3 = "cuStreamGetCaptureInfo_v3"(
            usize, *mut u32, *mut u64, *mut usize, *mut *const usize, *mut *const usize, *mut usize);
        user_object_create = "cuUserObjectCreate"(*mut usize, *mut c_void, UserObjectEnd, u32, u32);
        user_object_release = "cuUserObjectRelease"(usize, u32);
        graph_retain_user_object = "cuGraphRetainUserObject"(usize, usize, u32, u32);
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(*mut u32);
        pointer_attributes = "cuPointerGetAttributes"(u32, *const u32, *const *mut u64, u64);
        host_alloc = "cuMemHostAlloc"(*mut usize, usize, u32);
        host_free = "cuMemFreeHost"(usize);
        managed_alloc = "cuMemAllocManaged"(*mut u64, usize, u32);
        free = "cuMemFree_v2"(u64);
        advise = "cuMemAdvise"(u64, usize, u32, i32);
        advise_v2 = "cuMemAdvise_v2"(u64, usize, u32, MemoryLocation);
        context_create = "cuCtxCreate_v2"(*mut usize, u32, i32);
        context_pop = "cuCtxPopCurrent_v2"(*mut usize);
        context_destroy = "cuCtxDestroy_v2"(usize);
    }
}

/// `CUmemLocation`: a kind of place, and which of them.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct MemoryLocation {
    pub(super) kind: i32,
    pub(super) id: i32,
}

impl Entries for Table {
    fn of(library: &Library) -> Result<Self, String> {
        Self::filled_from(library)
            .map_err(|symbol| format!("is no {}: it lacks {symbol}", Kind::Driver.stem()))
    }

    fn address(&self) -> usize {
        self.init as usize
    }

    /// `cuDriverGetVersion`, which works before `cuInit`.
    fn version(&self) -> Result<u32, CallError> {
        let mut version = 0;
        // SAFETY: cuDriverGetVersion writes one int, and works before cuInit.
        match unsafe { (self.driver_version)(&mut version) } {
            SUCCESS => Ok(version.unsigned_abs()),
            code => Err(CallError::new("cuDriverGetVersion", code)),
        }
    }

    /// Whether somebody in this process has called `cuInit`.
    fn is_initialized(&self) -> bool {
        let mut context = 0;
        // SAFETY: cuCtxGetCurrent writes one pointer, and answers 3 before cuInit.
        let code = unsafe { (self.context_current)(&mut context) };
        code != NOT_INITIALIZED
    }

    /// `cuInit(0)`.
    fn initialize(&self) -> Result<(), CallError> {
        // SAFETY: cuInit takes flags, which must be 0, and may be called from any thread, several times.
        match unsafe { (self.init)(0) } {
            SUCCESS => Ok(()),
            code => Err(CallError::new("cuInit", code)),
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::driver::ladder::How;
    use crate::driver::library;

    #[test]
    fn a_driver_that_lacks_what_is_not_needed_is_accepted() {
        let mut file =
            fake_cuda::control::Control::find().expect("cargo builds the libraries beside the tests");
        file.set_file_name("libfake_stub.so");
        let older = library::open(How::Load, file.as_os_str()).unwrap();
        let table = Table::of(&older).unwrap_or_else(|reason| panic!("{reason}"));
        assert!(table.pointer_attributes.is_none() && table.stream_is_capturing.is_none());
        assert!(table.exchange_capture_mode.is_none());
        assert_eq!(
            table.version().unwrap_err().to_string(),
            "cuDriverGetVersion: CUDA_ERROR_STUB_LIBRARY (34)"
        );
    }
}
