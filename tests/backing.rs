//! What a pool page-locks on machines that refuse registration, need none, or support nothing.
#![cfg(target_os = "linux")]

mod common;

use common::*;
use pinpool::regions::{self, Coverage};
use pinpool::sim::{Fault, Sim, SimBuilder};
use pinpool::{Backing, BackingInUse, Error};

/// A rig with a backing, whatever the environment says.
fn rig(backing: Backing, settings: impl FnOnce(SimBuilder) -> SimBuilder) -> Rig {
    Rig::with(settings(Sim::builder()).build(), |builder| builder.backing(backing))
}

fn confidential(builder: SimBuilder) -> SimBuilder {
    builder.confidential_computing(true)
}

fn registers(sim: &Sim) -> (u64, u64) {
    (sim.calls("cuMemHostRegister"), sim.calls("cuMemHostUnregister"))
}

fn allocates(sim: &Sim) -> (u64, u64) {
    (sim.calls("cuMemHostAlloc"), sim.calls("cuMemFreeHost"))
}

/// A round with a copy in flight: what is pooled is page-locked, clean, and never reused too early.
fn a_round(rig: &Rig) {
    let (stream, device) = (rig.context.stream(), rig.context.alloc(64 * KIB));
    let mut buffer = rig.pool.take(64 * KIB);
    assert!(buffer.is_pinned() && all_zero(&buffer));
    assert_eq!(regions::covering(&buffer), Coverage::Whole);
    buffer.copy_from_slice(&pattern(3, 64 * KIB));
    copy_to_device(&stream, &buffer, 64 * KIB, &device);
    buffer.record_last_use(&stream).unwrap();
    let address = buffer.as_ptr();
    drop(buffer);
    let other = rig.pool.take(64 * KIB);
    assert_ne!(other.as_ptr(), address, "it is in flight");
    drop(other);
    rig.sim.run_until_idle();
    assert_eq!(device.read(), pattern(3, 64 * KIB));
    rig.drain();
    assert!(all_zero(&rig.pool.take(64 * KIB)));
    rig.drain();
    rig.assert_balanced();
}

#[test]
fn where_registering_works_the_pool_registers_its_own_pages() {
    let rig = rig(Backing::Auto, |builder| builder);
    assert_eq!(rig.pool.stats().backing, BackingInUse::Undecided);
    let buffer = rig.pool.take(64 * KIB);
    let address = buffer.as_ptr();
    drop(buffer);
    rig.drain();
    let again = rig.pool.take(64 * KIB);
    assert_eq!(again.as_ptr(), address, "the buffer keeps its address");
    drop(again);
    rig.drain();
    a_round(&rig);
    assert_eq!(rig.pool.stats().backing, BackingInUse::Registered);
    assert_eq!(allocates(&rig.sim), (0, 0));
    rig.finish();
}

#[test]
fn where_the_driver_answers_801_memory_of_the_drivers_makes_the_same_journey() {
    let rig = rig(Backing::Auto, confidential);
    rig.shelve(64 * KIB, 2);
    a_round(&rig);
    let stats = rig.assert_balanced();
    assert_eq!(stats.backing, BackingInUse::HostPinned);
    assert_eq!((stats.registration_failures, stats.registered_bytes), (0, rig.sim.allocated_host_bytes()));
    assert_eq!(registers(&rig.sim), (1, 0), "asked once");
    rig.pool.clear();
    assert_eq!(rig.sim.allocated_host_bytes(), 0, "freed, not unregistered");
    let sim = rig.sim.clone();
    rig.finish();
    assert_eq!((sim.allocated_host_bytes(), allocates(&sim).0), (0, allocates(&sim).1));
}

#[test]
fn where_the_device_says_that_it_registers_nothing_it_is_not_asked_to() {
    let rig = rig(Backing::Auto, |builder| builder.attribute(99, 0));
    rig.shelve(64 * KIB, 1);
    a_round(&rig);
    assert_eq!(registers(&rig.sim), (0, 0));
    assert_eq!(rig.pool.stats().backing, BackingInUse::HostPinned);
    rig.finish();
}

