//! A block and its states as types; a move consumes the old state.
//!
//! ```text
//! Out -> Returned -> Quiescent -> Ready -> Out        (the round of a healthy block)
//!                        |          +----> Retiring -> gone       (evicted: unregistered, unmapped)
//!                        +---------------> Retiring               (not worth keeping)
//!           any state -> Quarantined                              (leaked and counted)
//! ```
//!
//! The body of a block keeps its pages in `ManuallyDrop`: a block that is lost on the way, by a panic
//! or a bug, is leaked. Memory that was page-locked is given back in one place only, [`Retiring::release`], which
//! first unregisters it and goes no further when that fails; memory of the driver's is freed by the driver there.

mod release;
mod returned;
#[cfg(test)]
mod tests;

pub(crate) use release::Released;

use crate::contexts::Context;
use crate::driver::{ContextHandle, Driver, EventHandle, HostAccess};
use crate::driver_pages;
use crate::error::CallError;
use crate::events::{self, Spare, StreamKey, Use};
pub(crate) use crate::fate::{Fate, Proof};
use crate::holds::{BlockHolds, Captured};
use crate::notes::Notes;
use crate::pages::Pages;
use crate::regions;
use crate::size_class::SizeClass;
use crate::sync::{Arc, Instant, Mutex};
use crate::zero;
use smallvec::SmallVec;
use std::mem::ManuallyDrop;

/// The recorded uses of a block; two streams fit without an allocation.
pub(crate) type Uses = SmallVec<[Use; 2]>;

/// Where a block's pages are from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    /// A mapping of ours, or the caller's memory, of which pages may not be there yet.
    Mapped,
    /// The same, faulted in by us.
    Populated,
    /// The driver (`cuMemHostAlloc`): page-locked for as long as there are any.
    Driver,
}

/// What every state of a block has. One allocation for the life of the block, so that a move is a word.
///
/// Laid out as written: what a drop touches comes first, on one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
struct Body {
    pages: ManuallyDrop<Pages>,
    /// The context that the pages are registered in; `Some` means page-locked.
    registered_in: Option<Arc<Context>>,
    /// Bytes from the start that may differ from zero.
    dirty_bytes: usize,
    class: SizeClass,
    fate: Fate,
    /// Which drain epoch counts the return.
    epoch: u8,
    /// Which shutdown the return is later than.
    generation: u32,
    /// A complete event, kept for the next record in its context; on the line that a record has to have anyway.
    spare: Option<Spare>,
    uses: Uses,
    source: Source,
    /// The context that was current where the guard was dropped without a record.
    seen_context: Option<ContextHandle>,
    /// Behind a lock, because an integration notes a read of the device through a shared reference.
    notes: Mutex<Notes>,
    /// The graphs that may use it at any replay; behind a lock for the same reason.
    holds: Mutex<BlockHolds>,
    returned_at: Option<Instant>,
    /// The name of the pages in the record of page-locked regions, while they are registered.
    region: Option<regions::Token>,
}

#[cfg(not(loom))]
const _: () = assert!(std::mem::offset_of!(Body, uses) == 64, "what a drop touches is on one cache line");

impl Body {
    /// What the kernel had no memory for stays as it was: the next step tries again, and the last of them is the
    /// driver, which refuses to register it or takes the faults under its lock.
    fn populate(&mut self) {
        if self.source == Source::Mapped && self.pages.populate() {
            self.source = Source::Populated;
        }
    }

    /// Nobody knows where to wait for what is not recorded; the end of a graph would say nothing of that.
    fn lose_its_context(&mut self) {
        match self.fate {
            Fate::Captured => self.holds.get_mut().add(Captured::ForEver),
            _ => self.fate = Fate::Unknown,
        }
    }
}

/// With the caller.
#[derive(Debug)]
pub(crate) struct Out(Box<Body>);

/// Dropped by the caller; device work may be outstanding.
#[derive(Debug)]
pub(crate) struct Returned(Box<Body>);

/// No device work touches it; its dirty prefix may differ from zero.
#[derive(Debug)]
pub(crate) struct Quiescent(Box<Body>);

/// Quiescent and all zero.
#[derive(Debug)]
pub(crate) struct Ready(Box<Body>);

/// On its way to be unregistered and unmapped.
#[derive(Debug)]
pub(crate) struct Retiring(Box<Body>);

macro_rules! common {
    ($($state:ty),*) => {$(
        impl $state {
            #[allow(dead_code)]
            pub(crate) fn class(&self) -> SizeClass {
                self.0.class
            }
            #[allow(dead_code)]
            pub(crate) fn is_pinned(&self) -> bool {
                self.0.registered_in.is_some()
            }
            /// Whether the context that it was registered in has ended, and the registration with it.
            #[allow(dead_code)]
            pub(crate) fn is_stranded(&self) -> bool {
                self.0.registered_in.as_ref().is_some_and(|context| context.is_gone())
            }
            #[allow(dead_code)]
            pub(crate) fn epoch(&self) -> usize {
                usize::from(self.0.epoch)
            }
        }
    )*};
}
common!(Out, Returned, Quiescent, Ready, Retiring);

