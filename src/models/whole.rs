//! Models of a whole pool.

use super::check;
use crate::driver::Driver;
use crate::pool::PinnedPool;
use std::time::Duration;

const FOREVER: Duration = Duration::from_secs(1 << 30);

fn pool(driver: Driver) -> PinnedPool {
    let builder = PinnedPool::builder().driver(driver).harvest_wait_limit(FOREVER).shutdown_timeout(FOREVER);
    builder.build().expect("valid settings")
}

pub fn a_returned_buffer_is_there_for_the_next_take() {
    check(Some(2), || {
        let pool = pool(Driver::host_only());
        drop(pool.take(1));
        drop(pool.take(1));
        let report = pool.shutdown();
        assert!(report.completed);
        assert_eq!(pool.stats().misses, 1);
    });
}
