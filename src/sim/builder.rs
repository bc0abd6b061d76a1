//! Settings of a simulated device.

use super::Sim;
use std::time::Duration;

/// `CU_DEVICE_ATTRIBUTE_*`: what a Linux desktop or data-centre device answers.
const ATTRIBUTES: &[(i32, i32)] = &[
    (18, 0),   // INTEGRATED
    (19, 1),   // CAN_MAP_HOST_MEMORY
    (33, 0),   // PCI_BUS_ID
    (34, 0),   // PCI_DEVICE_ID
    (41, 1),   // UNIFIED_ADDRESSING
    (50, 0),   // PCI_DOMAIN_ID
    (75, 9),   // COMPUTE_CAPABILITY_MAJOR
    (76, 0),   // COMPUTE_CAPABILITY_MINOR
    (83, 1),   // MANAGED_MEMORY
    (88, 0),   // PAGEABLE_MEMORY_ACCESS
    (89, 1),   // CONCURRENT_MANAGED_ACCESS
    (91, 1),   // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    (99, 1),   // HOST_REGISTER_SUPPORTED
    (100, 0),  // PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
    (113, 0),  // READ_ONLY_HOST_REGISTER_SUPPORTED
    (115, 1),  // MEMORY_POOLS_SUPPORTED
    (134, -1), // HOST_NUMA_ID
];

/// Who executes what streams hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Clock {
    /// The test, step by step, or a call that has to wait.
    Stepped,
    /// A thread, when the operation's time has come.
    RealTime,
    /// The call that enqueues it, unless something is in the way; the thread of [`Clock::RealTime`] does the rest.
    Inline,
}

/// Settings of a [`Sim`]; see [`Sim::builder`].
#[derive(Clone, Debug)]
pub struct SimBuilder {
    pub(super) clock: Clock,
    pub(super) devices: i32,
    pub(super) seed: u64,
    pub(super) attributes: Vec<(i32, i32)>,
    pub(super) device_memory_bytes: usize,
    pub(super) device_memory_fill: u8,
    pub(super) driver_lock: bool,
    pub(super) unregister_waits: bool,
    pub(super) mapping_check: bool,
    pub(super) handles_need_context: bool,
    pub(super) user_objects: bool,
    pub(super) context_wait_breaks_captures: bool,
    pub(super) captured_event_survives_end: bool,
    pub(super) registrations_max: usize,
    pub(super) confidential_computing: bool,
    pub(super) pinned_bytes_max: usize,
    pub(super) memory_nodes: Option<Vec<u32>>,
    pub(super) call_cost: Duration,
    pub(super) operation_latency: Duration,
    pub(super) copy_bytes_per_second: Option<u64>,
    pub(super) register_cost_per_page: Duration,
    pub(super) unregister_cost_per_page: Duration,
    pub(super) event_create_cost: Duration,
}

impl Default for SimBuilder {
    fn default() -> Self {
        Self {
            clock: Clock::Stepped,
            devices: 1,
            seed: 1,
            attributes: ATTRIBUTES.to_vec(),
            device_memory_bytes: 16 << 30,
            device_memory_fill: 0xCD,
            driver_lock: true,
            unregister_waits: true,
            mapping_check: cfg!(target_os = "linux"),
            handles_need_context: true,
            user_objects: true,
            context_wait_breaks_captures: true,
            captured_event_survives_end: true,
            registrations_max: 65_000,
            confidential_computing: false,
            pinned_bytes_max: usize::MAX,
            memory_nodes: None,
            call_cost: Duration::ZERO,
            operation_latency: Duration::ZERO,
            copy_bytes_per_second: None,
            register_cost_per_page: Duration::ZERO,
            unregister_cost_per_page: Duration::ZERO,
            event_create_cost: Duration::ZERO,
        }
    }
}

impl SimBuilder {
    /// How many devices there are (default 1). With 0, `cuInit` answers 100 (no device).
    pub fn devices(mut self, devices: i32) -> Self {
        self.devices = devices.max(0);
        self
    }

    /// Where all randomness comes from: the order of streams in [`Sim::step`], and random faults. Default 1.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Real time: a thread executes operations when their time has come.
    ///
    /// Sets the costs of an unhurried desktop: 4 us an operation, 25 GB/s a copy direction, 200 ns a call,
    /// 150 ns a 4 KiB page registered and 50 ns a page unregistered. Each can be set afterwards.
    pub fn real_time(mut self) -> Self {
        self.clock = Clock::RealTime;
        self.call_cost = Duration::from_nanos(200);
        self.operation_latency = Duration::from_micros(4);
        self.copy_bytes_per_second = Some(25_000_000_000);
        self.register_cost_per_page = Duration::from_nanos(150);
        self.unregister_cost_per_page = Duration::from_nanos(50);
        self
    }

    /// Real time in which everything is free: the call that enqueues an operation executes it, unless the
    /// stream is held, stalled or busy. Registering does not look at the mapping.
    ///
    /// For benches, where the simulated driver should cost as little as possible.
    pub fn zero_cost(mut self) -> Self {
        self.clock = Clock::Inline;
        self.mapping_check = false;
        self.device_memory_fill = 0;
        self.call_cost = Duration::ZERO;
        self.operation_latency = Duration::ZERO;
        self.copy_bytes_per_second = None;
        self.register_cost_per_page = Duration::ZERO;
        self.unregister_cost_per_page = Duration::ZERO;
        self.event_create_cost = Duration::ZERO;
        self
    }

