//! The background thread: wait, register, zero, shelve, evict.
//!
//! ```text
//! loop
//!   take what the lanes have done, drain the inbox, sort it by how its end can be known
//!   ask the head event of every stream; pass completed blocks on
//!   smallest class first: send to be registered, or zero and shelve
//!   nothing to do: nap by how long the heads of that stream take, as seen so far;
//!                  nothing pending at all: naps that grow, then sleep without a timer
//! ```
//!
//! It never blocks in the driver: what may block is a lane's (`lanes.rs`).

mod end;
mod held;
mod policies;
mod rest;
mod sort;

use crate::block::{Quiescent, Ready, Retiring, Returned};
use crate::context_end;
use crate::driver::exit;
use crate::home::Home;
use crate::lanes::{
    ContextVerdict, Lane, Registered, ReleaseJob, context_lane, relax_captures, release_lane, retire,
};
use crate::os::tune_background_thread;
use crate::pace::{IdleNaps, NAP_MIN};
use crate::pending::Stage;
use crate::queues::{Failure, Queues};
use crate::report::{Kind, Why, micros, say, say_failure};
use crate::shelf::Placed;
use crate::size_class::SizeClass;
use crate::spawn::spawn;
use crate::sync::{Arc, Instant, thread};
use crate::zero;
use held::ForGraphs;
use policies::{Ageing, say_passed_over};

/// Starts the thread; `None` when the system refuses.
pub(crate) fn start(home: &Arc<Home>) -> Option<thread::JoinHandle<()>> {
    let name = home.settings.thread_name.clone();
    let ours = home.clone();
    spawn(&home.driver, name, move || Cleaner::new(ours).run()).ok()
}

struct Cleaner {
    home: Arc<Home>,
    queues: Queues,
    release: Lane<ReleaseJob, Registered>,
    contexts: Lane<Returned, ContextVerdict>,
    /// What the lanes hold of the queue, for the books of a shutdown that cannot wait for them.
    with_lanes: Vec<Held>,
    for_graphs: ForGraphs,
    relaxed: bool,
    idle_since: Option<Instant>,
    idle_naps: IdleNaps,
    /// Something had been returned when this pass looked.
    had_arrivals: bool,
    ingested_at: Instant,
    ageing: Ageing,
    next_backlog_look: Instant,
    backlog_said: bool,
}

/// A block that a lane has.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Held {
    lane: LaneKind,
    class: SizeClass,
    epoch: usize,
    pinned: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LaneKind {
    Release,
    Contexts,
}

impl Held {
    fn of(lane: LaneKind, class: SizeClass, epoch: usize, pinned: bool) -> Self {
        Self { lane, class, epoch, pinned }
    }
}

impl Cleaner {
    fn new(home: Arc<Home>) -> Self {
        Self {
            queues: Queues::default(),
            release: Lane::new(home.clone(), "release", release_lane),
            contexts: Lane::new(home.clone(), "contexts", context_lane),
            with_lanes: Vec::new(),
            for_graphs: ForGraphs::default(),
            relaxed: false,
            idle_since: None,
            idle_naps: IdleNaps::default(),
            had_arrivals: false,
            ingested_at: Instant::now(),
            ageing: Ageing::new(&home),
            next_backlog_look: home.clock.now(),
            backlog_said: false,
            home,
        }
    }

    fn run(mut self) {
        self.home.bell.attach();
        tune_background_thread();
        loop {
            self.wait_while_held();
            if exit::is_shut() {
                // What it has is leaked: nothing can be proved about it any more, and the process ends.
                return;
            }
            self.pass();
            if self.must_end() && self.end() {
                return;
            }
            self.rest();
        }
    }

    fn pass(&mut self) {
        // What is shelved now came now, however long the sleep before it was.
        self.home.clock.tick();
        self.had_arrivals = false;
        self.relaxed = self.relaxed || relax_captures(&self.home);
        self.look_around();
        while let Some(block) = self.home.pending.pop_done() {
            self.finish_moved(block);
            self.look_around();
        }
        self.look_after_the_pool();
        self.home.progress.announce();
    }

