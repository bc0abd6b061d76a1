//! `shutdown` drains, joins, unregisters, frees and reports; the next drop starts the pool again.

mod common;

use common::{KIB, PATIENCE, Rig, lock_call, locked_bytes, locks_its_own_pages, unlock_call, until};
use pinpool::PinnedPool;
use pinpool::sim::{Fault, Sim};
use std::sync::Mutex;
use std::time::{Duration, Instant};

const LEN: usize = 64 * KIB;

fn impatient() -> Rig {
    Rig::with(Sim::new(), |builder| builder.shutdown_timeout(Duration::from_millis(50)))
}

/// Threads of this process whose name starts with `name`.
fn threads_named(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|comm| comm.starts_with(name)).count()
}

#[test]
fn everything_is_unregistered_and_freed_and_the_threads_are_gone() {
    let rig = Rig::with(Sim::new(), |builder| builder.thread_name("shut-a"));
    rig.shelve(LEN, 3);
    drop(rig.pinned(4 * KIB));
    assert!(threads_named("shut-a") > 0);
    let report = rig.pool.shutdown();
    assert!(report.completed);
    assert_eq!((report.unregistered_buffers, report.registered_bytes_after), (4, 0), "{report:?}");
    assert_eq!(locked_bytes(&rig.sim), 0);
    assert_eq!(threads_named("shut-a"), 0, "joined");
    rig.finish();
}

#[test]
fn the_pools_own_retain_of_a_context_is_balanced() {
    let rig = Rig::new();
    rig.shelve(LEN, 1);
    assert!(rig.sim.cuda().cu_device_primary_ctx_get_state(0).unwrap().1);
    rig.pool.shutdown();
    let Rig { sim, context, pool } = rig;
    drop(context);
    assert!(!sim.cuda().cu_device_primary_ctx_get_state(0).unwrap().1, "the pool kept a retain");
    drop(pool);
}

#[test]
fn the_next_drop_starts_the_pool_again() {
    let rig = Rig::new();
    for _ in 0..3 {
        rig.shelve(LEN, 2);
        assert!(rig.pool.take(LEN).is_pinned());
        assert!(rig.pool.shutdown().completed);
        assert_eq!(locked_bytes(&rig.sim), 0);
    }
    rig.finish();
}

#[test]
fn what_does_not_finish_in_time_is_quarantined_with_its_reason() {
    let rig = impatient();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    stream.hold();
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);
    let report = rig.pool.shutdown();
    assert_eq!((report.quarantined_bytes, report.registered_bytes_after), (LEN, LEN), "{report:?}");
    assert!(report.reasons[0].contains("did not finish"), "{report:?}");
    rig.assert_balanced();
    stream.release();
    rig.finish();
}

#[test]
fn a_hanging_driver_call_does_not_hang_the_shutdown() {
    for (name, entry_point) in
        [("hang-a", unlock_call()), ("hang-b", lock_call()), ("hang-c", "cuCtxSynchronize")]
    {
        let rig = Rig::with(Sim::new(), |builder| {
            builder.shutdown_timeout(Duration::from_millis(50)).thread_name(name)
        });
        rig.shelve(LEN, 1);
        rig.sim.fail(entry_point, Fault::hang());
        drop((rig.pool.take(LEN), rig.pool.take(2 * LEN)));
        let report = rig.pool.shutdown();
        let stats = rig.pool.stats();
        rig.sim.clear_faults();
        assert!(stats.is_balanced(), "{entry_point}: {stats:#?} {report:?}");
        assert!(!report.completed, "{entry_point}: a thread hangs");
        assert_eq!((stats.queued_buffers, stats.pooled_buffers), (0, 0), "{entry_point}: {stats:#?}");
        // What the lane does after all, when nobody listens any more, is in the books too.
        until("the lane ends", || threads_named(name) == 0);
        let stats = rig.assert_balanced();
        assert_eq!((stats.queued_pinned_bytes, stats.retiring_bytes), (0, 0), "{entry_point}: {stats:#?}");
        // The pool goes on afterwards.
        rig.shelve(4 * KIB, 1);
        assert!(rig.pool.take(4 * KIB).is_pinned(), "{entry_point}");
        assert!(rig.pool.drain(PATIENCE));
    }
}

