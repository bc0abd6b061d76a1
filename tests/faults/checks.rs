//! What must hold after every run, whatever failed in it.

use crate::device;
use crate::points::{Mode, Point};
use crate::stage::{LEN, PATIENCE, Stage, all_zero};
use pinpool::{Error, PinnedBuffer, Stats};
use std::time::Instant;

/// How a pool is after a fault has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Aftermath {
    /// It page-locks, and gives page-locked buffers.
    Usable,
    /// It says that the device is lost, and gives plain memory.
    Lost,
    /// It was refused so often that it pauses, and gives plain memory.
    Pauses,
    /// The driver said that it supports no way of page-locking; it gives plain memory.
    Unsupported,
    /// What could not be unregistered fills its ceiling; it gives plain memory.
    Full,
}

/// What a run left behind.
pub struct Outcome {
    pub aftermath: Aftermath,
    pub quarantined_bytes: usize,
}

/// Checks a run whose fault has ended, and shuts its pool down.
pub fn check(stage: Stage) -> Outcome {
    if stage.point.is_some_and(|point| point.is_a_lie()) {
        // The pool believes that the work of that context has ended.
        stage.device.take_violations();
        stage.forget_copies();
    }
    settle_for_good(&stage);
    stage.shut_others_down();
    stage.check_copies();
    stage.device.assert_clean();
    balanced(&stage);
    check_caller(&stage);
    let aftermath = check_round(&stage);
    allowed(&stage, aftermath);
    check_shutdown(&stage);
    let quarantined_bytes = stage.pool.stats().quarantined_bytes;
    check_quarantine(&stage, quarantined_bytes);
    check_retains(stage);
    Outcome { aftermath, quarantined_bytes }
}

/// Without the fault everything comes to an end.
fn settle_for_good(stage: &Stage) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        stage.device.run_until_idle();
        let has_settled = stage.pool.drain(std::time::Duration::from_millis(3));
        // A buffer of a graph that is gone is let go a moment later.
        if has_settled && stage.pool.stats().held_buffers == 0 {
            return;
        }
        assert!(Instant::now() < deadline, "the pool never settles: {:#?}", stage.pool.stats());
    }
}

/// The books of all pools, against themselves, the device's registrations and what is mapped.
fn balanced(stage: &Stage) -> Stats {
    let mapped = |stats: &Stats| {
        let idle = stats.pooled_bytes + stats.retiring_bytes + stats.staging_bytes;
        idle + stats.held_bytes + stats.checked_out_bytes + stats.queued_bytes + stats.quarantined_bytes
    };
    let deadline = Instant::now() + PATIENCE;
    // A pageable block is off the books a moment before it is unmapped; and a pool that is gone, gone a bit later.
    let all = loop {
        let all = stage.all_stats();
        let books =
            (all.iter().map(mapped).sum::<usize>(), all.iter().map(|stats| stats.registered_bytes).sum());
        // Where registering is refused, the driver's own memory takes the place of both.
        let of_driver = stage.device.allocated_host_bytes();
        let truth = (stage.device.mapped_bytes() + of_driver, stage.device.registered_bytes() + of_driver);
        // What a graph held is queued again when that is gone, which no settling waits for: a look in the midst of its
        // registration finds the bytes counted and the block not yet.
        let is_quiet = all.iter().all(|stats| stats.retiring_bytes == 0 && stats.is_balanced());
        if (books == truth || !stage.books_are_whole()) && is_quiet {
            break all;
        }
        assert!(
            Instant::now() < deadline,
            "mapped and registered: {truth:?}, accounted for {books:?}, or the accounts do not balance: {all:#?}"
        );
        std::thread::yield_now();
    };
    for stats in &all {
        let given = stats.hits + stats.unpinned_hits + stats.harvested + stats.misses;
        assert_eq!(given, stats.returned + stats.checked_out_buffers as u64, "{stats:#?}");
    }
    let stats = all.into_iter().next().expect("the stage has a pool");
    assert!(stats.pooled_bytes <= stage.pool.max_pooled_bytes(), "the cap is exceeded: {stats:#?}");
    stats
}

