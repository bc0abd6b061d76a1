#![doc = include_str!("../docs/backends.md")]
#![allow(unsafe_code)] // The trait's functions are unsafe, because memory is released by its address.

#[cfg(feature = "allocator-api2")]
mod allocator;
mod error;
pub mod kind;
mod record;
mod shared;
mod stats;
mod support;
mod temporary;

#[cfg(feature = "allocator-api2")]
pub use allocator::InBackend;
pub use error::BackendError;
pub use record::{Allocation, AllocationRecord, Claim, RecordFull};
pub use shared::{Backend, BackendBuilder};
pub use stats::BackendStats;
pub use support::{DeviceSupport, is_cuda_available};
pub use temporary::TemporaryContext;

use std::ptr::NonNull;

/// Page-locked host memory of the driver's.
pub type HostPinned = Backend<kind::HostPinned>;
/// Page-locked, write-combined host memory of the driver's.
pub type WriteCombined = Backend<kind::WriteCombined>;
/// Managed memory.
pub type Unified = Backend<kind::Unified>;
/// Managed memory that prefers to be on the device.
pub type DevicePreferred = Backend<kind::DevicePreferred>;
/// [`DevicePreferred`], for the fast tier of a device with two.
pub type Hbm = Backend<kind::Hbm>;
/// [`DevicePreferred`], for a device's ordinary memory.
pub type Gddr = Backend<kind::Gddr>;
/// Pages of this process, page-locked.
pub type Registered = Backend<kind::Registered>;

/// Where an allocator, an arena or a pool gets its memory from: large pieces, by the page.
///
/// Every allocation and every release is a call of the driver's, which takes microseconds to milliseconds and a
/// lock of the whole process; whoever wants small pieces cuts them out of large ones. There is no fallback to other
/// memory: a failure is an error, and what to do about it is the caller's to decide.
///
/// # Safety
///
/// An implementation gives memory of the size asked for, aligned to [`ALIGNMENT`](Self::ALIGNMENT) at least, that
/// nothing else uses until it is given back, and that survives the value being moved.
pub unsafe trait MemoryBackend: Send + Sync {
    /// What it is called in messages.
    const NAME: &'static str;

    /// Whether single pages can be given back to the system and come again as zeros (`MADV_DONTNEED`). Never in
    /// memory that a device reaches: the system and the device would go on with different pages.
    const CAN_RESET: bool = false;
    /// Whether single pages can be made inaccessible, as guards. Never: protection stops the host, not the device.
    const CAN_GUARD: bool = false;
    /// Whether single pages can be given back while the rest stays allocated. Never: the driver takes back what it
    /// gave, whole.
    const CAN_DECOMMIT: bool = false;
    /// Whether an allocator may keep freed pieces in a cache of the host's, with its links written into them.
    ///
    /// False where such a touch is possible but dear: it is slow in write-combined memory, and moves pages away
    /// from the device where they prefer it. Keep the links elsewhere then.
    const CAN_CACHE_ON_HOST: bool;
    /// Whether fresh memory is all zero.
    const IS_ZEROED: bool;
    /// What every base is aligned to, in bytes.
    const ALIGNMENT: usize = 256;

    /// Allocates.
    ///
    /// # Errors
    ///
    /// A [`BackendError`]; nothing is allocated then.
    ///
    /// # Safety
    ///
    /// The memory is uninitialised unless [`IS_ZEROED`](Self::IS_ZEROED). It is used only until it is given back, and
    /// only while its context lives. Where [`is_always_touchable`](Self::is_always_touchable) says no, the host does
    /// not touch it while a device works.
    unsafe fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, BackendError>;

    /// Gives an allocation back, from any thread.
    ///
    /// # Errors
    ///
    /// [`BackendError::NotOurs`] and [`BackendError::WrongSize`], and nothing was done;
    /// [`BackendError::Driver`] when the driver refused: the memory is leaked and counted then, and nobody can give
    /// it back any more. Only after 900 to 908, while a stream captures, it is live still and may be given back
    /// later.
    ///
    /// # Safety
    ///
    /// Nobody uses the memory any more: no reference, and no device work that is outstanding.
    unsafe fn deallocate(&self, base: NonNull<u8>, bytes: usize) -> Result<(), BackendError>;

    /// Takes an allocation off the books for good, without releasing it: for memory of which it cannot be known
    /// whether a device still uses it. It is counted.
    ///
    /// # Errors
    ///
    /// As [`deallocate`](Self::deallocate), without the driver's.
    ///
    /// # Safety
    ///
    /// The allocation is the caller's to give up.
    unsafe fn leak(&self, base: NonNull<u8>, bytes: usize) -> Result<(), BackendError>;

    /// Waits until no device work that was enqueued before the call is outstanding, in any context that is in use:
    /// for a release without a record of the uses. Blocks.
    ///
    /// Such a wait *breaks* a capture of a stream of the context. It is refused instead (906) where the legacy stream
    /// tells of one, or a stream captures that was shown to a pool of the same driver; a capture on another
    /// non-blocking stream is not known here, so make none meanwhile, or say
    /// [`hold_context_waits`](crate::PinnedPool::hold_context_waits).
    ///
    /// # Errors
    ///
    /// [`BackendError::ContextWaitsHeld`] while such a hold lives; [`BackendError::Driver`] when the driver cannot say; the memory must not be given back then.
    fn wait_for_devices(&self) -> Result<(), BackendError>;

    /// Whether the host may touch the memory at any moment. False for managed memory of a device whose attribute 89
    /// is 0: there a touch while the device works ends the process.
    fn is_always_touchable(&self) -> bool;
}