#[test]
fn pageable_memory_that_waits_behind_a_hanging_call_is_freed() {
    let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(Duration::from_millis(20)));
    rig.shelve(LEN, 2);
    rig.sim.fail(unlock_call(), Fault::hang());
    rig.pool.trim_to(LEN);
    until("the lane hangs", || rig.sim.hanging_calls() == 1);
    // Behind it on the lane: one to be page-locked, and one that is not kept and needs no driver to go.
    drop(rig.pool.take(4 * LEN));
    rig.pool.set_max_pooled_bytes(8 * LEN);
    drop(rig.pool.take(16 * LEN));
    until("both are with the lane", || rig.pool.stats().queued_buffers <= 1);
    let report = rig.pool.shutdown();
    let stats = rig.pool.stats();
    assert!(!report.completed && stats.is_balanced(), "{report:?} {stats:#?}");
    // What is mapped is the block in the hanging call, and what is counted as leaked.
    // Memory of the driver's is no mapping of ours.
    let mapped_of = |bytes: usize| if locks_its_own_pages() { bytes } else { 0 };
    until("the pageable blocks are unmapped", || {
        let stats = rig.pool.stats();
        rig.sim.mapped_bytes() == mapped_of(stats.retiring_bytes + stats.quarantined_bytes)
    });
    let stats = rig.pool.stats();
    assert_eq!(stats.quarantined_bytes, stats.quarantined_pinned_bytes, "{stats:#?}");
    rig.sim.clear_faults();
    until("the call returns", || rig.pool.stats().retiring_bytes == 0);
    rig.assert_balanced();
    assert_eq!(rig.sim.mapped_bytes(), mapped_of(rig.pool.stats().quarantined_bytes));
}

#[test]
fn guards_that_are_out_stay_valid_and_are_released_when_they_drop() {
    let rig = Rig::new();
    let mut buffer = rig.pinned(LEN);
    let report = rig.pool.shutdown();
    assert_eq!((report.checked_out_buffers, report.registered_bytes_after), (1, LEN), "{report:?}");
    buffer.fill(1);
    drop(buffer);
    rig.drain();
    assert!(rig.pool.take(LEN).is_pinned());
    rig.finish();
}

#[test]
fn dropping_the_last_handle_releases_everything_without_waiting() {
    let sim = Sim::new();
    let context = sim.context(0);
    let pool = PinnedPool::builder().driver(sim.driver()).thread_name("shut-b").build().unwrap();
    drop([pool.take(LEN), pool.take(2 * LEN)]);
    assert!(pool.drain(PATIENCE));
    // One with the caller, one fresh, and one on its shelf.
    let (hit, miss) = (pool.take(LEN), pool.take(LEN));
    assert!(hit.is_pinned());
    assert_eq!(pool.stats().pooled_buffers, 1);
    let clone = pool.clone();
    drop(pool);
    drop(clone);
    drop(miss);
    assert_eq!(hit.len(), LEN, "still valid");
    drop(hit);
    let deadline = std::time::Instant::now() + PATIENCE;
    while locked_bytes(&sim) > 0 || threads_named("shut-b") > 0 {
        assert!(std::time::Instant::now() < deadline, "{} bytes left", locked_bytes(&sim));
        std::thread::yield_now();
    }
    drop(context);
    assert!(!sim.cuda().cu_device_primary_ctx_get_state(0).unwrap().1, "the pool kept a retain");
    sim.assert_clean();
}

#[test]
fn shutdown_while_others_take_and_drop_loses_nothing() {
    let rig = Rig::new();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                rig.context.bind();
                let stream = rig.context.stream();
                for _ in 0..300 {
                    let mut buffer = rig.pool.take(4 * KIB);
                    buffer.fill(1);
                    buffer.record_last_use(&stream).unwrap();
                    rig.sim.run_until_idle();
                    drop(buffer);
                }
            });
        }
        for _ in 0..20 {
            rig.pool.shutdown();
        }
    });
    rig.sim.run_until_idle();
    rig.finish();
}

#[test]
fn an_idle_pool_can_be_shut_down() {
    let rig = Rig::new();
    assert!(rig.pool.shutdown().completed);
    assert_eq!(rig.sim.calls(lock_call()), 0);
    rig.finish();
}

