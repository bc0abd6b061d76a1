//! The two lanes beside the cleaner: whatever may block in the driver happens on one of them.
//!
//! * The **release lane** page-locks fresh blocks and lets evicted ones go. One thread, so that both sides of
//!   the ceiling on page-locked memory are moved in order.
//! * The **context lane** makes the context-wide wait for blocks without a usable record, once for all
//!   that wait.
//!
//! Neither touches the shelves except to make room; results go back to the cleaner. A lane starts on first
//! need, and where its thread cannot be started the cleaner does the work itself.

mod contexts;

pub(crate) use contexts::{ContextVerdict, context_lane};

use crate::block::{Quiescent, Released, Retiring};
use crate::context_end;
use crate::driver::{CaptureMode, exit};
use crate::home::Home;
use crate::inbox::LaneQueue;
use crate::os::tune_background_thread;
use crate::registrar::{self, NotRegistered};
use crate::report::{Kind, Why, micros, say, say_failure};
use crate::spawn::spawn;
use crate::sync::{Arc, AtomicBool, Instant, Mutex, Ordering, thread};
use std::collections::VecDeque;
use std::time::Duration;

/// Jobs and results that wait without an allocation; the cleaner keeps what does not fit.
const SLOTS: usize = if cfg!(loom) { 1 } else { 1024 };

/// What was in use so lately is not let go for the ceiling: two classes that take turns would be page-locked and
/// let go at every turn.
const REST_UNDER_CEILING: Duration = Duration::from_secs(1);

/// What a lane is told.
enum Job<T> {
    Do(T),
    Stop,
}

/// A background thread with a queue of jobs and a queue of results.
pub(crate) struct Lane<J: Send + 'static, R: LaneResult> {
    shared: Arc<LaneShared<J, R>>,
    /// Jobs that the queue had no slot for.
    backlog: VecDeque<J>,
    thread: Option<thread::JoinHandle<()>>,
    name: String,
    work: Work<J, R>,
    home: Arc<Home>,
}

struct LaneShared<J, R> {
    jobs: LaneQueue<Job<J>>,
    results: LaneQueue<R>,
    /// The cleaner gave up on this lane; what it still holds is lost to it. Guards the giving of a result
    /// too, so that none is given into a queue that nobody reads any more.
    abandoned: Mutex<bool>,
    finished: AtomicBool,
}

/// A result that may come too late: after the cleaner gave up on the lane and counted it as quarantined.
pub(crate) trait LaneResult: Send + 'static {
    /// Leaks the block and keeps the counts true.
    fn came_too_late(self, home: &Home);
}

/// Does a batch of jobs, given the first; the closure gives further waiting jobs and takes results.
type Work<J, R> = fn(&Arc<Home>, J, &dyn Fn() -> Option<J>, &dyn Fn(R));

