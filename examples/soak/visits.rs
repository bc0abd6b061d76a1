//! Contexts of the application's own that come and go: made, used once, and destroyed with their work done or not.
#![allow(unsafe_code)] // Enqueueing a copy promises that the memory stays valid, which is what is tested.

use crate::worker::{Worker, tell};
use crate::world::World;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const MAX_BYTES: usize = 64 << 10;

impl Worker {
    /// A copy in a context that nobody else uses, and its end.
    pub fn visit(&mut self) {
        let world = self.world.clone();
        let (index, size) = (self.random.below(world.devices.len()), 1 + self.random.below(MAX_BYTES));
        let Some(_reserved) = World::reserve(&world, size) else { return };
        let context = world.sim.create_context(index as i32);
        let stream = context.stream();
        let mut buffer = self.pool().take(size);
        self.number += 1;
        let (number, len) = (self.number, buffer.len());
        buffer.copy_from_slice(world.pattern(number, len));
        let memory = context.alloc(len);
        // SAFETY: the pool keeps the memory unchanged until the copy is done, or has ended with its context.
        unsafe { stream.copy_to_device(&buffer, &memory) };
        let done = tell(&world, &stream);
        world.visits.fetch_add(1, Ordering::Relaxed);
        if !self.random.one_in(4) {
            // A failure leaves the buffer safe.
            let _ = buffer.record_last_use(&stream);
        }
        drop(buffer);
        if self.random.one_in(2) {
            let deadline = Instant::now() + Duration::from_secs(60);
            while !done.load(Ordering::SeqCst) {
                if Instant::now() > deadline {
                    return world.found("a copy in a context of its own is not done after a minute".into());
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            if !memory.starts_with(world.pattern(number, len)) {
                world.found(format!("wrong bytes in a context of its own: copy {number:#x} of {len}"));
            }
            world.checked_bytes.fetch_add(len as u64, Ordering::Relaxed);
        }
        context.end();
    }
}
