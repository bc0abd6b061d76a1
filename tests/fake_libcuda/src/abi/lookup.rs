//! `cuGetProcAddress`, and the texts of result codes.

use super::{INVALID_VALUE, contexts, exports, graphs, memory, out, out_optional, streams, unsupported};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::LazyLock;

const NOT_FOUND: u32 = 500;

// `CUdriverProcAddressQueryResult`
const SYMBOL_FOUND: u32 = 0;
const SYMBOL_NOT_FOUND: u32 = 1;

exports! { functions:
    fn cuGetErrorName(code: u32, text: *mut *const c_char) |_| out(text, || text_of(code).map(|(name, _)| name));
    fn cuGetErrorString(code: u32, text: *mut *const c_char) |_| out(text, || text_of(code).map(|(_, says)| says));
    fn cuGetExportTable(_table: *mut *const c_void, _id: *const [u8; 16]) |_| Err(NOT_FOUND);
    fn cuGetProcAddress(symbol: *const c_char, address: *mut *const (), _version: i32, _flags: u64) |_|
        out(address, || address_of(symbol).ok_or(NOT_FOUND));
    fn cuGetProcAddress_v2(
        symbol: *const c_char, address: *mut *const (), _version: i32, _flags: u64, status: *mut u32
    ) |_| {
        let found = address_of(symbol);
        out_optional(status, if found.is_some() { SYMBOL_FOUND } else { SYMBOL_NOT_FOUND });
        out(address, || Ok(found.unwrap_or(std::ptr::null())))
    };
}

/// The newest version of a function, from its name with or without a suffix.
///
/// # Safety
///
/// `symbol` is NULL or a C string.
unsafe fn address_of(symbol: *const c_char) -> Option<*const ()> {
    static ADDRESSES: LazyLock<HashMap<&'static str, usize>> = LazyLock::new(|| {
        [
            functions(),
            contexts::functions(),
            memory::functions(),
            streams::functions(),
            graphs::functions(),
            unsupported::functions(),
        ]
        .into_iter()
        .flatten()
        .map(|(name, address)| (name, address as usize))
        .collect()
    });
    if symbol.is_null() {
        return None;
    }
    // SAFETY: a C string by the contract.
    let name = unsafe { CStr::from_ptr(symbol) }.to_str().ok()?;
    ["_v4", "_v3", "_v2", ""]
        .iter()
        .find_map(|suffix| ADDRESSES.get(format!("{name}{suffix}").as_str()))
        .map(|address| *address as *const ())
}

/// Name and text of a code; an unlisted one is an invalid value, as in the driver.
fn text_of(code: u32) -> Result<(*const c_char, *const c_char), u32> {
    TEXTS
        .iter()
        .find(|entry| entry.0 == code)
        .map(|(_, name, says)| (name.as_ptr(), says.as_ptr()))
        .ok_or(INVALID_VALUE)
}

/// The codes that the simulated device answers by itself.
const TEXTS: &[(u32, &CStr, &CStr)] = &[
    (0, c"CUDA_SUCCESS", c"success (simulated)"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument (simulated)"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory (simulated)"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"not initialised (simulated)"),
    (4, c"CUDA_ERROR_DEINITIALIZED", c"the driver is gone (simulated)"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no device (simulated)"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"no such device (simulated)"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"no context is current (simulated)"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid handle (simulated)"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"not found (simulated)"),
    (600, c"CUDA_ERROR_NOT_READY", c"work is outstanding (simulated)"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal address was accessed (simulated)"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"the context is destroyed (simulated)"),
    (712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"the range is registered already (simulated)"),
    (713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"the address is not registered (simulated)"),
    (719, c"CUDA_ERROR_LAUNCH_FAILED", c"a launch failed (simulated)"),
    (800, c"CUDA_ERROR_NOT_PERMITTED", c"not permitted (simulated)"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"not supported (simulated)"),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"not allowed while a stream captures (simulated)"),
    (901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"the capture is invalid (simulated)"),
    (902, c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"two captures would be merged (simulated)"),
    (903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"the capture began on another stream (simulated)"),
    (904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"a stream of the capture was not joined (simulated)"),
    (
        905,
        c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        c"the capture would depend on what is outside it (simulated)",
    ),
    (906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"would depend on a capturing stream (simulated)"),
    (907, c"CUDA_ERROR_CAPTURED_EVENT", c"the event was captured (simulated)"),
    (908, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"the capture began on another thread (simulated)"),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error (simulated)"),
];
