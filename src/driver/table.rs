//! libcuda's functions as a table of addresses, looked up in one opened library.
//!
//! Why a table of our own and not the functions of `cudarc::driver::sys`: cudarc panics when the library
//! or a single symbol is missing, it opens whichever of its own candidates comes first, and its result
//! type is an enum, so that a code added by a newer driver would be undefined behaviour. Here a missing
//! library is an error, a missing optional symbol costs one feature, and a result is a `u32`. It also
//! means that the CUDA back end does not need the `cudarc` feature.

#![allow(unsafe_code)] // looks symbols up, gives them their types

use libloading::Library;

const SUCCESS: u32 = 0;
const NOT_INITIALIZED: u32 = 3;
/// What every function of the toolkit's link-time stub answers.
pub(super) const STUB_LIBRARY: u32 = 34;

/// Declares the table of driver functions and how it is filled from an opened library.
macro_rules! entry_points {
    (
        required { $($needed:ident = $needed_symbol:literal($($needed_argument:ty),*);)* }
        optional { $($extra:ident = $extra_symbol:literal($($extra_argument:ty),*);)* }
    ) => {
        /// libcuda's functions as addresses; every result is a plain `CUresult` number.
        pub(super) struct Table {
            $(pub(super) $needed: unsafe extern "C" fn($($needed_argument),*) -> u32,)*
            $(pub(super) $extra: Option<unsafe extern "C" fn($($extra_argument),*) -> u32>,)*
        }

        impl Table {
            /// The table of this library, or the name of a required function that it lacks.
            pub(super) fn of(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($needed: {
                        type Function = unsafe extern "C" fn($($needed_argument),*) -> u32;
                        // SAFETY: the type is the C prototype of this driver function.
                        let symbol = unsafe { library.get::<Function>($needed_symbol) };
                        *symbol.map_err(|_| $needed_symbol)?
                    },)*
                    $($extra: {
                        type Function = unsafe extern "C" fn($($extra_argument),*) -> u32;
                        // SAFETY: the type is the C prototype of this driver function.
                        let symbol = unsafe { library.get::<Function>($extra_symbol) };
                        symbol.ok().map(|found| *found)
                    },)*
                })
            }
        }
    };
}

// Contexts, streams and events are pointers that are only passed back, so they are numbers here.
entry_points! {
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
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(*mut u32);
        pointer_attributes = "cuPointerGetAttributes"(u32, *const u32, *const *mut u64, u64);
    }
}

impl Table {
    /// `cuDriverGetVersion`, which works before `cuInit`; the error is the result code.
    pub(super) fn version(&self) -> Result<i32, u32> {
        let mut version = 0;
        // SAFETY: cuDriverGetVersion writes one int, and works before cuInit.
        match unsafe { (self.driver_version)(&mut version) } {
            SUCCESS => Ok(version),
            code => Err(code),
        }
    }

    /// Whether somebody in this process has called `cuInit`.
    pub(super) fn is_initialized(&self) -> bool {
        let mut context = 0;
        // SAFETY: cuCtxGetCurrent writes one pointer, and answers 3 before cuInit.
        let code = unsafe { (self.context_current)(&mut context) };
        code != NOT_INITIALIZED
    }

    /// `cuInit(0)`; the error is the result code.
    pub(super) fn initialize(&self) -> Result<(), u32> {
        // SAFETY: cuInit takes flags, which must be 0, and may be called from any thread, several times.
        match unsafe { (self.init)(0) } {
            SUCCESS => Ok(()),
            code => Err(code),
        }
    }
}
