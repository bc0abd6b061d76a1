//! A shared library with libcuda's C ABI: the fake one, or the real one.

#![allow(unsafe_code)] // calls the driver

use super::entry::{Answer, Entry};
use fake_cuda::control::Control;
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

pub struct Library<'a> {
    library: libloading::Library,
    /// Holds streams of the fake library; a real one is held by a host function that waits.
    control: Option<&'a Control>,
    /// What ends a host function's wait, by stream.
    gates: Mutex<HashMap<usize, Sender<()>>>,
}

/// `CUmemLocation`.
#[repr(C)]
struct Location {
    kind: i32,
    id: i32,
}

/// Calls a driver function by its symbol: the argument types make the prototype.
macro_rules! call {
    ($self:ident, $symbol:literal $(, $argument:expr => $kind:ty)*) => {{
        type Function = unsafe extern "C" fn($($kind),*) -> u32;
        // SAFETY: the types are those of the C prototype.
        let function = unsafe { $self.library.get::<Function>($symbol) }.expect($symbol);
        // SAFETY: out-pointers are to locals, and host memory is kept by the rules.
        match unsafe { function($($argument),*) } {
            0 => Ok(()),
            code => Err(code),
        }
    }};
}

impl<'a> Library<'a> {
    pub fn fake(control: &'a Control) -> Self {
        Self::open(control.path().to_owned(), Some(control)).expect("it is open already")
    }

    pub fn real() -> Result<Self, libloading::Error> {
        Self::open("libcuda.so.1".into(), None)
    }

    fn open(file: PathBuf, control: Option<&'a Control>) -> Result<Self, libloading::Error> {
        // SAFETY: libcuda's initialisers are those that every CUDA program runs.
        let library = unsafe { libloading::Library::new(file) }?;
        Ok(Self { library, control, gates: Mutex::default() })
    }
}

/// Blocks the stream's host function until the other end sends.
unsafe extern "C" fn wait_for_gate(gate: *mut c_void) {
    // SAFETY: `hold` made this from a box and gave it to exactly one call of this function.
    let gate = unsafe { Box::from_raw(gate.cast::<Receiver<()>>()) };
    let _ = gate.recv();
}

