//! Who touches memory first: a caller, a take that was asked to, or the pool before it page-locks; never the driver, under
//! its lock.
#![allow(unsafe_code)] // Page-locks memory of the test's own.

use crate::common::{KIB, MIB, PATIENCE, Rig, locks_its_own_pages};
use crate::kernel::{POPULATE, pages_there, refusing};
use crate::{LARGE, all_zero, host_pool};
use pinpool::HugePages;
use pinpool::pin::{self, Pinned, Region};
use pinpool::sim::Sim;

const PAGE: usize = 4 * KIB;

fn prefaulting(huge_pages: HugePages) -> pinpool::PinnedPool {
    host_pool(|builder| builder.prefault_misses(true).huge_pages(huge_pages))
}

#[test]
fn a_miss_is_touched_when_it_is_written_or_before_where_that_was_asked_for() {
    let buffer = host_pool(|builder| builder).take(LARGE);
    assert_eq!(pages_there(&buffer), 0, "nobody has touched it");
    for huge_pages in [HugePages::Advise, HugePages::Never] {
        for bytes in [1, 64 * KIB, LARGE] {
            let buffer = prefaulting(huge_pages).take(bytes);
            assert_eq!(pages_there(&buffer), bytes.div_ceil(PAGE), "{bytes} bytes, {huge_pages:?}");
            assert!(all_zero(&buffer));
        }
    }
}

#[test]
fn where_the_kernel_cannot_be_asked_every_page_is_touched() {
    for error in [libc::EINVAL, libc::EPERM] {
        let _ = refusing(POPULATE, error, || {
            for huge_pages in [HugePages::Advise, HugePages::Never] {
                let buffer = prefaulting(huge_pages).take(LARGE);
                assert_eq!(pages_there(&buffer), LARGE / PAGE);
                assert!(all_zero(&buffer));
            }
            let rig = Rig::new();
            let contents: Vec<u8> = (0..LARGE).map(|index| index as u8).collect();
            let pinned = Pinned::new(&rig.sim.driver(), contents.clone()).unwrap();
            assert!(pinned[..] == contents[..], "touching changes nothing");
            drop(pinned);
            assert!(pin::drain(PATIENCE));
            rig.finish();
        });
    }
}

#[test]
fn where_there_is_no_memory_for_it_the_take_is_as_without() {
    let _ = refusing(POPULATE, libc::ENOMEM, || {
        let mut buffer = prefaulting(HugePages::Advise).take(LARGE);
        assert_eq!(pages_there(&buffer), 0, "touching would end the process");
        buffer[0] = 1;
    });
}

#[test]
fn memory_is_touched_in_bounded_steps() {
    let _ = refusing(POPULATE.of_more_than(4 * MIB), libc::ENOMEM, || {
        let buffer = prefaulting(HugePages::Advise).take(128 * MIB);
        assert_eq!(pages_there(&buffer), 128 * MIB / PAGE);
    });
}

#[test]
fn no_page_is_first_touched_under_the_drivers_lock() {
    if !locks_its_own_pages() {
        return; // then the driver allocates
    }
    for huge_pages in [HugePages::Advise, HugePages::Never] {
        let rig = Rig::with(Sim::new(), |builder| builder.huge_pages(huge_pages));
        for bytes in [1, 64 * KIB, LARGE] {
            // Nothing is written to any of them.
            drop(rig.pool.take_pinned(bytes).unwrap());
            rig.shelve(bytes, 3);
            assert_eq!(rig.pool.prewarm(bytes, 5), Ok(5));
        }
        let driver = rig.sim.driver();
        let pinned = Pinned::new(&driver, vec![0_u8; LARGE]).unwrap();
        drop(pinned);
        let untouched = host_pool(|builder| builder).take(LARGE);
        let regions =
            [Region::new(untouched.as_ptr(), LARGE / 2), Region::new(untouched[LARGE / 2..].as_ptr(), 5000)];
        // SAFETY: the memory is a buffer that outlives the registration.
        let regions = unsafe { pin::pin_all(&driver, &regions) }.unwrap();
        drop(regions);
        assert!(pin::drain(PATIENCE));
        assert!(rig.sim.calls("cuMemHostRegister") >= 27, "{:?}", rig.sim.called());
        assert_eq!(rig.sim.pages_faulted_in(), 0, "{huge_pages:?}: every other call would have waited");
        rig.finish();
    }
    // The count counts.
    let sim = Sim::new();
    let _context = sim.context(0);
    let untouched = host_pool(|builder| builder).take(LARGE);
    let address = untouched.as_ptr().cast_mut();
    assert_eq!(sim.cuda().cu_mem_host_register(address, LARGE, 0), Ok(()));
    assert_eq!(sim.pages_faulted_in(), LARGE / PAGE);
    assert_eq!(sim.cuda().cu_mem_host_unregister(address), Ok(()));
}
