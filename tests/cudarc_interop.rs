//! Every way to copy, in both directions: the stream is held, the guard is dropped, the pool comes under
//! pressure, the stream is released, and the right bytes are on the other side; no early zeroing, reuse,
//! unregistering or freeing, by the checks of the simulated device.
//!
//! One process has one libcuda, so the tests of this file share a device and take turns at it. It moves only
//! when it is stepped, or when somebody waits for it.
#![cfg(all(feature = "cudarc", target_os = "linux"))]
#![allow(unsafe_code)] // Device memory of another element type.

mod interop;

use cudarc::driver::{CudaSlice, HostSlice};
use interop::{LEN, MODES, Mode, PRESSURES, Pressure, Rig, panic_of, pattern};
use pinpool::pin::{self, Pinned};
use pinpool::{Driver, PinnedBuffer};

/// A way to copy a buffer to the device, with the drop of the guard.
type Upload = fn(&Rig, PinnedBuffer, &mut CudaSlice<u8>);

const UPLOADS: [(&str, Upload); 10] = [
    ("memcpy_htod of the guard", |rig, buffer, device| rig.stream.memcpy_htod(&buffer, device).unwrap()),
    ("memcpy_htod of a view", |rig, buffer, device| {
        rig.stream.memcpy_htod(&buffer.view(..device.len()), device).unwrap();
    }),
    ("memcpy_htod of a typed view", |rig, buffer, device| {
        let view = buffer.view_of::<u32>(..device.len() / 4).unwrap();
        // SAFETY: plain numbers of the same total size.
        let mut device = unsafe { device.transmute_mut::<u32>(view.len()) }.unwrap();
        rig.stream.memcpy_htod(&view, &mut device).unwrap();
    }),
    ("memcpy_htod of a slice, which tracks nothing", |rig, buffer, device| {
        rig.stream.memcpy_htod(&buffer[..], device).unwrap();
    }),
    ("memcpy_htod of the guard and of a slice on another stream", |rig, buffer, device| {
        rig.stream.memcpy_htod(&buffer[..], device).unwrap();
        let mut other = rig.context.default_stream().alloc_zeros::<u8>(buffer.len()).unwrap();
        rig.context.default_stream().memcpy_htod(&buffer, &mut other).unwrap();
    }),
    ("clone_htod", |rig, buffer, device| *device = rig.stream.clone_htod(&buffer).unwrap()),
    ("copy_to", |rig, mut buffer, device| buffer.copy_to(.., &rig.stream, device).unwrap()),
    ("memcpy_htod and copy_to", |rig, mut buffer, device| {
        rig.stream.memcpy_htod(&buffer, device).unwrap();
        buffer.copy_to(.., &rig.stream, device).unwrap();
    }),
    ("memcpy_htod, and copy_to on another stream", |rig, mut buffer, device| {
        rig.stream.memcpy_htod(&buffer, device).unwrap();
        let mut elsewhere = rig.other.alloc_zeros::<u8>(buffer.len()).unwrap();
        buffer.copy_to(.., &rig.other, &mut elsewhere).unwrap();
    }),
    ("upload", |rig, buffer, device| buffer.upload(.., &rig.stream, device).unwrap()),
];

#[test]
fn a_dropped_buffer_is_not_touched_before_its_copy_to_the_device_is_done() {
    for mode in MODES {
        for (name, upload) in UPLOADS {
            for pressure in PRESSURES {
                // Also a length that is no power of two, from `take_exact`.
                for len in [LEN, LEN - 12] {
                    println!("{mode:?}, {name}, {pressure:?}, {len}");
                    uploaded(mode, upload, pressure, len);
                }
            }
        }
    }
}

fn uploaded(mode: Mode, upload: Upload, pressure: Pressure, len: usize) {
    let rig = Rig::new(mode);
    let bytes = pattern(1, len);
    let mut device = rig.device(len);
    let buffer = rig.filled(len, &bytes);
    let address = buffer.as_ptr() as usize;
    rig.hold();
    upload(&rig, buffer, &mut device);
    pressure.apply(&rig, address, len);
    assert!(rig.on_device(&device) == bytes, "wrong bytes on the device");
    rig.finish();
}

