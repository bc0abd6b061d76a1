//! What cudarc's own copies note on a guard, and what a write, a read, a record and a drop make of it; where
//! cudarc's `SyncOnDrop::Record` would have recorded nothing, too.
//!
//! One process has one libcuda, so the tests of this file share a device and take turns at it.
#![cfg(all(feature = "cudarc", target_os = "linux"))]

mod interop;

use cudarc::driver::CudaContext;
use interop::{LEN, MODES, Mode, Rig, panic_of, pattern, until};
use pinpool::{Driver, Error, PinnedPool};
use std::time::Duration;

#[test]
fn segments_through_one_buffer_arrive_whole_on_a_hit_as_on_a_miss() {
    for mode in MODES {
        let rig = Rig::new(mode);
        let segments: Vec<_> = (0..4).map(|seed| pattern(seed, LEN)).collect();
        for hit in [false, true] {
            let mut devices: Vec<_> = segments.iter().map(|_| rig.device(LEN)).collect();
            let mut buffer = if hit { rig.filled(LEN, &segments[0]) } else { rig.pool.take(LEN) };
            assert_eq!(buffer.is_pinned(), hit);
            for (segment, device) in segments.iter().zip(&mut devices) {
                // The first has nothing to wait for.
                match hit && !std::ptr::eq(segment, &segments[0]) {
                    true => rig.must_wait(|| buffer.copy_from_slice(segment)),
                    false => buffer.copy_from_slice(segment),
                }
                if hit {
                    rig.hold();
                }
                rig.stream.memcpy_htod(&buffer, device).unwrap();
            }
            rig.release();
            drop(buffer);
            for (segment, device) in segments.iter().zip(&devices) {
                assert!(rig.on_device(device) == *segment, "{mode:?}: wrong bytes on the device");
            }
            rig.drain();
        }
        rig.finish();
    }
}

#[test]
fn every_kind_of_write_waits_and_a_read_does_not() {
    let rig = Rig::new(Mode::Untracked);
    let bytes = pattern(1, LEN);
    let mut device = rig.device(LEN);
    let mut buffer = rig.filled(LEN, &bytes);
    type Write = fn(&mut pinpool::PinnedBuffer);
    let writes: [Write; 4] = [
        |buffer| buffer[0] = 9,
        |buffer| _ = buffer.view_mut(..10),
        |buffer| _ = buffer.writer(),
        |buffer| buffer.as_mut_slice_of::<u64>().unwrap()[0] = 9,
    ];
    for write in writes {
        rig.hold();
        rig.stream.memcpy_htod(&buffer, &mut device).unwrap();
        assert_eq!(buffer[1], bytes[1], "a read does not wait for the device's read");
        assert!(!buffer.is_quiescent().unwrap());
        rig.must_wait(|| write(&mut buffer));
        assert!(buffer.is_quiescent().unwrap());
    }
    // Waited for once: a later write asks nothing.
    rig.fake.reset_calls();
    buffer.fill(1);
    assert_eq!(rig.fake.total_calls(), 0);
    drop(buffer);
    rig.finish();
}

#[test]
fn a_copy_from_a_mutable_view_is_noted_and_the_view_s_next_write_waits() {
    let rig = Rig::new(Mode::Untracked);
    let bytes = pattern(1, LEN);
    let mut device = rig.device(LEN);
    let mut buffer = rig.filled(LEN, &bytes);
    let mut view = buffer.view_mut(..);
    rig.hold();
    rig.stream.memcpy_htod(&view, &mut device).unwrap();
    rig.must_wait(|| view[0] = 9);
    assert!(rig.on_device(&device) == bytes, "it was written while the device read it");
    // Nothing is copied from none of it, and nothing is noted.
    rig.hold();
    rig.stream.memcpy_htod(&buffer.view_mut(..0), &mut device).unwrap();
    assert!(buffer.is_quiescent().unwrap());
    rig.release();
    drop(buffer);
    rig.finish();
}

#[test]
fn a_wait_by_itself_settles_the_notes_but_not_those_made_since() {
    let rig = Rig::new(Mode::Tracked);
    let mut device = rig.device(LEN);
    let buffer = rig.filled(LEN, &pattern(1, LEN));
    rig.hold();
    rig.stream.memcpy_htod(&buffer, &mut device).unwrap();
    rig.must_wait(|| buffer.wait().unwrap());
    assert!(buffer.is_quiescent().unwrap());
    rig.hold();
    rig.stream.memcpy_htod(&buffer, &mut device).unwrap();
    assert!(!buffer.is_quiescent().unwrap());
    // While one thread waits, another copies again on the same stream.
    rig.fake.reset_calls();
    std::thread::scope(|scope| {
        let wait = scope.spawn(|| buffer.wait().unwrap());
        until("the wait", || rig.fake.calls("cuCtxSynchronize") > 0);
        rig.stream.memcpy_htod(&buffer, &mut device).unwrap();
        rig.release();
        wait.join().unwrap();
    });
    assert!(!buffer.is_quiescent().unwrap(), "the newer note is settled with the older one");
    drop(buffer);
    rig.finish();
}

