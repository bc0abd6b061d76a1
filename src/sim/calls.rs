//! The entry points by name, and what every call passes through before it does anything.

use super::core::Core;
use super::threads::Thread;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

macro_rules! calls {
    ($($variant:ident $symbol:literal;)*) => {
        /// An entry point of the driver.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(super) enum Call { $($variant,)* }

        const SYMBOLS: &[&str] = &[$($symbol,)*];
        const ALL: &[Call] = &[$(Call::$variant,)*];
    };
}

calls! {
    Init "cuInit";
    DriverGetVersion "cuDriverGetVersion";
    DeviceGetCount "cuDeviceGetCount";
    DeviceGet "cuDeviceGet";
    DeviceGetName "cuDeviceGetName";
    DeviceGetUuid "cuDeviceGetUuid_v2";
    DeviceTotalMem "cuDeviceTotalMem_v2";
    DeviceGetAttribute "cuDeviceGetAttribute";
    PrimaryRetain "cuDevicePrimaryCtxRetain";
    PrimaryRelease "cuDevicePrimaryCtxRelease_v2";
    PrimaryReset "cuDevicePrimaryCtxReset_v2";
    PrimaryGetState "cuDevicePrimaryCtxGetState";
    CtxCreate "cuCtxCreate_v2";
    CtxDestroy "cuCtxDestroy_v2";
    CtxGetCurrent "cuCtxGetCurrent";
    CtxSetCurrent "cuCtxSetCurrent";
    CtxPushCurrent "cuCtxPushCurrent_v2";
    CtxPopCurrent "cuCtxPopCurrent_v2";
    CtxGetDevice "cuCtxGetDevice";
    CtxSynchronize "cuCtxSynchronize";
    CtxGetApiVersion "cuCtxGetApiVersion";
    CtxGetId "cuCtxGetId";
    MemGetInfo "cuMemGetInfo_v2";
    MemAlloc "cuMemAlloc_v2";
    MemFree "cuMemFree_v2";
    MemAllocAsync "cuMemAllocAsync";
    MemFreeAsync "cuMemFreeAsync";
    MemcpyHtoD "cuMemcpyHtoD_v2";
    MemcpyDtoH "cuMemcpyDtoH_v2";
    MemcpyDtoD "cuMemcpyDtoD_v2";
    MemcpyHtoDAsync "cuMemcpyHtoDAsync_v2";
    MemcpyDtoHAsync "cuMemcpyDtoHAsync_v2";
    MemcpyDtoDAsync "cuMemcpyDtoDAsync_v2";
    MemsetD8 "cuMemsetD8_v2";
    MemsetD8Async "cuMemsetD8Async";
    MemHostRegister "cuMemHostRegister_v2";
    MemHostUnregister "cuMemHostUnregister";
    MemHostAlloc "cuMemHostAlloc";
    MemFreeHost "cuMemFreeHost";
    MemAllocManaged "cuMemAllocManaged";
    MemAdvise "cuMemAdvise_v2";
    MemHostGetFlags "cuMemHostGetFlags";
    MemHostGetDevicePointer "cuMemHostGetDevicePointer_v2";
    PointerGetAttribute "cuPointerGetAttribute";
    StreamCreate "cuStreamCreate";
    StreamCreateWithPriority "cuStreamCreateWithPriority";
    StreamDestroy "cuStreamDestroy_v2";
    StreamQuery "cuStreamQuery";
    StreamSynchronize "cuStreamSynchronize";
    StreamWaitEvent "cuStreamWaitEvent";
    StreamIsCapturing "cuStreamIsCapturing";
    StreamBeginCapture "cuStreamBeginCapture_v2";
    StreamEndCapture "cuStreamEndCapture";
    StreamGetCaptureInfo "cuStreamGetCaptureInfo_v2";
    StreamGetId "cuStreamGetId";
    StreamGetCtx "cuStreamGetCtx";
    EventCreate "cuEventCreate";
    EventRecord "cuEventRecord";
    EventQuery "cuEventQuery";
    EventSynchronize "cuEventSynchronize";
    EventDestroy "cuEventDestroy_v2";
    EventElapsedTime "cuEventElapsedTime_v2";
    ThreadExchangeCaptureMode "cuThreadExchangeStreamCaptureMode";
    LaunchHostFunc "cuLaunchHostFunc";
    GraphGetNodes "cuGraphGetNodes";
    GraphInstantiate "cuGraphInstantiateWithFlags";
    GraphLaunch "cuGraphLaunch";
    GraphUpload "cuGraphUpload";
    GraphDestroy "cuGraphDestroy";
    GraphExecDestroy "cuGraphExecDestroy";
    GraphRetainUserObject "cuGraphRetainUserObject";
    GraphReleaseUserObject "cuGraphReleaseUserObject";
    UserObjectCreate "cuUserObjectCreate";
    UserObjectRetain "cuUserObjectRetain";
    UserObjectRelease "cuUserObjectRelease";
    Map "mmap";
    StartThread "pthread_create";
}