impl Entry for Library<'_> {
    fn init(&self, flags: u32) -> Answer<()> {
        call!(self, "cuInit", flags => u32)
    }
    fn primary_retain(&self, device: i32) -> Answer<usize> {
        let mut context = 0;
        call!(self, "cuDevicePrimaryCtxRetain", &mut context => *mut usize, device => i32)?;
        Ok(context)
    }
    fn primary_release(&self, device: i32) -> Answer<()> {
        call!(self, "cuDevicePrimaryCtxRelease_v2", device => i32)
    }
    fn primary_is_active(&self, device: i32) -> Answer<bool> {
        let (mut flags, mut active) = (0, 0);
        call!(self, "cuDevicePrimaryCtxGetState", device => i32, &mut flags => *mut u32, &mut active => *mut i32)?;
        Ok(active != 0)
    }
    fn context_create(&self, device: i32) -> Answer<usize> {
        let mut context = 0;
        call!(self, "cuCtxCreate_v2", &mut context => *mut usize, 0 => u32, device => i32)?;
        Ok(context)
    }
    fn context_destroy(&self, context: usize) -> Answer<()> {
        call!(self, "cuCtxDestroy_v2", context => usize)
    }
    fn context_current(&self) -> Answer<usize> {
        let mut context = 0;
        call!(self, "cuCtxGetCurrent", &mut context => *mut usize)?;
        Ok(context)
    }
    fn context_set_current(&self, context: usize) -> Answer<()> {
        call!(self, "cuCtxSetCurrent", context => usize)
    }
    fn context_device(&self) -> Answer<i32> {
        let mut device = -1;
        call!(self, "cuCtxGetDevice", &mut device => *mut i32)?;
        Ok(device)
    }
    fn register(&self, address: usize, bytes: usize, flags: u32) -> Answer<()> {
        call!(self, "cuMemHostRegister_v2", address => usize, bytes => usize, flags => u32)
    }
    fn unregister(&self, address: usize) -> Answer<()> {
        call!(self, "cuMemHostUnregister", address => usize)
    }
    fn memory_type(&self, address: usize) -> Answer<u32> {
        let mut memory_type = 0;
        call!(self, "cuPointerGetAttribute", &mut memory_type => *mut u32, 2 => u32, address as u64 => u64)?;
        Ok(memory_type)
    }
    fn memory_type_and_device(&self, address: usize) -> Answer<(u32, i32)> {
        let (mut memory_type, mut device) = (77_u32, 77_i32);
        let attributes = [2_u32, 9];
        let values: [*mut c_void; 2] = [(&raw mut memory_type).cast(), (&raw mut device).cast()];
        call!(self, "cuPointerGetAttributes", 2 => u32, attributes.as_ptr() => *const u32,
            values.as_ptr() => *const *mut c_void, address as u64 => u64)?;
        Ok((memory_type, device))
    }
    fn device_attribute(&self, attribute: i32, device: i32) -> Answer<i32> {
        let mut value = 0;
        call!(self, "cuDeviceGetAttribute", &mut value => *mut i32, attribute => i32, device => i32)?;
        Ok(value)
    }
    fn host_alloc(&self, bytes: usize, flags: u32) -> Answer<usize> {
        let mut address = 0;
        call!(self, "cuMemHostAlloc", &mut address => *mut usize, bytes => usize, flags => u32)?;
        Ok(address)
    }
    fn host_free(&self, address: usize) -> Answer<()> {
        call!(self, "cuMemFreeHost", address => usize)
    }
    fn host_flags(&self, address: usize) -> Answer<u32> {
        let mut flags = 77;
        call!(self, "cuMemHostGetFlags", &mut flags => *mut u32, address => usize)?;
        Ok(flags)
    }
    fn managed_alloc(&self, bytes: usize, flags: u32) -> Answer<u64> {
        let mut address = 0;
        call!(self, "cuMemAllocManaged", &mut address => *mut u64, bytes => usize, flags => u32)?;
        Ok(address)
    }
    fn prefer_device(&self, address: u64, bytes: usize, device: i32) -> Answer<()> {
        let location = Location { kind: 1, id: device };
        call!(self, "cuMemAdvise_v2", address => u64, bytes => usize, 3 => u32, location => Location)
    }
    fn alloc(&self, bytes: usize) -> Answer<u64> {
        let mut address = 0;
        call!(self, "cuMemAlloc_v2", &mut address => *mut u64, bytes => usize)?;
        Ok(address)
    }
    fn free(&self, address: u64) -> Answer<()> {
        call!(self, "cuMemFree_v2", address => u64)
    }
    fn copy_to_device(&self, to: u64, from: usize, bytes: usize, stream: usize) -> Answer<()> {
        call!(self, "cuMemcpyHtoDAsync_v2", to => u64, from => usize, bytes => usize, stream => usize)
    }
    fn read(&self, from: u64, bytes: usize) -> Answer<Vec<u8>> {
        let mut read = vec![0_u8; bytes];
        call!(self, "cuMemcpyDtoH_v2", read.as_mut_ptr() => *mut u8, from => u64, bytes => usize)?;
        Ok(read)
    }
    fn stream_create(&self) -> Answer<usize> {
        let mut stream = 0;
        call!(self, "cuStreamCreate", &mut stream => *mut usize, 1 => u32)?;
        Ok(stream)
    }
    fn stream_destroy(&self, stream: usize) -> Answer<()> {
        call!(self, "cuStreamDestroy_v2", stream => usize)
    }
    fn stream_synchronize(&self, stream: usize) -> Answer<()> {
        call!(self, "cuStreamSynchronize", stream => usize)
    }
    fn stream_is_capturing(&self, stream: usize) -> Answer<u32> {
        let mut status = 77;
        call!(self, "cuStreamIsCapturing", stream => usize, &mut status => *mut u32)?;
        Ok(status)
    }
    fn stream_begin_capture(&self, stream: usize, mode: u32) -> Answer<()> {
        call!(self, "cuStreamBeginCapture_v2", stream => usize, mode => u32)
    }
    fn stream_end_capture(&self, stream: usize) -> Answer<usize> {
        let mut graph = 77;
        call!(self, "cuStreamEndCapture", stream => usize, &mut graph => *mut usize)?;
        Ok(graph)
    }
    fn graph_destroy(&self, graph: usize) -> Answer<()> {
        call!(self, "cuGraphDestroy", graph => usize)
    }
    fn exchange_capture_mode(&self, mode: u32) -> Answer<u32> {
        let mut exchanged = mode;
        call!(self, "cuThreadExchangeStreamCaptureMode", &mut exchanged => *mut u32)?;
        Ok(exchanged)
    }
    fn event_create(&self) -> Answer<usize> {
        let mut event = 0;
        call!(self, "cuEventCreate", &mut event => *mut usize, 2 => u32)?;
        Ok(event)
    }
    fn event_record(&self, event: usize, stream: usize) -> Answer<()> {
        call!(self, "cuEventRecord", event => usize, stream => usize)
    }
    fn event_query(&self, event: usize) -> Answer<()> {
        call!(self, "cuEventQuery", event => usize)
    }
    fn event_synchronize(&self, event: usize) -> Answer<()> {
        call!(self, "cuEventSynchronize", event => usize)
    }
    fn event_destroy(&self, event: usize) -> Answer<()> {
        call!(self, "cuEventDestroy_v2", event => usize)
    }
    fn hold(&self, stream: usize) {
        type HostFunction = unsafe extern "C" fn(*mut c_void);
        if let Some(control) = self.control {
            return control.hold(stream);
        }
        let (open, gate) = channel::<()>();
        self.gates.lock().unwrap().insert(stream, open);
        let gate = Box::into_raw(Box::new(gate)).cast::<c_void>();
        call!(self, "cuLaunchHostFunc", stream => usize, wait_for_gate => HostFunction, gate => *mut c_void)
            .expect("a host function can be enqueued");
    }
    fn release(&self, stream: usize) {
        match self.control {
            Some(control) => control.release(stream),
            None => drop(self.gates.lock().unwrap().remove(&stream)),
        }
    }
}
