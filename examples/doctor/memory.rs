//! Memory to page-lock by hand, with huge pages and without: what the pool does by itself, taken apart.
#![allow(unsafe_code)] // maps memory and registers it

use cudarc::driver::sys;
use std::time::{Duration, Instant};

/// A mapping of whole pages, resident.
pub struct Mapping {
    base: *mut u8,
    /// All of the mapping, more than what is used so that the start can be aligned.
    mapped: (*mut libc::c_void, usize),
    bytes: usize,
}

const HUGE_BYTES: usize = 2 << 20;

impl Mapping {
    /// Maps and touches; `None` when the system refuses.
    pub fn new(bytes: usize, huge_pages: bool) -> Option<Self> {
        let all = bytes + HUGE_BYTES;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh anonymous mapping touches no memory that exists.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), all, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        let base = start.cast::<u8>().wrapping_add(start.align_offset(HUGE_BYTES));
        let advice = if huge_pages { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: the range lies in the mapping; a kernel without the advice refuses it, which is harmless.
        unsafe { libc::madvise(base.cast(), bytes, advice) };
        // SAFETY: the range lies in the mapping, which belongs to nobody else.
        unsafe { std::ptr::write_bytes(base, 1, bytes) };
        Some(Self { base, mapped: (start, all), bytes })
    }

    /// How long registering and unregistering takes (`cuMemHostRegister_v2`, `cuMemHostUnregister`), or the code.
    pub fn register(&self) -> Result<(Duration, Duration), u32> {
        let started = Instant::now();
        // SAFETY: the range is mapped, and stays so until it is unregistered below.
        let code = unsafe { sys::cuMemHostRegister_v2(self.base.cast(), self.bytes, 1) };
        let registered = started.elapsed();
        if code as u32 != 0 {
            return Err(code as u32);
        }
        let started = Instant::now();
        // SAFETY: registered a moment ago, with nothing in flight.
        let code = unsafe { sys::cuMemHostUnregister(self.base.cast()) };
        if code as u32 == 0 { Ok((registered, started.elapsed())) } else { Err(code as u32) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`; it is not registered here, since `register` ends that or the driver is gone.
        unsafe { libc::munmap(self.mapped.0, self.mapped.1) };
    }
}

/// Whether somebody uses the device in this process; makes no context.
pub fn primary_is_active(device: sys::CUdevice) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: cuDevicePrimaryCtxGetState writes two ints.
    let code = unsafe { sys::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) };
    code as u32 == 0 && active != 0
}
