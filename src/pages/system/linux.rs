//! Linux: mmap, madvise and mbind.
#![allow(unsafe_code)] // Maps memory.

use crate::machine::NODE_MAX;
use crate::pages::{HUGE_BYTES, Populated};
use crate::placement::{HugePages, Placement, Refusals};
use std::ffi::c_void;
use std::io;
use std::ptr::NonNull;

pub(crate) fn map(bytes: usize, placement: Placement) -> Option<(NonNull<u8>, Refusals)> {
    let is_huge = bytes >= HUGE_BYTES && placement.huge_pages == HugePages::Advise;
    let base = if is_huge { map_aligned(bytes)? } else { map_anywhere(bytes)? };
    let mut refusals = Refusals::default();
    if let Some(node) = placement.node {
        // Before anything is touched, or it would stay where it is.
        refusals.node = prefer_node(base, bytes, node).err();
    }
    if bytes >= HUGE_BYTES {
        let advice = if is_huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: advice on a mapping of ours, which changes no contents; a refusal is harmless.
        let is_taken = unsafe { libc::madvise(base.as_ptr().cast(), bytes, advice) } == 0;
        refusals.huge_pages = (is_huge && !is_taken).then(io::Error::last_os_error);
    }
    Some((base, refusals))
}

/// Maps more than needed, and gives back what lies before and behind the aligned part.
fn map_aligned(bytes: usize) -> Option<NonNull<u8>> {
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
    Some(base)
}

/// The memory goes to this node while it has some free, and elsewhere after that: bound to it (`MPOL_BIND`) the
/// process would be killed when the node is full.
fn prefer_node(base: NonNull<u8>, bytes: usize, node: u32) -> io::Result<()> {
    const WORD_BITS: usize = libc::c_ulong::BITS as usize;
    let mut mask = [0 as libc::c_ulong; (NODE_MAX as usize + 1) / WORD_BITS];
    let node = node.min(NODE_MAX) as usize;
    mask[node / WORD_BITS] |= 1 << (node % WORD_BITS);
    // The kernel takes one bit less than it is told.
    let bits = mask.len() * WORD_BITS + 1;
    let (mode, flags) = (libc::MPOL_PREFERRED as libc::c_long, 0 as libc::c_long);
    // SAFETY: mbind takes a mapping, which is ours, and reads `bits - 1` bits of the mask, which are there; it sets
    // where pages that are not there yet will come from.
    let answer =
        unsafe { libc::syscall(libc::SYS_mbind, base.as_ptr(), bytes, mode, mask.as_ptr(), bits, flags) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
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
pub(crate) unsafe fn unmap(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller's contract. The only possible failure, too many mappings when one is
    // split, leaves the memory mapped, which is a leak and not a hazard.
    unsafe { libc::munmap(base.as_ptr().cast::<c_void>(), bytes) };
}

pub(crate) fn populate(base: usize, bytes: usize) -> Populated {
    // SAFETY: MADV_POPULATE_WRITE keeps contents, whosever they are, and refuses what is not mapped for writing.
    let answer = unsafe { libc::madvise(base as *mut c_void, bytes, libc::MADV_POPULATE_WRITE) };
    match io::Error::last_os_error().raw_os_error() {
        _ if answer == 0 => Populated::All,
        Some(libc::EINVAL | libc::ENOSYS | libc::EPERM) => Populated::Unknown,
        _ => Populated::Failed,
    }
}

pub(crate) fn hide_from_children(base: *mut u8, bytes: usize) {
    // SAFETY: a mapping of ours; the advice changes only what a fork does with it.
    unsafe { libc::madvise(base.cast(), bytes, libc::MADV_DONTFORK) };
}

pub(crate) fn show_to_children(base: *mut u8, bytes: usize) {
    // SAFETY: as in `hide_from_children`.
    unsafe { libc::madvise(base.cast(), bytes, libc::MADV_DOFORK) };
}