#[test]
fn page_locking_by_name_uses_memory_of_the_drivers_too() {
    let rig = rig(Backing::Auto, confidential);
    // Zeroed in several steps, since the driver leaves there what it likes.
    let mut buffer = rig.pool.take_pinned(9 * MIB).unwrap();
    assert!(buffer.is_pinned() && buffer.driver_says_page_locked().unwrap() && all_zero(&buffer));
    buffer.fill(1);
    drop(buffer);
    assert_eq!(rig.pool.prewarm(64 * KIB, 3).unwrap(), 3);
    let buffers: Vec<_> = (0..3).map(|_| rig.pool.take(64 * KIB)).collect();
    assert!(buffers.iter().all(|buffer| buffer.is_pinned() && all_zero(buffer)));
    drop(buffers);
    rig.finish();
}

#[test]
fn an_explicit_choice_is_kept() {
    let chosen = rig(Backing::HostPinned, |builder| builder);
    chosen.shelve(64 * KIB, 1);
    a_round(&chosen);
    assert_eq!(registers(&chosen.sim), (0, 0));
    assert_eq!(chosen.pool.stats().backing, BackingInUse::HostPinned);
    chosen.finish();

    let refused = rig(Backing::Registered, confidential);
    drop(refused.pool.take(64 * KIB));
    refused.drain();
    assert!(!refused.pool.take(64 * KIB).is_pinned(), "no other memory in its place");
    let error = refused.pool.take_pinned(64 * KIB).unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_NOT_SUPPORTED (801)"), "{error}");
    assert_eq!(allocates(&refused.sim), (0, 0));
    refused.finish();
}

#[test]
fn where_neither_way_is_supported_buffers_are_pageable_and_pooled_and_nothing_is_tried_again() {
    for code in [801, 500] {
        let rig = rig(Backing::Auto, confidential);
        rig.sim.fail("cuMemHostAlloc", Fault::always(code));
        rig.shelve(64 * KIB, 1);
        let calls = (registers(&rig.sim), allocates(&rig.sim));
        for _ in 0..20 {
            let mut buffer = rig.pool.take(64 * KIB);
            assert!(!buffer.is_pinned() && all_zero(&buffer));
            buffer.fill(1);
            drop(buffer);
            rig.drain();
        }
        assert_eq!((registers(&rig.sim), allocates(&rig.sim)), calls, "a known answer");
        let stats = rig.assert_balanced();
        assert_eq!((stats.backing, stats.unpinned_hits), (BackingInUse::Pageable, 20));
        let error = rig.pool.take_pinned(64 * KIB).unwrap_err();
        assert!(matches!(&error, Error::NotPinned { reason, .. } if reason.contains("neither")), "{error}");
        rig.finish();
    }
}

#[test]
fn a_returned_pageable_buffer_is_there_for_the_next_take_where_nothing_is_page_locked() {
    let rig = rig(Backing::Auto, |builder| builder.attribute(100, 1));
    rig.shelve(64 * KIB, 1);
    let stream = rig.context.stream();
    let _cleaner = rig.pool.hold_cleaner();
    let mut buffer = rig.pool.take(64 * KIB);
    buffer.fill(9);
    buffer.record_last_use(&stream).unwrap();
    rig.sim.run_until_idle();
    let address = buffer.as_ptr();
    drop(buffer);
    let again = rig.pool.take(64 * KIB);
    assert!(again.as_ptr() == address && all_zero(&again), "harvested");
    assert_eq!(rig.pool.stats().harvested, 1);
}

