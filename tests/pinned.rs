//! `Pinned<Vec<T>>` on a device: what the device reads and writes, when the memory is let go, and a ring of
//! long-lived buffers through all of it.
#![allow(unsafe_code)] // Enqueueing a copy promises that the memory stays valid until it is done.

use pinpool::pin::{self, Pinned};
use pinpool::regions::{self, Coverage};
use pinpool::sim::{Fault, Sim, SimBuffer, SimContext, SimStream};
use pinpool::{Driver, Error};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const LEN: usize = 16 << 10;
const BYTES: usize = LEN * 4;
const PATIENCE: Duration = Duration::from_secs(20);
/// Long enough for a background thread to do what it must not do.
const A_WHILE: Duration = Duration::from_millis(30);

/// The counts are the process's, so the tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(pin::drain(PATIENCE), "an earlier test left something behind: {:?}", pin::stats());
    turn
}

struct Rig {
    sim: Sim,
    context: SimContext,
    driver: Driver,
}

impl Rig {
    fn new() -> Self {
        let sim = Sim::new();
        let (context, driver) = (sim.context(0), sim.driver());
        Self { sim, context, driver }
    }

    fn pinned(&self, seed: u32) -> Pinned<Vec<u32>> {
        Pinned::new(&self.driver, numbers(seed)).unwrap()
    }

    /// Nothing is left behind: the driver's books, ours, and the device's own checks.
    fn finish(self, leaked_bytes: usize) {
        assert!(pin::drain(PATIENCE), "{:?}", pin::stats());
        assert_eq!(self.sim.registered_bytes(), leaked_bytes);
        self.sim.assert_clean();
    }
}

fn until(what: &str, so: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + PATIENCE;
    while !so() {
        assert!(std::time::Instant::now() < deadline, "never: {what}");
        std::thread::yield_now();
    }
}

fn numbers(seed: u32) -> Vec<u32> {
    (0..LEN as u32).map(|index| index.wrapping_mul(2_654_435_761).wrapping_add(seed) | 1).collect()
}

fn bytes_of(numbers: &[u32]) -> &[u8] {
    bytemuck::cast_slice(numbers)
}

fn upload(stream: &SimStream, memory: &Pinned<Vec<u32>>, device: &SimBuffer) {
    // SAFETY: the memory is `Pinned`'s, whose promise is that it stays until the copy is done; the simulated
    // device checks that promise.
    unsafe { stream.copy_to_device(bytes_of(memory), device) };
}

#[test]
fn dropped_in_flight_it_stays_until_the_recorded_copy_is_done() {
    let _turn = alone();
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(BYTES));
    let mut memory = rig.pinned(1);
    let base = memory.as_ptr();
    stream.hold();
    upload(&stream, &memory, &device);
    memory.record_last_use(&stream).unwrap();
    assert!(!memory.is_quiescent().unwrap());
    let before = pin::stats();
    drop(memory);
    assert!(!pin::drain(A_WHILE), "let go in flight");
    assert_eq!(rig.sim.live_registrations(), [(base as usize, BYTES)]);
    assert!(regions::is_pinned(base));
    let waiting = pin::stats();
    assert_eq!((waiting.waiting_buffers, waiting.waiting_bytes, waiting.pinned_buffers), (1, BYTES, 0));

    stream.release();
    rig.sim.run_until_idle();
    assert!(pin::drain(PATIENCE));
    assert!(device.read() == bytes_of(&numbers(1)), "wrong bytes on the device");
    assert!(!regions::is_pinned(base));
    assert_eq!(pin::stats().released_buffers, before.released_buffers + 1);
    rig.finish(0);
}

#[test]
fn dropped_without_a_record_it_waits_for_every_context_and_in_flight_bytes_arrive() {
    let _turn = alone();
    let sim = Sim::builder().devices(2).build();
    let (first, driver) = (sim.context(0), sim.driver());
    let second = sim.context(1);
    first.bind();
    let rig = Rig { sim, context: first, driver };
    // On the device whose context is not current here.
    let (stream, device) = (second.stream(), second.alloc(BYTES));
    let memory = rig.pinned(2);
    stream.hold();
    upload(&stream, &memory, &device);
    drop(memory);
    assert!(!pin::drain(A_WHILE), "let go in flight");
    assert_eq!(rig.sim.registered_bytes(), BYTES);
    stream.release();
    rig.sim.run_until_idle();
    assert!(pin::drain(PATIENCE));
    assert!(device.read() == bytes_of(&numbers(2)));
    rig.finish(0);
}

