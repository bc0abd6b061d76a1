//! The seam over libcuda, called through a table of symbols of our own.
//!
//! Why a table and not the functions of `cudarc::driver::sys`: cudarc panics when the library or a
//! single symbol is missing, it opens whichever of its own candidates comes first, and its result
//! type is an enum, so that a code added by a newer driver would be undefined behaviour. Here a
//! missing library is an [`Error`], a missing optional symbol costs one feature, and a result is a
//! `u32`. It also means that this back end does not need the `cudarc` feature.
//!
//! One state for the process, as CUDA itself has. Two questions must not be confused:
//!
//! * Is CUDA *in use* (`is_in_use`)? A look at what is mapped, and at whether somebody has called
//!   `cuInit`; loads and initialises nothing.
//! * Make it usable (`prepare`): loads the library and calls `cuInit(0)`, at the first real need.
//!
//! No lock is taken on a call that a `take` or a `drop` can make: the table is behind a `OnceLock`.

#![allow(unsafe_code)]

use super::library::{self, Answer};
use super::{CaptureMode, ContextHandle, DriverApi, DriverIdentity, EventHandle, StreamHandle};
use crate::code_name::code_name;
use crate::error::{CallError, Error};
use libloading::Library;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What every handle and stream of CUDA carries, since a process has one CUDA.
pub(crate) const IDENTITY: DriverIdentity = DriverIdentity { name: "cuda", instance: 0 };

/// How long a failed `prepare` is believed before the libraries are looked for again.
const RETRY_AFTER: Duration = Duration::from_secs(10);

const SUCCESS: u32 = 0;
const NOT_INITIALIZED: u32 = 3;
const STUB_LIBRARY: u32 = 34;
const NOT_FOUND: u32 = 500;
const NOT_READY: u32 = 600;

const EVENT_DISABLE_TIMING: u32 = 2;
const HOST_REGISTER_PORTABLE: u32 = 1;
const ATTRIBUTE_PAGEABLE_ACCESS: i32 = 88;
const ATTRIBUTE_HOST_PAGE_TABLES: i32 = 100;
const POINTER_MEMORY_TYPE: u32 = 2;
const POINTER_IS_MANAGED: u32 = 8;
const MEMORY_TYPE_HOST: u32 = 1;

/// Declares the table of driver functions and how it is filled from an opened library.
macro_rules! entry_points {
    (
        required { $($needed:ident = $needed_symbol:literal($($needed_argument:ty),*);)* }
        optional { $($extra:ident = $extra_symbol:literal($($extra_argument:ty),*);)* }
    ) => {
        /// libcuda's functions as addresses; every result is a plain `CUresult` number.
        struct Table {
            $($needed: unsafe extern "C" fn($($needed_argument),*) -> u32,)*
            $($extra: Option<unsafe extern "C" fn($($extra_argument),*) -> u32>,)*
        }

        impl Table {
            /// The table of this library, or the name of a required function that it lacks.
            fn of(library: &Library) -> Result<Self, &'static str> {
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
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(*mut u32);
        pointer_attributes = "cuPointerGetAttributes"(u32, *const u32, *const *mut u64, u64);
    }
}

/// The state of CUDA in this process.
struct Process {
    /// The library whose functions are called; set once somebody initialised it.
    chosen: OnceLock<&'static Table>,
    /// A library that was found mapped although nobody has initialised it yet.
    mapped: OnceLock<&'static Table>,
    /// What [`library::loads_so_far`] said before the last probe that found nothing.
    loads_at_last_probe: AtomicU64,
    /// The last failure of `prepare`. Only `prepare` takes this lock, which is held while the
    /// library initialises so that two threads do not both do it; no `take` or `drop` wants it.
    failure: Mutex<Option<(Instant, String)>>,
}

static PROCESS: Process = Process {
    chosen: OnceLock::new(),
    mapped: OnceLock::new(),
    loads_at_last_probe: AtomicU64::new(0),
    failure: Mutex::new(None),
};

/// CUDA, whether it is in use already, can be loaded at need, or is not on this machine at all.
#[derive(Debug)]
pub(crate) struct CudaDriver;

impl Process {
    /// The table, if CUDA is in use; looks again for a library only when one was loaded since.
    fn table_in_use(&self) -> Option<&'static Table> {
        if let Some(table) = self.chosen.get() {
            return Some(table);
        }
        let table = self.mapped.get().copied().or_else(|| self.probe_mapped())?;
        if !table.is_initialized() {
            return None;
        }
        self.choose(table, "a library that the process uses already");
        self.chosen.get().copied()
    }

    fn probe_mapped(&self) -> Option<&'static Table> {
        let loads = library::loads_so_far();
        if self.loads_at_last_probe.load(Ordering::Acquire) == loads {
            return None;
        }
        let configured = library::configured_library();
        let rungs = library::mapped_ladder(configured.as_deref());
        match library::climb(&rungs, library::open, |opened, _| examine(opened)) {
            Ok((table, _)) => Some(self.mapped.get_or_init(|| table)),
            Err(_) => {
                // The counter was read first: a library loaded during the probe is looked at next time.
                self.loads_at_last_probe.store(loads, Ordering::Release);
                None
            }
        }
    }

    fn load_and_initialize(&self) -> Result<(), Error> {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if self.chosen.get().is_some() {
            return Ok(());
        }
        if let Some((when, report)) = &*failure
            && when.elapsed() < RETRY_AFTER
        {
            return Err(Error::NoCuda { report: report.clone() });
        }
        let configured = library::configured_library();
        let rungs = library::ladder(configured.as_deref());
        match library::climb(&rungs, library::open, |opened, _| examine_and_initialize(opened)) {
            Ok((table, file)) => {
                *failure = None;
                self.choose(table, &file.to_string_lossy());
                Ok(())
            }
            Err(report) => {
                if failure.is_none() {
                    tracing::warn!("pinpool page-locks nothing, since no CUDA driver can be used:\n{report}");
                }
                *failure = Some((Instant::now(), report.clone()));
                Err(Error::NoCuda { report })
            }
        }
    }

    fn choose(&self, table: &'static Table, library: &str) {
        if self.chosen.set(table).is_ok() {
            let version = table.version().unwrap_or(0);
            tracing::info!(library, version, "pinpool uses CUDA");
        }
    }
}