#[test]
fn a_shutdown_waits_for_what_is_outstanding() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    stream.hold();
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);
    let report = std::thread::scope(|scope| {
        let asked = rig.sim.calls("cuEventQuery");
        let shutdown = scope.spawn(|| rig.pool.shutdown());
        until("the shutdown waits", || rig.sim.calls("cuEventQuery") > asked + 30 || shutdown.is_finished());
        stream.release();
        rig.sim.run_until_idle();
        shutdown.join().unwrap()
    });
    assert_eq!((report.quarantined_bytes, report.unregistered_buffers), (0, 1), "{report:?}");
    rig.finish();
}

#[test]
fn shutdowns_end_in_time_although_others_drop_and_shut_down_at_the_same_moment() {
    // A return at the last moment keeps the cleaner, or starts another; neither may be waited for.
    let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(PATIENCE));
    let slow = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                rig.context.bind();
                for _ in 0..200 {
                    drop(rig.pool.take(4 * KIB));
                    let started = Instant::now();
                    let report = rig.pool.shutdown();
                    if !report.completed || started.elapsed() > PATIENCE / 2 {
                        return slow.lock().unwrap().push((started.elapsed(), report));
                    }
                }
            });
        }
    });
    let slow = slow.into_inner().unwrap();
    assert!(slow.is_empty(), "{slow:#?}");
    rig.finish();
}

/// A patient pool whose shutdown is just then unregistering, which hangs; `meanwhile` ends with `clear_faults`.
fn while_a_shutdown_ends(meanwhile: impl FnOnce(&Rig)) {
    let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(PATIENCE));
    rig.shelve(LEN, 1);
    rig.sim.fail(unlock_call(), Fault::hang());
    std::thread::scope(|scope| {
        let started = Instant::now();
        let shutdown = scope.spawn(|| rig.pool.shutdown());
        until("the shutdown unregisters", || rig.sim.hanging_calls() > 0);
        meanwhile(&rig);
        let report = shutdown.join().unwrap();
        assert!(report.completed && started.elapsed() < PATIENCE / 2, "{:?} {report:?}", started.elapsed());
    });
    rig.finish();
}

#[test]
fn a_return_at_the_last_moment_does_not_hold_the_shutdown() {
    while_a_shutdown_ends(|rig| {
        drop(rig.pool.take(4 * KIB));
        rig.sim.clear_faults();
    });
}

#[test]
fn a_second_shutdown_at_the_last_moment_is_obeyed_too() {
    while_a_shutdown_ends(|rig| {
        let started = Instant::now();
        std::thread::scope(|scope| {
            let (sender, receiver) = std::sync::mpsc::channel();
            let second = scope.spawn(move || {
                sender.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
                rig.pool.shutdown()
            });
            // Best when the order is given before the first shutdown's end; it sleeps then.
            let task = std::path::Path::new("/proc").join(receiver.recv().unwrap());
            until("the second shutdown waits", || {
                let stat = std::fs::read_to_string(task.join("stat")).unwrap_or_default();
                second.is_finished() || stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
            });
            rig.sim.clear_faults();
            assert!(second.join().unwrap().completed);
        });
        assert!(started.elapsed() < PATIENCE / 2, "{:?}", started.elapsed());
    });
}

#[test]
fn what_is_freed_is_unmapped() {
    // In a process of its own: another test may be given the same address.
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "child_that_frees", "--ignored", "--nocapture"]).env("PINPOOL_CHILD", "1");
    let output = child.output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "run by what_is_freed_is_unmapped"]
fn child_that_frees() {
    if std::env::var_os("PINPOOL_CHILD").is_none() {
        return;
    }
    let rig = Rig::new();
    let addresses = [LEN, 64 * common::MIB].map(|bytes| {
        let mut buffer = rig.pinned(bytes);
        buffer.fill(1);
        buffer.as_ptr() as usize
    });
    assert!(addresses.iter().all(|address| is_mapped(*address)));
    rig.sim.fail(lock_call(), Fault::once(2));
    let refused = rig.pool.take(2 * LEN);
    let refused_address = refused.as_ptr() as usize;
    drop(refused);
    assert!(rig.pool.shutdown().completed);
    assert!(!is_mapped(refused_address), "what could not be page-locked was leaked");
    // What the driver allocated it has back, which need not unmap it.
    let unmaps = locks_its_own_pages();
    assert!(
        !unmaps || !addresses.iter().any(|address| is_mapped(*address)),
        "what was unregistered was leaked"
    );
    assert_eq!(locked_bytes(&rig.sim), 0);
}