#[test]
fn a_mutable_access_waits_for_the_device_to_have_read() {
    let _turn = alone();
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(BYTES));
    let mut memory = rig.pinned(3);
    stream.hold();
    upload(&stream, &memory, &device);
    memory.record_last_use(&stream).unwrap();
    assert_eq!(memory[5], numbers(3)[5], "reading waits for nothing");
    let is_written = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            memory.fill(0);
            is_written.store(true, Ordering::SeqCst);
        });
        until("the writer asks", || rig.sim.calls("cuEventQuery") >= 3 || writer.is_finished());
        assert!(!is_written.load(Ordering::SeqCst), "written while the device still had to read");
        stream.release();
        rig.sim.run_until_idle();
    });
    assert!(device.read() == bytes_of(&numbers(3)), "the device got what was written after the copy");
    assert!(memory.iter().all(|number| *number == 0) && memory.is_quiescent().unwrap());
    drop(memory);
    rig.finish(0);
}

#[test]
fn what_the_device_wrote_is_there_after_the_wait() {
    let _turn = alone();
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(BYTES));
    let (source, mut target) = (rig.pinned(4), rig.pinned(5));
    upload(&stream, &source, &device);
    let place: *mut [u8] = bytemuck::cast_slice_mut(&mut target[..]);
    // SAFETY: the memory stays until the copy is done, and nobody uses it before.
    unsafe { stream.copy_to_host(&device, place) };
    target.record_last_use(&stream).unwrap();
    rig.sim.run_until_idle();
    target.wait().unwrap();
    assert_eq!(target[..], numbers(4));
    drop((source, target));
    rig.finish(0);
}

#[test]
fn memory_that_cannot_be_unregistered_is_leaked_counted_and_never_freed() {
    let _turn = alone();
    let rig = Rig::new();
    let before = pin::stats();
    let memory = rig.pinned(6);
    let base = memory.as_ptr() as usize;
    rig.sim.fail("cuMemHostUnregister", Fault::once(1));
    drop(memory);
    assert!(pin::drain(PATIENCE));
    let after = pin::stats();
    assert_eq!(after.leaked_buffers, before.leaked_buffers + 1);
    assert_eq!(after.leaked_bytes, before.leaked_bytes + BYTES);
    assert_eq!(after.released_buffers, before.released_buffers);
    assert_eq!(rig.sim.live_registrations(), [(base, BYTES)], "the driver has it still");
    assert!(regions::is_pinned(base as *const u8));
    // Nobody is given that memory again: it was not freed.
    let others: Vec<_> = (0..50).map(|seed| numbers(seed).into_boxed_slice()).collect();
    assert!(others.iter().all(|other| regions::covering(bytes_of(other)) == Coverage::None));

    let memory = rig.pinned(7);
    rig.sim.fail("cuMemHostUnregister", Fault::once(999));
    let error = memory.unpin().unwrap_err();
    assert!(error.to_string().contains("it is leaked"), "{error}");
    assert_eq!(pin::stats().leaked_buffers, before.leaked_buffers + 2);
    rig.finish(2 * BYTES);
}

#[test]
fn unpin_waits_for_the_device_and_gives_back_what_it_wrote() {
    let _turn = alone();
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(BYTES));
    let source = rig.pinned(8);
    upload(&stream, &source, &device);
    rig.sim.run_until_idle();
    let mut memory = rig.pinned(9);
    let base = memory.as_ptr();
    stream.hold();
    let place: *mut [u8] = bytemuck::cast_slice_mut(&mut memory[..]);
    // SAFETY: the memory stays until the copy is done, and nobody uses it before.
    unsafe { stream.copy_to_host(&device, place) };
    memory.record_last_use(&stream).unwrap();
    let is_back = AtomicBool::new(false);
    let vec = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let vec = memory.unpin().unwrap();
            is_back.store(true, Ordering::SeqCst);
            vec
        });
        until("the event is asked about", || rig.sim.calls("cuEventQuery") >= 3 || waiter.is_finished());
        assert!(!is_back.load(Ordering::SeqCst), "given back in flight");
        stream.release();
        rig.sim.run_until_idle();
        waiter.join().unwrap()
    });
    assert_eq!((vec.as_ptr(), &vec), (base, &numbers(8)));
    drop(source);
    rig.finish(0);
}

