//! The application's side of the simulated device: streams that say of every operation whether it is done.
#![allow(unsafe_code)] // Enqueueing a copy promises that the memory stays valid until it is done.

use crate::graphs::Captured;
use crate::script::{Contexts, FAULTS, Setup, Times};
use pinpool::PinnedBuffer;
use pinpool::sim::{Fault, Sim, SimBuffer, SimContext, SimStream};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// An operation on a stream, between two host functions that say how far it is.
#[derive(Debug, Default)]
pub struct Mark {
    begun: AtomicBool,
    done: AtomicBool,
}

impl Mark {
    pub fn is_done(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }

    fn is_open(&self) -> bool {
        self.begun.load(Ordering::SeqCst) && !self.is_done()
    }
}

/// A stream of the application.
pub struct Line {
    pub stream: SimStream,
    /// Unlike its handle never used twice.
    pub id: u64,
    pub held: bool,
    /// What it captures just now.
    pub capture: Option<Captured>,
    /// Something was recorded on it, so the pool can know what it does.
    pub was_shown: bool,
    marks: Vec<Arc<Mark>>,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    NonBlocking(usize),
    Blocking,
    Default,
}

pub struct Device {
    pub sim: Sim,
    /// One for each device, and perhaps one more that is created.
    pub contexts: Vec<Option<SimContext>>,
    pub lines: Vec<Line>,
    pub current: usize,
    /// A graph was launched at some time.
    pub has_launched: bool,
    /// How many of them are primary ones.
    primaries: usize,
    /// Which of them there have been.
    made: BTreeSet<usize>,
    /// The handles of contexts that are lost.
    broken: Vec<usize>,
    /// With the handle of the context, also of streams that were destroyed.
    marks: Vec<(usize, Arc<Mark>)>,
    next_id: u64,
}

impl Device {
    pub fn new(setup: &Setup) -> Self {
        let mut builder = Sim::builder().devices(setup.devices.into()).seed(setup.seed);
        if setup.reads_pageable {
            builder = builder.attribute(88, 1);
        }
        // That unregistering waits for the device is a courtesy that hides mistakes.
        let sim = builder.unregister_waits(false).build();
        sim.expect_violations(); // taken after every operation, on the script's thread
        let primary = |device: u8| (setup.contexts != Contexts::Late).then(|| sim.context(device.into()));
        let mut contexts: Vec<_> = (0..setup.devices).map(primary).collect();
        if setup.contexts != Contexts::Stay {
            contexts.push(None);
            sim.cuda().cu_init(0).expect("no fault is set for it");
        }
        let mut device = Self {
            sim,
            contexts,
            lines: Vec::new(),
            current: 0,
            has_launched: false,
            primaries: setup.devices.into(),
            made: BTreeSet::new(),
            broken: Vec::new(),
            marks: Vec::new(),
            next_id: 0,
        };
        for context in 0..device.contexts.len() {
            device.add_lines(context);
        }
        if setup.devices == 1 && setup.contexts == Contexts::Stay {
            for kind in [Kind::Blocking, Kind::Default] {
                let line = device.line(kind);
                device.next_id += 1;
                device.lines.push(line);
            }
        }
        device.bind(0);
        device
    }

    /// One that a pool finds: a primary one, or the calling thread's.
    pub fn has_findable_context(&self) -> bool {
        let is_there = |index: usize| self.contexts.get(index).is_some_and(Option::is_some);
        is_there(self.current) || (0..self.primaries).any(is_there)
    }

    pub fn has_had_one_context(&self) -> bool {
        self.made.len() == 1
    }

    fn add_lines(&mut self, context: usize) {
        if self.contexts[context].is_some() {
            self.made.insert(context);
        }
        for _ in 0..2 {
            if self.contexts[context].is_some() {
                let line = self.line(Kind::NonBlocking(context));
                self.next_id += 1;
                self.lines.push(line);
            }
        }
    }

