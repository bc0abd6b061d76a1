//! Returned blocks that are not on a shelf yet, by class, where a taker can find them.
//!
//! The cleaner and the takers both ask the driver about the same blocks, but never under the lock: each
//! copies what to ask, asks, and takes the block out only if the entry is still there under its number.
//! Numbers are never used twice, so an answer about a block that left meanwhile is dropped.

use crate::block::{Fate, Returned};
use crate::contexts::Context;
use crate::driver::EventHandle;
use crate::os::coarse_ns;
use crate::size_class::{Classes, SizeClass};
use crate::sync::{Arc, AtomicU64, AtomicUsize, Mutex, Ordering, fixed, push_reserved};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::time::Duration;

/// The name of an entry; grows, and is never used twice in a pool.
pub(crate) type EntryId = u64;

/// Where a block stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Left here by a taker that could not use it; the cleaner has not seen it.
    Unsorted,
    /// This many of its events were not seen complete yet.
    Waiting(usize),
    /// Nothing is outstanding; to be zeroed (and registered first, if it never was).
    Done,
}

#[derive(Debug)]
struct Entry {
    id: EntryId,
    stage: Stage,
    block: Returned,
}

/// What a taker asks the driver about.
pub(crate) struct Candidate {
    pub(crate) id: EntryId,
    /// Empty: known to be done. With the contexts, so that no shutdown destroys an event that is about to be asked.
    pub(crate) events: SmallVec<[(EventHandle, Arc<Context>); 2]>,
}

/// Tells a taker that found nothing whether a block of its class was just then in the cleaner's hands,
/// between the inbox, this set and the shelf.
#[derive(Debug, Default)]
struct Transit {
    in_hand: AtomicUsize,
    moves: AtomicUsize,
}

/// The pending blocks of a pool.
#[derive(Debug)]
pub(crate) struct Pending {
    classes: Box<[Mutex<VecDeque<Entry>>]>,
    transit: Box<[Transit]>,
    /// Since when a question to the driver has been without an answer, by the coarse clock; 0 for none.
    asking_since: fixed::AtomicU64,
    /// How many blocks takers have found before the cleaner had dealt with them. A hint: it may miss some.
    harvests: fixed::AtomicU64,
    /// Entries that are done, in all classes, so that an idle look costs one load.
    done: AtomicUsize,
    next_id: AtomicU64,
}

/// The driver holds callers up for so long at most as a matter of course (a thread that was taken off its core in the
/// middle of a question would look the same); beyond it, it hangs or page-locks something huge.
const ANSWER_IS_LATE_AFTER: Duration = Duration::from_millis(100);

impl Pending {
    pub(crate) fn new(classes: Classes) -> Self {
        Self {
            classes: classes.all().map(|_| Mutex::default()).collect(),
            transit: classes.all().map(|_| Transit::default()).collect(),
            asking_since: fixed::AtomicU64::new(0),
            harvests: fixed::AtomicU64::new(0),
            done: AtomicUsize::new(0),
            next_id: AtomicU64::new(1),
        }
    }

    /// Asks the driver something, and lets takers see how long it takes.
    pub(crate) fn ask<R>(&self, question: impl FnOnce() -> R) -> R {
        let now = coarse_ns().max(1);
        let is_first =
            self.asking_since.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        let answer = question();
        if is_first {
            self.asking_since.store(0, Ordering::Relaxed);
        }
        answer
    }

    /// Whether a question has been without an answer for so long that a taker should not ask another.
    pub(crate) fn answers_are_late(&self) -> bool {
        let since = Duration::from_nanos(self.asking_since.load(Ordering::Relaxed));
        since != Duration::ZERO
            && Duration::from_nanos(coarse_ns()).saturating_sub(since) > ANSWER_IS_LATE_AFTER
    }

    /// Two at once may count as one: nobody has to pay for an exact count.
    pub(crate) fn note_harvest(&self) {
        self.harvests.store(self.harvests() + 1, Ordering::Relaxed);
    }

    pub(crate) fn harvests(&self) -> u64 {
        self.harvests.load(Ordering::Relaxed)
    }