    /// Everything that costs little: results, arrivals, one question per stream.
    fn look_around(&mut self) {
        for evicted in self.home.take_let_go() {
            self.release.push(ReleaseJob::Retire(evicted.retire()));
        }
        self.release.feed();
        self.contexts.feed();
        while let Some(result) = self.release.pop_result() {
            self.registered(result);
        }
        while let Some(verdict) = self.contexts.pop_result() {
            self.context_verdict(verdict);
        }
        self.ingest();
        self.look_at_held();
        self.poll();
        if self.home.sleepers.any() {
            self.home.sleepers.wake_due();
        }
    }

    fn ingest(&mut self) {
        if !self.home.inbox.has_arrivals() {
            return;
        }
        let now = Instant::now();
        if self.had_arrivals && now.saturating_duration_since(self.ingested_at) < NAP_MIN {
            return;
        }
        self.ingested_at = now;
        self.had_arrivals = true;
        self.idle_since = None;
        self.idle_naps.end(self.home.pending.harvests());
        let home = self.home.clone();
        let flagged = home.inbox.take_flags();
        if flagged.overflow {
            while let Some(block) = home.inbox.pop_overflow() {
                self.sort(block);
            }
        }
        for class in flagged {
            home.pending.begin_move(class);
            while let Some(block) = home.pending.pop_unsorted(class) {
                self.sort(block);
            }
            // No more than there are now: a quick caller would keep this thread here for ever.
            for _ in 0..home.inbox.waiting(class) {
                let Some(block) = home.inbox.pop(class) else { break };
                self.sort(block);
            }
            home.pending.end_move(class);
        }
    }

    fn wait_for_contexts(&mut self, block: Returned) {
        self.with_lanes.push(Held::of(LaneKind::Contexts, block.class(), block.epoch(), block.is_pinned()));
        self.contexts.push(block);
    }

    fn context_verdict(&mut self, verdict: ContextVerdict) {
        let mut block = verdict.block;
        self.lane_gave(Held::of(LaneKind::Contexts, block.class(), block.epoch(), block.is_pinned()));
        if verdict.idle {
            block.contexts_are_idle();
            self.home.pending.insert(Stage::Done, block);
        } else {
            self.home.counts.class(block.class()).wait_failures.add(1);
            self.quarantine(block, "the contexts could not be waited for");
        }
    }

    fn lane_gave(&mut self, held: Held) {
        if let Some(index) = self.with_lanes.iter().position(|other| *other == held) {
            self.with_lanes.swap_remove(index);
        }
    }

    fn poll(&mut self) {
        let mut failures = Vec::new();
        // Borrowed and not cloned: the reference count stands on the cache line that every take writes.
        let Self { home, queues, .. } = self;
        queues.poll(&home.driver, &home.pending, |failure| failures.push(failure));
        failures.into_iter().for_each(|failure| self.wait_failed(failure));
    }

    #[cold]
    fn wait_failed(&mut self, failure: Failure) {
        let Failure { class, id, context, error } = failure;
        if context_end::has_ended(&self.home, &context, &error) {
            // The work that the event stands for ended with the context.
            return self.home.pending.event_complete(class, id);
        }
        self.home.note_device_error(&error);
        if let Some(block) = self.home.pending.remove(class, id) {
            self.home.counts.class(class).wait_failures.add(1);
            let (bytes, is_first) = (class.bytes(), self.home.said.is_first(Kind::WaitFailed));
            say_failure!(is_first, "wait_failed", bytes, %error, "a recorded use could not be waited for");
            self.quarantine(block, &error.to_string());
        }
    }

    fn quarantine(&mut self, block: Returned, reason: &str) {
        let (class, pinned) = (block.class(), block.is_pinned());
        let counts = self.home.counts.class(class);
        counts.quarantined.of(pinned).add(1);
        counts.settled[block.epoch()].of(pinned).add(1);
        block.quarantine();
        self.home.note_quarantine(class.bytes(), pinned, &reason);
    }

    fn finish_moved(&mut self, block: Returned) {
        let class = block.class();
        self.finish(block);
        self.home.pending.end_move(class);
    }

