//! Models of the queues between callers, the cleaner and its lanes.

use super::device::{Device, stream_ref};
use super::{FOREVER, check, check_without, home, take_all};
use crate::block::Out;
use crate::config::Settings;
use crate::home::Home;
use crate::inbox::Inbox;
use crate::lanes::{ContextVerdict, Lane, LaneResult, context_lane};
use crate::pages::Pages;
use crate::size_class::Classes;
use crate::sync::{Arc, Instant, Ordering, from_now, thread};

pub fn nothing_handed_over_is_lost_or_doubled() {
    check(Some(3), || {
        let inbox = Arc::new(Inbox::default());
        let class = Classes::POWERS_OF_TWO.at(0);
        let cleaner = {
            let inbox = inbox.clone();
            thread::spawn(move || take_all(&inbox))
        };
        let taker = {
            let inbox = inbox.clone();
            thread::spawn(move || inbox.pop(class))
        };
        // The second may find the class full, which has one slot here.
        inbox.push(class, 1);
        inbox.push(class, 2);
        let mut seen = cleaner.join().unwrap();
        seen.extend(taker.join().unwrap());
        seen.extend(take_all(&inbox));
        seen.sort_unstable();
        assert_eq!(seen, [1, 2]);
        assert!(!inbox.has_arrivals());
    });
}

/// With which the reason for a quarantine begins.
fn number(reason: &str) -> u32 {
    reason.split(' ').next().and_then(|number| number.parse().ok()).expect("a number of bytes")
}

/// What a lane makes of a job.
#[derive(Debug)]
struct Made(u32);

impl LaneResult for Made {
    fn came_too_late(self, home: &Home) {
        home.note_quarantine(self.0 as usize, false, &"too late");
    }
}

fn make(_: &Arc<Home>, first: u32, more: &dyn Fn() -> Option<u32>, give: &dyn Fn(Made)) {
    let mut next = Some(first);
    while let Some(job) = next {
        give(Made(job));
        next = more();
    }
}

pub fn every_job_of_a_lane_gives_its_result_once() {
    check(Some(2), || {
        let mut lane = Lane::new(home(), "model", make);
        let mut made = Vec::new();
        // More than the lane has slots for.
        for job in 0..3 {
            lane.push(job);
            made.extend(lane.pop_result().map(|result| result.0));
        }
        assert!(lane.stop(from_now(FOREVER), |result| made.push(result.0)));
        assert!(!lane.has_backlog());
        made.sort_unstable();
        assert_eq!(made, [0, 1, 2]);
    });
}

pub fn a_lane_without_a_thread_loses_no_result() {
    check_without(&["-model"], None, || {
        let mut lane = Lane::new(home(), "model", make);
        (0..3).for_each(|job| lane.push(job));
        assert!(lane.has_results());
        let mut made: Vec<u32> = lane.pop_result().map(|result| result.0).into_iter().collect();
        assert!(lane.stop(Instant::now(), |result| made.push(result.0)));
        assert_eq!(made, [0, 1, 2]);
    });
}

pub fn what_an_abandoned_lane_holds_is_counted_once() {
    check(Some(2), || {
        let home = home();
        let mut lane = Lane::new(home.clone(), "model", make);
        (0..3).for_each(|job| lane.push(job));
        let mut dealt_with = Vec::new();
        let ended = lane.stop(Instant::now(), |result| dealt_with.push(result.0));
        if !ended {
            dealt_with.extend(lane.take_unstarted());
        }
        let mut late = Vec::new();
        let all = || {
            late.extend(home.take_reasons().iter().map(|reason| number(reason)));
            dealt_with.len() + late.len() >= 3
        };
        home.progress.wait_until(None, all);
        dealt_with.extend(late);
        dealt_with.sort_unstable();
        assert_eq!(dealt_with, [0, 1, 2]);
    });
}

pub fn no_context_wide_wait_is_made_while_they_are_held() {
    check(Some(3), || {
        let device = Device::new();
        let home = Home::new(device.driver(), Settings::default(), |_| None);
        home.contexts.of_stream(&home.driver, &stream_ref());
        let lane = {
            let home = home.clone();
            let class = Classes::POWERS_OF_TWO.at(0);
            let block = Out::fresh(Pages::map(class.bytes()).expect("a page"), class);
            let block = block.give_back(0, None, 0, 0);
            thread::spawn(move || {
                let give = |verdict: ContextVerdict| {
                    assert!(verdict.idle);
                    verdict.block.quarantine();
                };
                context_lane(&home, block, &|| None, &give);
            })
        };
        home.hold_context_waits();
        device.must_not_synchronize.store(true, Ordering::SeqCst);
        thread::yield_now();
        device.must_not_synchronize.store(false, Ordering::SeqCst);
        home.release_context_waits();
        lane.join().unwrap();
    });
}
