//! A buffer's journey on the simulated device: take, fill, copy, record, drop, and back on its shelf.

mod common;

use common::{
    KIB, MIB, Rig, all_zero, copy_to_device, lock_call, locked, locks_its_own_pages, pattern, size_classes,
};
use pinpool::sim::Sim;
use pinpool::{PinnedPool, SizeClasses};

#[test]
fn lengths_are_powers_of_two_and_buffers_are_zero_and_page_aligned_on_hit_and_miss() {
    let rig = Rig::new();
    // Three quarters of a doubling are a class of their own where the suite's classes are eighths.
    let large = if size_classes() == SizeClasses::PowerOfTwo { 4 * MIB } else { 3 * MIB };
    for (asked, len) in [(0, 1), (1, 1), (3, 4), (4096, 4096), (5000, 8192), (3 * MIB, large)] {
        rig.pool.clear();
        for round in ["miss", "hit"] {
            let mut buffer = rig.pool.take(asked);
            assert_eq!(buffer.len(), len, "{round} of {asked}");
            assert_eq!(buffer.as_ptr() as usize % 4096, 0, "{round} of {asked}");
            assert!(all_zero(&buffer), "{round} of {asked}");
            assert_eq!(buffer.is_pinned(), round == "hit");
            buffer.fill(0xff);
            drop(buffer);
            rig.drain();
        }
    }
    rig.finish();
}

#[test]
fn a_miss_is_pageable_and_is_page_locked_once_after_its_first_return() {
    let rig = Rig::new();
    let buffer = rig.pool.take(64 * KIB);
    assert!(!buffer.is_pinned() && !buffer.driver_says_page_locked().unwrap());
    let mut address = buffer.as_ptr();
    drop(buffer);
    rig.drain();
    if !locks_its_own_pages() {
        address = locked(&rig.sim)[0].0 as *const u8; // in its place
    }
    for _ in 0..5 {
        let buffer = rig.pool.take(64 * KIB);
        assert!(buffer.is_pinned() && buffer.driver_says_page_locked().unwrap());
        assert_eq!(buffer.as_ptr(), address, "the allocation never moves");
        drop(buffer);
        rig.drain();
    }
    assert_eq!(rig.sim.calls(lock_call()), 1);
    let stats = rig.assert_balanced();
    assert_eq!((stats.misses, stats.registrations, stats.registered_bytes), (1, 1, 64 * KIB));
    assert_eq!(stats.hits + stats.harvested, 5);
    assert_eq!((stats.returned, stats.recycled), (6, 6));
    rig.finish();
}

#[test]
fn registration_is_of_the_whole_class_at_its_base() {
    let rig = Rig::new();
    let buffer = rig.pinned(5000);
    assert_eq!(locked(&rig.sim), [(buffer.as_ptr() as usize, 8192)]);
    drop(buffer);
    rig.finish();
}

#[test]
fn the_most_recently_shelved_block_comes_first() {
    let rig = Rig::new();
    rig.shelve(8 * KIB, 2);
    let (first, second) = (rig.pool.take(8 * KIB), rig.pool.take(8 * KIB));
    let address = first.as_ptr();
    drop(second);
    rig.drain();
    drop(first);
    rig.drain();
    assert_eq!(rig.pool.take(8 * KIB).as_ptr(), address);
    rig.finish();
}

#[test]
fn nothing_touches_a_block_before_its_held_copy_is_done() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let device = rig.context.alloc(MIB);
    let mut buffer = rig.pinned(MIB);
    let address = buffer.as_ptr();
    let bytes = pattern(3, MIB);
    buffer.copy_from_slice(&bytes);
    stream.hold();
    copy_to_device(&stream, &buffer, MIB, &device);
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);

    // Everything that could tempt the pool to touch it: a take of the class, a lower cap, an eviction.
    let other = rig.pool.take(MIB);
    assert_ne!(other.as_ptr(), address, "reused in flight");
    rig.pool.set_max_pooled_bytes(0);
    rig.pool.clear();
    rig.pool.set_max_pooled_bytes(64 * MIB);
    rig.sim.run_until_idle();
    let registered: Vec<usize> = locked(&rig.sim).into_iter().map(|(base, _)| base).collect();
    assert!(registered.contains(&(address as usize)), "unregistered in flight");
    let stats = rig.assert_balanced();
    assert_eq!((stats.queued_buffers, stats.queued_pinned_bytes), (1, MIB), "dealt with in flight");

    stream.release();
    rig.sim.run_until_idle();
    assert!(device.read() == bytes, "wrong bytes on the device");
    rig.drain();
    let again = rig.pool.take(MIB);
    assert_eq!(again.as_ptr(), address, "the block is back on its shelf");
    assert!(again.is_pinned() && all_zero(&again));
    drop((other, again));
    rig.finish();
}

