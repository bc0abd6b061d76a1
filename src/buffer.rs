//! The guard: what runs on a caller's thread between take and drop.
#![allow(unsafe_code)] // The drop moves the block out of the guard.

mod captured;
mod flags;
mod noted;
mod record;
mod uses;

use crate::block::{Fate, Out};
use crate::dirty::{Dirty, Writer};
use crate::error::Error;
use crate::home::Home;
use crate::os::prefetch;
use crate::sync::Arc;
use flags::{CAPTURED, FOREIGN, Flags, NOTED};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::panic::{RefUnwindSafe, UnwindSafe};
pub(crate) use uses::SlowWait;

/// A page-aligned host buffer of a power-of-two length (or another one, from `take_exact` or by
/// [`SizeClasses`](crate::SizeClasses)), page-locked when [`is_pinned`](Self::is_pinned) says so. Dropping it gives it back to its pool.
///
/// Fill it, enqueue a copy, call [`record_last_use`](Self::record_last_use), drop it: the pool neither
/// writes, reuses, unregisters nor frees the memory before the recorded work is done. Dropping it
/// *without* a record is always safe too; the pool then waits for every context that it knows of.
///
/// A slice taken out of the guard (`&buf[..]`) is outside all tracking: a copy enqueued from it must be
/// recorded, or left to the wait for all contexts.
pub struct PinnedBuffer {
    /// Moved out by the drop, so that no access and no drop looks whether it is still there.
    block: ManuallyDrop<Out>,
    len: usize,
    dirty: Dirty,
    flags: Flags,
    home: Arc<Home>,
}

impl PinnedBuffer {
    pub(crate) fn new(home: Arc<Home>, block: Out, len: usize) -> Self {
        debug_assert!(len <= block.class().bytes());
        Self { block: ManuallyDrop::new(block), len, dirty: Dirty::Unknown, flags: Flags::default(), home }
    }

    pub(crate) fn home(&self) -> &Arc<Home> {
        &self.home
    }

    #[inline]
    fn block(&self) -> &Out {
        &self.block
    }

    #[inline]
    fn block_mut(&mut self) -> &mut Out {
        &mut self.block
    }

    #[cfg(feature = "cudarc")]
    pub(crate) fn driver(&self) -> &crate::driver::Driver {
        &self.home.driver
    }

    /// The bytes, for a copy of the device into them that is noted: no wait, and dirty already.
    #[cfg(feature = "cudarc")]
    pub(crate) fn destination(&mut self) -> &mut [u8] {
        let len = self.len;
        self.block_mut().slice_mut(len)
    }

    /// Length in bytes.
    #[inline]
    #[allow(clippy::len_without_is_empty)] // `is_empty` is the slice's.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the memory is page-locked: registered with `cuMemHostRegister`, or allocated with
    /// `cuMemHostAlloc` where registering is not supported ([`Backing`](crate::Backing)).
    ///
    /// Fixed from `take` to drop: a fresh buffer is pageable until its first return.
    ///
    /// Where a device goes by the host's page tables (attribute 100, as on Grace), page-locking adds nothing, and a
    /// pool with [`Backing::Auto`](crate::Backing::Auto) skips it: this is false then, the copies are as fast all the
    /// same, and [`Stats::backing`](crate::Stats::backing) says so. What `take_pinned` and `prewarm` page-lock by
    /// name is page-locked there too.
    pub fn is_pinned(&self) -> bool {
        self.block().is_pinned()
    }

    /// Asks the driver, not the pool, whether all of the memory is page-locked
    /// ([`Driver::is_page_locked`](crate::Driver::is_page_locked)). For checks; [`is_pinned`](Self::is_pinned) costs nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver cannot say.
    pub fn driver_says_page_locked(&self) -> Result<bool, Error> {
        self.home.driver.is_page_locked(self)
    }

    /// Says that only the first `len` bytes differ from zero; larger than the buffer is clamped.
    ///
    /// Without it the whole buffer is re-zeroed after the return. A mutable access after this call makes
    /// everything dirty again, so call it last. Saying too little lets old bytes reach the next taker of
    /// this pool.
    pub fn set_dirty_len(&mut self, len: usize) {
        self.dirty = Dirty::Prefix(len.min(self.len));
    }

