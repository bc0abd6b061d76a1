//! Memory that the driver allocates and the host may touch: page-locked host memory, and managed memory.

use super::calls::Call;
use super::checks::Access;
use super::codes::*;
use super::core::Core;
use super::cuda::Cuda;
use super::host_memory::HostAllocation;
use super::state::{ContextRef, State};

/// CU_MEMHOSTALLOC_PORTABLE.
const PORTABLE: u32 = 1;
/// CU_MEMHOSTALLOC_DEVICEMAP, which unified addressing implies.
const DEVICE_MAP: u32 = 2;
/// Portable, device-mapped, write-combined.
const HOST_ALLOC_FLAGS: u32 = 7;
/// CU_MEM_ATTACH_GLOBAL and CU_MEM_ATTACH_HOST; the third, single, is for `cuStreamAttachMemAsync` alone.
const ATTACH_FLAGS: [u32; 2] = [1, 2];
const MANAGED_MEMORY: i32 = 83;
const CONCURRENT_MANAGED_ACCESS: i32 = 89;

/// `CUmem_advise`: 1 and 2 set and unset read-mostly, 3 and 4 a preferred location, 5 and 6 accessed-by.
const ADVICE: std::ops::RangeInclusive<u32> = 1..=6;
const SET_PREFERRED_LOCATION: u32 = 3;
const UNSET_PREFERRED_LOCATION: u32 = 4;
/// `CUmemLocationType`.
const LOCATION_DEVICE: i32 = 1;
const LOCATION_HOST: i32 = 2;

/// One allocation.
pub(super) struct HostPiece {
    pub(super) context: ContextRef,
    /// As `cuMemHostGetFlags` answers them.
    flags: u32,
    /// `Some` for managed memory.
    managed: Option<Managed>,
    memory: HostAllocation,
}

/// What has been advised for managed memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Managed {
    /// The device whose memory it prefers.
    preferred: Option<i32>,
}

impl HostPiece {
    pub(super) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    pub(super) fn is_managed(&self) -> bool {
        self.managed.is_some()
    }
}

impl State {
    /// Bytes of `cuMemHostAlloc`, or of managed memory.
    pub(super) fn allocated_bytes(&self, managed: bool) -> usize {
        let of_kind = self.host_allocations.values().filter(|piece| piece.is_managed() == managed);
        of_kind.map(HostPiece::bytes).sum()
    }

    /// The part of `cuMemHostAlloc`'s that is page-locked for every context.
    pub(super) fn portable_allocated_bytes(&self) -> usize {
        let portable = self.host_allocations.values().filter(|piece| piece.flags & PORTABLE != 0);
        portable.map(HostPiece::bytes).sum()
    }

    /// Address and bytes of each.
    pub(super) fn allocations(&self, managed: bool) -> Vec<(usize, usize)> {
        let of_kind = self.host_allocations.iter().filter(|(_, piece)| piece.is_managed() == managed);
        of_kind.map(|(address, piece)| (*address, piece.bytes())).collect()
    }

    /// The allocations of a context are gone for the driver. The memory stays, so that a test in which somebody
    /// still touches it ends with what it asserts, and not with a crash.
    pub(super) fn forget_allocations_of(&mut self, context: ContextRef) {
        let of_context = self.host_allocations.iter().filter(|(_, piece)| piece.context == context);
        let bases: Vec<usize> = of_context.map(|(address, _)| *address).collect();
        for base in bases {
            if let Some(piece) = self.host_allocations.remove(&base) {
                self.vanished.insert(base, piece.bytes());
                self.vanished_allocations.push(piece.memory);
            }
        }
    }

    /// Address and device of every managed allocation that prefers a device.
    pub(super) fn preferences(&self) -> Vec<(usize, i32)> {
        let preferred = |(address, piece): (&usize, &HostPiece)| Some((*address, piece.managed?.preferred?));
        self.host_allocations.iter().filter_map(preferred).collect()
    }
}

