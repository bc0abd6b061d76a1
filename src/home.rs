//! What callers and the background threads of one pool share: the meeting place of the layers above.

mod holds;
mod reports;

use crate::backing::BackingState;
use crate::bell::{Bell, Ring};
use crate::block::{Ready, Returned};
use crate::captures::Captures;
use crate::clock::Clock;
use crate::config::Settings;
use crate::contexts::Contexts;
use crate::driver::{Driver, exit};
use crate::inbox::Inbox;
use crate::machine;
use crate::mapper::Mapper;
use crate::os::ForkWord;
use crate::pause::RegistrationPause;
use crate::pending::Pending;
use crate::report::{Kind, Said, Why, say_evicted, say_failure};
use crate::shelf::Shelf;
use crate::size_class::Classes;
use crate::sleepers::Sleepers;
use crate::stats::{Counts, Stats};
use crate::sync::{
    Arc, AtomicBool, AtomicU32, AtomicUsize, Instant, Mutex, Ordering, Progress, fixed, from_now, thread,
};
use std::task::Waker;
use std::time::Duration;

/// How many reasons for a quarantine are remembered for the shutdown report.
const REASONS_KEPT: usize = 16;

/// Starts the cleaner's thread; `None` when the system refuses.
pub(crate) type StartCleaner = fn(&Arc<Home>) -> Option<thread::JoinHandle<()>>;

/// The shared state of a pool.
///
/// Laid out as written: what a record and a drop read comes first, right behind the reference count, whose cache line
/// every drop has to have anyway. A hit reads nothing of it.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Home {
    pub(crate) fork: ForkWord,
    pub(crate) driver: Driver,
    pub(crate) captures: Arc<Captures>,
    pub(crate) counts: Arc<Counts>,
    /// Boxed, because its alignment would push all of this away from the reference count.
    pub(crate) inbox: Box<Inbox<Returned>>,
    /// Which of the two drain epochs counts new returns.
    epoch: AtomicUsize,
    generation: AtomicU32,
    pub(crate) bell: Bell,
    /// What follows is on other cache lines: background threads write it in every pass.
    _apart: [u64; 8],
    pub(crate) shelf: Shelf<Home>,
    pub(crate) settings: Settings,
    pub(crate) contexts: Contexts,
    pub(crate) pending: Pending,
    pub(crate) progress: Progress,
    /// The device is lost: nothing is pinned any more, nothing pinned is reused.
    lost: AtomicBool,
    drain_turn: Mutex<()>,
    /// Evicted by a caller, to be unregistered by the cleaner's lane.
    let_go: Mutex<Vec<Ready>>,
    stop: Mutex<Stop>,
    closing: AtomicBool,
    /// Tasks that wait for a buffer.
    pub(crate) sleepers: Sleepers,
    cleaner_holds: AtomicUsize,
    cleaner_rests: AtomicBool,
    registrations: RegistrationPause,
    pub(crate) backing: BackingState,
    pub(crate) mapper: Mapper,
    pub(crate) clock: Arc<Clock>,
    /// How often a test let time pass, and how often the cleaner has looked since.
    time_orders: fixed::AtomicU64,
    time_orders_obeyed: fixed::AtomicU64,
    reasons: Mutex<Vec<String>>,
    pub(crate) said: Said,
    start_cleaner: StartCleaner,
    /// The thread, and earlier ones that nobody has joined yet.
    cleaners: Mutex<Vec<thread::JoinHandle<()>>>,
}

/// Orders to stop, numbered, so that whoever gave one knows when it was obeyed, although a return at the
/// last moment may keep the thread or start another one.
#[derive(Debug, Default)]
struct Stop {
    orders: u64,
    obeyed: u64,
    /// `Some` while an order is not obeyed.
    deadline: Option<Instant>,
    /// What was returned before the order is dealt with; what was returned later need not be.
    drained: bool,
    /// What was returned in this generation or later goes back to the inbox instead of being quarantined.
    spared_from: Option<u32>,
    /// Threads that have ended and may be joined without waiting.
    ended: Vec<thread::ThreadId>,
    /// A lane that hangs in the driver was left behind since the last join.
    left_a_lane: bool,
}

