//! Collections in such memory: an allocator for `allocator-api2`, on stable Rust.
#![allow(unsafe_code)] // An allocator is a promise about memory.

use super::{BackendError, MemoryBackend};
use crate::report::say;
use crate::sync::Arc;
use allocator_api2::alloc::{AllocError, Allocator, Layout};
use std::fmt;
use std::ptr::NonNull;

/// Collections of `allocator-api2` (and of hashbrown with that feature) in a backend's memory.
///
/// Every growth of a collection is a driver call and a copy, so make it with its capacity. It is for a few large
/// collections; small ones waste pages.
///
/// A collection releases its memory in the middle of whatever drops it, and nobody says then whether the device
/// is done with it. So a release first waits for all device work of all contexts that are in use
/// ([`MemoryBackend::wait_for_devices`]); where the driver cannot say, the memory is leaked and counted. What this
/// cannot know is when the *contents* may change: do not write to a collection while a copy from it is in flight.
///
/// ```
/// use allocator_api2::vec::Vec;
/// use pinpool::backend::{HostPinned, InBackend};
/// # let sim = pinpool::sim::Sim::new();
/// # let _context = sim.context(0);
/// # let driver = sim.driver();
///
/// let pinned = InBackend::new(HostPinned::new(&driver)?)?;
/// let mut samples: Vec<f32, _> = Vec::with_capacity_in(1 << 16, pinned.clone());
/// samples.extend((0..1 << 16).map(|n| n as f32));
/// assert!(pinpool::regions::is_pinned(samples.as_ptr()));
/// drop(samples);
/// assert_eq!(pinned.backend().stats().live, 0);
/// # Ok::<(), pinpool::backend::BackendError>(())
/// ```
pub struct InBackend<B: MemoryBackend> {
    backend: Arc<B>,
}

impl<B: MemoryBackend> InBackend<B> {
    /// Takes the backend, which lives until the last clone and the last collection are gone.
    ///
    /// # Errors
    ///
    /// [`BackendError::Unsuitable`] where the host may not touch the memory at any moment
    /// ([`MemoryBackend::is_always_touchable`]), which a collection does.
    pub fn new(backend: B) -> Result<Self, BackendError> {
        Self::of(Arc::new(backend))
    }

    /// The same, with a backend that others use too.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn of(backend: Arc<B>) -> Result<Self, BackendError> {
        if backend.is_always_touchable() {
            return Ok(Self { backend });
        }
        let reason =
            "the host may not touch it while the device works (attribute 89 is 0), and a collection does";
        Err(BackendError::Unsuitable { backend: B::NAME, reason: reason.into() })
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }
}

impl<B: MemoryBackend> Clone for InBackend<B> {
    fn clone(&self) -> Self {
        Self { backend: self.backend.clone() }
    }
}

impl<B: MemoryBackend> fmt::Debug for InBackend<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InBackend").field("backend", &B::NAME).finish()
    }
}

// SAFETY: a backend's memory stays where it is until it is given back, all clones share one backend, and a block is
// given back once, by whoever owns it, after the devices are done with it.
unsafe impl<B: MemoryBackend> Allocator for InBackend<B> {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if layout.size() == 0 {
            let nothing = NonNull::new(std::ptr::without_provenance_mut(layout.align())).ok_or(AllocError)?;
            return Ok(NonNull::slice_from_raw_parts(nothing, 0));
        }
        if layout.align() > B::ALIGNMENT {
            return Err(AllocError);
        }
        // SAFETY: the collection uses the memory as uninitialised until it has written it, and until it gives it
        // back; `of` made sure that the host may touch it.
        let base = unsafe { self.backend.allocate(layout.size()) }.map_err(|error| {
            say!(DEBUG, "backend_refused", bytes = layout.size(), backend = B::NAME, %error, "an allocation was refused");
            AllocError
        })?;
        Ok(NonNull::slice_from_raw_parts(base, layout.size()))
    }

    unsafe fn deallocate(&self, base: NonNull<u8>, layout: Layout) {
        if layout.size() == 0 {
            return;
        }
        let released = match self.backend.wait_for_devices() {
            // SAFETY: the collection is done with it, and so is every device.
            Ok(()) => unsafe { self.backend.deallocate(base, layout.size()) },
            Err(error) => {
                // SAFETY: the collection gives it up.
                let leaked = unsafe { self.backend.leak(base, layout.size()) };
                leaked.and(Err(error))
            }
        };
        // In a forked child it is the parent's; otherwise the backend has counted and logged it.
        if let Err(error) = released {
            say!(DEBUG, "backend_not_released", bytes = layout.size(), backend = B::NAME, %error, "a collection's memory is not released");
        }
    }
}
