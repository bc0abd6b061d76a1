//! A forked child has no cleaner and no usable driver: its takes give plain memory, its drops free it, whoever needs the
//! driver is told so, and the parent's buffers are none of its business. `tests/fork_cuda.rs` has the children that may use
//! CUDA, because their parents have not.
//!
//! Each case runs in a process of its own, so that no other test's thread holds a lock at the fork, except where that
//! is the case.
#![cfg(target_os = "linux")]

mod child;
mod common;

use child::forked::forked;
use child::{in_child, is_child};
use common::{KIB, MIB, PATIENCE, Rig, all_zero, copy_to_device, pattern, until};
use pinpool::regions;
use pinpool::sim::{Fault, Sim, SimStream};
use pinpool::{Driver, Error, PinnedBuffer, PinnedPool};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const LEN: usize = 64 * KIB;

/// Declares a test that runs its body in a process of its own.
macro_rules! alone {
    ($($name:ident => $case:ident $body:block)*) => {$(
        #[test]
        fn $name() {
            in_child(stringify!($case), &[]);
        }

        #[test]
        #[ignore = "run in a child by the test above"]
        fn $case() {
            if is_child() {
                $body
            }
        }
    )*};
}

/// A buffer that a graph was said to use, and no longer.
#[allow(unsafe_code)]
fn hold_for_a_graph(pool: &PinnedPool) {
    let mut buffer = pool.take(KIB);
    // SAFETY: there is no graph.
    (0..20).for_each(|_| drop(unsafe { buffer.hold_for_graph() }));
}