#[test]
fn a_record_that_fails_is_returned_and_the_memory_stays_safe() {
    let _turn = alone();
    let rig = Rig::new();
    let (stream, device) = (rig.context.stream(), rig.context.alloc(BYTES));
    let mut memory = rig.pinned(10);
    stream.hold();
    upload(&stream, &memory, &device);
    rig.sim.fail("cuEventRecord", Fault::once(999));
    assert!(matches!(memory.record_last_use(&stream), Err(Error::Driver(call)) if call.code() == 999));
    assert!(!memory.is_quiescent().unwrap(), "a failed record proves nothing");
    let foreign = Sim::new();
    let elsewhere = foreign.context(0).stream();
    assert!(matches!(memory.record_last_use(&elsewhere), Err(Error::ForeignStream { .. })));
    rig.context.bind();
    drop(memory);
    assert!(!pin::drain(A_WHILE), "let go in flight");
    stream.release();
    rig.sim.run_until_idle();
    rig.finish(0);
}

/// A replay buffer: slots that live long, are filled by the host and read by the device in turn, over and over.
#[test]
fn a_ring_of_long_lived_buffers_through_pin_use_failure_and_drop() {
    const SLOTS: usize = 5;
    let _turn = alone();
    let rig = Rig::new();
    let before = pin::stats();

    // Pin: the driver has no room for the last two; what was pinned is used all the same, and the rest
    // comes back as plain memory.
    rig.sim.fail("cuMemHostRegister", Fault::budget(3 * BYTES, 2));
    let mut ring = Vec::new();
    let mut plain = Vec::new();
    for slot in 0..SLOTS {
        match Pinned::new(&rig.driver, vec![0u32; LEN]) {
            Ok(memory) => ring.push(memory),
            Err((error, vec)) => {
                assert!(error.to_string().ends_with("CUDA_ERROR_OUT_OF_MEMORY (2)"), "{slot}: {error}");
                plain.push(vec);
            }
        }
    }
    assert_eq!((ring.len(), plain.len()), (3, 2));
    rig.sim.clear_faults();
    ring.extend(plain.into_iter().map(|vec| Pinned::new(&rig.driver, vec).unwrap()));
    let bases: Vec<_> = ring.iter().map(|memory| memory.as_ptr()).collect();
    assert!(ring.iter().all(|memory| memory.driver_says_page_locked().unwrap()));
    assert_eq!(pin::stats().pinned_bytes, SLOTS * BYTES);

    // Use: 40 rounds over the ring on two streams, each slot overwritten while its neighbours are in flight.
    let streams = [rig.context.stream(), rig.context.stream()];
    let devices: Vec<_> = (0..SLOTS).map(|_| rig.context.alloc(BYTES)).collect();
    for round in 0..40 {
        let (slot, stream) = (round % SLOTS, &streams[round % 2]);
        if round >= SLOTS {
            // The device lags behind by a ring: executed only when the slot is wanted again.
            rig.sim.run_until_idle();
            assert!(devices[slot].read() == bytes_of(&numbers((round - SLOTS) as u32)), "round {round}");
        }
        ring[slot].copy_from_slice(&numbers(round as u32)); // waits for the noted read
        upload(stream, &ring[slot], &devices[slot]);
        ring[slot].record_last_use(stream).unwrap();
    }
    assert_eq!(ring.iter().map(|memory| memory.as_ptr()).collect::<Vec<_>>(), bases, "nothing moved");
    assert_eq!(rig.sim.calls("cuMemHostRegister"), SLOTS as u64 + 2, "pinned once, for all rounds");

    // Failure and drop, in flight: one slot cannot be unregistered, the others are let go when they are read.
    for stream in &streams {
        stream.hold();
    }
    rig.sim.fail("cuMemHostUnregister", Fault::nth(2, 999));
    drop(ring);
    assert!(!pin::drain(A_WHILE), "let go in flight");
    assert_eq!(rig.sim.live_registrations().len(), SLOTS);
    for stream in &streams {
        stream.release();
    }
    rig.sim.run_until_idle();
    assert!(pin::drain(PATIENCE));
    for (slot, device) in devices.iter().enumerate() {
        assert!(device.read() == bytes_of(&numbers((35 + slot) as u32)), "slot {slot} at the end");
    }
    let after = pin::stats();
    assert_eq!(after.released_buffers, before.released_buffers + SLOTS as u64 - 1);
    assert_eq!(after.leaked_buffers, before.leaked_buffers + 1);
    let still: Vec<_> = bases.iter().filter(|base| regions::is_pinned(**base)).collect();
    assert_eq!(rig.sim.live_registrations(), [(*still[0] as usize, BYTES)]);
    assert_eq!(still.len(), 1);
    rig.finish(BYTES);
}
