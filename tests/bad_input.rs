//! Sizes that cannot be, caps at their ends, dead streams, foreign and exiting threads, unwinding.

mod common;

use common::{KIB, MIB, PATIENCE, Rig};
use pinpool::sim::Sim;
use pinpool::{Driver, Error, PinnedPool};

#[test]
fn impossible_sizes_are_errors_that_name_the_size() {
    let rig = Rig::new();
    for bytes in [usize::MAX, usize::MAX - 1, isize::MAX as usize, isize::MAX as usize / 2 + 1] {
        assert_eq!(rig.pool.try_take(bytes).unwrap_err(), Error::TooLarge { bytes });
        assert!(rig.pool.take_exact(bytes).unwrap_err().to_string().contains(&bytes.to_string()));
        assert!(rig.pool.take_unzeroed(bytes).is_err() && rig.pool.take_pinned(bytes).is_err());
        assert!(rig.pool.prewarm(bytes, 1).is_err());
    }
    for bytes in [(1 << 47) - 1, 1 << 47, (1 << 47) + 1, 1 << 61, isize::MAX as usize / 2] {
        let error = rig.pool.try_take(bytes).unwrap_err();
        assert_eq!(error, Error::OutOfMemory { bytes: bytes.next_power_of_two() });
    }
    let stats = rig.assert_balanced();
    assert_eq!((stats.misses, stats.checked_out_buffers), (0, 0), "a refused take is no take");
    rig.finish();
}

#[test]
fn take_panics_with_the_size_where_a_vec_would_end_the_program() {
    let rig = Rig::new();
    for bytes in [usize::MAX, 1 << 48] {
        let panicked = {
            let pool = &rig.pool;
            std::panic::catch_unwind(|| pool.take(bytes))
        }
        .unwrap_err();
        let message = panicked.downcast::<String>().unwrap();
        assert!(message.contains(&bytes.to_string()), "{message}");
    }
    rig.finish();
}

#[test]
fn a_record_on_a_dead_stream_is_an_error_and_the_buffer_stays_safe() {
    let rig = Rig::new();
    let cuda = rig.sim.cuda();
    let stream = cuda.cu_stream_create(1).unwrap();
    // The simulated stream's typed handle lives as long as the stream, so a dead one is made by hand.
    let typed = rig.context.stream();
    cuda.cu_stream_destroy(typed.handle()).unwrap();
    let mut buffer = rig.pinned(64 * KIB);
    let error = buffer.record_last_use(&typed).unwrap_err();
    assert!(matches!(error, Error::Driver(call) if call.code() == 400), "{error}");
    rig.sim.hold(stream);
    rig.sim.stall(stream, std::time::Duration::ZERO);
    drop(buffer);
    assert!(
        !rig.pool.drain(std::time::Duration::from_millis(30)),
        "a failed record must wait for the contexts"
    );
    rig.sim.release(stream);
    rig.drain();
    cuda.cu_stream_destroy(stream).unwrap();
    drop(typed);
    rig.finish();
}