    /// Whether registering and unregistering stall every other driver call for as long as they cost
    /// ([`register_cost_per_page`](Self::register_cost_per_page)). Default on.
    ///
    /// `cuCtxGetCurrent` is not stalled, since it only reads a thread-local. Slow and hanging calls
    /// ([`Fault`](super::Fault)) are so *before* they take the lock.
    pub fn driver_lock(mut self, on: bool) -> Self {
        self.driver_lock = on;
        self
    }

    /// Whether `cuMemHostUnregister` and `cuMemFreeHost` wait for all outstanding work of the context, as
    /// NVIDIA's driver does without promising it. Default on; the check for a use in flight comes first.
    pub fn unregister_waits(mut self, on: bool) -> Self {
        self.unregister_waits = on;
        self
    }

    /// Whether `cuMemHostRegister` refuses ranges with a hole, or that cannot be written (1). Default on
    /// where the system can tell (Linux).
    pub fn mapping_check(mut self, on: bool) -> Self {
        self.mapping_check = on && cfg!(target_os = "linux");
        self
    }

    /// Whether calls on explicit stream and event handles need a current context (201 without). Default on,
    /// as NVIDIA's headers list it; a driver may be more lenient.
    pub fn handles_need_context(mut self, on: bool) -> Self {
        self.handles_need_context = on;
        self
    }

    /// Whether `cuCtxSynchronize` is refused (900), and breaks the capture, while a stream of the context captures,
    /// even in relaxed mode. Default on, since nobody has proved the opposite.
    pub fn context_wait_breaks_captures(mut self, on: bool) -> Self {
        self.context_wait_breaks_captures = on;
        self
    }

    /// Whether an event that was last recorded in a capture cannot be asked (907) even when the capture is over,
    /// until it is recorded again. Default on; off, it is complete then.
    pub fn captured_event_survives_end(mut self, on: bool) -> Self {
        self.captured_event_survives_end = on;
        self
    }

    /// Whether there are user objects (`cuUserObjectCreate`); without them that answers 801. Default on; drivers
    /// before 11.3 have none.
    pub fn user_objects(mut self, on: bool) -> Self {
        self.user_objects = on;
        self
    }

    /// How many registrations there may be before `cuMemHostRegister` answers 2. Default 65 000.
    pub fn registrations_max(mut self, count: usize) -> Self {
        self.registrations_max = count;
        self
    }

    /// Whether the devices run in confidential computing mode: `cuMemHostRegister` answers 801, whatever the size
    /// and the flags and although attribute 99 says 1, while `cuMemHostAlloc` works. Default off.
    pub fn confidential_computing(mut self, on: bool) -> Self {
        self.confidential_computing = on;
        self
    }

    /// How many bytes may be page-locked at once, registered and allocated, before both answer 2: the budget of
    /// WSL and of some containers. Default without a limit.
    pub fn pinned_bytes_max(mut self, bytes: usize) -> Self {
        self.pinned_bytes_max = bytes;
        self
    }

    /// The NUMA nodes with memory that the machine seems to have. Default: those that it has.
    ///
    /// A pool is asked for one of these ([`PoolBuilder::numa_node`](crate::PoolBuilder::numa_node)); whether the kernel
    /// knows it too shows when memory is mapped.
    pub fn memory_nodes(mut self, nodes: impl Into<Vec<u32>>) -> Self {
        self.memory_nodes = Some(nodes.into());
        self
    }

    /// Overrides an attribute (`CUdevice_attribute`) of all devices.
    ///
    /// These change what the device does: 83 = 0, no managed memory (801); 89 = 0, no preferred location for it
    /// (101); 91 = 0, registered memory has another address on the device; 99 = 0, registering is not supported
    /// (801); 100 = 1, the device goes by the host's page tables, so that a copy from pageable memory, too, reads
    /// it when the stream executes it; 113 = 1, memory can be registered as read-only. With 88 = 1 the device
    /// only says that it reads pageable memory itself.
    pub fn attribute(mut self, attribute: i32, value: i32) -> Self {
        self.attributes.retain(|(known, _)| *known != attribute);
        self.attributes.push((attribute, value));
        self
    }

    /// Memory of each device in bytes. Default 16 GiB; backed by host memory as it is allocated.
    pub fn device_memory_bytes(mut self, bytes: usize) -> Self {
        self.device_memory_bytes = bytes;
        self
    }

    /// What every driver call costs its caller, at least.
    pub fn call_cost(mut self, cost: Duration) -> Self {
        self.call_cost = cost;
        self
    }

    /// What an operation takes on the device, beside its bytes. Real time only.
    pub fn operation_latency(mut self, latency: Duration) -> Self {
        self.operation_latency = latency;
        self
    }

    /// Bandwidth of a device's copy engines; there is one for each direction. Real time only.
    pub fn copy_bytes_per_second(mut self, rate: u64) -> Self {
        self.copy_bytes_per_second = Some(rate.max(1));
        self
    }

    /// What registering costs per 4 KiB page, on any clock.
    pub fn register_cost_per_page(mut self, cost: Duration) -> Self {
        self.register_cost_per_page = cost;
        self
    }

    /// What unregistering costs per 4 KiB page, on any clock.
    pub fn unregister_cost_per_page(mut self, cost: Duration) -> Self {
        self.unregister_cost_per_page = cost;
        self
    }

    /// What creating an event costs besides the call, on any clock. Default nothing; a real driver takes some
    /// microseconds, which is why a pool keeps its events.
    pub fn event_create_cost(mut self, cost: Duration) -> Self {
        self.event_create_cost = cost;
        self
    }

    /// Builds the device.
    pub fn build(self) -> Sim {
        Sim::from_settings(self)
    }

    pub(super) fn attribute_value(&self, attribute: i32) -> Option<i32> {
        self.attributes.iter().find(|(known, _)| *known == attribute).map(|(_, value)| *value)
    }
}
