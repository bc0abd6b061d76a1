//! The process-wide pool with settings of one's own. One test, because one process has one such pool.

use pinpool::{Driver, Error, PinnedPool};
use std::time::Duration;

#[test]
fn the_process_wide_pool_takes_settings_before_its_first_use_and_refuses_them_afterwards() {
    let wrong = PinnedPool::builder().driver(Driver::host_only()).thread_name("");
    assert!(matches!(pinpool::init_global(wrong), Err(Error::Setting { name: "thread_name", .. })));

    let settings = || PinnedPool::builder().driver(Driver::host_only()).max_pooled_bytes(12_345);
    pinpool::init_global(settings()).expect("a refused builder makes no pool");
    assert_eq!(pinpool::max_pooled_bytes(), 12_345);
    let late = pinpool::init_global(settings()).unwrap_err().to_string();
    assert!(late.contains("init_global") && late.contains("before the first take"), "{late}");

    assert_eq!(pinpool::take_exact(5000).unwrap().len(), 5000);
    assert_eq!(pinpool::take_unzeroed(5000).unwrap().len(), 8192);
    assert!(pinpool::drain(Duration::from_secs(20)));
    assert_eq!(pinpool::stats().pooled_bytes, 8192);
    pinpool::trim_to(0);
    assert_eq!(pinpool::stats().pooled_bytes, 0);
    let refused = pinpool::prewarm(4096, 1).unwrap_err().to_string();
    assert!(refused.contains("host_only"), "{refused}");
}
