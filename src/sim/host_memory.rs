//! The only file of the simulated device that touches host memory, and so the only one with `unsafe`.
#![allow(unsafe_code)]

use super::calls::Call;
use super::cuda::Cuda;
use super::handles::{SimBuffer, SimStream};
use super::streams::Work;
use std::alloc::{Layout, alloc_zeroed, dealloc};

/// Host bytes that an operation will read or write when it is executed.
#[derive(Clone, Copy)]
pub(super) struct HostRange {
    address: usize,
    bytes: usize,
}

impl HostRange {
    /// # Safety
    /// Until the operation that gets it was executed or dropped, the bytes stay mapped, and writable if it
    /// writes them; nobody else accesses them in conflict with it *while* it is executed.
    unsafe fn new(address: usize, bytes: usize) -> Self {
        Self { address, bytes }
    }

    /// Copies the host bytes into device memory of the same length.
    pub(super) fn read_into(self, dst: &mut [u8]) {
        assert_eq!(dst.len(), self.bytes);
        // SAFETY: `new` was promised that the host bytes are readable until the operation was executed, which
        // happens here; `dst` is memory of the simulated device, which no host pointer reaches.
        unsafe { std::ptr::copy_nonoverlapping(self.address as *const u8, dst.as_mut_ptr(), self.bytes) }
    }

    /// Copies device memory of the same length into the host bytes.
    pub(super) fn write_from(self, src: &[u8]) {
        assert_eq!(src.len(), self.bytes);
        // SAFETY: `new` was promised that the host bytes are writable until the operation was executed, which
        // happens here; `src` is memory of the simulated device, which no host pointer reaches.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), self.address as *mut u8, self.bytes) }
    }
}

/// Memory of `cuMemHostAlloc` and of `cuMemAllocManaged`.
pub(super) struct HostAllocation {
    address: *mut u8,
    bytes: usize,
    layout: Layout,
}

// SAFETY: the allocation is owned, and only its address and size are used until it is freed.
unsafe impl Send for HostAllocation {}

impl HostAllocation {
    /// `None` where this process cannot have that much.
    pub(super) fn filled(bytes: usize, fill: u8) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(1), 4096).ok()?;
        // SAFETY: the layout's size is at least 1.
        let address = unsafe { alloc_zeroed(layout) };
        if address.is_null() {
            return None;
        }
        // SAFETY: the memory has this size, and nobody else knows it yet.
        unsafe { std::ptr::write_bytes(address, fill, bytes) };
        Some(Self { address, bytes, layout })
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.address
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HostAllocation {
    fn drop(&mut self) {
        // SAFETY: `filled` allocated it with this layout, and nothing else frees it.
        unsafe { dealloc(self.address, self.layout) }
    }
}

/// Copies between host and device. `src` and `dst` are host memory where they are pointers.
impl Cuda {
    /// `cuMemcpyHtoD` on the legacy default stream; returns when it is done.
    ///
    /// # Safety
    /// The host memory is valid for reads during the call.
    pub unsafe fn cu_memcpy_htod(&self, dst: u64, src: *const u8, bytes: usize) -> Result<(), u32> {
        // SAFETY: the call waits until the copy was executed, and the memory is valid during the call.
        let src = unsafe { HostRange::new(src as usize, bytes) };
        self.copy_to_device(Call::MemcpyHtoD, dst, src, 0)
    }

    /// `cuMemcpyDtoH` on the legacy default stream; returns when it is done.
    ///
    /// # Safety
    /// The host memory is valid for writes during the call, and nobody else uses it.
    pub unsafe fn cu_memcpy_dtoh(&self, dst: *mut u8, src: u64, bytes: usize) -> Result<(), u32> {
        // SAFETY: the call waits until the copy was executed, and the memory is valid during the call.
        let dst = unsafe { HostRange::new(dst as usize, bytes) };
        self.copy_to_host(Call::MemcpyDtoH, dst, src, 0)
    }

    /// `cuMemcpyHtoDAsync`. Page-locked memory is read when the stream executes the copy; with pageable
    /// memory the call waits for the stream and returns when the bytes were copied. 1 when only a part
    /// of the range is page-locked.
    ///
    /// # Safety
    /// The host memory is valid for reads until the stream has executed the copy, and nobody writes it at
    /// the same time: on the stepped clock it may change before, in real time it may not.
    pub unsafe fn cu_memcpy_htod_async(
        &self,
        dst: u64,
        src: *const u8,
        bytes: usize,
        stream: usize,
    ) -> Result<(), u32> {
        // SAFETY: the caller promises validity until the stream has executed the copy.
        let src = unsafe { HostRange::new(src as usize, bytes) };
        self.copy_to_device(Call::MemcpyHtoDAsync, dst, src, stream)
    }