impl<J: Send + 'static, R: LaneResult> Lane<J, R> {
    pub(crate) fn new(home: Arc<Home>, suffix: &str, work: Work<J, R>) -> Self {
        let name = format!("{}-{suffix}", home.settings.thread_name);
        Self {
            shared: Arc::new(LaneShared {
                jobs: LaneQueue::new(SLOTS),
                results: LaneQueue::new(SLOTS),
                abandoned: Mutex::new(false),
                finished: AtomicBool::new(false),
            }),
            backlog: VecDeque::new(),
            thread: None,
            name,
            work,
            home,
        }
    }

    pub(crate) fn push(&mut self, job: J) {
        self.backlog.push_back(job);
        self.feed();
    }

    /// Moves the backlog into the queue as far as it goes.
    pub(crate) fn feed(&mut self) {
        if self.backlog.is_empty() {
            return;
        }
        if self.thread.is_none() {
            self.start();
        }
        if self.thread.is_none() {
            return self.work_inline();
        }
        while let Some(job) = self.backlog.pop_front() {
            if let Err(Job::Do(job)) = self.shared.jobs.try_push(Job::Do(job)) {
                self.backlog.push_front(job);
                return;
            }
        }
    }

    pub(crate) fn pop_result(&self) -> Option<R> {
        self.shared.results.pop()
    }

    pub(crate) fn has_results(&self) -> bool {
        !self.shared.results.is_empty()
    }

    /// Whether the cleaner must come back to feed it.
    pub(crate) fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    fn start(&mut self) {
        let (home, shared, work) = (self.home.clone(), self.shared.clone(), self.work);
        let body = move || run_lane(&home, &shared, work);
        match spawn(&self.home.driver, self.name.clone(), body) {
            Ok(thread) => self.thread = Some(thread),
            Err(error) => {
                let is_first = self.home.said.is_first(Kind::ThreadRefused);
                let thread = self.name.as_str();
                say_failure!(is_first, "thread_refused", thread, %error, "a lane could not be started; the cleaner does its work");
            }
        }
    }

    #[cold]
    fn work_inline(&mut self) {
        // A job gives at most one result, and the next job begins only where there is a place for its result: the
        // rest waits in the backlog until the cleaner has taken some.
        while self.shared.results.has_room()
            && let Some(job) = self.backlog.pop_front()
        {
            (self.work)(&self.home, job, &|| None, &|result| {
                if let Err(result) = self.shared.results.try_push(result) {
                    // Nobody else gives results here, so this cannot be; were it so, the block is leaked and counted.
                    result.came_too_late(&self.home);
                }
            });
        }
    }

    /// Ends the lane after the jobs that it has. False when it does not end by the deadline; it is then
    /// abandoned, and quarantines what it still holds.
    pub(crate) fn stop(&mut self, deadline: Instant, mut result: impl FnMut(R)) -> bool {
        while self.thread.is_none() {
            // Where no thread could be started, results were made here, and the rest is made now.
            while let Some(value) = self.shared.results.pop() {
                result(value);
            }
            if self.backlog.is_empty() {
                return true;
            }
            self.feed();
        }
        let mut told = false;
        let ended = self.home.progress.wait_until(Some(deadline), || {
            // Results must flow, or the lane would wait for a free slot for ever.
            while let Some(job) = self.backlog.pop_front() {
                if let Err(Job::Do(job)) = self.shared.jobs.try_push(Job::Do(job)) {
                    self.backlog.push_front(job);
                    break;
                }
            }
            if self.backlog.is_empty() && !told {
                told = self.shared.jobs.try_push(Job::Stop).is_ok();
            }
            while let Some(value) = self.shared.results.pop() {
                result(value);
            }
            self.shared.finished.load(Ordering::SeqCst)
        });
        if ended {
            while let Some(value) = self.shared.results.pop() {
                result(value);
            }
            if let Some(thread) = self.thread.take() {
                // It has set `finished` as its last act, so this does not wait.
                let _ = thread.join();
            }
        } else {
            *self.shared.abandoned.lock() = true;
            self.thread = None;
            while let Some(value) = self.shared.results.pop() {
                result(value);
            }
        }
        ended
    }

    /// Jobs that never reached the lane; for the end of a shutdown that gave up on it.
    pub(crate) fn take_unstarted(&mut self) -> Vec<J> {
        let mut jobs: Vec<J> = self.backlog.drain(..).collect();
        while let Some(Job::Do(job)) = self.shared.jobs.pop() {
            jobs.push(job);
        }
        // Its order to stop may have been among them; an idle lane would wait for another without end.
        let _ = self.shared.jobs.try_push(Job::Stop);
        jobs
    }
}

fn run_lane<J: Send, R: LaneResult>(home: &Arc<Home>, shared: &LaneShared<J, R>, work: Work<J, R>) {
    tune_background_thread();
    let mut relaxed = false;
    let stop = std::cell::Cell::new(false);
    while !stop.get() {
        let Some(Job::Do(job)) = shared.jobs.pop_wait() else { break };
        if exit::is_shut() {
            break;
        }
        if !relaxed {
            relaxed = relax_captures(home);
        }
        let more = || match shared.jobs.pop() {
            Some(Job::Do(job)) => Some(job),
            Some(Job::Stop) => {
                stop.set(true);
                None
            }
            None => None,
        };
        let give = |result| give_result(home, shared, result);
        work(home, job, &more, &give);
        if *shared.abandoned.lock() {
            break;
        }
    }
    shared.finished.store(true, Ordering::SeqCst);
    home.progress.announce();
}

fn give_result<J, R: LaneResult>(home: &Arc<Home>, shared: &LaneShared<J, R>, mut result: R) {
    loop {
        let abandoned = shared.abandoned.lock();
        if *abandoned {
            return result.came_too_late(home);
        }
        match shared.results.try_push(result) {
            Ok(()) => break,
            Err(refused) => result = refused,
        }
        drop(abandoned);
        // The cleaner takes results at every pass, so a slot is free soon.
        home.ring_hard();
        thread::sleep(std::time::Duration::from_micros(50));
    }
    home.progress.announce();
    home.ring();
}

