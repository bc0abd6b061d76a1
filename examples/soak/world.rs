//! What all threads share: the devices, the patterns, the books of the soak itself, and what was found wrong.

use crate::options::Options;
use pinpool::PinnedBuffer;
use pinpool::sim::{Sim, SimContext, SimStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

/// Patterns begin at so many places of one table.
const OFFSETS: usize = 1 << 20;

/// Splitmix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// One device. Its lock is held shared while something is enqueued or looked at, and alone while the device is lost or reset.
pub struct Device {
    /// Grows with every reset.
    pub life: u64,
    pub context: SimContext,
    pub streams: Vec<SimStream>,
    /// Nothing can be enqueued any more, and what was enqueued is never done.
    pub lost: bool,
}

/// A buffer that is out, and its part of what may be.
pub struct Held {
    pub buffer: PinnedBuffer,
    /// Bytes from the start that this holder wrote.
    pub extent: usize,
    pub _reserved: Reserved,
}

/// Given back at its drop.
pub struct Reserved {
    world: Arc<World>,
    bytes: usize,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.world.out_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

pub struct World {
    pub options: Options,
    pub sim: Sim,
    pub devices: Vec<RwLock<Device>>,
    /// Buffers on their way to be dropped by another thread, or later.
    pub parked: Mutex<Vec<Held>>,
    pub over: AtomicBool,
    /// A discrepancy that was asked for is still to be made.
    pub to_plant: AtomicBool,
    pub copies: AtomicU64,
    pub checked_bytes: AtomicU64,
    pub zero_checked_bytes: AtomicU64,
    /// Of graphs: captures, those that were broken, and replays that were compared.
    pub captures: AtomicU64,
    pub broken_captures: AtomicU64,
    pub replays: AtomicU64,
    /// Contexts that came and went.
    pub visits: AtomicU64,
    /// Contexts that were reset. They are kept, because the last handle of one gives back a retain of its device's.
    pub earlier: Mutex<Vec<Device>>,
    out_bytes: AtomicUsize,
    table: Vec<u8>,
    zeros: Vec<u8>,
    found: Mutex<Vec<String>>,
}

impl World {
    pub fn new(options: Options) -> Self {
        let sim = Sim::builder()
            .real_time()
            .devices(options.devices as i32)
            .seed(options.seed)
            // That unregistering waits for the device is a courtesy that hides mistakes.
            .unregister_waits(false)
            .call_cost(Duration::ZERO)
            .build();
        sim.expect_violations(); // reported with everything else that is found
        let devices = (0..options.devices).map(|device| {
            let context = sim.context(device as i32);
            let streams = (0..options.streams).map(|_| context.stream()).collect();
            RwLock::new(Device { life: 0, context, streams, lost: false })
        });
        let devices = devices.collect();
        let mut random = Random(options.seed);
        let words = (options.max_bytes + OFFSETS) / 8 + 1;
        let table = (0..words).flat_map(|_| (random.next() | 0x0101_0101_0101_0101).to_le_bytes()).collect();
        Self {
            sim,
            devices,
            parked: Mutex::default(),
            over: AtomicBool::new(false),
            to_plant: AtomicBool::new(true),
            copies: AtomicU64::new(0),
            checked_bytes: AtomicU64::new(0),
            zero_checked_bytes: AtomicU64::new(0),
            captures: AtomicU64::new(0),
            broken_captures: AtomicU64::new(0),
            replays: AtomicU64::new(0),
            visits: AtomicU64::new(0),
            earlier: Mutex::default(),
            out_bytes: AtomicUsize::new(0),
            table,
            zeros: vec![0; 1 << 20],
            found: Mutex::default(),
            options,
        }
    }

    /// The bytes of a copy, none of them zero, by the seed and the copy's number.
    pub fn pattern(&self, copy: u64, len: usize) -> &[u8] {
        let offset = Random(self.options.seed ^ copy.rotate_left(32)).below(OFFSETS);
        &self.table[offset..offset + len]
    }

    pub fn is_zero(&self, bytes: &[u8]) -> bool {
        self.zero_checked_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        bytes.chunks(self.zeros.len()).all(|chunk| *chunk == self.zeros[..chunk.len()])
    }

    /// A part of what may be out, for a buffer of so many bytes; none when there is too much.
    pub fn reserve(world: &Arc<Self>, bytes: usize) -> Option<Reserved> {
        let bytes = bytes.next_power_of_two().max(4096);
        let fits = |out: usize| Some(out + bytes).filter(|sum| *sum <= world.options.memory_bytes);
        world.out_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(Reserved { world: world.clone(), bytes })
    }

    /// Something is wrong; the soak ends.
    pub fn found(&self, what: String) {
        let mut found = self.found.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if found.len() < 20 {
            found.push(what);
        }
        self.over.store(true, Ordering::Relaxed);
    }

    pub fn all_found(&self) -> Vec<String> {
        self.found.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}
