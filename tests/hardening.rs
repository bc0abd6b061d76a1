//! What an adversary found: each test failed before its fix.
#![allow(unsafe_code)] // `assume_quiescent` is an unsafe promise.

mod common;

use common::{KIB, MIB, PATIENCE, Rig, copy_to_device, lock_call, locked_bytes, pattern, until};
use pinpool::PinnedPool;
use pinpool::sim::{Fault, Sim};
use std::time::{Duration, Instant};

const LEN: usize = 64 * KIB;

#[test]
fn an_event_that_is_pending_is_never_destroyed_and_is_used_again_later() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    stream.hold();
    rig.sim.stall(stream.handle(), Duration::ZERO);
    buffer.record_last_use(&stream).unwrap();
    // SAFETY: the stream has no work that touches the buffer.
    unsafe { buffer.assume_quiescent() };
    drop(buffer);
    // This thread has the context current, so here a destruction would not be refused.
    let mut buffer = rig.pool.take(LEN);
    assert_eq!(rig.sim.calls("cuEventDestroy"), 0);
    stream.release();
    rig.sim.run_until_idle();
    let made = rig.sim.calls("cuEventCreate");
    buffer.record_last_use(&stream).unwrap();
    assert_eq!(rig.sim.calls("cuEventCreate"), made, "the event that became complete was not used again");
    drop(buffer);
    rig.sim.run_until_idle();
    rig.finish();
}

#[test]
fn a_write_waits_for_the_devices_that_are_left_when_one_is_lost() {
    for code in [709, 700] {
        let sim = Sim::builder().devices(2).build();
        let rig = Rig::with(sim, |builder| builder);
        let second = rig.sim.context(1);
        rig.context.bind();
        let mut buffer = rig.pinned(LEN);
        let bytes = pattern(3, LEN);
        buffer.copy_from_slice(&bytes);
        let (lost, alive) = (rig.context.stream(), second.stream());
        let device = second.alloc(LEN);
        rig.sim.stall(lost.handle(), Duration::ZERO);
        lost.hold();
        buffer.record_last_use(&lost).unwrap();
        alive.hold();
        copy_to_device(&alive, &buffer, LEN, &device);
        buffer.record_last_use(&alive).unwrap();
        rig.context.break_with(code);
        let releaser = std::thread::spawn({
            let sim = rig.sim.clone();
            let handle = alive.handle();
            let second = second.clone();
            move || {
                second.bind();
                // Until the writer has asked more than once, or has not asked at all in all this time.
                let asked = sim.calls("cuEventQuery") + sim.calls("cuCtxSynchronize");
                let deadline = Instant::now() + Duration::from_millis(300);
                while sim.calls("cuEventQuery") + sim.calls("cuCtxSynchronize") < asked + 20
                    && Instant::now() < deadline
                {
                    std::thread::yield_now();
                }
                sim.release(handle);
                sim.run_until_idle();
            }
        });
        buffer.fill(0xEE);
        releaser.join().unwrap();
        assert!(device.read() == bytes, "{code}: written while a device that is not lost still read");
        drop(buffer);
        let _ = rig.pool.drain(PATIENCE);
        rig.sim.take_violations();
        rig.sim.expect_violations();
    }
}

#[test]
fn timeouts_without_end_are_no_overflow() {
    let sim = Sim::new();
    let context = sim.context(0);
    let pool = PinnedPool::builder()
        .driver(sim.driver())
        .shutdown_timeout(Duration::MAX)
        .harvest_wait_limit(Duration::MAX)
        .build()
        .unwrap();
    for _ in 0..100 {
        drop(pool.take(LEN));
    }
    assert!(pool.drain(Duration::MAX));
    assert!(pool.shutdown().completed);
    drop(pool.take(LEN));
    drop(pool);
    until("closed", || locked_bytes(&sim) == 0);
    drop(context);
}

#[test]
fn a_drain_keeps_its_timeout_while_another_one_waits() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    stream.hold();
    rig.sim.stall(stream.handle(), Duration::ZERO);
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);
    std::thread::scope(|scope| {
        let long = scope.spawn(|| rig.pool.drain(PATIENCE));
        // Whichever comes first: this one must not wait for the other.
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(100) {
            assert!(!rig.pool.drain(Duration::from_millis(5)));
        }
        assert!(started.elapsed() < PATIENCE / 4, "{:?}", started.elapsed());
        stream.release();
        rig.sim.run_until_idle();
        assert!(long.join().unwrap());
    });
    rig.finish();
}

#[test]
fn a_buffer_larger_than_the_ceiling_costs_the_others_nothing() {
    let rig = Rig::with(Sim::new(), |builder| builder.max_registered_bytes(MIB));
    rig.shelve(LEN, 4);
    rig.shelve(2 * MIB, 1);
    let stats = rig.assert_balanced();
    assert_eq!(stats.registered_bytes, 4 * LEN, "what could never fit pushed out what was page-locked");
    assert!(rig.pool.take_pinned(2 * MIB).is_err());
    assert_eq!(rig.assert_balanced().registered_bytes, 4 * LEN);
    rig.finish();
}