fn is_mapped(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut ranges = maps.lines().filter_map(|line| {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
    });
    ranges.any(|range| range.contains(&address))
}

#[test]
fn what_is_returned_during_a_shutdown_outlives_it() {
    let rig = impatient();
    let stream = rig.context.stream();
    rig.shelve(LEN, 2);
    let (mut early, mut late) = (rig.pool.take(LEN), rig.pool.take(LEN));
    let address = late.as_ptr();
    stream.hold();
    early.record_last_use(&stream).unwrap();
    late.record_last_use(&stream).unwrap();
    drop(early);
    let report = std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| rig.pool.shutdown());
        // The shutdown waits for the first one, whose stream is held, and gives up on it. That it has begun shows
        // nowhere but in the pool's inside.
        while !format!("{:?}", rig.pool).contains("generation: 1") {
            std::thread::yield_now();
        }
        drop(late);
        shutdown.join().unwrap()
    });
    assert_eq!(report.quarantined_bytes, LEN, "only what was returned before: {report:?}");
    assert_eq!(rig.pool.stats().queued_buffers, 1);
    stream.release();
    rig.sim.run_until_idle();
    rig.drain();
    assert_eq!(rig.pool.take(LEN).as_ptr(), address, "it was healthy");
    rig.drain();
    rig.finish();
}

#[test]
fn what_is_given_up_on_gives_back_the_events_that_it_keeps() {
    let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(Duration::from_millis(20)));
    let stream = rig.context.stream();
    rig.shelve(LEN, 2);
    let use_two = || {
        let mut buffers = [rig.pool.take(LEN), rig.pool.take(LEN)];
        buffers.iter_mut().for_each(|buffer| buffer.record_last_use(&stream).unwrap());
        drop(buffers);
        rig.sim.run_until_idle();
        rig.drain();
    };
    use_two();
    rig.sim.fail(unlock_call(), Fault::hang());
    rig.pool.trim_to(LEN);
    until("the lane hangs", || rig.sim.hanging_calls() == 1);
    assert!(!rig.pool.shutdown().completed);
    rig.sim.clear_faults();
    use_two();
    assert_eq!(rig.sim.calls("cuEventCreate"), 2);
    rig.finish();
}

#[test]
fn a_guard_that_outlives_its_pool_leaves_no_thread_behind() {
    // Long before the deadline.
    let hour = Duration::from_secs(3600);
    let rig = Rig::with(Sim::new(), |builder| builder.thread_name("outlive").shutdown_timeout(hour));
    let buffer = rig.pinned(LEN);
    let Rig { pool, sim, context } = rig;
    drop(pool);
    until("the pool's threads end", || threads_named("outlive") == 0);
    drop(buffer);
    until("its memory is let go", || locked_bytes(&sim) == 0);
    until("the thread that did it ends", || threads_named("outlive") == 0);
    drop(context);
}

#[test]
fn a_pool_that_is_dropped_waits_for_the_work_on_what_was_returned() {
    let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(PATIENCE));
    let (stream, other) = (rig.context.stream(), rig.context.stream());
    let mut buffer = rig.pinned(LEN);
    stream.hold();
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);
    until("it is waited for", || {
        !rig.pool.drain(Duration::from_millis(1)) && rig.sim.calls("cuEventQuery") > 0
    });
    let Rig { pool, sim, context } = rig;
    drop(pool);
    // The cleaner goes on asking: it has not given up.
    let asked = sim.calls("cuEventQuery");
    until("it is asked for", || sim.calls("cuEventQuery") > asked + 10);
    stream.release();
    sim.run_until_idle();
    until("its memory is let go", || locked_bytes(&sim) == 0);
    drop((stream, other, context));
}
