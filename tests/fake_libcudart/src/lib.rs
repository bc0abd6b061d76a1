//! The part of libcudart's C ABI that pinpool's runtime driver uses, over a simulated machine of two devices
//! that is stepped. No libcuda is behind it: so is a process that carries only a runtime.
//!
//! `FAKE_CUDART_CODE=35` makes every function but `cudaRuntimeGetVersion` answer that code, and with
//! `FAKE_CUDART_PAGEABLE_ACCESS` in the environment the devices read pageable memory themselves. The functions
//! `fake_cudart_*` control the device.

#![allow(unsafe_code)] // exports C functions, which write through their caller's pointers

use pinpool::sim::{Cuda, Sim};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

const INVALID_VALUE: u32 = 1;
const UNKNOWN: u32 = 999;
const DEVICES: i32 = 2;
/// `cudaDevAttrPageableMemoryAccess`.
const PAGEABLE_ACCESS: i32 = 88;

static SIM: LazyLock<Sim> = LazyLock::new(|| {
    let reads_pageable_memory = std::env::var_os("FAKE_CUDART_PAGEABLE_ACCESS").is_some();
    let builder = Sim::builder().devices(DEVICES);
    let sim =
        if reads_pageable_memory { builder.attribute(PAGEABLE_ACCESS, 1).build() } else { builder.build() };
    sim.expect_violations();
    sim.cuda().cu_init(0).expect("it has devices");
    sim
});

/// The primary contexts that were made so far, by device.
static CONTEXTS: Mutex<[Option<usize>; DEVICES as usize]> = Mutex::new([None; DEVICES as usize]);

thread_local! {
    static DEVICE: Cell<i32> = const { Cell::new(0) };
    static LAST_ERROR: Cell<u32> = const { Cell::new(0) };
}

fn forced_code() -> Option<u32> {
    static CODE: LazyLock<Option<u32>> =
        LazyLock::new(|| std::env::var("FAKE_CUDART_CODE").ok().and_then(|code| code.parse().ok()));
    *CODE
}

/// Makes the current device's context if there is none yet, as most of the runtime's functions do.
fn bound() -> Result<&'static Cuda, u32> {
    let (cuda, device) = (SIM.cuda(), DEVICE.get());
    let mut contexts = CONTEXTS.lock().unwrap();
    let slot = &mut contexts[usize::try_from(device).map_err(|_| INVALID_VALUE)?];
    let context = match *slot {
        Some(context) => context,
        None => *slot.insert(cuda.cu_device_primary_ctx_retain(device)?),
    };
    cuda.cu_ctx_set_current(context)?;
    Ok(cuda)
}

/// Calls of the runtime's functions.
static CALLS: AtomicU64 = AtomicU64::new(0);

fn answer(body: impl FnOnce() -> Result<(), u32>) -> u32 {
    CALLS.fetch_add(1, Ordering::Relaxed);
    let result = match forced_code() {
        Some(code) => Err(code),
        None => catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(UNKNOWN)),
    };
    match result {
        Ok(()) => 0,
        Err(code) => {
            LAST_ERROR.set(code);
            code
        }
    }
}

/// Writes an out-parameter.
///
/// # Safety
///
/// `to` is NULL or valid for a write.
unsafe fn out<T>(to: *mut T, value: T) -> Result<(), u32> {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not NULL, and valid by the contract.
    unsafe { to.write(value) };
    Ok(())
}

macro_rules! exports {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "`.")]
        ///
        /// # Safety
        ///
        /// The C prototype's: every pointer is NULL or valid for what the function reads or writes.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
            answer(|| $body)
        }
    )*};
}

