//! In steady state a take, fill, copy, record and drop makes no heap allocation on any thread, and no driver call
//! besides the record and its queries. By counters, not by reading.
//!
//! The allocations are counted over the real path, cudarc and the fake `libcuda`: that library has an allocator of
//! its own, so what the simulated device allocates is not mistaken for the pool's. The calls are counted by
//! the simulated device itself.
#![allow(unsafe_code)] // a counting global allocator, and copies by the simulated device's raw entry points

use cudarc::driver::CudaContext;
use fake_cuda::control::Control;
use pinpool::sim::Sim;
use pinpool::{Driver, PinnedPool, SizeClasses};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const BYTES: usize = 64 << 10;
const IN_FLIGHT: usize = 4;
const WARM_UP: usize = 1000;
const CYCLES: usize = 2000;
const ROUNDS: usize = 12;
const PATIENCE: Duration = Duration::from_secs(30);

/// What a record calls. A query made on a caller's thread, by a take that harvests, is made in relaxed capture mode:
/// switch, query, restore.
const OF_THE_RECORD: &[&str] =
    &["cuEventRecord", "cuEventQuery", "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode"];

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

impl Counting {
    fn note() {
        if IS_COUNTING.load(Ordering::Relaxed) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::note();
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.dealloc(address, layout) }
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        Self::note();
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.realloc(address, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of all threads while `work` runs.
fn allocations_in(work: impl FnOnce()) -> u64 {
    ALLOCATIONS.store(0, Ordering::SeqCst);
    IS_COUNTING.store(true, Ordering::SeqCst);
    work();
    IS_COUNTING.store(false, Ordering::SeqCst);
    ALLOCATIONS.load(Ordering::SeqCst)
}

/// One test and not three: the allocator cannot tell the pool's threads from the test runner's, which prints.
#[test]
fn steady_state() {
    the_counter_counts();
    a_cycle_allocates_nothing_on_any_thread(SizeClasses::PowerOfTwo, BYTES);
    // A class between two powers of two, of 72 KiB.
    let eighths = SizeClasses::Steps { per_doubling: 8, from_bytes: 1 };
    a_cycle_allocates_nothing_on_any_thread(eighths, BYTES / 8 * 9);
    a_cycle_calls_the_driver_for_the_record_and_its_queries_alone();
}

/// Whether three rounds in a row are free of what was counted.
///
/// A thread's first wait for a lock allocates once (parking_lot keeps a node per thread), a queue grows and an
/// event is made when more are on their way at once than ever before. What comes again and again leaves no
/// round free of it.
fn settles(rounds: &[u64]) -> bool {
    rounds.windows(3).any(|three| three == [0; 3])
}

fn a_cycle_allocates_nothing_on_any_thread(classes: SizeClasses, bytes: usize) {
    let control = Control::load().expect("the fake libcuda was built with this test");
    let context = CudaContext::new(0).expect("the fake device");
    let stream = context.new_stream().expect("a stream");
    let mut device = stream.alloc_zeros::<u8>(bytes).expect("device memory");
    // On a machine so busy that a thread of the pool is taken off its core in mid-move, a take must not give up on it.
    let builder = PinnedPool::builder().driver(Driver::auto()).harvest_wait_limit(PATIENCE);
    let pool = builder.size_classes(classes).build().expect("the settings are right");
    let mut cycles = |count: usize| {
        for number in 0..count {
            let mut buffer = pool.take(bytes);
            buffer[..512].fill(number as u8);
            buffer.set_dirty_len(512);
            stream.memcpy_htod(&buffer[..], &mut device).expect("a copy");
            buffer.record_last_use(&stream).expect("a record");
            drop(buffer);
            if number % IN_FLIGHT == 0 {
                stream.synchronize().expect("the stream runs by itself");
            }
        }
    };
    // More buffers than can be on their way at once, so that no take misses.
    drop((0..3 * IN_FLIGHT).map(|_| pool.take(bytes)).collect::<Vec<_>>());
    assert!(pool.drain(PATIENCE), "everything is dealt with");
    cycles(WARM_UP);
    let before = pool.stats();
    let mut misses = Vec::new();
    let rounds: Vec<u64> = (0..ROUNDS)
        .map(|_| {
            let earlier = pool.stats().misses;
            let allocations = allocations_in(|| cycles(CYCLES));
            misses.push(pool.stats().misses - earlier);
            allocations
        })
        .collect();
    let after = pool.stats();
    // A thread that loses its core for 100 ms in the middle of a question to the driver looks like a driver that hangs, for
    // which no take waits: on one busy core a round may have a miss.
    assert!(settles(&misses), "the pool was not warm, misses in each round: {misses:?}, {after:?}");
    assert_eq!(after.returned - before.returned, (ROUNDS * CYCLES) as u64);
    assert!(settles(&rounds), "heap allocations in each round of {CYCLES} cycles: {rounds:?}");
    pool.shutdown();
    control.assert_clean();
}

fn the_counter_counts() {
    let on_this_thread = allocations_in(|| drop(std::hint::black_box(vec![1u8; 100])));
    assert_eq!(on_this_thread, 1);
    let on_another = allocations_in(|| {
        std::thread::spawn(|| drop(std::hint::black_box(vec![1u8; 100]))).join().expect("no panic");
    });
    assert!(on_another > 1, "the thread, and what it allocates");
}

fn a_cycle_calls_the_driver_for_the_record_and_its_queries_alone() {
    let sim = Sim::zero_cost();
    let context = sim.context(0);
    let (stream, device) = (context.stream(), context.alloc(BYTES));
    let pool = PinnedPool::builder().driver(sim.driver()).build().expect("the settings are right");
    let cycles = |count: usize| {
        for number in 0..count {
            let mut buffer = pool.take(BYTES);
            buffer[..512].fill(number as u8);
            buffer.set_dirty_len(512);
            // SAFETY: cuMemcpyHtoDAsync: the pool keeps the buffer until the record below is complete.
            unsafe { stream.copy_to_device(&buffer, &device) };
            buffer.record_last_use(&stream).expect("a record");
        }
    };
    cycles(WARM_UP);
    let round = || {
        assert!(pool.drain(PATIENCE), "everything is dealt with");
        sim.reset_calls();
        cycles(CYCLES);
        assert!(pool.drain(PATIENCE), "everything is dealt with");
        assert_eq!(sim.calls("cuMemcpyHtoDAsync_v2"), CYCLES as u64, "the test's own");
        assert_eq!(sim.calls("cuEventRecord"), CYCLES as u64);
        assert!(sim.calls("cuStreamIsCapturing") <= CYCLES as u64);
        let expected: u64 = OF_THE_RECORD.iter().map(|name| sim.calls(name)).sum();
        sim.total_calls() - sim.calls("cuMemcpyHtoDAsync_v2") - expected
    };
    let rounds: Vec<u64> = (0..ROUNDS).map(|_| round()).collect();
    assert!(settles(&rounds), "calls besides {OF_THE_RECORD:?} in each round of {CYCLES} cycles: {rounds:?}");
    pool.shutdown();
    drop((stream, device, context));
    sim.assert_clean();
}
