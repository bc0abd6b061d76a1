//! The end of the cleaner's thread: what a shutdown finishes, lets go, quarantines, or gives up on.

use super::{Cleaner, Held, LaneKind};
use crate::block::Quiescent;
use crate::lanes::{Lane, Registered, ReleaseJob, context_lane, release_lane, retire};
use crate::report::{Why, say};
use crate::sync::{Instant, from_now};
use std::time::Duration;

/// How long the end of a shutdown may take beyond its deadline for lanes to leave the driver.
const LANE_GRACE: Duration = Duration::from_millis(500);

impl Cleaner {
    /// Whether this is the end: it was ordered or nobody is left, and nothing is left to do or the
    /// deadline has passed.
    pub(super) fn must_end(&self) -> bool {
        let home = &self.home;
        if home.stop_deadline().is_none() && home.is_closing() && !home.sleepers.any() {
            home.order_stop(from_now(home.settings.shutdown_timeout));
        }
        let Some(deadline) = home.stop_deadline() else { return false };
        let queue_is_empty = || home.pending.is_empty() && !home.inbox.has_arrivals();
        let settled = self.with_lanes.is_empty()
            && self.for_graphs.is_empty()
            && (home.stop_is_drained() || queue_is_empty());
        settled || Instant::now() >= deadline
    }

    /// Quarantines what did not finish, lets go of everything pooled, ends the lanes, and stops.
    ///
    /// False when something arrived at the last moment and the thread must go on.
    pub(super) fn end(&mut self) -> bool {
        let home = self.home.clone();
        let order = home.stop_orders();
        let mut spared = self.end_held();
        while let Some(block) = home.pending.pop_any() {
            if home.stop_spares(block.generation()) {
                spared.push(block);
            } else {
                self.quarantine(block, "its device work did not finish before the shutdown's deadline");
            }
        }
        self.queues.clear();
        let mut evicted = Vec::new();
        home.shelf.trim_to(0, |block| evicted.push(block));
        for block in evicted {
            home.count_retiring(&block, Why::Shutdown);
            self.release.push(ReleaseJob::Retire(block.retire()));
        }
        for block in home.take_let_go() {
            self.release.push(ReleaseJob::Retire(block.retire()));
        }
        self.end_lanes();
        // What is registered, or recorded by a guard that is out, keeps its context.
        home.contexts.release_unused(&home.driver);
        // Returned after the order: this thread, which goes on for it, or the next one deals with it.
        for block in spared {
            home.inbox.push(block.class(), block);
        }
        let ends = home.bell.stop(|| {
            let arrivals = home.inbox.has_arrivals() || home.has_orders() || home.sleepers.any();
            arrivals || home.stop_orders() != order
        });
        home.stop_is_done(order, ends);
        ends
    }

    fn end_lanes(&mut self) {
        let mut verdicts = Vec::new();
        let contexts_ended = self.contexts.stop(self.lane_deadline(), |verdict| verdicts.push(verdict));
        verdicts.into_iter().for_each(|verdict| self.context_verdict(verdict));
        while let Some(block) = self.home.pending.pop_done() {
            self.home.pending.end_move(block.class());
            // A verdict that came at the last moment: its work is done, but nothing is kept any more.
            let proof = block.proof();
            let block = block.settle(&self.home.driver, proof);
            self.let_go(block);
        }
        let mut results = Vec::new();
        // A time of its own: one lane that hangs must not cost the other one its end.
        let release_ended = self.release.stop(self.lane_deadline(), |result| results.push(result));
        for result in results {
            let (Registered::Pinned(block) | Registered::Unpinned(block) | Registered::Refused(block)) =
                result;
            self.lane_gave(Held::of(LaneKind::Release, block.class(), block.epoch(), false));
            self.let_go_without_lane(block, release_ended);
        }
        if !contexts_ended || !release_ended {
            self.give_up_on_lanes();
        }
        self.release = Lane::new(self.home.clone(), "release", release_lane);
        self.contexts = Lane::new(self.home.clone(), "contexts", context_lane);
    }

    fn lane_deadline(&self) -> Instant {
        let now = Instant::now();
        self.home.stop_deadline().unwrap_or(now).max(now) + LANE_GRACE
    }

    /// After the release lane has ended. Where it hangs in the driver, so would this thread.
    fn let_go_without_lane(&mut self, block: Quiescent, driver_answers: bool) {
        let counts = self.home.counts.class(block.class());
        let pinned = block.is_pinned();
        counts.settled[block.epoch()].of(pinned).add(1);
        let block = block.retire();
        if driver_answers || !pinned {
            counts.retiring.of(pinned).add(1);
            retire(&self.home, block);
        } else {
            counts.quarantined.of(true).add(1);
            block.quarantine();
        }
    }

    /// A job that the release lane never began. Pageable memory needs no driver, and goes; the other is leaked.
    fn give_up_on(&mut self, job: ReleaseJob) {
        let block = match job {
            ReleaseJob::Retire(block) => block,
            ReleaseJob::Register(block) => {
                self.lane_gave(Held::of(LaneKind::Release, block.class(), block.epoch(), false));
                let counts = self.home.counts.class(block.class());
                counts.retiring.of(false).add(1);
                counts.settled[block.epoch()].of(false).add(1);
                block.retire()
            }
        };
        if !block.is_pinned() {
            return retire(&self.home, block);
        }
        let (class, counts) = (block.class(), self.home.counts.class(block.class()));
        counts.retiring.of(true).subtract(1);
        counts.quarantined.of(true).add(1);
        block.quarantine();
        self.home.note_quarantine(class.bytes(), true, &"a driver call does not return");
    }

    /// A lane hangs in the driver: what it holds is leaked and counted.
    #[cold]
    fn give_up_on_lanes(&mut self) {
        self.home.leave_lane();
        for job in self.release.take_unstarted() {
            self.give_up_on(job);
        }
        say!(
            WARN,
            "lane_left",
            "a background thread did not leave the driver in time; what it holds is leaked"
        );
        for Held { class, epoch, pinned, .. } in std::mem::take(&mut self.with_lanes) {
            let counts = self.home.counts.class(class);
            counts.quarantined.of(pinned).add(1);
            counts.settled[epoch].of(pinned).add(1);
            self.home.note_quarantine(class.bytes(), pinned, &"a driver call does not return");
        }
    }
}
