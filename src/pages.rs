//! Owned, page-aligned, zero-initialised host mappings.
//!
//! A mapping never grows and never moves. On Linux it is an anonymous private mapping of its own: whole
//! pages that no other allocation shares, so that a registration can never overlap somebody else's.
//! Mappings of 2 MiB and more are 2 MiB aligned with huge pages advised: first touch is 4 to 5 times
//! faster, page-locking over 10 times (`docs/architecture.md`).
#![allow(unsafe_code)] // Maps memory and makes slices of it.

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
        debug_assert!(bytes > 0 && bytes.is_multiple_of(crate::os::page_bytes()));
        Some(Self { base: os::map(bytes)?, bytes, owner: None })
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
    /// would take all the faults under it. A refusal is harmless: the driver faults them in itself.
    pub(crate) fn populate(&mut self) {
        const STEP_BYTES: usize = 32 << 20;
        // Memory of another allocator may begin and end within a page, which it touched itself.
        let page = crate::os::page_bytes();
        let mut at = self.base().next_multiple_of(page);
        let end = (self.base() + self.bytes) / page * page;
        while at < end {
            let bytes = STEP_BYTES.min(end - at);
            if !os::populate(self.base.as_ptr().wrapping_add(at - self.base()), bytes) {
                return;
            }
            at += bytes;
        }
    }

    /// Keeps the mapping out of forked children: the kernel copies pinned pages at every fork
    /// otherwise, 1.6 s for 1 GiB. A child that touches it gets SIGSEGV, so the guard forgets it there.
    ///
    /// Not memory of another allocator: its first and last page hold other things too.
    pub(crate) fn hide_from_children(&mut self) {
        if self.is_foreign() {
            return;
        }
        os::hide_from_children(self.base.as_ptr(), self.bytes);
    }

    /// Undoes [`Self::hide_from_children`].
    pub(crate) fn show_to_children(&mut self) {
        if self.is_foreign() {
            return;
        }
        os::show_to_children(self.base.as_ptr(), self.bytes);
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.is_foreign() {
            return; // It frees the memory when it is dropped, right after this.
        }
        // SAFETY: `base` and `bytes` are what `map` gave, and the only owner is going away.
        unsafe { os::unmap(self.base, self.bytes) };
    }
}

#[cfg(target_os = "linux")]
mod os {
    use super::HUGE_BYTES;
    use std::ffi::c_void;
    use std::ptr::NonNull;

    pub(super) fn map(bytes: usize) -> Option<NonNull<u8>> {
        if bytes < HUGE_BYTES {
            return map_anywhere(bytes);
        }
        // Map more than needed, and give back what lies before and behind the aligned part.
        let padded = bytes.checked_add(HUGE_BYTES)?;
        let start = map_anywhere(padded)?;
        let address = start.as_ptr() as usize;
        let skip = address.next_multiple_of(HUGE_BYTES) - address;
        if skip > 0 {
            // SAFETY: the first `skip` bytes of the fresh mapping, which nobody has seen.
            unsafe { unmap(start, skip) };
        }
        // SAFETY: `skip` is less than HUGE_BYTES, so the pointer stays inside the padded mapping.
        let base = unsafe { start.add(skip) };
        // SAFETY: `skip + bytes` is at most `padded`.
        let end = unsafe { base.add(bytes) };
        let rest = HUGE_BYTES - skip;
        if rest > 0 {
            // SAFETY: the last `rest` bytes of the fresh mapping, which nobody has seen.
            unsafe { unmap(end, rest) };
        }
        // SAFETY: advice on a mapping of ours; a host without huge pages refuses it harmlessly.
        unsafe { libc::madvise(base.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        Some(base)
    }

    fn map_anywhere(bytes: usize) -> Option<NonNull<u8>> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // Not MAP_NORESERVE: with the usual overcommit policy the kernel then refuses what could never be
        // backed, and the caller gets an error instead of being killed at the first touch.
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED { None } else { NonNull::new(base.cast()) }
    }

    /// # Safety
    /// The range is a mapping (or a page-aligned part of one) that nobody uses any more.
    pub(super) unsafe fn unmap(base: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller's contract. The only possible failure, too many mappings when one is
        // split, leaves the memory mapped, which is a leak and not a hazard.
        unsafe { libc::munmap(base.as_ptr().cast::<c_void>(), bytes) };
    }

    pub(super) fn populate(base: *mut u8, bytes: usize) -> bool {
        // SAFETY: `base..base + bytes` lies in a mapping of ours; MADV_POPULATE_WRITE keeps contents.
        unsafe { libc::madvise(base.cast(), bytes, libc::MADV_POPULATE_WRITE) == 0 }
    }

    pub(super) fn hide_from_children(base: *mut u8, bytes: usize) {
        // SAFETY: a mapping of ours; the advice changes only what a fork does with it.
        unsafe { libc::madvise(base.cast(), bytes, libc::MADV_DONTFORK) };
    }

    pub(super) fn show_to_children(base: *mut u8, bytes: usize) {
        // SAFETY: as in `hide_from_children`.
        unsafe { libc::madvise(base.cast(), bytes, libc::MADV_DOFORK) };
    }
}

/// Host-only platforms: zeroed memory of the global allocator, aligned to pages.
#[cfg(not(target_os = "linux"))]
mod os {
    use crate::os::page_bytes;
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::ptr::NonNull;

    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes, page_bytes()).ok()
    }

    pub(super) fn map(bytes: usize) -> Option<NonNull<u8>> {
        let layout = layout(bytes)?;
        // SAFETY: the size is at least a page, so not zero.
        NonNull::new(unsafe { alloc_zeroed(layout) })
    }

    /// # Safety
    /// `base` and `bytes` are what `map` gave, and nobody uses the memory any more.
    pub(super) unsafe fn unmap(base: NonNull<u8>, bytes: usize) {
        let Some(layout) = layout(bytes) else { return };
        // SAFETY: the caller's contract; the layout is the one that `map` used.
        unsafe { dealloc(base.as_ptr(), layout) };
    }

    pub(super) fn populate(_: *mut u8, _: usize) -> bool {
        false
    }
    pub(super) fn hide_from_children(_: *mut u8, _: usize) {}
    pub(super) fn show_to_children(_: *mut u8, _: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

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
            pages.populate();
            assert!(pages.slice(bytes).iter().all(|byte| *byte == 1));
        }
    }

    #[test]
    fn an_impossible_size_is_refused() {
        assert!(Pages::map(1 << 62).is_none());
    }
}