impl Home {
    pub(crate) fn new(driver: Driver, settings: Settings, start_cleaner: StartCleaner) -> Arc<Self> {
        let classes = Classes::new(settings.size_classes);
        let counts = Arc::new(Counts::new(classes));
        let clock = Arc::new(Clock::default());
        let backing = BackingState::new(settings.backing);
        let nodes = settings.numa_node.and_then(|_| memory_nodes(&driver));
        let mapper = Mapper::new(settings.huge_pages, settings.numa_node, nodes.as_deref());
        Arc::new_cyclic(|home| Self {
            shelf: Shelf::new(settings.max_pooled_bytes, counts.clone(), clock.clone(), home.clone()),
            captures: Captures::of(&driver),
            driver,
            backing,
            mapper,
            settings,
            contexts: Contexts::default(),
            counts,
            inbox: Box::new(Inbox::new(classes)),
            bell: Bell::default(),
            pending: Pending::new(classes),
            _apart: [0; 8],
            progress: Progress::default(),
            fork: ForkWord::of_this_process(),
            lost: AtomicBool::new(false),
            epoch: AtomicUsize::new(0),
            generation: AtomicU32::new(0),
            drain_turn: Mutex::new(()),
            let_go: Mutex::default(),
            stop: Mutex::default(),
            closing: AtomicBool::new(false),
            sleepers: Sleepers::default(),
            cleaner_holds: AtomicUsize::new(0),
            cleaner_rests: AtomicBool::new(false),
            registrations: RegistrationPause::default(),
            clock,
            time_orders: fixed::AtomicU64::new(0),
            time_orders_obeyed: fixed::AtomicU64::new(0),
            reasons: Mutex::default(),
            said: Said::default(),
            start_cleaner,
            cleaners: Mutex::default(),
        })
    }

    /// Whether any device can have work outstanding, or anything could be page-locked.
    pub(crate) fn device_in_use(&self) -> bool {
        self.driver.api().is_in_use()
    }

