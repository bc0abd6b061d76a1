//! What users read: guards and errors in words. Nothing is asked of a driver to print them.
#![allow(unsafe_code)] // Allocating by address.

mod common;

use common::{KIB, PATIENCE, Rig, all_zero};
use pinpool::backend::{
    AllocationRecord, Backend, BackendError, HostPinned, InBackend, MemoryBackend, TemporaryContext,
};
use pinpool::pin::Pinned;
use pinpool::sim::{Fault, Sim};
use pinpool::{BackingInUse, Error};
use std::collections::BTreeSet;
use std::ptr::NonNull;

const LEN: usize = 64 * KIB;

#[test]
fn a_guard_says_what_it_is_without_asking_anybody() {
    let rig = Rig::new();
    let (stream, driver) = (rig.context.stream(), rig.sim.driver());
    let mut locked = rig.pinned(LEN);
    locked.record_last_use(&stream).unwrap();
    let fresh = rig.pool.take(1);
    let numbers = Pinned::new(&driver, vec![1u32, 2, 3]).unwrap();
    let backend = HostPinned::builder(&driver).record_capacity(8).build().unwrap();
    // SAFETY: given back below, and not used.
    let base = unsafe { backend.allocate(4096) }.unwrap();
    let context = TemporaryContext::new(&driver, 0).unwrap();
    let calls = rig.sim.total_calls();

    assert_eq!(format!("{locked:?}"), "PinnedBuffer { len: 65536, is_pinned: true, recorded_uses: 1, .. }");
    assert_eq!(format!("{fresh:?}"), "PinnedBuffer { len: 1, is_pinned: false, recorded_uses: 0, .. }");
    let inside = "PinnedBuffer { len: 12, is_pinned: true, recorded_uses: 0, .. }";
    assert_eq!(format!("{numbers:?}"), format!("Pinned {{ len: 3, buffer: {inside}, .. }}"));
    let record = "AllocationRecord { len: 1, bytes: 4096, capacity: 8, .. }";
    let inside = "kind: \"host-pinned\", driver: Driver { name: \"simulated\", .. }, device: 0";
    assert_eq!(format!("{backend:?}"), format!("Backend {{ {inside}, record: {record}, .. }}"));
    let builder = format!("{:?}", HostPinned::builder(&driver).record_capacity(8));
    assert_eq!(builder, "BackendBuilder { kind: \"host-pinned\", record_capacity: 8, .. }");
    assert_eq!(format!("{context:?}"), "TemporaryContext { driver: Driver { name: \"simulated\", .. }, .. }");
    assert_eq!(rig.sim.total_calls(), calls, "printing asked the driver");

    // SAFETY: nobody uses it.
    unsafe { backend.deallocate(base, 4096) }.unwrap();
    let shared = InBackend::new(backend).unwrap();
    assert_eq!(format!("{shared:?}"), "InBackend { backend: \"host-pinned\" }");
    drop((locked, fresh, numbers));
    rig.sim.run_until_idle();
    assert!(pinpool::pin::drain(PATIENCE));
    rig.finish();
}

#[test]
fn what_is_written_through_as_mut_is_zeroed_like_any_other_write() {
    fn second_byte(bytes: &mut impl AsMut<[u8]>) -> &mut u8 {
        &mut bytes.as_mut()[1]
    }
    let rig = Rig::new();
    let mut buffer = rig.pinned(LEN);
    buffer.set_dirty_len(0);
    *second_byte(&mut buffer) = 9;
    assert_eq!(AsRef::<[u8]>::as_ref(&buffer)[..3], [0, 9, 0]);
    drop(buffer);
    rig.drain();
    assert!(all_zero(&rig.pool.take(LEN)));
    let mut numbers = Pinned::new(&rig.sim.driver(), vec![1u32, 2]).unwrap();
    AsMut::<[u32]>::as_mut(&mut numbers)[0] = 7;
    assert_eq!(AsRef::<[u32]>::as_ref(&numbers), [7, 2]);
    assert_eq!(numbers.unpin().unwrap(), [7, 2]);
    rig.finish();
}

/// Allocates, and gives the refusal.
fn refused<K>(backend: &Backend<K>, bytes: usize) -> BackendError
where
    Backend<K>: MemoryBackend,
    K: pinpool::backend::kind::Kind,
{
    // SAFETY: it is refused.
    unsafe { backend.allocate(bytes) }.unwrap_err()
}

