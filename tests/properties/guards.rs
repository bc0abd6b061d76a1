//! What a script does with a guard, and what the model says of it.
#![allow(unsafe_code)] // `assume_quiescent` is a promise, which the script keeps.

use crate::device::Mark;
use crate::ensure;
use crate::graphs::GraphState;
use crate::model::{Fate, Place, Returned};
use crate::script::{KIB, Text};
use crate::world::{Copied, Outcome, World, patience};
use pinpool::sim::Fault;
use pinpool::{Error, PinnedBuffer};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

/// As large as the largest class that scripts use.
pub const TABLE_BYTES: usize = 2048 * KIB;

/// What the pool knows of the bytes that differ from zero.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Dirty {
    Unknown,
    Everything,
    Prefix(usize),
}

pub struct Guard {
    pub buffer: PinnedBuffer,
    pub address: usize,
    /// What the bytes are, but for a copy from the device that is not done.
    pub content: Vec<u8>,
    pub incoming: Option<Arc<Mark>>,
    /// Bytes from the start that were written by this holder.
    extent: usize,
    dirty: Dirty,
    fate: Fate,
    uses: Vec<Arc<Mark>>,
    copies: Vec<Copy>,
    /// Graphs that it was captured into since the last write.
    pub graphs: Vec<Arc<GraphState>>,
}

struct Copy {
    mark: Arc<Mark>,
    line: u64,
    /// A record on the stream came after it.
    recorded: bool,
}

impl Guard {
    pub fn new(buffer: PinnedBuffer, content: Vec<u8>) -> Self {
        Self {
            address: buffer.as_ptr() as usize,
            buffer,
            content,
            incoming: None,
            extent: 0,
            dirty: Dirty::Unknown,
            fate: Fate::Recorded,
            uses: Vec::new(),
            copies: Vec::new(),
            graphs: Vec::new(),
        }
    }

    /// Copies that the pool knows nothing of.
    fn untracked(&self) -> Vec<Arc<Mark>> {
        self.copies.iter().filter(|copy| !copy.recorded).map(|copy| copy.mark.clone()).collect()
    }

    fn is_done(&self) -> bool {
        self.uses.iter().chain(self.copies.iter().map(|copy| &copy.mark)).all(|mark| mark.is_done())
    }

    /// After its context was lost: a copy from the device that was under way never comes.
    pub fn lose_incoming(&mut self) {
        self.incoming.take_if(|mark| mark.is_done());
    }

    /// A copy from the device that is done.
    pub fn notice_incoming(&mut self) {
        if self.incoming.take_if(|mark| mark.is_done()).is_some() {
            self.content.fill(0xCD);
        }
    }

    /// A graph may use it again.
    fn is_held(&self) -> bool {
        self.graphs.iter().any(|graph| !graph.is_over())
    }

    /// Only a wait for all contexts says that the device is done with it.
    fn needs_contexts(&self) -> bool {
        self.fate == Fate::Failed || !self.graphs.is_empty()
    }

    pub fn has_kept_its_bytes(&mut self) -> bool {
        self.notice_incoming();
        self.incoming.is_some() || self.buffer[..] == self.content[..]
    }
}

/// Bytes of which none is zero: a window of one table, so that it is fast in a debug build too.
pub fn pattern(turn: u8, len: usize) -> &'static [u8] {
    static TABLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8 | 1
        };
        (0..TABLE_BYTES + 256).map(|_| next()).collect()
    });
    &TABLE[usize::from(turn)..][..len]
}

pub fn part_of(len: usize, part: u8) -> usize {
    (len * usize::from(part) / 255).max(1)
}

