//! `prewarm` of many large buffers: several threads touch, one page-locks, and the answers are as with one thread.

use crate::common::{KIB, MIB, Rig, in_time, locks_its_own_pages};
use crate::kernel::{pages_there, policy_of};
use crate::listener::listen;
use crate::{LARGE, PREFERRED, all_zero, said};
use pinpool::sim::{Fault, Sim};
use pinpool::{Backing, Driver, Error, PinnedPool, PoolBuilder};

const PAGE: usize = 4 * KIB;

fn rig(threads: usize, settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Rig {
    Rig::with(Sim::new(), |builder| settings(builder.prewarm_threads(threads)))
}

/// What was prewarmed lies on the shelf, page-locked and zero, and nothing else was left mapped.
fn check_and_finish(rig: Rig, bytes: usize, count: usize) {
    rig.sim.clear_faults();
    assert_eq!(rig.sim.mapped_bytes(), count * bytes, "what was not page-locked is freed");
    let buffers: Vec<_> = (0..count).map(|_| rig.pool.take(bytes)).collect();
    assert!(buffers.iter().all(|buffer| buffer.is_pinned() && all_zero(buffer)));
    assert_eq!(rig.pool.stats().hits, count as u64);
    drop(buffers);
    rig.finish();
}

#[test]
fn all_are_page_locked_zero_and_touched_before() {
    for threads in [1, 2, 5] {
        let rig = rig(threads, |builder| builder);
        assert_eq!(rig.pool.prewarm(LARGE, 12), Ok(12), "{threads} threads");
        if locks_its_own_pages() {
            assert_eq!(rig.sim.calls("pthread_create"), threads as u64 - 1);
            assert_eq!(rig.sim.pages_faulted_in(), 0);
            check_and_finish(rig, LARGE, 12);
        }
    }
}

#[test]
fn no_more_threads_than_are_of_use() {
    for (bytes, count, threads) in
        [(64 * KIB, 100, 0), (8 * MIB, 3, 0), (8 * MIB, 4, 1), (32 * MIB, 2, 1), (64 * MIB, 1, 0)]
    {
        let rig = rig(8, |builder| builder);
        assert_eq!(rig.pool.prewarm(bytes, count), Ok(count));
        if locks_its_own_pages() {
            assert_eq!(rig.sim.calls("pthread_create"), threads, "{count} of {bytes} bytes");
        }
    }
    let rig = rig(8, |builder| builder.backing(Backing::HostPinned));
    assert_eq!(rig.pool.prewarm(LARGE, 12), Ok(12));
    assert_eq!(rig.sim.calls("pthread_create"), 0, "their pages are replaced by the driver's");
    let refused = PinnedPool::builder().driver(Driver::host_only()).prewarm_threads(0).build().unwrap_err();
    assert!(matches!(refused, Error::Setting { name: "prewarm_threads", .. }), "{refused}");
}

#[test]
fn others_are_touched_while_one_is_page_locked() {
    if !locks_its_own_pages() {
        return;
    }
    let rig = rig(3, |builder| builder);
    rig.sim.fail("cuMemHostRegister", Fault::hang());
    std::thread::scope(|scope| {
        let prewarm = scope.spawn(|| rig.pool.prewarm(LARGE, 12));
        let hangs = in_time(|| rig.sim.hanging_calls() > 0);
        let is_touched = |(address, bytes): &(usize, usize)| pages_at(*address, *bytes) == bytes / PAGE;
        // One is with the driver, and as many are ready as may be ahead of it.
        let are_touched = in_time(|| rig.sim.mapped().iter().filter(|block| is_touched(block)).count() == 5);
        let mapped_bytes = rig.sim.mapped_bytes();
        rig.sim.clear_faults();
        assert_eq!(prewarm.join().unwrap(), Ok(12));
        assert!(hangs && are_touched, "others are touched meanwhile");
        assert_eq!(mapped_bytes, 5 * LARGE, "no more than are of use");
    });
    check_and_finish(rig, LARGE, 12);
}

#[allow(unsafe_code)]
fn pages_at(address: usize, bytes: usize) -> usize {
    // SAFETY: the pool has mapped it and keeps it while its prewarm hangs; nobody writes it.
    pages_there(unsafe { std::slice::from_raw_parts(address as *const u8, bytes) })
}

#[test]
fn a_refusal_on_the_way_leaves_what_was_done() {
    for refused in 1..=4 {
        for call in ["cuMemHostRegister", "mmap"] {
            if call != "mmap" && !locks_its_own_pages() {
                continue;
            }
            let rig = rig(4, |builder| builder);
            rig.sim.fail(call, Fault::from_nth(refused, 2));
            let done = rig.pool.prewarm(LARGE, 12);
            match refused {
                1 => assert!(
                    matches!(done, Err(Error::NotPinned { .. } | Error::OutOfMemory { .. })),
                    "{done:?}"
                ),
                _ => assert_eq!(done, Ok(refused as usize - 1), "{call}"),
            }
            check_and_finish(rig, LARGE, refused as usize - 1);
        }
    }
}

#[test]
fn the_cap_and_the_ceiling_are_kept_and_nothing_is_mapped_for_more() {
    let capped = rig(4, |builder| builder.max_pooled_bytes(5 * LARGE));
    assert_eq!(capped.pool.prewarm(LARGE, 12), Ok(5));
    if locks_its_own_pages() {
        assert_eq!(capped.sim.calls("mmap"), 5);
    }
    check_and_finish(capped, LARGE, 5);
    let under = rig(4, |builder| builder.max_registered_bytes(5 * LARGE));
    assert_eq!(under.pool.prewarm(LARGE, 12), Ok(5));
    check_and_finish(under, LARGE, 5);
}

#[test]
fn without_threads_it_does_the_work_alone() {
    let turn = listen();
    for refused in [1, 2] {
        let rig = rig(4, |builder| builder);
        rig.sim.fail("pthread_create", Fault::from_nth(refused, 1));
        assert_eq!(rig.pool.prewarm(LARGE, 12), Ok(12));
        assert_eq!(rig.pool.prewarm(LARGE, 2), Ok(2), "again");
        let told = said(&turn, "thread_refused");
        if locks_its_own_pages() {
            assert!(told.len() == 1 && told[0].1.contains("-prewarm"), "{told:?}");
        }
        check_and_finish(rig, LARGE, 14);
    }
}

#[test]
fn memory_touched_by_others_is_on_its_node() {
    let _turn = listen();
    let sim = Sim::builder().memory_nodes([0, 1]).build();
    let rig = Rig::with(sim, |builder| builder.numa_node(0).prewarm_threads(3));
    assert_eq!(rig.pool.prewarm(LARGE, 8), Ok(8));
    let buffers: Vec<_> = (0..8).map(|_| rig.pool.take(LARGE)).collect();
    if locks_its_own_pages() {
        assert!(buffers.iter().filter_map(|buffer| policy_of(buffer)).all(|policy| policy == (PREFERRED, 1)));
    }
    drop(buffers);
    rig.finish();
}