impl Out {
    /// A pageable block: of fresh pages, all zero and of the class's size; or of foreign ones, which no shelf
    /// ever gets, and whose class is only where they are counted.
    pub(crate) fn fresh(pages: Pages, class: SizeClass) -> Self {
        debug_assert!(pages.bytes() == class.bytes() || pages.is_foreign());
        Self(Box::new(Body {
            pages: ManuallyDrop::new(pages),
            registered_in: None,
            dirty_bytes: 0,
            seen_context: None,
            class,
            fate: Fate::Recorded,
            epoch: 0,
            generation: 0,
            spare: None,
            uses: Uses::new(),
            source: Source::Mapped,
            notes: Mutex::new(Notes::new()),
            holds: Mutex::default(),
            returned_at: None,
            region: None,
        }))
    }

    /// Faults the pages in; for a taker who shall not meet the faults.
    pub(crate) fn populate(&mut self) {
        self.0.populate();
    }

    pub(crate) fn uses(&self) -> &Uses {
        &self.0.uses
    }

    pub(crate) fn take_uses(&mut self) -> Uses {
        std::mem::take(&mut self.0.uses)
    }

    pub(crate) fn add_use(&mut self, used: Use) {
        self.0.uses.push(used);
    }

    /// The event that the block keeps, to look at, if it is of this context.
    #[inline]
    pub(crate) fn spare_event(&self, context: ContextHandle) -> Option<EventHandle> {
        self.0.spare.as_ref().filter(|spare| spare.is_of(context)).map(Spare::event)
    }

    /// The event that the block keeps was recorded.
    #[inline]
    pub(crate) fn use_spare(&mut self, key: StreamKey) {
        if let Some(spare) = self.0.spare.take() {
            self.0.uses.push(spare.recorded(key));
        }
    }

    /// The event that the block keeps, if it is of this context.
    #[inline]
    pub(crate) fn take_spare(&mut self, context: ContextHandle) -> Option<Spare> {
        self.0.spare.take_if(|spare| spare.is_of(context))
    }

    /// A use that was waited for: its event is kept for the next record, or goes back to its pool.
    pub(crate) fn recycle(&mut self, used: Use) {
        events::keep(&mut self.0.spare, used);
    }

    /// Noted uses; the guard's flags say whether there are any.
    pub(crate) fn notes(&self) -> &Mutex<Notes> {
        &self.0.notes
    }

    /// The graphs that it was captured into; the guard's flags say whether there are any.
    pub(crate) fn holds(&self) -> &Mutex<BlockHolds> {
        &self.0.holds
    }

    pub(crate) fn take_notes(&mut self) -> Notes {
        std::mem::take(self.0.notes.get_mut())
    }

    pub(crate) fn fate(&self) -> Fate {
        self.0.fate
    }

    /// A capture is for good; a failed record is nothing beside it.
    pub(crate) fn worsen(&mut self, fate: Fate) {
        if self.0.fate != Fate::Captured {
            self.0.fate = fate;
        }
    }

    /// The dropping thread's context could not be asked for.
    pub(crate) fn lose_its_context(&mut self) {
        self.0.lose_its_context();
    }

    /// The caller proved quiescence of everything up to now.
    pub(crate) fn prove(&mut self) {
        self.0.fate = Fate::Proven;
    }

    /// What a failed record left unknown was waited for.
    pub(crate) fn forgive(&mut self) {
        if self.0.fate == Fate::RecordFailed {
            self.0.fate = Fate::Recorded;
        }
    }

    /// A use after a proof, or a write, makes the proof worthless.
    pub(crate) fn unprove(&mut self) {
        if self.0.fate == Fate::Proven {
            self.0.fate = Fate::Recorded;
        }
    }

    #[inline]
    pub(crate) fn slice(&self, len: usize) -> &[u8] {
        self.0.pages.slice(len)
    }

    #[inline]
    pub(crate) fn slice_mut(&mut self, len: usize) -> &mut [u8] {
        self.0.pages.slice_mut(len)
    }

    /// Hands the block back; below what `take_unzeroed` left, it stays dirty.
    pub(crate) fn give_back(
        mut self,
        dirty_bytes: usize,
        seen: Option<ContextHandle>,
        epoch: usize,
        generation: u32,
    ) -> Returned {
        self.0.dirty_bytes = self.0.dirty_bytes.max(dirty_bytes);
        // Nearly always there was a record, and the field, which is not set then, is on another cache line.
        if seen.is_some() {
            self.0.seen_context = seen;
        }
        self.0.epoch = epoch as u8;
        self.0.generation = generation;
        Returned(self.0)
    }