    fn line(&self, kind: Kind) -> Line {
        let index = if let Kind::NonBlocking(context) = kind { context } else { 0 };
        let context = self.contexts[index].as_ref().expect("asked by the caller");
        let stream = match kind {
            Kind::NonBlocking(_) => context.stream(),
            Kind::Blocking => context.blocking_stream(),
            Kind::Default => context.default_stream(),
        };
        let (held, was_shown) = (false, false);
        Line { stream, id: self.next_id, held, capture: None, was_shown, marks: Vec::new(), kind }
    }

    pub fn bind(&mut self, device: usize) {
        if let Some(Some(context)) = self.contexts.get(device) {
            context.bind();
            self.current = device;
        }
    }

    /// Enqueues what `action` does, and says when it is done.
    pub fn enqueue<R>(&mut self, line: usize, action: impl FnOnce(&SimStream) -> R) -> (Arc<Mark>, R) {
        self.marks.retain(|(_, mark)| !mark.is_done());
        let mark = Arc::new(Mark::default());
        let line = &mut self.lines[line];
        line.marks.retain(|mark| !mark.is_done());
        let tell = |flag: fn(&Mark) -> &AtomicBool| {
            // The default stream is the current context's.
            line.stream.context().bind();
            let mark = mark.clone();
            let say = Box::new(move || flag(&mark).store(true, Ordering::SeqCst));
            self.sim.cuda().cu_launch_host_func(line.stream.handle(), say).expect("no fault is set for it");
            if let Some(Some(context)) = self.contexts.get(self.current) {
                context.bind();
            }
        };
        tell(|mark| &mark.begun);
        let result = action(&line.stream);
        tell(|mark| &mark.done);
        line.marks.push(mark.clone());
        self.marks.push((line.stream.context().handle(), mark.clone()));
        (mark, result)
    }

    /// The context's device is lost; its unfinished work is never done, which is as good as done.
    pub fn break_context(&mut self, index: usize) -> Option<usize> {
        let context = self.contexts.get(index)?.as_ref()?;
        context.break_with(700);
        let handle = context.handle();
        self.broken.push(handle);
        self.forget_work_of(handle);
        Some(handle)
    }

    fn forget_work_of(&self, context: usize) {
        for (_, mark) in self.marks.iter().filter(|(of, _)| *of == context) {
            mark.done.store(true, Ordering::SeqCst);
        }
    }

    pub fn make_context(&mut self, index: usize) {
        if let Some(None) = self.contexts.get(index) {
            let is_primary = index < self.primaries;
            let sim = &self.sim;
            let context = if is_primary { sim.context(index as i32) } else { sim.create_context(0) };
            self.contexts[index] = Some(context);
            self.add_lines(index);
            self.bind(index);
        }
    }

    /// Everything in it is gone; gives its handle, and whether that was so on purpose: a primary context stays for whoever
    /// else retains it.
    pub fn let_go_of(&mut self, index: usize, end: bool) -> Option<(usize, bool)> {
        let is_primary = index < self.primaries;
        let context = self.contexts.get_mut(index)?.take()?;
        let (handle, ends) = (context.handle(), end || !is_primary);
        if ends {
            self.forget_work_of(handle);
            context.end();
        } else {
            self.release_all();
            self.run_until_idle();
        }
        self.lines.retain(|line| line.stream.context().handle() != handle);
        Some((handle, ends))
    }

    pub fn can_capture(&self, line: usize) -> bool {
        let of = &self.lines[line];
        matches!(of.kind, Kind::NonBlocking(_)) && of.capture.is_none() && !self.is_broken(line)
    }

    pub fn is_broken(&self, line: usize) -> bool {
        let context = self.lines[line].stream.context();
        self.broken.contains(&context.handle())
    }

