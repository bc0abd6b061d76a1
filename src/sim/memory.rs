//! Device memory, and the device's side of copies.

use super::calls::Call;
use super::codes::{INVALID_VALUE, OUT_OF_MEMORY};
use super::core::Core;
use super::cuda::Cuda;
use super::registrations::HostKind;
use super::state::{ContextRef, State};
use super::streams::Work;
use parking_lot::Mutex;
use std::sync::Arc;

/// Real allocations start at multiples of this, too.
const ALIGNMENT: u64 = 512;
/// PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES.
const HOST_PAGE_TABLES: i32 = 100;

pub(super) struct Registration {
    pub(super) bytes: usize,
    pub(super) is_portable: bool,
    pub(super) context: ContextRef,
}

/// One allocation. Operations hold it, so a copy in flight never writes into freed memory of this process.
pub(super) struct DeviceMemory {
    pub(super) address: u64,
    pub(super) context: ContextRef,
    pub(super) bytes: usize,
    contents: Mutex<Box<[u8]>>,
}

/// A part of one allocation.
#[derive(Clone)]
pub(super) struct DeviceRange {
    memory: Arc<DeviceMemory>,
    offset: usize,
    pub(super) bytes: usize,
}

impl DeviceRange {
    pub(super) fn read<R>(&self, look: impl FnOnce(&[u8]) -> R) -> R {
        look(&self.memory.contents.lock()[self.offset..self.offset + self.bytes])
    }

    pub(super) fn write(&self, change: impl FnOnce(&mut [u8])) {
        change(&mut self.memory.contents.lock()[self.offset..self.offset + self.bytes]);
    }
}

impl State {
    /// The part of device memory at an address; 1 unless it lies in one allocation.
    pub(super) fn device_range(&self, address: u64, bytes: usize) -> Result<DeviceRange, u32> {
        let below = self.device_memory.range(..=address).next_back();
        let (start, memory) = below.ok_or(INVALID_VALUE)?;
        let offset = (address - start) as usize;
        match offset.checked_add(bytes) {
            Some(end) if end <= memory.bytes => Ok(DeviceRange { memory: Arc::clone(memory), offset, bytes }),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Bytes allocated on a device.
    pub(super) fn device_bytes(&self, device: i32) -> usize {
        let of_device = |memory: &&Arc<DeviceMemory>| self.contexts[memory.context.index].device == device;
        self.device_memory.values().filter(of_device).map(|memory| memory.bytes).sum()
    }

    /// All memory and registrations of a context are gone.
    pub(super) fn forget_memory_of(&mut self, context: ContextRef) {
        self.device_memory.retain(|_, memory| memory.context != context);
        self.forget_allocations_of(context);
        let vanished = self.registrations.iter().filter(|(_, of)| of.context == context);
        self.vanished.extend(vanished.map(|(address, of)| (*address, of.bytes)));
        self.registrations.retain(|_, of| of.context != context);
    }
}

impl Core {
    /// Memory on the device of a context. Its contents are a pattern, as little to be relied on as on a device.
    pub(super) fn allocate(&self, state: &mut State, context: ContextRef, bytes: usize) -> Result<u64, u32> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let device = state.contexts[context.index].device;
        let after = state.device_bytes(device).saturating_add(bytes);
        if after > self.config.device_memory_bytes {
            return Err(OUT_OF_MEMORY);
        }
        let address = state.next_device_address;
        // A gap between allocations, so that a copy which runs over the end of one is refused.
        state.next_device_address += (bytes as u64).next_multiple_of(ALIGNMENT) + ALIGNMENT;
        let contents = Mutex::new(vec![self.config.device_memory_fill; bytes].into_boxed_slice());
        state.device_memory.insert(address, Arc::new(DeviceMemory { address, context, bytes, contents }));
        Ok(address)
    }

    fn uses_host_page_tables(&self) -> bool {
        self.config.attribute_value(HOST_PAGE_TABLES).unwrap_or(0) != 0
    }

    /// Copies, fills: enqueues the work, and waits for it where the host may not go on before.
    pub(super) fn transfer(
        &self,
        call: Call,
        stream: usize,
        bytes: usize,
        host: Option<usize>,
        work: impl FnOnce(&State) -> Result<Work, u32>,
    ) -> Result<(), u32> {
        let thread = self.enter(call, bytes)?;
        let mut state = self.state.lock();
        let slot = self.stream_slot(&mut state, thread, stream)?;
        self.need_context(&state, thread)?;
        if bytes == 0 {
            return Ok(());
        }
        let host_kind = match host {
            Some(address) => match state.classify_host(address, bytes)? {
                // The device goes by the host's page tables: pageable memory is as good as page-locked.
                HostKind::Pageable if self.uses_host_page_tables() => HostKind::PageLocked,
                kind => kind,
            },
            None => HostKind::PageLocked,
        };
        let work = work(&state)?;
        if let Some(capture) = self.use_stream(&mut state, slot)? {
            state.capture(capture, slot, work, host.map(|address| (address, bytes)));
            return Ok(());
        }
        let context = state.streams[slot].context;
        let position = state.next_position(slot);
        self.enqueue_at(state, position, work, host.map(|address| (address, bytes)));
        // Without `Async` the host waits where host memory takes part; on pageable memory it always does.
        let is_synchronous = matches!(call, Call::MemcpyHtoD | Call::MemcpyDtoH);
        match is_synchronous || host_kind == HostKind::Pageable {
            true => self.wait_for(self.state.lock(), context, &[position]),
            false => Ok(()),
        }
    }
}

/// Device memory. (Copies from and to host memory are in `host_memory.rs`, since they are unsafe.)
impl Cuda {
    /// `cuMemGetInfo`: free and total bytes of the current device.
    pub fn cu_mem_get_info(&self) -> Result<(usize, usize), u32> {
        let core = self.core();
        let thread = core.enter(Call::MemGetInfo, 0)?;
        let state = core.state.lock();
        let context = core.current_context(&state, thread)?;
        let used = state.device_bytes(state.contexts[context.index].device);
        let total = core.config.device_memory_bytes;
        Ok((total - used, total))
    }