impl World {
    /// Something that has to wait for the buffer's recorded uses. If they are not done it runs on a thread of its own,
    /// and the device goes on only once it is seen to wait.
    fn waiting<R: Send>(&mut self, index: usize, action: impl FnOnce(&mut PinnedBuffer) -> R + Send) -> R {
        // A wait for whole contexts lets the device go on by itself.
        let by_itself = self.guards[index].needs_contexts();
        let guard = &mut self.guards[index];
        if guard.uses.iter().all(|mark| mark.is_done()) {
            return action(&mut guard.buffer);
        }
        let (buffer, stuck) = (&mut guard.buffer, &mut self.stuck);
        let device = &mut self.device;
        let deadline = Instant::now() + patience();
        let queries = device.sim.calls("cuEventQuery");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| action(buffer));
            let has_asked = || device.sim.calls("cuEventQuery") >= queries + 2;
            while !waiter.is_finished() && (by_itself || !has_asked()) && Instant::now() < deadline {
                std::thread::yield_now();
            }
            *stuck |= by_itself && !waiter.is_finished();
            device.release_all();
            while !waiter.is_finished() {
                device.step();
                if Instant::now() > deadline && !std::mem::replace(stuck, true) {
                    // So that the waiter gives up, and the script with it.
                    device.sim.fail("cuEventQuery", Fault::always(999));
                }
                std::thread::yield_now();
            }
            waiter.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// A mutable access; false when there was none.
    fn write(&mut self, index: usize, action: impl FnOnce(&mut PinnedBuffer) + Send) -> Result<bool, String> {
        // What the pool was not told of, the script has to wait for itself.
        let untracked = self.guards[index].untracked();
        self.device.finish(untracked.iter());
        if self.guards[index].is_held() {
            self.refuses_writes(index)?;
            return Ok(false);
        }
        if self.guards[index].needs_contexts() {
            let model = &self.model;
            let others_wait = model.blocks.iter().any(|block| model.may_wait_for_contexts(block));
            let may_wait = model.ended || others_wait;
            if self.device.has_held_work() || self.device.is_capturing() || may_wait {
                return Ok(false);
            }
            // It waits for all contexts, so everything recorded goes on without being stepped.
            self.waits = None;
        }
        ensure!(self.guards[index].has_kept_its_bytes(), "the bytes of a guard changed");
        let act = |buffer: &mut PinnedBuffer| catch_unwind(AssertUnwindSafe(|| action(buffer)));
        let result = self.waiting(index, act);
        self.waits.get_or_insert_with(|| self.pool.hold_context_waits());
        if let Err(panic) = result {
            let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
            let is_free = self.model.may_refuse() && text.contains("the buffer cannot be written");
            ensure!(is_free, "a write: {text}");
            return Ok(false);
        }
        let guard = &mut self.guards[index];
        ensure!(guard.is_done(), "a write has overtaken the device");
        if guard.incoming.take().is_some() {
            guard.content.fill(0xCD);
        }
        guard.fate = Fate::Recorded;
        guard.uses.clear();
        guard.copies.clear();
        guard.graphs.clear();
        Ok(true)
    }

    pub fn fill(&mut self, index: usize, text: Text) -> Outcome {
        let (len, turn) = (self.guards[index].buffer.len(), self.turn);
        let count = match text {
            Text::Whole => len,
            Text::Prefix(part) | Text::Written(part) => part_of(len, part),
        };
        let bytes = pattern(turn, count);
        let extent = self.guards[index].extent.max(count);
        let written = self.write(index, |buffer| match text {
            Text::Whole => buffer.copy_from_slice(bytes),
            Text::Prefix(_) => {
                buffer[..count].copy_from_slice(bytes);
                buffer.set_dirty_len(extent);
            }
            Text::Written(_) => buffer.writer().write_all(bytes).expect("it fits"),
        })?;
        if !written {
            return Ok(());
        }
        let guard = &mut self.guards[index];
        guard.content[..count].copy_from_slice(bytes);
        guard.extent = extent;
        guard.dirty = match (text, guard.dirty) {
            (Text::Whole, _) | (Text::Written(_), Dirty::Everything) => Dirty::Everything,
            (Text::Prefix(_), _) => Dirty::Prefix(extent),
            (Text::Written(_), Dirty::Unknown) => Dirty::Prefix(count),
            (Text::Written(_), Dirty::Prefix(before)) => Dirty::Prefix(before.max(count)),
        };
        Ok(())
    }

    /// Whether the device says so: a context may have taken it away.
    fn is_locked(&self, index: usize) -> bool {
        let guard = &self.guards[index];
        guard.buffer.is_pinned() && (!self.model.ended || self.live().contains_key(&guard.address))
    }

    pub fn copy_out(&mut self, index: usize, line: usize, part: u8, recorded: bool) -> Outcome {
        let incoming = self.guards[index].incoming.clone();
        self.device.finish(incoming.iter());
        let is_locked = self.is_locked(index);
        let guard = &mut self.guards[index];
        ensure!(guard.has_kept_its_bytes(), "the bytes of a guard changed");
        let len = part_of(guard.buffer.len(), part);
        let (device, mark) = self.device.copy_out(line, &guard.buffer, is_locked, len);
        let expected = guard.content[..len].to_vec();
        let context = self.device.lines[line].stream.context().handle();
        let device = Arc::new(device);
        self.copied.push(Copied { device, expected, mark: mark.clone(), context });
        let line_id = self.device.lines[line].id;
        guard.copies.extend(mark.map(|mark| Copy { mark, line: line_id, recorded: false }));
        if recorded { self.record(index, line) } else { Ok(()) }
    }

    pub fn copy_back(&mut self, index: usize, line: usize) -> Outcome {
        if !self.write(index, |buffer| drop(buffer.first_mut()))? {
            return Ok(());
        }
        let is_locked = self.is_locked(index);
        let guard = &mut self.guards[index];
        (guard.dirty, guard.extent) = (Dirty::Everything, guard.buffer.len());
        let mark = self.device.copy_back(line, &mut guard.buffer, is_locked);
        match &mark {
            Some(mark) => {
                let (mark, line) = (mark.clone(), self.device.lines[line].id);
                guard.copies.push(Copy { mark, line, recorded: false });
            }
            None => guard.content.fill(0xCD),
        }
        guard.incoming = mark;
        self.record(index, line)
    }

