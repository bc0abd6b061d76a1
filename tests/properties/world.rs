//! The real side of a script: a pool, its device, and the guards that the script holds; every step against the model.
//!
//! The cleaner is held except while a script lets it work, and context-wide waits are held where they would block on a
//! held stream, so that what happens does not depend on how threads are scheduled.

use crate::device::{Device, Mark};
use crate::ensure;
use crate::graphs::{Graph, GraphState};
use crate::guards::Guard;
use crate::model::{Fate, Model, Returned};
use crate::own::{OWN_BYTES, Own};
use crate::script::{Contexts, KIB, Op, Setup};
use pinpool::sim::SimBuffer;
use pinpool::{Backing, CleanerHold, ContextWaitHold, Driver, PinnedPool};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

thread_local! {
    /// Long enough that only a hang reaches it; shorter once something has failed, so that shrinking gets somewhere.
    pub static PATIENCE_MS: Cell<u64> = const { Cell::new(20_000) };
}

/// Why a script is given up on without a verdict: a shutdown waits half a second for its threads to leave the driver, and on
/// a machine that is busy enough that is too short.
pub const TOO_SLOW: &str = "the machine was too slow for a shutdown";

const GUARDS_MAX: usize = 8;

/// How long what is idle is kept: of the hours that a script lets pass, the minutes that it takes itself are nothing.
pub const MAX_IDLE_MINUTES: u64 = 60;

pub type Outcome = Result<(), String>;

/// A copy to the device, and what it has to put there.
pub struct Copied {
    pub device: Arc<SimBuffer>,
    pub expected: Vec<u8>,
    pub mark: Option<Arc<Mark>>,
    /// The handle of the context.
    pub context: usize,
}

pub struct World {
    pub guards: Vec<Guard>,
    pub copied: Vec<Copied>,
    pub own: Vec<Own>,
    pub graphs: Vec<Graph>,
    /// Those whose launches may go on.
    pub dropped_graphs: Vec<Arc<GraphState>>,
    pub model: Model,
    pub cleaner: Option<CleanerHold>,
    pub waits: Option<ContextWaitHold>,
    pub pool: PinnedPool,
    pub driver: Driver,
    pub device: Device,
    pub turn: u8,
    /// A wait for recorded uses did not end although all of them were done.
    pub stuck: bool,
}

pub fn patience() -> Duration {
    Duration::from_millis(PATIENCE_MS.get())
}

impl World {
    pub fn new(setup: &Setup) -> Self {
        let device = Device::new(setup);
        let driver = if setup.devices > 0 { device.sim.driver() } else { Driver::host_only() };
        let pool = PinnedPool::builder()
            .driver(driver.clone())
            .backing(if setup.allocates { Backing::HostPinned } else { Backing::Auto })
            .max_idle_time(Duration::from_secs(60 * MAX_IDLE_MINUTES))
            .max_pooled_bytes(setup.cap)
            .max_registered_bytes(setup.ceiling)
            .harvest_zero_limit(setup.zero_limit)
            .harvest_wait_limit(Duration::from_secs(20))
            .shutdown_timeout(Duration::from_millis(3))
            .build()
            .expect("the settings are right");
        let model = Model {
            has_device: setup.devices > 0,
            reads_pageable: setup.reads_pageable,
            allocates: setup.allocates,
            ceiling: setup.ceiling,
            zero_limit: setup.zero_limit,
            cap: setup.cap,
            blocks: Vec::new(),
            given: BTreeMap::new(),
            record_failures: 0,
            dirty_bytes: 0,
            faulty: false,
            records_fail: false,
            sticky: setup.contexts != Contexts::Stay,
            nothing_fails: setup.contexts != Contexts::Stay,
            ended: false,
            noticed: false,
            registrations: 0,
            was_faulty: false,
            gave_up: false,
            order: 0,
            minutes: 0,
            times: vec![0],
            merged: Default::default(),
            seen: BTreeMap::new(),
        };
        Self {
            guards: Vec::new(),
            copied: Vec::new(),
            own: Vec::new(),
            graphs: Vec::new(),
            dropped_graphs: Vec::new(),
            model,
            cleaner: Some(pool.hold_cleaner()),
            waits: Some(pool.hold_context_waits()),
            pool,
            driver,
            device,
            turn: 0,
            stuck: false,
        }
    }

