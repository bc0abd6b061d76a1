//! Page-locked pages that the driver allocates (`cuMemHostAlloc`), for pools that cannot register their own.
#![allow(unsafe_code)] // Makes pages of an address that the driver gave.

use crate::contexts::{Context, with_current};
use crate::driver::Driver;
use crate::error::CallError;
use crate::os::page_bytes;
use crate::pages::{Owner, Pages};
use std::ptr::NonNull;

/// `CUDA_ERROR_CONTEXT_IS_DESTROYED`.
const CONTEXT_IS_DESTROYED: u32 = 709;
/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: u32 = 1;

/// Owns what only the driver can free: dropped without that, the memory is leaked.
struct OfTheDriver;

impl Owner for OfTheDriver {
    fn leaked(&mut self) {}
}

/// Allocates in the current context; the contents are whatever the driver left there.
pub(crate) fn allocate(driver: &Driver, bytes: usize) -> Result<Pages, CallError> {
    let base = driver.api().allocate_host(bytes, false)?;
    // Every driver gives whole pages; one that does not cannot back buffers that promise it.
    match NonNull::new(base as *mut u8).filter(|_| base.is_multiple_of(page_bytes())) {
        // SAFETY: the driver allocated that many bytes there, which stay until `free`, and nobody else knows them.
        Some(base) => Ok(unsafe { Pages::foreign(base, bytes, Box::new(OfTheDriver)) }),
        None => {
            let _ = driver.api().free_host(base);
            Err(CallError::new("cuMemHostAlloc", INVALID_VALUE))
        }
    }
}

/// Frees what [`allocate`] gave, in its context; after a failure it is leaked.
///
/// Where the context has ended, the memory has ended with it, and the driver may have given its address to somebody
/// else: then it is not asked.
pub(crate) fn free(driver: &Driver, context: &Context, pages: &Pages) -> Result<(), CallError> {
    if !context.is_itself(driver) {
        return Err(CallError::new("cuMemFreeHost", CONTEXT_IS_DESTROYED));
    }
    // The drop of such pages frees nothing, so after a failure nothing is freed.
    with_current(driver, context.handle, || driver.api().free_host(pages.base()))?
}