    /// `cuMemAlloc` in the current context; 1 for zero bytes.
    pub fn cu_mem_alloc(&self, bytes: usize) -> Result<u64, u32> {
        let core = self.core();
        let thread = core.enter(Call::MemAlloc, bytes)?;
        let mut state = core.state.lock();
        let context = core.current_context(&state, thread)?;
        core.capture_checked(&mut state, thread)?;
        core.allocate(&mut state, context, bytes)
    }

    /// `cuMemFree`. Unlike the real one it does not wait: work in flight keeps the memory for itself. Managed
    /// memory is freed like host memory: it waits, and may not be in use.
    pub fn cu_mem_free(&self, address: u64) -> Result<(), u32> {
        if let Some(freed) = self.free_managed(address) {
            return freed;
        }
        let core = self.core();
        let thread = core.enter(Call::MemFree, 0)?;
        let mut state = core.state.lock();
        core.current_context(&state, thread)?;
        core.capture_checked(&mut state, thread)?;
        state.device_memory.remove(&address).map(drop).ok_or(INVALID_VALUE)
    }

    /// `cuMemAllocAsync`: usable at once, also in a capture, whose replays allocate nothing.
    pub fn cu_mem_alloc_async(&self, bytes: usize, stream: usize) -> Result<u64, u32> {
        let core = self.core();
        let thread = core.enter(Call::MemAllocAsync, bytes)?;
        let mut state = core.state.lock();
        let slot = core.stream_slot(&mut state, thread, stream)?;
        core.need_context(&state, thread)?;
        core.use_stream(&mut state, slot)?;
        let context = state.streams[slot].context;
        core.allocate(&mut state, context, bytes)
    }

    /// `cuMemFreeAsync`: no later call can use the address; work in flight keeps the memory for itself. Captured, it
    /// frees nothing, so that the replays can use the memory.
    pub fn cu_mem_free_async(&self, address: u64, stream: usize) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::MemFreeAsync, 0)?;
        let mut state = core.state.lock();
        let slot = core.stream_slot(&mut state, thread, stream)?;
        core.need_context(&state, thread)?;
        if core.use_stream(&mut state, slot)?.is_some() {
            return state.device_range(address, 1).map(drop);
        }
        state.device_memory.remove(&address).map(drop).ok_or(INVALID_VALUE)
    }

    /// `cuMemcpyDtoD` on the legacy default stream; the host does not wait.
    pub fn cu_memcpy_dtod(&self, dst: u64, src: u64, bytes: usize) -> Result<(), u32> {
        self.device_copy(Call::MemcpyDtoD, dst, src, bytes, 0)
    }

    /// `cuMemcpyDtoDAsync`.
    pub fn cu_memcpy_dtod_async(&self, dst: u64, src: u64, bytes: usize, stream: usize) -> Result<(), u32> {
        self.device_copy(Call::MemcpyDtoDAsync, dst, src, bytes, stream)
    }

    /// `cuMemsetD8` on the legacy default stream; the host does not wait.
    pub fn cu_memset_d8(&self, dst: u64, value: u8, bytes: usize) -> Result<(), u32> {
        let core = self.core();
        core.transfer(Call::MemsetD8, 0, bytes, None, |state| {
            Ok(Work::Fill { dst: state.device_range(dst, bytes)?, value })
        })
    }

    /// `cuMemsetD8Async`.
    pub fn cu_memset_d8_async(&self, dst: u64, value: u8, bytes: usize, stream: usize) -> Result<(), u32> {
        let core = self.core();
        core.transfer(Call::MemsetD8Async, stream, bytes, None, |state| {
            Ok(Work::Fill { dst: state.device_range(dst, bytes)?, value })
        })
    }

    fn device_copy(&self, call: Call, dst: u64, src: u64, bytes: usize, stream: usize) -> Result<(), u32> {
        let core = self.core();
        core.transfer(call, stream, bytes, None, |state| {
            let (src, dst) = (state.device_range(src, bytes)?, state.device_range(dst, bytes)?);
            Ok(Work::DeviceToDevice { src, dst })
        })
    }
}