/// Whether an opened library is a libcuda, without initialising it.
fn examine(library: Library) -> Answer<&'static Table> {
    match table_of(&library) {
        Ok(table) => Answer::Use(keep(library, table)),
        Err(reason) => Answer::PassOver(reason),
    }
}

/// The same, and initialises it: only a library that could be initialised ends the search.
fn examine_and_initialize(library: Library) -> Answer<&'static Table> {
    let table = match table_of(&library) {
        Ok(table) => keep(library, table),
        Err(reason) => return Answer::PassOver(reason),
    };
    // SAFETY: cuInit takes flags, which must be 0, and may be called from any thread, several times.
    match unsafe { (table.init)(0) } {
        SUCCESS => Answer::Use(table),
        STUB_LIBRARY => Answer::PassOver(stub("cuInit")),
        code => Answer::PassOver(CallError::new("cuInit", code).to_string()),
    }
}

fn table_of(library: &Library) -> Result<Table, String> {
    let table =
        Table::of(library).map_err(|symbol| format!("is no libcuda that can be used: it lacks {symbol}"))?;
    match table.version() {
        Ok(_) => Ok(table),
        Err(STUB_LIBRARY) => Err(stub("cuDriverGetVersion")),
        Err(code) => Err(CallError::new("cuDriverGetVersion", code).to_string()),
    }
}

fn stub(call: &str) -> String {
    format!("is the link-time stub: {call} answered {} ({STUB_LIBRARY})", code_name(STUB_LIBRARY))
}

/// Makes the table permanent. A libcuda that was used is never closed: it has threads of its own
/// and exit handlers, and the addresses in the table must stay valid for the process's whole life.
fn keep(library: Library, table: Table) -> &'static Table {
    std::mem::forget(library);
    Box::leak(Box::new(table))
}

impl Table {
    fn version(&self) -> Result<i32, u32> {
        let mut version = 0;
        // SAFETY: cuDriverGetVersion writes one int, and works before cuInit.
        match unsafe { (self.driver_version)(&mut version) } {
            SUCCESS => Ok(version),
            code => Err(code),
        }
    }

    /// Whether somebody in this process has called `cuInit`.
    fn is_initialized(&self) -> bool {
        let mut context = 0;
        // SAFETY: cuCtxGetCurrent writes one pointer, and answers 3 before cuInit.
        let code = unsafe { (self.context_current)(&mut context) };
        code != NOT_INITIALIZED && code != STUB_LIBRARY
    }
}

