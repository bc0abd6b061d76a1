//! The guard: what runs on a caller's thread between take and drop.
#![allow(unsafe_code)] // `assume_quiescent` is an unsafe promise of the caller's; typed views reinterpret bytes.

use crate::block::{Fate, Out};
use crate::dirty::{Dirty, Writer};
use crate::driver::{Driver, Severity};
use crate::error::Error;
use crate::events::{self, with_relaxed_capture};
use crate::home::Home;
use crate::stream::AsStream;
use crate::sync::{Arc, thread};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::time::Duration;

/// A page-aligned host buffer of a power-of-two length (or the exact one, from `take_exact`), page-locked
/// when [`is_pinned`](Self::is_pinned) says so. Dropping it gives it back to its pool.
///
/// Fill it, enqueue a copy, call [`record_last_use`](Self::record_last_use), drop it: the pool neither
/// writes, reuses, unregisters nor frees the memory before the recorded work is done. Dropping it
/// *without* a record is always safe too; the pool then waits for every context that it knows of.
///
/// A slice taken out of the guard (`&buf[..]`) is outside all tracking: a copy enqueued from it must be
/// recorded, or left to the wait for all contexts.
pub struct PinnedBuffer {
    /// `None` only while dropping.
    block: Option<Out>,
    len: usize,
    dirty: Dirty,
    home: Arc<Home>,
}

const GONE: &str = "the block leaves the guard only in its drop";

impl PinnedBuffer {
    pub(crate) fn new(home: Arc<Home>, block: Out, len: usize) -> Self {
        debug_assert!(len <= block.class().bytes());
        Self { block: Some(block), len, dirty: Dirty::Unknown, home }
    }

    #[inline]
    fn block(&self) -> &Out {
        self.block.as_ref().expect(GONE)
    }

    #[inline]
    fn block_mut(&mut self) -> &mut Out {
        self.block.as_mut().expect(GONE)
    }

    /// Whether the memory is page-locked (registered with `cuMemHostRegister`).
    ///
    /// Fixed from `take` to drop: a fresh buffer is pageable until its first return.
    pub fn is_pinned(&self) -> bool {
        self.block().is_pinned()
    }

    /// Asks the driver, not the pool, whether all of the memory is page-locked
    /// ([`Driver::is_page_locked`]). For checks; [`is_pinned`](Self::is_pinned) costs nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver cannot say.
    pub fn driver_says_page_locked(&self) -> Result<bool, Error> {
        self.home.driver.is_page_locked(self)
    }

    /// Says that only the first `len` bytes differ from zero; larger than the buffer is clamped.
    ///
    /// Without it the whole buffer is re-zeroed after the return. A mutable access after this call makes
    /// everything dirty again, so call it last. Saying too little lets old bytes reach the next taker of
    /// this pool.
    pub fn set_dirty_len(&mut self, len: usize) {
        self.dirty = Dirty::Prefix(len.min(self.len));
    }

    /// Notes that everything enqueued on `stream` up to now may use the buffer.
    ///
    /// Records a pooled event (`cuEventRecord`, timing disabled) that the pool waits for after the drop.
    /// May be called for several streams, and several times for one. Call it after the copy was
    /// enqueued; a copy on another stream needs a record of its own. The per-thread default stream
    /// must be recorded on the thread that uses it.
    ///
    /// # Errors
    ///
    /// [`Error::ForeignStream`] for a stream of another driver than the pool's, [`Error::Capturing`]
    /// while the stream captures a graph, [`Error::Driver`] when the driver refuses. The buffer stays
    /// safe after an error: it then waits for every context at its drop, or is never reused after a
    /// capture.
    pub fn record_last_use(&mut self, stream: &impl AsStream) -> Result<(), Error> {
        let Self { home, block, .. } = self;
        let result = stream.with_stream_ref(|stream| {
            let pool = home.driver.api().identity();
            if stream.driver != pool {
                return Err(pool.refusal(stream.driver));
            }
            let context = home.contexts.of_stream(&home.driver, stream);
            events::record(&home.driver, context, stream)
        });
        let block = block.as_mut().expect(GONE);
        match result {
            Ok(used) => {
                block.unprove();
                block.add_use(used);
                if block.uses().len() > USES_BEFORE_PRUNING {
                    prune(&home.driver, block);
                }
                Ok(())
            }
            Err(error) => {
                home.counts.record_failures.add(1);
                block.worsen(if error == Error::Capturing { Fate::Captured } else { Fate::RecordFailed });
                Err(error)
            }
        }
    }

