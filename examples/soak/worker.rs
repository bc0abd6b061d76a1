//! One thread that takes, fills, copies, records and drops, and compares what the devices got.
#![allow(unsafe_code)] // Enqueueing a copy promises that the memory stays valid, which is what is tested.

use crate::options::Plant;
use crate::world::{Device, Held, Random, World};
use pinpool::PinnedPool;
use pinpool::sim::{SimBuffer, SimStream};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Of a write or a read while it is unknown whether the device is done.
pub const DOCUMENTED_PANIC: &str = "the buffer cannot be";

/// Copies that a thread has under way before it waits for one.
const UNCHECKED_MAX: usize = 24;

/// Device memory that a thread keeps for its next copies.
const SPARE_MAX: usize = 6;

/// Buffers that wait to be dropped by another thread.
const PARKED_MAX: usize = 16;

/// A copy that was enqueued.
struct Copied {
    memory: SimBuffer,
    device: usize,
    /// Of the device: in a later one it is gone.
    life: u64,
    number: u64,
    len: usize,
    done: Arc<AtomicBool>,
}

pub struct Worker {
    pub world: Arc<World>,
    pools: Vec<PinnedPool>,
    pub random: Random,
    pub number: u64,
    copied: VecDeque<Copied>,
    /// With its device, and the device's life.
    spare: Vec<(usize, u64, SimBuffer)>,
}

impl Worker {
    pub fn new(world: Arc<World>, pools: Vec<PinnedPool>, thread: u64) -> Self {
        let random = Random(world.options.seed ^ (thread + 1).wrapping_mul(0x1234_5678_9ABC_DEF1));
        Self { world, pools, random, number: thread << 40, copied: VecDeque::new(), spare: Vec::new() }
    }

    /// One of them.
    pub fn pool(&mut self) -> PinnedPool {
        self.pools[self.random.below(self.pools.len())].clone()
    }

