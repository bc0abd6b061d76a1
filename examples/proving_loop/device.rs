//! Which device the loop runs on: the real one where there is one, else the simulated one.
#![allow(unsafe_code)] // opens libcuda to ask whether it works, before cudarc (which panics without one) is touched

use fake_cuda::control::Control;
use std::ffi::c_int;
use std::fmt::Debug;
use std::time::Duration;

/// What the simulated device is set to: a PCIe 4.0 card, roughly.
const LATENCY: Duration = Duration::from_micros(8);
const BYTES_PER_SECOND: u64 = 25_000_000_000;
const REGISTER_PER_PAGE: Duration = Duration::from_nanos(150);

pub struct Device {
    pub name: String,
    simulated: Option<Control>,
}

impl Device {
    /// Has to be called before anything of cudarc is.
    pub fn find() -> Result<Self, String> {
        if real_cuda_works() {
            return Ok(Self { name: String::new(), simulated: None });
        }
        let control = Control::load()?;
        match control.set_real_time(LATENCY, BYTES_PER_SECOND, REGISTER_PER_PAGE) {
            true => Ok(Self { name: String::new(), simulated: Some(control) }),
            false => Err("the simulated device was used before it was set up".into()),
        }
    }

    pub fn is_simulated(&self) -> bool {
        self.simulated.is_some()
    }

    /// The simulator's constants; `None` on a real device.
    pub fn constants(&self) -> Option<String> {
        self.simulated.as_ref()?;
        let (latency, page) = (LATENCY.as_micros(), REGISTER_PER_PAGE.as_nanos());
        let gb_s = BYTES_PER_SECOND / 1_000_000_000;
        Some(format!("{gb_s} GB/s, {latency} us to start a copy, {page} ns to page-lock 4 KiB"))
    }

    /// What the simulated device caught somebody at: memory changed under a copy, an event reused too early ...
    pub fn violations(&self) -> Vec<String> {
        self.simulated.as_ref().map_or(Vec::new(), Control::violations)
    }
}

/// An error as text. cudarc's own `Display` asks the driver; its `Debug` does so too, but by then there is one.
pub fn text(error: impl Debug) -> String {
    format!("{error:?}")
}

/// Whether `libcuda.so.1` opens, initialises and has a device. Closed again when not, so that it is in nobody's way.
fn real_cuda_works() -> bool {
    // SAFETY: opening NVIDIA's driver library runs its initialisers, which is what every CUDA program does.
    let Ok(library) = (unsafe { libloading::Library::new("libcuda.so.1") }) else { return false };
    // SAFETY: `cuInit(unsigned int)` has had this signature in every version.
    let init = unsafe { library.get::<unsafe extern "C" fn(u32) -> c_int>(b"cuInit\0") };
    // SAFETY: `cuDeviceGetCount(int *)` has had this signature in every version.
    let count = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"cuDeviceGetCount\0") };
    let (Ok(init), Ok(count)) = (init, count) else { return false };
    let mut devices = 0;
    // SAFETY: `cuInit` takes only flags, which must be 0.
    let initialised = unsafe { init(0) } == 0;
    // SAFETY: `cuDeviceGetCount` writes one int.
    let works = initialised && unsafe { count(&mut devices) } == 0 && devices > 0;
    if works {
        std::mem::forget(library); // cudarc opens the same file; the driver does not like to be unloaded
    }
    works
}
