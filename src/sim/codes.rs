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
pub(super) const CAPTURE_UNSUPPORTED: u32 = 900;
pub(super) const CAPTURE_INVALIDATED: u32 = 901;
pub(super) const CAPTURE_MERGE: u32 = 902;
pub(super) const CAPTURE_UNMATCHED: u32 = 903;
pub(super) const CAPTURE_UNJOINED: u32 = 904;
pub(super) const CAPTURE_ISOLATION: u32 = 905;
pub(super) const CAPTURE_IMPLICIT: u32 = 906;
pub(super) const CAPTURED_EVENT: u32 = 907;
pub(super) const CAPTURE_WRONG_THREAD: u32 = 908;
