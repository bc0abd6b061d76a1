//! The part of the seam that allocates: page-locked host memory, managed memory, and contexts of one's own.
//!
//! Apart from [`DriverApi`](super::DriverApi), which it belongs to, because a pool needs none of it where memory
//! can be registered, and a driver may lack all of it: what is not implemented answers that it is not found.

use super::ContextHandle;
use crate::error::CallError;

/// `CUDA_ERROR_NOT_FOUND`: how a function is refused that this driver does not have.
const NOT_FOUND: u32 = 500;

/// A property of a device that decides what memory it can be given, or should be (`CUdevice_attribute`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attribute {
    /// Where it is on the PCI bus.
    PciBus = 33,
    /// The same.
    PciDevice = 34,
    /// The same.
    PciDomain = 50,
    /// It knows managed memory.
    ManagedMemory = 83,
    /// It reads pageable memory itself.
    PageableAccess = 88,
    /// The host may touch managed memory while the device works.
    ConcurrentManagedAccess = 89,
    /// Registered memory has the same address on the device.
    HostPointerServes = 91,
    /// Host memory can be registered.
    HostRegister = 99,
    /// It goes by the host's page tables, so that registering adds nothing.
    HostPageTables = 100,
    /// Memory that may not be written can be registered.
    ReadOnlyRegister = 113,
    /// The host's NUMA node that it is nearest to, or -1.
    HostNumaNode = 134,
}

impl Attribute {
    /// What a driver that is too old to know it would say.
    pub(crate) fn when_unknown(self) -> i32 {
        if self == Attribute::HostNumaNode { -1 } else { 0 }
    }
}

/// The entry points for memory of the driver's own. Method by method, the CUDA driver function it stands for.
pub(crate) trait DriverMemory {
    /// `cuDeviceGetCount`.
    fn device_count(&self) -> Result<i32, CallError> {
        Err(CallError::new("cuDeviceGetCount", NOT_FOUND))
    }

    /// `cuDeviceGetAttribute`; [`Attribute::when_unknown`] for one that the driver is too old to know.
    fn attribute(&self, _attribute: Attribute, _device: i32) -> Result<i32, CallError> {
        Err(CallError::new("cuDeviceGetAttribute", NOT_FOUND))
    }

    /// `cuMemHostAlloc`, portable and device-mapped, in the current context. Contents are unspecified.
    fn allocate_host(&self, _bytes: usize, _write_combined: bool) -> Result<usize, CallError> {
        Err(CallError::new("cuMemHostAlloc", NOT_FOUND))
    }

    /// `cuMemFreeHost` of what [`allocate_host`](Self::allocate_host) gave. May wait for the device.
    fn free_host(&self, _base: usize) -> Result<(), CallError> {
        Err(CallError::new("cuMemFreeHost", NOT_FOUND))
    }

    /// `cuMemAllocManaged`, attached globally, in the current context. Contents are unspecified.
    fn allocate_managed(&self, _bytes: usize) -> Result<usize, CallError> {
        Err(CallError::new("cuMemAllocManaged", NOT_FOUND))
    }

    /// `cuMemFree` of what [`allocate_managed`](Self::allocate_managed) gave. May wait for the device.
    fn free_managed(&self, _base: usize) -> Result<(), CallError> {
        Err(CallError::new("cuMemFree_v2", NOT_FOUND))
    }

    /// `cuMemAdvise`, the version that the driver has: the memory prefers to be on this device.
    fn prefer_device(&self, _base: usize, _bytes: usize, _device: i32) -> Result<(), CallError> {
        Err(CallError::new("cuMemAdvise", NOT_FOUND))
    }

    /// `cuCtxCreate`: a new context, current on this thread above what was current before.
    fn create_context(&self, _device: i32) -> Result<ContextHandle, CallError> {
        Err(CallError::new("cuCtxCreate_v2", NOT_FOUND))
    }

    /// `cuCtxPopCurrent`: what was current on this thread before the last one was made is so again.
    fn pop_context(&self) -> Result<(), CallError> {
        Err(CallError::new("cuCtxPopCurrent_v2", NOT_FOUND))
    }

    /// `cuCtxDestroy` of a context that [`create_context`](Self::create_context) made; where it is current on this
    /// thread, what was current before it is so again.
    fn destroy_context(&self, _context: ContextHandle) -> Result<(), CallError> {
        Err(CallError::new("cuCtxDestroy_v2", NOT_FOUND))
    }
}
