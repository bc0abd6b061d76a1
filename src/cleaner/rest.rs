//! What the cleaner does with nothing to do: it naps, or sleeps.

use super::Cleaner;
use crate::context_end;
use crate::pace::{NAP_MAX, NAP_MIN};
use crate::sync::Instant;
use std::time::Duration;

/// With nothing pending the cleaner goes on looking for this long, so that a drop wakes nobody.
const AWAKE_WHILE_IDLE: Duration = Duration::from_millis(100);

impl Cleaner {
    pub(super) fn rest(&mut self) {
        if self.must_look() {
            if self.is_raced() {
                self.home.bell.nap(NAP_MIN);
            }
            return;
        }
        let longest = self.home.sleepers.next_wake().map_or(NAP_MAX, |due| due.clamp(NAP_MIN, NAP_MAX));
        let comes_back = self.release.has_backlog() || self.contexts.has_backlog() || self.is_ending();
        if let Some(nap) = self.queues.nap() {
            self.idle_since = None;
            self.home.bell.nap(nap.min(longest));
        } else if comes_back || self.home.sleepers.any() {
            self.home.bell.nap(longest);
        } else {
            self.rest_idle();
        }
    }

    fn rest_idle(&mut self) {
        let now = Instant::now();
        let since = *self.idle_since.get_or_insert_with(|| {
            self.idle_naps.begin();
            now
        });
        if now - since < AWAKE_WHILE_IDLE {
            self.home.bell.nap(self.idle_naps.next());
        } else {
            // Who comes so seldom says nothing about the naps.
            self.idle_naps.begin();
            self.park();
        }
    }

    pub(super) fn must_look(&self) -> bool {
        let home = &self.home;
        home.inbox.has_arrivals()
            || self.release.has_results()
            || self.contexts.has_results()
            || home.has_orders()
    }

    /// Whether callers return faster than it looks, and nothing else waits. Then it lets some gather: otherwise the two
    /// would pass every block from core to core and back, and this thread would never sleep.
    fn is_raced(&self) -> bool {
        self.had_arrivals
            && !self.release.has_results()
            && !self.contexts.has_results()
            && !self.home.has_orders()
            && !self.is_ending()
    }

    /// Whether it is waiting for the end: looking again and again, with naps.
    pub(super) fn is_ending(&self) -> bool {
        self.home.stop_deadline().is_some() || self.home.is_closing()
    }

    /// For tests: while it is held, the cleaner does nothing at all.
    pub(super) fn wait_while_held(&self) {
        // Again, because a hold that began before this thread said otherwise found it resting.
        while self.home.cleaner_is_held() {
            self.home.cleaner_rests(true);
            self.home.progress.wait_until(None, || !self.home.cleaner_is_held());
            self.home.cleaner_rests(false);
        }
    }

    /// Sleeps until rung, or until something on a shelf is too old, or it is time to look at what graphs hold.
    pub(super) fn park(&mut self) {
        let Self { ageing, home, .. } = &*self;
        // What was rung for just before this thread says that it sleeps has to be seen here: that ring is lost.
        let must_look = || {
            let is_told = home.cleaner_is_held() || home.time_order().is_some();
            is_told || self.must_look() || self.is_ending() || home.sleepers.any()
        };
        let next_look = ageing.next_need(home).into_iter().chain(self.for_graphs.longest_sleep()).min();
        let rung = match next_look {
            Some(longest) => home.bell.park_for(longest, must_look),
            None => {
                home.bell.park(must_look);
                true
            }
        };
        // After a look at the shelves alone it goes back to sleep at once.
        if rung {
            self.idle_since = None;
            // While nothing was returned, nothing would have shown that a context has ended.
            if self.home.device_in_use() {
                context_end::look_at_all(&self.home);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::block::Out;
    use crate::config::Settings;
    use crate::driver::Driver;
    use crate::home::Home;
    use crate::pace::IdleNaps;
    use crate::pages::Pages;
    use crate::size_class::SizeClass;

    #[test]
    fn an_arrival_alone_is_a_reason_to_look() {
        let home = Home::new(Driver::host_only(), Settings::default(), |_| None);
        let cleaner = Cleaner::new(home.clone());
        assert!(!cleaner.must_look() && !cleaner.is_ending(), "it may sleep");
        home.inbox.flag_class(SizeClass::of(1).unwrap());
        assert!(cleaner.must_look());
    }

    #[test]
    fn with_nothing_to_do_naps_grow() {
        let home = Home::new(Driver::host_only(), Settings::default(), |_| None);
        let mut cleaner = Cleaner::new(home.clone());
        home.bell.attach();
        let first = IdleNaps::default().next();
        cleaner.rest_idle();
        assert!(cleaner.idle_since.is_some());
        assert!(cleaner.idle_naps.next() > first);
    }

    #[test]
    fn a_caller_who_comes_after_a_long_silence_says_nothing_about_the_first_nap() {
        let home = Home::new(Driver::host_only(), Settings::default(), |_| None);
        let mut cleaner = Cleaner::new(home.clone());
        home.bell.attach();
        let first = IdleNaps::default().next();
        (0..3).for_each(|_| cleaner.rest_idle());
        cleaner.idle_since = Instant::now().checked_sub(AWAKE_WHILE_IDLE);
        // There is no bell to hear, so it does not sleep for long.
        cleaner.rest_idle();
        cleaner.idle_naps.end(home.pending.harvests());
        assert_eq!(cleaner.idle_naps.next(), first);
    }

    #[test]
    fn what_a_quick_caller_returns_meanwhile_gathers_for_the_next_look() {
        let home = Home::new(Driver::host_only(), Settings::default(), |_| None);
        let mut cleaner = Cleaner::new(home.clone());
        let class = SizeClass::of(1).unwrap();
        let return_one = || {
            let block = Out::fresh(Pages::map(class.bytes()).unwrap(), class).give_back(0, None, 0, 0);
            home.inbox.push(class, block);
        };
        return_one();
        cleaner.ingest();
        return_one();
        // As if no time had passed since, however slow this machine is.
        cleaner.ingested_at = Instant::now() + Duration::from_secs(3600);
        cleaner.ingest();
        assert_eq!(home.inbox.waiting(class), 1, "taken from core to core, one by one");
        assert!(cleaner.must_look() && cleaner.is_raced(), "it comes back for it, after a nap");
        home.order_stop(Instant::now());
        assert!(!cleaner.is_raced(), "nobody is to wait for a nap");
        cleaner.had_arrivals = false;
        cleaner.ingest();
        assert_eq!(home.inbox.waiting(class), 0, "in the next pass");
        while let Some(block) = home.pending.pop_any() {
            block.quarantine();
        }
    }

    #[test]
    fn an_order_to_stop_is_waited_for_with_naps_and_not_asleep() {
        let home = Home::new(Driver::host_only(), Settings::default(), |_| None);
        let cleaner = Cleaner::new(home.clone());
        home.order_stop(Instant::now());
        assert!(cleaner.is_ending());
    }
}