impl Core {
    /// Frees what was allocated as the given kind; 1 for anything else.
    fn free_piece(&self, call: Call, address: usize, managed: bool) -> Result<(), u32> {
        let thread = self.enter(call, 0)?;
        let mut state = self.state.lock();
        self.current_context(&state, thread)?;
        self.capture_checked(&mut state, thread)?;
        let Some(piece) = state.host_allocations.get(&address).filter(|piece| piece.is_managed() == managed)
        else {
            let is_vanished = state.vanished.contains_key(&address);
            return Err(if is_vanished { CONTEXT_IS_DESTROYED } else { INVALID_VALUE });
        };
        let (bytes, context) = (piece.bytes(), piece.context);
        state.contexts[context.index].sticky_error.map_or(Ok(()), Err)?;
        let access = if managed { Access::FreeManaged } else { Access::FreeHost };
        self.check_access(&state, access, address, bytes);
        state.make_nodes_stale(access, address, bytes);
        state = self.wait_before_unpinning(state, context);
        self.cancel_operations_on(&mut state, address, bytes);
        state.host_allocations.remove(&address).map(drop).ok_or(INVALID_VALUE)
    }

    /// Whether this address is managed memory; asked before `cuMemFree` is taken for one of device memory.
    fn is_managed(&self, address: u64) -> bool {
        let state = self.state.lock();
        let piece = usize::try_from(address).ok().and_then(|address| state.host_allocations.get(&address));
        piece.is_some_and(HostPiece::is_managed)
            || usize::try_from(address).is_ok_and(|address| state.vanished.contains_key(&address))
    }
}

/// Memory that the driver allocates and the host may touch.
impl Cuda {
    /// `cuMemHostAlloc` in the current context: page-aligned. Its contents are a pattern, another one than device
    /// memory has, and as little to be relied on. Zero bytes succeed; more than [`pinned_bytes_max`](super::SimBuilder::pinned_bytes_max)
    /// answers 2.
    pub fn cu_mem_host_alloc(&self, bytes: usize, flags: u32) -> Result<*mut u8, u32> {
        let core = self.core();
        let thread = core.enter(Call::MemHostAlloc, bytes)?;
        let mut state = core.state.lock();
        let context = core.current_context(&state, thread)?;
        core.capture_checked(&mut state, thread)?;
        if flags & !HOST_ALLOC_FLAGS != 0 {
            return Err(INVALID_VALUE);
        }
        state.check_pinned_budget(core.config.pinned_bytes_max, bytes)?;
        let memory = HostAllocation::filled(bytes, !core.config.device_memory_fill).ok_or(OUT_OF_MEMORY)?;
        let address = memory.address();
        let piece = HostPiece { context, flags: flags | DEVICE_MAP, managed: None, memory };
        state.add_piece(piece);
        Ok(address)
    }

    /// `cuMemFreeHost`; 1 for anything but a pointer of `cuMemHostAlloc`, 709 when it vanished with its context.
    /// Needs a current context, as NVIDIA's headers list it.
    pub fn cu_mem_free_host(&self, address: *mut u8) -> Result<(), u32> {
        self.core().free_piece(Call::MemFreeHost, address as usize, false)
    }

    /// `cuMemAllocManaged` in the current context: 1 for zero bytes or for flags other than 1 (global) and 2
    /// (host), 801 where attribute 83 is 0. `cuMemFree` frees it.
    ///
    /// A copy from or to it is asynchronous, as from page-locked memory. On the device's side of a copy it cannot
    /// be used here.
    pub fn cu_mem_alloc_managed(&self, bytes: usize, flags: u32) -> Result<u64, u32> {
        let core = self.core();
        let thread = core.enter(Call::MemAllocManaged, bytes)?;
        let mut state = core.state.lock();
        let context = core.current_context(&state, thread)?;
        core.capture_checked(&mut state, thread)?;
        if bytes == 0 || !ATTACH_FLAGS.contains(&flags) {
            return Err(INVALID_VALUE);
        }
        if core.config.attribute_value(MANAGED_MEMORY).unwrap_or(0) == 0 {
            return Err(NOT_SUPPORTED);
        }
        let memory = HostAllocation::filled(bytes, !core.config.device_memory_fill).ok_or(OUT_OF_MEMORY)?;
        let address = memory.address() as u64;
        state.add_piece(HostPiece { context, flags: 0, managed: Some(Managed::default()), memory });
        Ok(address)
    }