    /// Whether a wait for everything would wait for a stream that is held.
    pub fn has_held_work(&self) -> bool {
        self.lines.iter().any(|line| line.held && line.marks.iter().any(|mark| !mark.is_done()))
    }

    pub fn set_held(&mut self, line: usize, held: bool) {
        if line < self.lines.len() && !self.is_broken(line) {
            let line = &mut self.lines[line];
            line.held = held;
            if held { line.stream.hold() } else { line.stream.release() }
        }
    }

    pub fn release_all(&mut self) {
        (0..self.lines.len()).filter(|line| self.lines[*line].held).collect::<Vec<_>>().into_iter().for_each(
            |line| {
                self.set_held(line, false);
            },
        );
    }

    /// One operation, with the host functions beside it.
    pub fn step(&self) -> bool {
        let moved = self.sim.step();
        while self.marks.iter().any(|(_, mark)| mark.is_open()) && self.sim.step() {}
        moved
    }

    pub fn run_until_idle(&self) {
        while self.step() {}
    }

    /// Lets everything go on until these are done.
    pub fn finish<'a>(&mut self, mut marks: impl Iterator<Item = &'a Arc<Mark>>) {
        if marks.any(|mark| !mark.is_done()) {
            self.release_all();
            self.run_until_idle();
        }
    }

    pub fn renew(&mut self, line: usize) {
        let Some(old) = self.lines.get(line) else { return };
        if let Kind::NonBlocking(_) = old.kind
            && old.capture.is_none()
            && !self.is_broken(line)
        {
            let kind = old.kind;
            let old = self.lines.remove(line);
            drop(old);
            let new = self.line(kind);
            self.next_id += 1;
            self.lines.insert(line, new);
        }
    }

    /// A copy of the first bytes; with the mark that says when it is done, if that is later than now.
    pub fn copy_out(
        &mut self,
        line: usize,
        buffer: &PinnedBuffer,
        is_locked: bool,
        len: usize,
    ) -> (SimBuffer, Option<Arc<Mark>>) {
        let device = self.lines[line].stream.context().alloc(len);
        // SAFETY: the pool keeps the memory unchanged until the copy is done; that is what is tested.
        let copy = |stream: &SimStream| unsafe { stream.copy_to_device(&buffer[..len], &device) };
        if is_locked {
            let (mark, ()) = self.enqueue(line, copy);
            return (device, Some(mark));
        }
        self.let_pass(line);
        copy(&self.lines[line].stream);
        (device, None)
    }

    /// A copy from fresh device memory, which is full of 0xCD.
    pub fn copy_back(
        &mut self,
        line: usize,
        buffer: &mut PinnedBuffer,
        is_locked: bool,
    ) -> Option<Arc<Mark>> {
        let device = self.lines[line].stream.context().alloc(buffer.len());
        let whole: *mut [u8] = &mut buffer[..];
        // SAFETY: the pool keeps the memory until the copy is done; that is what is tested.
        let copy = |stream: &SimStream| unsafe { stream.copy_to_host(&device, whole) };
        if is_locked {
            return Some(self.enqueue(line, copy).0);
        }
        self.let_pass(line);
        copy(&self.lines[line].stream);
        None
    }

    /// The call is going to wait for the stream.
    fn let_pass(&mut self, line: usize) {
        match self.lines[line].kind {
            // A launch may wait for one of the same graph on another stream.
            Kind::NonBlocking(_) if !self.has_launched => self.set_held(line, false),
            Kind::NonBlocking(_) => self.release_all(),
            Kind::Blocking | Kind::Default => self.release_all(),
        }
    }

    pub fn fail(&self, fault: u8, times: Times) -> &'static str {
        let (call, code) = FAULTS[usize::from(fault) % FAULTS.len()];
        let fault = match times {
            Times::Once => Fault::once(code),
            Times::Second => Fault::nth(2, code),
            Times::Always => Fault::always(code),
        };
        self.sim.fail(call, fault);
        call
    }
}