impl Call {
    pub(super) const COUNT: usize = SYMBOLS.len();

    /// The symbol that libcuda exports, for example `cuMemHostRegister_v2`.
    pub(super) fn symbol(self) -> &'static str {
        SYMBOLS[self as usize]
    }

    /// Every entry point of the driver, and what the pool asks of the operating system.
    pub(super) fn all() -> &'static [Call] {
        ALL
    }

    /// False for what is asked of the operating system, which is here only to be made to fail.
    pub(super) fn is_of_the_driver(self) -> bool {
        !matches!(self, Call::Map | Call::StartThread)
    }

    /// Finds an entry point by its symbol or by the unsuffixed name that a header shows.
    ///
    /// # Panics
    /// For a name that the simulated device does not have, so that a misspelt fault fails its test.
    pub(super) fn named(name: &str) -> Self {
        let plain = |name: &str| name.trim_end_matches("_v2").to_owned();
        let found = ALL.iter().find(|call| plain(call.symbol()) == plain(name));
        *found.unwrap_or_else(|| panic!("the simulated device has no entry point {name:?}"))
    }
}

impl Core {
    /// Counts a call and lets configured faults happen to it.
    ///
    /// Faults come first, whatever the arguments are, so that "the nth call fails" is easy to count.
    #[inline]
    pub(super) fn count(&self, call: Call, bytes: usize) -> Result<&Thread, u32> {
        if self.initialised_in.is_inherited() {
            // Before any lock, which a thread of the parent may have held.
            return Err(super::codes::NOT_INITIALIZED);
        }
        let thread = self.threads.current();
        thread.count(call);
        if self.faults.is_armed() {
            self.faults.strike(call, bytes, || self.bytes_in_use(call))?;
        }
        Ok(thread)
    }

    /// [`count`](Self::count), then what every call of an initialised driver goes through.
    #[inline]
    pub(super) fn enter(&self, call: Call, bytes: usize) -> Result<&Thread, u32> {
        let thread = self.count(call, bytes)?;
        if !self.is_initialised.load(Ordering::Acquire) {
            return Err(super::codes::NOT_INITIALIZED);
        }
        if thread.in_host_function.load(Ordering::Relaxed) {
            return Err(super::codes::NOT_PERMITTED);
        }
        self.driver_lock.pass();
        spend(self.config.call_cost);
        Ok(thread)
    }
}

/// Lets `cost` pass on the calling thread: short ones by spinning, since a sleep overshoots them.
#[inline]
pub(super) fn spend(cost: Duration) {
    if !cost.is_zero() {
        spend_some(cost);
    }
}

fn spend_some(cost: Duration) {
    let until = Instant::now() + cost;
    if cost > Duration::from_micros(200) {
        std::thread::sleep(cost - Duration::from_micros(100));
    }
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_point_is_found_with_and_without_its_suffix() {
        assert_eq!(Call::named("cuMemHostRegister"), Call::MemHostRegister);
        assert_eq!(Call::named("cuMemHostRegister_v2"), Call::MemHostRegister);
        assert_eq!(Call::named("cuEventQuery").symbol(), "cuEventQuery");
        assert_eq!(ALL.len(), Call::COUNT);
    }
}