#[test]
fn a_pageable_buffer_is_copied_before_the_call_returns_and_waits_for_no_context() {
    for (name, upload) in UPLOADS {
        println!("{name}");
        let rig = Rig::new(Mode::Tracked);
        let mut device = rig.device(LEN);
        let mut buffer = rig.pool.take(LEN);
        assert!(!buffer.is_pinned());
        let bytes = pattern(2, LEN);
        buffer.copy_from_slice(&bytes);
        rig.fake.reset_calls();
        upload(&rig, buffer, &mut device);
        rig.fake.run_until_idle();
        rig.drain();
        assert_eq!(rig.fake.calls("cuCtxSynchronize"), 0, "waited for a context in vain");
        assert!(rig.on_device(&device) == bytes);
        rig.finish();
    }
}

/// A way to copy to the host that leaves the copy under way, with the drop of what holds the buffer.
type Download = fn(&Rig, PinnedBuffer, &CudaSlice<u8>);

const DOWNLOADS: [(&str, Download); 4] = [
    ("download", |rig, buffer, device| drop(buffer.download(&rig.stream, device).unwrap())),
    ("memcpy_dtoh whose wait cudarc skips", |rig, mut buffer, device| {
        skip_cudarcs_wait(rig, || rig.stream.memcpy_dtoh(device, &mut buffer).unwrap());
    }),
    ("memcpy_dtoh into a view whose wait cudarc skips", |rig, mut buffer, device| {
        let mut view = buffer.view_mut(..device.len());
        skip_cudarcs_wait(rig, || rig.stream.memcpy_dtoh(device, &mut view).unwrap());
    }),
    ("memcpy_dtoh of a slice, which tracks nothing", |rig, mut buffer, device| {
        rig.stream.memcpy_dtoh(device, &mut buffer[..]).unwrap();
    }),
];

/// An error that is stored in the context while cudarc enqueues makes it return without waiting.
fn skip_cudarcs_wait(rig: &Rig, copy: impl FnOnce()) {
    rig.fake.fail("cuStreamWaitEvent", 1, 999);
    copy();
    rig.fake.clear_faults();
    assert!(rig.context.check_err().is_err(), "cudarc stored no error, so it waited");
}

#[test]
fn a_dropped_buffer_is_not_touched_before_its_copy_from_the_device_is_done() {
    for (name, download) in DOWNLOADS {
        for pressure in PRESSURES {
            println!("{name}, {pressure:?}");
            let rig = Rig::new(Mode::Tracked);
            let device = rig.stream.clone_htod(&pattern(3, LEN)).unwrap();
            rig.stream.synchronize().unwrap();
            let buffer = rig.filled(LEN, &pattern(4, LEN));
            let address = buffer.as_ptr() as usize;
            rig.hold();
            download(&rig, buffer, &device);
            pressure.apply(&rig, address, LEN);
            rig.fake.run_until_idle();
            rig.drain();
            // Had it been zeroed before the copy, the copy's bytes would be there.
            assert!(rig.pool.take(LEN).iter().all(|byte| *byte == 0), "old bytes reach the next taker");
            rig.finish();
        }
    }
}

#[test]
fn memcpy_dtoh_into_the_guard_waits_and_so_does_a_read_when_cudarc_did_not() {
    for mode in MODES {
        let rig = Rig::new(mode);
        let bytes = pattern(5, LEN);
        let device = rig.stream.clone_htod(&bytes).unwrap();
        rig.stream.synchronize().unwrap();
        let mut buffer = rig.filled(LEN, &pattern(6, LEN));
        rig.hold();
        rig.must_wait(|| rig.stream.memcpy_dtoh(&device, &mut buffer).unwrap());
        assert!(rig.stepping(|| buffer[..] == bytes[..]));
        assert!(buffer.is_quiescent().unwrap(), "the read has waited for the note");

        buffer.fill(1);
        rig.hold();
        let mut view = buffer.view_mut(..);
        rig.must_wait(|| rig.stream.memcpy_dtoh(&device, &mut view).unwrap());
        assert!(rig.stepping(|| view[..] == bytes[..]));
        drop(buffer);
        rig.finish();
    }
    let rig = Rig::new(Mode::Tracked);
    let bytes = pattern(7, LEN);
    let device = rig.stream.clone_htod(&bytes).unwrap();
    rig.stream.synchronize().unwrap();
    let mut buffer = rig.filled(LEN, &pattern(8, LEN));
    // A plain read, from several threads at once.
    rig.hold();
    skip_cudarcs_wait(&rig, || rig.stream.memcpy_dtoh(&device, &mut buffer).unwrap());
    let both = rig.must_wait(|| {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| buffer[..] == bytes[..]);
            buffer[..] == bytes[..] && other.join().unwrap()
        })
    });
    assert!(both, "read before the device had written");
    // A read after a record that covers the note: it waits for the record.
    buffer.fill(1);
    rig.hold();
    skip_cudarcs_wait(&rig, || rig.stream.memcpy_dtoh(&device, &mut buffer).unwrap());
    buffer.record_last_use(&rig.stream).unwrap();
    assert!(rig.must_wait(|| buffer[..] == bytes[..]), "read before the device had written");
    assert_eq!(rig.fake.calls("cuCtxSynchronize"), 0, "the record covers the note");
    // The device reads what it has not written yet: cudarc's next copy waits for it too.
    rig.hold();
    skip_cudarcs_wait(&rig, || rig.stream.memcpy_dtoh(&device, &mut buffer).unwrap());
    let mut copy = rig.context.default_stream().alloc_zeros::<u8>(LEN).unwrap();
    rig.must_wait(|| rig.context.default_stream().memcpy_htod(&buffer, &mut copy).unwrap());
    assert!(rig.on_device(&copy) == bytes);
    drop(buffer);
    rig.finish();
}

