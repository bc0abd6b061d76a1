//! Contexts that come and go under the pool.

use crate::ensure;
use crate::guards::Guard;
use crate::world::{Outcome, World, patience};
use std::time::Instant;

impl World {
    /// The application ends a context or lets go of it.
    pub fn let_go_of_context(&mut self, index: usize, end: bool) -> Outcome {
        self.guards.iter_mut().for_each(Guard::notice_incoming);
        let before = self.live();
        let Some((handle, ended)) = self.device.let_go_of(index, end) else { return Ok(()) };
        if !ended {
            return Ok(());
        }
        self.guards.iter_mut().for_each(Guard::lose_incoming);
        self.copied.retain(|copied| copied.context != handle);
        if self.model.allocates {
            // The driver's memory is gone: its holder may do nothing with it but drop the guard.
            let live = self.live();
            let is_gone =
                |guard: &mut Guard| before.contains_key(&guard.address) && !live.contains_key(&guard.address);
            self.guards.extract_if(.., is_gone).for_each(drop);
        }
        self.model.ended = true;
        (self.model.noticed, self.model.registrations) = (false, self.pool.stats().registrations);
        (self.model.was_faulty, self.model.gave_up) = (true, true);
        self.model.blocks.clear();
        Ok(())
    }

    /// When everything of the application's is gone, nobody retains a device any more.
    pub fn leave_no_retain(self) -> Outcome {
        let Self { guards, copied, cleaner, waits, pool, driver, mut device, .. } = self;
        drop((guards, copied, cleaner, waits, pool, driver));
        device.lines.clear();
        device.contexts.clear();
        let deadline = Instant::now() + patience();
        for ordinal in 0..2 {
            while device.sim.primary_retains(ordinal) > 0 {
                ensure!(Instant::now() < deadline, "device {ordinal} is retained by nobody's leave");
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}