#[test]
fn only_the_dirty_prefix_is_zeroed() {
    let rig = Rig::new();
    rig.shelve(64 * KIB, 1);
    let zeroed_by = |len: Option<usize>| {
        let mut buffer = rig.pool.take(64 * KIB);
        buffer[..100].fill(7);
        if let Some(len) = len {
            buffer.set_dirty_len(len);
        }
        let before = rig.pool.stats().zeroed_bytes;
        drop(buffer);
        rig.drain();
        rig.pool.stats().zeroed_bytes - before
    };
    assert_eq!(zeroed_by(None), 64 * KIB as u64, "everything by default");
    assert_eq!(zeroed_by(Some(100)), 100);
    assert_eq!(zeroed_by(Some(usize::MAX)), 64 * KIB as u64, "larger than the buffer is clamped");
    assert!(all_zero(&rig.pool.take(64 * KIB)));
    rig.drain();
    rig.finish();
}

#[test]
fn a_direct_write_after_the_dirty_length_makes_everything_dirty_again() {
    let rig = Rig::new();
    let mut buffer = rig.pool.take(16 * KIB);
    buffer.set_dirty_len(1);
    buffer[9000] = 1;
    drop(buffer);
    rig.drain();
    let buffer = rig.pool.take(16 * KIB);
    assert!(all_zero(&buffer), "stale bytes reached the next taker");
    drop(buffer);
    rig.finish();
}

#[test]
fn a_writer_keeps_the_dirty_length_itself() {
    use std::io::Write;
    let rig = Rig::new();
    let mut buffer = rig.pinned(16 * KIB);
    buffer.writer().write_all(&[9; 300]).unwrap();
    let before = rig.pool.stats().zeroed_bytes;
    drop(buffer);
    rig.drain();
    assert_eq!(rig.pool.stats().zeroed_bytes - before, 300);
    assert!(all_zero(&rig.pool.take(16 * KIB)));
    rig.drain();
    rig.finish();
}

#[test]
fn a_taker_that_would_miss_harvests_a_returned_block_whose_work_is_done() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let device = rig.context.alloc(64 * KIB);
    let mut buffer = rig.pinned(64 * KIB);
    let address = buffer.as_ptr();
    let idle_cleaner = rig.pool.hold_cleaner();
    buffer.fill(5);
    copy_to_device(&stream, &buffer, 64 * KIB, &device);
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);

    let too_early = rig.pool.take(64 * KIB);
    assert_ne!(too_early.as_ptr(), address, "harvested in flight");
    rig.sim.run_until_idle();
    let harvested = rig.pool.take(64 * KIB);
    assert_eq!(harvested.as_ptr(), address);
    assert!(harvested.is_pinned() && all_zero(&harvested));
    assert_eq!(rig.pool.stats().harvested, 1);
    drop((idle_cleaner, too_early, harvested));
    rig.finish();
}

#[test]
fn a_lone_return_is_there_for_the_next_take_at_once() {
    // The limit only matters on a machine so busy that the cleaner is taken off its core in mid-move.
    let rig = Rig::with(Sim::new(), |builder| builder.harvest_wait_limit(common::PATIENCE));
    let mut buffer = rig.pinned(64 * KIB);
    let address = buffer.as_ptr();
    let stream = rig.context.stream();
    buffer.fill(1);
    buffer.record_last_use(&stream).unwrap();
    // No drain in between: whether or not the cleaner has looked yet.
    for _ in 0..1000 {
        rig.sim.run_until_idle();
        drop(buffer);
        buffer = rig.pool.take(64 * KIB);
        assert_eq!(buffer.as_ptr(), address);
        assert!(buffer.is_pinned() && all_zero(&buffer));
        buffer.fill(1);
        buffer.record_last_use(&stream).unwrap();
    }
    rig.sim.run_until_idle();
    drop(buffer);
    rig.finish();
}

#[test]
fn an_unregistered_block_is_never_harvested() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let idle_cleaner = rig.pool.hold_cleaner();
    for is_recorded in [false, true] {
        let mut first = rig.pool.take(64 * KIB);
        let address = first.as_ptr();
        if is_recorded {
            first.record_last_use(&stream).unwrap();
            rig.sim.run_until_idle();
        }
        drop(first);
        let second = rig.pool.take(64 * KIB);
        assert_ne!(second.as_ptr(), address, "a tight loop would never get pinned memory");
        assert_eq!(rig.pool.stats().harvested, 0);
    }
    drop(idle_cleaner);
    rig.finish();
}

