//! What a program can be told through `tracing`: names, fields and levels as documented; one warning for each kind of
//! failure; nothing on the hot path; and nothing while a lock is held.

#[path = "../common/mod.rs"]
mod common;
mod documented;
mod listener;

use common::{KIB, MIB, Rig};
use listener::{Heard, listen};
use pinpool::PinnedPool;
use pinpool::sim::{Fault, Sim};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use tracing::Level;

const LEN: usize = 64 * KIB;

/// Some of everything that a pool says.
fn a_life_with_everything() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_pooled_bytes(6 * LEN));
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    buffer.fill(7);
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);
    rig.sim.run_until_idle();
    rig.drain();
    // Without a record; over the cap; larger than the cap; in the way; too old.
    drop(rig.pool.take(LEN));
    rig.shelve(LEN, 8);
    rig.shelve(MIB, 1);
    rig.pool.trim_to(LEN);
    rig.drain();
    for _ in 0..20 {
        rig.pool.let_time_pass(Duration::from_secs(60));
        rig.drain();
    }
    for times in 0..2 {
        rig.sim.fail("cuMemHostRegister", Fault::once(2));
        rig.shelve(2 * LEN, 1);
        rig.sim.fail("cuEventRecord", Fault::once(999));
        let mut buffer = rig.pinned(LEN);
        buffer.record_last_use(&stream).unwrap_err();
        drop(buffer);
        rig.sim.fail("cuEventQuery", Fault::once(1));
        let mut buffer = rig.pinned(LEN);
        buffer.record_last_use(&stream).unwrap();
        drop(buffer);
        rig.drain();
        let buffer = rig.pinned(LEN);
        rig.sim.fail("cuCtxSynchronize", Fault::once(999));
        drop(buffer);
        rig.drain();
        rig.shelve(LEN, 1);
        rig.sim.fail("cuMemHostUnregister", Fault::once(1));
        rig.pool.clear();
        rig.drain();
        rig.sim.fail("cuMemHostRegister", Fault::always(2));
        (0..20).for_each(|_| rig.shelve(LEN, 1));
        rig.sim.clear_faults();
        rig.pool.clear();
        rig.pool.let_time_pass(Duration::from_secs(600));
        rig.shelve(LEN, 1);
        rig.sim.fail("cuMemHostRegister", Fault::nth(2, 2));
        assert_eq!(rig.pool.prewarm(LEN, 3), Ok(1), "time {times}");
        rig.drain();
    }
    rig.finish();

    let rig = Rig::with(Sim::new(), |builder| builder.max_registered_bytes(2 * LEN));
    rig.shelve(LEN, 2);
    rig.pool.let_time_pass(Duration::from_secs(2));
    rig.shelve(2 * LEN, 1);
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(2 * LEN);
    buffer.record_last_use(&stream).unwrap();
    rig.sim.fail("cuEventQuery", Fault::once(700));
    drop(buffer);
    rig.drain();
    rig.pool.shutdown();

    a_backlog();
}

fn a_backlog() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_pooled_bytes(LEN));
    let stream = rig.context.stream();
    stream.hold();
    rig.sim.stall(stream.handle(), Duration::ZERO);
    let fill = || {
        for _ in 0..5 {
            let mut buffer = rig.pool.take(64 * MIB);
            buffer.record_last_use(&stream).unwrap();
            drop(buffer);
        }
        (0..3).for_each(|_| rig.pool.let_time_pass(Duration::from_secs(1)));
    };
    fill();
    stream.release();
    rig.sim.run_until_idle();
    rig.finish();
}

fn names(heard: &[Heard]) -> BTreeSet<&str> {
    heard.iter().map(|heard| heard.name.as_str()).collect()
}

