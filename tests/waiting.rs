//! What the pool waits for before it touches a returned block: exactly the recorded events, and without a record
//! every context that it knows of.

#![allow(unsafe_code)] // `assume_quiescent` is an unsafe promise of the caller's.

mod common;

use common::{KIB, MIB, PATIENCE, Rig, all_zero, copy_to_device, lock_call, pattern, until};
use pinpool::sim::Sim;
use pinpool::{Error, PinnedPool};

const LEN: usize = 64 * KIB;

#[test]
fn every_recorded_stream_is_waited_for() {
    let rig = Rig::new();
    let (first, second) = (rig.context.stream(), rig.context.stream());
    let (one, two) = (rig.context.alloc(LEN), rig.context.alloc(LEN));
    let mut buffer = rig.pinned(LEN);
    let address = buffer.as_ptr();
    let bytes = pattern(1, LEN);
    buffer.copy_from_slice(&bytes);
    for (stream, device) in [(&first, &one), (&second, &two)] {
        stream.hold();
        copy_to_device(stream, &buffer, LEN, device);
        buffer.record_last_use(stream).unwrap();
    }
    drop(buffer);
    for stream in [&second, &first] {
        rig.sim.run_until_idle();
        assert_ne!(rig.pool.take(LEN).as_ptr(), address, "reused before both streams were done");
        stream.release();
    }
    rig.sim.run_until_idle();
    rig.drain();
    assert!(one.read() == bytes && two.read() == bytes);
    rig.finish();
}

#[test]
fn two_devices_in_one_pool_each_block_waits_for_its_own() {
    let rig = Rig::with(Sim::builder().devices(2).build(), |builder| builder);
    let other = rig.sim.context(1);
    rig.context.bind();
    let streams = [rig.context.stream(), other.stream()];
    let devices = [rig.context.alloc(LEN), other.alloc(LEN)];
    rig.shelve(LEN, 2);
    let mut addresses = Vec::new();
    let bytes: Vec<_> = (0..2).map(|index| pattern(index as u8, LEN)).collect();
    for index in 0..2 {
        let mut buffer = rig.pool.take(LEN);
        assert!(buffer.is_pinned());
        addresses.push(buffer.as_ptr());
        buffer.copy_from_slice(&bytes[index]);
        streams[index].hold();
        copy_to_device(&streams[index], &buffer, LEN, &devices[index]);
        buffer.record_last_use(&streams[index]).unwrap();
    }
    streams[1].release();
    rig.sim.run_until_idle();
    let ready = rig.pool.take(LEN);
    assert_eq!(ready.as_ptr(), addresses[1], "the block of the device that is done");
    assert!(all_zero(&ready));
    streams[0].release();
    rig.sim.run_until_idle();
    drop(ready);
    rig.drain();
    assert!(devices[0].read() == bytes[0] && devices[1].read() == bytes[1]);
    rig.finish();
}

#[test]
fn one_buffer_may_be_recorded_on_two_devices() {
    let rig = Rig::with(Sim::builder().devices(2).build(), |builder| builder);
    let other = rig.sim.context(1);
    let far = other.stream();
    rig.context.bind();
    let near = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    let address = buffer.as_ptr();
    far.hold();
    near.hold();
    buffer.record_last_use(&near).unwrap();
    buffer.record_last_use(&far).unwrap();
    drop(buffer);
    near.release();
    rig.sim.run_until_idle();
    assert_ne!(rig.pool.take(LEN).as_ptr(), address);
    far.release();
    rig.sim.run_until_idle();
    rig.drain();
    rig.finish();
}

