//! The driver functions that the rules speak of. The error is the driver's result code.

pub type Answer<T> = Result<T, u32>;

/// libcuda's functions, named like them; handles and addresses are numbers.
pub trait Entry {
    fn init(&self, flags: u32) -> Answer<()>;
    fn primary_retain(&self, device: i32) -> Answer<usize>;
    fn primary_release(&self, device: i32) -> Answer<()>;
    fn primary_is_active(&self, device: i32) -> Answer<bool>;
    fn context_create(&self, device: i32) -> Answer<usize>;
    fn context_destroy(&self, context: usize) -> Answer<()>;
    fn context_current(&self) -> Answer<usize>;
    fn context_set_current(&self, context: usize) -> Answer<()>;
    fn context_device(&self) -> Answer<i32>;

    fn register(&self, address: usize, bytes: usize, flags: u32) -> Answer<()>;
    fn unregister(&self, address: usize) -> Answer<()>;
    fn memory_type(&self, address: usize) -> Answer<u32>;
    /// The plural query: memory type and device ordinal.
    fn memory_type_and_device(&self, address: usize) -> Answer<(u32, i32)>;

    fn device_attribute(&self, attribute: i32, device: i32) -> Answer<i32>;
    fn host_alloc(&self, bytes: usize, flags: u32) -> Answer<usize>;
    fn host_free(&self, address: usize) -> Answer<()>;
    fn host_flags(&self, address: usize) -> Answer<u32>;
    fn managed_alloc(&self, bytes: usize, flags: u32) -> Answer<u64>;
    /// `cuMemAdvise_v2`: the device shall be the preferred location.
    fn prefer_device(&self, address: u64, bytes: usize, device: i32) -> Answer<()>;

    fn alloc(&self, bytes: usize) -> Answer<u64>;
    fn free(&self, address: u64) -> Answer<()>;
    /// `cuMemcpyHtoDAsync`; the caller keeps the host memory valid.
    fn copy_to_device(&self, to: u64, from: usize, bytes: usize, stream: usize) -> Answer<()>;
    /// `cuMemcpyDtoH`.
    fn read(&self, from: u64, bytes: usize) -> Answer<Vec<u8>>;

    fn stream_create(&self) -> Answer<usize>;
    fn stream_destroy(&self, stream: usize) -> Answer<()>;
    fn stream_synchronize(&self, stream: usize) -> Answer<()>;
    fn stream_is_capturing(&self, stream: usize) -> Answer<u32>;
    fn stream_begin_capture(&self, stream: usize, mode: u32) -> Answer<()>;
    fn stream_end_capture(&self, stream: usize) -> Answer<usize>;
    fn graph_destroy(&self, graph: usize) -> Answer<()>;
    fn exchange_capture_mode(&self, mode: u32) -> Answer<u32>;

    fn event_create(&self) -> Answer<usize>;
    fn event_record(&self, event: usize, stream: usize) -> Answer<()>;
    fn event_query(&self, event: usize) -> Answer<()>;
    fn event_synchronize(&self, event: usize) -> Answer<()>;
    fn event_destroy(&self, event: usize) -> Answer<()>;

    /// From now on the stream executes nothing of what is enqueued.
    fn hold(&self, stream: usize);
    /// Ends a hold.
    fn release(&self, stream: usize);
}