#[test]
fn pinned_memory_of_ones_own_is_neither_unregistered_nor_freed_in_flight() {
    let rig = Rig::new(Mode::Untracked);
    let driver = Driver::cuda().unwrap();
    let values: Vec<u32> = (1..=LEN as u32 / 4).collect();
    let mut device = rig.stream.alloc_zeros::<u32>(values.len()).unwrap();
    rig.stream.synchronize().unwrap();
    let mut pinned = Pinned::new(&driver, values.clone()).unwrap();
    rig.hold();
    rig.stream.memcpy_htod(&pinned, &mut device).unwrap();
    // A write waits for the read.
    rig.must_wait(|| pinned[0] = 77);
    assert_eq!(rig.stream.clone_dtoh(&device).unwrap(), values);

    rig.hold();
    rig.stream.memcpy_htod(&pinned, &mut device).unwrap();
    drop(pinned);
    rig.fake.run_until_idle();
    assert!(!pin::drain(std::time::Duration::from_millis(30)), "not waited for");
    assert_eq!(rig.registered(), LEN, "unregistered in flight");
    rig.fake.assert_clean();
    rig.release();
    assert!(pin::drain(interop::PATIENCE));
    assert_eq!(rig.registered(), 0);
    assert_eq!(rig.stream.clone_dtoh(&device).unwrap()[..2], [77, 2]);

    let mut pinned = Pinned::new(&driver, vec![0u32; values.len()]).unwrap();
    rig.hold();
    rig.must_wait(|| rig.stream.memcpy_dtoh(&device, &mut pinned).unwrap());
    assert_eq!(pinned[..2], [77, 2]);
    drop(pinned);
    assert!(pin::drain(interop::PATIENCE));
    rig.finish();
}

#[test]
fn bad_ranges_and_types_are_errors_and_a_view_is_no_destination() {
    let rig = Rig::new(Mode::Tracked);
    let mut device = rig.device(LEN);
    let mut buffer = rig.filled(LEN, &pattern(9, LEN));
    assert!(buffer.view_of::<[u8; 3]>(..).is_err(), "the length is no multiple");
    assert!(buffer.view_of::<u64>(..LEN).is_err(), "counted in elements");
    assert!(buffer.view_mut_of::<u64>(..=LEN / 8).is_err());
    assert!(panic_of(|| _ = buffer.view(LEN + 1..)).contains("range"));

    // Nothing to copy is noted as nothing.
    rig.hold();
    rig.stream.memcpy_htod(&buffer.view(5..5), &mut device).unwrap();
    rig.stream.memcpy_htod(&buffer.view_of::<u8>(LEN..).unwrap(), &mut device).unwrap();
    buffer.copy_to(7..7, &rig.stream, &mut device).unwrap();
    assert!(buffer.is_quiescent().unwrap());
    buffer.fill(3);
    rig.release();

    // A destination that is too short: cudarc panics before it enqueues anything.
    let mut short = rig.device(100);
    panic_of(|| rig.stream.memcpy_htod(&buffer, &mut short).unwrap());
    panic_of(|| rig.stream.memcpy_dtoh(&device, &mut buffer.view_mut(..100)).unwrap());
    assert!(buffer.copy_to(.., &rig.stream, &mut short).is_err());
    assert!(buffer.iter().all(|byte| *byte == 3));
    let message = panic_of(|| rig.stream.memcpy_dtoh(&device, &mut buffer.view(..)).unwrap());
    assert!(message.contains("view_mut"), "{message}");
    assert_eq!(HostSlice::<u8>::len(&buffer.view(..9)), 9);
    drop(buffer);
    rig.finish();
}
