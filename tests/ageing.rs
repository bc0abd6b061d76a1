//! What nobody needs is given back: ageing of the shelves. Time is let pass, never waited for.

mod common;

use common::{KIB, Rig, locked, until};
use pinpool::sim::Sim;
use pinpool::{Error, PinnedPool};
use std::time::Duration;

const LEN: usize = 64 * KIB;
/// The default, and a sixteenth of it: how often the shelves are looked at.
const MAX_IDLE: Duration = Duration::from_secs(300);
const LOOK: Duration = Duration::from_millis(18_750);

/// Lets time pass look by look; gives the most that was unregistered at one look.
fn pass(rig: &Rig, time: Duration, mut meanwhile: impl FnMut()) -> u64 {
    let mut most = 0;
    for _ in 0..time.as_millis() / LOOK.as_millis() {
        let before = rig.pool.stats().unregistrations;
        rig.pool.let_time_pass(LOOK);
        rig.drain();
        most = most.max(rig.pool.stats().unregistrations - before);
        meanwhile();
    }
    most
}

#[test]
fn a_burst_is_given_back_bit_by_bit_and_what_is_in_use_stays() {
    let rig = Rig::new();
    rig.shelve(LEN, 64);
    let registrations = rig.pool.stats().registrations;
    let in_use = || {
        let buffers = [rig.pool.take(LEN), rig.pool.take(LEN)];
        assert!(buffers.iter().all(|buffer| buffer.is_pinned()));
        drop(buffers);
        rig.drain();
    };
    // One look too early: sixteen make the time.
    pass(&rig, MAX_IDLE - LOOK, in_use);
    assert_eq!(rig.pool.stats().pooled_buffers, 64, "nothing is too old yet");
    let most = pass(&rig, 4 * MAX_IDLE, in_use);
    let stats = rig.assert_balanced();
    assert_eq!((stats.pooled_buffers, stats.aged_out, stats.evictions), (2, 62, 0), "{stats}");
    assert!((1..=8).contains(&most), "{most} were given back at once");
    assert_eq!(stats.registrations, registrations, "what was in use was not page-locked again");
    rig.finish();
}

#[test]
fn a_pool_that_nobody_uses_gives_everything_back() {
    let rig = Rig::new();
    for class in [4 * KIB, LEN, 4 * LEN] {
        rig.shelve(class, 5);
    }
    rig.pool.prewarm(2 * LEN, 3).unwrap();
    pass(&rig, 3 * MAX_IDLE, || ());
    let stats = rig.assert_balanced();
    assert_eq!((stats.pooled_buffers, stats.registered_bytes, stats.aged_out), (0, 0, 18), "{stats}");
    assert!(locked(&rig.sim).is_empty());
    rig.finish();
}

#[test]
fn ageing_can_be_turned_off() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_idle_time(None));
    rig.shelve(LEN, 5);
    rig.pool.let_time_pass(Duration::from_secs(30 * 24 * 3600));
    rig.drain();
    assert_eq!((rig.pool.stats().pooled_buffers, rig.pool.stats().aged_out), (5, 0));
    rig.finish();
}

#[test]
fn an_idle_time_of_zero_is_refused_by_name() {
    let error = PinnedPool::builder().max_idle_time(Duration::ZERO).build().unwrap_err();
    assert!(matches!(error, Error::Setting { name: "max_idle_time", .. }), "{error}");
}

#[test]
fn a_class_that_is_passed_over_gets_the_room_of_idle_ones_sooner() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_pooled_bytes(4 * LEN));
    rig.shelve(LEN, 4);
    rig.shelve(2 * LEN, 1);
    assert_eq!((rig.pool.stats().passed_over, rig.pool.stats().pooled_buffers), (1, 4));
    // An eighth of the time, and two looks, one for each block that has to go.
    let mut pinned_after = None;
    for look in 1..=16 {
        rig.pool.let_time_pass(LOOK);
        rig.shelve(2 * LEN, 1);
        let buffer = rig.pool.take(2 * LEN);
        if buffer.is_pinned() {
            pinned_after.get_or_insert(look);
        }
        drop(buffer);
        rig.drain();
    }
    let looks = pinned_after.expect("the idle class keeps the room for good");
    assert!((2..=4).contains(&looks), "after {looks} looks");
    rig.finish();
}

#[test]
fn a_class_that_is_passed_over_does_not_age_its_own_blocks_sooner() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_pooled_bytes(2 * LEN));
    rig.shelve(LEN, 2);
    // Three in use, room for two, and the third comes back late.
    let kept = [rig.pool.take(LEN), rig.pool.take(LEN)];
    let late = rig.pool.take(LEN);
    drop(kept);
    pass(&rig, MAX_IDLE / 2, || ());
    drop(late);
    pass(&rig, 2 * LOOK, || ());
    let stats = rig.pool.stats();
    assert_eq!((stats.passed_over, stats.aged_out, stats.pooled_buffers), (1, 0, 2), "{stats}");
    rig.finish();
}

#[test]
fn a_sleeping_cleaner_wakes_for_what_is_too_old() {
    // In real time, for this is about the timer.
    let rig = Rig::with(Sim::new(), |builder| builder.max_idle_time(Duration::from_millis(300)));
    rig.shelve(LEN, 3);
    until("the shelves are empty", || rig.pool.stats().pooled_buffers == 0);
    rig.drain();
    assert_eq!(rig.assert_balanced().aged_out, 3);
    rig.finish();
}
