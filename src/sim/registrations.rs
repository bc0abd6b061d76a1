//! Page-locked host memory: registrations, byte-exact, and what an address is.

use super::calls::Call;
use super::checks::Access;
use super::codes::*;
use super::core::Core;
use super::cuda::Cuda;
use super::mappings::{absent_pages, is_mapped_writable};
use super::memory::Registration;
use super::state::{Kind, State};
use parking_lot::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::Duration;

const PAGE_BYTES: usize = 4096;
/// CU_MEMHOSTREGISTER_IOMEMORY: for memory of other devices; refused to an unprivileged process.
const IO_MEMORY: u32 = 4;
const READ_ONLY: u32 = 8;
/// CU_MEMHOSTREGISTER_PORTABLE: page-locked for every context.
const PORTABLE: u32 = 1;
const HOST_REGISTER_SUPPORTED: i32 = 99;
const READ_ONLY_SUPPORTED: i32 = 113;
/// A single registration from 512 GiB on overflows a table of the driver.
const REGISTRATION_BYTES_LIMIT: usize = 1 << 39;
/// CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM.
const HOST_POINTER_SERVES: i32 = 91;
/// Where it does not, the device knows registered memory this far from its host address: between all host
/// addresses and all of device memory.
const ALIAS_OFFSET: u64 = 1 << 51;

/// What the driver takes host memory for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HostKind {
    PageLocked,
    Pageable,
}

/// A piece of page-locked memory.
struct Pinned {
    address: usize,
    bytes: usize,
    is_registered: bool,
}

impl State {
    /// Whether a range is page-locked; 1 when only a part is, or when it crosses from one piece to another.
    pub(super) fn classify_host(&self, address: usize, bytes: usize) -> Result<HostKind, u32> {
        let end = address.checked_add(bytes).filter(|_| address != 0).ok_or(INVALID_VALUE)?;
        match self.pinned_below(end) {
            Some(pinned) if pinned.address <= address && end <= pinned.end() => Ok(HostKind::PageLocked),
            Some(pinned) if pinned.end() > address => Err(INVALID_VALUE),
            _ => Ok(HostKind::Pageable),
        }
    }

    /// The piece that starts last before `end`. Pieces are disjoint, so it is the only one to look at.
    fn pinned_below(&self, end: usize) -> Option<Pinned> {
        let registered = self.registrations.range(..end).next_back();
        let registered = registered.map(|(address, registration)| Pinned {
            address: *address,
            bytes: registration.bytes,
            is_registered: true,
        });
        let allocated = self.host_allocations.range(..end).next_back();
        let allocated = allocated.map(|(address, piece)| Pinned {
            address: *address,
            bytes: piece.bytes(),
            is_registered: false,
        });
        registered.into_iter().chain(allocated).max_by_key(|pinned| pinned.address)
    }

    fn pinned_at(&self, address: usize) -> Option<Pinned> {
        self.pinned_below(address.checked_add(1)?).filter(|pinned| pinned.end() > address)
    }

    fn overlaps_pinned(&self, address: usize, end: usize) -> bool {
        self.pinned_below(end).is_some_and(|pinned| pinned.end() > address)
    }

    pub(super) fn registered_bytes(&self) -> usize {
        self.registrations.values().map(|registration| registration.bytes).sum()
    }
}

impl Pinned {
    fn end(&self) -> usize {
        self.address + self.bytes
    }
}

impl Core {
    /// What [`Fault::budget`](super::Fault::budget) counts for an entry point.
    pub(super) fn bytes_in_use(&self, call: Call) -> usize {
        let state = self.state.lock();
        match call {
            Call::MemHostRegister | Call::MemHostAlloc => {
                state.registered_bytes() + state.allocated_bytes(false)
            }
            Call::MemAllocManaged => state.allocated_bytes(true),
            Call::Map => self.mapped.lock().values().sum(),
            _ => state.device_memory.values().map(|memory| memory.bytes).sum(),
        }
    }

