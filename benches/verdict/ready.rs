//! How soon a returned buffer is there again.
#![allow(unsafe_code)] // copies by the raw entry points, from buffers that are recorded

use crate::alternatives::SyncPool;
use crate::classic::ClassicPool;
use crate::common::rows;
use crate::common::{Pinpool, Rig, Subject};
use crate::table::{Bar, Effort, Suite, Unit};
use pinpool::PinnedPool;
use pinpool::sim::Sim;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const KIB_64: usize = 64 << 10;
const MIB_1: usize = 1 << 20;
const CLASSIC: &str = ClassicPool::NAME;
/// What stands for "no worse" between two that do the same work: the zeroing is nearly all of it.
const NO_WORSE: f64 = 1.1;
const REGISTER_PER_PAGE: Duration = Duration::from_nanos(150);

pub fn add(suite: &mut Suite) {
    let effort = suite.effort;
    for (bytes, most_us) in [(KIB_64, 50.0), (MIB_1, 120.0)] {
        let name = format!("return to next take, {} KiB dirty, after the copy's end", bytes >> 10);
        let bars =
            [Bar::AtMost(most_us * 1e3), Bar::Of(CLASSIC, 1.0 / 500.0), Bar::Of(SyncPool::NAME, NO_WORSE)];
        suite.add(
            &name,
            Unit::Nanoseconds,
            &bars,
            vec![
                (Pinpool::NAME, Box::new(move || taken_again::<Pinpool>(effort, bytes))),
                (CLASSIC, Box::new(move || taken_again::<ClassicPool>(effort, bytes))),
                (SyncPool::NAME, Box::new(move || taken_again::<SyncPool>(effort, bytes))),
            ],
        );
    }
    suite.add(
        "return to shelf, no taker, 64 KiB dirty",
        Unit::Nanoseconds,
        &[Bar::AtMost(1.2e6)],
        vec![
            (Pinpool::NAME, Box::new(move || shelved_again::<Pinpool>(effort, KIB_64))),
            (CLASSIC, Box::new(move || shelved_again::<ClassicPool>(effort, KIB_64))),
        ],
    );
    let pending = effort.pick(Duration::from_secs(2), Duration::from_millis(300), Duration::from_millis(20));
    let name = format!("one event pending for {pending:?}: 63 others ready");
    suite.add(
        &name,
        Unit::Nanoseconds,
        &[Bar::AtMost(1e6)],
        vec![
            (Pinpool::NAME, Box::new(move || vec![others_ready::<Pinpool>(pending)])),
            (CLASSIC, Box::new(move || vec![others_ready::<ClassicPool>(pending)])),
        ],
    );
    let bytes = effort.pick(1 << 30, 64 << 20, 4 << 20);
    for (lock, what) in [(false, "off: return ready"), (true, "on: return ready after the lock is free")] {
        let name = format!("{} MiB being registered, driver lock {what}", bytes >> 20);
        suite.add(
            &name,
            Unit::Nanoseconds,
            &[Bar::AtMost(1e6)],
            vec![(Pinpool::NAME, Box::new(move || beside_a_registration(bytes, lock).into_iter().collect()))],
        );
    }
    suite.note(format!(
        "Being registered: {} ns a 4 KiB page, after the pages were touched outside the lock.",
        REGISTER_PER_PAGE.as_nanos()
    ));
}

/// The classic pool waits out its silence for each.
fn count<S: Subject>(effort: Effort) -> usize {
    if S::NAME == CLASSIC { effort.pick(3, 1, 1) } else { effort.pick(100, 20, 1) }
}

fn taken_again<S: Subject>(effort: Effort, bytes: usize) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S = rows::with_one(&rig, bytes);
    let one = |_| rows::drop_to_pinned_take(&subject, &rig, bytes, 1).as_nanos() as f64;
    (0..count::<S>(effort)).map(one).collect()
}

fn shelved_again<S: Subject>(effort: Effort, bytes: usize) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S = rows::with_one(&rig, bytes);
    let one = |_| rows::drop_to_shelf(&subject, &rig, bytes, 1).as_nanos() as f64;
    (0..count::<S>(effort)).map(one).collect()
}

fn others_ready<S: Subject>(pending: Duration) -> f64 {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    rows::others_ready(&subject, &rig, KIB_64, pending).as_nanos() as f64
}

/// A large block is being registered while a small, page-locked one comes back: how long until that is on its shelf,
/// from its drop or, with the lock, from the end of the stall. `None` when the registration was over too soon.
fn beside_a_registration(bytes: usize, lock: bool) -> Option<f64> {
    let builder = Sim::builder().zero_cost().driver_lock(lock).register_cost_per_page(REGISTER_PER_PAGE);
    let sim = builder.build();
    let context = sim.context(0);
    let (stream, device) = (context.stream(), context.alloc(KIB_64));
    let pool = PinnedPool::builder().driver(sim.driver()).build().expect("the settings are right");
    assert_eq!(pool.prewarm(KIB_64, 1), Ok(1));
    let mut small = pool.take(KIB_64);
    small.fill(7);
    // SAFETY: cuMemcpyHtoDAsync: the buffer is recorded on the stream and goes back to the pool.
    unsafe { stream.copy_to_device(&small, &device) };
    small.record_last_use(&stream).expect("a record");
    let mut large = pool.take(bytes);
    large.set_dirty_len(0);

    let registering = sim.calls("cuMemHostRegister");
    let stalled = AtomicBool::new(false);
    let ready = std::thread::scope(|scope| {
        drop(large);
        while sim.calls("cuMemHostRegister") == registering {
            std::thread::yield_now();
        }
        // A call that waits for the lock tells when it is free.
        let free_at = scope.spawn(|| {
            while lock && !pool_has_registered(&pool) {
                let start = Instant::now();
                sim.cuda().cu_device_get_count().expect("the simulated device does not fail here");
                if start.elapsed() > Duration::from_micros(200) {
                    stalled.store(true, Ordering::SeqCst);
                    return Some(Instant::now());
                }
            }
            None
        });
        let dropped_at = Instant::now();
        drop(small);
        let is_shelved = || {
            let stats = pool.stats();
            stats.classes.iter().any(|class| class.class_bytes == KIB_64 && class.pooled_pinned_buffers == 1)
        };
        while !is_shelved() {
            std::thread::yield_now();
        }
        let now = Instant::now();
        let is_beside = lock || !pool_has_registered(&pool);
        let from = free_at.join().expect("no panic").or((!lock).then_some(dropped_at));
        from.filter(|_| is_beside).map(|from| now.saturating_duration_since(from))
    });
    let again = pool.take(KIB_64);
    assert!(again.is_pinned() && again.iter().all(|byte| *byte == 0), "the returned buffer is right again");
    assert!(device.read().iter().all(|byte| *byte == 7), "and its bytes are on the device");
    drop(again);
    pool.shutdown();
    ready.map(|ready| ready.as_nanos() as f64)
}

/// Whether the large one is done: the small one was first.
fn pool_has_registered(pool: &PinnedPool) -> bool {
    pool.stats().registrations > 1
}