    /// The buffer as elements of `T`.
    ///
    /// # Errors
    ///
    /// [`Error::Layout`] when the length is no multiple of the element, or the element is larger than the
    /// alignment of a page allows.
    pub fn as_slice_of<T: bytemuck::Pod>(&self) -> Result<&[T], Error> {
        let len = self.len;
        bytemuck::try_cast_slice(&self[..]).map_err(|error| layout_error::<T>(len, error))
    }

    /// The buffer as mutable elements of `T`; a mutable access like any other.
    ///
    /// # Errors
    ///
    /// As [`as_slice_of`](Self::as_slice_of).
    pub fn as_mut_slice_of<T: bytemuck::Pod>(&mut self) -> Result<&mut [T], Error> {
        let len = self.len;
        bytemuck::try_cast_slice_mut(&mut self[..]).map_err(|error| layout_error::<T>(len, error))
    }

    /// A [`std::io::Write`] from the start of the buffer that keeps the dirty length itself.
    ///
    /// Waits for noted device reads, as every mutable access does.
    pub fn writer(&mut self) -> Writer<'_> {
        self.before_write();
        let Self { block, dirty, len, .. } = self;
        Writer::new(block.slice_mut(*len), dirty)
    }
}

fn layout_error<T>(len: usize, error: bytemuck::PodCastError) -> Error {
    Error::Layout {
        bytes: len,
        element: std::any::type_name::<T>(),
        element_bytes: size_of::<T>(),
        problem: error.to_string(),
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    /// Waits for noted device writes; one test when there are none.
    #[inline]
    fn deref(&self) -> &[u8] {
        self.before_read();
        self.block().slice(self.len)
    }
}

impl DerefMut for PinnedBuffer {
    /// Waits for noted device reads; one test when there are none. Makes everything dirty again.
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        self.before_write();
        self.dirty = Dirty::Everything;
        let len = self.len;
        self.block_mut().slice_mut(len)
    }
}

// Bytes have no invariant that a panic could break, and the rest is the pool's.
impl UnwindSafe for PinnedBuffer {}
impl RefUnwindSafe for PinnedBuffer {}

impl AsRef<[u8]> for PinnedBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for PinnedBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer")
            .field("len", &self.len)
            .field("is_pinned", &self.is_pinned())
            .field("recorded_uses", &self.block().uses().len())
            .finish_non_exhaustive()
    }
}

impl Drop for PinnedBuffer {
    /// One move into the inbox. Never blocks on the device, never panics because of the driver.
    fn drop(&mut self) {
        // SAFETY: a drop runs once, and after it nothing of the guard is used; its other fields are let go behind it.
        let mut block = unsafe { ManuallyDrop::take(&mut self.block) };
        let home = &self.home;
        // Every step below ends in an atomic operation, and none begins before the one before it has its cache line.
        prefetch(&**home);
        if home.fork.is_child() {
            // There is no cleaner here and no usable driver.
            block.leave_in_child();
            return;
        }
        let counts = home.counts.class(block.class());
        prefetch(counts);
        prefetch(&*home.inbox);
        // Not for a record, which nearly every buffer has: the notes are on a cache line of their own.
        if self.flags.has(NOTED | CAPTURED | FOREIGN) {
            uses::settle_notes(home, &mut block, &self.flags);
        }
        // Without a record the thread's context is how the pool learns where work may be outstanding,
        // and where it may page-lock. The flags come first: they lie in the guard, and the rest on lines of the block.
        let unrecorded = !self.flags.any()
            || match block.fate() {
                Fate::Recorded => block.uses().is_empty(),
                fate => fate.waits_for_contexts(),
            };
        let seen = if unrecorded && home.driver.api().has_contexts() {
            uses::seen_context(home, &mut block)
        } else {
            None
        };
        let dirty_bytes = self.dirty.bytes(self.len);
        let (class, pinned, epoch) = (block.class(), block.is_pinned(), home.epoch());
        counts.returned[epoch].of(pinned).add(1);
        home.inbox.push(class, block.give_back(dirty_bytes, seen, epoch, home.generation()));
        home.ring();
    }
}
