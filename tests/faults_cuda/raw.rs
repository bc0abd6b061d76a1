//! The driver's functions as an application calls them, in the fake library; named as on the simulated device.
#![allow(unsafe_code)] // C functions with C's contracts.

use super::device::fake;

/// Calls a function of the library, which answers a code.
macro_rules! call {
    ($name:literal, $($argument:expr => $kind:ty),*) => {{
        type Function = unsafe extern "C" fn($($kind),*) -> u32;
        // SAFETY: the types are those of CUDA's header.
        let function = unsafe { fake().symbol::<Function>($name) }.expect($name);
        // SAFETY: pointers are to values that outlive the call; of memory that a copy uses the caller says so.
        match unsafe { function($($argument),*) } {
            0 => Ok(()),
            code => Err(code),
        }
    }};
}

/// The entry points.
pub struct Cuda;

impl Cuda {
    pub fn cu_ctx_get_current(&self) -> Result<usize, u32> {
        let mut context = 0;
        call!("cuCtxGetCurrent", &raw mut context => *mut usize).map(|()| context)
    }

    pub fn cu_ctx_create(&self, flags: u32, device: i32) -> Result<usize, u32> {
        let mut context = 0;
        call!("cuCtxCreate_v2", &raw mut context => *mut usize, flags => u32, device => i32).map(|()| context)
    }

    pub fn cu_ctx_destroy(&self, context: usize) -> Result<(), u32> {
        call!("cuCtxDestroy_v2", context => usize)
    }

    pub fn cu_thread_exchange_stream_capture_mode(&self, mode: u32) -> Result<u32, u32> {
        let mut mode = mode;
        call!("cuThreadExchangeStreamCaptureMode", &raw mut mode => *mut u32).map(|()| mode)
    }

    pub fn cu_device_primary_ctx_get_state(&self, device: i32) -> Result<(u32, bool), u32> {
        let (mut flags, mut active) = (0, 0);
        let state = call!(
            "cuDevicePrimaryCtxGetState",
            device => i32, &raw mut flags => *mut u32, &raw mut active => *mut i32
        );
        state.map(|()| (flags, active != 0))
    }

    pub fn cu_device_primary_ctx_release(&self, device: i32) -> Result<(), u32> {
        call!("cuDevicePrimaryCtxRelease_v2", device => i32)
    }

    pub fn cu_stream_create(&self, flags: u32) -> Result<usize, u32> {
        let mut stream = 0;
        call!("cuStreamCreate", &raw mut stream => *mut usize, flags => u32).map(|()| stream)
    }

    pub fn cu_stream_begin_capture(&self, stream: usize, mode: u32) -> Result<(), u32> {
        call!("cuStreamBeginCapture_v2", stream => usize, mode => u32)
    }

    pub fn cu_stream_end_capture(&self, stream: usize) -> Result<usize, u32> {
        let mut graph = 0;
        call!("cuStreamEndCapture", stream => usize, &raw mut graph => *mut usize).map(|()| graph)
    }

    pub fn cu_graph_destroy(&self, graph: usize) -> Result<(), u32> {
        call!("cuGraphDestroy", graph => usize)
    }

    pub fn cu_mem_alloc(&self, bytes: usize) -> Result<u64, u32> {
        let mut address = 0;
        call!("cuMemAlloc_v2", &raw mut address => *mut u64, bytes => usize).map(|()| address)
    }

    /// # Safety
    /// `src` is valid for reads of that many bytes until the stream has executed the copy.
    pub unsafe fn cu_memcpy_htod_async(
        &self,
        dst: u64,
        src: *const u8,
        bytes: usize,
        stream: usize,
    ) -> Result<(), u32> {
        call!("cuMemcpyHtoDAsync_v2", dst => u64, src => *const u8, bytes => usize, stream => usize)
    }

    /// # Safety
    /// `dst` is valid for writes of that many bytes until the stream has executed the copy.
    pub unsafe fn cu_memcpy_dtoh_async(
        &self,
        dst: *mut u8,
        src: u64,
        bytes: usize,
        stream: usize,
    ) -> Result<(), u32> {
        call!("cuMemcpyDtoHAsync_v2", dst => *mut u8, src => u64, bytes => usize, stream => usize)
    }

    /// # Safety
    /// `dst` is valid for writes of that many bytes.
    pub unsafe fn cu_memcpy_dtoh(&self, dst: *mut u8, src: u64, bytes: usize) -> Result<(), u32> {
        call!("cuMemcpyDtoH_v2", dst => *mut u8, src => u64, bytes => usize)
    }
}
