//! What is known to be page-locked: pool blocks, callers' own memory, memory of other libraries; from when,
//! until when, and from which thread.
#![allow(unsafe_code)] // `pin_all` asks for a promise; the tests keep the memory.

mod common;

use common::{KIB, Rig, lock_call, locked, unlock_call};
use pinpool::pin::{Pinned, Region, pin_all};
use pinpool::regions::{self, Coverage, ExternalRegion};
use pinpool::sim::{Fault, Sim};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const LEN: usize = 64 * KIB;

/// The record is the process's, so the tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(pinpool::pin::drain(common::PATIENCE));
    turn
}

#[test]
fn a_block_is_known_from_its_registration_to_its_unregistration() {
    let _turn = alone();
    let rig = Rig::new();
    let before = regions::live_count();
    let fresh = rig.pool.take(LEN);
    assert_eq!(regions::covering(&fresh), Coverage::None, "a miss is pageable");
    drop(fresh);
    rig.drain();
    let base = locked(&rig.sim)[0].0 as *const u8;
    assert!(regions::is_pinned(base) && regions::live_count() == before + 1, "on its shelf");
    let buffer = rig.pool.take(LEN - 5);
    assert_eq!(buffer.as_ptr(), base);
    assert_eq!(regions::covering(&buffer[10..20]), Coverage::Whole);
    assert!(!regions::is_pinned(base.wrapping_add(LEN)) && !regions::is_pinned(base.wrapping_sub(1)));
    drop(buffer);
    rig.drain();
    rig.pool.clear();
    assert!(!regions::is_pinned(base), "not forgotten at its unregistration");
    assert_eq!(regions::live_count(), before);
    rig.finish();
}

#[test]
fn a_freed_and_reused_address_is_not_reported() {
    let _turn = alone();
    let rig = Rig::new();
    let mut seen = std::collections::HashSet::new();
    let mut again = 0;
    for _ in 0..50 {
        // A fresh mapping often gets the address of the one that was just unmapped.
        let fresh = rig.pool.take(LEN);
        assert_eq!(regions::covering(&fresh), Coverage::None);
        again += usize::from(!seen.insert(fresh.as_ptr() as usize));
        drop(fresh);
        rig.drain();
        rig.pool.clear();
    }
    assert!(again > 0, "no address came again, so nothing was shown");
    rig.finish();
}

#[test]
fn what_stays_registered_stays_known() {
    let _turn = alone();
    let rig = Rig::new();
    let base = {
        let buffer = rig.pinned(LEN);
        buffer.as_ptr()
    };
    rig.drain();
    rig.sim.fail(unlock_call(), Fault::once(1));
    rig.pool.clear();
    assert_eq!(rig.pool.stats().quarantined_pinned_bytes, LEN);
    assert!(regions::is_pinned(base));
    rig.finish();
}

#[test]
fn a_refused_registration_is_not_known() {
    let _turn = alone();
    let rig = Rig::new();
    let before = regions::live_count();
    rig.sim.fail(lock_call(), Fault::always(2));
    assert!(rig.pool.take_pinned(LEN).is_err());
    rig.shelve(LEN, 1);
    assert_eq!(regions::live_count(), before);
    rig.finish();
}

#[test]
fn none_part_and_whole_over_callers_own_regions() {
    let _turn = alone();
    let sim = Sim::new();
    let (_context, driver) = (sim.context(0), sim.driver());
    let bytes = vec![1u8; LEN];
    let at = |start: usize, len| Region::new(bytes[start..].as_ptr(), len);
    let before = regions::live_count();
    // SAFETY: the memory outlives the regions.
    let pinned = unsafe { pin_all(&driver, &[at(4096, 4096), at(8192, 4096), at(20_000, 1)]) }.unwrap();
    assert_eq!(regions::live_count(), before + 3);
    for (start, end, expected) in [
        (0, 4096, Coverage::None),
        (0, 4097, Coverage::Part),
        (4096, 8192, Coverage::Whole),
        (5000, 8192, Coverage::Whole),
        (8191, 8193, Coverage::Part), // all of it page-locked, but in two registrations
        (12_287, 12_289, Coverage::Part),
        (12_288, 20_000, Coverage::None),
        (20_000, 20_001, Coverage::Whole),
        (0, LEN, Coverage::Part),
        (5000, 5000, Coverage::None), // empty
    ] {
        assert_eq!(regions::covering(&bytes[start..end]), expected, "{start}..{end}");
    }
    drop(pinned);
    assert_eq!(regions::covering(&bytes), Coverage::None);
    assert_eq!(regions::live_count(), before);
    sim.assert_clean();
}