/// The calling thread has its context and its capture mode as before.
fn check_caller(stage: &Stage) {
    let lasting = stage.point.is_some_and(|point| point.mode != Mode::Once);
    let is_about = |entry| stage.point.is_some_and(|point| point.entry == entry);
    let everything = stage.point.is_some_and(|point| point.mode == Mode::Everything);
    if !(everything || lasting && (is_about("cuCtxSetCurrent") || is_about("cuCtxGetCurrent"))) {
        let current = stage.device.cuda().cu_ctx_get_current();
        assert_eq!(current, Ok(stage.context.handle()), "the caller's context was changed");
    }
    if !(everything || lasting && is_about("cuThreadExchangeStreamCaptureMode")) {
        let mode = stage.device.cuda().cu_thread_exchange_stream_capture_mode(0);
        assert_eq!(mode, Ok(0), "the caller's capture mode was changed");
    }
    stage.context.bind();
}

/// A round of take, fill, copy, record, drop and take again.
fn check_round(stage: &Stage) -> Aftermath {
    let (mut buffer, aftermath) = match stage.pool.take_pinned(LEN) {
        Ok(buffer) => (buffer, Aftermath::Usable),
        Err(Error::NotPinned { reason, .. }) if reason.contains("device is lost") => {
            (stage.take(LEN).expect("memory"), Aftermath::Lost)
        }
        Err(Error::NotPinned { reason, .. }) if reason.contains("pauses") => {
            (stage.take(LEN).expect("memory"), Aftermath::Pauses)
        }
        Err(Error::NotPinned { reason, .. }) if reason.contains("supports neither") => {
            (stage.take(LEN).expect("memory"), Aftermath::Unsupported)
        }
        Err(Error::NotPinned { reason, .. }) if reason.contains("max_registered_bytes") => {
            (stage.take(LEN).expect("memory"), Aftermath::Full)
        }
        Err(error) => panic!("take_pinned afterwards: {error}"),
    };
    let wanted = aftermath == Aftermath::Usable && !stage.point.is_some_and(|point| point.says_unsupported());
    assert!(buffer.is_pinned() || !wanted);
    assert!(all_zero(&buffer), "old bytes reached a taker");
    let stream = stage.context.stream();
    stage.upload(&mut buffer, &stream, 77);
    device::record(&mut buffer, &stream).expect("a record afterwards");
    let address = buffer.as_ptr();
    drop(buffer);
    assert!(fresh_of(stage, address), "reused in flight");
    settle_for_good(stage);
    let buffer = stage.take(LEN).expect("memory");
    assert!(buffer.is_pinned() || !wanted, "nothing is page-locked afterwards: {:#?}", stage.pool.stats());
    drop(buffer);
    settle_for_good(stage);
    stage.check_copies();
    balanced(stage);
    aftermath
}

/// A buffer that is taken while another's copy is pending has other memory.
fn fresh_of(stage: &Stage, address: *const u8) -> bool {
    let other: PinnedBuffer = stage.take(LEN).expect("memory");
    // A pageable buffer's copy is over when its call has returned; another pool's end may have waited for it.
    other.as_ptr() != address || !other.is_pinned() || stage.device.pending_operations() == 0
}

/// Whether what became of the pool is explained by the fault.
fn allowed(stage: &Stage, aftermath: Aftermath) {
    let point = stage.point;
    let explained = match aftermath {
        Aftermath::Usable => true,
        Aftermath::Lost => point.is_some_and(|point| point.says_lost() || matches!(point.code, 3 | 4)),
        Aftermath::Pauses => point.is_some_and(|point| point.mode != Mode::Once),
        Aftermath::Unsupported => point.is_some_and(|point| point.says_unsupported()),
        Aftermath::Full => stage.pool.stats().quarantined_pinned_bytes > 0,
    };
    assert!(explained, "{aftermath:?} after {point:?}");
}

