//! The result codes that the simulated driver answers with, by their CUDA names without the prefix.

pub(super) const INVALID_VALUE: u32 = 1;
pub(super) const OUT_OF_MEMORY: u32 = 2;
pub(super) const NOT_INITIALIZED: u32 = 3;
pub(super) const NO_DEVICE: u32 = 100;
pub(super) const INVALID_DEVICE: u32 = 101;
pub(super) const INVALID_CONTEXT: u32 = 201;
pub(super) const INVALID_HANDLE: u32 = 400;
pub(super) const NOT_READY: u32 = 600;
pub(super) const CONTEXT_IS_DESTROYED: u32 = 709;
pub(super) const HOST_MEMORY_ALREADY_REGISTERED: u32 = 712;
pub(super) const HOST_MEMORY_NOT_REGISTERED: u32 = 713;
pub(super) const NOT_PERMITTED: u32 = 800;
pub(super) const NOT_SUPPORTED: u32 = 801;