/// A subscriber that itself uses the pool, also on the pool's own threads.
#[test]
fn a_subscriber_may_take_and_drop_buffers_of_the_pool_that_reports() {
    struct Taking(PinnedPool, std::sync::atomic::AtomicU64);
    impl tracing::Subscriber for Taking {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            thread_local!(static INSIDE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });
            if INSIDE.replace(true) {
                return;
            }
            drop(self.0.take(LEN));
            self.0.trim_to(MIB);
            let _ = self.0.stats();
            let _ = self.0.drain(Duration::from_millis(1));
            INSIDE.set(false);
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }
    let rig = Rig::new();
    let subscriber = Taking(rig.pool.clone(), 0.into());
    tracing::subscriber::with_default(subscriber, || {
        let mut buffer = rig.pinned(LEN);
        rig.sim.fail("cuEventRecord", Fault::once(999));
        let stream = rig.context.stream();
        let _ = buffer.record_last_use(&stream);
        drop(buffer);
        rig.sim.fail(lock_call(), Fault::once(2));
        let _ = rig.pool.take_pinned(4 * KIB);
        rig.drain();
    });
    rig.finish();
}

#[test]
fn hundreds_of_pools_streams_and_classes_at_once() {
    let sim = Sim::new();
    let context = sim.context(0);
    let streams: Vec<_> = (0..300).map(|_| context.stream()).collect();
    let pools: Vec<_> =
        (0..48).map(|_| PinnedPool::builder().driver(sim.driver()).build().unwrap()).collect();
    std::thread::scope(|scope| {
        for (number, pool) in pools.iter().enumerate() {
            let (streams, context) = (&streams, &context);
            scope.spawn(move || {
                context.bind();
                let mut buffers: Vec<_> =
                    (0..40).map(|index| pool.take(1 << ((number + index) % 20))).collect();
                for (index, buffer) in buffers.iter_mut().enumerate() {
                    buffer.record_last_use(&streams[(number * 7 + index) % streams.len()]).unwrap();
                }
                // Dropped on a thread that is ending and that the pool has never seen.
                std::thread::spawn(move || drop(buffers)).join().unwrap();
            });
        }
    });
    sim.run_until_idle();
    for pool in &pools {
        assert!(pool.drain(PATIENCE));
        assert!(pool.stats().is_balanced(), "{:#?}", pool.stats());
    }
    // Half are shut down by several threads at once, half are merely dropped.
    let (first, second) = pools.split_at(24);
    std::thread::scope(|scope| {
        for pool in first {
            (0..3).for_each(|_| {
                scope.spawn(|| assert!(pool.shutdown().completed));
            });
        }
    });
    assert!(second.iter().any(|pool| pool.stats().registered_bytes > 0));
    drop(pools);
    until("every pool has let go", || locked_bytes(&sim) == 0);
    sim.assert_clean();
}

#[test]
fn a_shutdown_ends_in_time_although_a_query_hangs_on_the_cleaner() {
    let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(Duration::from_millis(50)));
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    buffer.record_last_use(&stream).unwrap();
    rig.sim.fail("cuEventQuery", Fault::hang());
    drop(buffer);
    until("the cleaner hangs", || rig.sim.hanging_calls() == 1);
    let started = Instant::now();
    assert!(!rig.pool.shutdown().completed);
    assert!(started.elapsed() < PATIENCE / 2, "{:?}", started.elapsed());
    rig.sim.clear_faults();
    rig.sim.run_until_idle();
    rig.finish();
}

#[test]
fn a_pool_that_is_dropped_waits_for_the_end_of_a_hold_and_of_a_capture_before_it_quarantines() {
    for captures in [false, true] {
        let rig = Rig::new();
        let buffer = rig.pinned(LEN);
        let sim = rig.sim.clone();
        let hold = rig.pool.hold_context_waits();
        if captures {
            sim.fail("cuCtxSynchronize", Fault::always(900));
        }
        drop(buffer);
        drop(rig.pool);
        if captures {
            drop(hold);
            until("it was refused", || sim.calls("cuCtxSynchronize") > 3);
            sim.clear_faults();
        } else {
            // Long enough for a lane that does not wait; one that does needs no time at all.
            std::thread::sleep(Duration::from_millis(30));
            drop(hold);
        }
        until("the memory was leaked although the hold was over in time", || locked_bytes(&sim) == 0);
    }
}

#[test]
fn what_is_page_locked_at_the_last_moment_of_a_shutdown_is_let_go_like_the_rest() {
    let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(Duration::from_millis(20)));
    // The lane has half a second after the deadline, which a busy machine may take from it.
    let in_time = (0..20).any(|_| {
        rig.shelve(4 * KIB, 1);
        let quarantined = rig.pool.stats().quarantined_bytes;
        rig.sim.fail(lock_call(), Fault::hang());
        drop(rig.pool.take(LEN));
        until("the lane hangs", || rig.sim.hanging_calls() == 1);
        let report = std::thread::scope(|scope| {
            let shutdown = scope.spawn(|| rig.pool.shutdown());
            until("the shelves are cleared", || rig.pool.stats().pooled_buffers == 0);
            rig.sim.clear_faults();
            shutdown.join().unwrap()
        });
        let leaked = rig.assert_balanced().quarantined_bytes - quarantined;
        assert!(!report.completed || leaked == 0, "{report:?}");
        report.completed
    });
    assert!(in_time, "no call returned in time");
    rig.finish();
}

/// What the lanes have given back keeps no shutdown waiting for its deadline.
#[test]
fn a_shutdown_ends_when_all_is_done_and_not_at_its_deadline() {
    let rig = Rig::with(Sim::new(), |builder| builder.shutdown_timeout(Duration::from_secs(3600)));
    // Page-locked by one lane, waited for by the other.
    rig.shelve(LEN, 2);
    drop(rig.pool.take(LEN));
    rig.drain();
    let (told, ended) = std::sync::mpsc::channel();
    let pool = rig.pool.clone();
    let shutdown = std::thread::spawn(move || told.send(pool.shutdown()));
    assert!(ended.recv_timeout(PATIENCE).is_ok_and(|report| report.completed));
    assert!(shutdown.join().unwrap().is_ok());
    rig.finish();
}
