//! Counters, and the snapshot a user reads.
//!
//! Every number is a count of things that happened, kept per class where it is on the hot path, and the
//! gauges are differences of counts: a block given and not yet returned is checked out. So `take` and
//! `drop` each touch one counter, and a forgotten update shows as an equation that does not hold.

mod snapshot;
mod summary;

pub use snapshot::{ClassStats, Stats};

use crate::config::BackingInUse;
use crate::placement::{HugePagesInUse, NumaInUse};
use crate::size_class::{Classes, SizeClass};
use crate::sync::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// A count that only grows, or a gauge that several threads move.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    #[inline]
    pub(crate) fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn subtract(&self, amount: u64) {
        self.0.fetch_sub(amount, Ordering::Relaxed);
    }

    /// Adds one without an atomic read-modify-write; the caller holds the lock that guards this count.
    #[inline]
    pub(crate) fn add_locked(&self) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A count kept apart for pageable (0) and pinned (1) blocks.
#[derive(Debug, Default)]
pub(crate) struct Split([Count; 2]);

impl Split {
    #[inline]
    pub(crate) fn of(&self, pinned: bool) -> &Count {
        &self.0[usize::from(pinned)]
    }

    pub(crate) fn total(&self) -> u64 {
        self.0[0].read().wrapping_add(self.0[1].read())
    }
}

/// What happened to the blocks of one class.
#[derive(Debug, Default)]
#[repr(align(128))] // Two classes never share a cache line.
pub(crate) struct ClassCounts {
    /// From the inbox or the pending set.
    pub(crate) harvested: Split,
    /// Freshly mapped; pinned where `take_pinned` page-locked it for its caller.
    pub(crate) misses: Split,
    /// Dropped guards, by drain epoch (see `Home::drain`) and kind.
    pub(crate) returned: [Split; 2],
    /// Blocks page-locked between their return and the shelf.
    pub(crate) promoted: Count,
    /// Returned blocks that are dealt with (shelved, harvested, freed, evicted, quarantined), by epoch and kind.
    pub(crate) settled: [Split; 2],
    /// Settled because a graph held them, and queued again since it is gone; by epoch and kind.
    pub(crate) resumed: [Split; 2],
    /// Dropped, and held for a captured graph.
    pub(crate) held: Split,
    /// Blocks that the cleaner put on the shelf.
    pub(crate) recycled: Count,
    pub(crate) evictions: Count,
    /// Let go because nobody needed them for as long as the settings say.
    pub(crate) aged_out: Count,
    /// Freed after their return without being page-locked: the cap has no room for them.
    pub(crate) passed_over: Count,
    /// Let go, and not yet unregistered and unmapped.
    pub(crate) retiring: Split,
    pub(crate) quarantined: Split,
    /// Page-locked ahead or by `take_pinned`, and on their way to a shelf or a caller.
    pub(crate) staging: Count,
    pub(crate) registrations: Count,
    pub(crate) registration_failures: Count,
    pub(crate) unregistrations: Count,
    pub(crate) unregistration_failures: Count,
    pub(crate) record_failures: Count,
    pub(crate) wait_failures: Count,
    pub(crate) zeroed_bytes: Count,
    pub(crate) zero_ns: Count,
    pub(crate) register_ns: Count,
    pub(crate) wait_ns: Count,
}

/// What a class's shelf counts by itself, pageable and pinned.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShelfCounts {
    pub(crate) hits: [u64; 2],
    pub(crate) pooled: [u64; 2],
}

impl ClassCounts {
    /// A dirty prefix is zero again; gives the time that it took.
    pub(crate) fn zeroed(&self, job: crate::zero::Job) -> Duration {
        self.zeroed_bytes.add(job.bytes() as u64);
        let elapsed = job.finish();
        self.zero_ns.add(elapsed.as_nanos() as u64);
        elapsed
    }

    /// Blocks given to callers besides hits, by kind.
    fn given_beside_hits(&self, pinned: bool) -> u64 {
        self.harvested.of(pinned).read().wrapping_add(self.misses.of(pinned).read())
    }

