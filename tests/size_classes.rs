//! Finer classes than powers of two: everything that a pool does with a class, with classes in between. How sizes are
//! rounded is tested beside the arithmetic (`src/size_class`).

mod common;

use common::{KIB, MIB, Rig, all_zero, copy_to_device, locked, locks_its_own_pages, pattern};
use pinpool::sim::Sim;
use pinpool::{Backing, Driver, Error, PinnedBuffer, PinnedPool, PoolBuilder, SizeClasses};
use std::time::Duration;

/// Eighths from as low as they go, so that small buffers try what large ones do.
const EIGHTHS: SizeClasses = SizeClasses::Steps { per_doubling: 8, from_bytes: 1 };

fn rig_with(settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Rig {
    Rig::with(Sim::new(), |builder| settings(builder.size_classes(EIGHTHS)))
}

fn rig() -> Rig {
    rig_with(|builder| builder)
}

fn pooled_by_class(rig: &Rig) -> Vec<(usize, usize)> {
    let classes = rig.pool.stats().classes;
    let pooled = classes.iter().map(|class| (class.class_bytes, class.pooled_buffers));
    pooled.filter(|(_, buffers)| *buffers > 0).collect()
}

#[test]
fn a_buffer_is_as_long_as_its_class_and_all_of_it_is_the_callers() {
    let rig = rig();
    for (asked, len) in [
        (3, 4),
        (20 * KIB, 32 * KIB), // below eight pages a step would be no whole page
        (64 * KIB, 64 * KIB),
        (64 * KIB + 1, 72 * KIB),
        (100 * KIB, 104 * KIB),
        (2 * MIB + 1, 2 * MIB + 256 * KIB),
    ] {
        for _ in 0..2 {
            let mut buffer = rig.pool.take(asked);
            assert_eq!(buffer.len(), len, "{asked} asked");
            assert!(all_zero(&buffer), "what the last one wrote, to its end, is gone");
            buffer.fill(7);
            let large = cfg!(target_os = "linux") && len >= 2 * MIB && locks_its_own_pages();
            let alignment = if large { 2 * MIB } else { 4 * KIB };
            assert_eq!(buffer.as_ptr() as usize % alignment, 0, "{asked} asked");
            drop(buffer);
            rig.drain();
        }
        let exact = rig.pool.take_exact(asked).unwrap();
        assert!(exact.is_pinned() && exact.len() == asked, "of the same class, so a hit");
        drop(exact);
        rig.drain();
        assert_eq!(rig.pool.take_unzeroed(asked).unwrap().len(), len);
        rig.drain();
    }
    let stats = rig.assert_balanced();
    let misses: Vec<_> = stats.classes.iter().map(|class| (class.class_bytes, class.misses)).collect();
    let classes = [4 * KIB, 32 * KIB, 64 * KIB, 72 * KIB, 104 * KIB, 2 * MIB + 256 * KIB];
    assert_eq!(misses, classes.map(|bytes| (bytes, 1)), "one of each, and then hits");
    assert_eq!(stats.registered_bytes, classes.iter().sum::<usize>());
    rig.finish();
}

#[test]
fn without_a_word_about_it_everything_is_a_power_of_two() {
    for classes in [None, Some(SizeClasses::PowerOfTwo), Some(SizeClasses::default())] {
        let builder = PinnedPool::builder().driver(Driver::host_only());
        let pool = match classes {
            Some(classes) => builder.size_classes(classes),
            None => builder,
        };
        let pool = pool.build().unwrap();
        assert_eq!(pool.take(5 * MIB).len(), 8 * MIB);
    }
    // And with steps, up to where they begin.
    let pool = PinnedPool::builder().size_classes(SizeClasses::steps(4)).build().unwrap();
    assert_eq!(pool.take(MIB - 200 * KIB).len(), MIB);
    assert_eq!(pool.take(5 * MIB).len(), 5 * MIB);
    assert_eq!(pool.take(5 * MIB + 1).len(), 6 * MIB);
}

#[test]
fn neighbouring_classes_share_nothing() {
    let rig = rig();
    rig.shelve(72 * KIB, 1);
    let [smaller, larger] = [64 * KIB, 80 * KIB].map(|bytes| rig.pool.take(bytes));
    assert!(!smaller.is_pinned() && !larger.is_pinned(), "neither is given the buffer of 72 KiB");
    let fitting = rig.pool.take(65 * KIB);
    assert!(fitting.is_pinned() && fitting.len() == 72 * KIB);
    drop((smaller, larger, fitting));
    rig.drain();
    assert_eq!(pooled_by_class(&rig), [64 * KIB, 72 * KIB, 80 * KIB].map(|bytes| (bytes, 1)));
    rig.finish();
}

#[test]
fn what_was_just_returned_is_harvested() {
    let rig = rig();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(65 * KIB);
    let address = buffer.as_ptr();
    let held = rig.pool.hold_cleaner();
    stream.hold();
    let device = rig.context.alloc(72 * KIB);
    buffer.copy_from_slice(&pattern(3, 72 * KIB));
    copy_to_device(&stream, &buffer, 72 * KIB, &device);
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);
    assert_ne!(rig.pool.take(70 * KIB).as_ptr(), address, "the device still reads it");
    stream.release();
    rig.sim.run_until_idle();
    let again = rig.pool.take(70 * KIB);
    assert_eq!(again.as_ptr(), address);
    assert!(again.is_pinned() && all_zero(&again), "zero to the end of the class");
    assert_eq!(device.read(), pattern(3, 72 * KIB));
    drop((again, held));
    rig.drain();
    assert_eq!(rig.pool.stats().harvested, 1);
    rig.finish();
}

