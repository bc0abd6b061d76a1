//! What keeps the pool healthy for weeks: blocks that nobody needs age out, and what the cap has no room for is
//! not page-locked.

use super::{Cleaner, LaneKind};
use crate::clock::TICK;
use crate::home::Home;
use crate::lanes::ReleaseJob;
use crate::report::{Why, say};
use crate::size_class::SizeClass;
use crate::sync::Instant;
use std::time::Duration;

/// How often in `max_idle_time` the shelves are looked at, while there is something on them.
const LOOKS: u32 = 16;

/// While blocks of another class are passed over, a block is too old after this part of `max_idle_time`.
const PRESSED: u32 = 8;

/// How often the cleaner looks whether much waits for the device, and how much is much, whatever the cap.
const BACKLOG_LOOK: Duration = Duration::from_secs(1);
const BACKLOG_BYTES_MIN: u64 = 256 << 20;

/// Pageable memory that may wait for the release lane to unmap it.
const FREEING_BYTES_MAX: u64 = 256 << 20;

/// What the cleaner knows of the age of what lies on the shelves.
pub(super) struct Ageing {
    /// `None`: blocks may lie for ever.
    max_idle: Option<Duration>,
    /// By the pool's clock.
    next_look: Instant,
    /// Since the last look.
    passed_over: PassedOver,
}

/// Of which classes blocks were passed over.
#[derive(Clone, Copy, Default)]
enum PassedOver {
    #[default]
    None,
    One(SizeClass),
    Several,
}

impl PassedOver {
    fn add(&mut self, class: SizeClass) {
        *self = match *self {
            PassedOver::None => PassedOver::One(class),
            PassedOver::One(other) if other == class => return,
            _ => PassedOver::Several,
        };
    }

    fn has_others_than(self, class: SizeClass) -> bool {
        match self {
            PassedOver::None => false,
            PassedOver::One(other) => other != class,
            PassedOver::Several => true,
        }
    }
}

impl Ageing {
    pub(super) fn new(home: &Home) -> Self {
        Self {
            max_idle: home.settings.max_idle_time,
            next_look: home.clock.now(),
            passed_over: PassedOver::None,
        }
    }

    /// The time until a look at the shelves will find something that is too old; `None` when they are empty.
    pub(super) fn next_need(&self, home: &Home) -> Option<Duration> {
        let max_idle = self.max_idle?;
        let due = home.shelf.next_due(|class| max_age(max_idle, self.passed_over, class))?;
        Some(due.max(self.next_look.saturating_duration_since(home.clock.now())))
    }
}

impl Cleaner {
    /// At the end of every pass: what has its own times.
    pub(super) fn look_after_the_pool(&mut self) {
        let order = self.home.time_order();
        let now = self.home.clock.now();
        if let Some(max_idle) = self.ageing.max_idle
            && (now >= self.ageing.next_look || order.is_some())
        {
            self.ageing.next_look = now + (max_idle / LOOKS).max(TICK);
            self.age(max_idle);
        }
        // A model has no use for it, and each number that it reads would be a switch of threads there.
        if !cfg!(loom) && (now >= self.next_backlog_look || order.is_some()) {
            self.next_backlog_look = now + BACKLOG_LOOK;
            self.watch_backlog();
        }
        if let Some(order) = order {
            self.home.time_order_obeyed(order);
        }
    }

    /// Lets go of what lay on its shelf for too long, bit by bit.
    fn age(&mut self, max_idle: Duration) {
        let passed_over = std::mem::take(&mut self.ageing.passed_over);
        let mut aged = Vec::new();
        // First off the shelves, whose lock is held meanwhile.
        self.home.shelf.age_out(|class| max_age(max_idle, passed_over, class), |block| aged.push(block));
        for block in aged {
            self.home.count_retiring(&block, Why::Idle);
            self.release.push(ReleaseJob::Retire(block.retire()));
        }
    }

    /// Says when more waits for the device than the pool would ever keep: nothing but its callers bounds that.
    fn watch_backlog(&mut self) {
        let queued_bytes = self.home.counts.queued_bytes();
        let cap_bytes = self.home.shelf.cap_bytes() as u64;
        let is_much = queued_bytes > cap_bytes.max(BACKLOG_BYTES_MIN);
        if is_much && !self.backlog_said {
            say!(
                WARN,
                "backlog",
                queued_bytes,
                cap_bytes,
                "much is returned, and the device does not get done with it"
            );
        }
        self.backlog_said = is_much;
    }