    /// In a forked child: unmaps what is the child's own, its pageable memory. Page-locked memory was never
    /// mapped here, and whatever stands at its address now is somebody else's.
    pub(crate) fn leave_in_child(self) {
        let Body { pages, registered_in, spare, .. } = *self.0;
        std::mem::forget(spare);
        if registered_in.is_none() {
            drop(ManuallyDrop::into_inner(pages));
        } else {
            std::mem::forget(registered_in);
        }
    }

    /// A block that a caller never saw: page-locked ahead, for a shelf.
    pub(crate) fn never_handed_out(self) -> Quiescent {
        debug_assert!(self.0.uses.is_empty());
        Quiescent(self.0)
    }
}

impl Quiescent {
    pub(crate) fn dirty_bytes(&self) -> usize {
        self.0.dirty_bytes
    }

    /// Page-locks the block in the *current* context, which must be the given one.
    pub(crate) fn register(&mut self, driver: &Driver, context: Arc<Context>) -> Result<(), CallError> {
        debug_assert!(!self.is_pinned());
        // Hidden before it is pinned: the kernel copies pinned pages into every forked child.
        self.0.pages.hide_from_children();
        let (base, bytes) = (self.0.pages.base(), self.0.pages.bytes());
        // Recorded before it is pinned, and forgotten after, so that nobody takes pinned memory for pageable.
        let region = regions::note(base, bytes);
        match driver.api().register(base, bytes) {
            Ok(()) => {
                self.0.registered_in = Some(context);
                self.0.region = Some(region);
                Ok(())
            }
            Err(error) => {
                regions::forget(region);
                self.0.pages.show_to_children();
                Err(error)
            }
        }
    }

    /// Puts page-locked memory of the driver's in the place of the block's own pages, all zero; in the *current*
    /// context, which must be the given one. After a refusal the block is as it was.
    pub(crate) fn replace(&mut self, driver: &Driver, context: Arc<Context>) -> Result<(), CallError> {
        debug_assert!(!self.is_pinned());
        let pages = driver_pages::allocate(driver, self.0.class.bytes())?;
        // Nobody else knows the memory yet, so this is early enough.
        self.0.region = Some(regions::note(pages.base(), pages.bytes()));
        let old = std::mem::replace(&mut self.0.pages, ManuallyDrop::new(pages));
        driver.api().before_host_access(HostAccess::Unmap, old.base(), old.bytes());
        drop(ManuallyDrop::into_inner(old));
        self.0.registered_in = Some(context);
        self.0.source = Source::Driver;
        // What the driver left there is nobody's business.
        self.0.dirty_bytes = self.0.class.bytes();
        let mut job = zero::Job::of(self.0.dirty_bytes);
        while self.zero_step(driver, &mut job) > 0 {}
        Ok(())
    }

    /// Faults the pages in, outside every driver lock; once in the life of a block.
    pub(crate) fn populate(&mut self) {
        self.0.populate();
    }

    /// Zeroes at most one step of the dirty prefix, from its end; gives the bytes zeroed.
    ///
    /// From the end, so that `dirty_bytes` stays the truth after every step and the warm start of the
    /// buffer is zeroed last.
    pub(crate) fn zero_step(&mut self, driver: &Driver, job: &mut zero::Job) -> usize {
        let end = self.0.dirty_bytes;
        let start = end.saturating_sub(zero::STEP_BYTES);
        if start < end {
            let base = self.0.pages.base();
            driver.api().before_host_access(HostAccess::Zero, base + start, end - start);
            job.zero(&mut self.0.pages.slice_mut(end)[start..]);
            self.0.dirty_bytes = start;
        }
        end - start
    }

    /// Ready for a shelf once nothing is dirty.
    pub(crate) fn into_ready(self, driver: &Driver) -> Result<Ready, Self> {
        if self.0.dirty_bytes > 0 {
            return Err(self);
        }
        // From here on any taker may get it, so this is where it is handed out.
        driver.api().before_host_access(HostAccess::HandOut, self.0.pages.base(), self.0.pages.bytes());
        Ok(Ready(self.0))
    }

    /// Straight to a caller, still dirty up to `dirty_bytes`; the memory is told apart by the guard.
    pub(crate) fn hand_out(self, driver: &Driver) -> Out {
        driver.api().before_host_access(HostAccess::HandOut, self.0.pages.base(), self.0.pages.bytes());
        Out(self.0)
    }

    pub(crate) fn retire(self) -> Retiring {
        Retiring(self.0)
    }
}

impl Ready {
    #[cfg(test)]
    pub(crate) fn address(&self) -> usize {
        self.0.pages.base()
    }

    #[inline]
    pub(crate) fn hand_out(self) -> Out {
        Out(self.0)
    }

    pub(crate) fn retire(self) -> Retiring {
        Retiring(self.0)
    }
}
