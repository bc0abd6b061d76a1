//! The kinds of memory: what distinguishes one backend from another, and nothing else. Types without a size.
#![allow(unsafe_code)] // Gives pages back by their address.

use super::error::BackendError;
use crate::driver::Driver;
use crate::driver::memory::Attribute;
use crate::error::CallError;
use crate::os::page_bytes;
use crate::pages::Pages;
use crate::report::say;
use std::ptr::NonNull;

/// One kind of memory. Sealed: what it promises, the record and the release rely on.
pub trait Kind: sealed::Kind {}

impl<K: sealed::Kind> Kind for K {}

/// Page-locked host memory of the driver's (`cuMemHostAlloc`, portable and device-mapped).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HostPinned {}

/// [`HostPinned`], write-combined: the device reads it faster over some buses, the host reads it very slowly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WriteCombined {}

/// Managed memory (`cuMemAllocManaged`, attached globally).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unified {}

/// Managed memory that prefers to be on the device (`cuMemAdvise`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DevicePreferred {}

/// [`DevicePreferred`], under the name of the fast tier of a device with two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hbm {}

/// [`DevicePreferred`], under the name of a device's ordinary memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gddr {}

/// Pages of this process, page-locked (`cuMemHostRegister`, portable): what a pool does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Registered {}

/// An allocation that failed.
#[derive(Debug)]
pub struct Refusal {
    pub(super) error: BackendError,
    /// It failed half-way, and what it had by then could not be released.
    pub(super) is_leak: bool,
}

impl From<CallError> for Refusal {
    fn from(call: CallError) -> Self {
        Self { error: call.into(), is_leak: false }
    }
}

pub(super) mod sealed {
    use super::*;

    /// What a kind does with the context bound and this thread's captures out of the way.
    pub trait Kind: Send + Sync + 'static {
        const NAME: &'static str;
        /// See [`MemoryBackend::CAN_CACHE_ON_HOST`](crate::backend::MemoryBackend::CAN_CACHE_ON_HOST).
        const CAN_CACHE_ON_HOST: bool;
        /// Whether fresh memory is all zero.
        const IS_ZEROED: bool;

        /// Whether the device can do it at all; asked when the backend is made.
        fn check(_driver: &Driver, _device: i32) -> Result<(), BackendError> {
            Ok(())
        }

        /// Whether the host may touch the memory while the device works.
        fn is_always_touchable(_driver: &Driver, _device: i32) -> bool {
            true
        }

        /// One driver allocation: its base. What it took before a failure, it has given back, or says so.
        fn obtain(driver: &Driver, device: i32, bytes: usize) -> Result<usize, Refusal>;

        /// Gives it back. After a failure it has to be taken for allocated, or page-locked, still.
        fn give_back(driver: &Driver, base: usize, bytes: usize) -> Result<(), CallError>;
    }
}

/// A device property that a kind cannot do without.
fn demand(
    driver: &Driver,
    device: i32,
    attribute: Attribute,
    backend: &'static str,
    reason: &str,
) -> Result<(), BackendError> {
    const NOT_FOUND: u32 = 500;
    match driver.api().attribute(attribute, device) {
        Ok(0) => Err(BackendError::Unsuitable { backend, reason: format!("device {device} {reason}") }),
        // Where it cannot be asked, the first allocation tells.
        Err(call) if call.code() != NOT_FOUND => Err(call.into()),
        _ => Ok(()),
    }
}

impl sealed::Kind for HostPinned {
    const NAME: &'static str = "host-pinned";
    const CAN_CACHE_ON_HOST: bool = true;
    const IS_ZEROED: bool = false;

    fn obtain(driver: &Driver, _: i32, bytes: usize) -> Result<usize, Refusal> {
        Ok(driver.api().allocate_host(bytes, false)?)
    }

    fn give_back(driver: &Driver, base: usize, _: usize) -> Result<(), CallError> {
        driver.api().free_host(base)
    }
}

impl sealed::Kind for WriteCombined {
    const NAME: &'static str = "write-combined";
    // A link that is written into a free piece has to be read again, and that is what this memory is bad at.
    const CAN_CACHE_ON_HOST: bool = false;
    const IS_ZEROED: bool = false;

    fn obtain(driver: &Driver, _: i32, bytes: usize) -> Result<usize, Refusal> {
        Ok(driver.api().allocate_host(bytes, true)?)
    }

    fn give_back(driver: &Driver, base: usize, _: usize) -> Result<(), CallError> {
        driver.api().free_host(base)
    }
}

impl sealed::Kind for Unified {
    const NAME: &'static str = "unified";
    const CAN_CACHE_ON_HOST: bool = true;
    const IS_ZEROED: bool = false;

