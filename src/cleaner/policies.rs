//! What keeps the pool healthy for weeks: blocks that nobody needs age out, and what the cap has no room for is
//! not page-locked.

use super::{Cleaner, LaneKind};
use crate::clock::TICK;
use crate::home::Home;
use crate::lanes::ReleaseJob;
use crate::size_class::{CLASS_COUNT, SizeClass};
use crate::sync::Instant;
use std::time::Duration;

/// How often in `max_idle_time` the shelves are looked at, while there is something on them.
const LOOKS: u32 = 16;

/// While blocks of another class are passed over, a block is too old after this part of `max_idle_time`.
const PRESSED: u32 = 8;

/// What the cleaner knows of the age of what lies on the shelves.
pub(super) struct Ageing {
    /// `None`: blocks may lie for ever.
    max_idle: Option<Duration>,
    /// By the pool's clock.
    next_look: Instant,
    /// Bit `n`: since the last look a block of class `n` was passed over.
    passed_over: u64,
}

const _: () = assert!(CLASS_COUNT <= 64, "one bit a class");

impl Ageing {
    pub(super) fn new(home: &Home) -> Self {
        Self { max_idle: home.settings.max_idle_time, next_look: home.clock.now(), passed_over: 0 }
    }
}

impl Cleaner {
    /// Lets go of what lay on its shelf for too long, bit by bit.
    pub(super) fn age(&mut self) {
        let order = self.home.time_order();
        let now = self.home.clock.now();
        if let Some(max_idle) = self.ageing.max_idle
            && (now >= self.ageing.next_look || order.is_some())
        {
            self.ageing.next_look = now + (max_idle / LOOKS).max(TICK);
            let passed_over = std::mem::take(&mut self.ageing.passed_over);
            let Self { home, release, .. } = self;
            let max_age = |class| max_age(max_idle, passed_over, class);
            home.shelf.age_out(max_age, |block| {
                home.count_retiring(&block);
                release.push(ReleaseJob::Retire(block.retire()));
            });
        }
        if let Some(order) = order {
            self.home.time_order_obeyed(order);
        }
    }

    /// Sleeps until rung, or until something on a shelf is too old.
    pub(super) fn park(&mut self) {
        let Self { ageing, home, .. } = &*self;
        let must_look = || self.must_look() || self.is_ending() || self.home.sleepers.any();
        let next_look = ageing.max_idle.and_then(|max_idle| {
            let max_age = |class| max_age(max_idle, ageing.passed_over, class);
            let due = home.shelf.next_due(max_age)?;
            Some(due.max(ageing.next_look.saturating_duration_since(home.clock.now())))
        });
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
        }
    }

    /// A returned block cannot be kept.
    pub(super) fn pass_over(&mut self, class: SizeClass) {
        self.home.counts.class(class).passed_over.add(1);
        self.ageing.passed_over |= 1 << class.index();
    }

    /// Whether a block that is not page-locked yet could be kept, now and when it comes back.
    pub(super) fn is_worth_page_locking(&self, class: SizeClass) -> bool {
        let home = &self.home;
        home.shelf.admits(class, self.bytes_being_registered(class), |other| {
            home.counts.class(other).pinned_off_shelf(home.shelf.counts(other).hits[1])
        })
    }

    /// Bytes on their way to shelves of this class or a smaller one.
    fn bytes_being_registered(&self, class: SizeClass) -> usize {
        let registering =
            self.with_lanes.iter().filter(|held| held.lane == LaneKind::Release && held.class <= class);
        registering.map(|held| held.class.bytes()).sum()
    }
}

/// How long a block of the class may lie.
fn max_age(max_idle: Duration, passed_over: u64, class: SizeClass) -> Duration {
    let others = passed_over & !(1 << class.index());
    if others == 0 { max_idle } else { (max_idle / PRESSED).max(TICK) }
}