#[test]
fn where_the_device_goes_by_the_hosts_page_tables_nothing_is_registered_and_every_copy_is_waited_for() {
    let rig = rig(Backing::Auto, |builder| builder.attribute(100, 1));
    rig.shelve(64 * KIB, 2);
    let (stream, device) = (rig.context.stream(), rig.context.alloc(64 * KIB));
    for with_record in [true, false] {
        let mut buffer = rig.pool.take(64 * KIB);
        assert!(!buffer.is_pinned() && all_zero(&buffer));
        buffer.copy_from_slice(&pattern(5, 64 * KIB));
        copy_to_device(&stream, &buffer, 64 * KIB, &device);
        assert_eq!(rig.sim.pending_operations(), 1, "the device reads it later, although it is pageable");
        if with_record {
            buffer.record_last_use(&stream).unwrap();
        }
        drop(buffer);
        if with_record {
            // A held stream would keep the context's own wait waiting for ever, so only this one is watched.
            let other = rig.pool.take(64 * KIB);
            assert!(all_zero(&other));
            drop(other);
            rig.sim.run_until_idle();
        }
        rig.drain();
        assert_eq!(device.read(), pattern(5, 64 * KIB), "not reused before it was read");
    }
    let stats = rig.assert_balanced();
    assert_eq!((stats.backing, stats.registered_bytes), (BackingInUse::HostPageTables, 0));
    assert_eq!((registers(&rig.sim), allocates(&rig.sim)), ((0, 0), (0, 0)));
    assert!(stats.to_string().contains("host's page tables"), "{stats}");

    // By name it is page-locked all the same.
    let pinned = rig.pool.take_pinned(MIB).unwrap();
    assert!(pinned.is_pinned());
    drop(pinned);
    rig.drain();
    assert_eq!(rig.pool.stats().backing, BackingInUse::HostPageTables);
    rig.finish();
}

#[test]
fn memory_of_the_drivers_that_cannot_be_had_or_freed_is_counted() {
    let rig = rig(Backing::Auto, confidential);
    rig.shelve(64 * KIB, 1);
    // Out of memory is not "unsupported": the next one is tried again.
    rig.sim.fail("cuMemHostAlloc", Fault::once(2));
    let two = [rig.pool.take(MIB), rig.pool.take(MIB)];
    drop(two);
    rig.drain();
    let stats = rig.assert_balanced();
    assert_eq!((stats.registration_failures, stats.backing), (1, BackingInUse::HostPinned));
    assert_eq!(stats.pooled_bytes, 64 * KIB + MIB, "one was freed, the other page-locked");

    rig.sim.fail("cuMemFreeHost", Fault::once(999));
    rig.pool.clear();
    let stats = rig.assert_balanced();
    assert_eq!(stats.unregistration_failures, 1);
    assert_eq!(stats.quarantined_pinned_bytes, rig.sim.allocated_host_bytes());
    rig.finish();
}

#[test]
fn the_budget_of_wsl_leaves_the_rest_pageable() {
    let rig = rig(Backing::Auto, |builder| builder.pinned_bytes_max(256 * KIB));
    rig.shelve(64 * KIB, 8);
    let stats = rig.assert_balanced();
    assert_eq!((stats.registered_bytes, stats.backing), (256 * KIB, BackingInUse::Registered));
    assert!(stats.registration_failures > 0);
    rig.finish();
}

#[test]
fn a_reset_of_the_context_takes_the_drivers_memory_and_the_pool_survives_it() {
    let rig = rig(Backing::HostPinned, |builder| builder);
    rig.shelve(64 * KIB, 2);
    rig.sim.cuda().cu_device_primary_ctx_reset(0).unwrap();
    let _again = rig.sim.context(0); // the same handle, and another context
    rig.pool.clear();
    assert_eq!(rig.sim.calls("cuMemFreeHost"), 0, "its addresses may be somebody else's by now");
    let stats = rig.pool.stats();
    assert!(stats.is_balanced(), "{stats:#?}");
    assert_eq!(
        (stats.quarantined_bytes, stats.registered_bytes),
        (128 * KIB, 0),
        "what is gone is not freed again"
    );
    drop(rig.pool.take(64 * KIB));
    assert!(rig.pool.drain(PATIENCE));
}
