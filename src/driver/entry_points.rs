//! A driver whose entry points are passed in: for tests of what happens when one fails, and for whoever has
//! CUDA's functions from elsewhere.
#![allow(unsafe_code)] // What the functions answer is believed, so making a driver of them is a promise.

use super::memory::DriverMemory;
use super::{CaptureMode, ContextHandle, Driver, DriverApi, DriverIdentity, EventHandle, StreamHandle};
use crate::error::{CallError, Error};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const SUCCESS: u32 = 0;
const NOT_INITIALIZED: u32 = 3;
const NOT_SUPPORTED: u32 = 801;

/// The one context of a driver that does not say otherwise.
const SOME_CONTEXT: usize = 1;

/// A table of entry points for [`Driver::from_entry_points`]. A table alone can do nothing.
///
/// The functions answer CUDA's result codes, 0 for success. There are no streams and no events in it, so
/// memory that is dropped while it is page-locked waits for `synchronize`; without one it is leaked.
///
/// ```
/// use pinpool::driver::{Driver, EntryPoints};
///
/// let stubs = EntryPoints::new(|| 0, |_base, _bytes| 2, |_base| 0, |_code| None);
/// // SAFETY: it never says that anything is page-locked, so there is nothing to be believed.
/// # #[allow(unsafe_code)]
/// let driver = unsafe { Driver::from_entry_points(stubs) };
/// let (error, numbers) = pinpool::pin::Pinned::new(&driver, vec![1u32, 2, 3]).unwrap_err();
/// assert!(error.to_string().ends_with("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"));
/// assert_eq!(numbers, [1, 2, 3]);
/// ```
pub struct EntryPoints {
    initialize: Box<dyn Fn() -> u32 + Send + Sync>,
    register: Box<dyn Fn(usize, usize) -> u32 + Send + Sync>,
    unregister: Box<dyn Fn(usize) -> u32 + Send + Sync>,
    error_name: Box<dyn Fn(u32) -> Option<&'static str> + Send + Sync>,
    current_context: Box<dyn Fn() -> usize + Send + Sync>,
    synchronize: Box<dyn Fn() -> u32 + Send + Sync>,
    is_page_locked: Box<dyn Fn(usize) -> Result<bool, u32> + Send + Sync>,
}

impl EntryPoints {
    /// `cuInit`; `cuMemHostRegister` of a base and a number of bytes; `cuMemHostUnregister` of a base; and
    /// `cuGetErrorName`, which is asked when a call fails, never while an error is printed. Where it has no
    /// name, pinpool's own table has.
    pub fn new(
        initialize: impl Fn() -> u32 + Send + Sync + 'static,
        register: impl Fn(usize, usize) -> u32 + Send + Sync + 'static,
        unregister: impl Fn(usize) -> u32 + Send + Sync + 'static,
        error_name: impl Fn(u32) -> Option<&'static str> + Send + Sync + 'static,
    ) -> Self {
        Self {
            initialize: Box::new(initialize),
            register: Box::new(register),
            unregister: Box::new(unregister),
            error_name: Box::new(error_name),
            current_context: Box::new(|| SOME_CONTEXT),
            synchronize: Box::new(|| NOT_SUPPORTED),
            is_page_locked: Box::new(|_| Err(NOT_SUPPORTED)),
        }
    }

    /// `cuCtxGetCurrent`: the calling thread's context, 0 when there is none. Without it there always is one.
    pub fn current_context(mut self, current_context: impl Fn() -> usize + Send + Sync + 'static) -> Self {
        self.current_context = Box::new(current_context);
        self
    }

    /// `cuCtxSynchronize`: returns 0 when no device work is outstanding. Without it that is never known (801).
    pub fn synchronize(mut self, synchronize: impl Fn() -> u32 + Send + Sync + 'static) -> Self {
        self.synchronize = Box::new(synchronize);
        self
    }

    /// Whether an address is page-locked host memory (`cuPointerGetAttributes`), or the code of the refusal.
    /// Without it that cannot be asked (801).
    pub fn is_page_locked(
        mut self,
        is_page_locked: impl Fn(usize) -> Result<bool, u32> + Send + Sync + 'static,
    ) -> Self {
        self.is_page_locked = Box::new(is_page_locked);
        self
    }
}

impl fmt::Debug for EntryPoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EntryPoints").finish_non_exhaustive()
    }
}

impl Driver {
    /// A driver of these entry points. Each call makes a driver of its own; clones share it.
    ///
    /// # Safety
    ///
    /// What the functions answer is believed, so each must keep what the CUDA function that it stands for
    /// promises, from any thread and several at once. Above all, after a 0 from `unregister` no device
    /// reaches the memory, and after a 0 from `synchronize` no device work that was enqueued before the call
    /// is outstanding: the memory is freed on the strength of it. None of them panics or calls pinpool.
    pub unsafe fn from_entry_points(entry_points: EntryPoints) -> Self {
        static INSTANCES: AtomicU64 = AtomicU64::new(0);
        Self::from_api(Arc::new(Injected {
            instance: INSTANCES.fetch_add(1, Ordering::Relaxed),
            is_initialised: AtomicBool::new(false),
            entry_points,
        }))
    }
}

#[derive(Debug)]
struct Injected {
    instance: u64,
    is_initialised: AtomicBool,
    entry_points: EntryPoints,
}

impl Injected {
    fn check(&self, call: &'static str, code: u32) -> Result<(), CallError> {
        if code == SUCCESS { Ok(()) } else { Err(self.failure(call, code)) }
    }