    /// `cuMemFree` of managed memory; `None` for any other address.
    pub(super) fn free_managed(&self, address: u64) -> Option<Result<(), u32>> {
        let core = self.core();
        core.is_managed(address).then(|| core.free_piece(Call::MemFree, address as usize, true))
    }

    /// `cuMemAdvise_v2`: the location's type is 1 for a device and 2 for the host. 1 for an unknown advice and for
    /// memory that is not managed, 101 for no such device, and for one whose attribute 89 is 0.
    pub fn cu_mem_advise(
        &self,
        address: u64,
        bytes: usize,
        advice: u32,
        location: (i32, i32),
    ) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::MemAdvise, bytes)?;
        let mut state = core.state.lock();
        core.current_context(&state, thread)?;
        if bytes == 0 || !ADVICE.contains(&advice) {
            return Err(INVALID_VALUE);
        }
        let device = match location {
            (LOCATION_DEVICE, device) => {
                core.device_index(device)?;
                if core.config.attribute_value(CONCURRENT_MANAGED_ACCESS).unwrap_or(0) == 0 {
                    return Err(INVALID_DEVICE);
                }
                Some(device)
            }
            (LOCATION_HOST, _) => None,
            _ => return Err(INVALID_VALUE),
        };
        let start = usize::try_from(address).map_err(|_| INVALID_VALUE)?;
        let end = start.checked_add(bytes).ok_or(INVALID_VALUE)?;
        let (base, piece) = state.host_allocations.range_mut(..=start).next_back().ok_or(INVALID_VALUE)?;
        if end > base + piece.bytes() {
            return Err(INVALID_VALUE);
        }
        let managed = piece.managed.as_mut().ok_or(INVALID_VALUE)?;
        match advice {
            SET_PREFERRED_LOCATION => managed.preferred = device,
            UNSET_PREFERRED_LOCATION => managed.preferred = None,
            _ => {}
        }
        Ok(())
    }

    /// `cuMemHostGetFlags`; 1 for memory that was registered, or is managed, rather than allocated.
    pub fn cu_mem_host_get_flags(&self, address: *mut u8) -> Result<u32, u32> {
        let core = self.core();
        core.enter(Call::MemHostGetFlags, 0)?;
        let state = core.state.lock();
        let below = state.host_allocations.range(..=address as usize).next_back();
        let (base, piece) = below.filter(|(_, piece)| !piece.is_managed()).ok_or(INVALID_VALUE)?;
        if address as usize - base < piece.bytes() { Ok(piece.flags) } else { Err(INVALID_VALUE) }
    }
}

impl State {
    fn add_piece(&mut self, piece: HostPiece) {
        let (start, bytes) = (piece.memory.address() as usize, piece.bytes());
        self.forget_vanished(start, bytes);
        self.host_allocations.insert(start, piece);
    }

    /// Addresses that are in use again.
    pub(super) fn forget_vanished(&mut self, start: usize, bytes: usize) {
        self.vanished.retain(|old, old_bytes| *old >= start + bytes || *old + *old_bytes <= start);
    }

    /// 2 where the system allows no more page-locked memory, as WSL and containers do.
    pub(super) fn check_pinned_budget(&self, bytes_max: usize, bytes: usize) -> Result<(), u32> {
        let in_use = self.registered_bytes() + self.allocated_bytes(false);
        if in_use.saturating_add(bytes) > bytes_max { Err(OUT_OF_MEMORY) } else { Ok(()) }
    }
}
