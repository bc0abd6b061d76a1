//! What the guard itself waits for and proves: mutable accesses of every kind, failed records, proofs of the caller.
#![allow(unsafe_code)] // `assume_quiescent` is a promise.

mod common;

use common::{KIB, Rig, copy_to_device, pattern, until};
use pinpool::sim::Fault;
use std::io::Write;

const LEN: usize = 64 * KIB;

/// Shows that `write` waits for a held copy of the buffer: the device gets the bytes from before.
fn waits_for_the_copy(write: impl FnOnce(&mut pinpool::PinnedBuffer) + Send) {
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = rig.pinned(LEN);
    let bytes = pattern(4, LEN);
    buffer.copy_from_slice(&bytes);
    stream.hold();
    copy_to_device(&stream, &buffer, LEN, &device);
    buffer.record_last_use(&stream).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            write(&mut buffer);
            buffer
        });
        until("the writer asks", || rig.sim.calls("cuEventQuery") >= 3 || writer.is_finished());
        let waits = !writer.is_finished();
        stream.release();
        rig.sim.run_until_idle();
        drop(writer.join().unwrap());
        assert!(waits, "the write did not wait");
    });
    assert!(device.read() == bytes, "the device read what was written later");
    rig.finish();
}

#[test]
fn every_kind_of_mutable_access_waits() {
    waits_for_the_copy(|buffer| buffer.writer().write_all(&[0xee; 100]).unwrap());
    waits_for_the_copy(|buffer| buffer.as_mut_slice_of::<u64>().unwrap().fill(1));
    waits_for_the_copy(|buffer| buffer.as_mut().fill(1));
    waits_for_the_copy(|buffer| buffer[LEN - 1] = 0);
}

#[test]
fn a_write_after_a_failed_record_waits_for_every_context_once() {
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = rig.pinned(LEN);
    let bytes = pattern(5, LEN);
    buffer.copy_from_slice(&bytes);
    stream.hold();
    copy_to_device(&stream, &buffer, LEN, &device);
    rig.sim.fail("cuEventRecord", Fault::once(999));
    buffer.record_last_use(&stream).unwrap_err();
    let before = rig.sim.calls("cuCtxSynchronize");
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            rig.context.bind();
            buffer.fill(0xee);
            buffer[7] = 1;
        });
        until("the writer waits", || rig.sim.calls("cuCtxSynchronize") > before || writer.is_finished());
        let waits = !writer.is_finished();
        stream.release();
        rig.sim.run_until_idle();
        writer.join().unwrap();
        assert!(waits, "the write did not wait");
    });
    assert!(device.read() == bytes, "the device read what was written later");
    assert_eq!(rig.sim.calls("cuCtxSynchronize") - before, 1, "waited for again at each access");
    assert!(buffer.is_quiescent().unwrap());
    drop(buffer);
    rig.finish();
}

#[test]
fn a_write_makes_a_proof_worthless() {
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = rig.pinned(LEN);
    let address = buffer.as_ptr();
    // SAFETY: nothing was enqueued that touches the buffer.
    unsafe { buffer.assume_quiescent() };
    let bytes = pattern(6, LEN);
    buffer.copy_from_slice(&bytes);
    stream.hold();
    copy_to_device(&stream, &buffer, LEN, &device);
    // Forgotten: the proof was about the time before the write.
    drop(buffer);
    rig.sim.run_until_idle();
    assert!(!rig.pool.drain(std::time::Duration::from_millis(50)), "not waited for");
    assert_ne!(rig.pool.take(LEN).as_ptr(), address);
    stream.release();
    rig.drain();
    assert!(device.read() == bytes, "wrong bytes on the device");
    rig.finish();
}

#[test]
fn what_the_device_wrote_through_no_slice_reaches_no_later_taker() {
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
    let mut buffer = rig.pinned(LEN);
    let bytes = std::ptr::slice_from_raw_parts_mut(buffer.as_ptr().cast_mut(), LEN);
    // SAFETY: cuMemcpyDtoHAsync into the buffer's memory, to which no reference exists until it is done.
    unsafe { stream.copy_to_host(&device, bytes) };
    buffer.record_last_use(&stream).unwrap();
    rig.sim.run_until_idle();
    assert!(!common::all_zero(&buffer), "this test is about bytes that the device wrote");
    drop(buffer);
    rig.drain();
    assert!(common::all_zero(&rig.pool.take(LEN)), "stale bytes reached the next taker");
    rig.finish();
}