exports! {
    fn cudaGetDeviceCount(count: *mut i32) {
        // SAFETY: the caller's contract.
        unsafe { out(count, DEVICES) }
    }
    fn cudaGetDevice(device: *mut i32) {
        // SAFETY: the caller's contract.
        unsafe { out(device, DEVICE.get()) }
    }
    fn cudaSetDevice(device: i32) {
        if !(0..DEVICES).contains(&device) {
            return Err(101);
        }
        DEVICE.set(device);
        bound().map(drop)
    }
    fn cudaDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) {
        let answer = SIM.cuda().cu_device_get_attribute(attribute, device)?;
        // SAFETY: the caller's contract.
        unsafe { out(value, answer) }
    }
    fn cudaDeviceSynchronize() { bound()?.cu_ctx_synchronize() }
    fn cudaEventCreateWithFlags(event: *mut usize, flags: u32) {
        let made = bound()?.cu_event_create(flags)?;
        // SAFETY: the caller's contract.
        unsafe { out(event, made) }
    }
    fn cudaEventRecord(event: usize, stream: usize) { bound()?.cu_event_record(event, stream) }
    fn cudaEventQuery(event: usize) { SIM.cuda().cu_event_query(event) }
    fn cudaEventDestroy(event: usize) { bound()?.cu_event_destroy(event) }
    fn cudaHostRegister(address: *mut u8, bytes: usize, flags: u32) {
        bound()?.cu_mem_host_register(address, bytes, flags)
    }
    fn cudaHostUnregister(address: *mut u8) { bound()?.cu_mem_host_unregister(address) }
    fn cudaHostAlloc(address: *mut usize, bytes: usize, flags: u32) {
        let made = bound()?.cu_mem_host_alloc(bytes, flags)?;
        // SAFETY: the caller's contract.
        unsafe { out(address, made as usize) }
    }
    fn cudaFreeHost(address: *mut u8) { bound()?.cu_mem_free_host(address) }
    fn cudaMallocManaged(address: *mut usize, bytes: usize, flags: u32) {
        let made = bound()?.cu_mem_alloc_managed(bytes, flags)?;
        // SAFETY: the caller's contract.
        unsafe { out(address, made as usize) }
    }
    fn cudaFree(address: usize) { bound()?.cu_mem_free(address as u64) }
    fn cudaMemAdvise(address: usize, bytes: usize, advice: u32, device: i32) {
        bound()?.cu_mem_advise(address as u64, bytes, advice, (1, device))
    }
    fn cudaStreamCreate(stream: *mut usize) {
        let made = bound()?.cu_stream_create(0)?;
        // SAFETY: the caller's contract.
        unsafe { out(stream, made) }
    }
    fn cudaStreamIsCapturing(stream: usize, status: *mut u32) {
        let answer = bound()?.cu_stream_is_capturing(stream)?;
        // SAFETY: the caller's contract.
        unsafe { out(status, answer) }
    }
    fn cudaThreadExchangeStreamCaptureMode(mode: *mut u32) {
        if mode.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not NULL, and valid by the caller's contract.
        let new = unsafe { mode.read() };
        let old = SIM.cuda().cu_thread_exchange_stream_capture_mode(new)?;
        // SAFETY: as above.
        unsafe { out(mode, old) }
    }
    fn cudaPointerGetAttributes(attributes: *mut Attributes, address: usize) {
        let host = SIM.cuda().cu_pointer_get_attribute(2, address as u64).unwrap_or(0) == 1;
        let known = Attributes {
            memory_type: u32::from(host),
            device: if host { 0 } else { -2 },
            device_pointer: address,
            host_pointer: address,
            reserved: [0; 8],
        };
        // SAFETY: the caller's contract.
        unsafe { out(attributes, known) }
    }
}

/// `cudaPointerAttributes` of CUDA 13.
#[repr(C)]
#[derive(Debug)]
pub struct Attributes {
    memory_type: u32,
    device: i32,
    device_pointer: usize,
    host_pointer: usize,
    reserved: [i64; 8],
}

/// `cudaRuntimeGetVersion`, which needs no driver and leaves no error.
///
/// # Safety
///
/// `version` is NULL or valid for a write.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub unsafe extern "C" fn cudaRuntimeGetVersion(version: *mut i32) -> u32 {
    // SAFETY: the contract.
    unsafe { out(version, 12_090) }.err().unwrap_or(0)
}

/// `cudaPeekAtLastError`.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn cudaPeekAtLastError() -> u32 {
    LAST_ERROR.get()
}

/// `cudaGetLastError`.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn cudaGetLastError() -> u32 {
    LAST_ERROR.replace(0)
}

/// From now on the stream executes nothing.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cudart_hold(stream: usize) {
    SIM.hold(stream);
}

/// Enqueues an operation.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cudart_enqueue(stream: usize) {
    SIM.stall(stream, std::time::Duration::from_nanos(1));
}

/// Ends a hold, and executes what can be executed.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cudart_release(stream: usize) {
    SIM.release(stream);
    SIM.run_until_idle();
}

/// Bytes that are registered now.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cudart_registered_bytes() -> usize {
    SIM.registered_bytes()
}

/// Bytes that are allocated page-locked now.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cudart_allocated_host_bytes() -> usize {
    SIM.allocated_host_bytes()
}

/// How many managed allocations prefer a device.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cudart_preferring() -> usize {
    SIM.preferred_devices().len()
}

/// Whether a context was made on the device.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cudart_has_context(device: i32) -> bool {
    usize::try_from(device)
        .is_ok_and(|device| CONTEXTS.lock().unwrap().get(device).is_some_and(Option::is_some))
}

/// How many calls were made so far, those of `cudaRuntimeGetVersion` and of the last error apart.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cudart_calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}