alone! {
    a_child_takes_fills_and_drops_plain_memory_and_leaks_none_of_it => child_that_takes {
        let rig = Rig::new();
        rig.shelve(MIB, 2);
        let status = forked(|| {
            let mut before = 0;
            for round in 0..200 {
                let mut buffer = rig.pool.take(MIB);
                if buffer.is_pinned() || !all_zero(&buffer) {
                    return 1;
                }
                buffer.fill(1);
                drop(buffer);
                if round == 10 {
                    before = resident_bytes();
                }
            }
            if resident_bytes() > before + 16 * MIB { 2 } else { 0 }
        });
        assert_eq!(status, 0);
        assert!(rig.pool.take(MIB).is_pinned(), "the parent's shelf is as it was");
        rig.drain();
        rig.finish();
    }

    a_child_governs_without_a_driver_call_or_a_thread => child_that_governs {
        let rig = Rig::new();
        // Page-locked on this thread: there is no cleaner yet, so a child could start one.
        assert_eq!(rig.pool.prewarm(LEN, 4).unwrap(), 4);
        assert_eq!(forked(|| govern(&rig.pool, &rig.sim)), 0);
        let mut out = rig.pinned(LEN);
        out.fill(1);
        let mut kept = Some(out);
        let status = forked(|| {
            let status = govern(&rig.pool, &rig.sim);
            drop(kept.take());
            status
        });
        assert_eq!(status, 0);
        assert!(kept.unwrap().iter().all(|byte| *byte == 1), "the parent's bytes");
        rig.drain();
        rig.finish();
    }

    a_child_that_needs_the_driver_is_told_that_it_is_a_child => child_that_asks {
        let rig = Rig::new();
        let stream = rig.context.stream();
        let mut pinned = rig.pinned(LEN);
        stream.hold();
        rig.sim.stall(stream.handle(), Duration::ZERO);
        pinned.record_last_use(&stream).unwrap();
        let mut pageable = rig.pool.take(2 * LEN);
        pageable.fill(4);
        pageable.record_last_use(&stream).unwrap();
        let mut failed = rig.pool.take(4 * LEN);
        rig.sim.fail("cuEventRecord", Fault::once(2));
        failed.record_last_use(&stream).unwrap_err();
        let calls = rig.sim.total_calls();
        let (mut guards, hold) = (Some([pinned, pageable, failed]), Some(rig.pool.hold_context_waits()));
        let mut hold = hold;
        let status = forked(|| {
            let [pinned, mut pageable, mut failed] = guards.take().unwrap();
            let mut fresh = rig.pool.take(LEN);
            let answers = [
                pageable.record_last_use(&stream),
                fresh.record_last_use(&stream),
                pinned.wait(),
                failed.wait(),
                pinned.is_quiescent().map(drop),
                at_once(pinned.done()),
                at_once(failed.done()),
            ];
            if let Some(wrong) = answers.iter().position(|answer| *answer != Err(Error::ForkedChild)) {
                println!("answer {wrong}: {:?}", answers[wrong]);
                return 1;
            }
            if !Error::ForkedChild.to_string().contains("forked child") {
                return 2;
            }
            // The child's own copies of pageable bytes, which no device reaches.
            if pageable[0] != 4 {
                return 3;
            }
            pageable.fill(5);
            failed.fill(5);
            drop((pinned, pageable, failed, fresh, hold.take()));
            if rig.sim.total_calls() == calls { 0 } else { 4 }
        });
        assert_eq!(status, 0);
        stream.release();
        rig.sim.run_until_idle();
        let [pinned, pageable, failed] = guards.unwrap();
        assert!(pageable.iter().all(|byte| *byte == 4), "the child wrote into its parent's memory");
        drop((pinned, pageable, failed, hold));
        rig.drain();
        rig.finish();
    }

    what_is_page_locked_is_kept_out_of_children_and_nothing_else => child_that_looks {
        let rig = Rig::new();
        let pinned = rig.pinned(4 * MIB);
        let mut pageable = rig.pool.take(2 * MIB);
        pageable.fill(1);
        let small = rig.pinned(4 * KIB);
        assert!(is_kept_out(&pinned) && is_kept_out(&small), "a fork would copy what is page-locked");
        assert!(!is_kept_out(&pageable));
        let addresses = [pinned.as_ptr() as usize, small.as_ptr() as usize];
        let status = forked(|| {
            let mapped = addresses.iter().any(|address| flags_of(*address).is_some());
            if mapped || flags_of(pageable.as_ptr() as usize).is_none() { 1 } else { 0 }
        });
        assert_eq!(status, 0);
        drop((pinned, small));
        rig.drain();
        // A registration that is refused leaves an ordinary mapping: nothing may stay hidden for nothing.
        rig.sim.fail("cuMemHostRegister", Fault::always(2));
        let refused = rig.pool.take_pinned(MIB);
        assert!(refused.is_err());
        rig.sim.clear_faults();
        drop(pageable);
        rig.drain();
        rig.finish();
    }

    copies_in_flight_at_a_fork_are_none_of_the_child_s_business => child_beside_copies {
        let rig = Rig::new();
        let (stream, device) = (rig.context.stream(), rig.context.alloc(LEN));
        let mut buffer = rig.pinned(LEN);
        let bytes = pattern(9, LEN);
        buffer.copy_from_slice(&bytes);
        stream.hold();
        copy_to_device(&stream, &buffer, LEN, &device);
        buffer.record_last_use(&stream).unwrap();
        let mut guard = Some(buffer);
        let status = forked(|| {
            drop(guard.take());
            drop(rig.pool.take(LEN));
            rig.pool.clear();
            i32::from(rig.pool.shutdown().completed)
        });
        assert_eq!(status, 0);
        drop(guard);
        stream.release();
        rig.sim.run_until_idle();
        rig.drain();
        assert!(device.read() == bytes, "wrong bytes on the device");
        rig.finish();
    }

    a_fork_while_threads_of_the_pool_are_inside_the_driver_hangs_no_child => child_of_a_busy_pool {
        let rig = Rig::new();
        let stream = rig.context.stream();
        let calls = ["cuEventQuery", "cuMemHostRegister", "cuCtxSynchronize", "cuMemHostUnregister"];
        for (round, call) in calls.into_iter().enumerate() {
            rig.shelve(LEN, 2);
            let mut buffer = rig.pool.take(LEN);
            stream.hold();
            rig.sim.stall(stream.handle(), Duration::ZERO);
            buffer.record_last_use(&stream).unwrap();
            let unrecorded = rig.pool.take(LEN);
            rig.sim.fail(call, Fault::hang());
            // Of a class that was not there before, so that it is to be registered.
            drop((buffer, unrecorded, rig.pool.take(LEN << (round + 1))));
            if call == "cuMemHostUnregister" {
                // Not before: it waits for the held stream, and the lane with it.
                rig.pool.trim_to(0);
            }
            until(call, || rig.sim.hanging_calls() > 0);
            assert_eq!(forked(|| govern(&rig.pool, &rig.sim)), 0, "inside {call}");
            rig.sim.clear_faults();
            stream.release();
            until("idle", || {
                rig.sim.run_until_idle();
                rig.pool.stats().queued_buffers == 0
            });
        }
        rig.finish();
    }

    forks_while_threads_hold_every_lock_hang_no_child => children_of_a_storm {
        let rig = Rig::with(Sim::zero_cost(), |builder| builder.max_pooled_bytes(MIB));
        let stop = AtomicBool::new(false);
        let (stream, pool) = (rig.context.stream(), &rig.pool);
        std::thread::scope(|scope| {
            let threads: [fn(&PinnedPool, &SimStream); 5] = [
                |pool, stream| drop(pool.take(LEN).record_last_use(stream)),
                |pool, _| drop((pool.take(LEN), pool.take(LEN / 2), pool.stats())),
                |pool, _| {
                    pool.set_max_pooled_bytes(MIB / 2);
                    pool.set_max_pooled_bytes(MIB);
                    pool.trim_to(LEN);
                },
                |pool, _| drop((pool.hold_context_waits(), pool.prewarm(4 * KIB, 1))),
                |pool, _| drop((pool.take(KIB), pool.drain(Duration::from_millis(1)))),
            ];
            for work in threads {
                let (stop, context, stream) = (&stop, &rig.context, &stream);
                scope.spawn(move || {
                    context.bind();
                    while !stop.load(Ordering::Relaxed) {
                        work(pool, stream);
                    }
                });
            }
            for round in 0..80 {
                let mut hold = Some(pool.hold_context_waits());
                let status = forked(|| {
                    drop(hold.take());
                    govern(pool, &rig.sim)
                });
                if status != 0 {
                    stop.store(true, Ordering::Relaxed);
                }
                assert_eq!(status, 0, "child {round}");
            }
            stop.store(true, Ordering::Relaxed);
        });
        rig.drain();
        rig.pool.shutdown();
    }

    forks_while_threads_hold_buffers_for_graphs_hang_no_child => children_of_holders {
        let (rig, stop) = (Rig::new(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        hold_for_a_graph(&rig.pool);
                    }
                });
            }
            let holds = || {
                hold_for_a_graph(&rig.pool);
                0
            };
            let status = (0..200).map(|_| forked(holds)).find(|status| *status != 0);
            stop.store(true, Ordering::Relaxed);
            assert_eq!(status, None);
        });
    }

    forks_while_threads_make_pools_hang_no_child => children_of_makers {
        let make = || drop(PinnedPool::builder().driver(Driver::host_only()).build().unwrap().take(KIB));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // One, since a thread that waits for a lock is in a table of the lock's library, which no child could mend.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    PinnedPool::builder().driver(Driver::host_only()).build().unwrap();
                }
            });
            let makes = || {
                make();
                0
            };
            let status = (0..200).map(|_| forked(makes)).find(|status| *status != 0);
            stop.store(true, Ordering::Relaxed);
            assert_eq!(status, None);
        });
    }

    a_child_of_a_child_is_one_too => child_that_forks {
        let rig = Rig::new();
        let pinned = rig.pinned(LEN);
        let status = forked(|| {
            let mut own = Some(rig.pool.take(MIB));
            let status = forked(|| {
                drop(own.take());
                govern(&rig.pool, &rig.sim)
            });
            status + govern(&rig.pool, &rig.sim)
        });
        assert_eq!(status, 0);
        drop(pinned);
        rig.drain();
        rig.finish();
    }

    programs_can_be_started_beside_page_locked_memory => child_that_starts_programs {
        use std::os::unix::process::CommandExt;
        use std::process::Command;
        let rig = Rig::new();
        rig.shelve(4 * MIB, 4);
        let buffer = rig.pinned(16 * MIB);
        for _ in 0..10 {
            // posix_spawn: the child shares the memory until it is another program.
            assert!(Command::new("/bin/true").status().unwrap().success());
            let mut with_fork = Command::new("/bin/true");
            // SAFETY: does nothing; it is there so that the standard library forks.
            #[allow(unsafe_code)]
            unsafe {
                with_fork.pre_exec(|| Ok(()));
            }
            assert!(with_fork.status().unwrap().success());
        }
        drop(buffer);
        rig.drain();
        rig.finish();
    }

    a_child_may_exit_with_everything_that_its_parent_had => child_that_exits {
        let rig = Rig::new();
        let pinned = rig.pinned(LEN);
        rig.pool.take(LEN).record_last_use(&rig.context.stream()).unwrap();
        // `_exit` runs no destructor; `exit` runs the handlers that the parent registered.
        let mut guard = Some(pinned);
        let status = forked(|| {
            drop(rig.pool.take(LEN));
            drop(guard.take());
            std::process::exit(7);
        });
        assert_eq!(status, 7);
        drop(guard);
        rig.sim.run_until_idle();
        rig.drain();
        rig.finish();
    }
}

