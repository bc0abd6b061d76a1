//! A caller that leaks its guards harms nobody but itself.

mod common;

use common::{KIB, Rig, all_zero};
use pinpool::sim::Sim;
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