    pub fn run(mut self) {
        while !self.world.is_over() {
            // Writing to a buffer whose device work cannot be asked about panics, as documented.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.turn())) {
                let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                if !text.contains(DOCUMENTED_PANIC) {
                    self.world.found(format!("a panic: {text}"));
                }
            }
            self.check(UNCHECKED_MAX);
        }
        self.check(0);
    }

    /// Compares what is done, and waits until no more than so many copies are left.
    fn check(&mut self, left: usize) {
        let mut waited = 0;
        while let Some(first) = self.copied.front() {
            let is_gone = {
                let device = self.world.devices[first.device].read().expect("no panic holds it");
                device.lost || device.life != first.life
            };
            if is_gone || first.done.load(Ordering::SeqCst) {
                let copied = self.copied.pop_front().expect("just seen");
                self.compare(copied);
            } else if self.copied.len() <= left {
                return;
            } else {
                waited += 1;
                if waited > 600_000 {
                    return self.world.found("a copy is not done after a minute".into());
                }
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
        }
    }

    fn compare(&mut self, copied: Copied) {
        let world = self.world.clone();
        let device = world.devices[copied.device].read().expect("no panic holds it");
        if device.lost || device.life != copied.life {
            // Whether it was executed nobody says.
            return;
        }
        if !copied.memory.starts_with(world.pattern(copied.number, copied.len)) {
            let (number, len) = (copied.number, copied.len);
            world.found(format!("wrong bytes on device {}: copy {number:#x} of {len}", copied.device));
        }
        world.checked_bytes.fetch_add(copied.len as u64, Ordering::Relaxed);
        drop(device);
        if self.random.one_in(8) {
            self.copy_back(&copied);
        }
        self.spare.push((copied.device, copied.life, copied.memory));
        if self.spare.len() > SPARE_MAX {
            let index = self.random.below(self.spare.len());
            self.spare.swap_remove(index);
        }
    }

    fn turn(&mut self) {
        if self.random.one_in(16) {
            self.drop_a_parked_one();
        }
        if self.random.one_in(200) {
            self.visit();
        }
        let Some(mut held) = self.take() else { return };
        let world = self.world.clone();
        for _ in 0..1 + self.random.below(2) {
            let index = self.random.below(world.devices.len());
            let device = world.devices[index].read().expect("no panic holds it");
            device.context.bind();
            if device.lost {
                held.buffer.fill(7);
                held.extent = held.buffer.len();
            } else if !self.stage(&mut held, &device, index) {
                break;
            }
        }
        self.let_go(held);
    }

    fn take(&mut self) -> Option<Held> {
        // The magnitude is drawn, then the size, so that there are as many small ones as large ones; the largest seldom,
        // because one of them takes as long as hundreds of others.
        let most = self.world.options.max_bytes;
        let most = if self.random.one_in(6) { most } else { most.min(1 << 20) };
        let magnitude = self.random.below(most.ilog2() as usize + 1);
        let size = (1 + self.random.below(2 << magnitude)).min(most);
        let Some(reserved) = World::reserve(&self.world, size) else {
            self.drop_a_parked_one();
            return None;
        };
        let kind = self.random.below(16);
        let pool = self.pool();
        let taken = match kind {
            0 => pool.take_pinned(size),
            1 => pool.take_unzeroed(size),
            2 => pool.take_exact(size),
            3 => pool.try_take(size),
            _ => Ok(pool.take(size)),
        };
        let Ok(buffer) = taken else {
            if kind != 0 {
                self.world.found(format!("{size} bytes were refused: {taken:?}"));
            }
            return None;
        };
        if kind != 1 && !self.world.is_zero(&buffer) {
            self.world.found(format!("old bytes in {buffer:?}"));
        }
        Some(Held { buffer, extent: 0, _reserved: reserved })
    }

    /// Fills the buffer and copies it; false when it must not be written again, because nothing was recorded.
    fn stage(&mut self, held: &mut Held, device: &Device, index: usize) -> bool {
        self.number += 1;
        let buffer = &mut held.buffer;
        let (number, len) = (self.number, 1 + self.random.below(buffer.len()));
        let bytes = self.world.pattern(number, len);
        buffer[..len].copy_from_slice(bytes);
        if self.world.options.plant == Plant::Byte && self.world.to_plant.swap(false, Ordering::SeqCst) {
            buffer[len / 2] ^= 0x80;
        }
        held.extent = held.extent.max(len);
        if self.random.one_in(2) {
            buffer.set_dirty_len(held.extent);
        }
        let stream = &device.streams[self.random.below(device.streams.len())];
        let memory = self.device_memory(device, index, len);
        // SAFETY: the pool keeps the memory unchanged until the copy is done; that is what is tested.
        unsafe { stream.copy_to_device(&buffer[..len], &memory) };
        let done = tell(&self.world, stream);
        self.copied.push_back(Copied { memory, device: index, life: device.life, number, len, done });
        self.world.copies.fetch_add(1, Ordering::Relaxed);
        let is_recorded = !self.random.one_in(8) && buffer.record_last_use(stream).is_ok();
        if is_recorded && self.random.one_in(4) {
            let other = &device.streams[self.random.below(device.streams.len())];
            // A failure leaves the buffer safe, and is not this thread's to judge.
            let _ = buffer.record_last_use(other);
        }
        is_recorded
    }

    fn device_memory(&mut self, device: &Device, index: usize, len: usize) -> SimBuffer {
        let fits = |(on, life, memory): &(usize, u64, SimBuffer)| {
            (*on, *life) == (index, device.life) && (len..=len * 4).contains(&memory.len())
        };
        match self.spare.iter().position(fits) {
            Some(place) => self.spare.swap_remove(place).2,
            None => device.context.alloc(len),
        }
    }

    /// What was just found right on the device, into a fresh buffer.
    fn copy_back(&mut self, copied: &Copied) {
        let world = self.world.clone();
        let Some(_reserved) = World::reserve(&world, copied.len) else { return };
        let device = world.devices[copied.device].read().expect("no panic holds it");
        if device.lost || device.life != copied.life {
            return;
        }
        device.context.bind();
        let mut buffer = self.pool().take(copied.len);
        let stream = &device.streams[self.random.below(device.streams.len())];
        let part: *mut [u8] = &mut buffer[..copied.len];
        // SAFETY: the pool keeps the memory until the copy is done; that is what is tested.
        unsafe { stream.copy_to_host(&copied.memory, part) };
        let is_recorded = buffer.record_last_use(stream).is_ok();
        drop(device);
        // Half of them are dropped while the device still writes.
        if is_recorded && self.random.one_in(2) && buffer.wait().is_ok() {
            if buffer[..copied.len] != *world.pattern(copied.number, copied.len) {
                world.found(format!("wrong bytes from device {}: {:#x}", copied.device, copied.number));
            }
            world.checked_bytes.fetch_add(copied.len as u64, Ordering::Relaxed);
        }
    }

    fn let_go(&mut self, held: Held) {
        let world = &self.world;
        if world.options.plant == Plant::Leak && world.to_plant.swap(false, Ordering::SeqCst) {
            std::mem::forget(held);
        } else if self.random.one_in(8) {
            let mut parked = world.parked.lock().expect("no panic holds it");
            parked.push(held);
            let is_full = parked.len() > PARKED_MAX;
            drop(parked);
            if is_full {
                self.drop_a_parked_one();
            }
        }
    }

    fn drop_a_parked_one(&mut self) {
        let mut parked = self.world.parked.lock().expect("no panic holds it");
        if parked.is_empty() {
            return;
        }
        let index = self.random.below(parked.len());
        let held = parked.swap_remove(index);
        drop(parked);
        drop(held);
    }
}

/// A flag that is set when the stream has done what it was given.
pub fn tell(world: &World, stream: &SimStream) -> Arc<AtomicBool> {
    let done = Arc::new(AtomicBool::new(false));
    let flag = done.clone();
    let say = Box::new(move || flag.store(true, Ordering::SeqCst));
    if let Err(code) = world.sim.cuda().cu_launch_host_func(stream.handle(), say) {
        world.found(format!("cuLaunchHostFunc: {code}"));
    }
    done
}