/// The table of a driver that is in use, or the answer that an uninitialised driver gives.
fn table(call: &'static str) -> Result<&'static Table, CallError> {
    PROCESS.table_in_use().ok_or(CallError::new(call, NOT_INITIALIZED))
}

fn check(call: &'static str, code: u32) -> Result<(), CallError> {
    if code == SUCCESS { Ok(()) } else { Err(CallError::new(call, code)) }
}

impl DriverApi for CudaDriver {
    fn identity(&self) -> DriverIdentity {
        IDENTITY
    }

    fn is_in_use(&self) -> bool {
        PROCESS.table_in_use().is_some()
    }

    fn prepare(&self) -> Result<(), Error> {
        if self.is_in_use() { Ok(()) } else { PROCESS.load_and_initialize() }
    }

    fn current_context(&self) -> Option<ContextHandle> {
        let table = PROCESS.table_in_use()?;
        let mut context = 0;
        // SAFETY: cuCtxGetCurrent writes one pointer.
        let code = unsafe { (table.context_current)(&mut context) };
        (code == SUCCESS && context != 0).then_some(ContextHandle(context))
    }

    fn set_current_context(&self, context: Option<ContextHandle>) -> Result<(), CallError> {
        let table = table("cuCtxSetCurrent")?;
        let handle = context.map_or(0, |context| context.0);
        // SAFETY: cuCtxSetCurrent takes NULL or a context, which whoever holds the handle keeps alive.
        check("cuCtxSetCurrent", unsafe { (table.context_set_current)(handle) })
    }

    fn current_device(&self) -> Result<i32, CallError> {
        let table = table("cuCtxGetDevice")?;
        let mut device = 0;
        // SAFETY: cuCtxGetDevice writes one int.
        check("cuCtxGetDevice", unsafe { (table.context_device)(&mut device) })?;
        Ok(device)
    }

    fn active_primary_devices(&self) -> Result<Vec<i32>, CallError> {
        let table = table("cuDeviceGetCount")?;
        let mut count = 0;
        // SAFETY: cuDeviceGetCount writes one int.
        check("cuDeviceGetCount", unsafe { (table.device_count)(&mut count) })?;
        let mut active_devices = Vec::new();
        for ordinal in 0..count {
            let mut device = 0;
            // SAFETY: cuDeviceGet writes one int.
            check("cuDeviceGet", unsafe { (table.device)(&mut device, ordinal) })?;
            let (mut flags, mut active) = (0, 0);
            // SAFETY: cuDevicePrimaryCtxGetState writes two ints and makes no context.
            let code = unsafe { (table.primary_state)(device, &mut flags, &mut active) };
            check("cuDevicePrimaryCtxGetState", code)?;
            if active != 0 {
                active_devices.push(device);
            }
        }
        Ok(active_devices)
    }

    fn retain_primary(&self, device: i32) -> Result<ContextHandle, CallError> {
        let table = table("cuDevicePrimaryCtxRetain")?;
        let mut context = 0;
        // SAFETY: cuDevicePrimaryCtxRetain writes one pointer; an unknown device is an error.
        check("cuDevicePrimaryCtxRetain", unsafe { (table.primary_retain)(&mut context, device) })?;
        Ok(ContextHandle(context))
    }

    fn release_primary(&self, device: i32) -> Result<(), CallError> {
        let table = table("cuDevicePrimaryCtxRelease_v2")?;
        // SAFETY: cuDevicePrimaryCtxRelease takes a device number; without a retain it is an error.
        check("cuDevicePrimaryCtxRelease_v2", unsafe { (table.primary_release)(device) })
    }

    fn synchronize_context(&self) -> Result<(), CallError> {
        let table = table("cuCtxSynchronize")?;
        // SAFETY: cuCtxSynchronize takes nothing; without a current context it is an error.
        check("cuCtxSynchronize", unsafe { (table.context_synchronize)() })
    }

    fn reads_pageable_memory(&self, device: i32) -> Result<bool, CallError> {
        let table = table("cuDeviceGetAttribute")?;
        for attribute in [ATTRIBUTE_PAGEABLE_ACCESS, ATTRIBUTE_HOST_PAGE_TABLES] {
            let mut value = 0;
            // SAFETY: cuDeviceGetAttribute writes one int.
            let code = unsafe { (table.device_attribute)(&mut value, attribute, device) };
            check("cuDeviceGetAttribute", code)?;
            if value != 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn create_event(&self) -> Result<EventHandle, CallError> {
        let table = table("cuEventCreate")?;
        let mut event = 0;
        // SAFETY: cuEventCreate writes one pointer.
        check("cuEventCreate", unsafe { (table.event_create)(&mut event, EVENT_DISABLE_TIMING) })?;
        Ok(EventHandle(event))
    }

    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CallError> {
        let table = table("cuEventRecord")?;
        // SAFETY: cuEventRecord takes an event of ours and a stream that the caller holds.
        check("cuEventRecord", unsafe { (table.event_record)(event.0, stream.0) })
    }

    fn query_event(&self, event: EventHandle) -> Result<bool, CallError> {
        let table = table("cuEventQuery")?;
        // SAFETY: cuEventQuery takes an event of ours that was not destroyed.
        match unsafe { (table.event_query)(event.0) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => Err(CallError::new("cuEventQuery", code)),
        }
    }

    fn destroy_event(&self, event: EventHandle) -> Result<(), CallError> {
        let table = table("cuEventDestroy_v2")?;
        // SAFETY: cuEventDestroy takes an event of ours, which its owner gives up here.
        check("cuEventDestroy_v2", unsafe { (table.event_destroy)(event.0) })
    }

    fn is_capturing(&self, stream: StreamHandle) -> Result<bool, CallError> {
        let table = table("cuStreamIsCapturing")?;
        // A driver without this function is older than stream capture itself.
        let Some(is_capturing) = table.stream_is_capturing else { return Ok(false) };
        let mut status = 0;
        // SAFETY: cuStreamIsCapturing takes a stream that the caller holds and writes one enum.
        check("cuStreamIsCapturing", unsafe { is_capturing(stream.0, &mut status) })?;
        Ok(status != 0)
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode, CallError> {
        let table = table("cuThreadExchangeStreamCaptureMode")?;
        let Some(exchange) = table.exchange_capture_mode else { return Ok(CaptureMode::Global) };
        let mut value = mode as u32;
        // SAFETY: cuThreadExchangeStreamCaptureMode reads and writes one enum.
        check("cuThreadExchangeStreamCaptureMode", unsafe { exchange(&mut value) })?;
        Ok(match value {
            1 => CaptureMode::ThreadLocal,
            2 => CaptureMode::Relaxed,
            _ => CaptureMode::Global,
        })
    }

    fn register(&self, base: usize, bytes: usize) -> Result<(), CallError> {
        let table = table("cuMemHostRegister_v2")?;
        // SAFETY: cuMemHostRegister validates the range; that it stays mapped is the duty of its owner.
        let code = unsafe { (table.host_register)(base, bytes, HOST_REGISTER_PORTABLE) };
        check("cuMemHostRegister_v2", code)
    }

    fn unregister(&self, base: usize) -> Result<(), CallError> {
        let table = table("cuMemHostUnregister")?;
        // SAFETY: cuMemHostUnregister answers 713 or 1 for an address that is no registration's base.
        check("cuMemHostUnregister", unsafe { (table.host_unregister)(base) })
    }

    fn is_page_locked(&self, address: usize) -> Result<bool, CallError> {
        let table = table("cuPointerGetAttributes")?;
        let Some(pointer_attributes) = table.pointer_attributes else {
            return Err(CallError::new("cuPointerGetAttributes", NOT_FOUND));
        };
        // The plural function answers 0 with type 0 for plain memory, where the singular one fails.
        let attributes = [POINTER_MEMORY_TYPE, POINTER_IS_MANAGED];
        let (mut memory_type, mut is_managed) = (0_u64, 0_u64);
        let values = [&raw mut memory_type, &raw mut is_managed];
        // SAFETY: cuPointerGetAttributes reads two attributes and writes each value, at most eight
        // bytes, through the pointer at the same index.
        let code = unsafe { pointer_attributes(2, attributes.as_ptr(), values.as_ptr(), address as u64) };
        check("cuPointerGetAttributes", code)?;
        // The low half is the enum; managed memory migrates, so it is not page-locked for our purpose.
        Ok(memory_type as u32 == MEMORY_TYPE_HOST && is_managed as u32 == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    #[cfg(target_os = "linux")]
    fn a_library_that_is_not_libcuda_is_passed_over_and_says_why() {
        let other =
            library::open(library::How::Load, OsStr::new("libm.so.6")).expect("the C library has a libm");
        let Answer::PassOver(reason) = examine_and_initialize(other) else {
            panic!("libm was taken for libcuda");
        };
        assert!(reason.contains("it lacks cuInit"), "{reason}");
    }
}
