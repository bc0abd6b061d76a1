//! Everything at once, at random: threads, streams, devices, holds, faults, caps, trims and shutdowns.
//!
//! A few seconds by default. `PINPOOL_STRESS_SECONDS=300` runs longer and `PINPOOL_STRESS_SEED=7` repeats a choice of
//! operations (threads still interleave as they like). Every byte that reaches the device is compared, the simulated
//! device's own checks are on, and the accounts are checked at the end of every round.
#![allow(unsafe_code)] // Enqueueing a copy promises that the memory stays valid, which is what is tested.

mod common;

use common::{KIB, MIB, PATIENCE, copy_to_device, lock_call, locked_bytes, unlock_call};
use pinpool::sim::{Fault, Sim, SimBuffer, SimContext, SimStream};
use pinpool::{PinnedBuffer, PinnedPool};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

const WORKERS: u64 = 4;
const SIZES: [usize; 8] = [1, 100, 4 * KIB, 5 * KIB, 64 * KIB, 64 * KIB + 1, 300 * KIB, MIB];

/// Splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// What a round runs on.
struct World {
    sim: Sim,
    contexts: Vec<SimContext>,
    streams: Vec<SimStream>,
    /// Buffers on their way to be dropped by another thread, or later.
    parked: Mutex<Vec<PinnedBuffer>>,
    over: AtomicBool,
    has_faults: bool,
    operations: AtomicU64,
}

/// A copy that was enqueued, and what it must have put on the device.
struct Copied {
    device: SimBuffer,
    seed: u8,
    len: usize,
    stream: usize,
}

/// What is copied: a window of one table, so that filling and comparing are fast in a debug build too.
fn bytes(seed: u8, len: usize) -> &'static [u8] {
    static TABLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let mut random = Random(1);
        (0..MIB + 256).map(|_| random.next() as u8 | 1).collect()
    });
    &TABLE[usize::from(seed)..][..len]
}

fn all_zero(bytes: &[u8]) -> bool {
    static ZEROS: LazyLock<Vec<u8>> = LazyLock::new(|| vec![0; MIB]);
    bytes == &ZEROS[..bytes.len()]
}

impl Copied {
    fn check(&self) {
        let found = self.device.read();
        assert!(found[..] == *bytes(self.seed, self.len), "wrong bytes on the device ({} of them)", self.len);
    }
}

struct Worker {
    world: Arc<World>,
    pool: PinnedPool,
    random: Random,
    copied: Vec<Copied>,
}

