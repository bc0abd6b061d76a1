//! What the tests of the simulated device share: registered host memory, and copies in which the test keeps
//! the promise that `unsafe` asks for.
#![allow(unsafe_code, dead_code)]

use pinpool::sim::{Sim, SimBuffer, SimContext, SimStream};

/// Small, so that a failed comparison can be read.
pub const BYTES: usize = 64;
pub const PAGE: usize = 4096;
/// `CU_EVENT_DISABLE_TIMING`.
pub const NO_TIMING: u32 = 2;
pub const NOT_READY: Result<(), u32> = Err(600);

/// A stepped device and its context, current on the calling thread.
pub fn device() -> (Sim, SimContext) {
    let sim = Sim::new();
    let context = sim.context(0);
    (sim, context)
}

/// Host memory that is registered for as long as it lives.
pub struct Pinned {
    sim: Sim,
    pub bytes: Vec<u8>,
}

impl Pinned {
    pub fn new(sim: &Sim, value: u8) -> Self {
        let mut bytes = vec![value; BYTES];
        sim.cuda().cu_mem_host_register(bytes.as_mut_ptr(), BYTES, 1).expect("register");
        Self { sim: sim.clone(), bytes }
    }

    pub fn address(&mut self) -> *mut u8 {
        self.bytes.as_mut_ptr()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // It fails where the test ended the context or unregistered already.
        let _ = self.sim.cuda().cu_mem_host_unregister(self.bytes.as_mut_ptr());
    }
}

/// Waits until something is so, for ten seconds at most.
pub fn eventually(is_so: impl Fn() -> bool) -> bool {
    let start = std::time::Instant::now();
    while !is_so() {
        if start.elapsed().as_secs() >= 10 {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// Copies to the device. Every test declares its host memory before the device work can be over.
pub fn upload(stream: &SimStream, src: &[u8], dst: &SimBuffer) {
    // SAFETY: the tests keep host memory until its copy was executed, or the device dropped the copy.
    unsafe { stream.copy_to_device(src, dst) }
}

/// Copies to the host.
pub fn download(stream: &SimStream, src: &SimBuffer, dst: &mut [u8]) {
    // SAFETY: the tests keep host memory until its copy was executed, or the device dropped the copy.
    unsafe { stream.copy_to_host(src, dst) }
}

/// `cuMemcpyHtoDAsync`, with whatever arguments.
pub fn raw_upload(sim: &Sim, dst: u64, src: *const u8, bytes: usize, stream: usize) -> Result<(), u32> {
    // SAFETY: the tests keep host memory until its copy was executed, or the device dropped the copy.
    unsafe { sim.cuda().cu_memcpy_htod_async(dst, src, bytes, stream) }
}

/// `cuMemcpyDtoHAsync`, with whatever arguments.
pub fn raw_download(sim: &Sim, dst: *mut u8, src: u64, bytes: usize, stream: usize) -> Result<(), u32> {
    // SAFETY: the tests keep host memory until its copy was executed, or the device dropped the copy.
    unsafe { sim.cuda().cu_memcpy_dtoh_async(dst, src, bytes, stream) }
}

/// `cuMemcpyHtoD`.
pub fn raw_upload_now(sim: &Sim, dst: u64, src: &[u8]) -> Result<(), u32> {
    // SAFETY: the slice is valid during the call.
    unsafe { sim.cuda().cu_memcpy_htod(dst, src.as_ptr(), src.len()) }
}

/// `cuMemcpyDtoH`.
pub fn raw_download_now(sim: &Sim, dst: &mut [u8], src: u64) -> Result<(), u32> {
    // SAFETY: the slice is valid during the call.
    unsafe { sim.cuda().cu_memcpy_dtoh(dst.as_mut_ptr(), src, dst.len()) }
}

/// Three pages of fresh memory with the given protection (`PROT_*`) on the middle one; never unmapped.
pub fn three_pages(middle: Option<i32>) -> *mut u8 {
    let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new anonymous mapping, wherever the system likes.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), 3 * PAGE, read_write, private, -1, 0) };
    assert_ne!(base, libc::MAP_FAILED);
    let base = base.cast::<u8>();
    let page = base.wrapping_add(PAGE).cast();
    let changed = match middle {
        // SAFETY: the page belongs to the mapping above, and nobody uses it.
        Some(protection) => unsafe { libc::mprotect(page, PAGE, protection) },
        // SAFETY: the page belongs to the mapping above, and nobody uses it.
        None => unsafe { libc::munmap(page, PAGE) },
    };
    assert_eq!(changed, 0);
    base
}
