//! Memory that is owned and page-locked: `Pinned<Vec<T>>` and `Pinned<Box<[T]>>`.
#![allow(unsafe_code)] // Takes a `Vec` apart, and puts it together again when its memory is released.

use super::caretaker::{Caretaker, PINNED_IN, in_forked_child};
use super::stats::STATS;
use super::{PinError, Region};
use crate::block::Out;
use crate::buffer::PinnedBuffer;
use crate::driver::{Driver, exit};
use crate::error::Error;
use crate::holds::GraphHold;
use crate::pages::{Owner, Pages};
use crate::size_class::Classes;
use crate::stream::AsStream;
use crate::sync::{Arc, Condvar, Mutex};
use bytemuck::Pod;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::time::Duration;

/// What [`Pinned`] can own: `Vec<T>` and `Box<[T]>` of plain data ([`bytemuck::Pod`]), because a device that
/// writes to it may write any bytes. Sealed: the memory must not move when the owner does.
pub trait Pinnable: sealed::Container {}

impl<T: Pod + Send + Sync> Pinnable for Vec<T> {}
impl<T: Pod + Send + Sync> Pinnable for Box<[T]> {}

mod sealed {
    use bytemuck::Pod;

    /// Something that is a `Vec` in another shape, without copying either way.
    pub trait Container: Send + Sized + 'static {
        type Element: Pod + Send + Sync;
        fn into_vec(self) -> Vec<Self::Element>;
        fn from_vec(vec: Vec<Self::Element>) -> Self;
    }

    impl<T: Pod + Send + Sync> Container for Vec<T> {
        type Element = T;
        fn into_vec(self) -> Vec<T> {
            self
        }
        fn from_vec(vec: Vec<T>) -> Self {
            vec
        }
    }

    impl<T: Pod + Send + Sync> Container for Box<[T]> {
        type Element = T;
        fn into_vec(self) -> Vec<T> {
            self.into()
        }
        fn from_vec(vec: Vec<T>) -> Self {
            // A box's capacity is its length, so this moves nothing.
            vec.into()
        }
    }
}

/// A `Vec<T>` or `Box<[T]>` that is page-locked for as long as this value lives.
///
/// It derefs to `[T]`, and cannot grow or move. Device uses are noted as on a [`PinnedBuffer`]:
/// [`record_last_use`](Self::record_last_use) after the copy, and a mutable access waits for what is noted.
/// At its drop the memory goes to the release machinery of a pool: it is unregistered and freed when no
/// device work can touch it any more (the recorded uses; without a record, all work of every context that is
/// known), and leaked and counted ([`stats`](super::stats)) if the driver cannot say so or will not unregister
/// it. The drop itself neither waits nor calls the driver.
pub struct Pinned<C: Pinnable> {
    buffer: PinnedBuffer,
    claim: Arc<Claim<C>>,
    driver: Driver,
}

#[cfg(feature = "cudarc")]
impl<C: Pinnable> Pinned<C> {
    pub(crate) fn buffer(&self) -> &PinnedBuffer {
        &self.buffer
    }

    pub(crate) fn buffer_mut(&mut self) -> &mut PinnedBuffer {
        &mut self.buffer
    }
}

impl<C: Pinnable> Pinned<C> {
    /// Page-locks the memory of a `Vec` (its length, not its spare capacity) or of a boxed slice.
    ///
    /// In which context, and what the driver refuses: as [`register_region`](super::register_region). An empty
    /// one has no memory to page-lock, and the driver is not asked.
    ///
    /// # Errors
    ///
    /// The [`PinError`], and the memory back, as it was.
    pub fn new(driver: &Driver, container: C) -> Result<Self, (PinError, C)> {
        const { assert!(size_of::<C::Element>() > 0, "elements without a size have no memory to pin") };
        let vec = container.into_vec();
        let region = Region::of(&vec);
        let refused = |cause, vec| Err((PinError::of(region, cause), C::from_vec(vec)));
        if region.len == 0 {
            // The driver would say no more than "invalid value", of an address that is none.
            let reason = "it is empty, so there is no memory to page-lock".into();
            return refused(Error::NotPinned { bytes: 0, reason }, vec);
        }
        let class = match Classes::POWERS_OF_TWO.of(region.len) {
            Ok((class, _)) => class,
            Err(error) => return refused(error, vec),
        };
        let caretaker = match Caretaker::of(driver) {
            Ok(caretaker) => caretaker,
            Err(error) => return refused(error, vec),
        };
        let claim = Arc::new(Claim::default());
        let kept = Kept::<C>::new(vec, claim.clone(), caretaker.clone());
        let base = kept.parts.pointer.cast::<u8>();
        // SAFETY: `Kept` owns the `Vec`'s memory, touches it only when it is dropped, and moves nothing; it is
        // initialised, and `Pod` allows every bit pattern and has no padding.
        let pages = unsafe { Pages::foreign(base, region.len, Box::new(kept)) };
        let mut block = Out::fresh(pages, class).never_handed_out();
        if let Err(cause) = caretaker.pin(&mut block, region.len) {
            claim.want();
            // Pageable, so this frees it, which gives it back.
            let _ = block.retire().release(driver);
            return match claim.wait(|| ()) {
                Some(container) => Err((PinError::of(region, cause), container)),
                None => unreachable!("pageable memory is never leaked"),
            };
        }
        claim.pinned();
        STATS.pinned(region.len);
        let block = block.hand_out(driver);
        let buffer = PinnedBuffer::new(caretaker.home().clone(), block, region.len);
        Ok(Self { buffer, claim, driver: driver.clone() })
    }