impl Worker {
    fn run(mut self) {
        while !self.world.over.load(Ordering::Relaxed) {
            self.world.contexts[self.random.below(self.world.contexts.len())].bind();
            if self.world.has_faults {
                // Writing to a buffer whose noted uses cannot be asked about panics, as documented.
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.turn()));
                if let Err(panic) = outcome {
                    let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                    assert!(text.contains("the buffer cannot be written"), "{text}");
                }
            } else {
                self.turn();
            }
            self.world.operations.fetch_add(1, Ordering::Relaxed);
            if self.copied.len() > 48 {
                self.check_oldest(32);
            }
        }
        self.check_oldest(self.copied.len());
    }

    fn check_oldest(&mut self, count: usize) {
        for copied in self.copied.drain(..count) {
            self.world.streams[copied.stream].synchronize();
            copied.check();
        }
    }

    fn turn(&mut self) {
        let Some((mut buffer, zeroed)) = self.take() else { return };
        // Bytes from the start that may differ from zero.
        let mut dirty = if zeroed { 0 } else { buffer.len() };
        for _ in 0..1 + self.random.below(2) {
            match self.random.below(8) {
                0 => {
                    dirty = usize::MAX;
                    self.copy_back(&mut buffer);
                }
                1 => self.prove(&mut buffer, &mut dirty),
                2 => drop(buffer.is_quiescent()),
                _ => self.copy_out(&mut buffer, &mut dirty),
            }
        }
        if self.random.one_in(8) {
            let mut parked = self.world.parked.lock().unwrap();
            parked.push(buffer);
            let index = self.random.below(parked.len());
            let other = (parked.len() > 12).then(|| parked.swap_remove(index));
            drop(parked);
            drop(other);
        }
    }

    fn take(&mut self) -> Option<(PinnedBuffer, bool)> {
        let size = SIZES[self.random.below(SIZES.len())];
        let (buffer, zeroed) = match self.random.below(16) {
            0 => (self.pool.take_pinned(size).ok()?, true),
            1 => (self.pool.take_unzeroed(size).unwrap(), false),
            2 => (self.pool.take_exact(size).unwrap(), true),
            3 => (self.pool.try_take(size).unwrap(), true),
            _ => (self.pool.take(size), true),
        };
        assert!(!zeroed || all_zero(&buffer), "old bytes: {buffer:?}");
        Some((buffer, zeroed))
    }

    fn copy_out(&mut self, buffer: &mut PinnedBuffer, dirty: &mut usize) {
        let (stream, seed) = (self.random.below(self.world.streams.len()), self.random.next() as u8);
        let len = 1 + self.random.below(buffer.len());
        buffer[..len].copy_from_slice(bytes(seed, len));
        *dirty = len.max(*dirty);
        if self.random.one_in(2) {
            buffer.set_dirty_len(*dirty);
        }
        let on = &self.world.streams[stream];
        let device = on.context().alloc(len);
        copy_to_device(on, buffer, len, &device);
        self.copied.push(Copied { device, seed, len, stream });
        // Without a record the buffer must not be written again; its drop waits for whole contexts.
        let is_recorded = !self.random.one_in(8) && buffer.record_last_use(on).is_ok();
        if !is_recorded {
            let empty = self.pool.take(1);
            drop(std::mem::replace(buffer, empty));
        } else if self.random.one_in(4) {
            let other = self.random.below(self.world.streams.len());
            let _ = buffer.record_last_use(&self.world.streams[other]);
        }
    }

    fn copy_back(&mut self, buffer: &mut PinnedBuffer) {
        let stream = self.random.below(self.world.streams.len());
        let on = &self.world.streams[stream];
        let device = on.context().alloc(buffer.len());
        let whole: *mut [u8] = &mut buffer[..];
        // SAFETY: the pool keeps the memory until the copy is done.
        unsafe { on.copy_to_host(&device, whole) };
        if buffer.record_last_use(on).is_err() {
            let empty = self.pool.take(1);
            drop(std::mem::replace(buffer, empty));
        } else if self.random.one_in(2) && buffer.wait().is_ok() {
            assert!(buffer[..] == vec![0xCD; buffer.len()], "the copy from the device is not there");
        }
        // Otherwise dropped while the device still writes.
    }

    fn prove(&mut self, buffer: &mut PinnedBuffer, dirty: &mut usize) {
        self.copy_out(buffer, dirty);
        if let Some(copied) = self.copied.last() {
            self.world.streams[copied.stream].synchronize();
        }
        // Other streams may have been recorded without a copy; their events may be pending.
        for stream in &self.world.streams {
            if self.random.one_in(3) {
                let _ = buffer.record_last_use(stream);
            }
        }
        // SAFETY: every copy of this buffer was made on a stream that was synchronised or waited for before.
        unsafe { buffer.assume_quiescent() };
    }
}

/// Holds streams, moves caps, trims, clears, drains and shuts down.
fn govern(world: &World, pool: &PinnedPool, random: &mut Random, until: Instant) {
    while Instant::now() < until {
        match random.below(14) {
            0..4 => {
                let stream = &world.streams[random.below(world.streams.len())];
                stream.hold();
                std::thread::sleep(Duration::from_micros(random.below(4_000) as u64));
                stream.release();
            }
            4 => pool.set_max_pooled_bytes([0, 300 * KIB, 4 * MIB, 64 * MIB][random.below(4)]),
            5 => pool.trim_to(random.below(4 * MIB)),
            6 => pool.clear(),
            7 => drop(pool.drain(Duration::from_millis(20))),
            8 => drop(pool.shutdown()),
            9 => drop(pool.prewarm(SIZES[random.below(SIZES.len())], 3)),
            10 => {
                let hold = pool.hold_context_waits();
                std::thread::sleep(Duration::from_micros(random.below(5_000) as u64));
                drop(hold);
            }
            11 => {
                let _cleaner = pool.hold_cleaner();
                std::thread::sleep(Duration::from_micros(random.below(5_000) as u64));
            }
            _ => std::thread::sleep(Duration::from_micros(random.below(3_000) as u64)),
        }
        let stats = pool.stats();
        assert!(stats.pooled_bytes <= pool.max_pooled_bytes(), "the cap is exceeded: {stats:#?}");
    }
}

