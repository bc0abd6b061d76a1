//! What a guard knows of the device work on its buffer: recorded uses, noted uses, and the waits for both.
#![allow(unsafe_code)] // `assume_quiescent` is an unsafe promise of the caller's.

use super::{GONE, PinnedBuffer};
use crate::block::{Fate, Out};
use crate::dirty::Dirty;
use crate::driver::{Driver, StreamHandle};
use crate::error::Error;
use crate::events::{self, Use, with_relaxed_capture};
use crate::home::Home;
use crate::notes::{self, Note, Noted, Notes};
use crate::stream::{AsStream, Keep, StreamRef};
use crate::sync::{Arc, AtomicBool, Ordering, thread};
use smallvec::SmallVec;
use std::task::Waker;
use std::time::Duration;

impl PinnedBuffer {
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
        let Self { home, block, flags, .. } = self;
        let block = block.as_mut().expect(GONE);
        let result = stream.with_stream_ref(|stream| {
            let pool = home.driver.api().identity();
            if stream.driver != pool {
                return Err(pool.refusal(stream.driver));
            }
            let context = home.contexts.of_stream(&home.driver, stream);
            let used = events::record(&home.driver, context, stream)?;
            if flags.any_noted() {
                clear_covered_notes(home, block, flags, &used, stream);
            }
            Ok(used)
        });
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
        self.flags = Flags::default();
        let block = self.block_mut();
        block.take_notes();
        block.prove();
    }

    /// Whether all recorded and noted uses are done (`cuEventQuery`), without waiting.
    ///
    /// False while a failed record leaves it unknown, and while a use is noted that only a context-wide wait
    /// can answer (cudarc's own copies, until a record covers them). What was never noted is not counted.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver cannot say.
    pub fn is_quiescent(&self) -> Result<bool, Error> {
        match self.block().fate() {
            Fate::Proven | Fate::ContextsIdle => Ok(true),
            Fate::RecordFailed | Fate::Captured => Ok(false),
            Fate::Recorded if self.flags.any_noted() => Ok(false),
            Fate::Recorded => self.recorded_uses_are_done(),
        }
    }

    /// Blocks until all recorded and noted uses are done. Recorded ones are polled with naps, so it neither
    /// spins nor needs a stream; for noted ones it waits for their contexts (`cuCtxSynchronize`).
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver cannot say; the buffer stays safe.
    pub fn wait(&self) -> Result<(), Error> {
        if self.flags.any_noted() {
            let notes = self.block().notes().lock().clone();
            wait_for_notes(&self.home, &notes)?;
        }
        nap_until(|| self.recorded_uses_are_done())
    }

    pub(crate) fn recorded_uses_are_done(&self) -> Result<bool, Error> {
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
    /// Panics when the driver cannot say so and is not known to be gone: a write would put wrong bytes on
    /// the device.
    #[cold]
    fn wait_before_write(&mut self) {
        if let Err(error) = self.wait_for_all_recorded() {
            self.unless_all_work_has_ended("written", &error);
        }
        let failed = self.block().fate() == Fate::RecordFailed;
        for used in self.block_mut().take_uses() {
            if failed { events::discard(&self.home.driver, used) } else { events::recycle(used) }
        }
        // Every context was waited for, once: not again at each access.
        self.block_mut().forgive();
    }

    /// The recorded events; where a record failed or an event cannot be asked, whole contexts.
    fn wait_for_all_recorded(&self) -> Result<(), Error> {
        if self.block().fate() != Fate::RecordFailed && nap_until(|| self.recorded_uses_are_done()).is_ok() {
            return Ok(());
        }
        let home = &self.home;
        with_relaxed_capture(&home.driver, || {
            home.contexts.usable().iter().try_for_each(|context| context.synchronize(&home.driver))
        })?;
        Ok(())
    }

    /// Before a read by the host: the device must have written what it was told to write.
    #[inline]
    pub(super) fn before_read(&self) {
        if self.flags.writes {
            self.before_noted_read();
        }
    }

    /// # Panics
    ///
    /// When the driver cannot say whether the device has written, and is not known to be gone.
    #[cold]
    fn before_noted_read(&self) {
        if self.flags.writes_waited.load(Ordering::Acquire) {
            return;
        }
        let notes: Notes = self.block().notes().lock().iter().filter(|note| note.writes).cloned().collect();
        if let Err(error) = wait_for_notes(&self.home, &notes) {
            self.unless_all_work_has_ended("read", &error);
        }
        self.flags.writes_waited.store(true, Ordering::Release);
    }

    #[inline]
    pub(super) fn before_write(&mut self) {
        let Self { block, flags, .. } = self;
        let block = block.as_ref().expect(GONE);
        if flags.any_noted() || !block.uses().is_empty() || block.fate() != Fate::Recorded {
            self.before_noted_write();
        }
    }

    #[cold]
    fn before_noted_write(&mut self) {
        assert!(
            !self.flags.captured() && self.block().fate() != Fate::Captured,
            "the buffer cannot be written: a copy of it was captured into a CUDA graph, which reads it again at \
             every replay; write it before the capture, or call `assume_quiescent` once that is right"
        );
        self.block_mut().unprove();
        if self.flags.any_noted() {
            let notes = self.block_mut().take_notes();
            if let Err(error) = wait_for_notes(&self.home, &notes) {
                *self.block().notes().lock() = notes;
                self.unless_all_work_has_ended("written", &error);
            }
            self.flags = Flags::default();
        }
        let block = self.block();
        if !block.uses().is_empty() || block.fate() == Fate::RecordFailed {
            self.wait_before_write();
        }
    }

    fn unless_all_work_has_ended(&self, what: &str, error: &Error) {
        if !matches!(error, Error::Driver(call) if self.home.note_device_error(call).ends_all_work()) {
            panic!("the buffer cannot be {what}: whether the device is done with it is unknown: {error}");
        }
    }

    /// Notes that a copy from the buffer is about to be enqueued on `stream`, by code that is not ours.
    pub(crate) fn note_device_read(&self, stream: &impl AsStream) {
        stream.with_stream_ref(|stream| self.note(stream, false));
    }

    /// Notes that a copy into the buffer is about to be enqueued on `stream`, by code that is not ours. Waits
    /// for the uses noted before, whose bytes the copy would overwrite.
    pub(crate) fn note_device_write(&mut self, stream: &impl AsStream) {
        self.before_write();
        self.dirty = Dirty::Everything;
        stream.with_stream_ref(|stream| self.note(stream, true));
        self.flags.writes = true;
        *self.flags.writes_waited.get_mut() = false;
    }

    /// The context-wide waits that noted uses need, to be made on another thread.
    pub(crate) fn noted_wait(&self) -> Option<NotedWait> {
        let notes = self.flags.any_noted().then(|| self.block().notes().lock().clone())?;
        Some(NotedWait { home: self.home.clone(), notes })
    }

    /// Wakes the task when a recorded use may be done; the task asks again.
    pub(crate) fn wake_when_done(&self, waker: &Waker) {
        let events: SmallVec<_> = self.block().uses().iter().map(|used| used.event).collect();
        if !events.is_empty() {
            self.home.watch(events, waker);
        }
    }

    fn note(&self, stream: &StreamRef<'_>, writes: bool) {
        let home = &self.home;
        if stream.driver != home.driver.api().identity() {
            // A stream that the pool's driver does not know; on such a pool nothing is page-locked for it,
            // and a copy from pageable memory is staged before its call returns.
            return;
        }
        match Note::of(&home.driver, &home.contexts, stream, writes) {
            Noted::Use(note) => {
                notes::add(&mut self.block().notes().lock(), note);
                self.flags.reads.store(true, Ordering::Release);
            }
            Noted::Captured => self.flags.captured.store(true, Ordering::Release),
        }
    }
}