    /// Notes that everything enqueued on `stream` up to now may use the memory; see
    /// [`PinnedBuffer::record_last_use`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn record_last_use(&mut self, stream: &impl AsStream) -> Result<(), Error> {
        self.buffer.record_last_use(stream)
    }

    /// Holds the memory for a CUDA graph for as long as the returned value lives; see
    /// [`PinnedBuffer::hold_for_graph`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn hold_for_graph(&mut self) -> GraphHold {
        // SAFETY: the caller's promise is the same.
        unsafe { self.buffer.hold_for_graph() }
    }

    /// Declares that no device work touches the memory any more, so that its release waits for nothing.
    ///
    /// # Safety
    ///
    /// As [`PinnedBuffer::assume_quiescent`].
    pub unsafe fn assume_quiescent(&mut self) {
        // SAFETY: the caller's promise is the same.
        unsafe { self.buffer.assume_quiescent() };
    }

    /// Whether all noted uses are done, without waiting.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver cannot say.
    pub fn is_quiescent(&self) -> Result<bool, Error> {
        self.buffer.is_quiescent()
    }

    /// Blocks until all noted uses are done.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver cannot say; the memory stays safe.
    pub fn wait(&self) -> Result<(), Error> {
        self.buffer.wait()
    }

    /// Asks the driver whether the memory is page-locked, from its first byte to its last.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver cannot say.
    pub fn driver_says_page_locked(&self) -> Result<bool, Error> {
        self.driver.is_page_locked(&self.buffer)
    }

    /// Unregisters the memory and gives it back. Waits for the device as long as it takes, as the drop's
    /// release does in the background.
    ///
    /// # Errors
    ///
    /// When it cannot be given back: the driver would not unregister it, or whether the device is done with it
    /// cannot be known. It is leaked and counted then. [`Error::Capturing`] at once when a CUDA graph that it was
    /// captured into still exists; it is freed when the graph is gone.
    pub fn unpin(self) -> Result<C, PinError> {
        let region = Region::of(&self.buffer);
        if PINNED_IN.is_inherited() {
            return Err(PinError::of(region, in_forked_child(region.len)));
        }
        if exit::is_shut() {
            // Nobody is left who could release it, so its drop leaks it, and nobody must wait for that.
            let reason = "the process exits, and the driver may be gone".into();
            return Err(PinError::of(region, Error::NotPinned { bytes: region.len, reason }));
        }
        if self.buffer.is_captured() {
            return Err(PinError::of(region, Error::Capturing));
        }
        let (claim, home) = (self.claim.clone(), self.buffer.home().clone());
        claim.want();
        drop(self);
        let lost = || Error::NotPinned {
            bytes: region.len,
            reason: "it could not be unregistered, or the driver could not say that the device is done with \
                     it, so it is leaked; the log has the driver's answer"
                .into(),
        };
        // Where its thread could not be started, it is tried again.
        claim.wait(|| home.ring()).ok_or_else(|| PinError::of(region, lost()))
    }
}

impl<C: Pinnable> Drop for Pinned<C> {
    /// The buffer's own drop, right after this one, does the work.
    fn drop(&mut self) {
        if !PINNED_IN.is_inherited() {
            STATS.dropped(self.buffer.len());
        }
    }
}

impl<C: Pinnable> Deref for Pinned<C> {
    type Target = [C::Element];

    #[inline]
    fn deref(&self) -> &[C::Element] {
        bytemuck::cast_slice(&self.buffer)
    }
}

impl<C: Pinnable> DerefMut for Pinned<C> {
    /// Waits for noted device reads; one test when there are none.
    #[inline]
    fn deref_mut(&mut self) -> &mut [C::Element] {
        bytemuck::cast_slice_mut(&mut self.buffer)
    }
}