/// Puts this thread into the relaxed capture mode, so that nothing it asks of the driver can disturb
/// a capture of the application. Works only once the driver is initialised.
pub(crate) fn relax_captures(home: &Home) -> bool {
    home.device_in_use() && home.driver.api().exchange_capture_mode(CaptureMode::Relaxed).is_ok()
}

/// A job of the release lane.
pub(crate) enum ReleaseJob {
    Register(Quiescent),
    /// Evicted, or not worth keeping.
    Retire(Retiring),
}

/// What the release lane gives back.
pub(crate) enum Registered {
    /// Page-locked now.
    Pinned(Quiescent),
    /// Not possible now, for no fault of the block: pooled as it is.
    Unpinned(Quiescent),
    /// Refused: to be freed.
    Refused(Quiescent),
}

impl LaneResult for Registered {
    fn came_too_late(self, home: &Home) {
        if let Registered::Pinned(block) = self {
            // It was counted as a quarantined pageable block; it became a pinned one since.
            let counts = home.counts.class(block.class());
            counts.settled[block.epoch()].of(false).subtract(1);
            counts.settled[block.epoch()].of(true).add(1);
            counts.quarantined.of(false).subtract(1);
            counts.quarantined.of(true).add(1);
        }
        // Dropping a block leaks its memory.
    }
}

pub(crate) fn release_lane(
    home: &Arc<Home>,
    job: ReleaseJob,
    _: &dyn Fn() -> Option<ReleaseJob>,
    give: &dyn Fn(Registered),
) {
    match job {
        ReleaseJob::Retire(block) => retire(home, block),
        ReleaseJob::Register(mut block) => {
            let class = block.class();
            let evict = |bytes| {
                let mut evicted = Vec::new();
                home.shelf
                    .evict_pinned_of_others(class, bytes, REST_UNDER_CEILING, |other| evicted.push(other));
                for other in evicted {
                    home.count_retiring(&other, Why::Ceiling);
                    retire(home, other.retire());
                }
            };
            give(match registrar::register(home, &mut block, false, evict) {
                Ok(()) => {
                    home.counts.class(class).promoted.add(1);
                    Registered::Pinned(block)
                }
                Err(
                    NotRegistered::NoContext
                    | NotRegistered::Paused(_)
                    | NotRegistered::Lost
                    | NotRegistered::NotNeeded
                    | NotRegistered::Impossible(_),
                ) => Registered::Unpinned(block),
                Err(NotRegistered::Ceiling) => {
                    home.counts.class(class).passed_over.add(1);
                    Registered::Refused(block)
                }
                Err(NotRegistered::Driver(_)) => Registered::Refused(block),
            });
        }
    }
}

/// Unregisters and frees; counts what the driver did.
pub(crate) fn retire(home: &Arc<Home>, block: Retiring) {
    let (class, bytes) = (block.class(), block.class().bytes());
    let counts = home.counts.class(class);
    let started = Instant::now();
    let span = tracing::debug_span!(target: "pinpool", "release", bytes, pinned = block.is_pinned());
    let context = block.registered_in().cloned();
    let released = match (span.in_scope(|| block.release(&home.driver)), context) {
        // The answer may be the first that is heard of the context's end.
        (Released::Quarantined(error), Some(context)) if context_end::has_ended(home, &context, &error) => {
            Released::Vanished(error)
        }
        (released, _) => released,
    };
    match released {
        Released::Pageable => counts.retiring.of(false).subtract(1),
        Released::Unregistered => {
            home.counts.unregistered(class);
            counts.retiring.of(true).subtract(1);
            let elapsed_us = micros(started.elapsed());
            say!(DEBUG, "unregistered", bytes, elapsed_us, "no longer page-locked, and unmapped");
        }
        Released::Vanished(error) => {
            home.counts.vanished(class);
            counts.quarantined.of(false).add(1);
            counts.retiring.of(true).subtract(1);
            let reason = format_args!("the context that it was page-locked in has ended: {error}");
            home.note_quarantine(bytes, false, &reason);
        }
        Released::Quarantined(error) => {
            home.note_device_error(&error);
            counts.unregistration_failures.add(1);
            counts.quarantined.of(true).add(1);
            counts.retiring.of(true).subtract(1);
            home.note_quarantine(bytes, true, &format_args!("it could not be unregistered: {error}"));
        }
    }
    home.progress.announce();
}
