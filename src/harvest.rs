//! A taker that would miss looks among the returned blocks of its class first.
//!
//! So a returned block is there for the next take at once, whether or not the cleaner has looked yet,
//! and the cleaner may be lazy. The taker zeroes on its own thread only because a miss costs it more:
//! faulting in a fresh 64 MiB takes several times as long as zeroing a warm one.

use crate::block::{Fate, Out, Returned};
use crate::events::with_relaxed_capture;
use crate::home::Home;
use crate::os::is_background_thread;
use crate::pending::Stage;
use crate::size_class::SizeClass;
use crate::sync::{Arc, Instant, from_now, spin_loop, thread};
use crate::zero;
use std::time::Duration;

/// Event queries that one take may make in vain; a stuck stream must not make takes slow.
const QUERIES_MAX: usize = 8;

/// Blocks that one take may look at in the pending set; of these it asks the driver about few.
const CANDIDATES_MAX: usize = 64;

/// Blocks that one take may look at in the inbox.
const LOOKS_MAX: usize = 16;

/// Slower than any zeroing here; a fresh mapping is slower still.
const ZEROING_BYTES_PER_US: usize = 2_000;

/// Spins before the taker offers its core to whoever has the block.
const SPINS: u32 = 64;

/// A block that was returned, wherever it is on its way: waiting, in the cleaner's hands, or just shelved.
///
/// A block passes from the inbox through the cleaner to the shelf, and a taker that looks at one place
/// after the other could miss it at each. So it looks again whenever the cleaner has put one down
/// meanwhile, and waits for one that is in its hands, for less than a miss would cost.
pub(crate) fn find_returned(home: &Arc<Home>, class: SizeClass, zeroed: bool) -> Option<Out> {
    // One budget of questions for the whole take, however often it looks.
    let mut search = Search::new(home, zeroed);
    let mut deadline = None;
    let mut spins = 0;
    loop {
        let (_, moves) = home.pending.transit(class);
        if let Some(block) = search.harvest(class) {
            return Some(block);
        }
        loop {
            if let Some((block, _)) = home.shelf.pop(class) {
                return Some(block.hand_out());
            }
            let (in_hand, moves_now) = home.pending.transit(class);
            if moves_now != moves {
                break;
            }
            // One of the pool's own threads, in a subscriber of `tracing`, would wait for itself.
            if !in_hand || is_background_thread() {
                return None;
            }
            let zeroing = Duration::from_micros((class.bytes() / ZEROING_BYTES_PER_US) as u64);
            let bound = home.settings.harvest_wait_limit.saturating_add(zeroing);
            if Instant::now() > *deadline.get_or_insert_with(|| from_now(bound)) {
                return None;
            }
            spins += 1;
            if spins % SPINS == 0 { thread::yield_now() } else { spin_loop() }
        }
        if deadline.is_some_and(|deadline| Instant::now() > deadline) {
            return None;
        }
    }
}

struct Search<'a> {
    home: &'a Arc<Home>,
    zeroed: bool,
    queries_left: usize,
    /// Asked once, and under no lock: the answer may be that a library was found, which is said.
    device_in_use: bool,
}

impl<'a> Search<'a> {
    fn new(home: &'a Arc<Home>, zeroed: bool) -> Self {
        Self { home, zeroed, queries_left: QUERIES_MAX, device_in_use: home.device_in_use() }
    }

    /// A block of the class whose work is done, zeroed unless its bytes do not matter to the caller.
    fn harvest(&mut self, class: SizeClass) -> Option<Out> {
        let block = self.in_pending(class).or_else(|| self.in_inbox(class))?;
        Some(hand_out(self.home, block, self.zeroed))
    }

    fn in_pending(&mut self, class: SizeClass) -> Option<Returned> {
        let mut after = 0;
        for _ in 0..CANDIDATES_MAX {
            let candidate =
                self.home.pending.candidate(class, after, self.device_in_use, |block| self.fits(block))?;
            after = candidate.id;
            // Asked outside the lock; the answer counts only if the entry is still there afterwards.
            if candidate.events.iter().all(|(event, context)| context.is_gone() || self.is_complete(*event))
                && let Some(block) = self.home.pending.remove(class, candidate.id)
            {
                return Some(block);
            }
        }
        None
    }

    fn in_inbox(&mut self, class: SizeClass) -> Option<Returned> {
        for _ in 0..LOOKS_MAX {
            if self.queries_left == 0 {
                return None;
            }
            let block = self.home.inbox.pop(class)?;
            if self.fits(&block) && self.is_done(&block) {
                return Some(block);
            }
            self.home.pending.insert(Stage::Unsorted, block);
            self.home.inbox.flag_class(class);
            // The cleaner may have looked at the inbox, found it empty and gone to sleep meanwhile.
            self.home.ring();
        }
        None
    }

    /// Whether the block could be given to this taker at all, were its work done.
    ///
    /// Never an unregistered one where registering is possible, or a tight loop would never get
    /// pinned memory.
    fn fits(&self, block: &Returned) -> bool {
        let dirty_ok = !self.zeroed || block.dirty_bytes() <= self.home.settings.harvest_zero_limit_bytes;
        let kind_ok = if block.is_pinned() {
            !self.home.is_lost() && !block.is_stranded()
        } else {
            self.may_stay_pageable()
        };
        dirty_ok && kind_ok && matches!(block.fate(), Fate::Recorded | Fate::Proven | Fate::ContextsIdle)
    }