    /// Whether nothing can be done or waited for any more: this is a forked child, or the process exits.
    pub(crate) fn is_over(&self) -> bool {
        self.fork.is_child() || exit::is_shut()
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// The drain epoch that counts a return made now.
    #[inline]
    pub(crate) fn epoch(&self) -> usize {
        self.epoch.load(Ordering::Relaxed) & 1
    }

    /// Tells the cleaner that something waits, and starts it on first need.
    #[inline]
    pub(crate) fn ring(self: &Arc<Self>) {
        if self.bell.ring() == Ring::StartThread {
            self.start();
        }
    }

    /// As [`Self::ring`], and ends a nap.
    pub(crate) fn ring_hard(self: &Arc<Self>) {
        if self.bell.ring_hard() == Ring::StartThread {
            self.start();
        }
    }

    #[cold]
    fn start(self: &Arc<Self>) {
        if exit::is_shut() {
            return;
        }
        match (self.start_cleaner)(self) {
            Some(thread) => {
                let mut cleaners = self.cleaners.lock();
                cleaners.retain(|earlier| !earlier.is_finished());
                cleaners.push(thread);
            }
            // What was returned stays in the inbox, where takers find it; the next drop tries again.
            None => {
                self.bell.not_started();
                let is_first = self.said.is_first(Kind::ThreadRefused);
                let thread = self.settings.thread_name.as_str();
                say_failure!(
                    is_first,
                    "thread_refused",
                    thread,
                    "the cleaner could not be started; returned buffers wait"
                );
            }
        }
    }

    /// Waits until the order to stop was obeyed, and joins what has ended. False when the deadline came
    /// first, a lane had to be left behind, or a thread ended by a panic.
    pub(crate) fn join(&self, order: u64, deadline: Instant) -> bool {
        if !self.progress.wait_until(Some(deadline), || self.stop.lock().obeyed >= order) {
            return false;
        }
        // Only those that said so: a thread that went on because something was returned meanwhile, or
        // was started since, would be waited for without end.
        let (ended, left_a_lane) = {
            let mut stop = self.stop.lock();
            (std::mem::take(&mut stop.ended), std::mem::take(&mut stop.left_a_lane))
        };
        let (ended, running): (Vec<_>, Vec<_>) = {
            let mut cleaners = self.cleaners.lock();
            std::mem::take(&mut *cleaners).into_iter().partition(|one| ended.contains(&one.thread().id()))
        };
        self.cleaners.lock().extend(running);
        ended.into_iter().map(|thread| thread.join().is_ok()).fold(!left_a_lane, |all, ok| all && ok)
    }

    /// Hands evicted blocks to the release lane.
    pub(crate) fn let_go(self: &Arc<Self>, evicted: Vec<Ready>, why: Why) {
        if evicted.is_empty() {
            return;
        }
        for block in &evicted {
            self.count_retiring(block, why);
        }
        self.let_go.lock().extend(evicted);
        self.ring_hard();
    }

    /// A block has left its shelf, and no lock of the shelves is held any more.
    pub(crate) fn count_retiring(&self, block: &Ready, why: Why) {
        say_evicted(block.class().bytes(), block.is_pinned(), why);
        self.counts.class(block.class()).retiring.of(block.is_pinned()).add(1);
    }

    pub(crate) fn take_let_go(&self) -> Vec<Ready> {
        std::mem::take(&mut *self.let_go.lock())
    }

    pub(crate) fn has_orders(&self) -> bool {
        self.time_order().is_some() || !self.let_go.lock().is_empty()
    }

    /// Waits until everything returned before the call has been dealt with.
    pub(crate) fn drain(self: &Arc<Self>, timeout: Duration) -> bool {
        let deadline = Some(from_now(timeout));
        // One drain at a time: the epoch that it waits for must get no new returns meanwhile.
        let Some(_turn) = self.drain_turn.try_lock_for(timeout) else { return false };
        self.ring_hard();
        let settled = |epoch| self.progress.wait_until(deadline, || self.counts.queued_in_epoch(epoch) == 0);
        // What an earlier drain did not live to see is counted in the other epoch, which new returns
        // must not be mixed into before it is empty.
        let current = self.epoch();
        if !settled(current ^ 1) {
            return false;
        }
        self.epoch.store(current ^ 1, Ordering::SeqCst);
        if !settled(current) {
            return false;
        }
        // A block that is not kept is off the queue when the lane has it, and dealt with when it is freed.
        self.progress.wait_until(deadline, || self.counts.retiring_buffers() == 0)
    }

    /// Orders the cleaner to finish what it can until the deadline, and to end. Gives the order's number.
    pub(crate) fn order_stop(self: &Arc<Self>, deadline: Instant) -> u64 {
        self.order_stop_after_drain(deadline, false, None)
    }

    /// As [`Self::order_stop`], and spares what was returned after the order was thought of: others may go on
    /// using the pool, and then its queue is never empty.
    pub(crate) fn order_stop_after_drain(
        self: &Arc<Self>,
        deadline: Instant,
        drained: bool,
        spared_from: Option<u32>,
    ) -> u64 {
        let order = {
            let mut stop = self.stop.lock();
            stop.orders += 1;
            stop.deadline = Some(deadline);
            stop.drained = drained;
            stop.spared_from = spared_from;
            stop.orders
        };
        self.ring_hard();
        order
    }

    pub(crate) fn stop_deadline(&self) -> Option<Instant> {
        self.stop.lock().deadline
    }

    /// Whether the order to stop need not wait for what is queued now.
    pub(crate) fn stop_is_drained(&self) -> bool {
        self.stop.lock().drained
    }

    /// Whether a block returned in this generation outlives the order to stop.
    pub(crate) fn stop_spares(&self, generation: u32) -> bool {
        self.stop.lock().spared_from.is_some_and(|from| generation >= from)
    }

    /// Which shutdown a return made now is later than.
    #[inline]
    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Begins a generation: what is returned from now on is later than this call.
    pub(crate) fn next_generation(&self) -> u32 {
        self.generation.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// The number of the last order to stop.
    pub(crate) fn stop_orders(&self) -> u64 {
        self.stop.lock().orders
    }

    /// A lane did not end in time: its thread hangs in the driver.
    pub(crate) fn leave_lane(&self) {
        self.stop.lock().left_a_lane = true;
    }

    /// Said by a cleaner after its decision to end (`ends`) or to go on.
    pub(crate) fn stop_is_done(&self, order: u64, ends: bool) {
        {
            let mut stop = self.stop.lock();
            stop.obeyed = stop.obeyed.max(order);
            if stop.orders == order {
                stop.deadline = None;
            }
            if ends {
                stop.ended.push(thread::current().id());
            }
        }
        self.progress.announce();
    }

    /// The last handle is gone: from now on nothing is kept.
    pub(crate) fn close(self: &Arc<Self>) {
        self.closing.store(true, Ordering::SeqCst);
        let mut evicted = Vec::new();
        self.shelf.set_cap(0, |block| evicted.push(block));
        self.let_go(evicted, Why::Shutdown);
        // Contexts may be known without a thread: from the builder, or from records alone.
        if !self.bell.is_stopped() || !self.contexts.is_empty() {
            self.order_stop(from_now(self.settings.shutdown_timeout));
        }
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Asks the cleaner to wake a task at that time, once; a later order with the same id replaces it.
    pub(crate) fn wake_at(self: &Arc<Self>, id: u64, due: Instant, waker: &Waker) {
        self.sleepers.wake_at(id, due, waker);
        self.ring_hard();
        if self.bell.is_stopped() {
            // No thread could be started, or the one there was has just ended: the task asks again at once.
            self.sleepers.wake_all();
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let snapshot = || self.counts.snapshot(|class| self.shelf.counts(class));
        // A fork may have copied the lock as it was held.
        let mut stats =
            if self.fork.is_child() { snapshot() } else { self.shelf.while_within_the_cap(snapshot) };
        stats.backing = self.backing.in_use();
        stats.huge_pages = self.mapper.huge_pages_in_use();
        stats.numa = self.mapper.numa_in_use();
        stats
    }
}

/// The NUMA nodes whose memory this process may use, where they can be known.
pub(crate) fn memory_nodes(driver: &Driver) -> Option<Vec<u32>> {
    driver.api().memory_nodes().or_else(machine::memory_nodes)
}
