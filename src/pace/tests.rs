//! The naps by themselves, in a time of their own: a caller who takes, copies and drops, and a cleaner who looks.

use super::*;

/// A caller: a buffer every period, each copy as long as the next of these, streams by turns. In microseconds.
struct Rhythm {
    period_us: u64,
    copies_us: &'static [u64],
    streams: usize,
}

/// What came of it: per buffer, but for the lateness, which is the average of what the cleaner found.
#[derive(Debug)]
struct Cost {
    wakes: f64,
    late_us: f64,
    harvests: f64,
}

#[derive(Clone, Copy)]
struct Return {
    done_us: u64,
    harvested: bool,
}

#[derive(Default)]
struct Stream {
    waits: Vec<Return>,
    free_us: u64,
    since_us: Option<u64>,
    usual: Usual,
}

struct World {
    now_us: u64,
    taken: usize,
    shelf: usize,
    harvests: u64,
    inbox: Vec<(usize, Return)>,
    streams: Vec<Stream>,
}

impl World {
    /// Takes, copies and drops, up to now.
    fn catch_up(&mut self, rhythm: &Rhythm) {
        loop {
            let at_us = rhythm.period_us * self.taken as u64;
            if at_us > self.now_us {
                return;
            }
            if self.shelf > 0 {
                self.shelf -= 1;
            } else {
                let pending = self.streams.iter_mut().flat_map(|stream| &mut stream.waits);
                let mut all = pending.chain(self.inbox.iter_mut().map(|(_, block)| block));
                if let Some(done) = all.find(|block| block.done_us <= at_us && !block.harvested) {
                    done.harvested = true;
                    self.harvests += 1;
                }
            }
            let number = self.taken % rhythm.streams;
            let stream = &mut self.streams[number];
            let copy_us = rhythm.copies_us[self.taken % rhythm.copies_us.len()];
            stream.free_us = stream.free_us.max(at_us) + copy_us;
            self.inbox.push((number, Return { done_us: stream.free_us, harvested: false }));
            self.taken += 1;
        }
    }

    /// A look as `Queues::poll` makes it. Gives how late each was found.
    fn look(&mut self) -> Vec<u64> {
        let mut late_us = Vec::new();
        for (number, block) in self.inbox.drain(..).filter(|(_, block)| !block.harvested) {
            self.streams[number].waits.push(block);
        }
        for stream in &mut self.streams {
            let mut first = None;
            while stream.waits.first().is_some_and(|head| head.harvested || head.done_us <= self.now_us) {
                let head = stream.waits.remove(0);
                first.get_or_insert(head.harvested);
                if !head.harvested {
                    late_us.push(self.now_us - head.done_us);
                    self.shelf += 1;
                }
            }
            if let (Some(harvested), Some(since_us)) = (first, stream.since_us) {
                let age = Duration::from_micros(self.now_us - since_us);
                if harvested { stream.usual.learn_at_most(age) } else { stream.usual.learn(age) }
            }
            if stream.waits.is_empty() {
                stream.since_us = None;
            } else if first.is_some() || stream.since_us.is_none() {
                stream.since_us = Some(self.now_us);
            }
        }
        late_us
    }

    fn nap(&mut self) -> Option<Duration> {
        let now_us = self.now_us;
        let waiting = self.streams.iter_mut().filter_map(|stream| {
            let since_us = stream.since_us?;
            Some((&mut stream.usual, Duration::from_micros(now_us - since_us)))
        });
        let nap = |(usual, age): (&mut Usual, Duration)| usual.nap_at(age);
        waiting.map(nap).min()
    }
}

/// A second of it, the first fifth left out, on a machine where a wake-up takes so long.
fn run(rhythm: &Rhythm, wake_us: u64) -> Cost {
    run_after(rhythm, wake_us, Usual::default())
}

