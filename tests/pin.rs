//! Page-locking memory that the caller owns, on the simulated device: what is refused and by whom, contexts,
//! and memory that is owned. `pin_stubs.rs` has the order of the calls, `pinned.rs` what the device does.
#![allow(unsafe_code)] // The functions under test ask for promises; the tests keep the memory.

use pinpool::pin::{self, Pinned, Region, pin_all, register_region, unregister_region};
use pinpool::regions::{self, Coverage};
use pinpool::sim::{Fault, Sim, SimContext};
use pinpool::{Driver, Error};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const LEN: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

/// The counts are the process's, so the tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(pin::drain(PATIENCE), "an earlier test left something behind: {:?}", pin::stats());
    turn
}

fn device() -> (Sim, SimContext, Driver) {
    let sim = Sim::new();
    let (context, driver) = (sim.context(0), sim.driver());
    (sim, context, driver)
}

fn pattern(seed: u8) -> Vec<u8> {
    (0..LEN).map(|index| (index as u8).wrapping_mul(31).wrapping_add(seed) | 1).collect()
}

#[test]
fn what_the_driver_refuses_is_refused_with_its_code_and_rolled_back() {
    let _turn = alone();
    let (sim, _context, driver) = device();
    let (bytes, other) = (pattern(1), pattern(2));
    static READ_ONLY: [u8; 8192] = [7; 8192];
    let at = |start: usize, len| Region::new(bytes[start..].as_ptr(), len);
    let good = Region::of(&other);
    let cases: [(&str, &[Region], usize, u32); 7] = [
        ("null", &[good, Region::new(std::ptr::null(), 64)], 1, 1),
        ("empty", &[good, at(0, 0)], 1, 1),
        ("the same twice", &[at(0, 4096), good, at(0, 4096)], 2, 712),
        ("overlapping", &[at(0, 4096), good, at(4095, 10)], 2, 712),
        ("around another", &[at(100, 10), good, at(0, LEN)], 2, 712),
        ("read-only", &[good, Region::of(&READ_ONLY)], 1, 1),
        ("past the end of memory", &[good, Region::new(bytes.as_ptr(), usize::MAX)], 1, 1),
    ];
    for (what, list, index, code) in cases {
        // SAFETY: what the driver would register of it outlives the call, which leaves nothing registered.
        let error = unsafe { pin_all(&driver, list) }.unwrap_err();
        assert_eq!((error.index(), error.code()), (Some(index), Some(code)), "{what}: {error}");
        assert_eq!(error.region(), list[index], "{what}");
        assert_eq!(sim.live_registrations(), [], "{what}: not rolled back");
        assert_eq!((regions::covering(&bytes), regions::covering(&other)), (Coverage::None, Coverage::None));
    }
    // Neighbours on one page are two regions: CUDA registers byte-exactly.
    // SAFETY: the memory outlives the regions.
    let pinned = unsafe { pin_all(&driver, &[at(0, 100), at(100, 100)]) }.unwrap();
    assert_eq!(regions::covering(&bytes[..100]), Coverage::Whole);
    assert_eq!(regions::covering(&bytes[50..150]), Coverage::Part, "a copy across the two is refused");
    assert_eq!(sim.registered_bytes(), 200);
    drop(pinned);
    assert_eq!(sim.registered_bytes(), 0);
    sim.assert_clean();
}

#[test]
fn one_region_is_registered_asked_about_and_unregistered() {
    let _turn = alone();
    let (sim, _context, driver) = device();
    let bytes = pattern(1);
    let (base, before) = (bytes.as_ptr(), pin::stats());
    let says = || pin::driver_says_page_locked(&driver, base, LEN).unwrap();
    assert!(!says());
    // SAFETY: the memory outlives the registration.
    unsafe { register_region(&driver, base, LEN) }.unwrap();
    assert!(says() && regions::is_pinned(base));
    assert!(!pin::driver_says_page_locked(&driver, base, LEN + 1).unwrap(), "the end is asked about too");
    assert!(!pin::driver_says_page_locked(&driver, base, usize::MAX).unwrap(), "no such range");
    assert!(pin::driver_says_page_locked(&driver, base, 0).unwrap(), "nothing of nothing is pageable");
    assert_eq!(sim.live_registrations(), [(base as usize, LEN)]);
    // SAFETY: the memory outlives the registration.
    let again = unsafe { register_region(&driver, base, LEN) }.unwrap_err();
    assert_eq!((again.code(), again.index()), (Some(712), None));
    assert!(regions::is_pinned(base), "the first registration is not forgotten for the second's refusal");

    // SAFETY: no device work uses it.
    let inside = unsafe { unregister_region(&driver, bytes[4096..].as_ptr()) }.unwrap_err();
    assert_eq!(inside.code(), Some(1));
    sim.fail("cuMemHostUnregister", Fault::once(999));
    // SAFETY: no device work uses it.
    let error = unsafe { unregister_region(&driver, base) }.unwrap_err();
    assert!(error.to_string().contains("cuMemHostUnregister: CUDA_ERROR_UNKNOWN (999)"), "{error}");
    assert!(says() && regions::is_pinned(base), "still registered, and still known to be");
    // SAFETY: no device work uses it.
    unsafe { unregister_region(&driver, base) }.unwrap();
    assert!(!says() && !regions::is_pinned(base));
    // SAFETY: it is not registered, which is what is tested.
    assert_eq!(unsafe { unregister_region(&driver, base) }.unwrap_err().code(), Some(713));
    let after = pin::stats();
    assert_eq!((after.regions, after.region_bytes), (before.regions, before.region_bytes));
    sim.assert_clean();
}