#[test]
fn where_cudarc_records_nothing_the_note_stands() {
    // An error stored while it enqueues.
    let rig = Rig::new(Mode::Tracked);
    let mut device = rig.device(LEN);
    let mut buffer = rig.filled(LEN, &pattern(1, LEN));
    rig.hold();
    rig.fake.fail("cuStreamWaitEvent", 1, 999);
    rig.stream.memcpy_htod(&buffer, &mut device).unwrap();
    rig.fake.clear_faults();
    assert!(rig.context.check_err().is_err(), "no error was stored");
    rig.must_wait(|| buffer.fill(2));
    assert!(rig.on_device(&device) == pattern(1, LEN));
    drop(buffer);
    rig.finish();

    // The last created stream is dropped on another thread, which ends cudarc's managing.
    let rig = Rig::new(Mode::DefaultStream);
    let last = rig.context.new_stream().unwrap();
    let mut device = rig.device(LEN);
    let mut buffer = rig.filled(LEN, &pattern(1, LEN));
    rig.hold();
    assert!(rig.context.is_managing_stream_synchronization());
    rig.stream.memcpy_htod(&buffer, &mut device).unwrap();
    std::thread::spawn(move || drop(last)).join().unwrap();
    assert!(!rig.context.is_managing_stream_synchronization());
    rig.must_wait(|| buffer.fill(2));
    assert!(rig.on_device(&device) == pattern(1, LEN));
    drop(buffer);
    rig.finish();
}

#[test]
fn a_record_covers_the_notes_of_its_own_stream_and_no_others() {
    let rig = Rig::new(Mode::Untracked);
    let other = rig.context.new_stream().unwrap();
    let (mut one, mut two) = (rig.device(LEN), rig.device(LEN));
    let mut buffer = rig.filled(LEN, &pattern(1, LEN));
    rig.stream.memcpy_htod(&buffer, &mut one).unwrap();
    other.memcpy_htod(&buffer, &mut two).unwrap();
    buffer.record_last_use(&rig.stream).unwrap();
    rig.fake.run_until_idle();
    assert!(!buffer.is_quiescent().unwrap(), "the other stream's copy is noted still");
    buffer.record_last_use(&other).unwrap();
    rig.fake.run_until_idle();
    assert!(buffer.is_quiescent().unwrap(), "both are covered");
    // A copy after the record notes again.
    rig.stream.memcpy_htod(&buffer, &mut one).unwrap();
    assert!(!buffer.is_quiescent().unwrap());
    buffer.record_last_use(&rig.stream).unwrap();
    rig.fake.reset_calls();
    drop(buffer);
    rig.fake.run_until_idle();
    rig.drain();
    assert_eq!(rig.fake.calls("cuCtxSynchronize"), 0, "all is recorded");

    // A stream that got the handle of one that is gone is another stream.
    let mut buffer = rig.filled(LEN, &pattern(2, LEN));
    let gone = other.cu_stream() as usize;
    other.memcpy_htod(&buffer, &mut two).unwrap();
    drop(other);
    let next = rig.context.new_stream().unwrap();
    assert_eq!(next.cu_stream() as usize, gone, "the handle is not reused, so nothing is shown");
    buffer.record_last_use(&next).unwrap();
    rig.fake.run_until_idle();
    assert!(!buffer.is_quiescent().unwrap(), "matched by a handle that was reused");
    drop((buffer, one, two));
    rig.finish();
}

#[test]
fn several_threads_may_copy_from_one_buffer_and_a_write_waits_for_all() {
    let rig = Rig::new(Mode::Tracked);
    let bytes = pattern(1, LEN);
    let mut devices: Vec<_> = (0..4).map(|_| rig.device(LEN)).collect();
    let streams: Vec<_> = (0..4).map(|_| rig.context.new_stream().unwrap()).collect();
    let mut buffer = rig.filled(LEN, &bytes);
    streams.iter().for_each(|stream| rig.fake.hold(stream.cu_stream() as usize));
    std::thread::scope(|scope| {
        for (device, stream) in devices.iter_mut().zip(&streams) {
            let buffer = &buffer;
            scope.spawn(move || stream.memcpy_htod(buffer, device).unwrap());
        }
    });
    // The last one is the one that `must_wait` releases.
    streams[1..].iter().for_each(|stream| rig.fake.release(stream.cu_stream() as usize));
    let rig = Rig { stream: streams[0].clone(), ..rig };
    rig.must_wait(|| buffer.fill(7));
    assert!(devices.iter().all(|device| rig.on_device(device) == bytes), "wrong bytes on the device");
    drop((buffer, devices, streams));
    rig.finish();
}