    /// Page-locked blocks that are out or on their way back; `hits` are the class's page-locked ones.
    ///
    /// While buffers move, a block may be counted twice, or a moment late.
    pub(crate) fn pinned_off_shelf(&self, hits: u64) -> usize {
        let settled = Self::by_kind(&self.settled, true);
        let given = hits.wrapping_add(self.given_beside_hits(true)).wrapping_add(self.promoted.read());
        let resumed = Self::by_kind(&self.resumed, true);
        usize::try_from(given.wrapping_add(resumed).wrapping_sub(settled) as i64).unwrap_or(0)
    }

    pub(crate) fn returned_total(&self) -> u64 {
        self.returned[0].total().wrapping_add(self.returned[1].total())
    }

    pub(crate) fn settled_total(&self) -> u64 {
        self.settled[0].total().wrapping_add(self.settled[1].total())
    }

    fn resumed_total(&self) -> u64 {
        self.resumed[0].total().wrapping_add(self.resumed[1].total())
    }

    fn by_kind(epochs: &[Split; 2], pinned: bool) -> u64 {
        epochs[0].of(pinned).read().wrapping_add(epochs[1].of(pinned).read())
    }

    fn snapshot(&self, class: SizeClass, shelf: impl FnOnce() -> ShelfCounts) -> ClassStats {
        // The later event of each pair is read first, so that a difference read while buffers move
        // is never negative by more than what `saturating` hides.
        let settled = self.settled_total();
        let settled_pinned = Self::by_kind(&self.settled, true);
        let returned = self.returned_total();
        let returned_pinned = Self::by_kind(&self.returned, true);
        let resumed = self.resumed_total();
        let resumed_pinned = Self::by_kind(&self.resumed, true);
        let shelf = shelf();
        let given_pinned = shelf.hits[1].wrapping_add(self.given_beside_hits(true));
        let given = given_pinned.wrapping_add(shelf.hits[0]).wrapping_add(self.given_beside_hits(false));
        let minus =
            |a: u64, b: u64| if a.wrapping_sub(b) as i64 > 0 { a.wrapping_sub(b) as usize } else { 0 };
        ClassStats {
            class_bytes: class.bytes(),
            hits: shelf.hits[1],
            unpinned_hits: shelf.hits[0],
            misses: self.misses.total(),
            harvested: self.harvested.total(),
            returned,
            recycled: self.recycled.read(),
            evictions: self.evictions.read(),
            aged_out: self.aged_out.read(),
            passed_over: self.passed_over.read(),
            registrations: self.registrations.read(),
            registration_failures: self.registration_failures.read(),
            unregistrations: self.unregistrations.read(),
            unregistration_failures: self.unregistration_failures.read(),
            record_failures: self.record_failures.read(),
            wait_failures: self.wait_failures.read(),
            zeroed_bytes: self.zeroed_bytes.read(),
            zero_time: Duration::from_nanos(self.zero_ns.read()),
            register_time: Duration::from_nanos(self.register_ns.read()),
            wait_time: Duration::from_nanos(self.wait_ns.read()),
            pooled_buffers: (shelf.pooled[0] + shelf.pooled[1]) as usize,
            pooled_pinned_buffers: shelf.pooled[1] as usize,
            queued_buffers: minus(returned.wrapping_add(resumed), settled),
            queued_pinned_buffers: minus(
                returned_pinned.wrapping_add(resumed_pinned).wrapping_add(self.promoted.read()),
                settled_pinned,
            ),
            checked_out_buffers: minus(given, returned),
            checked_out_pinned_buffers: minus(given_pinned, returned_pinned),
            retiring_buffers: self.retiring.of(true).read() as usize,
            freeing_buffers: self.retiring.of(false).read() as usize,
            staging_buffers: self.staging.read() as usize,
            held_buffers: self.held.total() as usize,
            held_pinned_buffers: self.held.of(true).read() as usize,
            quarantined_buffers: self.quarantined.total() as usize,
            quarantined_pinned_buffers: self.quarantined.of(true).read() as usize,
        }
    }
}

/// All counters of a pool.
#[derive(Debug)]
pub(crate) struct Counts {
    classes: Box<[ClassCounts]>,
    all: Classes,
    pub(crate) context_waits: Count,
    /// Bytes that are registered or about to be; what the ceiling is held against.
    reserved_bytes: AtomicUsize,
    /// Independent of all the counts above: moved only where the driver registered or unregistered.
    registered_bytes: AtomicUsize,
    peak_registered_bytes: AtomicUsize,
}

