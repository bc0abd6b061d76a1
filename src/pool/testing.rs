//! What tests of the pool, and of code that uses it, may do besides.

use super::PinnedPool;
use crate::report::Why;
use crate::shelf::Placed;
use std::time::Duration;

impl PinnedPool {
    /// Lets time pass for the pool's policies (ageing, pauses, what counts as lately), and waits until its thread has
    /// looked once at what that means. Only with feature `sim`: for tests that do not want to wait.
    pub fn let_time_pass(&self, time: Duration) {
        self.home().let_time_pass(time);
    }

    /// For the bench of the shelf alone: takes a ready block off and puts it back, `count` times; gives how often
    /// there was one.
    #[doc(hidden)]
    pub fn shelf_cycles(&self, min_size: usize, count: usize) -> usize {
        let Ok((class, _)) = self.rounding.of_any(min_size) else { return 0 };
        let mut evicted = Vec::new();
        let mut done = 0;
        while done < count
            && let Some((block, home)) = self.door.pop(class)
        {
            if let Placed::Refused(block) | Placed::Stranded(block) =
                self.home().shelf.push(block, home, |other| evicted.push(other))
            {
                evicted.push(block);
            }
            done += 1;
        }
        self.home().let_go(evicted, Why::Cap);
        done
    }
}