/// As [`run`], with what was learned of the streams before.
fn run_after(rhythm: &Rhythm, wake_us: u64, usual: Usual) -> Cost {
    let streams = (0..rhythm.streams).map(|_| Stream { usual, ..Stream::default() }).collect();
    let mut world = World { now_us: 0, taken: 0, shelf: 0, harvests: 0, inbox: Vec::new(), streams };
    let mut idle = IdleNaps::default();
    let mut is_idle = false;
    let (mut wakes, mut late_us, mut before) = (0, Vec::new(), (0, 0));
    while world.now_us < 1_000_000 {
        world.catch_up(rhythm);
        if world.now_us < 200_000 {
            (wakes, before) = (0, (world.taken, world.harvests));
            late_us.clear();
        }
        wakes += 1;
        if !world.inbox.is_empty() {
            idle.end(world.harvests);
            is_idle = false;
        }
        late_us.extend(world.look());
        let nap = world.nap().unwrap_or_else(|| {
            if !is_idle {
                idle.begin();
            }
            is_idle = true;
            idle.next()
        });
        assert!((NAP_MIN..=NAP_MAX).contains(&nap));
        world.now_us += nap.as_micros() as u64 + wake_us;
    }
    let buffers = (world.taken - before.0) as f64;
    Cost {
        wakes: f64::from(wakes) / buffers,
        late_us: late_us.iter().sum::<u64>() as f64 / late_us.len() as f64,
        harvests: (world.harvests - before.1) as f64 / buffers,
    }
}

/// Wake-ups, lateness and harvests are at most so many, where a wake-up takes 10, 30 and 60 us; the lateness on top of that.
fn assert_costs(period_us: u64, copies_us: &'static [u64], streams: usize, most: (f64, f64, f64)) {
    let (wakes, late_us, harvests) = most;
    for wake_us in [10, 30, 60] {
        let cost = run(&Rhythm { period_us, copies_us, streams }, wake_us);
        let late = cost.late_us - wake_us as f64;
        assert!(
            cost.wakes <= wakes && late <= late_us && cost.harvests <= harvests,
            "every {period_us} us, copies of {copies_us:?} us on {streams} streams, {wake_us} us to wake up: {cost:?}"
        );
    }
}

#[test]
fn a_regular_caller_costs_few_wake_ups_and_waits_for_none() {
    // Halving what is left until the usual end took 5 wake-ups for each of these, where one takes 20 us.
    assert_costs(1000, &[500], 1, (3.0, 15.0, 0.0));
    assert_costs(1000, &[700], 1, (3.9, 15.0, 0.0));
    assert_costs(1000, &[300], 1, (3.0, 130.0, 0.0));
    assert_costs(1000, &[1500], 2, (3.0, 15.0, 0.0));
    assert_costs(1000, &[3500], 4, (3.0, 25.0, 0.0));
}

#[test]
fn an_irregular_one_is_found_almost_as_soon_as_a_regular_one() {
    assert_costs(1000, &[310, 690, 520, 400, 750, 260, 480, 610], 1, (5.2, 30.0, 0.05));
    // Long and short by turns.
    assert_costs(1000, &[700, 100], 1, (2.8, 80.0, 0.05));
}

#[test]
fn a_quick_caller_makes_the_cleaner_look_sooner_and_not_more_often_than_it_pays() {
    // With naps of 500 us two of three of these were harvested.
    assert_costs(200, &[100], 1, (1.3, 70.0, 0.5));
    assert_costs(300, &[40], 1, (2.0, 90.0, 0.5));
    assert_costs(200, &[500], 4, (2.4, 30.0, 0.4));
}

#[test]
fn takers_who_come_between_two_looks_do_not_do_the_cleaners_work_for_ever() {
    // The copies were long, and now each buffer is taken before it is expected back.
    let usual = Usual { mean: Duration::from_millis(3), spread: Duration::from_micros(200), aim: None };
    for (period_us, copies_us, streams) in
        [(200, &[100], 1), (300, &[40], 1), (200, &[500], 4), (150, &[100], 2)]
    {
        let rhythm = Rhythm { period_us, copies_us, streams };
        let (ever, after) = (run(&rhythm, 30), run_after(&rhythm, 30, usual));
        // Half of them to all where nothing was learned of what takers found.
        assert!(after.harvests <= ever.harvests + 0.1, "{after:?}, and {ever:?} without a past");
    }
}