    pub fn record(&mut self, index: usize, line: usize) -> Outcome {
        let guard = &mut self.guards[index];
        let buffer = &mut guard.buffer;
        let (mark, result) = self.device.enqueue(line, |stream| buffer.record_last_use(stream));
        self.device.lines[line].was_shown = true;
        match result {
            Ok(()) => {
                guard.uses.push(mark);
                if guard.fate == Fate::Proven {
                    guard.fate = Fate::Recorded;
                }
                let id = self.device.lines[line].id;
                guard.copies.iter_mut().filter(|copy| copy.line == id).for_each(|copy| copy.recorded = true);
            }
            Err(error) => {
                let is_free = self.model.records_fail || self.model.may_refuse();
                ensure!(is_free, "a record failed: {error}");
                self.model.record_failures += 1;
                guard.fate = Fate::Failed;
            }
        }
        Ok(())
    }

    pub fn give_back(&mut self, index: usize, away: bool) -> Outcome {
        let guard = &self.guards[index];
        let is_believed =
            guard.fate == Fate::Proven || guard.fate == Fate::Recorded && !guard.uses.is_empty();
        if is_believed && guard.graphs.is_empty() {
            // A use after a record and outside all tracking is the caller's to wait for.
            let untracked = guard.untracked();
            self.device.finish(untracked.iter());
        }
        let mut guard = self.guards.remove(index);
        ensure!(guard.has_kept_its_bytes(), "the bytes of a guard changed");
        let len = guard.buffer.len();
        let dirty = match guard.dirty {
            Dirty::Prefix(bytes) => bytes.min(len),
            Dirty::Unknown | Dirty::Everything => len,
        };
        let returned = Returned {
            fate: guard.fate,
            uses: guard.uses,
            copies: guard.copies.into_iter().map(|copy| copy.mark).collect(),
            graphs: guard.graphs,
            dirty,
        };
        match self.model.find(guard.address) {
            Some(block) => {
                let class = block.class;
                let dirty = returned.dirty.max(block.left_dirty);
                block.place = Place::Queued(Returned { dirty, ..returned });
                self.model.dirty_bytes += dirty as u64;
                self.model.given(class).returned += 1;
            }
            None => ensure!(self.model.ended, "an unknown guard"),
        }
        let buffer = guard.buffer;
        if away {
            let other = self.device.contexts.get(1).and_then(Option::as_ref);
            std::thread::scope(|scope| {
                let drops = scope.spawn(move || {
                    other.inspect(|context| context.bind());
                    drop(buffer);
                });
                drops.join().map_err(|_| "a drop panicked".to_string())
            })?;
        } else {
            drop(buffer);
        }
        Ok(())
    }

    pub fn assume_quiescent(&mut self, index: usize) -> Outcome {
        let guard = &mut self.guards[index];
        // A stream that was recorded and did not copy may be far behind.
        if guard.copies.iter().all(|copy| copy.mark.is_done()) && !guard.is_held() {
            // SAFETY: every copy from and to the buffer is done.
            unsafe { guard.buffer.assume_quiescent() };
            guard.fate = Fate::Proven;
            guard.graphs.clear();
        }
        Ok(())
    }

    pub fn wait(&mut self, index: usize) -> Outcome {
        let result = self.waiting(index, |buffer| buffer.wait());
        let guard = &self.guards[index];
        let loose = self.model.loose();
        match result {
            Ok(()) => {
                ensure!(!guard.needs_contexts(), "waited although context-wide waits are held");
                ensure!(guard.uses.iter().all(|mark| mark.is_done()), "a wait ended too early");
            }
            Err(Error::ContextWaitsHeld) => {
                ensure!(
                    guard.needs_contexts() && !guard.is_held() || loose,
                    "waiting for contexts for no reason"
                );
            }
            Err(Error::Capturing) => ensure!(guard.is_held(), "not waited for a graph that is gone"),
            Err(error) => ensure!(self.model.may_refuse(), "a wait failed: {error}"),
        }
        Ok(())
    }

    pub fn is_quiescent(&mut self, index: usize) -> Outcome {
        let guard = &self.guards[index];
        let done = guard.uses.iter().all(|mark| mark.is_done());
        let expected = match guard.fate {
            _ if !guard.graphs.is_empty() => false,
            Fate::Failed => false,
            Fate::Proven => true,
            Fate::Recorded => done,
        };
        let answer = guard.buffer.is_quiescent();
        let is_free = self.model.loose() && answer != Ok(true);
        ensure!(answer == Ok(expected) || is_free, "is_quiescent says {answer:?}, and it is {expected}");
        Ok(())
    }
}