    /// Nothing can be pinned, or no thread runs that would pin it: without this a pool whose thread cannot be
    /// started would map fresh memory at every take and queue it at every drop.
    fn may_stay_pageable(&self) -> bool {
        !self.device_in_use || self.home.backing.locks_nothing() || self.home.bell.is_stopped()
    }

    /// Whether a device may be reading pageable memory without a record.
    fn pageable_may_be_in_use(&self) -> bool {
        let Home { contexts, driver, .. } = &**self.home;
        contexts.learn_active_primaries(driver).is_err() || contexts.any_reads_pageable(driver)
    }

    fn is_done(&mut self, block: &Returned) -> bool {
        match block.fate() {
            Fate::Proven | Fate::ContextsIdle => true,
            // Without a record only a context-wide wait could say it, which is the cleaner's.
            Fate::Recorded if block.uses().is_empty() => {
                !self.device_in_use || !block.is_pinned() && !self.pageable_may_be_in_use()
            }
            Fate::Recorded => {
                // The work of a context that has ended is over, and its events are asked nothing.
                block.uses().iter().all(|used| used.context.is_gone() || self.is_complete(used.event))
            }
            Fate::RecordFailed | Fate::Unknown | Fate::Captured => false,
        }
    }

    fn is_complete(&mut self, event: crate::driver::EventHandle) -> bool {
        if self.queries_left == 0 {
            return false;
        }
        if self.home.pending.answers_are_late() {
            // A miss costs less than to wait in the driver with the others.
            self.queries_left = 0;
            return false;
        }
        // An error is the cleaner's to judge; here it only means "not this one".
        let driver = &self.home.driver;
        let question = || with_relaxed_capture(driver, || driver.api().query_event(event));
        let complete = self.home.pending.ask(question) == Ok(true);
        // Only what was asked in vain counts: a block that is done and that the cleaner was faster to take says
        // nothing against asking for the next one.
        if !complete {
            self.queries_left -= 1;
        }
        complete
    }
}

fn hand_out(home: &Arc<Home>, block: Returned, zeroed: bool) -> Out {
    let counts = home.counts.class(block.class());
    let pinned = block.is_pinned();
    counts.settled[block.epoch()].of(pinned).add(1);
    counts.harvested.of(pinned).add(1);
    home.pending.note_harvest();
    if let Some(returned_at) = block.returned_at() {
        counts.wait_ns.add(returned_at.elapsed().as_nanos() as u64);
    }
    let proof = block.proof();
    let mut block = block.settle(&home.driver, proof);
    if zeroed && block.dirty_bytes() > 0 {
        let mut job = zero::Job::of(block.dirty_bytes());
        while block.zero_step(&home.driver, &mut job) > 0 {}
        counts.zeroed(job);
    }
    home.progress.announce();
    block.hand_out(&home.driver)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;
    use crate::driver::Driver;
    use crate::pages::Pages;
    use crate::sync::{AtomicUsize, Ordering};

    #[test]
    fn a_block_that_a_taker_passes_over_is_left_for_the_cleaner_with_its_flag_up() {
        let settings = Settings { harvest_zero_limit_bytes: 0, ..Settings::default() };
        static STARTS: AtomicUsize = AtomicUsize::new(0);
        let home = Home::new(Driver::host_only(), settings, |_| {
            STARTS.fetch_add(1, Ordering::SeqCst);
            None
        });
        let class = SizeClass::of(1).unwrap();
        let block = Out::fresh(Pages::map(class.bytes()).unwrap(), class).give_back(1, None, 0, 0);
        home.inbox.push(class, block);
        // The cleaner has just looked at the flags, and comes to the class too late.
        assert_eq!(home.inbox.take_flags().count(), 1);
        let mut search = Search::new(&home, true);
        assert!(search.harvest(class).is_none(), "more to zero than a taker may");
        assert!(home.inbox.pop(class).is_none());
        assert!(home.inbox.has_arrivals(), "nobody would look for the block again");
        assert_eq!(STARTS.load(Ordering::SeqCst), 1, "a cleaner that went to sleep meanwhile is not woken");
        let block = home.pending.pop_unsorted(class).expect("it is where the cleaner looks");
        block.quarantine();
    }

    #[test]
    fn a_harvest_tells_the_cleaner_that_it_came_too_late() {
        let home = Home::new(Driver::host_only(), Settings::default(), |_| None);
        let class = SizeClass::of(1).unwrap();
        let return_one = || {
            let block = Out::fresh(Pages::map(class.bytes()).unwrap(), class).give_back(0, None, 0, 0);
            home.inbox.push(class, block);
        };
        assert!(Search::new(&home, true).harvest(class).is_none());
        assert_eq!(home.pending.harvests(), 0, "nothing was found");
        for count in 1..3 {
            return_one();
            let block = Search::new(&home, true).harvest(class).expect("nothing to wait for");
            assert_eq!(home.pending.harvests(), count);
            block.give_back(0, None, 0, 0).quarantine();
        }
    }
}