    pub fn run(&mut self, op: &Op) -> Outcome {
        self.turn = self.turn.wrapping_add(1);
        self.apply(op)?;
        self.check()
    }

    fn apply(&mut self, op: &Op) -> Outcome {
        let line = |index: u8, world: &Self| usize::from(index) % world.device.lines.len().max(1);
        let guard = |index: u8, world: &Self| usize::from(index) % world.guards.len().max(1);
        match *op {
            Op::Take(how, size) if self.guards.len() < GUARDS_MAX => self.take(how, size),
            Op::Take(..) => Ok(()),
            Op::Hold(_) | Op::Release(_) | Op::Step(_) | Op::RunUntilIdle | Op::Renew(_) | Op::Bind(_) => {
                self.apply_to_device(op, usize::from);
                Ok(())
            }
            Op::Settle => self.run_cleaner(|_| Ok(())),
            Op::Drain => self.run_cleaner(Self::drain),
            Op::SetCap(bytes) => self.trim(bytes, true),
            Op::TrimTo(bytes) => self.trim(bytes, false),
            Op::Clear => self.run_cleaner(Self::clear),
            Op::Prewarm(size, count) => self.run_cleaner(|world| world.prewarm(size, count.into())),
            Op::Shutdown => self.run_cleaner(Self::shut_down),
            Op::LetTimePass(tens) => self.run_cleaner(|world| world.let_time_pass(10 * u64::from(tens))),
            Op::MakeContext(index) => {
                self.device.make_context(index.into());
                Ok(())
            }
            Op::EndContext(index) => self.let_go_of_context(index.into(), true),
            Op::LeaveContext(index) => self.let_go_of_context(index.into(), false),
            Op::DropGraph(graph) => {
                self.drop_graph(graph.into());
                Ok(())
            }
            Op::PinOwn => self.pin_own(),
            Op::DropOwn(own) => self.drop_own(own.into()),
            Op::Fail(fault, times) => {
                match self.device.fail(fault, times) {
                    "cuEventRecord" | "cuEventCreate" | "cuStreamIsCapturing" => {
                        self.model.records_fail = true
                    }
                    _ => self.model.faulty = true,
                }
                self.model.was_faulty = true;
                Ok(())
            }
            Op::ClearFaults => {
                self.device.sim.clear_faults();
                (self.model.faulty, self.model.records_fail) = (false, false);
                Ok(())
            }
            Op::Break(index) => {
                self.guards.iter_mut().for_each(Guard::notice_incoming);
                let lost = self.device.break_context(index.into());
                self.guards.iter_mut().for_each(Guard::lose_incoming);
                self.copied.retain(|copied| Some(copied.context) != lost);
                (self.model.sticky, self.model.was_faulty) = (true, true);
                Ok(())
            }
            Op::BeginCapture(..) | Op::EndCapture(_) | Op::Launch(..) | Op::CopyOwn(..)
                if self.device.lines.is_empty() =>
            {
                Ok(())
            }
            Op::BeginCapture(on, mode) => self.begin_capture(line(on, self), mode),
            Op::EndCapture(on) => self.end_capture(line(on, self)),
            Op::Launch(graph, on) => self.launch(graph.into(), line(on, self)),
            Op::CopyOwn(own, on) => self.copy_own(own.into(), line(on, self)),
            _ if self.guards.is_empty() => Ok(()),
            Op::Fill(index, text) => self.fill(guard(index, self), text),
            Op::Drop(index, away) => self.give_back(guard(index, self), away),
            Op::AssumeQuiescent(index) => self.assume_quiescent(guard(index, self)),
            Op::Wait(index) => self.wait(guard(index, self)),
            Op::IsQuiescent(index) => self.is_quiescent(guard(index, self)),
            _ if self.device.lines.is_empty() => Ok(()),
            Op::CopyOut(_, on, ..) | Op::CopyBack(_, on) | Op::Record(_, on)
                if self.device.is_broken(line(on, self)) =>
            {
                Ok(())
            }
            Op::CopyOut(index, on, part, recorded) if self.captures_on(line(on, self)) => {
                self.capture_copy(guard(index, self), line(on, self), part, recorded)
            }
            Op::Record(index, on) if self.captures_on(line(on, self)) => {
                self.record_on_capturing(guard(index, self))
            }
            Op::CopyBack(_, on) if self.captures_on(line(on, self)) => Ok(()),
            // The application would break its own capture.
            Op::CopyOut(index, ..) | Op::CopyBack(index, _)
                if self.device.is_capturing() && !self.guards[guard(index, self)].buffer.is_pinned() =>
            {
                Ok(())
            }
            Op::CopyOut(index, on, part, recorded) => {
                self.copy_out(guard(index, self), line(on, self), part, recorded)
            }
            Op::CopyBack(index, on) => self.copy_back(guard(index, self), line(on, self)),
            Op::Record(index, on) => self.record(guard(index, self), line(on, self)),
        }
    }