#[test]
fn buffers_may_be_dropped_on_foreign_and_on_exiting_threads() {
    thread_local! {
        static KEPT: std::cell::RefCell<Vec<pinpool::PinnedBuffer>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    let rig = Rig::new();
    rig.shelve(64 * KIB, 4);
    let buffers: Vec<_> = (0..4).map(|_| rig.pool.take(64 * KIB)).collect();
    let mut buffers = buffers.into_iter();
    let (first, rest): (_, Vec<_>) = (buffers.next(), buffers.collect());
    // No context is current there.
    std::thread::spawn(move || drop(first)).join().unwrap();
    // Dropped by the destructor of a thread-local, while the thread exits.
    std::thread::spawn(move || KEPT.with(|kept| kept.borrow_mut().extend(rest))).join().unwrap();
    rig.drain();
    assert_eq!(rig.assert_balanced().pooled_buffers, 4);
    rig.finish();
}

#[test]
fn the_first_drop_of_all_may_happen_on_an_exiting_thread() {
    thread_local! {
        static KEPT: std::cell::RefCell<Option<pinpool::PinnedBuffer>> = const { std::cell::RefCell::new(None) };
    }
    let rig = Rig::new();
    let buffer = rig.pool.take(4 * KIB);
    std::thread::spawn(move || KEPT.with(|kept| *kept.borrow_mut() = Some(buffer))).join().unwrap();
    rig.drain();
    assert_eq!(rig.assert_balanced().pooled_buffers, 1);
    rig.finish();
}

#[test]
fn buffers_dropped_during_unwinding_come_home() {
    let rig = Rig::new();
    rig.shelve(64 * KIB, 1);
    let pool = &rig.pool;
    let panicked = std::panic::catch_unwind(|| {
        let mut buffer = pool.take(64 * KIB);
        buffer.fill(1);
        let _also = pool.take(MIB);
        panic!("on purpose");
    });
    assert!(panicked.is_err());
    rig.drain();
    assert_eq!(rig.assert_balanced().pooled_buffers, 2);
    rig.finish();
}

#[test]
fn settings_out_of_range_are_named() {
    let error = PinnedPool::builder().driver(Driver::host_only()).thread_name("a\0b").build().unwrap_err();
    assert!(error.to_string().starts_with("thread_name"), "{error}");
}

#[test]
fn without_a_device_blocks_are_pooled_unpinned_and_say_so() {
    let pool = PinnedPool::builder().driver(Driver::host_only()).build().unwrap();
    let mut buffer = pool.take(64 * KIB);
    let address = buffer.as_ptr();
    buffer.fill(1);
    drop(buffer);
    assert!(pool.drain(PATIENCE));
    let buffer = pool.take(64 * KIB);
    assert_eq!(buffer.as_ptr(), address);
    assert!(!buffer.is_pinned() && common::all_zero(&buffer));
    let stats = pool.stats();
    assert_eq!((stats.hits, stats.unpinned_hits, stats.registered_bytes), (0, 1, 0));
    assert!(buffer.is_quiescent().unwrap());
    let error = pool.take_pinned(1).unwrap_err();
    assert!(matches!(error, Error::NoCuda { .. }), "{error}");
    drop(buffer);
    // A tight loop finds its block without waiting for the background.
    for _ in 0..100 {
        drop(pool.take(64 * KIB));
    }
    assert!(pool.drain(PATIENCE));
    assert!(pool.stats().misses <= 2, "{:#?}", pool.stats());
    assert!(pool.shutdown().completed);
}

#[test]
fn a_simulated_machine_without_a_device_pins_nothing() {
    let sim = Sim::builder().devices(0).build();
    let pool = PinnedPool::builder().driver(sim.driver()).build().unwrap();
    drop(pool.take(4 * KIB));
    assert!(pool.drain(PATIENCE));
    assert!(!pool.take(4 * KIB).is_pinned());
    let error = pool.take_pinned(4 * KIB).unwrap_err().to_string();
    assert!(error.contains("100"), "{error}");
}

#[test]
fn a_buffer_may_be_dropped_when_the_threads_own_variables_are_gone() {
    thread_local! {
        static KEPT: std::cell::RefCell<Vec<pinpool::PinnedBuffer>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    let rig = Rig::new();
    rig.shelve(64 * KIB, 2);
    let recorded = rig.pool.take(64 * KIB);
    let context = rig.context.clone();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // The thread's variables are destroyed last in, first out. So this one is made first, and whatever
            // the pool keeps for a thread is gone when the buffers in it are dropped.
            KEPT.with(|kept| kept.borrow_mut().reserve(2));
            context.bind();
            let stream = context.default_stream();
            let mut first = rig.pool.take(64 * KIB);
            first.record_last_use(&stream).unwrap();
            drop(first);
            let mut recorded = recorded;
            recorded.record_last_use(&stream).unwrap();
            KEPT.with(|kept| kept.borrow_mut().extend([recorded, rig.pool.take(MIB)]));
        });
        // The end of the scope would not wait for the thread's variables.
        thread.join().unwrap();
    });
    rig.sim.run_until_idle();
    rig.drain();
    assert_eq!(rig.assert_balanced().pooled_buffers, 3);
    rig.finish();
}