#[test]
fn page_locked_by_name_is_as_large_as_the_class() {
    let rig = rig();
    let buffer = rig.pool.take_pinned(65 * KIB).unwrap();
    assert!(buffer.len() == 72 * KIB && buffer.driver_says_page_locked().unwrap());
    assert_eq!(rig.pool.prewarm(81 * KIB, 3).unwrap(), 3);
    let mut bytes: Vec<_> = locked(&rig.sim).iter().map(|(_, bytes)| *bytes).collect();
    bytes.sort_unstable();
    assert_eq!(bytes, [72, 88, 88, 88].map(|kib| kib * KIB));
    assert_eq!(rig.assert_balanced().pooled_pinned_bytes, 3 * 88 * KIB);
    drop(buffer);
    rig.finish();
}

#[test]
fn memory_of_the_drivers_is_as_large_as_the_class() {
    let rig = rig_with(|builder| builder.backing(Backing::HostPinned));
    rig.shelve(65 * KIB, 2);
    let bytes: Vec<_> = rig.sim.live_host_allocations().iter().map(|(_, bytes)| *bytes).collect();
    assert_eq!(bytes, [72 * KIB; 2]);
    let mut buffer = rig.pool.take(65 * KIB);
    assert!(buffer.is_pinned() && buffer.len() == 72 * KIB && all_zero(&buffer));
    buffer.fill(1);
    drop(buffer);
    rig.drain();
    assert!(all_zero(&rig.pool.take(65 * KIB)));
    rig.finish();
}

#[test]
fn the_largest_step_is_evicted_first() {
    let rig = rig_with(|builder| builder.max_pooled_bytes(usize::MAX));
    let sizes = [64, 72, 80, 96, 112, 128, 144].map(|kib| kib * KIB);
    // The highest numbers first, and one whose number lies 64 above another's.
    sizes.iter().rev().for_each(|bytes| rig.shelve(*bytes, 2));
    let all: usize = sizes.iter().sum::<usize>() * 2;
    for left in (0..=sizes.len()).rev() {
        let bytes = sizes[..left].iter().sum::<usize>() * 2;
        if left % 2 == 0 {
            rig.pool.trim_to(bytes)
        } else {
            rig.pool.set_max_pooled_bytes(bytes)
        }
        let pooled: Vec<_> = sizes[..left].iter().map(|bytes| (*bytes, 2)).collect();
        assert_eq!(pooled_by_class(&rig), pooled, "{bytes} bytes of {all} may stay");
        rig.drain();
        assert_eq!(rig.assert_balanced().registered_bytes, bytes);
    }
    rig.finish();
}

#[test]
fn idle_steps_age_out_and_those_in_use_stay() {
    const MAX_IDLE: Duration = Duration::from_secs(300);
    let rig = rig();
    for bytes in [64 * KIB, 72 * KIB, 80 * KIB, 160 * KIB] {
        rig.shelve(bytes, 4);
    }
    for _ in 0..3 * 16 {
        rig.pool.let_time_pass(MAX_IDLE / 16);
        assert!(rig.pool.take(72 * KIB).is_pinned());
        rig.drain();
    }
    assert_eq!(pooled_by_class(&rig), [(72 * KIB, 1)]);
    let stats = rig.assert_balanced();
    assert_eq!((stats.aged_out, stats.registered_bytes), (15, 72 * KIB), "{stats}");
    rig.finish();
}

