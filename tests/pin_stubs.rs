//! Page-locking memory that the caller owns, on passed-in entry points: which calls are made in which order,
//! what a failure undoes, and drivers that answer what no honest one would.
#![allow(unsafe_code)] // The functions under test ask for promises; the tests keep the memory.

use pinpool::Driver;
use pinpool::driver::EntryPoints;
use pinpool::pin::{self, Pinned, Region, pin_all, register_region, unregister_region};
use pinpool::regions::{self, Coverage};
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
#[test]
fn the_same_base_registered_twice_is_one_region_and_never_a_shorter_truth() {
    let _turn = alone();
    // A driver answers 712; one that says yes to everything must not spoil the record.
    for lengths in [[LEN, 4096], [4096, LEN], [LEN, LEN]] {
        let (calls, before) = (Calls::default(), (regions::live_count(), pin::stats()));
        let (driver, bytes) = (stubs(&calls, 0, 0), pattern(1));
        for len in lengths {
            // SAFETY: the memory outlives the registration.
            unsafe { register_region(&driver, bytes.as_ptr(), len) }.unwrap();
        }
        assert_eq!(regions::live_count(), before.0 + 1);
        assert_eq!(regions::covering(&bytes), Coverage::Whole, "{lengths:?}");
        // SAFETY: no device exists.
        unsafe { unregister_region(&driver, bytes.as_ptr()) }.unwrap();
        assert_eq!(regions::covering(&bytes), Coverage::None, "{lengths:?}");
        let after = pin::stats();
        assert_eq!((after.regions, after.region_bytes), (before.1.regions, before.1.region_bytes));
    }
}
