//! What a guard knows of the device work on its buffer, recorded (`record.rs`) and noted, and the waits for both.
#![allow(unsafe_code)] // `assume_quiescent` is an unsafe promise of the caller's.

use super::flags::{CAPTURED, CAPTURED_WRITE, FOREIGN, Flags, NOTED, RECORDED, WRITES};
use super::{PinnedBuffer, captured};
use crate::block::{Fate, Out};
use crate::context_end;
use crate::contexts::Context;
use crate::driver::{ContextHandle, Driver, Severity};
use crate::error::{CallError, Error};
use crate::events::{self, with_relaxed_capture};
use crate::home::Home;
use crate::notes::{self, Note, Notes, nap_until};
use crate::report::say;
use crate::sync::Arc;

impl PinnedBuffer {
    /// Declares that no device work touches the buffer any more, so that its return waits for nothing.
    ///
    /// Holds until the next record, noted copy or mutable access.
    ///
    /// # Safety
    ///
    /// Every copy, kernel or graph that reads or writes this memory must have completed, for example
    /// because its stream was synchronised, and none may be enqueued afterwards without a record.
    /// Otherwise the pool zeroes, reuses or frees memory that the device still reads.
    pub unsafe fn assume_quiescent(&mut self) {
        self.flags = Flags::default();
        self.flags.add(RECORDED);
        let block = self.block_mut();
        block.take_notes();
        block.holds().lock().clear();
        block.prove();
    }

    /// Whether all recorded and noted uses are done (`cuEventQuery`), without waiting.
    ///
    /// False while a failed record leaves it unknown, after a capture (even once its graph is gone, until the first
    /// mutable access, which waits), and while a use is noted that only a
    /// context-wide wait can answer for (cudarc's own copies, until [`wait`](Self::wait) or a record covers
    /// them). What was never noted is not counted.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver cannot say, [`Error::ForkedChild`].
    pub fn is_quiescent(&self) -> Result<bool, Error> {
        match self.block().fate() {
            Fate::RecordFailed | Fate::Unknown | Fate::Captured => Ok(false),
            _ if self.flags.has(NOTED | FOREIGN | CAPTURED) => Ok(false),
            Fate::Proven | Fate::ContextsIdle => Ok(true),
            Fate::Recorded => self.recorded_uses_are_done(),
        }
    }

    /// Blocks until all recorded and noted uses are done. Recorded ones are polled with naps, so it neither
    /// spins nor needs a stream; for noted ones, and after a failed record, it waits for whole contexts
    /// (`cuCtxSynchronize`).
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver cannot say; [`Error::Capturing`] when a copy was captured into a graph that
    /// still exists; [`Error::ContextWaitsHeld`]; [`Error::ForkedChild`]. The buffer stays safe.
    pub fn wait(&self) -> Result<(), Error> {
        let waited = match self.slow_wait()? {
            Some(wait) => wait.block()?,
            None => Notes::new(),
        };
        nap_until(|| self.recorded_uses_are_done())?;
        self.waits_are_over(&waited);
        Ok(())
    }