#[test]
fn every_event_is_as_documented() {
    let turn = listen();
    a_life_with_everything();
    let heard = turn.heard();
    let (events, spans) = (documented::events(), documented::spans());
    for one in heard.iter().filter(|one| one.target.starts_with("pinpool")) {
        assert_eq!(one.target, "pinpool", "{one:?}");
        if one.is_span {
            assert_eq!(spans.get(&one.name), Some(&one.fields), "{one:?}");
            continue;
        }
        let documented = events.get(&one.name).unwrap_or_else(|| panic!("not documented: {one:?}"));
        assert!(documented.levels.contains(&one.level), "{one:?} is documented as {documented:?}");
        let is_right = if documented.perhaps {
            one.fields.is_subset(&documented.fields)
        } else {
            one.fields == documented.fields
        };
        assert!(is_right, "{one:?} is documented as {documented:?}");
    }
    // The life has all that a healthy or a failing device lets a pool say.
    let said = names(&heard);
    for name in [
        "waited",
        "zeroed",
        "shelved",
        "registered",
        "register_refused",
        "register_paused",
        "register_resumed",
        "passed_over",
        "evicted",
        "unregistered",
        "quarantined",
        "wait_failed",
        "contexts_waited",
        "context_wait_failed",
        "record_failed",
        "device_lost",
        "backlog",
        "prewarm_short",
        "register",
        "release",
        "context_wait",
        "zero",
    ] {
        assert!(said.contains(name), "{name} was never said: {said:?}");
    }
    let reasons: BTreeSet<&str> = heard
        .iter()
        .filter(|one| one.name == "evicted")
        .flat_map(|one| one.values.iter().map(String::as_str).filter(|value| value.starts_with("reason")))
        .collect();
    // Whether the cap is met in this life depends on who is faster; `eviction` and `boundary` hold it still.
    let all = ["ceiling", "idle", "order", "shutdown"].map(|why| format!("reason={why:?}"));
    assert!(all.iter().all(|why| reasons.contains(why.as_str())), "{reasons:?}");
}

#[test]
fn every_event_in_the_sources_is_documented_and_the_other_way_round() {
    let documented: BTreeSet<String> = documented::events().into_keys().collect();
    assert_eq!(documented::in_the_sources(), documented);
}

#[test]
fn what_was_not_written_is_not_said_to_be_zeroed() {
    let turn = listen();
    let rig = Rig::new();
    let mut buffer = rig.pinned(LEN);
    turn.heard();
    buffer.set_dirty_len(0);
    drop(buffer);
    rig.drain();
    let heard = turn.heard();
    let said = names(&heard);
    assert!(said.contains("shelved") && !said.contains("zeroed"), "{said:?}");
    rig.finish();
}

#[test]
fn each_kind_of_failure_is_a_warning_once_in_a_pool() {
    let turn = listen();
    let rig = Rig::new();
    for _ in 0..2 {
        rig.sim.fail("cuMemHostRegister", Fault::always(2));
        (0..20).for_each(|_| rig.shelve(LEN, 1));
        rig.sim.clear_faults();
        rig.pool.clear();
        rig.pool.let_time_pass(Duration::from_secs(600));
        rig.shelve(LEN, 1);
        rig.sim.fail("cuMemHostUnregister", Fault::always(1));
        rig.pool.clear();
        rig.drain();
        rig.sim.clear_faults();
    }
    let heard = turn.heard();
    for name in ["register_refused", "register_paused", "quarantined"] {
        let levels: Vec<Level> = heard.iter().filter(|one| one.name == name).map(|one| one.level).collect();
        assert!(levels.len() >= 2, "{name}: {levels:?}");
        assert_eq!(levels[0], Level::WARN, "{name}");
        assert!(levels[1..].iter().all(|level| *level == Level::DEBUG), "{name}: {levels:?}");
    }
    rig.finish();
}

#[test]
fn a_backlog_is_said_once_while_it_lasts() {
    let turn = listen();
    a_backlog();
    let heard = turn.heard();
    let backlogs: Vec<&Heard> = heard.iter().filter(|one| one.name == "backlog").collect();
    assert_eq!(backlogs.len(), 1, "{backlogs:?}");
    assert!(backlogs[0].values.contains(&format!("queued_bytes={}", 5 * 64 * MIB)), "{backlogs:?}");
}

#[test]
fn what_waits_is_no_backlog_while_it_is_not_more_than_256_mib() {
    let turn = listen();
    let rig = Rig::with(Sim::new(), |builder| builder.max_pooled_bytes(LEN));
    let stream = rig.context.stream();
    stream.hold();
    let drop_one = || {
        let mut buffer = rig.pool.take(64 * MIB);
        buffer.record_last_use(&stream).unwrap();
        drop(buffer);
        rig.pool.let_time_pass(Duration::from_secs(2));
    };
    (0..4).for_each(|_| drop_one());
    assert!(!names(&turn.heard()).contains("backlog"), "{}", rig.pool.stats());
    drop_one();
    assert!(names(&turn.heard()).contains("backlog"), "{}", rig.pool.stats());
    stream.release();
    rig.sim.run_until_idle();
    rig.finish();
}

