//! The one simulated device of the process, made at the first call from settings that can change until then.

use pinpool::sim::{Cuda, Sim};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// What the device will be like, as far as the control functions can say.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) devices: i32,
    pub(crate) clock: Clock,
    /// Attributes (`CUdevice_attribute`) that differ from a data-centre device's.
    pub(crate) attributes: Vec<(i32, i32)>,
    pub(crate) confidential_computing: bool,
    pub(crate) pinned_bytes_max: usize,
    /// Whether registering looks at the mapping.
    pub(crate) mapping_check: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Clock {
    /// The device moves only when it is stepped.
    Stepped,
    /// The device runs by itself at these rates.
    RealTime { latency: Duration, bytes_per_second: u64, register_per_page: Duration },
}

/// A PCIe 4.0 card, roughly: 25 GB/s, some microseconds to start a copy, and the cost of page-locking
/// resident 4 KiB pages that was measured on the machines of this project.
const TYPICAL: Clock = Clock::RealTime {
    latency: Duration::from_micros(8),
    bytes_per_second: 25_000_000_000,
    register_per_page: Duration::from_nanos(150),
};

static SETTINGS: LazyLock<Mutex<Settings>> = LazyLock::new(|| {
    let stepped = std::env::var("FAKE_CUDA_CLOCK").is_ok_and(|value| value == "stepped");
    Mutex::new(Settings {
        devices: 1,
        clock: if stepped { Clock::Stepped } else { TYPICAL },
        attributes: attributes_from_environment(),
        confidential_computing: std::env::var("FAKE_CUDA_CONFIDENTIAL").is_ok_and(|value| value == "1"),
        pinned_bytes_max: usize::MAX,
        mapping_check: true,
    })
});

/// `FAKE_CUDA_ATTRIBUTES`, for example `99=0,100=1`.
fn attributes_from_environment() -> Vec<(i32, i32)> {
    let list = std::env::var("FAKE_CUDA_ATTRIBUTES").unwrap_or_default();
    let pairs = list.split(',').filter_map(|pair| pair.split_once('='));
    pairs.filter_map(|(number, value)| Some((number.parse().ok()?, value.parse().ok()?))).collect()
}

static DEVICE: OnceLock<Sim> = OnceLock::new();

fn settings() -> MutexGuard<'static, Settings> {
    SETTINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Changes the settings; false when the device exists already.
pub(crate) fn configure(change: impl FnOnce(&mut Settings)) -> bool {
    let mut settings = settings();
    let early = DEVICE.get().is_none();
    if early {
        change(&mut settings);
    }
    early
}

/// The device, made at the first call.
pub(crate) fn sim() -> &'static Sim {
    DEVICE.get_or_init(|| {
        let settings = settings().clone();
        let has_no_objects = std::env::var("FAKE_CUDA_USER_OBJECTS").is_ok_and(|value| value == "0");
        let mut builder = Sim::builder()
            .devices(settings.devices)
            .user_objects(!has_no_objects)
            .confidential_computing(settings.confidential_computing)
            .pinned_bytes_max(settings.pinned_bytes_max)
            .mapping_check(settings.mapping_check);
        for (number, value) in settings.attributes {
            builder = builder.attribute(number, value);
        }
        let sim = match settings.clock {
            Clock::Stepped => builder.build(),
            Clock::RealTime { latency, bytes_per_second, register_per_page } => builder
                .real_time()
                .operation_latency(latency)
                .copy_bytes_per_second(bytes_per_second)
                .register_cost_per_page(register_per_page)
                .unregister_cost_per_page(register_per_page / 3)
                .build(),
        };
        // A panic could only become a 999 here, so the checks collect what they find.
        sim.expect_violations();
        sim
    })
}

/// Its raw entry points.
pub(crate) fn cuda() -> &'static Cuda {
    sim().cuda()
}

/// Whether the library plays the toolkit's link-time stub.
pub(crate) fn is_stub() -> bool {
    static STUB: LazyLock<bool> =
        LazyLock::new(|| std::env::var("FAKE_CUDA_STUB").is_ok_and(|value| value == "1"));
    *STUB
}

/// What every registration answers instead of registering, if it shall.
pub(crate) fn refusal() -> Option<u32> {
    static REFUSAL: LazyLock<Option<u32>> =
        LazyLock::new(|| std::env::var("FAKE_CUDA_REFUSE").ok().and_then(|code| code.parse().ok()));
    *REFUSAL
}
