//! Page-locking memory that the caller owns: all or nothing, what is refused and by whom, and memory that is
//! owned and released in the background. On stubs and on the simulated device.
#![allow(unsafe_code)] // The functions under test ask for promises; the tests keep the memory.

use pinpool::driver::EntryPoints;
use pinpool::pin::{self, Pinned, Region, pin_all, register_region, unregister_region};
use pinpool::regions::{self, Coverage};
use pinpool::sim::{Fault, Sim, SimContext};
use pinpool::{Driver, Error};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

fn regions_of(buffers: &[Vec<u8>]) -> Vec<Region> {
    buffers.iter().map(|buffer| Region::new(buffer.as_ptr(), buffer.len())).collect()
}

/// What stubs were called with, in order.
#[derive(Clone, Default)]
struct Calls(Arc<Mutex<Vec<String>>>);

impl Calls {
    fn note(&self, call: String) {
        self.0.lock().unwrap().push(call);
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// A driver of stubs that says yes to everything but the `nth` registration, and to unregistering `stuck`.
fn stubs(calls: &Calls, nth: usize, stuck: usize) -> Driver {
    let (init, register, unregister) = (calls.clone(), calls.clone(), calls.clone());
    let count = Mutex::new(0);
    let table = EntryPoints::new(
        move || {
            init.note("initialise".into());
            0
        },
        move |base, bytes| {
            register.note(format!("register {base:#x} {bytes}"));
            let mut count = count.lock().unwrap();
            *count += 1;
            if *count == nth { 4711 } else { 0 }
        },
        move |base| {
            unregister.note(format!("unregister {base:#x}"));
            if base == stuck { 999 } else { 0 }
        },
        |code| (code == 4711).then_some("STUB_SAYS_NO"),
    );
    // SAFETY: no device exists, so nothing that the stubs answer can be wrong about one.
    unsafe { Driver::from_entry_points(table.synchronize(|| 0)) }
}

#[test]
fn the_third_of_five_is_refused_and_exactly_two_are_unregistered_in_reverse_order() {
    let _turn = alone();
    let (calls, before) = (Calls::default(), pin::stats());
    let buffers: Vec<_> = (0..5).map(pattern).collect();
    let list = regions_of(&buffers);
    let live = regions::live_count();
    // SAFETY: the buffers outlive the call, which leaves none of them registered.
    let error = unsafe { pin_all(&stubs(&calls, 3, 0), &list) }.unwrap_err();

    let [a, b, c] = [0, 1, 2].map(|index: usize| list[index].base());
    assert_eq!(
        calls.take(),
        [
            "initialise".to_owned(),
            format!("register {a:#x} {LEN}"),
            format!("register {b:#x} {LEN}"),
            format!("register {c:#x} {LEN}"),
            format!("unregister {b:#x}"),
            format!("unregister {a:#x}"),
        ]
    );
    assert_eq!((error.index(), error.region(), error.code()), (Some(2), list[2], Some(4711)));
    assert!(error.still_registered().is_empty());
    assert_eq!(
        error.to_string(),
        format!("region 2 ({LEN} bytes at {c:#x}): cuMemHostRegister_v2: STUB_SAYS_NO (4711)")
    );
    assert!(buffers.iter().all(|buffer| regions::covering(buffer) == Coverage::None));
    assert_eq!(regions::live_count(), live);
    let after = pin::stats();
    assert_eq!((after.regions, after.refusals), (before.regions, before.refusals + 1));
}

#[test]
fn a_rollback_that_fails_names_what_stays_registered_and_goes_on() {
    let _turn = alone();
    let calls = Calls::default();
    // Leaked: what could not be unregistered must never be freed.
    let buffers: &[Vec<u8>] = Vec::leak((0..4).map(pattern).collect());
    let list = regions_of(buffers);
    let before = pin::stats();
    // SAFETY: the buffers live for ever.
    let error = unsafe { pin_all(&stubs(&calls, 4, list[1].base()), &list) }.unwrap_err();
    assert_eq!(error.index(), Some(3));
    let stuck: Vec<_> = error.still_registered().iter().map(|one| (one.index(), one.code())).collect();
    assert_eq!(stuck, [(Some(1), Some(999))]);
    assert!(
        error.to_string().contains("1 of those before it could not be unregistered, the first: region 1")
    );
    let unregistered = calls.take().into_iter().filter(|call| call.starts_with("unregister")).count();
    assert_eq!(unregistered, 3, "the others are unregistered all the same");
    assert_eq!(regions::covering(&buffers[1]), Coverage::Whole, "it has to be taken for page-locked");
    assert_eq!(regions::covering(&buffers[0]), Coverage::None);
    let after = pin::stats();
    assert_eq!((after.regions, after.region_bytes), (before.regions + 1, before.region_bytes + LEN));
    assert_eq!(after.unregistration_failures, before.unregistration_failures + 1);
}

#[test]
fn the_drop_unregisters_in_reverse_and_unpin_all_reports() {
    let _turn = alone();
    let calls = Calls::default();
    let buffers: Vec<_> = (0..3).map(pattern).collect();
    let list = regions_of(&buffers);
    let driver = stubs(&calls, 0, 0);
    // SAFETY: the buffers outlive the regions, and no device exists.
    let pinned = unsafe { pin_all(&driver, &list) }.unwrap();
    assert_eq!((pinned.len(), pinned.regions().collect::<Vec<_>>()), (3, list.clone()));
    assert!(buffers.iter().all(|buffer| regions::covering(buffer) == Coverage::Whole));
    calls.take();
    drop(pinned);
    let reverse: Vec<_> =
        list.iter().rev().map(|region| format!("unregister {:#x}", region.base())).collect();
    assert_eq!(calls.take(), reverse);
    assert!(buffers.iter().all(|buffer| regions::covering(buffer) == Coverage::None));

    let kept: &[Vec<u8>] = Vec::leak((0..3).map(pattern).collect());
    let list = regions_of(kept);
    // SAFETY: the buffers live for ever, and no device exists.
    let pinned = unsafe { pin_all(&stubs(&calls, 0, list[1].base()), &list) }.unwrap();
    let failures = pinned.unpin_all().unwrap_err();
    assert_eq!(failures.len(), 1);
    assert_eq!((failures[0].index(), failures[0].region()), (Some(1), list[1]));
    assert!(failures[0].to_string().ends_with("cuMemHostUnregister: CUDA_ERROR_UNKNOWN (999)"));
}

#[test]
fn no_regions_is_nothing_to_do_even_without_cuda() {
    let _turn = alone();
    let calls = Calls::default();
    // SAFETY: there is no memory.
    assert!(unsafe { pin_all(&stubs(&calls, 0, 0), &[]) }.unwrap().is_empty());
    assert_eq!(calls.take(), [""; 0]);
    // SAFETY: there is no memory.
    assert!(unsafe { pin_all(&Driver::host_only(), &[]) }.unwrap().unpin_all().is_ok());
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
    assert!(!pin::driver_says_page_locked(&driver, base, 0).unwrap());
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
fn a_refused_vec_comes_back_untouched_and_an_empty_one_is_the_drivers_to_refuse() {
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
    let (error, empty) = Pinned::new(&driver, Vec::<u64>::new()).unwrap_err();
    assert!(error.code() == Some(1) && empty.is_empty());
    let after = pin::stats();
    assert_eq!(after.refusals, before.refusals + 5);
    assert_eq!(
        (after.released_buffers, after.leaked_buffers),
        (before.released_buffers, before.leaked_buffers)
    );
    sim.assert_clean();
}

#[test]
fn a_silent_no_op_is_found_by_asking_the_driver() {
    let _turn = alone();
    // It says yes to everything and page-locks nothing, like a library that tried one file name.
    let no_op = EntryPoints::new(|| 0, |_, _| 0, |_| 0, |_| None).is_page_locked(|_| Ok(false));
    // SAFETY: no device exists.
    let driver = unsafe { Driver::from_entry_points(no_op.synchronize(|| 0)) };
    let pinned = Pinned::new(&driver, pattern(1)).unwrap();
    assert!(regions::is_pinned(pinned.as_ptr()), "our own books believe it");
    assert!(!pinned.driver_says_page_locked().unwrap(), "the driver does not");
    drop(pinned);
    assert!(pin::drain(PATIENCE));

    // One that locks the first page only.
    let bytes = pattern(1);
    let first = bytes.as_ptr() as usize;
    let half = EntryPoints::new(|| 0, |_, _| 0, |_| 0, |_| None);
    let half = half.is_page_locked(move |address| Ok((first..first + 4096).contains(&address)));
    // SAFETY: no device exists.
    let driver = unsafe { Driver::from_entry_points(half.synchronize(|| 0)) };
    let pinned = Pinned::new(&driver, bytes).unwrap();
    assert!(!pinned.driver_says_page_locked().unwrap(), "the end is asked about too");
    // One that cannot be asked says so.
    let mute = EntryPoints::new(|| 0, |_, _| 0, |_| 0, |_| None).synchronize(|| 0);
    // SAFETY: no device exists.
    let mute = unsafe { Driver::from_entry_points(mute) };
    let other = Pinned::new(&mute, pattern(2)).unwrap();
    assert!(other.driver_says_page_locked().unwrap_err().to_string().contains("cuPointerGetAttributes"));
}

#[test]
fn a_driver_that_does_not_initialise_registers_nothing() {
    let _turn = alone();
    let calls = Calls::default();
    let noted = calls.clone();
    let table = EntryPoints::new(
        || 100,
        move |_, _| {
            noted.note("register".into());
            0
        },
        |_| 0,
        |_| None,
    );
    // SAFETY: no device exists.
    let driver = unsafe { Driver::from_entry_points(table) };
    let (error, _) = Pinned::new(&driver, pattern(1)).unwrap_err();
    assert!(error.to_string().ends_with("cuInit: CUDA_ERROR_NO_DEVICE (100)"), "{error}");
    assert_eq!(calls.take(), [""; 0]);

    let no_context = EntryPoints::new(|| 0, |_, _| 0, |_| 0, |_| None).current_context(|| 0);
    // SAFETY: no device exists.
    let driver = unsafe { Driver::from_entry_points(no_context) };
    let (error, _) = Pinned::new(&driver, pattern(1)).unwrap_err();
    assert!(error.to_string().contains("create the context first"), "{error}");
}

#[test]
fn memory_whose_device_work_is_never_known_to_be_over_is_leaked_and_counted() {
    let _turn = alone();
    let calls = Calls::default();
    let noted = calls.clone();
    let table = EntryPoints::new(
        || 0,
        |_, _| 0,
        move |_| {
            noted.note("unregister".into());
            0
        },
        |_| None,
    );
    // SAFETY: no device exists.
    let driver = unsafe { Driver::from_entry_points(table) }; // without `synchronize`
    let before = pin::stats();
    let pinned = Pinned::new(&driver, pattern(1)).unwrap();
    let base = pinned.as_ptr();
    drop(pinned);
    assert!(pin::drain(PATIENCE));
    let after = pin::stats();
    assert_eq!(
        (after.leaked_buffers, after.leaked_bytes),
        (before.leaked_buffers + 1, before.leaked_bytes + LEN)
    );
    assert_eq!(after.released_buffers, before.released_buffers);
    assert_eq!(calls.take(), [""; 0], "it may be in use, so it stays registered");
    assert!(regions::is_pinned(base));
}