#[test]
fn without_a_record_every_known_context_is_waited_for() {
    let rig = Rig::with(Sim::builder().devices(2).build(), |builder| builder);
    let other = rig.sim.context(1);
    let far = other.stream();
    let device = other.alloc(LEN);
    // The pool learns of the second context from this record alone.
    rig.pool.take(LEN).record_last_use(&far).unwrap();
    rig.context.bind();
    rig.sim.run_until_idle();
    rig.drain();

    let mut buffer = rig.pool.take(LEN);
    let address = buffer.as_ptr();
    let bytes = pattern(9, LEN);
    buffer.copy_from_slice(&bytes);
    far.hold();
    other.bind();
    copy_to_device(&far, &buffer, LEN, &device);
    rig.context.bind();
    // Forgotten: no record, and dropped where another context is current.
    drop(buffer);
    rig.sim.run_until_idle();
    assert!(!rig.pool.drain(std::time::Duration::from_millis(50)), "not waited for the other context");
    assert_ne!(rig.pool.take(LEN).as_ptr(), address);
    far.release();
    rig.drain();
    assert!(device.read() == bytes, "wrong bytes on the device");
    rig.finish();
}

#[test]
fn a_pageable_buffer_waits_for_its_records_too() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let mut buffer = rig.pool.take(LEN);
    assert!(!buffer.is_pinned());
    stream.hold();
    buffer.record_last_use(&stream).unwrap();
    rig.sim.stall(stream.handle(), std::time::Duration::ZERO);
    drop(buffer);
    rig.sim.run_until_idle();
    assert!(!rig.pool.drain(std::time::Duration::from_millis(50)), "dealt with before its record");
    assert_eq!(rig.sim.calls(lock_call()), 0);
    stream.release();
    rig.sim.run_until_idle();
    rig.drain();
    assert_eq!(rig.sim.calls(lock_call()), 1);
    rig.finish();
}

#[test]
fn a_forgotten_pageable_buffer_waits_where_the_device_reads_pageable_memory_itself() {
    for (reads, waits) in [(0, false), (1, true)] {
        let rig = Rig::with(Sim::builder().attribute(88, reads).build(), |builder| builder);
        let stream = rig.context.stream();
        stream.hold();
        rig.sim.stall(stream.handle(), std::time::Duration::ZERO);
        drop(rig.pool.take(LEN));
        let settled = rig.pool.drain(if waits { std::time::Duration::from_millis(50) } else { PATIENCE });
        assert_eq!(settled, !waits);
        stream.release();
        rig.finish();
    }
}

#[test]
fn a_mutable_access_waits_for_the_noted_reads() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let device = rig.context.alloc(LEN);
    let mut buffer = rig.pinned(LEN);
    let bytes = pattern(4, LEN);
    buffer.copy_from_slice(&bytes);
    stream.hold();
    copy_to_device(&stream, &buffer, LEN, &device);
    buffer.record_last_use(&stream).unwrap();
    assert!(!buffer.is_quiescent().unwrap());
    let _ = buffer[0]; // Reading needs no wait.
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            buffer.fill(0xee);
            buffer
        });
        // The writer asks the driver and finds the copy pending; a write before its end would show below.
        until("the writer asks", || rig.sim.calls("cuEventQuery") >= 3 || writer.is_finished());
        let waits = !writer.is_finished();
        stream.release();
        assert!(waits);
        rig.sim.run_until_idle();
        let buffer = writer.join().unwrap();
        assert!(buffer.is_quiescent().unwrap());
        buffer.wait().unwrap();
        drop(buffer);
    });
    assert!(device.read() == bytes, "the device read what was written later");
    rig.finish();
}

#[test]
fn wait_returns_when_the_noted_uses_are_done() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    stream.hold();
    buffer.record_last_use(&stream).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| buffer.wait());
        until("the waiter asks", || rig.sim.calls("cuEventQuery") >= 3 || waiter.is_finished());
        let waits = !waiter.is_finished();
        stream.release();
        assert!(waits);
        rig.sim.run_until_idle();
        waiter.join().unwrap().unwrap();
    });
    assert!(buffer.is_quiescent().unwrap());
    drop(buffer);
    rig.finish();
}