fn check_shutdown(stage: &Stage) {
    let before = stage.pool.stats();
    let started = Instant::now();
    let report = stage.pool.shutdown();
    assert!(started.elapsed() < PATIENCE + std::time::Duration::from_secs(3));
    assert!(report.completed, "{report:#?}");
    let stats = balanced(stage);
    assert_eq!(
        (stats.pooled_buffers, stats.queued_buffers, stats.checked_out_buffers),
        (0, 0, 0),
        "{stats:#?}"
    );
    assert_eq!(stats.registered_bytes, stats.quarantined_pinned_bytes, "what is registered is quarantined");
    let quarantined: usize = stage.all_stats().iter().map(|stats| stats.quarantined_bytes).sum();
    let kept = stage.device.mapped_bytes() + stage.device.allocated_host_bytes();
    assert!(kept == quarantined || !stage.books_are_whole(), "what is mapped is quarantined");
    assert_eq!(report.registered_bytes_after, stats.registered_bytes);
    assert_eq!(report.registered_bytes_before, before.registered_bytes);
    assert_eq!(report.checked_out_buffers, 0);
    assert_eq!(report.quarantined_bytes, stats.quarantined_bytes - before.quarantined_bytes, "{report:#?}");
    assert_eq!(report.unregistered_buffers, stats.unregistrations - before.unregistrations);
    if stats.quarantined_bytes > 0 {
        assert!(!report.reasons.is_empty() || stage.has_shut_down(), "{report:#?} gives no reason");
    }
}

/// Memory is leaked only where it could not be unregistered, or could not be proved quiescent.
fn check_quarantine(stage: &Stage, quarantined_bytes: usize) {
    let Some(Point { entry, mode, .. }) = stage.point else {
        assert_eq!(quarantined_bytes, 0, "nothing failed: {:#?}", stage.pool.stats());
        return;
    };
    let harmless = [
        "cuInit",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRelease_v2",
        "cuMemHostRegister_v2",
        "cuPointerGetAttribute",
        "cuStreamIsCapturing",
        "cuStreamGetId",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventDestroy_v2",
        "cuThreadExchangeStreamCaptureMode",
        "mmap",
    ];
    let lost = stage.point.is_some_and(|point| point.says_lost() || point.says_gone());
    if harmless.contains(&entry) && mode != Mode::Everything && !lost {
        assert_eq!(quarantined_bytes, 0, "{:#?}", stage.pool.stats());
    }
}

/// The pool gave back its events and its retains on contexts.
fn check_retains(stage: Stage) {
    let point = stage.point;
    let leaks_retains =
        point.is_some_and(|point| point.says_gone() || point.entry.starts_with("cuDevicePrimaryCtxRelease"));
    let is_quarantined = stage.all_stats().iter().any(|stats| stats.quarantined_bytes > 0);
    if leaks_retains || is_quarantined || !stage.books_are_whole() {
        return;
    }
    let (device, context) = stage.end();
    let deadline = Instant::now() + PATIENCE;
    let released = |ordinal| !device.cuda().cu_device_primary_ctx_get_state(ordinal).unwrap().1;
    let keeps_events = |point: Point| {
        let entries = ["cuEventQuery", "cuEventDestroy_v2", "cuCtxSetCurrent", "cuCtxGetCurrent"];
        point.mode == Mode::Everything || entries.contains(&point.entry)
    };
    if !point.is_some_and(keeps_events) {
        while device.live_events() > 0 {
            assert!(Instant::now() < deadline, "{} events are left", device.live_events());
            std::thread::yield_now();
        }
    }
    drop(context);
    while !(released(0) && released(1)) {
        assert!(Instant::now() < deadline, "a retain on a primary context is left");
        std::thread::yield_now();
    }
}

/// The other panics are those that the documentation promises: an access whose safety the driver cannot tell.
pub fn is_promised(panic: &str) -> bool {
    panic.starts_with("the buffer cannot be written:")
        || panic.starts_with("the buffer cannot be read:")
        || panic.starts_with("pinpool::take(")
}