#[test]
fn a_harvest_leaves_large_zeroing_to_the_cleaner_beyond_the_limit() {
    let rig = Rig::with(Sim::new(), |builder| builder.harvest_zero_limit(1000));
    let mut buffer = rig.pinned(64 * KIB);
    let address = buffer.as_ptr();
    let stream = rig.context.stream();
    let idle_cleaner = rig.pool.hold_cleaner();
    buffer.record_last_use(&stream).unwrap();
    rig.sim.run_until_idle();
    buffer.set_dirty_len(1001);
    drop(buffer);
    let other = rig.pool.take(64 * KIB);
    assert_ne!(other.as_ptr(), address);
    let unzeroed = rig.pool.take_unzeroed(64 * KIB).unwrap();
    assert_eq!(unzeroed.as_ptr(), address, "a caller who overwrites everything needs no zeroing");
    drop((idle_cleaner, other, unzeroed));
    rig.finish();
}

#[test]
fn an_unzeroed_buffer_leaves_nothing_stale_for_the_next_taker() {
    let rig = Rig::new();
    let mut buffer = rig.pinned(64 * KIB);
    let stream = rig.context.stream();
    let idle_cleaner = rig.pool.hold_cleaner();
    buffer.fill(0xaa);
    buffer.record_last_use(&stream).unwrap();
    rig.sim.run_until_idle();
    drop(buffer);
    let mut unzeroed = rig.pool.take_unzeroed(64 * KIB).unwrap();
    assert_eq!(unzeroed[60_000], 0xaa, "this test is about a block that is still dirty");
    unzeroed.set_dirty_len(10);
    unzeroed.record_last_use(&stream).unwrap();
    rig.sim.run_until_idle();
    drop((unzeroed, idle_cleaner));
    rig.drain();
    assert!(all_zero(&rig.pool.take(64 * KIB)));
    rig.drain();
    rig.finish();
}

#[test]
fn an_exact_length_has_the_memory_of_its_class() {
    let rig = Rig::new();
    rig.shelve(8192, 1);
    let buffer = rig.pool.take_exact(5000).unwrap();
    assert_eq!(buffer.len(), 5000);
    let address = buffer.as_ptr();
    drop(buffer);
    rig.drain();
    let rounded = rig.pool.take(8192);
    assert_eq!((rounded.as_ptr(), rounded.len()), (address, 8192));
    drop(rounded);
    assert_eq!(rig.pool.take_exact(0).unwrap().len(), 0);
    rig.finish();
}

#[test]
fn typed_slices_see_the_same_bytes_or_say_what_does_not_fit() {
    let rig = Rig::new();
    let mut buffer = rig.pool.take(64);
    buffer.as_mut_slice_of::<u32>().unwrap()[3] = u32::from_ne_bytes([1, 2, 3, 4]);
    assert_eq!(buffer[12..16], [1, 2, 3, 4]);
    assert_eq!(buffer.as_slice_of::<u64>().unwrap().len(), 8);
    let exact = rig.pool.take_exact(6).unwrap();
    let error = exact.as_slice_of::<u32>().unwrap_err().to_string();
    assert!(error.contains("6 bytes") && error.contains("u32"), "{error}");
    drop((buffer, exact));
    rig.finish();
}

#[test]
fn a_plain_take_fill_drop_with_no_record_pins_too() {
    // The context is learned from the drop ...
    let rig = Rig::new();
    let mut buffer = rig.pool.take(4 * KIB);
    buffer.fill(1);
    drop(buffer);
    rig.drain();
    assert!(rig.pool.take(4 * KIB).is_pinned());
    rig.finish();

    // ... from an active primary context, where the dropping thread has none ...
    let rig = Rig::new();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(rig.pool.take(4 * KIB)));
    });
    rig.drain();
    assert!(rig.pool.take(4 * KIB).is_pinned());
    rig.finish();

    // ... or from the builder.
    let sim = Sim::new();
    let stream = sim.context(0).stream();
    let pool =
        PinnedPool::builder().driver(sim.driver()).context_of(&std::sync::Arc::new(stream)).build().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(pool.take(4 * KIB)));
    });
    assert!(pool.drain(common::PATIENCE));
    assert!(pool.take(4 * KIB).is_pinned());
}

#[test]
fn without_any_context_blocks_are_pooled_unpinned_and_none_is_made() {
    let sim = Sim::new();
    sim.cuda().cu_init(0).unwrap();
    let pool = PinnedPool::builder().driver(sim.driver()).build().unwrap();
    drop(pool.take(4 * KIB));
    assert!(pool.drain(common::PATIENCE));
    let buffer = pool.take(4 * KIB);
    assert!(!buffer.is_pinned());
    assert_eq!((pool.stats().unpinned_hits, pool.stats().registered_bytes), (1, 0));
    assert_eq!(sim.calls("cuDevicePrimaryCtxRetain"), 0, "a context was made on a device that nobody uses");
    drop(buffer);

    // Once the application has a context, the next return page-locks.
    let _context = sim.context(0);
    drop(pool.take(4 * KIB));
    assert!(pool.drain(common::PATIENCE));
    assert!(pool.take(4 * KIB).is_pinned());
    assert!(pool.drain(common::PATIENCE));
    assert!(pool.shutdown().completed);
    sim.assert_clean();
}