#[test]
fn two_contexts_and_one_pool_each_block_waits_for_its_own() {
    let rig = Rig::new(Mode::Tracked);
    let far = CudaContext::new(1).unwrap();
    let far_stream = far.new_stream().unwrap();
    let mut far_device = far_stream.alloc_zeros::<u8>(LEN).unwrap();
    far_stream.synchronize().unwrap();
    let mut device = rig.device(LEN);
    drop([rig.pool.take(LEN), rig.pool.take(LEN)]);
    rig.drain();
    for round in 0..3 {
        let bytes = [pattern(round, LEN), pattern(round + 50, LEN)];
        let [mut near, mut other] = [rig.pool.take(LEN), rig.pool.take(LEN)];
        assert!(near.is_pinned() && other.is_pinned());
        near.copy_from_slice(&bytes[0]);
        other.copy_from_slice(&bytes[1]);
        rig.context.bind_to_thread().unwrap();
        rig.hold();
        // In turns, so that an event pool of both would give one context the other's event.
        for far_is_next in [round % 2 == 1, round % 2 == 0] {
            match far_is_next {
                true => other.copy_to(.., &far_stream, &mut far_device).unwrap(),
                false => near.copy_to(.., &rig.stream, &mut device).unwrap(),
            }
        }
        let current = cudarc::driver::result::ctx::get_current().unwrap();
        assert_eq!(current, Some(rig.context.cu_ctx()), "the caller's context is restored");
        rig.fake.run_until_idle();
        assert!(other.is_quiescent().unwrap() && !near.is_quiescent().unwrap());
        let (held, free) = (near.as_ptr(), other.as_ptr());
        drop((near, other));
        // The block of the device that is done is there at once; the other is not.
        let others: Vec<_> = (0..4).map(|_| rig.pool.take(LEN)).collect();
        assert!(others.iter().any(|other| other.as_ptr() == free), "waited for another context");
        assert!(others.iter().all(|other| other.as_ptr() != held), "reused in flight");
        drop(others);
        rig.release();
        rig.fake.run_until_idle();
        rig.drain();
        rig.context.bind_to_thread().unwrap();
        assert!(
            rig.on_device(&device) == bytes[0] && far_stream.clone_dtoh(&far_device).unwrap() == bytes[1]
        );
    }
    // Without a record, dropped where the other context is current: every context is waited for.
    let mut buffer = rig.filled(LEN, &pattern(9, LEN));
    buffer[0] = 9;
    rig.hold();
    rig.stream.memcpy_htod(&buffer[..], &mut device).unwrap();
    far.bind_to_thread().unwrap();
    let address = buffer.as_ptr();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            far.bind_to_thread().unwrap();
            drop(buffer);
        });
    });
    assert!(!rig.pool.drain(Duration::from_millis(30)), "the context of the copy was not waited for");
    assert_ne!(rig.pool.take(LEN).as_ptr(), address);
    rig.release();
    rig.drain();
    assert_eq!(rig.on_device(&device)[1..], pattern(9, LEN)[1..]);
    drop((device, far_device));
    rig.finish();
}

#[test]
fn while_a_stream_captures_a_write_panics_and_says_why() {
    let rig = Rig::new(Mode::Untracked);
    let mut device = rig.device(LEN);
    let bytes = pattern(1, LEN);
    let mut buffer = rig.filled(LEN, &bytes);
    rig.fake.pretend_capture(rig.handle(), true);
    // Ours refuse, and enqueue nothing.
    rig.fake.reset_calls();
    assert_eq!(buffer.copy_to(.., &rig.stream, &mut device).unwrap_err(), Error::Capturing);
    let (error, back) = buffer.download(&rig.stream, &device).unwrap_err();
    assert_eq!((error, rig.fake.calls("cuMemcpyHtoDAsync")), (Error::Capturing, 0));
    buffer = back;
    buffer[0] = bytes[0];

    rig.stream.memcpy_htod(&buffer, &mut device).unwrap();
    assert_eq!(rig.fake.calls("cuStreamGetId"), 0, "asked of a stream that captures");
    let message = panic_of(|| buffer[0] = 1);
    assert!(message.contains("captured into a CUDA graph"), "{message}");
    assert!(buffer[..] == bytes[..], "a read does not disturb it");
    assert_eq!(buffer.wait().unwrap_err(), Error::Capturing);
    assert!(!buffer.is_quiescent().unwrap());
    rig.fake.pretend_capture(rig.handle(), false);
    drop(buffer);
    rig.fake.run_until_idle();
    rig.drain();
    assert_eq!(rig.pool.stats().quarantined_bytes, LEN, "a replay may read it again at any time");

    // A copy into the buffer: a read panics too.
    let mut buffer = rig.filled(LEN, &bytes);
    rig.fake.pretend_capture(rig.handle(), true);
    rig.stream.memcpy_dtoh(&device, &mut buffer).unwrap();
    assert!(panic_of(|| _ = buffer[0]).contains("captured into a CUDA graph"));
    assert_eq!(buffer.record_last_use(&rig.stream).unwrap_err(), Error::Capturing);
    rig.fake.pretend_capture(rig.handle(), false);
    drop(buffer);
    rig.drain();
    assert_eq!(rig.pool.stats().quarantined_bytes, 2 * LEN);
    assert!(rig.pool.shutdown().completed);
    rig.fake.assert_clean();
}