#[test]
fn a_proof_of_the_caller_replaces_every_wait() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    let address = buffer.as_ptr();
    stream.hold();
    buffer.record_last_use(&stream).unwrap();
    // SAFETY: nothing was enqueued that touches the buffer.
    unsafe { buffer.assume_quiescent() };
    assert!(buffer.is_quiescent().unwrap());
    drop(buffer);
    rig.drain();
    let mut buffer = rig.pool.take(LEN);
    assert_eq!(buffer.as_ptr(), address);
    // A record after the proof counts again.
    // SAFETY: as above.
    unsafe { buffer.assume_quiescent() };
    buffer.record_last_use(&stream).unwrap();
    drop(buffer);
    rig.sim.run_until_idle();
    assert_ne!(rig.pool.take(LEN).as_ptr(), address);
    stream.release();
    rig.sim.run_until_idle();
    rig.finish();
}

#[test]
fn one_context_wait_serves_all_that_wait_for_it() {
    let rig = Rig::new();
    rig.shelve(LEN, 50);
    let before = rig.pool.stats().context_waits;
    let hold = rig.pool.hold_cleaner();
    drop((0..50).map(|_| rig.pool.take(LEN)).collect::<Vec<_>>());
    let waits = rig.pool.hold_context_waits();
    drop(hold);
    assert!(
        !rig.pool.drain(std::time::Duration::from_millis(50)),
        "a context-wide wait was made in spite of the hold"
    );
    assert_eq!(rig.pool.stats().context_waits, before);
    drop(waits);
    rig.drain();
    let made = rig.pool.stats().context_waits - before;
    assert!((1..=2).contains(&made), "{made} waits for 50 blocks");
    rig.finish();
}

#[test]
fn an_event_is_never_recorded_again_before_its_completion() {
    let rig = Rig::new();
    let streams: Vec<_> = (0..4).map(|_| rig.context.stream()).collect();
    rig.shelve(LEN, 4);
    for round in 0..50 {
        let mut buffer = rig.pool.take(LEN);
        let stream = &streams[round % 4];
        if round % 3 == 0 {
            stream.hold()
        } else {
            stream.release()
        }
        buffer.record_last_use(stream).unwrap();
        buffer.record_last_use(&streams[(round + 1) % 4]).unwrap();
        drop(buffer);
        rig.sim.step();
    }
    streams.iter().for_each(|stream| stream.release());
    rig.sim.run_until_idle();
    rig.drain();
    let created = rig.sim.calls("cuEventCreate");
    for _ in 0..50 {
        let mut buffer = rig.pool.take(LEN);
        buffer.record_last_use(&streams[0]).unwrap();
        rig.sim.run_until_idle();
        drop(buffer);
        rig.drain();
    }
    assert_eq!(rig.sim.calls("cuEventCreate"), created, "events are reused");
    rig.finish();
}

#[test]
fn a_buffer_recorded_for_ever_keeps_few_events() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    for _ in 0..1000 {
        buffer.record_last_use(&stream).unwrap();
        rig.sim.run_until_idle();
    }
    assert!(rig.sim.calls("cuEventCreate") < 20, "{} events", rig.sim.calls("cuEventCreate"));
    drop(buffer);
    rig.finish();
}

#[test]
fn a_stream_of_another_device_simulation_is_refused_with_the_name_of_the_call() {
    let rig = Rig::new();
    let foreign = Sim::new();
    let stream = foreign.context(0).stream();
    let mut buffer = rig.pool.take(LEN);
    let error = buffer.record_last_use(&stream).unwrap_err();
    assert!(matches!(error, Error::ForeignStream { stream: "simulated", pool: "simulated", .. }), "{error}");
    let host = PinnedPool::builder().driver(pinpool::Driver::host_only()).build().unwrap();
    let error = host.take(1).record_last_use(&stream).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("record_last_use: the stream belongs to the simulated driver"), "{text}");
    assert!(text.contains("the host driver; use a buffer of a pool"), "{text}");
    // Whoever builds a pool has no buffer yet.
    let shared = std::sync::Arc::new(foreign.context(0).stream());
    let builder = PinnedPool::builder().driver(rig.sim.driver()).context_of(&shared);
    let text = builder.build().unwrap_err().to_string();
    assert!(text.starts_with("context_of: the stream belongs to another simulated driver"), "{text}");
    assert!(text.ends_with("give the builder the stream's driver, or a stream of its own"), "{text}");
    let backend = pinpool::backend::HostPinned::builder(&rig.sim.driver()).context_of(&stream).build();
    let text = backend.unwrap_err().to_string();
    assert!(text.contains("context_of: the stream belongs to another simulated driver"), "{text}");
    rig.context.bind();
    drop(buffer);
    rig.finish();
}

