//! Owned, page-aligned, zero-initialised host mappings.
//!
//! A mapping never grows and never moves. On Linux it is an anonymous private mapping of its own: whole
//! pages that no other allocation shares, so that a registration can never overlap somebody else's.
//! Mappings of 2 MiB and more are 2 MiB aligned with huge pages advised, unless the settings say otherwise: first
//! touch is 4 to 5 times faster, page-locking over 10 times (`docs/architecture.md`).
#![allow(unsafe_code)] // Maps memory and makes slices of it.

mod system;

use crate::placement::{Placement, Refusals};
use std::ptr::NonNull;

/// Alignment of large mappings, and the size from which it applies: a huge page of x86-64 and AArch64.
pub(crate) const HUGE_BYTES: usize = 2 << 20;

/// A mapping that belongs to its holder; dropping it unmaps it.
///
/// Whoever holds one that the driver has registered must not drop it before it is unregistered;
/// `block.rs` sees to that.
pub(crate) struct Pages {
    base: NonNull<u8>,
    bytes: usize,
    /// Of memory that was allocated elsewhere (`pin.rs`): dropped instead of unmapping. Boxed twice so that
    /// what every buffer carries is one word.
    owner: Option<Box<Box<dyn Owner>>>,
}

/// What owns memory that was not mapped here; dropping it frees the memory.
pub(crate) trait Owner: Send {
    /// Told instead of being dropped when the memory is deliberately leaked.
    fn leaked(&mut self);
}

// SAFETY: memory owned by one value; nothing in it belongs to a thread, and an owner is `Send`.
unsafe impl Send for Pages {}
// SAFETY: through `&Pages` the memory is only read, and the owner not reached.
unsafe impl Sync for Pages {}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Pages");
        shown.field("base", &self.base).field("bytes", &self.bytes);
        shown.field("is_foreign", &self.is_foreign()).finish_non_exhaustive()
    }
}

impl Pages {
    /// Maps `bytes` of zeros, whole pages and at least one. `None` when the system refuses.
    pub(crate) fn map(bytes: usize) -> Option<Self> {
        Self::map_as(bytes, Placement::default()).map(|(pages, _)| pages)
    }

    /// As [`Self::map`], placed as asked for as far as the kernel allows it, and what it did not allow.
    ///
    /// A node holds for the mapping, whichever thread touches it first.
    pub(crate) fn map_as(bytes: usize, placement: Placement) -> Option<(Self, Refusals)> {
        debug_assert!(bytes > 0 && bytes.is_multiple_of(crate::os::page_bytes()));
        let (base, refusals) = system::map(bytes, placement)?;
        Some((Self { base, bytes, owner: None }, refusals))
    }

    /// Takes memory that was allocated elsewhere, with what frees it.
    ///
    /// # Safety
    ///
    /// `base..base + bytes` is initialised memory that stays where it is until `owner` is dropped, that
    /// nothing but the result accesses until then, and of which every bit pattern is valid for the owner.
    pub(crate) unsafe fn foreign(base: NonNull<u8>, bytes: usize, owner: Box<dyn Owner>) -> Self {
        Self { base, bytes, owner: Some(Box::new(owner)) }
    }

    /// Gives the mapping away, by its address; [`from_base`](Self::from_base) takes it back.
    pub(crate) fn into_base(self) -> usize {
        debug_assert!(!self.is_foreign());
        std::mem::ManuallyDrop::new(self).base()
    }

    /// The mapping that [`into_base`](Self::into_base) gave away.
    ///
    /// # Safety
    ///
    /// It is that address, with the size it was mapped with, taken back once, and nobody uses the memory any more.
    pub(crate) unsafe fn from_base(base: NonNull<u8>, bytes: usize) -> Self {
        Self { base, bytes, owner: None }
    }

    pub(crate) fn is_foreign(&self) -> bool {
        self.owner.is_some()
    }

    /// The memory is about to be leaked on purpose.
    pub(crate) fn leak(&mut self) {
        if let Some(owner) = &mut self.owner {
            owner.leaked();
        }
    }

