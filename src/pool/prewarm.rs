//! Page-locking before anybody needs it.

use super::ahead::Ahead;
use super::{CLEAR_TIMEOUT, PinnedPool, not_pinned};
use crate::block::Out;
use crate::error::Error;
use crate::events::with_relaxed_capture;
use crate::registrar;
use crate::report::{Kind, Why, say_failure};
use crate::shelf::Placed;
use crate::sync::Instant;
use std::time::Duration;

impl PinnedPool {
    /// Page-locks `count` *more* buffers of the class of `min_size` and shelves them; returns how many.
    ///
    /// Fewer than `count` when the cap on pooled bytes is reached on the way. Page-locks on this thread, and needs
    /// a context, as [`take_pinned`](Self::take_pinned) does: call it after the application has made its own.
    ///
    /// Most of the time goes into the memory's first touch, so for 32 MiB and more threads help with that while it runs:
    /// at most [`PoolBuilder::prewarm_threads`](crate::PoolBuilder::prewarm_threads).
    ///
    /// # Errors
    ///
    /// As [`take_pinned`](Self::take_pinned), when not even one could be page-locked, the cap among the reasons.
    pub fn prewarm(&self, min_size: usize, count: usize) -> Result<usize, Error> {
        let (class, _) = self.rounding.of_any(min_size)?;
        let home = self.home();
        if home.fork.is_child() {
            return Err(not_pinned(class, "this is a forked child, where CUDA cannot be used"));
        }
        home.driver.api().prepare()?;
        if count > 0 && !home.shelf.has_room_for(class, 0) {
            let cap_bytes = home.shelf.cap_bytes();
            let reason =
                format!("max_pooled_bytes is {cap_bytes}, which has no room for one more on the shelf");
            return Err(not_pinned(class, &reason));
        }
        let mut ahead = Ahead::new(home, class, count, || self.registers_pages());
        let mut done = 0;
        while done < count && home.shelf.has_room_for(class, 0) {
            let block = match ahead.next().and_then(|fresh| self.page_lock(fresh)) {
                Ok(block) => block.never_handed_out(),
                Err(error) if done == 0 => return Err(error),
                Err(error) => {
                    let is_first = home.said.is_first(Kind::PrewarmShort);
                    say_failure!(is_first, "prewarm_short", done, count, %error, "prewarm ends early");
                    break;
                }
            };
            home.counts.class(class).staging.subtract(1);
            let Ok(ready) = block.into_ready(&home.driver) else { break };
            let mut evicted = Vec::new();
            home.clock.tick();
            let shelved = home.shelf.push(ready, home.clone(), |other| evicted.push(other));
            home.let_go(evicted, Why::Cap);
            let kept = match shelved {
                Placed::Kept => true,
                Placed::Refused(block) => {
                    home.let_go(vec![block], Why::Cap);
                    false
                }
                Placed::Stranded(block) => {
                    home.let_go(vec![block], Why::ContextEnded);
                    false
                }
            };
            if !kept {
                break;
            }
            done += 1;
        }
        Ok(done)
    }

    /// Page-locks a fresh block on this thread; counted as staging.
    pub(super) fn page_lock(&self, fresh: Out) -> Result<Out, Error> {
        let home = self.home();
        let class = fresh.class();
        let mut block = fresh.never_handed_out();
        let locked = with_relaxed_capture(&home.driver, || {
            self.learn_the_callers_context();
            registrar::register(home, &mut block, true, |bytes| {
                let mut evicted = Vec::new();
                // Asked for by name, so nobody's rest counts.
                home.shelf.evict_pinned_of_others(class, bytes, Duration::ZERO, |other| evicted.push(other));
                home.let_go(evicted, Why::Ceiling);
                // The ceiling is hard: wait until what was evicted is unregistered.
                let deadline = Instant::now() + CLEAR_TIMEOUT;
                home.progress.wait_until(Some(deadline), || home.counts.retiring_buffers() == 0);
            })
        });
        match locked {
            Ok(()) => {
                home.counts.class(class).staging.add(1);
                Ok(block.hand_out(&home.driver))
            }
            Err(reason) => {
                // Pageable and never shown to a device: freed at once.
                let _ = block.retire().release(&home.driver);
                Err(not_pinned(class, &reason.to_string()))
            }
        }
    }

    /// Whether page-locking would, as far as can be known before, register the pool's own pages.
    fn registers_pages(&self) -> bool {
        with_relaxed_capture(&self.home().driver, || {
            self.learn_the_callers_context();
            registrar::registers_pages(self.home())
        })
    }

    /// The caller's own context may be one that the pool has not seen.
    fn learn_the_callers_context(&self) {
        let home = self.home();
        if let Ok(Some(context)) = home.driver.api().current_context() {
            // Where it cannot be learned, another one will do.
            let _ = home.contexts.learn_current(&home.driver, context);
        }
    }
}