/// Everything that a child may do with its parent's pool; 0 when nothing is wrong.
fn govern(pool: &PinnedPool, sim: &Sim) -> i32 {
    let calls = sim.total_calls();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let mut buffer = pool.take(LEN);
    if buffer.is_pinned() || !all_zero(&buffer) {
        return 2;
    }
    buffer.fill(7);
    if buffer.wait().is_err() || !buffer.is_quiescent().unwrap() {
        return 3;
    }
    if regions::is_pinned(buffer.as_ptr()) || buffer.driver_says_page_locked() != Ok(false) {
        return 4;
    }
    drop(buffer);
    drop((pool.try_take(MIB), pool.take_exact(5), pool.take_unzeroed(9)));
    if pool.take_pinned(LEN).is_ok() || pool.prewarm(LEN, 1).is_ok() {
        return 5;
    }
    let before = pool.stats();
    pool.trim_to(0);
    pool.set_max_pooled_bytes(0);
    pool.clear();
    if pool.drain(PATIENCE) || pool.shutdown().completed || pool.max_pooled_bytes() != 0 {
        return 6;
    }
    drop((pool.hold_context_waits(), pool.clone()));
    if pool.stats().pooled_bytes != before.pooled_bytes {
        return 7;
    }
    if threads() != 1 {
        return 8;
    }
    if sim.total_calls() != calls { 9 } else { 0 }
}

/// A future that is ready at its first look.
fn at_once(future: impl Future<Output = Result<(), Error>>) -> Result<(), Error> {
    let mut future = std::pin::pin!(future);
    match future.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
        std::task::Poll::Ready(answer) => answer,
        std::task::Poll::Pending => Ok(()),
    }
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// The kernel's flags of the mapping that an address lies in.
fn flags_of(address: usize) -> Option<String> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut is_inside = false;
    for line in smaps.lines() {
        let range = line.split_whitespace().next().and_then(|word| word.split_once('-'));
        let range = range.and_then(|(start, end)| {
            Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
        });
        match (range, line.strip_prefix("VmFlags:")) {
            (Some(range), _) => is_inside = range.contains(&address),
            (None, Some(flags)) if is_inside => return Some(flags.to_owned()),
            _ => {}
        }
    }
    None
}

/// Whether a fork leaves the buffer's memory out ("dc": do not copy).
fn is_kept_out(buffer: &PinnedBuffer) -> bool {
    let flags = flags_of(buffer.as_ptr() as usize).expect("it is mapped");
    flags.split_whitespace().any(|flag| flag == "dc")
}
