//! What this machine can do: whether CUDA can be used at all, and what memory a device can be given.

use crate::driver::Driver;
use crate::driver::memory::Attribute;
use crate::error::Error;
use crate::os::ProcessMark;
use crate::sync::OnceLock;

/// Whether CUDA can be used in this process: a driver library that can be loaded, initialised, and has a device.
///
/// The first call loads and initialises (`cuInit`), once, whichever thread it is on; what it found is the answer from
/// then on, for two loads. It makes no context, changes no thread's, and does not panic. False in a forked child of
/// a process that asked, or that used CUDA.
///
/// ```
/// let where_to = if pinpool::is_cuda_available() { "the device" } else { "the host" };
/// println!("computing on {where_to}");
/// ```
pub fn is_cuda_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    static ASKED_IN: ProcessMark = ProcessMark::new();
    // Before the lock, which a thread of the parent may have held.
    if ASKED_IN.is_inherited() {
        return false;
    }
    ASKED_IN.set();
    *AVAILABLE.get_or_init(|| has_device(&Driver::auto()))
}

fn has_device(driver: &Driver) -> bool {
    driver.api().prepare().is_ok() && driver.api().device_count().is_ok_and(|count| count > 0)
}

/// What one device says about the memory it can be given: why a backend is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DeviceSupport {
    /// The device's number.
    pub device: i32,
    /// It knows managed memory (attribute 83): without it no [`Unified`](super::Unified).
    pub managed_memory: bool,
    /// It reads pageable host memory itself (attribute 88), so that a copy may read it after the call has returned.
    pub pageable_access: bool,
    /// The host may touch managed memory while it works (attribute 89): without it no
    /// [`DevicePreferred`](super::DevicePreferred).
    pub concurrent_managed_access: bool,
    /// Registered memory has the same address on the device (attribute 91).
    pub host_pointer_serves: bool,
    /// Host memory can be registered (attribute 99). In confidential computing mode it may say so and refuse all
    /// the same, with 801.
    pub host_register: bool,
    /// It goes by the host's page tables (attribute 100): registering adds nothing.
    pub host_page_tables: bool,
    /// Memory that may not be written can be registered (attribute 113).
    pub read_only_register: bool,
}

impl DeviceSupport {
    /// Asks one device; loads and initialises CUDA where nobody has yet. Needs no context and makes none.
    ///
    /// # Errors
    ///
    /// [`Error::NoCuda`], or [`Error::Driver`]: 101 for no such device.
    pub fn of(driver: &Driver, device: i32) -> Result<Self, Error> {
        driver.api().prepare()?;
        let has = |attribute| driver.api().attribute(attribute, device).map(|value| value != 0);
        Ok(Self {
            device,
            managed_memory: has(Attribute::ManagedMemory)?,
            pageable_access: has(Attribute::PageableAccess)?,
            concurrent_managed_access: has(Attribute::ConcurrentManagedAccess)?,
            host_pointer_serves: has(Attribute::HostPointerServes)?,
            host_register: has(Attribute::HostRegister)?,
            host_page_tables: has(Attribute::HostPageTables)?,
            read_only_register: has(Attribute::ReadOnlyRegister)?,
        })
    }

    /// Asks every device.
    ///
    /// # Errors
    ///
    /// As [`of`](Self::of).
    pub fn of_all(driver: &Driver) -> Result<Vec<Self>, Error> {
        driver.api().prepare()?;
        (0..driver.api().device_count()?).map(|device| Self::of(driver, device)).collect()
    }
}