    fn failure(&self, call: &'static str, code: u32) -> CallError {
        CallError::named(call, code, (self.entry_points.error_name)(code))
    }

    fn unsupported<T>(&self, call: &'static str) -> Result<T, CallError> {
        Err(self.failure(call, NOT_SUPPORTED))
    }

    fn initialised(&self, call: &'static str) -> Result<(), CallError> {
        if self.is_in_use() { Ok(()) } else { Err(self.failure(call, NOT_INITIALIZED)) }
    }
}

/// There is nothing to allocate with.
impl DriverMemory for Injected {}

impl DriverApi for Injected {
    fn identity(&self) -> DriverIdentity {
        DriverIdentity { name: "injected", instance: self.instance }
    }

    fn is_in_use(&self) -> bool {
        self.is_initialised.load(Ordering::Acquire)
    }

    fn prepare(&self) -> Result<(), Error> {
        if !self.is_in_use() {
            // As with CUDA itself, two threads at once may both initialise.
            self.check("cuInit", (self.entry_points.initialize)())?;
            self.is_initialised.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn current_context(&self) -> Result<Option<ContextHandle>, CallError> {
        let context = if self.is_in_use() { (self.entry_points.current_context)() } else { 0 };
        Ok((context != 0).then_some(ContextHandle(context)))
    }

    fn set_current_context(&self, _: Option<ContextHandle>) -> Result<(), CallError> {
        // One context or none: whichever the functions look at themselves.
        self.initialised("cuCtxSetCurrent")
    }

    fn current_device(&self) -> Result<i32, CallError> {
        self.initialised("cuCtxGetDevice").map(|()| 0)
    }

    fn active_primary_devices(&self) -> Result<Vec<i32>, CallError> {
        Ok(Vec::new())
    }

    fn retain_primary(&self, _: i32) -> Result<ContextHandle, CallError> {
        self.unsupported("cuDevicePrimaryCtxRetain")
    }

    fn release_primary(&self, _: i32) -> Result<(), CallError> {
        self.unsupported("cuDevicePrimaryCtxRelease_v2")
    }

    fn synchronize_context(&self) -> Result<(), CallError> {
        self.initialised("cuCtxSynchronize")?;
        self.check("cuCtxSynchronize", (self.entry_points.synchronize)())
    }

    fn reads_pageable_memory(&self, _: i32) -> Result<bool, CallError> {
        Ok(false)
    }

    fn create_event(&self) -> Result<EventHandle, CallError> {
        self.unsupported("cuEventCreate")
    }

    fn record_event(&self, _: EventHandle, _: StreamHandle) -> Result<(), CallError> {
        self.unsupported("cuEventRecord")
    }

    fn query_event(&self, _: EventHandle) -> Result<bool, CallError> {
        self.unsupported("cuEventQuery")
    }

    fn destroy_event(&self, _: EventHandle) -> Result<(), CallError> {
        self.unsupported("cuEventDestroy_v2")
    }

    fn is_capturing(&self, _: StreamHandle) -> Result<bool, CallError> {
        Ok(false)
    }

    fn stream_id(&self, _: StreamHandle) -> Result<u64, CallError> {
        self.unsupported("cuStreamGetId")
    }

    fn exchange_capture_mode(&self, _: CaptureMode) -> Result<CaptureMode, CallError> {
        Ok(CaptureMode::Relaxed)
    }

    fn register(&self, base: usize, bytes: usize) -> Result<(), CallError> {
        self.initialised("cuMemHostRegister_v2")?;
        self.check("cuMemHostRegister_v2", (self.entry_points.register)(base, bytes))
    }

    fn unregister(&self, base: usize) -> Result<(), CallError> {
        self.initialised("cuMemHostUnregister")?;
        self.check("cuMemHostUnregister", (self.entry_points.unregister)(base))
    }

    fn is_page_locked(&self, address: usize) -> Result<bool, CallError> {
        self.initialised("cuPointerGetAttributes")?;
        (self.entry_points.is_page_locked)(address)
            .map_err(|code| self.failure("cuPointerGetAttributes", code))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::absent_tests::{check, lacking, refusals};

    #[test]
    fn what_no_entry_point_was_passed_for_is_refused_by_its_name() {
        let table = EntryPoints::new(|| 0, |_, _| 1, |_| 1, |code| (code == 801).then_some("NOT_PASSED_IN"));
        assert_eq!(format!("{table:?}"), "EntryPoints { .. }");
        // SAFETY: it never says that anything is page-locked or idle.
        let driver = unsafe { Driver::from_entry_points(table) };
        let own = [
            "cuCtxSetCurrent",
            "cuCtxGetDevice",
            "cuCtxSynchronize",
            "cuMemHostRegister_v2",
            "cuMemHostUnregister",
        ];
        let (passed_in, others): (Vec<_>, Vec<_>) =
            refusals(driver.api()).into_iter().partition(|(call, _)| own.contains(call));
        check(passed_in, &[3]); // Before `cuInit`.
        check(others, &[801]);
        driver.api().prepare().unwrap();
        assert_eq!(
            driver.api().create_event().unwrap_err().to_string(),
            "cuEventCreate: NOT_PASSED_IN (801)"
        );
        assert_eq!(driver.api().set_current_context(None), Ok(()), "whichever its functions look at");
        assert_eq!(driver.api().reads_pageable_memory(0), Ok(false));
        check(lacking(driver.api()), &[500, 801]);
    }
}
