//! The two ways it is done without a pool.
#![allow(unsafe_code)] // page-locks through cudarc's raw bindings, as a caller without a pool has to

use crate::device::text;
use crate::input::Segment;
use crate::staging::{Lane, Stager};
use cudarc::driver::{CudaStream, sys};
use std::ffi::c_void;
use std::sync::Arc;

const PAGE_BYTES: usize = 4096;

/// `vec![0; n]` for every segment: pageable, so the driver stages it and the copy blocks.
pub struct VecStager {
    pub bytes: usize,
}

impl Stager for VecStager {
    fn name(&self) -> &'static str {
        "vec![0; n]"
    }

    fn stage(&mut self, _slot: usize, segment: &Segment<'_>, onto: &mut Lane) -> Result<(), String> {
        let mut arena = vec![0; self.bytes];
        segment.fill(&mut arena);
        onto.stream.memcpy_htod(&arena, &mut onto.device).map_err(text)
    }
}

/// `cuMemHostRegister` and `cuMemHostUnregister` around every copy.
pub struct RegisterStager {
    pub bytes: usize,
    /// What is page-locked for the copy in each slot.
    pub in_flight: Vec<Option<Registered>>,
}

impl Stager for RegisterStager {
    fn name(&self) -> &'static str {
        "register per use"
    }

    fn stage(&mut self, slot: usize, segment: &Segment<'_>, onto: &mut Lane) -> Result<(), String> {
        let mut arena = Registered::new(self.bytes, &onto.stream)?;
        segment.fill(arena.bytes_mut());
        onto.stream.memcpy_htod(arena.bytes_mut(), &mut onto.device).map_err(text)?;
        self.in_flight[slot] = Some(arena);
        Ok(())
    }

    fn copied(&mut self, slot: usize) -> Result<(), String> {
        self.in_flight[slot] = None; // unregisters, now that the copy is done
        Ok(())
    }
}

/// Page-aligned zeroed memory that is page-locked until it drops.
pub struct Registered {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
    stream: Arc<CudaStream>,
}

impl Registered {
    fn new(bytes: usize, stream: &Arc<CudaStream>) -> Result<Self, String> {
        let mut memory = vec![0; bytes + PAGE_BYTES];
        let start = memory.as_ptr().align_offset(PAGE_BYTES);
        stream.context().bind_to_thread().map_err(text)?;
        let base: *mut c_void = memory[start..start + bytes].as_mut_ptr().cast();
        // SAFETY: `cuMemHostRegister_v2` gets a range that this value owns and unregisters before it frees it.
        let result = unsafe { sys::cuMemHostRegister_v2(base, bytes, sys::CU_MEMHOSTREGISTER_PORTABLE) };
        match result {
            sys::CUresult::CUDA_SUCCESS => Ok(Self { memory, start, bytes, stream: stream.clone() }),
            error => Err(format!("cuMemHostRegister_v2: {error:?}")),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.bytes]
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // Also on the way out after an error, when the copy may still be reading.
        let waited = self.stream.synchronize();
        let base: *mut c_void = self.bytes_mut().as_mut_ptr().cast();
        // SAFETY: `cuMemHostUnregister` gets the address that was registered, once.
        let result = unsafe { sys::cuMemHostUnregister(base) };
        if waited.is_err() || result != sys::CUresult::CUDA_SUCCESS {
            std::mem::forget(std::mem::take(&mut self.memory)); // perhaps still in use: leaked, not freed
        }
    }
}
