//! A driver call that does not return holds up no taker and no dropper, and no shutdown for longer than its bound.
#![allow(unsafe_code)] // `assume_quiescent` is a promise; nothing of the takers' is ever copied.

use crate::device::{self, Device, NOTHING};
use crate::kind::Kind;
use crate::points::OF_THE_POOL;
use crate::stage::{LEN, PATIENCE, all_zero};
use pinpool::PinnedPool;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(50);
/// What `shutdown` may take beyond its timeout: for threads that do not leave the driver.
const GRACE: Duration = Duration::from_millis(3500);
/// After so long without an answer no take asks the driver.
const ANSWER_IS_LATE_AFTER: Duration = Duration::from_millis(150);
const TAKERS: usize = 2;
const ROUNDS: usize = 100;

/// Calls that a thread makes on its own behalf and that read or set what is the thread's own; where they hang, so
/// does the thread that takes or drops.
const THREAD_LOCAL: [&str; 2] = ["cuCtxGetCurrent", "cuThreadExchangeStreamCaptureMode"];

/// Which entry point hangs, and whether the pool knows a context and has page-locked blocks by then.
pub fn cases() -> impl Iterator<Item = (&'static str, bool)> {
    let entries = OF_THE_POOL.iter().filter(|entry| entry.starts_with("cu"));
    entries.flat_map(|entry| [(*entry, false), (*entry, true)])
}

/// Says what hung, once each, and that it was enough to show something.
pub fn report(mut hung: Vec<&'static str>) {
    hung.sort_unstable();
    hung.dedup();
    println!("hangs: {} entry points hung under the pool: {}", hung.len(), hung.join(" "));
    for entry in
        ["cuEventQuery", "cuMemHostRegister_v2", "cuMemHostUnregister", "cuCtxSynchronize", "cuCtxSetCurrent"]
    {
        assert!(hung.contains(&entry), "{entry} never hung, so nothing was shown of it");
    }
}

/// Runs a pool into a call that hangs; whether one did.
pub fn with_a_hanging(entry: &str, warm: bool) -> bool {
    let device = device::make(Kind::Ordinary, NOTHING);
    let context = device.context(0);
    let pool =
        PinnedPool::builder().driver(device.driver()).shutdown_timeout(SHUTDOWN_TIMEOUT).build().unwrap();
    let stream = context.stream();
    if warm {
        drop([pool.take(LEN), pool.take(LEN), pool.take(LEN)]);
        assert!(pool.drain(PATIENCE));
    }
    let (mut recorded, unrecorded, kept) = (pool.take(LEN), pool.take(LEN), pool.take(LEN));
    if warm {
        device::record(&mut recorded, &stream).unwrap();
        drop(kept);
        assert!(pool.drain(PATIENCE));
        device.run_until_idle();
    } else {
        // Nothing is known of any context yet.
        quiet(kept);
    }
    device::hang(&device, entry);
    // Everything that may bring a thread of the pool into the driver.
    let asks_at_a_drop = THREAD_LOCAL.contains(&entry);
    match warm || !asks_at_a_drop {
        true => drop(recorded),
        false => quiet(recorded),
    }
    match asks_at_a_drop {
        true => quiet(unrecorded),
        false => drop(unrecorded),
    }
    quiet(pool.take(2 * LEN));
    pool.trim_to(0);
    let deadline = Instant::now() + Duration::from_millis(100);
    while device.hanging_calls() == 0 && Instant::now() < deadline {
        std::thread::yield_now();
    }
    if device.hanging_calls() > 0 {
        // Until then a take may ask the driver too, and wait with the others.
        std::thread::sleep(ANSWER_IS_LATE_AFTER);
    }
    if device.hanging_calls() > 0 && !THREAD_LOCAL.contains(&entry) {
        takers_go_on(&pool, entry);
    }
    let started = Instant::now();
    let report = pool.shutdown();
    assert!(started.elapsed() < SHUTDOWN_TIMEOUT + GRACE, "{entry}: {:?} {report:?}", started.elapsed());
    let has_hung = device.hanging_calls() > 0;
    let stats = pool.stats();
    assert!(stats.is_balanced(), "{entry}, warm {warm}: {stats:#?}");
    assert_eq!(report.checked_out_buffers, 0);
    device.clear_faults();
    device.run_until_idle();
    goes_on(&device, &pool, entry);
    has_hung
}

fn quiet(mut buffer: pinpool::PinnedBuffer) {
    // SAFETY: nothing is ever copied from or into it.
    unsafe { buffer.assume_quiescent() };
}

fn takers_go_on(pool: &PinnedPool, entry: &str) {
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let take = |taker: usize| {
            let done = &done;
            move || {
                for _ in 0..ROUNDS {
                    let mut buffer = pool.take(LEN);
                    assert!(all_zero(&buffer));
                    buffer.fill(taker as u8 + 1);
                    quiet(buffer);
                    done.fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        let takers: Vec<_> = (0..TAKERS).map(|taker| scope.spawn(take(taker))).collect();
        let deadline = Instant::now() + PATIENCE;
        while done.load(Ordering::Relaxed) < TAKERS * ROUNDS {
            // Not an assertion: the scope would wait for the taker that hangs.
            if Instant::now() > deadline {
                eprintln!("{entry} hangs, and a taker with it");
                std::process::abort();
            }
            std::thread::yield_now();
        }
        takers.into_iter().for_each(|taker| taker.join().expect("a taker"));
    });
}

/// When the call has returned after all, everything is in the books, and the pool is as good as before.
fn goes_on(device: &Device, pool: &PinnedPool, entry: &str) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        device.run_until_idle();
        let stats = pool.stats();
        let kept = stats.pooled_bytes + stats.retiring_bytes + stats.queued_bytes + stats.quarantined_bytes;
        let settled = stats.queued_buffers == 0 && stats.retiring_bytes == 0 && device.hanging_calls() == 0;
        if settled && stats.is_balanced() && device.mapped_bytes() == kept {
            break;
        }
        assert!(Instant::now() < deadline, "{entry}: {} bytes are mapped: {stats:#?}", device.mapped_bytes());
        std::thread::yield_now();
    }
    drop(pool.take(LEN));
    assert!(pool.drain(PATIENCE), "{entry}: the pool does not go on: {:#?}", pool.stats());
    assert!(pool.take(LEN).is_pinned(), "{entry}: {:#?}", pool.stats());
    assert!(pool.drain(PATIENCE));
    device.assert_clean();
}