    /// `cuMemcpyDtoHAsync`. Page-locked memory is written when the stream executes the copy; with
    /// pageable memory the call returns when the bytes have arrived. 1 when only a part of the range is page-locked.
    ///
    /// # Safety
    /// The host memory is valid for writes until the stream has executed the copy, and nobody else uses it
    /// at the same time: on the stepped clock it may be used before, in real time it may not.
    pub unsafe fn cu_memcpy_dtoh_async(
        &self,
        dst: *mut u8,
        src: u64,
        bytes: usize,
        stream: usize,
    ) -> Result<(), u32> {
        // SAFETY: the caller promises validity until the stream has executed the copy.
        let dst = unsafe { HostRange::new(dst as usize, bytes) };
        self.copy_to_host(Call::MemcpyDtoHAsync, dst, src, stream)
    }

    fn copy_to_device(&self, call: Call, dst: u64, src: HostRange, stream: usize) -> Result<(), u32> {
        let core = self.core();
        core.transfer(call, stream, src.bytes, Some(src.address), |state| {
            Ok(Work::HostToDevice { src, dst: state.device_range(dst, src.bytes)? })
        })
    }

    fn copy_to_host(&self, call: Call, dst: HostRange, src: u64, stream: usize) -> Result<(), u32> {
        let core = self.core();
        core.transfer(call, stream, dst.bytes, Some(dst.address), |state| {
            Ok(Work::DeviceToHost { src: state.device_range(src, dst.bytes)?, dst })
        })
    }
}

/// Copies.
impl SimStream {
    /// `cuMemcpyHtoDAsync`: copies `src` to the start of `dst`, whose further bytes stay as they are.
    ///
    /// # Panics
    /// When the call fails, for example because `dst` is too small.
    ///
    /// # Safety
    /// `src` stays valid until the stream has executed the copy (for pageable memory: until the call
    /// returns). On the stepped clock it may change before the copy is executed, in real time it may not.
    pub unsafe fn copy_to_device(&self, src: &[u8], dst: &SimBuffer) {
        // SAFETY: the caller promises validity until the stream has executed the copy.
        let done = self.with_context(|cuda| unsafe {
            cuda.cu_memcpy_htod_async(dst.address(), src.as_ptr(), src.len(), self.handle())
        });
        done.unwrap_or_else(|code| panic!("cuMemcpyHtoDAsync of {} bytes failed: {code}", src.len()));
    }

    /// `cuMemcpyDtoHAsync`: copies the start of `src` to `dst`.
    ///
    /// # Panics
    /// When the call fails, for example because `dst` is larger than `src`.
    ///
    /// # Safety
    /// `dst` is valid for writes until the stream has executed the copy (for pageable memory: until the call
    /// returns). On the stepped clock it may be used before the copy is executed, in real time it may not.
    pub unsafe fn copy_to_host(&self, src: &SimBuffer, dst: *mut [u8]) {
        // SAFETY: the caller promises validity until the stream has executed the copy.
        let done = self.with_context(|cuda| unsafe {
            cuda.cu_memcpy_dtoh_async(dst.cast(), src.address(), dst.len(), self.handle())
        });
        done.unwrap_or_else(|code| panic!("cuMemcpyDtoHAsync of {} bytes failed: {code}", dst.len()));
    }
}

/// Lets the calling thread sleep precisely: the usual slack of 50 us would drown short copies.
#[cfg(target_os = "linux")]
pub(super) fn tighten_timer_slack() {
    // SAFETY: PR_SET_TIMERSLACK takes a number and changes nothing but the calling thread's timers.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

#[cfg(not(target_os = "linux"))]
pub(super) fn tighten_timer_slack() {}

#[cfg(test)]
impl SimStream {
    /// A copy for the unit tests of the checks, which keep the memory until it was executed or cancelled.
    pub(super) fn copy_for_test(&self, device: &SimBuffer, host: &mut [u8], is_upload: bool) {
        match is_upload {
            // SAFETY: the tests that call this keep the memory as its documentation says.
            true => unsafe { self.copy_to_device(host, device) },
            // SAFETY: the tests that call this keep the memory as its documentation says.
            false => unsafe { self.copy_to_host(device, host) },
        }
    }
}