#[test]
fn a_hit_a_drop_and_a_record_say_nothing_at_all() {
    let turn = listen();
    let rig = Rig::new();
    let stream = rig.context.stream();
    rig.shelve(LEN, 8);
    let idle = rig.pool.hold_cleaner();
    let before = turn.asked_on_this_thread();
    for _ in 0..8 {
        let mut buffer = rig.pool.take(LEN);
        assert!(buffer.is_pinned());
        buffer[..100].fill(1);
        buffer.set_dirty_len(100);
        buffer.record_last_use(&stream).unwrap();
        drop(buffer);
    }
    assert_eq!(turn.asked_on_this_thread() - before, 0, "{:?}", turn.heard().last());
    assert_eq!(rig.pool.stats().hits, 8);
    drop(idle);
    rig.sim.run_until_idle();
    rig.finish();
}

#[test]
fn a_subscriber_may_use_the_pool_in_every_event() {
    let turn = listen();
    // A pool of another device, and one that stands for the pool whose events these are.
    let calls = Arc::new(AtomicU64::new(0));
    let rig = Rig::with(Sim::new(), |builder| builder.max_pooled_bytes(6 * LEN));
    let (pool, counted) = (rig.pool.clone(), calls.clone());
    let times = Mutex::new(BTreeMap::new());
    turn.at_every_event(move |name| {
        // What it drops makes events in turn, so not for ever.
        let nth = {
            let mut times = times.lock().unwrap();
            let nth: &mut u32 = times.entry(name.to_owned()).or_default();
            *nth += 1;
            *nth
        };
        if nth > 20 {
            return;
        }
        counted.fetch_add(1, Ordering::Relaxed);
        for bytes in [LEN, 2 * LEN] {
            drop(pool.take(bytes));
        }
        // The life may change the cap between two of these calls.
        let cap_before = pool.max_pooled_bytes();
        let stats = pool.stats();
        assert!(stats.pooled_bytes <= cap_before.max(pool.max_pooled_bytes()));
        pool.trim_to(5 * LEN);
        let _ = pinpool::regions::live_count();
    });
    let (done, waits) = mpsc::channel();
    std::thread::spawn(move || {
        rig.context.bind();
        let stream = rig.context.stream();
        for round in 0..10 {
            let mut buffer = rig.pool.take(LEN << (round % 3));
            buffer.fill(7);
            buffer.record_last_use(&stream).unwrap();
            drop(buffer);
            drop(rig.pool.take(LEN));
            rig.sim.run_until_idle();
            rig.pool.set_max_pooled_bytes((1 + round % 5) * LEN);
            if round == 4 {
                rig.sim.fail("cuMemHostRegister", Fault::once(2));
                rig.sim.fail("cuEventQuery", Fault::once(1));
                rig.sim.fail("cuMemHostUnregister", Fault::once(1));
            }
            rig.pool.let_time_pass(Duration::from_secs(400));
        }
        let _ = rig.pool.prewarm(LEN, 2);
        let report = rig.pool.shutdown();
        let _ = done.send(report.completed);
    });
    let completed = waits.recv_timeout(Duration::from_secs(60)).expect("a deadlock");
    assert!(completed);
    assert!(calls.load(Ordering::Relaxed) > 50);
    drop(turn);
}

#[test]
fn whoever_is_told_that_there_is_no_library_may_ask_again() {
    let turn = listen();
    let ask = || {
        let driver = pinpool::Driver::builder().library("/nowhere/libcuda.so.1").build();
        let pool = PinnedPool::builder().driver(driver).build().unwrap();
        assert!(pool.take_pinned(1).is_err());
    };
    turn.at_every_event(move |name| {
        if name == "cuda_missing" {
            ask()
        }
    });
    let (done, waits) = mpsc::channel();
    std::thread::spawn(move || {
        ask();
        let _ = done.send(());
    });
    waits.recv_timeout(Duration::from_secs(60)).expect("a deadlock");
    let heard = turn.heard();
    assert_eq!(heard.iter().filter(|one| one.name == "cuda_missing").count(), 1, "{heard:?}");
}