fn arm_faults(sim: &Sim, random: &mut Random) {
    for (name, code) in [
        (lock_call(), 2),
        (unlock_call(), 1),
        ("cuEventRecord", 999),
        ("cuEventQuery", 999),
        ("cuEventCreate", 2),
        ("cuCtxSynchronize", 999),
        ("cuStreamIsCapturing", 999),
        ("cuCtxGetDevice", 999),
    ] {
        if random.one_in(2) {
            sim.fail(name, Fault::with_probability(0.02, code));
        }
    }
}

fn round(seed: u64, length: Duration) -> u64 {
    let mut random = Random(seed);
    let has_faults = random.one_in(2);
    let sim = Sim::builder().real_time().call_cost(Duration::ZERO).devices(2).seed(seed);
    let sim = if random.one_in(4) { sim.attribute(88, 1) } else { sim };
    // Whether unregistering waits for the device is a courtesy that hides mistakes.
    let sim = sim.unregister_waits(random.one_in(2)).build();
    let contexts = vec![sim.context(0), sim.context(1)];
    let mut streams: Vec<_> =
        contexts.iter().flat_map(|context| [context.stream(), context.stream()]).collect();
    streams.push(contexts[0].blocking_stream());
    let ceiling = if random.one_in(3) { 3 * MIB } else { usize::MAX };
    let mut builder = PinnedPool::builder().driver(sim.driver()).max_registered_bytes(ceiling);
    if random.one_in(3) {
        builder = builder.harvest_zero_limit(64 * KIB);
    }
    let pool = builder.max_pooled_bytes(16 * MIB).shutdown_timeout(PATIENCE).build().unwrap();
    for context in &contexts {
        // Both contexts are known to the pool, so that its wait for all contexts covers them.
        context.bind();
        drop(pool.take(1));
        assert!(pool.drain(PATIENCE));
    }
    let world = Arc::new(World {
        sim,
        contexts,
        streams,
        parked: Mutex::default(),
        over: AtomicBool::new(false),
        has_faults,
        operations: AtomicU64::new(0),
    });
    if has_faults {
        arm_faults(&world.sim, &mut random);
    }
    let workers: Vec<_> = (0..WORKERS)
        .map(|number| {
            let (world, pool) = (world.clone(), pool.clone());
            let random = Random(seed ^ (number + 1).wrapping_mul(0x1234_5678_9ABC_DEF1));
            std::thread::spawn(move || Worker { world, pool, random, copied: Vec::new() }.run())
        })
        .collect();
    govern(&world, &pool, &mut random, Instant::now() + length);
    world.over.store(true, Ordering::Relaxed);
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    world.parked.lock().unwrap().clear();
    world.sim.clear_faults();
    check(&world, &pool, ceiling);
    world.operations.load(Ordering::Relaxed)
}

fn check(world: &World, pool: &PinnedPool, ceiling: usize) {
    assert!(pool.drain(PATIENCE), "the pool did not settle: {:#?}", pool.stats());
    let stats = pool.stats();
    assert!(stats.is_balanced(), "the accounts do not balance: {stats:#?}");
    assert_eq!(stats.registered_bytes, locked_bytes(&world.sim), "the driver counts otherwise: {stats:#?}");
    assert!(stats.peak_registered_bytes <= ceiling, "the ceiling was exceeded: {stats:#?}");
    assert_eq!(stats.hits + stats.unpinned_hits + stats.harvested + stats.misses, stats.returned);
    assert_eq!((stats.queued_buffers, stats.checked_out_buffers), (0, 0), "{stats:#?}");
    assert!(world.has_faults || stats.quarantined_bytes == 0, "{stats:#?}\n{:?}", pool.shutdown());
    let report = pool.shutdown();
    assert!(report.completed, "{report:?}");
    let stats = pool.stats();
    assert!(stats.is_balanced(), "the accounts do not balance: {stats:#?}");
    assert_eq!(stats.registered_bytes, stats.quarantined_pinned_bytes, "{stats:#?}");
    assert_eq!(stats.registered_bytes, locked_bytes(&world.sim), "{stats:#?}");
    world.sim.assert_clean();
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

#[test]
fn everything_at_once_leaves_every_byte_right_and_the_accounts_balanced() {
    let length = Duration::from_secs(setting("PINPOOL_STRESS_SECONDS").unwrap_or(3));
    let first = setting("PINPOOL_STRESS_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let until = Instant::now() + length;
    let (mut seed, mut operations) = (first, 0);
    while Instant::now() < until {
        eprintln!("PINPOOL_STRESS_SEED={seed}");
        operations += round(seed, Duration::from_millis(700));
        seed += 1;
    }
    eprintln!("{} rounds from seed {first}, {operations} buffers", seed - first);
}