    /// Whether pageable memory is unmapped here and not on the release lane: that hangs in the driver, perhaps, while
    /// callers go on and on.
    pub(super) fn must_free_itself(&self) -> bool {
        self.release.has_backlog() || self.home.counts.freeing_bytes() > FREEING_BYTES_MAX
    }

    /// A returned block cannot be kept.
    pub(super) fn pass_over(&mut self, class: SizeClass, pinned: bool) {
        say_passed_over(class, pinned);
        self.home.counts.class(class).passed_over.add(1);
        self.ageing.passed_over.add(class);
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

pub(super) fn say_passed_over(class: SizeClass, pinned: bool) {
    say!(DEBUG, "passed_over", bytes = class.bytes(), pinned, "the cap has no room for a returned buffer");
}

/// How long a block of the class may lie.
fn max_age(max_idle: Duration, passed_over: PassedOver, class: SizeClass) -> Duration {
    if passed_over.has_others_than(class) { (max_idle / PRESSED).max(TICK) } else { max_idle }
}

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
    use super::*;
    use crate::block::Out;
    use crate::config::Settings;
    use crate::driver::Driver;
    use crate::pages::Pages;
    use crate::sync::thread;

    #[test]
    fn a_block_that_comes_back_after_a_long_silence_has_just_come() {
        let home = Home::new(Driver::host_only(), Settings::default(), |_| None);
        let mut cleaner = Cleaner::new(home.clone());
        cleaner.pass();
        // It slept, without a timer because the shelves were empty, and somebody had a buffer all the time.
        home.clock.skip(Duration::from_secs(3600));
        let class = SizeClass::of(1).unwrap();
        let block = Out::fresh(Pages::map(class.bytes()).unwrap(), class).give_back(1, None, 0, 0);
        home.inbox.push(class, block);
        cleaner.pass();
        assert_eq!((home.stats().pooled_buffers, home.stats().aged_out), (1, 0));
    }

    #[test]
    fn a_hold_that_comes_just_before_the_cleaner_sleeps_is_not_slept_through() {
        let home = Home::new(Driver::host_only(), Settings::default(), |_| None);
        // A cleaner that has just looked whether it is held, and found that it has nothing to do.
        let _ = home.bell.ring();
        let mut cleaner = Cleaner::new(home.clone());
        home.count_hold();
        home.bell.nudge();
        let sleeps = thread::spawn(move || cleaner.park());
        let deadline = Instant::now() + Duration::from_secs(5);
        while !sleeps.is_finished() && Instant::now() < deadline {
            thread::yield_now();
        }
        assert!(sleeps.is_finished(), "whoever holds the cleaner waits for a thread that sleeps");
    }

    /// Not at every pass: the cleaner makes many.
    #[test]
    fn the_shelves_and_the_backlog_are_looked_at_when_it_is_time_and_then_not_for_a_while() {
        let home = Home::new(Driver::host_only(), Settings::default(), |_| None);
        let max_idle = home.settings.max_idle_time.expect("the default");
        let mut cleaner = Cleaner::new(home.clone());
        let now = home.clock.now();
        (cleaner.ageing.next_look, cleaner.next_backlog_look) = (now, now);
        cleaner.look_after_the_pool();
        assert!(cleaner.ageing.next_look >= now + max_idle / LOOKS);
        assert!(cleaner.ageing.next_look <= home.clock.now() + max_idle / LOOKS);
        assert!(cleaner.next_backlog_look >= now + BACKLOG_LOOK);
        let later = now + Duration::from_secs(3600);
        (cleaner.ageing.next_look, cleaner.next_backlog_look) = (later, later);
        cleaner.look_after_the_pool();
        assert_eq!((cleaner.ageing.next_look, cleaner.next_backlog_look), (later, later));
    }

    #[test]
    fn a_class_is_pressed_by_others_that_were_passed_over_and_not_by_itself() {
        let [small, large, third] =
            [1, 2, 3].map(|pages| SizeClass::of(pages * crate::os::page_bytes()).unwrap());
        let idle = Duration::from_secs(300);
        let mut passed_over = PassedOver::default();
        let ages = |passed_over| [small, large, third].map(|class| max_age(idle, passed_over, class));
        assert_eq!(ages(passed_over), [idle; 3]);
        (0..3).for_each(|_| passed_over.add(large));
        assert_eq!(ages(passed_over), [idle / PRESSED, idle, idle / PRESSED]);
        passed_over.add(small);
        assert_eq!(ages(passed_over), [idle / PRESSED; 3]);
        passed_over.add(small);
        assert_eq!(ages(passed_over), [idle / PRESSED; 3], "it stays so");
    }
}