    fn check(driver: &Driver, device: i32) -> Result<(), BackendError> {
        Self::check_as(driver, device, Self::NAME)
    }

    fn is_always_touchable(driver: &Driver, device: i32) -> bool {
        driver.api().attribute(Attribute::ConcurrentManagedAccess, device).is_ok_and(|value| value != 0)
    }

    fn obtain(driver: &Driver, _: i32, bytes: usize) -> Result<usize, Refusal> {
        Ok(driver.api().allocate_managed(bytes)?)
    }

    fn give_back(driver: &Driver, base: usize, _: usize) -> Result<(), CallError> {
        driver.api().free_managed(base)
    }
}

/// The host must be able to touch it at any moment, since an allocator keeps its links in it.
fn check_preferred(driver: &Driver, device: i32, backend: &'static str) -> Result<(), BackendError> {
    Unified::check_as(driver, device, backend)?;
    let reason = "does not let the host touch managed memory while it works (attribute 89 is 0): a touch at \
                  the wrong moment would end the process";
    demand(driver, device, Attribute::ConcurrentManagedAccess, backend, reason)
}

impl Unified {
    fn check_as(driver: &Driver, device: i32, backend: &'static str) -> Result<(), BackendError> {
        let reason = "has no managed memory (attribute 83 is 0)";
        demand(driver, device, Attribute::ManagedMemory, backend, reason)
    }
}

/// Allocates, then advises: without the advice it is given back, for it would be something else.
fn obtain_preferred(driver: &Driver, device: i32, bytes: usize) -> Result<usize, Refusal> {
    let base = driver.api().allocate_managed(bytes)?;
    driver.api().prefer_device(base, bytes, device).map_err(|call| {
        let released = driver.api().free_managed(base);
        if let Err(error) = &released {
            say!(WARN, "backend_leaked", bytes, backend = "managed", %error, "memory is leaked: it could not be released after a refusal");
        }
        Refusal { error: call.into(), is_leak: released.is_err() }
    })?;
    Ok(base)
}

macro_rules! device_preferred {
    ($($kind:ident $name:literal;)*) => {$(
        impl sealed::Kind for $kind {
            const NAME: &'static str = $name;
            // Each touch by the host moves the page away from the device.
            const CAN_CACHE_ON_HOST: bool = false;
            const IS_ZEROED: bool = false;

            fn check(driver: &Driver, device: i32) -> Result<(), BackendError> {
                check_preferred(driver, device, Self::NAME)
            }

            fn obtain(driver: &Driver, device: i32, bytes: usize) -> Result<usize, Refusal> {
                obtain_preferred(driver, device, bytes)
            }

            fn give_back(driver: &Driver, base: usize, _: usize) -> Result<(), CallError> {
                driver.api().free_managed(base)
            }
        }
    )*};
}

device_preferred! {
    DevicePreferred "device-preferred";
    Hbm "hbm";
    Gddr "gddr";
}

impl sealed::Kind for Registered {
    const NAME: &'static str = "registered";
    const CAN_CACHE_ON_HOST: bool = true;
    const IS_ZEROED: bool = true;

    fn check(driver: &Driver, device: i32) -> Result<(), BackendError> {
        let reason = "does not register host memory (attribute 99 is 0); page-locked memory of the driver's own \
                      (host-pinned) may still be had";
        demand(driver, device, Attribute::HostRegister, Self::NAME, reason)
    }

    fn obtain(driver: &Driver, _: i32, bytes: usize) -> Result<usize, Refusal> {
        let refused = || Refusal { error: BackendError::OutOfMemory { bytes }, is_leak: false };
        let mut pages = Pages::map(whole_pages(bytes)).ok_or_else(refused)?;
        // Outside the driver's lock, and out of forked children, as in a pool.
        pages.populate();
        pages.hide_from_children();
        driver.api().register(pages.base(), pages.bytes())?;
        Ok(pages.into_base())
    }

    fn give_back(driver: &Driver, base: usize, bytes: usize) -> Result<(), CallError> {
        // Pages whose registration cannot be undone stay mapped for good.
        driver.api().unregister(base)?;
        let Some(base) = NonNull::new(base as *mut u8) else { return Ok(()) };
        // SAFETY: `obtain` mapped this many bytes there and gave them away; the record hands each base to one
        // release, and whoever releases promises that nobody uses the memory any more.
        drop(unsafe { Pages::from_base(base, whole_pages(bytes)) });
        Ok(())
    }
}

/// Bytes of whole pages; the size was checked to be far from the end of the address space.
fn whole_pages(bytes: usize) -> usize {
    bytes.next_multiple_of(page_bytes())
}