    /// Declares that no device work touches the buffer any more, so that its return waits for nothing.
    ///
    /// Holds until the next record or mutable access.
    ///
    /// # Safety
    ///
    /// Every copy, kernel or graph that reads or writes this memory must have completed, for example
    /// because its stream was synchronised, and none may be enqueued afterwards without a record.
    /// Otherwise the pool zeroes, reuses or frees memory that the device still reads.
    pub unsafe fn assume_quiescent(&mut self) {
        self.block_mut().prove();
    }

    /// Whether all noted uses are done (`cuEventQuery`), without waiting.
    ///
    /// False while a failed record leaves it unknown. What was never noted is not counted.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver cannot say.
    pub fn is_quiescent(&self) -> Result<bool, Error> {
        match self.block().fate() {
            Fate::Proven | Fate::ContextsIdle => Ok(true),
            Fate::RecordFailed | Fate::Captured => Ok(false),
            Fate::Recorded => self.noted_uses_are_done(),
        }
    }

    /// Blocks until all noted uses are done: polls with naps, so it neither spins nor needs a stream.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver cannot say; the buffer stays safe.
    pub fn wait(&self) -> Result<(), Error> {
        let mut nap = Duration::from_micros(2);
        while !self.noted_uses_are_done()? {
            thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_micros(500));
        }
        Ok(())
    }

    fn noted_uses_are_done(&self) -> Result<bool, Error> {
        let uses = self.block().uses();
        if uses.is_empty() {
            return Ok(true);
        }
        let driver = &self.home.driver;
        with_relaxed_capture(driver, || {
            for used in uses {
                if !events::is_complete(driver, used)? {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }

    /// Before a write: the device must have read what it was told to read.
    ///
    /// Panics when a driver cannot say so and is not known to be gone: a write would put wrong bytes on
    /// the device.
    #[cold]
    fn wait_before_write(&mut self) {
        let seen_complete = self.block().fate() != Fate::RecordFailed && self.wait().is_ok();
        if !seen_complete && let Err(error) = self.wait_for_contexts() {
            panic!("the buffer cannot be written: whether the device still reads it is unknown: {error}");
        }
        for used in self.block_mut().take_uses() {
            if seen_complete { events::recycle(used) } else { events::discard(&self.home.driver, used) }
        }
        // Every context was waited for, once: not again at each access.
        self.block_mut().forgive();
    }

    /// Where a record failed, every context; where an event cannot be asked, those of the noted uses.
    ///
    /// Each by itself: that one context is gone or lost says nothing of the work of another.
    fn wait_for_contexts(&self) -> Result<(), Error> {
        let home = &self.home;
        let mut contexts: Vec<_> = self.block().uses().iter().map(|used| used.context.clone()).collect();
        if self.block().fate() == Fate::RecordFailed {
            contexts.extend(home.contexts.usable());
        }
        with_relaxed_capture(&home.driver, || {
            for context in contexts.iter().filter(|context| !context.is_gone()) {
                if let Err(error) = context.synchronize(&home.driver) {
                    let severity = home.note_device_error(&error);
                    if severity == Severity::Gone {
                        context.mark_gone();
                    }
                    if !severity.ends_all_work() {
                        return Err(error);
                    }
                }
            }
            Ok(())
        })?;
        home.contexts.forget_gone();
        Ok(())
    }

    #[inline]
    fn before_write(&mut self) {
        let block = self.block_mut();
        if !block.uses().is_empty() || block.fate() != Fate::Recorded {
            self.before_noted_write();
        }
    }

    #[cold]
    fn before_noted_write(&mut self) {
        let block = self.block_mut();
        block.unprove();
        if !block.uses().is_empty() || block.fate() == Fate::RecordFailed {
            self.wait_before_write();
        }
    }

    /// The buffer as elements of `T`.
    ///
    /// # Errors
    ///
    /// [`Error::Layout`] when the length is no multiple of the element, or the element is larger than the
    /// alignment of a page allows.
    pub fn as_slice_of<T: bytemuck::Pod>(&self) -> Result<&[T], Error> {
        let len = self.len;
        bytemuck::try_cast_slice(&self[..]).map_err(|error| layout_error::<T>(len, error))
    }

    /// The buffer as mutable elements of `T`; a mutable access like any other.
    ///
    /// # Errors
    ///
    /// As [`as_slice_of`](Self::as_slice_of).
    pub fn as_mut_slice_of<T: bytemuck::Pod>(&mut self) -> Result<&mut [T], Error> {
        let len = self.len;
        bytemuck::try_cast_slice_mut(&mut self[..]).map_err(|error| layout_error::<T>(len, error))
    }

    /// A [`std::io::Write`] from the start of the buffer that keeps the dirty length itself.
    ///
    /// Waits for noted device reads, as every mutable access does.
    pub fn writer(&mut self) -> Writer<'_> {
        self.before_write();
        let Self { block, dirty, len, .. } = self;
        Writer::new(block.as_mut().expect(GONE).slice_mut(*len), dirty)
    }
}

/// A buffer recorded again and again drops the events that are complete, so that they do not pile up.
const USES_BEFORE_PRUNING: usize = 8;

#[cold]
fn prune(driver: &Driver, block: &mut Out) {
    let uses = block.take_uses();
    let checked = with_relaxed_capture(driver, || {
        uses.into_iter().map(|used| (events::is_complete(driver, &used), used)).collect::<Vec<_>>()
    });
    // One is kept in any case: a block with no use at all would wait for whole contexts.
    let last = checked.len() - 1;
    for (index, (complete, used)) in checked.into_iter().enumerate() {
        if complete == Ok(true) && index < last { events::recycle(used) } else { block.add_use(used) }
    }
}

fn layout_error<T>(len: usize, error: bytemuck::PodCastError) -> Error {
    Error::Layout {
        bytes: len,
        element: std::any::type_name::<T>(),
        element_bytes: size_of::<T>(),
        problem: error.to_string(),
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.block().slice(self.len)
    }
}

impl DerefMut for PinnedBuffer {
    /// Waits for noted device reads; one test when there are none. Makes everything dirty again.
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        self.before_write();
        self.dirty = Dirty::Everything;
        let len = self.len;
        self.block_mut().slice_mut(len)
    }
}

// Bytes have no invariant that a panic could break, and the rest is the pool's.
impl UnwindSafe for PinnedBuffer {}
impl RefUnwindSafe for PinnedBuffer {}

impl AsRef<[u8]> for PinnedBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for PinnedBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer")
            .field("len", &self.len)
            .field("is_pinned", &self.block.as_ref().is_some_and(Out::is_pinned))
            .field("noted_uses", &self.block.as_ref().map_or(0, |block| block.uses().len()))
            .finish_non_exhaustive()
    }
}

impl Drop for PinnedBuffer {
    /// One move into the inbox. Never blocks on the device, never panics because of the driver.
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        let home = &self.home;
        if home.fork.is_child() {
            // There is no cleaner here and no usable driver.
            block.leave_in_child();
            return;
        }
        // Without a record the thread's context is how the pool learns where work may be outstanding,
        // and where it may page-lock.
        let unrecorded = block.uses().is_empty() && block.fate() == Fate::Recorded;
        let seen = if unrecorded { home.driver.api().current_context() } else { None };
        let dirty_bytes = self.dirty.bytes(self.len);
        let (class, pinned, epoch) = (block.class(), block.is_pinned(), home.epoch());
        home.counts.class(class).returned[epoch].of(pinned).add(1);
        home.inbox.push(class, block.give_back(dirty_bytes, seen, epoch, home.generation()));
        home.ring();
    }
}