/// What the pool may lock is asked in steps and in one go, and every way of getting something page-locked tried.
#[test]
fn the_ceiling_on_page_locked_bytes_is_hard_whatever_the_classes() {
    const CEILING: usize = 500 * KIB;
    for kind in [SizeClasses::PowerOfTwo, EIGHTHS] {
        let rig = rig_with(|builder| builder.size_classes(kind).max_registered_bytes(CEILING));
        let mut seed = 0x5eed_u64;
        println!("the seed is {seed:#x}");
        let mut out: Vec<PinnedBuffer> = Vec::new();
        let mut by_name = 0;
        for step in 0..600 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bytes = (seed >> 33) as usize % (200 * KIB) + 1;
            match seed >> 60 {
                0..=7 => out.push(rig.pool.take(bytes)),
                8 => by_name += usize::from(rig.pool.take_pinned(bytes).is_ok()),
                9 => drop(rig.pool.prewarm(bytes, 2)),
                10 => rig.pool.trim_to(CEILING / 2),
                11 => rig.pool.let_time_pass(Duration::from_secs(1)),
                _ => out.clear(),
            }
            let (locked, stats) = (common::locked_bytes(&rig.sim), rig.pool.stats());
            assert!(locked <= CEILING, "step {step}: {locked} bytes are page-locked");
            assert!(stats.peak_registered_bytes <= CEILING, "step {step}: {stats}");
            if step % 20 == 0 {
                rig.drain();
                rig.assert_balanced();
            }
        }
        out.clear();
        rig.drain();
        let stats = rig.assert_balanced();
        assert!(by_name > 0 && stats.registrations > 20, "it did something: {stats}");
        assert!(stats.peak_registered_bytes > CEILING / 2, "and came near: {stats}");
        rig.finish();
    }
}

#[test]
fn sizes_that_cannot_be_had_are_errors_that_name_them() {
    let pool = PinnedPool::builder().driver(Driver::host_only()).size_classes(EIGHTHS).build().unwrap();
    let limit = isize::MAX as usize / 2;
    for bytes in [limit + 1, usize::MAX] {
        assert_eq!(pool.try_take(bytes).unwrap_err(), Error::TooLarge { bytes });
    }
    // Above 1 TiB by doublings.
    assert_eq!(pool.try_take(limit).unwrap_err(), Error::OutOfMemory { bytes: limit + 1 });
    let (asked, bytes) = ((1 << 46) + 1, 1 << 47);
    assert_eq!(pool.try_take(asked).unwrap_err(), Error::OutOfMemory { bytes });
}

#[test]
fn settings_without_classes_are_refused_by_name() {
    for (per_doubling, from_bytes) in [(3, MIB), (0, MIB), (4, 3 * MIB), (4, 0), (2, 1 << 40)] {
        let kind = SizeClasses::Steps { per_doubling, from_bytes };
        let error = PinnedPool::builder().size_classes(kind).build().unwrap_err();
        assert!(matches!(error, Error::Setting { name: "size_classes", .. }), "{error:?}");
    }
}

/// Every class of several doublings at once, dropped together and found again; the largest shares its flag in the inbox
/// with the smallest.
#[test]
fn many_classes_at_once_are_all_served() {
    let rig = rig_with(|builder| builder.max_pooled_bytes(usize::MAX));
    let steps = |log2: u32| (0..8).map(move |step| (1 << log2) + (step << (log2 - 3)));
    let sizes: Vec<usize> = (15..23).flat_map(steps).chain([8 * MIB]).collect();
    for round in 0..3 {
        let held = rig.pool.hold_cleaner();
        let mut buffers: Vec<_> = sizes.iter().map(|bytes| rig.pool.take(*bytes)).collect();
        assert!(buffers.iter().all(|buffer| buffer.is_pinned() == (round > 0)));
        assert!(buffers.iter().zip(&sizes).all(|(buffer, bytes)| buffer.len() == *bytes));
        buffers.iter_mut().for_each(|buffer| buffer.set_dirty_len(0));
        drop((buffers, held));
        rig.drain();
    }
    let pooled: Vec<_> = sizes.iter().map(|bytes| (*bytes, 1)).collect();
    assert_eq!(pooled_by_class(&rig), pooled);
    assert_eq!(rig.pool.stats().hits, 2 * sizes.len() as u64);
    rig.finish();
}
