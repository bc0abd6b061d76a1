//! Host-only platforms: zeroed memory of the global allocator, aligned to pages.
#![allow(unsafe_code)] // Allocates memory.

use crate::os::page_bytes;
use crate::pages::{HUGE_BYTES, Populated};
use crate::placement::{HugePages, Placement, Refusals};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ptr::NonNull;

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes, page_bytes()).ok()
}

pub(crate) fn map(bytes: usize, placement: Placement) -> Option<(NonNull<u8>, Refusals)> {
    let layout = layout(bytes)?;
    // SAFETY: the size is at least a page, so not zero.
    let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
    let wants_huge = bytes >= HUGE_BYTES && placement.huge_pages == HugePages::Advise;
    let refused = |is_wanted: bool| is_wanted.then(|| io::ErrorKind::Unsupported.into());
    Some((base, Refusals { huge_pages: refused(wants_huge), node: refused(placement.node.is_some()) }))
}

/// # Safety
/// `base` and `bytes` are what `map` gave, and nobody uses the memory any more.
pub(crate) unsafe fn unmap(base: NonNull<u8>, bytes: usize) {
    let Some(layout) = layout(bytes) else { return };
    // SAFETY: the caller's contract; the layout is the one that `map` used.
    unsafe { dealloc(base.as_ptr(), layout) };
}

pub(crate) fn populate(_: usize, _: usize) -> Populated {
    Populated::Unknown
}
pub(crate) fn hide_from_children(_: *mut u8, _: usize) {}
pub(crate) fn show_to_children(_: *mut u8, _: usize) {}