#[test]
fn the_cleaner_itself_waits_for_every_recorded_stream() {
    // As `every_recorded_stream_is_waited_for`, with no taker that would harvest the block first.
    let rig = Rig::new();
    let streams = [rig.context.stream(), rig.context.stream()];
    let devices = [rig.context.alloc(LEN), rig.context.alloc(LEN)];
    for order in [[0, 1], [1, 0]] {
        let mut buffer = rig.pinned(LEN);
        let bytes = pattern(2, LEN);
        buffer.copy_from_slice(&bytes);
        for (stream, device) in streams.iter().zip(&devices) {
            stream.hold();
            copy_to_device(stream, &buffer, LEN, device);
            buffer.record_last_use(stream).unwrap();
        }
        drop(buffer);
        streams[order[0]].release();
        rig.sim.run_until_idle();
        let asked = rig.sim.calls("cuEventQuery");
        until("the cleaner asks on", || {
            rig.sim.calls("cuEventQuery") > asked + 5 || rig.pool.stats().queued_buffers == 0
        });
        let queued = rig.assert_balanced().queued_buffers;
        streams[order[1]].release();
        rig.sim.run_until_idle();
        rig.drain();
        assert_eq!(queued, 1, "dealt with before both streams were done");
        assert!(devices.iter().all(|device| device.read() == bytes));
    }
    rig.finish();
}

#[test]
fn waits_and_evictions_give_their_events_back() {
    let rig = Rig::new();
    let stream = rig.context.stream();
    let mut buffer = rig.pinned(LEN);
    for round in 0..10 {
        buffer.record_last_use(&stream).unwrap();
        rig.sim.run_until_idle();
        buffer[0] = round; // waits for the event, and is done with it
    }
    drop(buffer);
    rig.drain();
    // The event that a block keeps for itself outlives the block.
    for _ in 0..10 {
        rig.pool.clear();
        let mut buffer = rig.pinned(LEN);
        buffer.record_last_use(&stream).unwrap();
        drop(buffer);
        rig.sim.run_until_idle();
        rig.drain();
    }
    assert_eq!(rig.sim.calls("cuEventCreate"), 1, "no two uses were outstanding at once");
    rig.finish();
}

/// What the tests of this file stand on: the simulated device sees which bytes are zeroed, step by step.
#[test]
fn bytes_zeroed_in_flight_are_found_where_they_are_and_nowhere_else() {
    const STEP: usize = 4 * MIB;
    for (in_flight, is_dirty) in [(STEP..2 * STEP, true), (3 * STEP..4 * STEP, false)] {
        let rig = Rig::new();
        let (stream, device) = (rig.context.stream(), rig.context.alloc(STEP));
        let mut buffer = rig.pinned(4 * STEP);
        stream.hold();
        // SAFETY: the memory stays mapped; that it is zeroed meanwhile is what is to be found.
        unsafe { stream.copy_to_device(&buffer[in_flight], &device) };
        buffer.set_dirty_len(2 * STEP);
        // SAFETY: a lie, to show that it is found.
        unsafe { buffer.assume_quiescent() };
        drop(buffer);
        rig.drain();
        rig.sim.expect_violations();
        let found = rig.sim.take_violations();
        assert_eq!(found.iter().any(|found| found.contains("zeroing")), is_dirty, "{found:?}");
        assert!(found.iter().any(|found| found.contains("handing out")), "{found:?}");
        stream.release();
        rig.sim.run_until_idle();
    }
}