    /// A block that nothing touches any more: register it, or zero and shelve it, or let it go.
    fn finish(&mut self, block: Returned) {
        self.idle_since = None;
        if let Some(returned_at) = block.returned_at() {
            let elapsed = returned_at.elapsed();
            self.home.counts.class(block.class()).wait_ns.add(elapsed.as_nanos() as u64);
            let (bytes, pinned, elapsed_us) = (block.class().bytes(), block.is_pinned(), micros(elapsed));
            say!(TRACE, "waited", bytes, pinned, elapsed_us, "no device work touches the buffer any more");
        }
        if self.home.is_lost() && block.is_pinned() {
            return self.quarantine(block, "the device is lost");
        }
        let proof = block.proof();
        let block = block.settle(&self.home.driver, proof);
        let class = block.class();
        if block.is_stranded() {
            self.let_go(block);
        } else if class.bytes() > self.home.shelf.cap_bytes() {
            self.home.counts.class(class).passed_over.add(1);
            say_passed_over(class, block.is_pinned());
            self.let_go(block);
        } else if block.is_pinned() || !self.can_register() {
            self.zero_and_shelve(block);
        } else if self.is_worth_page_locking(class) {
            self.with_lanes.push(Held::of(LaneKind::Release, class, block.epoch(), false));
            self.release.push(ReleaseJob::Register(block));
        } else {
            self.pass_over(class, block.is_pinned());
            self.let_go(block);
        }
    }

    fn can_register(&self) -> bool {
        self.home.device_in_use()
            && !self.home.is_lost()
            && !self.home.backing.locks_nothing()
            && self.home.registration_pause().is_none()
    }

    fn registered(&mut self, result: Registered) {
        self.idle_since = None;
        match result {
            Registered::Pinned(block) | Registered::Unpinned(block) => {
                self.lane_gave(Held::of(LaneKind::Release, block.class(), block.epoch(), false));
                self.zero_and_shelve(block);
            }
            Registered::Refused(block) => {
                self.lane_gave(Held::of(LaneKind::Release, block.class(), block.epoch(), false));
                self.let_go(block);
            }
        }
    }

    /// Zeroes in steps; between two steps smaller blocks overtake.
    fn zero_and_shelve(&mut self, mut block: Quiescent) {
        let mut job = zero::Job::of(block.dirty_bytes());
        let (bytes, dirty_bytes) = (block.class().bytes(), job.bytes());
        let _span = tracing::trace_span!(target: "pinpool", "zero", bytes, dirty_bytes).entered();
        loop {
            let zeroed = block.zero_step(&self.home.driver, &mut job);
            if zeroed == 0 || block.dirty_bytes() == 0 {
                break;
            }
            self.ingest();
            self.poll();
            while let Some(smaller) = self.home.pending.pop_done_below(block.class()) {
                self.finish_moved(smaller);
            }
        }
        if dirty_bytes > 0 {
            let elapsed = self.home.counts.class(block.class()).zeroed(job);
            say!(
                TRACE,
                "zeroed",
                bytes,
                dirty_bytes,
                elapsed_us = micros(elapsed),
                "what was written is zero again"
            );
        }
        match block.into_ready(&self.home.driver) {
            Ok(ready) => self.shelve(ready),
            // A step that zeroed nothing leaves nothing dirty; were it otherwise, the block is let go.
            Err(block) => self.let_go(block),
        }
    }

    fn shelve(&mut self, block: Ready) {
        let (class, epoch, pinned) = (block.class(), block.epoch(), block.is_pinned());
        let mut evicted = Vec::new();
        let shelved = self.home.shelf.push(block, self.home.clone(), |other| evicted.push(other));
        for other in evicted {
            self.home.count_retiring(&other, Why::Cap);
            self.release.push(ReleaseJob::Retire(other.retire()));
        }
        match shelved {
            Placed::Kept => {
                self.home.counts.class(class).recycled.add(1);
                self.home.counts.class(class).settled[epoch].of(pinned).add(1);
                say!(TRACE, "shelved", bytes = class.bytes(), pinned, "a buffer is ready for the next take");
            }
            Placed::Refused(block) => {
                self.pass_over(class, pinned);
                self.retire(block.retire());
            }
            Placed::Stranded(block) => self.retire(block.retire()),
        }
    }

    fn let_go(&mut self, block: Quiescent) {
        self.retire(block.retire());
    }

    /// Off the queue and to the release lane.
    fn retire(&mut self, block: Retiring) {
        let counts = self.home.counts.class(block.class());
        let pinned = block.is_pinned();
        counts.retiring.of(pinned).add(1);
        counts.settled[block.epoch()].of(pinned).add(1);
        if !pinned && self.must_free_itself() {
            retire(&self.home, block);
        } else {
            self.release.push(ReleaseJob::Retire(block));
        }
    }
}
