//! The pool as its users see it: building one, taking from it, governing it.

mod ahead;
mod builder;
mod fresh;
mod prewarm;
mod report;
#[cfg(feature = "sim")]
mod testing;

pub use builder::PoolBuilder;
pub use report::ShutdownReport;

use crate::buffer::PinnedBuffer;
use crate::error::Error;
use crate::harvest::find_returned;
use crate::home::Home;
use crate::os::ForkWord;
use crate::registrar::NotRegistered;
use crate::report::Why;
use crate::shelf::Door;
use crate::size_class::{Rounding, SizeClass};
use crate::stats::Stats;
use crate::sync::{Arc, Instant, from_now};
use fresh::{fresh, fresh_in_child, missed};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::time::Duration;

/// How much longer than the pool's own timeout `shutdown` waits for the threads to end.
const JOIN_GRACE: Duration = Duration::from_secs(2);

/// How long `clear` waits for what it evicted to be unregistered and freed.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(2);

/// A pool of page-locked host buffers. A handle: clones share one pool.
///
/// Dropping the last handle tells the threads to finish and does not wait; buffers still out stay valid
/// and are released when they drop.
#[derive(Clone, Debug)]
pub struct PinnedPool {
    /// Beside the handle and not behind it, like the next two, so that a take follows no pointer to a pointer.
    door: Door<Home>,
    rounding: Rounding,
    fork: ForkWord,
    _handle: Arc<Handle>,
}

/// What all clones share; its drop closes the pool.
#[derive(Debug)]
struct Handle {
    home: Arc<Home>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.home.is_over() {
            self.home.close();
        }
    }
}

// A panic of a caller leaves no pool half changed: nothing of the caller's runs inside it.
impl UnwindSafe for PinnedPool {}
impl RefUnwindSafe for PinnedPool {}

impl PinnedPool {
    /// Settings for a new pool.
    pub fn builder() -> PoolBuilder {
        PoolBuilder::default()
    }

    fn new(home: Arc<Home>) -> Self {
        Self {
            door: home.shelf.door(home.clone()),
            rounding: Rounding::of(home.counts.all_classes()),
            fork: home.fork,
            _handle: Arc::new(Handle { home }),
        }
    }

