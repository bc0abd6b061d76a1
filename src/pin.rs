// Documented by `docs/pinning-your-own-memory.md`, which `lib.rs` includes.
#![allow(unsafe_code)] // Registering lends the driver a pointer; whoever calls promises that it stays valid.

mod caretaker;
mod error;
mod many;
mod owned;
mod stats;

pub use error::PinError;
pub use many::{PinnedRegions, pin_all};
pub use owned::{Pinnable, Pinned};
pub use stats::{PinStats, drain, stats};

use crate::driver::{Driver, DriverIdentity};
use crate::error::Error;
use crate::events::with_relaxed_capture;
use crate::sync::fixed::Mutex;
use caretaker::{Caretaker, Registered};
use std::collections::BTreeMap;

/// A piece of memory to page-lock: an address and a number of bytes. Plain data; it promises nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Region {
    base: usize,
    len: usize,
}

impl Region {
    /// `len` bytes from `ptr` on. Neither need be aligned to pages: CUDA registers byte-exactly, though it
    /// page-locks the whole pages.
    pub fn new(ptr: *const u8, len: usize) -> Self {
        Self { base: ptr as usize, len }
    }

    /// The memory of a slice.
    pub fn of<T>(slice: &[T]) -> Self {
        Self { base: slice.as_ptr() as usize, len: size_of_val(slice) }
    }

    /// The address of the first byte.
    pub fn base(self) -> usize {
        self.base
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)] // a length like any other, not a collection's
    pub fn len(self) -> usize {
        self.len
    }
}

/// Page-locks memory that the caller owns (`cuMemHostRegister`), until [`unregister_region`].
///
/// In the calling thread's context if it has one, else in a primary context that is active; none is created.
/// A primary context stays retained for as long as something is registered in it. Blocks in the driver, for
/// milliseconds to seconds; memory that was never written is faulted in on top.
///
/// What the driver refuses is refused with the driver's code: 1 (`CUDA_ERROR_INVALID_VALUE`) for null, for zero
/// bytes, for a hole, and for memory that cannot be written; 712 for memory of which any byte is
/// registered already.
///
/// # Errors
///
/// A [`PinError`]: [`Error::NoCuda`], [`Error::NotPinned`] when there is no context to register in or this is
/// a forked child, or [`Error::Driver`] with the driver's code.
///
/// # Safety
///
/// Until [`unregister_region`] has succeeded for it, the memory stays allocated and mapped where it is (it
/// must not be freed, moved, grown, unmapped, or given to `MADV_DONTNEED`), and whoever copies from it
/// knows that an asynchronous copy reads or writes it *after* the call has returned.
pub unsafe fn register_region(driver: &Driver, ptr: *const u8, len: usize) -> Result<(), PinError> {
    let region = Region::new(ptr, len);
    let registered = Caretaker::of(driver)
        .and_then(|caretaker| caretaker.register(region))
        .map_err(|cause| PinError::of(region, cause))?;
    let key = key_of(driver.api().identity(), region.base);
    let mut held = REGISTERED.lock();
    let earlier = held.insert(key, registered);
    // The driver answers 712 for a base that is registered, so this is one that says yes to everything.
    // The longer of the two stays the truth.
    if let Some(earlier) = earlier
        && let Some(later) = held.get_mut(&key)
    {
        later.absorb(earlier);
    }
    Ok(())
}

/// Unregisters (`cuMemHostUnregister`) what [`register_region`] registered, by its base.
///
/// May wait for the device. After an error the memory has to be taken for page-locked still, and must never be
/// freed, unless the code is 713 (`CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`).
///
/// # Errors
///
/// The driver's: 713 for memory that is not registered, 1 for an address inside a registration, 709 when
/// its context was destroyed.
///
/// # Safety
///
/// No device work that reads or writes the memory is outstanding, and the registration is the caller's own:
/// not that of a pool's buffer, of a [`Pinned`] or of [`PinnedRegions`].
pub unsafe fn unregister_region(driver: &Driver, ptr: *const u8) -> Result<(), PinError> {
    let base = ptr as usize;
    if caretaker::PINNED_IN.is_inherited() {
        return Err(PinError::of(Region { base, len: 0 }, caretaker::in_forked_child(0)));
    }
    let key = key_of(driver.api().identity(), base);
    let registered = REGISTERED.lock().remove(&key);
    let Some(registered) = registered else {
        // Not from here; the driver may know it all the same.
        let result = with_relaxed_capture(driver, || driver.api().unregister(base));
        return result.map_err(|call| PinError::of(Region { base, len: 0 }, call.into()));
    };
    registered.unregister().map_err(|(registered, call)| {
        let region = registered.region();
        if registered.is_still_registered(&call) {
            REGISTERED.lock().entry(key).or_insert(registered);
        }
        PinError::of(region, call.into())
    })
}

/// Asks the driver, not this library's books, whether a range is page-locked, from its first byte to its last:
/// [`Driver::is_page_locked`] for memory of which there is no slice.
///
/// This is the check that finds pinning which quietly did nothing. `VmLck` in `/proc/self/status` is not: CUDA
/// pins pages without `mlock`. False while nobody in this process uses CUDA, and true for zero bytes.
///
/// # Errors
///
/// [`Error::Driver`] when the driver cannot say.
pub fn driver_says_page_locked(driver: &Driver, ptr: *const u8, len: usize) -> Result<bool, Error> {
    driver.is_range_page_locked(ptr as usize, len)
}

/// A base and which driver registered it.
type Key = (usize, &'static str, u64);

fn key_of(driver: DriverIdentity, base: usize) -> Key {
    (base, driver.name, driver.instance)
}

/// What `register_region` registered, for `unregister_region` to find.
static REGISTERED: Mutex<BTreeMap<Key, Registered>> = Mutex::new(BTreeMap::new());