#[test]
fn the_same_base_again_is_one_region_and_never_a_shorter_truth() {
    let _turn = alone();
    let bytes = vec![1u8; 8192];
    let before = regions::live_count();
    let long = ExternalRegion::note(bytes.as_ptr(), 8192);
    let short = ExternalRegion::note(bytes.as_ptr(), 100);
    let same = ExternalRegion::note(bytes.as_ptr(), 8192);
    assert_eq!(regions::live_count(), before + 1);
    assert_eq!(regions::covering(&bytes), Coverage::Whole);
    drop(long);
    assert_eq!(regions::covering(&bytes), Coverage::Whole, "noted twice, dropped once");
    drop(same);
    assert_eq!(regions::covering(&bytes), Coverage::Part);
    assert_eq!(regions::covering(&bytes[..100]), Coverage::Whole);
    drop(short);
    assert_eq!((regions::covering(&bytes), regions::live_count()), (Coverage::None, before));

    // Noted around what this library registers itself, in either order.
    let sim = Sim::new();
    let (_context, driver) = (sim.context(0), sim.driver());
    let pinned = Pinned::new(&driver, bytes).unwrap();
    let around = ExternalRegion::note(pinned.as_ptr(), 9000);
    assert_eq!(regions::live_count(), before + 1);
    let base = pinned.as_ptr();
    drop(pinned);
    assert!(pinpool::pin::drain(common::PATIENCE));
    assert!(regions::is_pinned(base), "the note is somebody else's, and still stands");
    drop(around);
    assert!(!regions::is_pinned(base) && regions::live_count() == before);
    let nothing = ExternalRegion::note(base, 0);
    assert!(!regions::is_pinned(base) && regions::live_count() == before);
    drop(nothing);
}

/// Readers on more threads than the record has copies, beside a writer: what is registered for good is
/// always known, and what was never registered never.
#[test]
fn look_ups_on_many_threads_beside_registrations() {
    const THREADS: usize = 20;
    let _turn = alone();
    let steady = vec![1u8; 4096];
    let coming_and_going = vec![1u8; 4096];
    let never = vec![1u8; 4096];
    let _noted = ExternalRegion::note(steady.as_ptr(), steady.len());
    let (stop, looks) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(regions::covering(&steady), Coverage::Whole);
                    assert_eq!(regions::covering(&never), Coverage::None);
                    looks.fetch_add(1, Ordering::Relaxed);
                    // Off the processor outside the look-up, not inside it, where a writer waits for it.
                    std::thread::yield_now();
                }
            });
        }
        for round in 0..100 {
            let noted = ExternalRegion::note(coming_and_going.as_ptr(), 4096);
            // On another thread, which has a copy of its own: known before `note` has returned.
            if round % 10 == 0 {
                let answer = std::thread::scope(|inner| {
                    inner.spawn(|| regions::covering(&coming_and_going)).join().unwrap()
                });
                assert_eq!(answer, Coverage::Whole);
            }
            assert_eq!(regions::covering(&coming_and_going), Coverage::Whole);
            drop(noted);
            assert_eq!(regions::covering(&coming_and_going), Coverage::None);
        }
        while looks.load(Ordering::Relaxed) < THREADS {
            std::thread::yield_now();
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// Never "pageable" for memory that the driver takes for page-locked: asked from inside the driver's calls.
#[test]
fn a_region_is_known_before_the_driver_registers_it_and_until_it_has_unregistered_it() {
    use pinpool::driver::{Driver, EntryPoints};
    let _turn = alone();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let note = |what: &'static str| {
        let seen = seen.clone();
        move |base: usize| {
            seen.lock().unwrap().push((what, regions::is_pinned(base as *const u8)));
            0
        }
    };
    let (register, unregister) = (note("register"), note("unregister"));
    let table = EntryPoints::new(|| 0, move |base, _| register(base), unregister, |_| None);
    // SAFETY: no device exists.
    let driver = unsafe { Driver::from_entry_points(table.synchronize(|| 0)) };
    let bytes = vec![1u8; 4096];
    // SAFETY: the memory outlives the regions.
    drop(unsafe { pin_all(&driver, &[Region::of(&bytes)]) }.unwrap());
    drop(Pinned::new(&driver, bytes).unwrap());
    assert!(pinpool::pin::drain(common::PATIENCE));
    let both = [("register", true), ("unregister", true)];
    assert_eq!(*seen.lock().unwrap(), [both, both].concat());
}

#[test]
fn a_region_of_no_bytes_takes_nothing_away_from_the_record() {
    let _turn = alone();
    let before = regions::live_count();
    let bytes = vec![0u8; LEN];
    (0..=before).for_each(|_| drop(ExternalRegion::note(bytes.as_ptr(), 0)));
    let noted = ExternalRegion::note(bytes.as_ptr(), LEN);
    assert_eq!((regions::covering(&bytes), regions::live_count()), (Coverage::Whole, before + 1));
    drop(noted);
    assert_eq!(regions::covering(&bytes), Coverage::None);
}