#[test]
fn what_a_backend_refuses_it_refuses_in_words() {
    let sim = Sim::new();
    let _context = sim.context(0);
    let backend = HostPinned::builder(&sim.driver()).record_capacity(1).build().unwrap();
    let said = |error: BackendError| (error.to_string(), error.code(), error.is_permanent());
    let once = |text: &str, code| (text.to_owned(), code, false);

    assert_eq!(said(refused(&backend, 0)), once("zero bytes are no allocation", None));
    let (text, ..) = said(refused(&backend, usize::MAX));
    assert_eq!(
        text,
        format!("{} bytes are too many; at most {} can be represented", usize::MAX, isize::MAX / 2)
    );
    sim.fail("cuMemHostAlloc", Fault::once(2));
    assert_eq!(said(refused(&backend, 64)), once("cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY (2)", Some(2)));
    sim.fail("cuMemHostAlloc", Fault::once(801));
    assert!(refused(&backend, 64).is_permanent(), "what is not supported will not be supported next time");

    // SAFETY: given back below, and not used.
    let base = unsafe { backend.allocate(64) }.unwrap();
    let full = "the record of live allocations is full: it holds 1; what the driver had given ";
    assert_eq!(said(refused(&backend, 64)), once(&format!("{full}was released again"), None));
    sim.fail("cuMemFreeHost", Fault::once(700));
    let leaked = format!("{full}is leaked, for cuMemFreeHost: CUDA_ERROR_ILLEGAL_ADDRESS (700)");
    assert_eq!(said(refused(&backend, 64)), once(&leaked, None));

    // SAFETY: refused: that size is not its size.
    let wrong = unsafe { backend.deallocate(base, 65) }.unwrap_err();
    assert_eq!(said(wrong), once(&format!("the allocation at {base:p} has 64 bytes and not 65"), None));
    // SAFETY: refused: nobody gave this.
    let foreign = unsafe { backend.deallocate(NonNull::dangling(), 1) }.unwrap_err();
    assert!(
        foreign.to_string().starts_with("0x1 is no live allocation of this host-pinned backend"),
        "{foreign}"
    );
    // SAFETY: nobody uses it.
    unsafe { backend.deallocate(base, 64) }.unwrap();

    let Err(without) = HostPinned::new(&pinpool::Driver::host_only()) else { panic!("in which memory?") };
    assert!(without.is_permanent() && without.to_string().contains("no usable CUDA driver"), "{without}");
    let Err(homeless) = HostPinned::new(&Sim::new().driver()) else { panic!("in which context?") };
    assert!(homeless.to_string().starts_with("no CUDA context is current"), "without the bytes, which are 0");
    let child = said(BackendError::ForkedChild);
    assert_eq!(child, ("this is a forked child, where CUDA cannot be used".to_owned(), None, true));
    assert!(!BackendError::ContextWaitsHeld.is_permanent(), "it is over with the hold");
    assert!(BackendError::ContextWaitsHeld.to_string().contains("`hold_context_waits`"));
    assert_eq!(BackendError::OutOfMemory { bytes: 7 }.to_string(), "the system has no 7 bytes");
}

#[test]
fn a_full_record_says_how_many_it_holds() {
    let record = AllocationRecord::new(2);
    assert_eq!(record.capacity(), 2);
    record.insert(0x1000, 1, 0).unwrap();
    record.insert(0x2000, 1, 0).unwrap();
    let full = record.insert(0x3000, 1, 0).unwrap_err();
    assert_eq!(full.to_string(), "the record of live allocations is full: it holds 2");
    let claim = record.claim(0x1000).unwrap();
    assert!(format!("{claim:?}").starts_with("Claim(Allocation { base: 4096, bytes: 1"), "{claim:?}");
}

#[test]
fn what_backs_a_pool_is_told_apart() {
    use BackingInUse::{HostPageTables, HostPinned, Pageable, Registered, Undecided};
    let all = [Undecided, Registered, HostPinned, HostPageTables, Pageable].map(|one| one.to_string());
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "{all:?}");
    assert_eq!(Pageable.to_string(), "nothing: the driver supports neither way");
}

#[test]
fn a_capture_that_forbids_a_record_says_why() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    stream.begin_capture(pinpool::sim::CaptureMode::Relaxed);
    let error = rig.pool.take(LEN).record_last_use(&stream).unwrap_err();
    assert_eq!(error, Error::Capturing);
    assert!(error.to_string().contains("read again at every replay"), "{error}");
    drop(stream.end_capture());
    rig.finish();
}