    pub(crate) fn recorded_uses_are_done(&self) -> Result<bool, Error> {
        let uses = self.block().uses();
        if uses.is_empty() {
            return Ok(true);
        }
        if self.home.fork.is_child() {
            return Err(Error::ForkedChild);
        }
        let driver = &self.home.driver;
        with_relaxed_capture(driver, || {
            for used in uses {
                if used.context.is_gone() {
                    continue;
                }
                match events::is_complete(driver, used) {
                    Ok(true) => {}
                    Ok(false) => return Ok(false),
                    // Its work ended with its context.
                    Err(error) if context_end::has_ended(&self.home, &used.context, &error) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(true)
        })
    }

    /// What has to block in the driver before the recorded uses say that everything is done, if anything has.
    pub(crate) fn slow_wait(&self) -> Result<Option<SlowWait>, Error> {
        let fate = self.block().fate();
        captured::end_if_over(self.block(), &self.flags);
        if self.flags.has(CAPTURED) {
            return Err(Error::Capturing);
        }
        let everything = fate == Fate::RecordFailed || self.flags.has(FOREIGN);
        if !everything && !self.flags.has(NOTED) {
            return Ok(None);
        }
        if self.home.fork.is_child() {
            return Err(Error::ForkedChild);
        }
        let notes = self.block().notes().lock().clone();
        Ok(Some(SlowWait { home: self.home.clone(), notes, everything }))
    }

    /// These notes were waited for, and the recorded uses are done.
    pub(crate) fn waits_are_over(&self, waited: &[Note]) {
        if !waited.is_empty() {
            let mut notes = self.block().notes().lock();
            notes::clear_waited(&mut notes, waited);
            if notes.is_empty() {
                self.flags.remove(NOTED);
            }
        }
        // Only an exclusive reference notes a write of the device, so none is newer than the wait.
        self.flags.remove(WRITES);
    }

    /// Before a read by the host: the device must have written what it was told to write.
    #[inline]
    pub(super) fn before_read(&self) {
        if self.flags.has(WRITES | CAPTURED_WRITE) {
            self.wait_before_read();
        }
    }

    /// # Panics
    ///
    /// When the driver cannot say whether the device has written, and is not known to be gone.
    #[cold]
    #[inline(never)]
    fn wait_before_read(&self) {
        if self.home.fork.is_child() {
            // The child's own copy of the bytes, which no device reaches.
            return;
        }
        captured::end_if_over(self.block(), &self.flags);
        assert!(
            !self.flags.has(CAPTURED_WRITE),
            "the buffer cannot be read: a copy into it was captured into a CUDA graph, which writes it at every \
             replay; read it before the capture, when the graph is gone, or call `assume_quiescent` once that is right"
        );
        let waited = match self.slow_wait() {
            // A captured copy *from* the buffer, which a read does not disturb: the write is waited for alone.
            Err(Error::Capturing) => Some(self.slow_wait_in_spite_of_a_capture()),
            Err(error) => return self.unless_all_work_has_ended("read", &error),
            Ok(wait) => wait,
        };
        let waited = waited.map_or(Ok(Notes::new()), SlowWait::block);
        match waited.and_then(|waited| nap_until(|| self.recorded_uses_are_done()).map(|()| waited)) {
            Ok(waited) => self.waits_are_over(&waited),
            Err(error) => self.unless_all_work_has_ended("read", &error),
        }
    }

    fn slow_wait_in_spite_of_a_capture(&self) -> SlowWait {
        SlowWait {
            home: self.home.clone(),
            notes: self.block().notes().lock().clone(),
            everything: self.flags.has(FOREIGN) || self.block().fate() == Fate::RecordFailed,
        }
    }

    /// Before a write by the host, or by the device: everything that was noted must be over.
    #[inline]
    pub(super) fn before_write(&mut self) {
        if self.flags.any() {
            self.wait_before_write();
        }
    }

    /// # Panics
    ///
    /// When the driver cannot say whether the device has read, and is not known to be gone: a write would put
    /// wrong bytes on the device.
    #[cold]
    #[inline(never)]
    fn wait_before_write(&mut self) {
        if self.home.fork.is_child() {
            return;
        }
        captured::end_if_over(self.block(), &self.flags);
        assert!(
            !self.flags.has(CAPTURED),
            "the buffer cannot be written: a copy of it was captured into a CUDA graph, which reads it again at \
             every replay; write it before the capture, when the graph is gone, or call `assume_quiescent` once that \
             is right"
        );
        let waited = self.wait().or_else(|error| self.wait_for_contexts_instead(error));
        if let Err(error) = waited {
            self.unless_all_work_has_ended("written", &error);
        }
        // Whether pending or not, an event of a failed record says nothing.
        let failed = self.block().fate() == Fate::RecordFailed;
        for used in self.block_mut().take_uses() {
            if failed { events::discard(&self.home.driver, used) } else { self.block_mut().recycle(used) }
        }
        // Every context was waited for, once: not again at each access.
        let block = self.block_mut();
        block.take_notes();
        block.forgive();
        block.unprove();
        self.flags = Flags::default();
    }

    /// An event cannot be asked: the contexts can.
    fn wait_for_contexts_instead(&mut self, error: Error) -> Result<(), Error> {
        if self.block().uses().is_empty() || !matches!(error, Error::Driver(_)) {
            return Err(error);
        }
        SlowWait { home: self.home.clone(), notes: Notes::new(), everything: true }.block().map(drop)?;
        self.block_mut().worsen(Fate::RecordFailed);
        Ok(())
    }

    fn unless_all_work_has_ended(&self, what: &str, error: &Error) {
        if !matches!(error, Error::Driver(call) if self.home.note_device_error(call).is_final()) {
            panic!("the buffer cannot be {what}: whether the device is done with it is unknown: {error}");
        }
    }
}

/// The part of a wait that blocks in the driver; any thread can make it. It keeps the pool alive, not the buffer.
#[derive(Debug)]
pub(crate) struct SlowWait {
    home: Arc<Home>,
    notes: Notes,
    /// Every context that is known, not only those of the notes.
    everything: bool,
}

impl SlowWait {
    pub(crate) fn driver(&self) -> &Driver {
        &self.home.driver
    }

    /// Gives the notes that were waited for.
    pub(crate) fn block(self) -> Result<Notes, Error> {
        let Self { home, notes, everything } = self;
        let driver = &home.driver;
        // Not only for a while: the thread that would wait may be the one that captures.
        let wait = home.begin_context_wait();
        let may_wait =
            |context: &Context| match wait.is_none() || home.captures.forbid_wait_for(driver, context) {
                true => Err(Error::ContextWaitsHeld),
                false => Ok(()),
            };
        if everything {
            with_relaxed_capture(driver, || {
                // One that is not known is not waited for.
                home.contexts.learn_active_primaries(driver)?;
                let contexts = home.contexts.usable();
                contexts.iter().try_for_each(|context| may_wait(context))?;
                // Each by itself: that one context is gone or lost says nothing of the work of another.
                let waited = contexts.iter().map(|context| synchronize_or_ended(&home, context));
                Ok::<_, Error>(waited.fold(Ok(()), Result::and)?)
            })?;
        } else {
            notes::wait_for(driver, &notes, may_wait, |context, error| {
                context_end::has_ended(&home, context, error)
            })?;
        }
        drop(wait);
        Ok(notes)
    }
}

/// Waits for a context, unless its work has ended for good.
fn synchronize_or_ended(home: &Arc<Home>, context: &Arc<Context>) -> Result<(), CallError> {
    context.synchronize(&home.driver).or_else(|error| {
        let ended = context_end::has_ended(home, context, &error);
        if ended || home.note_device_error(&error) == Severity::Lost { Ok(()) } else { Err(error) }
    })
}

/// At the drop without a record: the context that is current on this thread.
pub(super) fn seen_context(home: &Home, block: &mut Out) -> Option<ContextHandle> {
    home.driver.api().current_context().unwrap_or_else(|_| {
        block.lose_its_context();
        None
    })
}

/// At the drop: what the notes leave for the cleaner to wait for.
///
/// Where the caller recorded, the caller keeps track: a use noted on the default stream becomes an exact event
/// there, and one on another stream needs its context. Where nobody recorded, a slice of the buffer may have been
/// copied anywhere besides, so every context is waited for, as without a note.
#[cold]
pub(super) fn settle_notes(home: &Arc<Home>, block: &mut Out, flags: &Flags) {
    captured::end_if_over(block, flags);
    if flags.has(CAPTURED) {
        block.worsen(Fate::Captured);
    }
    if flags.has(FOREIGN) {
        block.worsen(Fate::RecordFailed);
    }
    let caller_records = !block.uses().is_empty();
    for note in block.take_notes() {
        let exact = caller_records && note.on_default_stream;
        match exact.then(|| notes::record_default_stream(&home.driver, &note)) {
            Some(Ok(used)) => {
                block.unprove();
                block.add_use(used);
            }
            Some(Err(error)) => {
                say!(DEBUG, "note_failed", %error, "a use noted on the default stream waits for its context");
                block.worsen(Fate::RecordFailed);
                notes::add(&mut block.notes().lock(), note);
            }
            None => {
                block.worsen(Fate::RecordFailed);
                // Whoever waits has to know the context, also over a shutdown.
                notes::add(&mut block.notes().lock(), note);
            }
        }
    }
}
