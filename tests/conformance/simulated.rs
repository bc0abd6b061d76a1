//! The simulated device, called directly.

#![allow(unsafe_code)] // copies by address

use super::entry::{Answer, Entry};
use pinpool::sim::{Cuda, Sim};

const MEMORY_TYPE: u32 = 2;
const DEVICE_ORDINAL: u32 = 9;

pub struct Simulated {
    sim: Sim,
}

impl Simulated {
    pub fn new() -> Self {
        Self { sim: Sim::new() }
    }

    pub fn assert_clean(&self) {
        self.sim.assert_clean();
    }

    fn cuda(&self) -> &Cuda {
        self.sim.cuda()
    }
}

impl Entry for Simulated {
    fn init(&self, flags: u32) -> Answer<()> {
        self.cuda().cu_init(flags)
    }
    fn primary_retain(&self, device: i32) -> Answer<usize> {
        self.cuda().cu_device_primary_ctx_retain(device)
    }
    fn primary_release(&self, device: i32) -> Answer<()> {
        self.cuda().cu_device_primary_ctx_release(device)
    }
    fn primary_is_active(&self, device: i32) -> Answer<bool> {
        self.cuda().cu_device_primary_ctx_get_state(device).map(|(_, active)| active)
    }
    fn context_create(&self, device: i32) -> Answer<usize> {
        self.cuda().cu_ctx_create(0, device)
    }
    fn context_destroy(&self, context: usize) -> Answer<()> {
        self.cuda().cu_ctx_destroy(context)
    }
    fn context_current(&self) -> Answer<usize> {
        self.cuda().cu_ctx_get_current()
    }
    fn context_set_current(&self, context: usize) -> Answer<()> {
        self.cuda().cu_ctx_set_current(context)
    }
    fn context_device(&self) -> Answer<i32> {
        self.cuda().cu_ctx_get_device()
    }
    fn register(&self, address: usize, bytes: usize, flags: u32) -> Answer<()> {
        self.cuda().cu_mem_host_register(address as *mut u8, bytes, flags)
    }
    fn unregister(&self, address: usize) -> Answer<()> {
        self.cuda().cu_mem_host_unregister(address as *mut u8)
    }
    fn memory_type(&self, address: usize) -> Answer<u32> {
        self.cuda().cu_pointer_get_attribute(MEMORY_TYPE, address as u64).map(|value| value as u32)
    }
    fn memory_type_and_device(&self, address: usize) -> Answer<(u32, i32)> {
        // The device has the singular query only; the plural one is built on it in the fake library.
        match self.memory_type(address) {
            Ok(memory_type) => {
                let device = self.cuda().cu_pointer_get_attribute(DEVICE_ORDINAL, address as u64)?;
                Ok((memory_type, device as i32))
            }
            Err(1) => Ok((0, -1)),
            Err(code) => Err(code),
        }
    }
    fn device_attribute(&self, attribute: i32, device: i32) -> Answer<i32> {
        self.cuda().cu_device_get_attribute(attribute, device)
    }
    fn host_alloc(&self, bytes: usize, flags: u32) -> Answer<usize> {
        self.cuda().cu_mem_host_alloc(bytes, flags).map(|address| address as usize)
    }
    fn host_free(&self, address: usize) -> Answer<()> {
        self.cuda().cu_mem_free_host(address as *mut u8)
    }
    fn host_flags(&self, address: usize) -> Answer<u32> {
        self.cuda().cu_mem_host_get_flags(address as *mut u8)
    }
    fn managed_alloc(&self, bytes: usize, flags: u32) -> Answer<u64> {
        self.cuda().cu_mem_alloc_managed(bytes, flags)
    }
    fn prefer_device(&self, address: u64, bytes: usize, device: i32) -> Answer<()> {
        self.cuda().cu_mem_advise(address, bytes, 3, (1, device))
    }
    fn alloc(&self, bytes: usize) -> Answer<u64> {
        self.cuda().cu_mem_alloc(bytes)
    }
    fn free(&self, address: u64) -> Answer<()> {
        self.cuda().cu_mem_free(address)
    }
    fn copy_to_device(&self, to: u64, from: usize, bytes: usize, stream: usize) -> Answer<()> {
        // SAFETY: the rules keep the host memory until the stream has been synchronised.
        unsafe { self.cuda().cu_memcpy_htod_async(to, from as *const u8, bytes, stream) }
    }
    fn read(&self, from: u64, bytes: usize) -> Answer<Vec<u8>> {
        let mut read = vec![0; bytes];
        // SAFETY: the vector has that many bytes.
        unsafe { self.cuda().cu_memcpy_dtoh(read.as_mut_ptr(), from, bytes) }?;
        Ok(read)
    }
    fn stream_create(&self) -> Answer<usize> {
        self.cuda().cu_stream_create(1)
    }
    fn stream_destroy(&self, stream: usize) -> Answer<()> {
        self.cuda().cu_stream_destroy(stream)
    }
    fn stream_synchronize(&self, stream: usize) -> Answer<()> {
        self.cuda().cu_stream_synchronize(stream)
    }
    fn stream_is_capturing(&self, stream: usize) -> Answer<u32> {
        self.cuda().cu_stream_is_capturing(stream)
    }
    fn stream_begin_capture(&self, stream: usize, mode: u32) -> Answer<()> {
        self.cuda().cu_stream_begin_capture(stream, mode)
    }
    fn stream_end_capture(&self, stream: usize) -> Answer<usize> {
        self.cuda().cu_stream_end_capture(stream)
    }
    fn graph_destroy(&self, graph: usize) -> Answer<()> {
        self.cuda().cu_graph_destroy(graph)
    }
    fn exchange_capture_mode(&self, mode: u32) -> Answer<u32> {
        self.cuda().cu_thread_exchange_stream_capture_mode(mode)
    }
    fn event_create(&self) -> Answer<usize> {
        self.cuda().cu_event_create(2)
    }
    fn event_record(&self, event: usize, stream: usize) -> Answer<()> {
        self.cuda().cu_event_record(event, stream)
    }
    fn event_query(&self, event: usize) -> Answer<()> {
        self.cuda().cu_event_query(event)
    }
    fn event_synchronize(&self, event: usize) -> Answer<()> {
        self.cuda().cu_event_synchronize(event)
    }
    fn event_destroy(&self, event: usize) -> Answer<()> {
        self.cuda().cu_event_destroy(event)
    }
    fn hold(&self, stream: usize) {
        self.sim.hold(stream);
    }
    fn release(&self, stream: usize) {
        self.sim.release(stream);
    }
}