    fn check_register_support(&self, flags: u32, bytes: usize) -> Result<(), u32> {
        let has = |attribute| self.config.attribute_value(attribute).unwrap_or(0) != 0;
        if self.config.confidential_computing {
            return Err(NOT_SUPPORTED);
        }
        if !has(HOST_REGISTER_SUPPORTED) || (flags & READ_ONLY != 0 && !has(READ_ONLY_SUPPORTED)) {
            return Err(NOT_SUPPORTED);
        }
        if flags & IO_MEMORY != 0 {
            return Err(NOT_PERMITTED);
        }
        if bytes >= REGISTRATION_BYTES_LIMIT { Err(OUT_OF_MEMORY) } else { Ok(()) }
    }

    /// What the device calls an address of page-locked memory.
    fn device_address(&self, address: u64, pinned: &Pinned) -> u64 {
        let is_same = self.config.attribute_value(HOST_POINTER_SERVES).unwrap_or(1) != 0;
        if is_same || !pinned.is_registered { address } else { address + ALIAS_OFFSET }
    }

    /// What registering or unregistering takes, under the driver's lock where it has one.
    fn spend_on_pages(&self, cost_per_page: Duration, bytes: usize) {
        let cost = cost_per_page * u32::try_from(bytes.div_ceil(PAGE_BYTES)).unwrap_or(u32::MAX);
        match self.config.driver_lock && !cost.is_zero() {
            true => self.driver_lock.hold_for(cost),
            false => super::calls::spend(cost),
        }
    }

    /// Waits for the outstanding work of a context, where unregistering and freeing do.
    pub(super) fn wait_before_unpinning<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        context: super::state::ContextRef,
    ) -> MutexGuard<'a, State> {
        if !self.config.unregister_waits {
            return state;
        }
        let outstanding = state.outstanding(context);
        // An error of the context does not keep memory from being unpinned.
        let _ = self.wait_for(state, context, &outstanding);
        self.state.lock()
    }
}

