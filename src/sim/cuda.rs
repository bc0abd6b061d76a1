//! The simulated driver's entry points. Those of contexts, streams, events and memory stand in the files of
//! those names, beside the rules that they follow.

use super::builder::SimBuilder;
use super::calls::Call;
use super::codes::{INVALID_VALUE, NO_DEVICE, NOT_INITIALIZED};
use super::core::{Core, Owner};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// libcuda's entry points as Rust methods; for building a fake libcuda or writing conformance tests.
///
/// Every method is named after the CUDA driver function, takes handles and addresses as plain numbers, and
/// fails with the driver's result code (`CUresult`), never 0. Handles: stream 0 is the legacy default stream
/// of the current context, 1 the same by name, 2 the per-thread default stream.
#[derive(Clone)]
pub struct Cuda {
    owner: Arc<Owner>,
}

impl Cuda {
    pub(super) fn new(config: SimBuilder) -> Self {
        Self { owner: Owner::new(config) }
    }

    pub(super) fn core(&self) -> &Core {
        &self.owner
    }
}

/// Initialisation and devices.
impl Cuda {
    /// `cuInit`: 1 for flags other than 0, 100 where there is no device.
    pub fn cu_init(&self, flags: u32) -> Result<(), u32> {
        let core = self.core();
        core.count(Call::Init, 0)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if core.config.devices == 0 {
            return Err(NO_DEVICE);
        }
        core.initialised_in.set();
        core.is_initialised.store(true, Ordering::Release);
        Ok(())
    }

    /// `cuDriverGetVersion`: 13000; works before `cuInit`.
    pub fn cu_driver_get_version(&self) -> Result<i32, u32> {
        self.core().count(Call::DriverGetVersion, 0)?;
        Ok(13_000)
    }

    /// `cuDeviceGetCount`.
    pub fn cu_device_get_count(&self) -> Result<i32, u32> {
        self.core().enter(Call::DeviceGetCount, 0)?;
        Ok(self.core().config.devices)
    }

    /// `cuDeviceGet`: the handle of a device is its ordinal; 101 where there is none.
    pub fn cu_device_get(&self, ordinal: i32) -> Result<i32, u32> {
        self.device(Call::DeviceGet, ordinal)
    }

    /// `cuDeviceGetName`: says that it is simulated.
    pub fn cu_device_get_name(&self, device: i32) -> Result<String, u32> {
        let device = self.device(Call::DeviceGetName, device)?;
        Ok(format!("pinpool simulated device {device}"))
    }

    /// `cuDeviceGetUuid`: `pinpool-sim`, zeros, and the ordinal.
    pub fn cu_device_get_uuid(&self, device: i32) -> Result<[u8; 16], u32> {
        let device = self.device(Call::DeviceGetUuid, device)?;
        let mut uuid = *b"pinpool-sim\0\0\0\0\0";
        uuid[12..].copy_from_slice(&device.to_be_bytes());
        Ok(uuid)
    }

    /// `cuDeviceTotalMem`, in bytes.
    pub fn cu_device_total_mem(&self, device: i32) -> Result<usize, u32> {
        self.device(Call::DeviceTotalMem, device)?;
        Ok(self.core().config.device_memory_bytes)
    }

    /// `cuDeviceGetAttribute`: 0 for attributes that are not simulated, 1 for impossible ones.
    pub fn cu_device_get_attribute(&self, attribute: i32, device: i32) -> Result<i32, u32> {
        self.device(Call::DeviceGetAttribute, device)?;
        match attribute {
            1..=1024 => Ok(self.core().config.attribute_value(attribute).unwrap_or(0)),
            _ => Err(INVALID_VALUE),
        }
    }

    fn device(&self, call: Call, device: i32) -> Result<i32, u32> {
        self.core().enter(call, 0)?;
        self.core().device_index(device)?;
        Ok(device)
    }

    /// What the few entry points check that do not go through the usual door.
    pub(super) fn check_initialised(&self) -> Result<(), u32> {
        match self.core().is_initialised.load(Ordering::Acquire) {
            true => Ok(()),
            false => Err(NOT_INITIALIZED),
        }
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("instance", &self.core().instance).finish_non_exhaustive()
    }
}