    /// A number for an entry that is about to be inserted, so that its waits can be set up first.
    pub(crate) fn reserve_id(&self) -> EntryId {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn insert(&self, stage: Stage, block: Returned) {
        self.insert_as(self.reserve_id(), stage, block);
    }

    pub(crate) fn insert_as(&self, id: EntryId, stage: Stage, block: Returned) {
        let lock = &self.classes[block.class().index()];
        // Counted before it is there: a count that is too high costs a look, one too low loses a block.
        if stage == Stage::Done {
            self.done.fetch_add(1, Ordering::SeqCst);
        }
        // Entries stay sorted by number but for two inserters at the same moment; `position` copes.
        push_reserved(lock, |entries| entries, Entry { id, stage, block });
    }

    /// The cleaner is about to take a block of the class into its hands.
    pub(crate) fn begin_move(&self, class: SizeClass) {
        self.transit[class.index()].in_hand.fetch_add(1, Ordering::SeqCst);
    }

    /// The cleaner has put down what it took, wherever it went.
    pub(crate) fn end_move(&self, class: SizeClass) {
        let transit = &self.transit[class.index()];
        transit.moves.fetch_add(1, Ordering::SeqCst);
        transit.in_hand.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether the cleaner has blocks of the class in its hands, and how often it has put one down.
    pub(crate) fn transit(&self, class: SizeClass) -> (bool, usize) {
        let transit = &self.transit[class.index()];
        let in_hand = transit.in_hand.load(Ordering::SeqCst) > 0;
        (in_hand, transit.moves.load(Ordering::SeqCst))
    }

    /// Whether the entry is still here.
    pub(crate) fn contains(&self, class: SizeClass, id: EntryId) -> bool {
        position(&self.classes[class.index()].lock(), id).is_some()
    }

    /// One more event of the entry was seen complete; the block itself stays until it is taken.
    pub(crate) fn event_complete(&self, class: SizeClass, id: EntryId) {
        let mut entries = self.classes[class.index()].lock();
        if let Some(index) = position(&entries, id)
            && let Stage::Waiting(left) = entries[index].stage
        {
            if left <= 1 {
                entries[index].stage = Stage::Done;
                self.done.fetch_add(1, Ordering::SeqCst);
            } else {
                entries[index].stage = Stage::Waiting(left - 1);
            }
        }
    }

    /// Takes the entry out, whatever its stage.
    pub(crate) fn remove(&self, class: SizeClass, id: EntryId) -> Option<Returned> {
        let mut entries = self.classes[class.index()].lock();
        let index = position(&entries, id)?;
        entries.remove(index).map(|entry| self.taken(entry))
    }

    /// Takes one block that is done, from the smallest class that has one; `end_move` is the caller's duty.
    pub(crate) fn pop_done(&self) -> Option<Returned> {
        self.pop_done_of(self.classes.len())
    }

    /// As [`Self::pop_done`], of the classes below the given one.
    pub(crate) fn pop_done_below(&self, class: SizeClass) -> Option<Returned> {
        self.pop_done_of(class.index())
    }

    fn pop_done_of(&self, classes: usize) -> Option<Returned> {
        if self.done.load(Ordering::SeqCst) == 0 {
            return None;
        }
        self.classes[..classes].iter().find_map(|class| {
            let mut entries = class.lock();
            let done = entries.iter().position(|entry| entry.stage == Stage::Done)?;
            // Before the lock is released, so that no taker finds neither the block nor the mark.
            self.begin_move(entries[done].block.class());
            entries.remove(done).map(|entry| self.taken(entry))
        })
    }

    /// Takes one block that the cleaner has not sorted.
    pub(crate) fn pop_unsorted(&self, class: SizeClass) -> Option<Returned> {
        let mut entries = self.classes[class.index()].lock();
        let index = entries.iter().position(|entry| entry.stage == Stage::Unsorted)?;
        entries.remove(index).map(|entry| self.taken(entry))
    }

    /// Takes any block at all; for the end of a shutdown.
    pub(crate) fn pop_any(&self) -> Option<Returned> {
        self.classes.iter().find_map(|class| class.lock().pop_front().map(|entry| self.taken(entry)))
    }

    fn taken(&self, entry: Entry) -> Returned {
        if entry.stage == Stage::Done {
            self.done.fetch_sub(1, Ordering::SeqCst);
        }
        entry.block
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.classes.iter().all(|class| class.lock().is_empty())
    }

    /// The next block after `after` that a taker may ask about: its events alone decide, and `fits`.
    ///
    /// Blocks that are known to be done come with no events; `device_in_use` is false where every block is.
    #[inline]
    pub(crate) fn candidate(
        &self,
        class: SizeClass,
        after: EntryId,
        device_in_use: bool,
        fits: impl Fn(&Returned) -> bool,
    ) -> Option<Candidate> {
        let entries = self.classes[class.index()].lock();
        entries.iter().filter(|entry| entry.id > after && fits(&entry.block)).find_map(|entry| {
            let is_recorded = entry.block.fate() == Fate::Recorded;
            let nothing_to_wait_for = !device_in_use && is_recorded && entry.block.uses().is_empty();
            let known_done =
                entry.stage == Stage::Done || entry.block.fate().is_proof() || nothing_to_wait_for;
            if known_done {
                return Some(Candidate { id: entry.id, events: SmallVec::new() });
            }
            let uses = entry.block.uses().iter();
            let events: SmallVec<_> = uses.map(|used| (used.event, used.context.clone())).collect();
            // Without a record only a context-wide wait can say it, which is the cleaner's.
            (!events.is_empty()).then_some(Candidate { id: entry.id, events })
        })
    }
}

/// Entries are almost always sorted by number: a search by halves, then one by one.
fn position(entries: &VecDeque<Entry>, id: EntryId) -> Option<usize> {
    match entries.binary_search_by_key(&id, |entry| entry.id) {
        Ok(index) => Some(index),
        Err(_) => entries.iter().position(|entry| entry.id == id),
    }
}