#[test]
fn without_a_context_the_error_says_what_to_do_and_none_is_made() {
    let _turn = alone();
    let sim = Sim::builder().devices(2).build();
    let bytes = pattern(1);
    let active = || [0, 1].map(|device| sim.cuda().cu_device_primary_ctx_get_state(device).unwrap().1);
    // SAFETY: the memory outlives the call, which registers nothing.
    let error = unsafe { register_region(&sim.driver(), bytes.as_ptr(), LEN) }.unwrap_err();
    assert!(error.to_string().contains("create the context first"), "{error}");
    assert!(matches!(error.cause(), Error::NotPinned { bytes: LEN, .. }));
    assert_eq!(sim.calls("cuMemHostRegister"), 0);
    assert_eq!(active(), [false, false], "a context was made");
    let (error, bytes) = Pinned::new(&sim.driver(), bytes).unwrap_err();
    assert!(error.to_string().contains("create the context first"), "{error}");

    // A primary context that is active, though on another thread, will do, and is kept while it is needed.
    let context = sim.context(1);
    sim.cuda().cu_ctx_set_current(0).unwrap();
    let base = bytes.as_ptr();
    // SAFETY: the memory outlives the registration.
    unsafe { register_region(&sim.driver(), base, LEN) }.unwrap();
    assert_eq!(active(), [false, true]);
    assert_eq!(sim.cuda().cu_ctx_get_current().unwrap(), 0, "the thread's context is as it was");
    drop(context);
    assert_eq!(active(), [false, true], "the registration keeps its context");
    // SAFETY: no device work uses it.
    unsafe { unregister_region(&sim.driver(), base) }.unwrap();
    assert_eq!(active(), [false, false], "and gives it up afterwards");
    sim.assert_clean();
}

#[test]
fn without_cuda_the_error_is_the_report_and_the_memory_comes_back() {
    let _turn = alone();
    let (error, bytes) = Pinned::new(&Driver::host_only(), vec![1u16, 2, 3]).unwrap_err();
    assert!(matches!(error.cause(), Error::NoCuda { .. }), "{error}");
    assert_eq!(bytes, [1, 2, 3]);
    let sim = Sim::builder().devices(0).build();
    let (error, _) = Pinned::new(&sim.driver(), bytes).unwrap_err();
    assert_eq!(error.code(), Some(100), "{error}");
}

#[test]
fn pinned_memory_does_not_move_and_comes_back_as_it_was() {
    let _turn = alone();
    let (sim, _context, driver) = device();
    let mut vec: Vec<u32> = Vec::with_capacity(5000);
    vec.extend(0..3000);
    let (base, capacity) = (vec.as_ptr(), vec.capacity());
    let mut pinned = Pinned::new(&driver, vec).unwrap();
    assert_eq!((pinned.as_ptr(), pinned.len(), pinned[2999]), (base, 3000, 2999));
    assert_eq!(sim.live_registrations(), [(base as usize, 12_000)], "the length, not the spare capacity");
    assert!(pinned.driver_says_page_locked().unwrap() && regions::is_pinned(base));
    assert_eq!(pin::stats().pinned_bytes, 12_000);
    pinned[0] = 77;
    let vec = pinned.unpin().unwrap();
    assert_eq!((vec.as_ptr(), vec.capacity(), vec.len(), vec[0], vec[1]), (base, capacity, 3000, 77, 1));
    assert!(!regions::is_pinned(base) && sim.live_registrations().is_empty());

    let boxed: Box<[f64]> = vec![1.5; 777].into();
    let base = boxed.as_ptr();
    let pinned = Pinned::new(&driver, boxed).unwrap();
    assert_eq!((pinned.as_ptr(), pinned.len(), pinned[776]), (base, 777, 1.5));
    let boxed = pinned.unpin().unwrap();
    assert_eq!((boxed.as_ptr(), boxed.len()), (base, 777));
    assert_eq!((pin::stats().pinned_buffers, pin::stats().waiting_buffers), (0, 0));
    sim.assert_clean();
}