#[test]
fn one_copy_that_hung_makes_few_others_late() {
    let takes = Duration::from_micros(600);
    let mut usual = Usual::default();
    let late = |usual: &mut Usual| {
        let mut age = Duration::ZERO;
        while age < takes {
            age += usual.nap_at(age) + Duration::from_micros(30);
        }
        usual.learn(age);
        age - takes
    };
    let much = Duration::from_micros(100);
    (0..20).for_each(|_| _ = late(&mut usual));
    assert!(late(&mut usual) < much);
    usual.learn(Duration::from_secs(3600));
    let count = (0..80).filter(|_| late(&mut usual) > much).count();
    assert!(count <= 20, "{count} were found late after one that hung");
}

/// Looks until a head is found that takes so long, and how late it is found.
fn looks(usual: &mut Usual, takes: Duration) -> (u32, Duration) {
    let (mut age, mut looks) = (Duration::ZERO, 0);
    while age < takes {
        age += usual.nap_at(age);
        looks += 1;
    }
    (looks, age - takes)
}

#[test]
fn nothing_is_looked_at_all_the_time_however_late_it_is() {
    let mut usual = Usual::default();
    usual.learn(Duration::from_millis(2));
    assert!(looks(&mut usual, Duration::from_secs(1)).0 < 2100, "more than by the longest nap");
}

#[test]
fn where_nothing_is_known_a_head_is_found_in_proportion_to_its_age() {
    for takes in [100, 300, 700, 3_000].map(Duration::from_micros) {
        let (looks, late) = looks(&mut Usual::default(), takes);
        assert!(late <= NAP_MIN.max(takes / 8) && looks < 40, "{looks} looks, {late:?} late after {takes:?}");
    }
}

#[test]
fn what_ends_earlier_than_usual_is_soon_expected_earlier() {
    let mut usual = Usual::default();
    let microseconds = Duration::from_micros;
    (0..20).for_each(|_| usual.learn(microseconds(490)));
    (0..12).for_each(|_| usual.learn(microseconds(100)));
    assert!(usual.nap_at(Duration::ZERO) <= microseconds(100), "{usual:?}");
}

/// A look that comes late says nothing about the copy.
#[test]
fn what_waking_up_takes_is_not_learned() {
    let mut usual = Usual::default();
    usual.learn(Duration::from_micros(450));
    let first = usual.nap_at(Duration::ZERO);
    for _ in 0..20 {
        let nap = usual.nap_at(Duration::ZERO);
        usual.learn(nap + Duration::from_micros(200));
    }
    assert!(usual.nap_at(Duration::ZERO) <= first);
}

#[test]
fn idle_naps_grow_by_looks_in_vain_and_shrink_by_harvests() {
    let mut idle = IdleNaps::default();
    let spell = |idle: &mut IdleNaps, naps: usize, harvests| {
        idle.begin();
        let all: Vec<_> = (0..naps).map(|_| idle.next()).collect();
        idle.end(harvests);
        all
    };
    assert_eq!(spell(&mut idle, 4, 0), [IDLE_NAP_MIN, IDLE_NAP_MIN * 2, NAP_MAX, NAP_MAX]);
    assert_eq!(spell(&mut idle, 1, 0), [IDLE_NAP_MIN * 5 / 4]);
    assert_eq!(spell(&mut idle, 1, 0), [IDLE_NAP_MIN * 5 / 4], "found at the first look: it is right");
    (0..10).for_each(|_| drop(spell(&mut idle, 2, 0)));
    assert_eq!(spell(&mut idle, 1, 1), [NAP_MAX]);
    assert_eq!(spell(&mut idle, 1, 2), [NAP_MAX / 2]);
    assert_eq!(spell(&mut idle, 1, 2), [IDLE_NAP_MIN]);
}
