//! What a device does: page-locking, and copying from page-locked and from ordinary memory.

use crate::machine::kib;
use crate::memory::Mapping;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError};
use pinpool::backend::DeviceSupport;
use pinpool::{BackingInUse, Driver, PinnedPool};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZES: [usize; 3] = [4 << 10, 1 << 20, 64 << 20];
const BIG: usize = 64 << 20;
const REPEATS: usize = 3;

/// What was tried, and how it went.
pub struct Trial {
    pub devices: Vec<Device>,
    /// What each device says about the memory it can be given.
    pub support: Vec<DeviceSupport>,
    /// What the pool ended up with on device 0.
    pub backing: BackingInUse,
    pub registrations: Vec<Registration>,
    pub page_locks: Vec<PageLock>,
    /// Empty where nothing could be page-locked or copied.
    pub copies: Vec<Copy>,
    /// `VmLck` and `VmPin` of this process in bytes, before and while 64 MiB are page-locked.
    pub vm_before: VmLines,
    pub vm_during: VmLines,
}

pub struct Device {
    pub ordinal: usize,
    pub name: String,
    pub context_was_active: bool,
    /// The NUMA node of the host that it is nearest to, where one is known.
    pub numa_node: Option<u32>,
}

pub struct Registration {
    pub bytes: usize,
    pub elapsed: Duration,
    /// Whether the driver, asked afterwards, says the same; or the refusal.
    pub result: Result<bool, String>,
}

pub struct PageLock {
    pub huge_pages: bool,
    pub result: Result<(Duration, Duration), u32>,
}

pub struct Copy {
    pub direction: &'static str,
    pub memory: &'static str,
    /// Until the call returned.
    pub call: Duration,
    /// Until the bytes were there.
    pub total: Duration,
}

#[derive(Clone, Copy)]
pub struct VmLines {
    pub locked: Option<u64>,
    pub pinned: Option<u64>,
}

impl VmLines {
    fn now() -> Self {
        let of = |name| kib("/proc/self/status", name);
        Self { locked: of("VmLck:"), pinned: of("VmPin:") }
    }
}

impl Trial {
    pub fn pinning_works(&self) -> bool {
        !self.registrations.is_empty() && self.registrations.iter().all(|tried| tried.result == Ok(true))
    }

    pub fn is_simulated(&self) -> bool {
        self.devices.iter().any(|device| device.name.contains("simulated"))
    }

    /// Tries everything on device 0. An error says what could not even be begun.
    pub fn run(driver: &Driver) -> Result<Self, String> {
        let devices = devices(driver).map_err(text)?;
        if devices.is_empty() {
            return Err("the driver has no device".into());
        }
        let context = CudaContext::new(0).map_err(text)?;
        let stream = context.new_stream().map_err(text)?;
        let pool = PinnedPool::builder().driver(driver.clone()).context_of(&stream).build().map_err(text)?;
        let registrations = SIZES.iter().map(|bytes| try_to_pin(driver, &pool, *bytes)).collect();
        let vm_before = VmLines::now();
        let held = pool.take_pinned(BIG);
        let vm_during = VmLines::now();
        drop(held);
        let page_locks = [false, true].into_iter().filter_map(page_lock).collect();
        let copies = copies(&pool, &stream).unwrap_or_default();
        let backing = pool.stats().backing;
        pool.shutdown();
        let support = DeviceSupport::of_all(driver).unwrap_or_default();
        Ok(Self { devices, support, backing, registrations, page_locks, copies, vm_before, vm_during })
    }
}

fn devices(driver: &Driver) -> Result<Vec<Device>, DriverError> {
    let count = CudaContext::device_count()?;
    (0..count).map(|ordinal| Device::look(driver, ordinal as usize)).collect()
}

impl Device {
    fn look(driver: &Driver, ordinal: usize) -> Result<Self, DriverError> {
        use cudarc::driver::result;
        let device = result::device::get(ordinal as i32)?;
        Ok(Self {
            ordinal,
            name: result::device::get_name(device)?,
            context_was_active: crate::memory::primary_is_active(device),
            numa_node: driver.numa_node(ordinal as i32).unwrap_or(None),
        })
    }
}

fn try_to_pin(driver: &Driver, pool: &PinnedPool, bytes: usize) -> Registration {
    let started = Instant::now();
    let taken = pool.take_pinned(bytes);
    let elapsed = started.elapsed();
    let asked = |buffer: pinpool::PinnedBuffer| driver.is_page_locked(&buffer);
    Registration { bytes, elapsed, result: taken.and_then(asked).map_err(|error| error.to_string()) }
}

/// The best of a few, since a machine that is busy makes none of them faster.
fn page_lock(huge_pages: bool) -> Option<PageLock> {
    let mapping = Mapping::new(BIG, huge_pages)?;
    let all: Result<Vec<_>, u32> = (0..REPEATS).map(|_| mapping.register()).collect();
    let result = all.map(|all| all.into_iter().min().expect("repeated at least once"));
    Some(PageLock { huge_pages, result })
}

fn copies(pool: &PinnedPool, stream: &Arc<CudaStream>) -> Result<Vec<Copy>, String> {
    let mut pinned = pool.take_pinned(BIG).map_err(text)?;
    let mut pageable = vec![1_u8; BIG];
    pinned.fill(1);
    let mut device = stream.alloc_zeros::<u8>(BIG).map_err(text)?;
    stream.synchronize().map_err(text)?;
    let mut copies = Vec::new();
    for (memory, host) in [("pageable", &mut pageable[..]), ("page-locked", &mut pinned[..])] {
        let to_device = |host: &mut [u8], device: &mut CudaSlice<u8>| stream.memcpy_htod(&*host, device);
        let from_device = |host: &mut [u8], device: &mut CudaSlice<u8>| stream.memcpy_dtoh(&*device, host);
        let (call, total) = best(stream, || to_device(host, &mut device))?;
        copies.push(Copy { direction: "host to device", memory, call, total });
        let (call, total) = best(stream, || from_device(host, &mut device))?;
        copies.push(Copy { direction: "device to host", memory, call, total });
    }
    Ok(copies)
}

fn best(
    stream: &CudaStream,
    mut copy: impl FnMut() -> Result<(), DriverError>,
) -> Result<(Duration, Duration), String> {
    let mut best: Option<(Duration, Duration)> = None;
    for _ in 0..REPEATS {
        let started = Instant::now();
        copy().map_err(text)?;
        let call = started.elapsed();
        stream.synchronize().map_err(text)?;
        let total = started.elapsed();
        if best.is_none_or(|(_, fastest)| total < fastest) {
            best = Some((call, total));
        }
    }
    best.ok_or_else(|| "nothing was repeated".into())
}

/// An error as text. cudarc's asks its library for the words; by now there is one.
fn text(error: impl Debug) -> String {
    format!("{error:?}")
}