#[cfg(any(test, loom))]
impl Default for Counts {
    fn default() -> Self {
        Self::new(Classes::POWERS_OF_TWO)
    }
}

impl Counts {
    pub(crate) fn new(all: Classes) -> Self {
        Self {
            classes: all.all().map(|_| ClassCounts::default()).collect(),
            all,
            context_waits: Count::default(),
            reserved_bytes: AtomicUsize::new(0),
            registered_bytes: AtomicUsize::new(0),
            peak_registered_bytes: AtomicUsize::new(0),
        }
    }

    /// All classes of the pool.
    pub(crate) fn all_classes(&self) -> Classes {
        self.all
    }

    #[inline]
    pub(crate) fn class(&self, class: SizeClass) -> &ClassCounts {
        &self.classes[class.index()]
    }

    /// Reserves room under the ceiling before the driver is asked; false when there is none.
    pub(crate) fn reserve(&self, bytes: usize, ceiling: usize) -> bool {
        let reserve = |now: usize| now.checked_add(bytes).filter(|sum| *sum <= ceiling);
        self.reserved_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve).is_ok()
    }

    /// Gives a reservation back: the driver refused, or has unregistered.
    pub(crate) fn unreserve(&self, bytes: usize) {
        self.reserved_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn reserved_bytes(&self) -> usize {
        self.reserved_bytes.load(Ordering::Relaxed)
    }

    /// The driver registered what was reserved.
    pub(crate) fn registered(&self, class: SizeClass) {
        let bytes = class.bytes();
        self.class(class).registrations.add(1);
        let before = self.registered_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.peak_registered_bytes.fetch_max(before + bytes, Ordering::Relaxed);
    }

    /// The driver unregistered.
    pub(crate) fn unregistered(&self, class: SizeClass) {
        let bytes = class.bytes();
        self.class(class).unregistrations.add(1);
        self.registered_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.unreserve(bytes);
    }

    /// A registration vanished with its context; the call to undo it failed.
    pub(crate) fn vanished(&self, class: SizeClass) {
        self.class(class).unregistration_failures.add(1);
        self.registered_bytes.fetch_sub(class.bytes(), Ordering::Relaxed);
        self.unreserve(class.bytes());
    }

    pub(crate) fn registered_bytes(&self) -> usize {
        self.registered_bytes.load(Ordering::Relaxed)
    }

    /// Returned buffers of the drain epoch that are not yet dealt with.
    pub(crate) fn queued_in_epoch(&self, epoch: usize) -> u64 {
        self.classes
            .iter()
            .map(|class| {
                let settled = class.settled[epoch].total();
                let queued = class.returned[epoch].total().wrapping_add(class.resumed[epoch].total());
                queued.wrapping_sub(settled)
            })
            .fold(0, u64::wrapping_add)
    }

    /// Bytes of pageable blocks that are let go and not yet unmapped.
    pub(crate) fn freeing_bytes(&self) -> u64 {
        self.bytes_of(|counts| counts.retiring.of(false).read())
    }

    /// Bytes of returned buffers that are not yet dealt with.
    pub(crate) fn queued_bytes(&self) -> u64 {
        self.bytes_of(|counts| {
            let settled = counts.settled_total();
            let queued = counts.returned_total().wrapping_add(counts.resumed_total()).wrapping_sub(settled);
            if queued as i64 > 0 { queued } else { 0 }
        })
    }

    fn bytes_of(&self, blocks: impl Fn(&ClassCounts) -> u64) -> u64 {
        let bytes =
            self.all.all().map(|class| blocks(self.class(class)).saturating_mul(class.bytes() as u64));
        bytes.fold(0, u64::saturating_add)
    }

    pub(crate) fn retiring_buffers(&self) -> u64 {
        self.classes.iter().map(|class| class.retiring.of(true).read()).sum()
    }

    pub(crate) fn snapshot(&self, shelf: impl Fn(SizeClass) -> ShelfCounts) -> Stats {
        let classes: Vec<ClassStats> = self
            .all
            .all()
            .map(|class| self.class(class).snapshot(class, || shelf(class)))
            // By every number: a block that `prewarm` page-locked may be quarantined and never have been taken.
            .filter(|class| *class != ClassStats { class_bytes: class.class_bytes, ..ClassStats::default() })
            .collect();
        let sum = |pick: fn(&ClassStats) -> u64| classes.iter().map(pick).sum::<u64>();
        let time = |pick: fn(&ClassStats) -> Duration| classes.iter().map(pick).sum::<Duration>();
        let buffers = |pick: fn(&ClassStats) -> usize| classes.iter().map(pick).sum::<usize>();
        let bytes = |pick: fn(&ClassStats) -> usize| {
            classes
                .iter()
                .map(|class| pick(class).saturating_mul(class.class_bytes))
                .fold(0, usize::saturating_add)
        };
        Stats {
            // The home knows, and fills it in.
            backing: BackingInUse::Undecided,
            huge_pages: HugePagesInUse::Undecided,
            numa: NumaInUse::Anywhere,
            hits: sum(|class| class.hits),
            unpinned_hits: sum(|class| class.unpinned_hits),
            misses: sum(|class| class.misses),
            harvested: sum(|class| class.harvested),
            returned: sum(|class| class.returned),
            recycled: sum(|class| class.recycled),
            evictions: sum(|class| class.evictions),
            aged_out: sum(|class| class.aged_out),
            passed_over: sum(|class| class.passed_over),
            registrations: sum(|class| class.registrations),
            registration_failures: sum(|class| class.registration_failures),
            unregistrations: sum(|class| class.unregistrations),
            unregistration_failures: sum(|class| class.unregistration_failures),
            record_failures: sum(|class| class.record_failures),
            wait_failures: sum(|class| class.wait_failures),
            context_waits: self.context_waits.read(),
            pooled_buffers: buffers(|class| class.pooled_buffers),
            pooled_bytes: bytes(|class| class.pooled_buffers),
            pooled_pinned_bytes: bytes(|class| class.pooled_pinned_buffers),
            checked_out_buffers: buffers(|class| class.checked_out_buffers),
            checked_out_bytes: bytes(|class| class.checked_out_buffers),
            checked_out_pinned_bytes: bytes(|class| class.checked_out_pinned_buffers),
            queued_buffers: buffers(|class| class.queued_buffers),
            queued_bytes: bytes(|class| class.queued_buffers),
            queued_pinned_bytes: bytes(|class| class.queued_pinned_buffers),
            retiring_bytes: bytes(|class| class.retiring_buffers),
            freeing_bytes: bytes(|class| class.freeing_buffers),
            staging_bytes: bytes(|class| class.staging_buffers),
            held_buffers: buffers(|class| class.held_buffers),
            held_bytes: bytes(|class| class.held_pinned_buffers),
            quarantined_bytes: bytes(|class| class.quarantined_buffers),
            quarantined_pinned_bytes: bytes(|class| class.quarantined_pinned_buffers),
            registered_bytes: self.registered_bytes(),
            peak_registered_bytes: self.peak_registered_bytes.load(Ordering::Relaxed),
            zeroed_bytes: sum(|class| class.zeroed_bytes),
            zero_time: time(|class| class.zero_time),
            register_time: time(|class| class.register_time),
            wait_time: time(|class| class.wait_time),
            classes,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A page-locked block that was returned, held for a graph, queued again, and dealt with; `rounds` times.
    fn held_and_resumed(counts: &ClassCounts, rounds: u64) {
        counts.misses.of(true).add(rounds);
        counts.returned[0].of(true).add(rounds);
        counts.settled[0].of(true).add(rounds);
        counts.resumed[1].of(true).add(rounds);
        counts.settled[1].of(true).add(rounds);
    }

    #[test]
    fn what_graphs_held_once_hides_nothing_that_is_queued_or_out_later() {
        let all = Counts::default();
        let class = SizeClass::of(4096).unwrap();
        let counts = all.class(class);
        held_and_resumed(counts, 5);
        assert_eq!((all.queued_bytes(), counts.pinned_off_shelf(0)), (0, 0));
        // Three are taken, and one of them comes back.
        counts.misses.of(true).add(3);
        counts.returned[0].of(true).add(1);
        assert_eq!(all.queued_bytes(), class.bytes() as u64, "no backlog would ever be said");
        assert_eq!(counts.pinned_off_shelf(0), 3, "more would be page-locked than the cap has room for");
    }
}