impl<C: Pinnable> AsRef<[C::Element]> for Pinned<C> {
    fn as_ref(&self) -> &[C::Element] {
        self
    }
}

impl<C: Pinnable> AsMut<[C::Element]> for Pinned<C> {
    fn as_mut(&mut self) -> &mut [C::Element] {
        self
    }
}

impl<C: Pinnable> fmt::Debug for Pinned<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let elements = self.buffer.len() / size_of::<C::Element>();
        f.debug_struct("Pinned").field("len", &elements).field("buffer", &self.buffer).finish_non_exhaustive()
    }
}

/// A `Vec` taken apart, so that nothing but the block's pages claims its memory meanwhile.
struct Parts<T> {
    pointer: NonNull<T>,
    len: usize,
    capacity: usize,
}

// SAFETY: the parts of a `Vec<T>`, which may be sent where its elements may.
unsafe impl<T: Send> Send for Parts<T> {}

/// How long whoever wants memory back waits for a thread before it looks whether there is one.
const RETRY_AFTER: Duration = Duration::from_millis(50);

/// What frees the memory, in the block that stands for it; keeps its caretaker until then.
struct Kept<C: Pinnable> {
    parts: Parts<C::Element>,
    claim: Arc<Claim<C>>,
    _caretaker: Arc<Caretaker>,
}

impl<C: Pinnable> Kept<C> {
    fn new(vec: Vec<C::Element>, claim: Arc<Claim<C>>, caretaker: Arc<Caretaker>) -> Self {
        let mut vec = ManuallyDrop::new(vec);
        let pointer = NonNull::from(vec.as_mut_slice()).cast();
        let parts = Parts { pointer, len: vec.len(), capacity: vec.capacity() };
        Self { parts, claim, _caretaker: caretaker }
    }

    fn bytes(&self) -> usize {
        self.parts.len * size_of::<C::Element>()
    }
}

impl<C: Pinnable> Owner for Kept<C> {
    fn leaked(&mut self) {
        let bytes = self.bytes();
        self.claim.settle(Outcome::Leaked, || STATS.leaked(bytes));
    }
}

impl<C: Pinnable> Drop for Kept<C> {
    fn drop(&mut self) {
        let Parts { pointer, len, capacity } = self.parts;
        // SAFETY: the parts of a `Vec` that was forgotten in `new`; its memory is used by nobody else any more,
        // since the block that stood for it is gone, and this is the only drop.
        let vec = unsafe { Vec::from_raw_parts(pointer.as_ptr(), len, capacity) };
        let bytes = len * size_of::<C::Element>();
        self.claim.settle(Outcome::Freed(C::from_vec(vec)), || STATS.released(bytes));
    }
}

/// Between the guard and the memory's owner on its way out: whether somebody wants it back.
struct Claim<C> {
    state: Mutex<State<C>>,
    settled: Condvar,
}

struct State<C> {
    is_wanted: bool,
    was_pinned: bool,
    /// What became of the memory, for whoever wants it.
    outcome: Option<Outcome<C>>,
}

enum Outcome<C> {
    Freed(C),
    Leaked,
}

impl<C> Default for Claim<C> {
    fn default() -> Self {
        let state = State { is_wanted: false, was_pinned: false, outcome: None };
        Self { state: Mutex::new(state), settled: Condvar::new() }
    }
}

impl<C> Claim<C> {
    fn want(&self) {
        self.state.lock().is_wanted = true;
    }

    fn pinned(&self) {
        self.state.lock().was_pinned = true;
    }

    /// What became of the memory; frees it here unless it is wanted. `count` is for memory that was pinned, and
    /// is called before anybody can have it back, but after it is freed.
    fn settle(&self, outcome: Outcome<C>, count: impl FnOnce()) {
        let mut state = self.state.lock();
        let count = state.was_pinned.then_some(count);
        if !state.is_wanted {
            drop(state);
            drop(outcome);
            return count.map_or((), |count| count());
        }
        if let Some(count) = count {
            count();
        }
        state.outcome = Some(outcome);
        self.settled.notify_all();
    }

    /// Waits for what [`want`](Self::want)ed memory becomes: given back, or `None` when it is leaked.
    fn wait(&self, meanwhile: impl Fn()) -> Option<C> {
        let mut state = self.state.lock();
        loop {
            match state.outcome.take() {
                Some(Outcome::Freed(container)) => return Some(container),
                Some(Outcome::Leaked) => return None,
                None => {
                    if self.settled.wait_for(&mut state, RETRY_AFTER).timed_out() {
                        drop(state);
                        meanwhile();
                        state = self.state.lock();
                    }
                }
            }
        }
    }
}