#[test]
fn a_refused_vec_comes_back_untouched_and_an_empty_one_is_called_empty() {
    let _turn = alone();
    let (sim, _context, driver) = device();
    let before = pin::stats();
    for code in [1, 2, 712, 801] {
        sim.fail("cuMemHostRegister", Fault::once(code));
        let bytes = pattern(3);
        let base = bytes.as_ptr();
        let (error, bytes) = Pinned::new(&driver, bytes).unwrap_err();
        assert_eq!((error.code(), error.region().base()), (Some(code), base as usize));
        assert!(bytes.as_ptr() == base && bytes == pattern(3));
        assert_eq!(regions::covering(&bytes), Coverage::None);
    }
    let calls = sim.total_calls();
    let (error, empty) = Pinned::new(&driver, Vec::<u64>::with_capacity(7)).unwrap_err();
    assert_eq!(
        (error.code(), empty.capacity()),
        (None, 7),
        "spare capacity is not pinned, and comes back too"
    );
    assert!(error.to_string().contains("empty"), "{error}");
    let (error, _) = Pinned::new(&driver, Box::<[u8]>::default()).unwrap_err();
    assert!(error.to_string().contains("empty"), "{error}");
    assert_eq!(sim.total_calls(), calls, "no driver is needed to say so");
    let after = pin::stats();
    assert_eq!(after.refusals, before.refusals + 4, "of the driver");
    assert_eq!(
        (after.released_buffers, after.leaked_buffers),
        (before.released_buffers, before.leaked_buffers)
    );
    sim.assert_clean();
}

#[test]
fn what_the_driver_does_not_know_as_registered_is_forgotten() {
    let _turn = alone();
    let (sim, _context, driver) = device();
    let mut bytes = pattern(1);
    let before = pin::stats();
    // SAFETY: the memory outlives the registration.
    unsafe { register_region(&driver, bytes.as_ptr(), LEN) }.unwrap();
    sim.cuda().cu_mem_host_unregister(bytes.as_mut_ptr()).unwrap();
    // SAFETY: no device work uses it.
    assert_eq!(unsafe { unregister_region(&driver, bytes.as_ptr()) }.unwrap_err().code(), Some(713));
    assert!(!regions::is_pinned(bytes.as_ptr()), "a stale region would be reported for ever");
    assert_eq!(pin::stats().regions, before.regions);
    // SAFETY: the memory outlives the registration.
    unsafe { register_region(&driver, bytes.as_ptr(), LEN) }.unwrap();
    // SAFETY: no device work uses it.
    unsafe { unregister_region(&driver, bytes.as_ptr()) }.unwrap();
}

#[test]
fn without_cuda_the_memory_comes_back_as_it_was() {
    let _turn = alone();
    let numbers: Vec<u32> = (0..1000).collect();
    let (address, capacity) = (numbers.as_ptr(), numbers.capacity());
    let (error, numbers) = Pinned::new(&Driver::host_only(), numbers).unwrap_err();
    assert_eq!((numbers.as_ptr(), numbers.capacity()), (address, capacity));
    assert!(numbers.iter().copied().eq(0..1000));
    let said = error.to_string();
    assert!(said.starts_with(&format!("4000 bytes at {address:p}: no usable CUDA driver")), "{said}");
    // The driver was not asked, so there is no code; the cause is the source, and what `?` makes of it.
    assert_eq!(error.code(), None);
    let source = std::error::Error::source(&error).expect("a cause").to_string();
    assert_eq!(source, error.cause().to_string());
    assert_eq!(Error::from(error.clone()), *error.cause());
}

#[test]
fn a_proof_lets_go_of_pinned_memory_without_a_wait() {
    let _turn = alone();
    // Of the pool's: a driver that waits by itself is another matter.
    let sim = Sim::builder().unregister_waits(false).build();
    let (context, driver) = (sim.context(0), sim.driver());
    let stream = context.stream();
    stream.hold();
    sim.stall(stream.handle(), Duration::from_nanos(1));
    let mut pinned = Pinned::new(&driver, pattern(3)).unwrap();
    pinned.record_last_use(&stream).unwrap();
    assert_eq!(pinned.is_quiescent(), Ok(false));
    // SAFETY: what the stream is given touches no memory.
    unsafe { pinned.assume_quiescent() };
    drop(pinned);
    assert!(pin::drain(PATIENCE), "it waits for a stream that stands still: {:?}", pin::stats());
    assert_eq!(sim.registered_bytes(), 0);
    stream.release();
    sim.run_until_idle();
    sim.assert_clean();
}

#[test]
fn a_graph_holds_pinned_memory_until_it_is_gone() {
    let _turn = alone();
    let (sim, _context, driver) = device();
    let mut pinned = Pinned::new(&driver, pattern(4)).unwrap();
    // SAFETY: there is no graph, so it is gone before the value.
    let hold = unsafe { pinned.hold_for_graph() };
    let refused = pinned.unpin().map(drop).unwrap_err();
    assert_eq!(*refused.cause(), Error::Capturing);
    assert!(refused.to_string().contains("capturing a graph"), "{refused}");
    // Neither is it released behind the hold's back.
    assert!(!pin::drain(Duration::from_millis(20)));
    assert_eq!((sim.registered_bytes(), pin::stats().waiting_buffers), (LEN, 1));
    drop(hold);
    assert!(pin::drain(PATIENCE), "{:?}", pin::stats());
    assert_eq!(sim.registered_bytes(), 0);
    sim.assert_clean();
}
