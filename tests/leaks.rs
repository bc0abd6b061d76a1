//! A caller that leaks its guards harms nobody but itself.
#![allow(unsafe_code)] // A driver of functions that are passed in, of which one panics.

mod common;

use common::{KIB, PATIENCE, Rig, all_zero};
use pinpool::PinnedPool;
use pinpool::driver::{Driver, EntryPoints};
use pinpool::sim::Sim;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const LEN: usize = 64 * KIB;

fn use_one(rig: &Rig) -> bool {
    let mut buffer = rig.pool.take(LEN);
    let pinned = buffer.is_pinned();
    assert!(all_zero(&buffer));
    buffer.fill(7);
    drop(buffer);
    rig.drain();
    pinned
}

#[test]
fn others_go_on_hitting_beside_a_caller_that_leaks() {
    let rig = Rig::new();
    (0..2).for_each(|_| _ = use_one(&rig));
    for _ in 0..50 {
        // The pool's only idle buffer, gone for good; and one that was never page-locked.
        std::mem::forget((rig.pool.take(LEN), rig.pool.take(LEN)));
        assert!(!use_one(&rig), "the first use after it is a miss");
        assert!((0..5).all(|_| use_one(&rig)), "and then there is a buffer again");
    }
    let stats = rig.assert_balanced();
    assert_eq!((stats.checked_out_buffers, stats.checked_out_pinned_bytes), (100, 50 * LEN), "{stats}");
    assert_eq!(stats.pooled_buffers, 1);
    let started = Instant::now();
    let report = rig.pool.shutdown();
    assert!(report.completed && started.elapsed() < Duration::from_secs(5), "{report:?}");
    assert_eq!((report.checked_out_buffers, report.registered_bytes_after), (100, 50 * LEN), "{report:?}");
    assert_eq!(report.quarantined_bytes, 0, "{report:?}");
    rig.sim.assert_clean();
}

#[test]
fn more_leaked_than_the_cap_leaves_the_others_page_locked() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_pooled_bytes(2 * LEN));
    for _ in 0..10 {
        rig.shelve(LEN, 2);
        std::mem::forget([rig.pool.take(LEN), rig.pool.take(LEN)]);
    }
    // At the boundary, too, where for a while what is out counts.
    (0..4).for_each(|_| rig.shelve(LEN, 3));
    for _ in 0..20 {
        let buffers = [rig.pool.take(LEN), rig.pool.take(LEN)];
        assert!(buffers.iter().all(|buffer| buffer.is_pinned()), "{}", rig.pool.stats());
        drop(buffers);
        rig.drain();
    }
    rig.assert_balanced();
    assert!(rig.pool.shutdown().completed);
}

/// It must not happen; where it does, nothing is given back that the device may use, and nothing twice.
#[test]
fn a_buffer_in_whose_drop_something_panics_is_leaked_once_and_counts_as_out() {
    let (is_broken, unlocked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let unlock = {
        let unlocked = unlocked.clone();
        move |_| {
            unlocked.fetch_add(1, Ordering::SeqCst);
            0
        }
    };
    let current = {
        let is_broken = is_broken.clone();
        move || {
            assert!(!is_broken.load(Ordering::SeqCst), "on purpose");
            1
        }
    };
    let table = EntryPoints::new(|| 0, |_, _| 0, unlock, |_| None).current_context(current).synchronize(|| 0);
    // SAFETY: there is no device that could reach anything. That it panics is what this is about.
    let driver = unsafe { Driver::from_entry_points(table) };
    let pool = PinnedPool::builder().driver(driver).build().unwrap();
    let buffer = pool.take_pinned(LEN).unwrap();
    let address = buffer.as_ptr();
    is_broken.store(true, Ordering::SeqCst);
    assert!(catch_unwind(AssertUnwindSafe(|| drop(buffer))).is_err());
    is_broken.store(false, Ordering::SeqCst);
    let others = [(); 10].map(|()| pool.take_pinned(LEN).unwrap());
    assert!(others.iter().all(|other| other.as_ptr() != address));
    drop(others);
    assert!(pool.drain(PATIENCE) && pool.shutdown().completed);
    let stats = pool.stats();
    assert!(stats.is_balanced(), "{stats:#?}");
    assert_eq!((stats.checked_out_buffers, unlocked.load(Ordering::SeqCst)), (1, 10), "{stats}");
}