    fn captures_on(&self, line: usize) -> bool {
        self.device.lines[line].capture.is_some()
    }

    fn apply_to_device(&mut self, op: &Op, index: impl Fn(u8) -> usize) {
        let count = self.device.lines.len().max(1);
        match *op {
            Op::Hold(line) => self.device.set_held(index(line) % count, true),
            Op::Release(line) => self.device.set_held(index(line) % count, false),
            Op::Step(count) => (0..count).for_each(|_| _ = self.device.step()),
            Op::RunUntilIdle => self.device.run_until_idle(),
            Op::Renew(line) => self.device.renew(index(line) % count),
            Op::Bind(device) => self.device.bind(index(device)),
            _ => {}
        }
    }

    /// After every operation.
    fn check(&mut self) -> Outcome {
        ensure!(!self.stuck, "a wait for recorded uses does not end");
        let violations = self.device.sim.take_violations();
        ensure!(violations.is_empty(), "the device found: {violations:?}");
        let is_done = |copied: &Copied| copied.mark.as_ref().is_none_or(|mark| mark.is_done());
        for copied in self.copied.extract_if(.., |copied| is_done(copied)) {
            ensure!(
                copied.device.read() == copied.expected,
                "wrong bytes on the device: of {}",
                copied.expected.len()
            );
        }
        let live = self.live();
        // Some time after so many refusals the pool stops trying.
        self.model.sticky |= self.pool.stats().registration_failures > 3;
        self.model.audit(&self.pool, &live)
    }

    /// What the device says is page-locked for the pool: address and bytes.
    pub fn live(&self) -> BTreeMap<usize, usize> {
        let sim = &self.device.sim;
        let all = sim.live_registrations().into_iter().chain(sim.live_host_allocations());
        all.filter(|(_, bytes)| *bytes != OWN_BYTES).collect()
    }

    /// Drops everything in order, and checks that everything came home.
    pub fn finish(mut self) -> Outcome {
        self.device.sim.clear_faults();
        (self.model.faulty, self.model.records_fail) = (false, false);
        for line in 0..self.device.lines.len() {
            self.end_capture(line)?;
        }
        while !self.guards.is_empty() {
            self.give_back(0, false)?;
        }
        while !self.own.is_empty() {
            self.drop_own(0)?;
        }
        self.device.release_all();
        self.device.run_until_idle();
        self.until_own_is_let_go()?;
        self.run_cleaner(Self::drain)?;
        self.check()?;
        self.end_all_graphs()?;
        self.device.run_until_idle();
        self.run_cleaner(Self::drain)?;
        self.check()?;
        ensure!(self.copied.is_empty(), "copies are left");
        self.run_cleaner(Self::shut_down)?;
        self.check()?;
        let stats = self.pool.stats();
        ensure!(
            stats.registered_bytes == stats.quarantined_pinned_bytes
                && (stats.pooled_buffers, stats.queued_buffers, stats.retiring_bytes) == (0, 0, 0),
            "not everything came home: {stats:?}"
        );
        let locked: usize = self.live().values().sum();
        ensure!(
            stats.registered_bytes == locked,
            "{} are page-locked in the pool's books, and {locked}",
            stats.registered_bytes
        );
        if self.model.nothing_fails { self.leave_no_retain() } else { Ok(()) }
    }
}

pub fn class_of(size: usize) -> usize {
    size.next_power_of_two().max(4 * KIB)
}

impl Returned {
    /// As it was when the pool itself dropped a buffer that `take_pinned` could not use.
    pub fn untouched(dirty: usize) -> Self {
        Self { fate: Fate::Recorded, uses: Vec::new(), copies: Vec::new(), graphs: Vec::new(), dirty }
    }
}