    pub(crate) fn base(&self) -> usize {
        self.base.as_ptr() as usize
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first `len` bytes, at most all of them.
    #[inline]
    pub(crate) fn slice(&self, len: usize) -> &[u8] {
        debug_assert!(len <= self.bytes);
        // SAFETY: `base` is the start of live memory, of at least `len` readable, initialised bytes, and
        // `&self` keeps every writer in this process out.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), len) }
    }

    /// As [`Self::slice`], writable.
    #[inline]
    pub(crate) fn slice_mut(&mut self, len: usize) -> &mut [u8] {
        debug_assert!(len <= self.bytes);
        // SAFETY: as in `slice`, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), len) }
    }

    /// Faults the pages in, in bounded steps, keeping their contents.
    ///
    /// Done before registering, because the driver holds a process-wide lock while it registers and
    /// would take all the faults under it. Where the kernel has no call for it each page is touched; where it has no
    /// memory for them, the driver is the one to be told. Whether all pages are there now.
    pub(crate) fn populate(&mut self) -> bool {
        match populate_foreign(self.base(), self.bytes) {
            Populated::All => return true,
            Populated::Failed => return false,
            Populated::Unknown => {}
        }
        let page = crate::os::page_bytes();
        let second = (self.base() + 1).next_multiple_of(page);
        let rest = (second..self.base() + self.bytes).step_by(page);
        for at in std::iter::once(self.base()).chain(rest) {
            let byte = self.base.as_ptr().wrapping_add(at - self.base());
            // SAFETY: a byte of the memory, which `&mut self` makes this thread's alone; volatile, so that the page is
            // touched although nothing changes.
            let value = unsafe { byte.read_volatile() };
            // SAFETY: the same byte, and what it had.
            unsafe { byte.write_volatile(value) };
        }
        true
    }

    /// Keeps the mapping out of forked children: the kernel copies pinned pages at every fork
    /// otherwise, 1.6 s for 1 GiB. A child that touches it gets SIGSEGV, so the guard forgets it there.
    ///
    /// Not memory of another allocator: its first and last page hold other things too.
    pub(crate) fn hide_from_children(&mut self) {
        if self.is_foreign() {
            return;
        }
        system::hide_from_children(self.base.as_ptr(), self.bytes);
    }

    /// Undoes [`Self::hide_from_children`].
    pub(crate) fn show_to_children(&mut self) {
        if self.is_foreign() {
            return;
        }
        system::show_to_children(self.base.as_ptr(), self.bytes);
    }
}

/// What came of asking the kernel to fault pages in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Populated {
    All,
    /// The kernel could not.
    Failed,
    /// The kernel has no such call (before 5.14), or does not let this process make it.
    Unknown,
}

/// Faults in the pages of memory that somebody else owns and may be using, keeping their contents; where the kernel has
/// no call for it, nothing is done.
///
/// All pages that it has a part in, since the driver takes those too; in bounded steps, because one call for all of them
/// would hold the address space for as long.
pub(crate) fn populate_foreign(base: usize, bytes: usize) -> Populated {
    const STEP_BYTES: usize = 4 << 20;
    let page = crate::os::page_bytes();
    let end = base.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(page));
    let Some(end) = end else { return Populated::Failed };
    let steps = (base / page * page..end).step_by(STEP_BYTES);
    let populate = |at| system::populate(at, STEP_BYTES.min(end - at));
    steps.map(populate).find(|step| *step != Populated::All).unwrap_or(Populated::All)
}

#[cfg(all(test, target_os = "linux"))]
impl Pages {
    /// Memory that the kernel cannot fault in, because nothing is mapped there nor ever will be; nobody may read it.
    ///
    /// `None` where the kernel cannot be asked to fault anything in, so that each page would be touched.
    pub(crate) fn nowhere() -> Option<Self> {
        struct Nobody;
        impl Owner for Nobody {
            fn leaked(&mut self) {}
        }
        let bytes = crate::os::page_bytes();
        let somewhere = Self::map(bytes)?;
        if populate_foreign(somewhere.base(), bytes) == Populated::Unknown {
            return None;
        }
        // The first page but one: no process may map below 64 KiB.
        let base = NonNull::new(std::ptr::without_provenance_mut(bytes))?;
        Some(Self { base, bytes, owner: Some(Box::new(Box::new(Nobody))) })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.is_foreign() {
            return; // It frees the memory when it is dropped, right after this.
        }
        // SAFETY: `base` and `bytes` are what `map` gave, and the only owner is going away.
        unsafe { system::unmap(self.base, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::HugePages;

    #[test]
    fn mappings_are_aligned_zero_and_writable() {
        for bytes in [crate::os::page_bytes(), 1 << 20, HUGE_BYTES, 8 << 20] {
            let mut pages = Pages::map(bytes).unwrap();
            assert_eq!(pages.base() % bytes.min(HUGE_BYTES).min(crate::os::page_bytes()), 0);
            if cfg!(target_os = "linux") && bytes >= HUGE_BYTES {
                assert_eq!(pages.base() % HUGE_BYTES, 0);
            }
            assert!(pages.slice(bytes).iter().all(|byte| *byte == 0));
            pages.slice_mut(bytes).fill(1);
            assert!(pages.populate());
            assert!(pages.slice(bytes).iter().all(|byte| *byte == 1));
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn memory_for_ordinary_pages_is_the_same_and_a_node_that_there_cannot_be_is_refused_alone() {
        let placement = Placement { huge_pages: HugePages::Never, node: Some(crate::machine::NODE_MAX) };
        let (mut pages, refusals) = Pages::map_as(4 << 20, placement).unwrap();
        assert!(refusals.node.is_some(), "the largest number that a node can have");
        assert!(pages.slice(4 << 20).iter().all(|byte| *byte == 0));
        pages.slice_mut(4 << 20).fill(1);
    }

    #[test]
    fn an_impossible_size_is_refused() {
        assert!(Pages::map(1 << 62).is_none());
    }
}
