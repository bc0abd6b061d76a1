//! Where the cap or the ceiling is a little too small for what is in use, nothing is page-locked and let go round
//! after round. The driver's calls are counted.

mod common;

use common::{KIB, Rig, lock_call, unlock_call};
use pinpool::sim::Sim;
use std::time::Duration;

const LEN: usize = 64 * KIB;
/// Rounds in which a pool may find its way.
const WARM_UP: usize = 4;
const ROUNDS: usize = 6;

fn capped(cap_bytes: usize) -> Rig {
    Rig::with(Sim::new(), |builder| builder.max_pooled_bytes(cap_bytes))
}

fn driver_calls(rig: &Rig) -> u64 {
    rig.sim.calls(lock_call()) + rig.sim.calls(unlock_call())
}

/// Calls of the driver in so many rounds, after the pool has found its way.
fn calls_in_rounds(rig: &Rig, mut round: impl FnMut(&Rig)) -> u64 {
    (0..WARM_UP).for_each(|_| round(rig));
    let before = driver_calls(rig);
    (0..ROUNDS).for_each(|_| round(rig));
    driver_calls(rig) - before
}

/// All out at once, and dropped in the order in which they were taken, or in the opposite one.
fn all_at_once(rig: &Rig, classes: &[(usize, usize)], reversed: bool) {
    let take =
        |(class, count): &(usize, usize)| (0..*count).map(|_| rig.pool.take(*class)).collect::<Vec<_>>();
    let mut buffers: Vec<_> = classes.iter().flat_map(take).collect();
    if reversed {
        buffers.reverse();
    }
    for buffer in buffers {
        drop(buffer);
        rig.drain();
    }
}

#[test]
fn a_cap_smaller_than_what_is_in_use_page_locks_as_many_as_fit_and_no_more() {
    for reversed in [false, true] {
        let rig = capped(3 * LEN);
        let calls = calls_in_rounds(&rig, |rig| all_at_once(rig, &[(LEN, 8)], reversed));
        assert_eq!(calls, 0, "reversed: {reversed}");
        let before = rig.pool.stats();
        all_at_once(&rig, &[(LEN, 8)], reversed);
        let after = rig.assert_balanced();
        assert_eq!((after.hits - before.hits, after.misses - before.misses), (3, 5), "{after}");
        assert_eq!(after.passed_over - before.passed_over, 5, "{after}");
        rig.finish();
    }
}

#[test]
fn two_classes_that_are_out_together_settle_under_every_cap() {
    let classes = [(LEN, 4), (4 * LEN, 3)];
    for units in 0..=17 {
        for (cap, name) in
            [(units * LEN, "exact"), (units * LEN + 1, "one more"), (units * LEN + LEN - 1, "one less")]
        {
            for (reversed, turned) in [(false, false), (true, false), (true, true)] {
                let rig = capped(cap);
                let mut classes = classes;
                if turned {
                    classes.reverse();
                }
                let calls = calls_in_rounds(&rig, |rig| all_at_once(rig, &classes, reversed));
                assert_eq!(calls, 0, "cap {units} blocks, {name}, reversed {reversed}, turned {turned}");
                rig.finish();
            }
        }
    }
}

#[test]
fn two_classes_that_take_turns_settle_under_every_cap() {
    for units in 0..=17 {
        let rig = capped(units * LEN);
        let calls = calls_in_rounds(&rig, |rig| {
            all_at_once(rig, &[(LEN, 4)], false);
            all_at_once(rig, &[(4 * LEN, 3)], true);
        });
        assert_eq!(calls, 0, "cap {units} blocks");
        rig.finish();
    }
}

#[test]
fn two_classes_that_take_turns_settle_under_a_ceiling() {
    for units in 0..=17 {
        let rig = Rig::with(Sim::new(), |builder| builder.max_registered_bytes(units * LEN));
        let calls = calls_in_rounds(&rig, |rig| {
            all_at_once(rig, &[(LEN, 4)], false);
            all_at_once(rig, &[(4 * LEN, 3)], true);
        });
        assert_eq!(calls, 0, "ceiling {units} blocks");
        assert!(rig.pool.stats().peak_registered_bytes <= units * LEN);
        rig.finish();
    }
}

#[test]
fn a_cap_of_one_block_and_a_byte_more_or_less_keeps_what_fits() {
    for (cap, kept) in [(LEN - 1, 0), (LEN, 1), (LEN + 1, 1), (2 * LEN - 1, 1), (2 * LEN, 2)] {
        let rig = capped(cap);
        let calls = calls_in_rounds(&rig, |rig| all_at_once(rig, &[(LEN, 2)], true));
        assert_eq!(calls, 0, "cap {cap}");
        assert_eq!(rig.assert_balanced().pooled_bytes, kept * LEN, "cap {cap}: the last bytes are used");
        rig.finish();
    }
}

#[test]
fn one_block_in_ten_seconds_is_tried_again() {
    let rig = capped(3 * LEN);
    (0..WARM_UP).for_each(|_| all_at_once(&rig, &[(LEN, 8)], true));
    let before = driver_calls(&rig);
    for _ in 0..12 {
        rig.pool.let_time_pass(Duration::from_secs(10));
        (0..5).for_each(|_| all_at_once(&rig, &[(LEN, 8)], true));
    }
    let calls = driver_calls(&rig) - before;
    assert!((2..=24).contains(&calls), "{calls} calls: one registered and one let go is the most");
    rig.finish();
}

#[test]
fn buffers_that_stay_out_for_good_do_not_count_against_the_others() {
    let rig = capped(4 * LEN);
    // More than the cap, page-locked, and never coming back.
    let _kept: Vec<_> = (0..3)
        .flat_map(|_| {
            rig.shelve(LEN, 4);
            (0..4).map(|_| rig.pool.take(LEN)).collect::<Vec<_>>()
        })
        .inspect(|buffer| assert!(buffer.is_pinned()))
        .collect();
    rig.shelve(LEN, 4);
    let others: Vec<_> = (0..4).map(|_| rig.pool.take(LEN)).collect();
    assert!(others.iter().all(|buffer| buffer.is_pinned()), "{}", rig.pool.stats());
    drop((others, _kept));
    rig.finish();
}

#[test]
fn a_raised_cap_is_used_at_once() {
    let rig = capped(3 * LEN);
    (0..WARM_UP).for_each(|_| all_at_once(&rig, &[(LEN, 8)], true));
    rig.pool.set_max_pooled_bytes(8 * LEN);
    (0..2).for_each(|_| all_at_once(&rig, &[(LEN, 8)], true));
    assert_eq!(rig.assert_balanced().pooled_bytes, 8 * LEN);
    rig.finish();
}

#[test]
fn a_block_is_not_kept_at_the_cost_of_smaller_ones() {
    let rig = capped(5 * LEN);
    let large = rig.pinned(4 * LEN);
    rig.shelve(LEN, 4);
    drop(large);
    rig.drain();
    let stats = rig.assert_balanced();
    assert_eq!((stats.pooled_bytes, stats.evictions, stats.passed_over), (4 * LEN, 0, 1), "{stats}");
    rig.finish();
}
