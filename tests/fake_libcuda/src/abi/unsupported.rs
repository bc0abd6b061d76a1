//! Functions that cudarc's safe layer names and that the simulated device does not have.
//!
//! They exist, since cudarc panics on a missing symbol, and answer 801. None looks at its arguments,
//! so none declares them.

use super::exports;

const NOT_SUPPORTED: u32 = 801;

macro_rules! unsupported {
    ($($name:ident)*) => {
        exports! { functions: $(fn $name() |_| Err(NOT_SUPPORTED);)* }
    };
}

unsupported! {
    cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleUnload cuModuleGetFunction cuModuleGetGlobal_v2
    cuFuncGetAttribute cuFuncSetAttribute cuFuncSetCacheConfig cuLaunchKernel cuLaunchCooperativeKernel
    cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxPotentialBlockSize
    cuOccupancyMaxPotentialBlockSizeWithFlags cuOccupancyMaxActiveClusters cuOccupancyMaxPotentialClusterSize
    cuMemPrefetchAsync cuMemPrefetchAsync_v2 cuStreamAttachMemAsync
    cuMemPoolCreate cuMemPoolDestroy cuMemPoolTrimTo cuMemPoolGetAttribute cuMemPoolSetAttribute
    cuMemAllocFromPoolAsync cuDeviceGetDefaultMemPool cuDeviceGetMemPool cuDeviceSetMemPool
    cuImportExternalMemory cuDestroyExternalMemory cuExternalMemoryGetMappedBuffer
}
