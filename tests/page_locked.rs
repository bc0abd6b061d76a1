//! Whether memory is page-locked is asked of the driver, and not of the pool's own books.
#![allow(unsafe_code)] // unregisters behind the pool's back

mod common;

use common::{KIB, Rig};
use pinpool::sim::Sim;
use pinpool::{Backing, Driver};

#[test]
fn every_page_of_a_range_is_asked_for() {
    let rig = Rig::new();
    let driver = rig.sim.driver();
    let memory = vec![0_u8; 64 * KIB];
    let start = memory.as_ptr().align_offset(4096);
    let middle = &memory[start..start + 40 * KIB];
    assert_eq!(driver.is_page_locked(middle), Ok(false));
    let cuda = rig.sim.cuda();
    cuda.cu_mem_host_register(middle.as_ptr().cast_mut(), 16 * KIB, 1).unwrap();
    cuda.cu_mem_host_register(middle[20 * KIB..].as_ptr().cast_mut(), 20 * KIB, 1).unwrap();
    assert_eq!(driver.is_page_locked(&middle[..16 * KIB]), Ok(true));
    assert_eq!(driver.is_page_locked(&middle[5..16 * KIB - 5]), Ok(true));
    assert_eq!(driver.is_page_locked(&middle[..16 * KIB + 1]), Ok(false), "the last byte is outside");
    assert_eq!(driver.is_page_locked(middle), Ok(false), "one page in the middle is not");
    cuda.cu_mem_host_register(middle[16 * KIB..].as_ptr().cast_mut(), 4 * KIB, 1).unwrap();
    assert_eq!(driver.is_page_locked(middle), Ok(true), "three registrations cover it");
    assert_eq!(driver.is_page_locked(&[]), Ok(true));
    for offset in [0, 16 * KIB, 20 * KIB] {
        cuda.cu_mem_host_unregister(middle[offset..].as_ptr().cast_mut()).unwrap();
    }
    assert_eq!(driver.is_page_locked(&middle[..1]), Ok(false));
}

#[test]
fn the_driver_knows_better_than_the_pool() {
    let rig = Rig::with(Sim::new(), |builder| builder.backing(Backing::Registered));
    let driver = rig.sim.driver();
    let buffer = rig.pool.take_pinned(64 * KIB).unwrap();
    assert_eq!(driver.is_page_locked(&buffer), Ok(true));
    rig.sim.cuda().cu_mem_host_unregister(buffer.as_ptr().cast_mut()).unwrap();
    assert!(buffer.is_pinned(), "the pool believes what it did");
    assert_eq!(driver.is_page_locked(&buffer), Ok(false));
    rig.sim.cuda().cu_mem_host_register(buffer.as_ptr().cast_mut(), buffer.len(), 1).unwrap();
}

#[test]
fn without_a_device_nothing_is_page_locked() {
    assert_eq!(Driver::host_only().is_page_locked(&[1, 2, 3]), Ok(false));
}