    /// Whether this is a forked child of the process that made the pool.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.fork.is_child()
    }

    #[inline]
    fn home(&self) -> &Arc<Home> {
        self.door.owner()
    }

    /// A buffer of `min_size.next_power_of_two()` bytes (1 for 0), all zero, page-aligned; or of the size in between
    /// that [`PoolBuilder::size_classes`] asks for.
    ///
    /// On a hit it is page-locked; on a miss it is fresh, pageable memory that the cleaner page-locks after
    /// its first return. Never fails for lack of a GPU, and never waits for one.
    ///
    /// # Panics
    ///
    /// Where `vec![0; n]` would end the program too: when the size cannot be represented or the memory
    /// is exhausted. The message names the size. [`try_take`](Self::try_take) gives an error instead.
    pub fn take(&self, min_size: usize) -> PinnedBuffer {
        // A hit carries no error about: on a cold take every line of code and every copied word counts.
        match self.hit(min_size) {
            Some(buffer) => buffer,
            None => self.take_missing(min_size),
        }
    }

    #[inline(always)]
    fn hit(&self, min_size: usize) -> Option<PinnedBuffer> {
        let (class, len) = self.rounding.of_hit(min_size)?;
        if self.fork.is_child() {
            return None;
        }
        let (block, home) = self.door.pop(class)?;
        Some(PinnedBuffer::new(home, block.hand_out(), len))
    }

    #[cold]
    #[inline(never)]
    fn take_missing(&self, min_size: usize) -> PinnedBuffer {
        let taken = self.take_otherwise(min_size);
        taken.unwrap_or_else(|error| panic!("pinpool::take({min_size}): {error}"))
    }

    /// As [`take`](Self::take), with an error for a size that cannot be had.
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`] above `isize::MAX / 2` bytes, [`Error::OutOfMemory`] when the system refuses.
    pub fn try_take(&self, min_size: usize) -> Result<PinnedBuffer, Error> {
        if let Some(buffer) = self.hit(min_size) {
            return Ok(buffer);
        }
        self.take_otherwise(min_size)
    }

    /// Where [`Self::hit`] found nothing. The shelf that it looked at is not looked at again.
    fn take_otherwise(&self, min_size: usize) -> Result<PinnedBuffer, Error> {
        if self.is_inherited() {
            return self.take_rounded(min_size, true);
        }
        if let Some((class, len)) = self.rounding.of_hit(min_size) {
            return self.take_slow(class, len, true);
        }
        let (class, len) = self.rounding.of_finer(min_size)?;
        match self.door.pop(class) {
            Some((block, home)) => Ok(PinnedBuffer::new(home, block.hand_out(), len)),
            None => self.take_slow(class, len, true),
        }
    }

    /// A buffer whose `len()` is exactly `len`; its memory is of the size class all the same.
    ///
    /// # Errors
    ///
    /// As [`try_take`](Self::try_take).
    pub fn take_exact(&self, len: usize) -> Result<PinnedBuffer, Error> {
        let (class, _) = self.rounding.of_any(len)?;
        self.take_len(class, len, true)
    }

    /// A buffer with unspecified contents, old bytes of this pool or zero: for callers who overwrite all.
    ///
    /// # Errors
    ///
    /// As [`try_take`](Self::try_take).
    pub fn take_unzeroed(&self, min_size: usize) -> Result<PinnedBuffer, Error> {
        self.take_rounded(min_size, false)
    }

    /// A hit in a class between powers of two comes this way too.
    fn take_rounded(&self, min_size: usize, zeroed: bool) -> Result<PinnedBuffer, Error> {
        let (class, len) = self.rounding.of_any(min_size)?;
        self.take_len(class, len, zeroed)
    }

    fn take_len(&self, class: SizeClass, len: usize, zeroed: bool) -> Result<PinnedBuffer, Error> {
        let home = self.home();
        if home.fork.is_child() {
            return fresh_in_child(home, class, len);
        }
        if let Some((block, home)) = self.door.pop(class) {
            return Ok(PinnedBuffer::new(home, block.hand_out(), len));
        }
        self.take_slow(class, len, zeroed)
    }

    #[cold]
    fn take_slow(&self, class: SizeClass, len: usize, zeroed: bool) -> Result<PinnedBuffer, Error> {
        let home = self.home();
        if let Some(block) = find_returned(home, class, zeroed) {
            return Ok(PinnedBuffer::new(home.clone(), block, len));
        }
        let block = missed(home, class)?;
        home.counts.class(class).misses.of(false).add(1);
        Ok(PinnedBuffer::new(home.clone(), block, len))
    }

    /// A page-locked buffer, or an error that says why not. On a miss it page-locks on this thread, which
    /// takes milliseconds to seconds.
    ///
    /// # Errors
    ///
    /// As [`try_take`](Self::try_take), [`Error::NoCuda`], and [`Error::NotPinned`] with the reason.
    pub fn take_pinned(&self, min_size: usize) -> Result<PinnedBuffer, Error> {
        let (class, len) = self.rounding.of_any(min_size)?;
        let home = self.home();
        if home.fork.is_child() {
            return Err(not_pinned(class, "this is a forked child, where CUDA cannot be used"));
        }
        home.driver.api().prepare()?;
        if home.is_lost() {
            // What is still page-locked is of no more use than plain memory.
            return Err(not_pinned(class, &NotRegistered::Lost.to_string()));
        }
        while let Some((block, home)) = home.shelf.pop(class) {
            let buffer = PinnedBuffer::new(home, block.hand_out(), len);
            if buffer.is_pinned() {
                return Ok(buffer);
            }
            // Pooled while nothing could be pinned; its return page-locks it.
        }
        if let Some(block) = find_returned(home, class, true) {
            let buffer = PinnedBuffer::new(home.clone(), block, len);
            if buffer.is_pinned() {
                return Ok(buffer);
            }
        }
        let block = self.page_lock(fresh(home, class)?)?;
        let counts = home.counts.class(class);
        counts.misses.of(true).add(1);
        counts.staging.subtract(1);
        Ok(PinnedBuffer::new(home.clone(), block, len))
    }

    /// Changes how many idle bytes are kept. When it returns, the shelves obey the cap; what was evicted,
    /// largest class first, is unregistered and freed in the background. 0 keeps nothing.
    pub fn set_max_pooled_bytes(&self, bytes: usize) {
        if self.home().is_over() {
            return;
        }
        let mut evicted = Vec::new();
        self.home().shelf.set_cap(bytes, |block| evicted.push(block));
        self.home().let_go(evicted, Why::Order);
    }

    /// The cap on idle bytes; 0 in a forked child, which keeps nothing.
    pub fn max_pooled_bytes(&self) -> usize {
        // A fork may have copied the lock as it was held.
        if self.home().fork.is_child() { 0 } else { self.home().shelf.cap_bytes() }
    }

    /// Evicts pooled buffers, largest class first, to at most `bytes`; the cap stays as it is. Unregistering
    /// and freeing happen in the background.
    pub fn trim_to(&self, bytes: usize) {
        if self.home().is_over() {
            return;
        }
        let mut evicted = Vec::new();
        self.home().shelf.trim_to(bytes, |block| evicted.push(block));
        self.home().let_go(evicted, Why::Order);
    }

    /// Unregisters and frees everything pooled, and waits for it, at most two seconds.
    pub fn clear(&self) {
        let home = self.home();
        if home.is_over() {
            return;
        }
        self.trim_to(0);
        let deadline = Instant::now() + CLEAR_TIMEOUT;
        home.progress.wait_until(Some(deadline), || home.counts.retiring_buffers() == 0);
    }

    /// Waits until every buffer returned before the call has been dealt with: shelved, freed, quarantined, or held for
    /// a graph that it was captured into, whose end it does not wait for. False when the timeout came first.
    pub fn drain(&self, timeout: Duration) -> bool {
        !self.home().is_over() && self.home().drain(timeout)
    }

    /// While the returned guard lives, no pool of this driver makes a context-wide wait (`cuCtxSynchronize`).
    ///
    /// For captures of CUDA graphs on streams that no pool was ever shown: such a wait would invalidate them. Buffers
    /// dropped without a record wait meanwhile. A wait that has begun before this call is not called back: take the
    /// hold before work is given away without a record, not in the moment before a capture begins.
    ///
    /// None begins once this has returned. For one that has begun it waits, but at most 20 ms: the driver may be in it
    /// for as long as device work lasts.
    pub fn hold_context_waits(&self) -> ContextWaitHold {
        self.home().hold_context_waits();
        ContextWaitHold { home: self.home().clone() }
    }

    /// While the returned guard lives, the pool's thread deals with nothing that is returned. Only with
    /// feature `sim`: for tests of what happens in between.
    #[cfg(feature = "sim")]
    pub fn hold_cleaner(&self) -> CleanerHold {
        self.home().hold_cleaner();
        CleanerHold { home: self.home().clone() }
    }

    /// Deals with everything returned, unregisters and frees everything pooled, ends the threads, and
    /// reports. Waits for outstanding device work at most as long as the builder says; what has not
    /// finished by then is quarantined. The next drop of a buffer starts the pool again.
    pub fn shutdown(&self) -> ShutdownReport {
        let home = self.home();
        if home.is_over() {
            return ShutdownReport::default();
        }
        let before = home.stats();
        let generation = home.next_generation();
        let deadline = from_now(home.settings.shutdown_timeout);
        // Others may go on using the pool, so that its queue is never empty: what counts is what was returned
        // before the call. What is returned later outlives the shutdown.
        let drained = home.drain(home.settings.shutdown_timeout);
        let order = home.order_stop_after_drain(deadline, drained, Some(generation));
        let ended = home.join(order, deadline + JOIN_GRACE);
        ShutdownReport::between(&before, &home.stats(), ended, home.take_reasons())
    }

    /// What the pool did and holds.
    pub fn stats(&self) -> Stats {
        self.home().stats()
    }
}

fn not_pinned(class: SizeClass, reason: &str) -> Error {
    Error::NotPinned { bytes: class.bytes(), reason: reason.to_string() }
}

/// While it lives, no context-wide wait is made; see [`PinnedPool::hold_context_waits`].
#[derive(Debug)]
#[must_use = "the hold ends when it is dropped"]
pub struct ContextWaitHold {
    home: Arc<Home>,
}

impl Drop for ContextWaitHold {
    fn drop(&mut self) {
        if !self.home.fork.is_child() {
            self.home.release_context_waits();
        }
    }
}

/// While it lives, the pool's thread does nothing; see [`PinnedPool::hold_cleaner`].
#[cfg(feature = "sim")]
#[derive(Debug)]
#[must_use = "the hold ends when it is dropped"]
pub struct CleanerHold {
    home: Arc<Home>,
}

#[cfg(feature = "sim")]
impl Drop for CleanerHold {
    fn drop(&mut self) {
        if !self.home.fork.is_child() {
            self.home.release_cleaner();
        }
    }
}