/// A wait for noted uses that another thread can make; it keeps the pool alive, not the buffer.
#[derive(Debug)]
pub(crate) struct NotedWait {
    home: Arc<Home>,
    notes: Notes,
}

impl NotedWait {
    pub(crate) fn block(self) -> Result<(), Error> {
        wait_for_notes(&self.home, &self.notes)
    }
}

/// What was noted on a guard, for the one test that an access makes.
#[derive(Debug, Default)]
pub(super) struct Flags {
    /// Something is in the block's notes.
    reads: AtomicBool,
    /// A device write is among them. Plain, because only an exclusive reference notes one, so that reading
    /// the buffer in a loop tests it once.
    writes: bool,
    /// The device writes were waited for, by a shared reference that could not clear `writes`.
    writes_waited: AtomicBool,
    captured: AtomicBool,
}

impl Flags {
    #[inline]
    pub(super) fn any_noted(&self) -> bool {
        self.reads.load(Ordering::Relaxed) || self.captured.load(Ordering::Relaxed)
    }

    fn captured(&self) -> bool {
        self.captured.load(Ordering::Acquire)
    }
}

/// At the drop: notes on the default stream become exact events; others need a context-wide wait.
#[cold]
pub(super) fn settle_notes(home: &Arc<Home>, block: &mut Out, flags: &Flags) {
    if flags.captured() {
        block.worsen(Fate::Captured);
    }
    for note in block.take_notes() {
        if !note.on_default_stream {
            block.worsen(Fate::RecordFailed);
            continue;
        }
        match record_default_stream(home, &note) {
            Ok(used) => {
                block.unprove();
                block.add_use(used);
            }
            Err(error) => {
                tracing::debug!(%error, "a use noted on the default stream waits for its context");
                block.worsen(Fate::RecordFailed);
            }
        }
    }
}

/// An event on the legacy default stream stands for every copy made on it so far.
fn record_default_stream(home: &Arc<Home>, note: &Note) -> Result<Use, Error> {
    let context = note.context.clone();
    let stream = StreamRef {
        driver: home.driver.api().identity(),
        context: context.handle,
        stream: StreamHandle(0),
        keep: Keep::Caller,
    };
    events::record(&home.driver, context, &stream)
}

/// A record on a stream stands for the uses noted on that stream before it, and for no others.
fn clear_covered_notes(home: &Home, block: &Out, flags: &mut Flags, used: &Use, stream: &StreamRef<'_>) {
    if let Ok(id) = home.driver.api().stream_id(stream.stream) {
        let mut notes = block.notes().lock();
        notes.retain(|note| !note.is_of(&used.context, id));
        *flags.reads.get_mut() = !notes.is_empty();
    }
}

fn wait_for_notes(home: &Arc<Home>, notes: &[Note]) -> Result<(), Error> {
    let driver = &home.driver;
    for note in notes {
        let exact = if note.on_default_stream { record_default_stream(home, note).ok() } else { None };
        match exact {
            Some(used) => {
                nap_until(|| Ok(with_relaxed_capture(driver, || events::is_complete(driver, &used))?))?;
                events::recycle(used);
            }
            None => with_relaxed_capture(driver, || note.context.synchronize(driver))?,
        }
    }
    Ok(())
}

/// Polls with naps that grow from 2 us to 0.5 ms.
fn nap_until(mut done: impl FnMut() -> Result<bool, Error>) -> Result<(), Error> {
    let mut nap = Duration::from_micros(2);
    while !done()? {
        thread::sleep(nap);
        nap = (nap * 2).min(Duration::from_micros(500));
    }
    Ok(())
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