#[test]
fn while_context_waits_are_held_a_write_that_needs_one_panics_and_a_recorded_one_does_not() {
    let rig = Rig::new(Mode::Untracked);
    let mut device = rig.device(LEN);
    let mut buffer = rig.filled(LEN, &pattern(1, LEN));
    let hold = rig.pool.hold_context_waits();
    rig.stream.memcpy_htod(&buffer, &mut device).unwrap();
    assert!(panic_of(|| buffer[0] = 1).contains("hold_context_waits"));
    assert_eq!(buffer.wait().unwrap_err(), Error::ContextWaitsHeld);
    buffer.record_last_use(&rig.stream).unwrap();
    rig.stepping(|| buffer[0] = 1);
    drop((hold, buffer));
    rig.finish();
}

#[test]
fn a_pool_of_another_driver_takes_cudarcs_copies_too() {
    let rig = Rig::new(Mode::Tracked);
    let mut device = rig.device(LEN);
    let plain = PinnedPool::builder().driver(Driver::host_only()).build().unwrap();
    let mut buffer = plain.take(LEN);
    buffer.copy_from_slice(&pattern(1, LEN));
    rig.stream.memcpy_htod(&buffer, &mut device).unwrap();
    assert!(matches!(
        buffer.copy_to(.., &rig.stream, &mut device).unwrap_err(),
        Error::ForeignStream { pool: "host", .. }
    ));
    buffer.fill(2);
    assert!(rig.on_device(&device) == pattern(1, LEN));
    drop(buffer);
    rig.finish();
}

/// It may be the same device under another name.
#[test]
fn what_cudarc_copied_from_a_pool_of_another_driver_waits_for_everything_besides_its_record() {
    let rig = Rig::new(Mode::Tracked);
    let mut device = rig.device(LEN);
    let sim = pinpool::sim::Sim::new();
    let context = sim.context(0);
    context.bind();
    let (stream, other) = (context.stream(), context.stream());
    let pool = PinnedPool::builder().driver(sim.driver()).build().unwrap();
    let mut buffer = pool.take_pinned(LEN).unwrap();
    rig.stream.memcpy_htod(&buffer, &mut device).unwrap();
    buffer.record_last_use(&stream).unwrap();
    sim.run_until_idle();
    other.hold();
    sim.stall(other.handle(), Duration::ZERO);
    drop(buffer);
    let early = pool.drain(Duration::from_millis(50));
    other.release();
    assert!(!early, "what was recorded answers for nothing else");
    assert!(pool.drain(Duration::from_secs(60)) && pool.shutdown().completed);
    drop(device);
    rig.finish();
}

#[test]
fn a_note_that_no_record_covers_is_waited_for_after_the_drop() {
    let rig = Rig::new(Mode::Untracked);
    let other = rig.context.new_stream().unwrap();
    let (mut one, mut two) = (rig.device(LEN), rig.device(LEN));
    let mut buffer = rig.filled(LEN, &pattern(6, LEN));
    let address = buffer.as_ptr();
    rig.fake.hold(other.cu_stream() as usize);
    other.memcpy_htod(&buffer, &mut two).unwrap();
    rig.stream.memcpy_htod(&buffer, &mut one).unwrap();
    buffer.record_last_use(&rig.stream).unwrap();
    rig.fake.reset_calls();
    drop(buffer);
    rig.fake.run_until_idle();
    until("a wait for the other stream", || rig.fake.calls("cuCtxSynchronize") > 0);
    assert_ne!(rig.pool.take(LEN).as_ptr(), address, "reused although the other stream reads it");
    rig.fake.release(other.cu_stream() as usize);
    rig.fake.run_until_idle();
    rig.drain();
    assert!(rig.on_device(&one) == pattern(6, LEN) && rig.on_device(&two) == pattern(6, LEN));
    drop((one, two));
    rig.finish();
}