/// Page-locked host memory.
impl Cuda {
    /// `cuMemHostRegister` in the current context. Byte-exact: 712 for any overlap with page-locked
    /// memory, whereas two ranges may share a page. 1 for a hole, or for memory that cannot be written.
    pub fn cu_mem_host_register(&self, address: *mut u8, bytes: usize, flags: u32) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::MemHostRegister, bytes)?;
        let start = address as usize;
        let context = {
            let mut state = core.state.lock();
            let context = core.current_context(&state, thread)?;
            core.capture_checked(&mut state, thread)?;
            let end = start.checked_add(bytes).ok_or(INVALID_VALUE)?;
            let is_on_device = state.device_range(start as u64, 1).is_ok();
            if start == 0 || bytes == 0 || flags & !0xF != 0 || is_on_device {
                return Err(INVALID_VALUE);
            }
            core.check_register_support(flags, bytes)?;
            if state.registrations.len() >= core.config.registrations_max {
                return Err(OUT_OF_MEMORY);
            }
            if state.overlaps_pinned(start, end) {
                return Err(HOST_MEMORY_ALREADY_REGISTERED);
            }
            state.check_pinned_budget(core.config.pinned_bytes_max, bytes)?;
            context
        };
        let needs_write = flags & READ_ONLY == 0;
        if core.config.mapping_check && !is_mapped_writable(start, bytes, needs_write) {
            return Err(INVALID_VALUE);
        }
        if core.config.mapping_check {
            core.pages_faulted_in.fetch_add(absent_pages(start, bytes), Ordering::Relaxed);
        }
        core.spend_on_pages(core.config.register_cost_per_page, bytes);
        let mut state = core.state.lock();
        state.check_context(context)?;
        // Asked again, since another thread may have registered meanwhile.
        if state.overlaps_pinned(start, start + bytes) {
            return Err(HOST_MEMORY_ALREADY_REGISTERED);
        }
        state.forget_vanished(start, bytes);
        let is_portable = flags & PORTABLE != 0;
        state.registrations.insert(start, Registration { bytes, is_portable, context });
        Ok(())
    }

    /// `cuMemHostUnregister`; needs no current context. 1 for an interior pointer or one of
    /// `cuMemHostAlloc`, 713 for an unknown one, 709 when the registration vanished with its context.
    pub fn cu_mem_host_unregister(&self, address: *mut u8) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::MemHostUnregister, 0)?;
        let start = address as usize;
        if start == 0 {
            return Err(INVALID_VALUE);
        }
        let mut state = core.state.lock();
        core.capture_checked(&mut state, thread)?;
        let Some(registration) = state.registrations.get(&start) else {
            return Err(match state.pinned_at(start) {
                Some(_) => INVALID_VALUE,
                None if state.vanished.contains_key(&start) => CONTEXT_IS_DESTROYED,
                None => HOST_MEMORY_NOT_REGISTERED,
            });
        };
        let (bytes, context) = (registration.bytes, registration.context);
        state.contexts[context.index].sticky_error.map_or(Ok(()), Err)?;
        core.check_access(&state, Access::Unregister, start, bytes);
        drop(core.wait_before_unpinning(state, context));
        core.spend_on_pages(core.config.unregister_cost_per_page, bytes);
        let removed = core.state.lock().registrations.remove(&start);
        removed.map(drop).ok_or(HOST_MEMORY_NOT_REGISTERED)
    }

    /// `cuMemHostGetDevicePointer`: the host address itself, as with unified addressing; another one for
    /// registered memory where attribute 91 is 0.
    pub fn cu_mem_host_get_device_pointer(&self, address: *mut u8, flags: u32) -> Result<u64, u32> {
        let core = self.core();
        core.enter(Call::MemHostGetDevicePointer, 0)?;
        let state = core.state.lock();
        match state.pinned_at(address as usize) {
            Some(pinned) if flags == 0 => Ok(core.device_address(address as u64, &pinned)),
            _ => Err(INVALID_VALUE),
        }
    }

    /// `cuPointerGetAttribute`: 1 context, 2 memory type (1 host, 2 device and managed), 3 device pointer, 4 host
    /// pointer, 8 managed, 9 device, 11 start, 12 size, 13 mapped. Plain memory answers 1 to all.
    pub fn cu_pointer_get_attribute(&self, attribute: u32, address: u64) -> Result<u64, u32> {
        let core = self.core();
        core.enter(Call::PointerGetAttribute, 0)?;
        let state = core.state.lock();
        let pinned = state.pinned_at(address as usize);
        let managed = pinned.as_ref().and_then(|pinned| state.host_allocations.get(&pinned.address));
        let is_managed = managed.is_some_and(|piece| piece.is_managed());
        let (start, bytes, context) = if let Some(pinned) = &pinned {
            let context = match state.registrations.get(&pinned.address) {
                Some(registration) => registration.context,
                None => state.host_allocations[&pinned.address].context,
            };
            (pinned.address as u64, pinned.bytes, context)
        } else {
            let below = state.device_memory.range(..=address).next_back();
            let memory = below.map(|(_, memory)| memory).ok_or(INVALID_VALUE)?;
            if address - memory.address >= memory.bytes as u64 {
                return Err(INVALID_VALUE);
            }
            (memory.address, memory.bytes, memory.context)
        };
        match attribute {
            1 => Ok(state.handle(Kind::Context, context.index) as u64),
            2 => Ok(if pinned.is_some() && !is_managed { 1 } else { 2 }),
            3 => Ok(pinned.map_or(address, |pinned| core.device_address(address, &pinned))),
            4 if pinned.is_some() => Ok(address),
            8 => Ok(u64::from(is_managed)),
            9 => Ok(state.contexts[context.index].device as u64),
            11 => Ok(start),
            12 => Ok(bytes as u64),
            13 => Ok(1),
            _ => Err(INVALID_VALUE),
        }
    }
}
