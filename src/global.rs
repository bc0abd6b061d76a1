//! The process-wide pool behind `pinpool::take`.

use crate::buffer::PinnedBuffer;
use crate::config::{parse_bytes, parse_switch};
use crate::driver::Driver;
use crate::error::Error;
use crate::pool::{PinnedPool, ShutdownReport};
use crate::stats::Stats;
use crate::sync::OnceLock;

/// Environment variables, read once.
const DISABLE: &str = "PINPOOL_DISABLE";
const MAX_POOLED_BYTES: &str = "PINPOOL_MAX_POOLED_BYTES";

/// The process-wide pool: [`Driver::auto`], 4 GiB of idle bytes, or what the environment says.
///
/// Never dropped, so nothing of it runs when the process exits.
pub fn global() -> &'static PinnedPool {
    static GLOBAL: OnceLock<PinnedPool> = OnceLock::new();
    if let Some(pool) = GLOBAL.get() {
        return pool;
    }
    let read = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let mut unread = Vec::new();
    let pool = GLOBAL.get_or_init(|| from_environment(read, &mut unread));
    // Only now: whoever listens may use the pool, which would wait for itself while it is made.
    for error in unread {
        tracing::warn!(%error, "an environment variable is not used");
    }
    pool
}

/// A value that cannot be read goes to `unread`, and the default stands.
fn from_environment(read: impl Fn(&str) -> Option<String>, unread: &mut Vec<Error>) -> PinnedPool {
    let disabled = read(DISABLE).map(|text| parse_switch(DISABLE, &text)).transpose();
    let cap = read(MAX_POOLED_BYTES).map(|text| parse_bytes(MAX_POOLED_BYTES, &text)).transpose();
    let disabled = disabled.unwrap_or_else(|error| {
        unread.push(error);
        None
    });
    let cap = cap.unwrap_or_else(|error| {
        unread.push(error);
        None
    });
    let mut builder = PinnedPool::builder().driver(Driver::auto());
    if let Some(bytes) = cap {
        builder = builder.max_pooled_bytes(bytes);
    }
    if disabled == Some(true) {
        builder = builder.driver(Driver::host_only()).max_pooled_bytes(0);
    }
    builder.build().expect("the default settings are valid")
}

/// [`PinnedPool::take`] of the process-wide pool.
///
/// # Panics
///
/// As [`PinnedPool::take`].
pub fn take(min_size: usize) -> PinnedBuffer {
    global().take(min_size)
}

/// [`PinnedPool::try_take`] of the process-wide pool.
///
/// # Errors
///
/// As [`PinnedPool::try_take`].
pub fn try_take(min_size: usize) -> Result<PinnedBuffer, Error> {
    global().try_take(min_size)
}

/// [`PinnedPool::take_pinned`] of the process-wide pool.
///
/// # Errors
///
/// As [`PinnedPool::take_pinned`].
pub fn take_pinned(min_size: usize) -> Result<PinnedBuffer, Error> {
    global().take_pinned(min_size)
}

/// [`PinnedPool::set_max_pooled_bytes`] of the process-wide pool.
pub fn set_max_pooled_bytes(bytes: usize) {
    global().set_max_pooled_bytes(bytes);
}

/// [`PinnedPool::clear`] of the process-wide pool.
pub fn clear() {
    global().clear();
}

/// [`PinnedPool::shutdown`] of the process-wide pool.
pub fn shutdown() -> ShutdownReport {
    global().shutdown()
}

/// [`PinnedPool::stats`] of the process-wide pool.
pub fn stats() -> Stats {
    global().stats()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_sets_the_cap_and_turns_everything_off() {
        let mut unread = Vec::new();
        let pool = from_environment(|name| (name == MAX_POOLED_BYTES).then(|| "12345".into()), &mut unread);
        assert_eq!(pool.max_pooled_bytes(), 12345);
        let pool = from_environment(|name| (name == DISABLE).then(|| "1".into()), &mut unread);
        assert!(unread.is_empty());
        assert_eq!(pool.max_pooled_bytes(), 0);
        let pool = from_environment(|_| Some("nonsense".into()), &mut unread);
        assert_eq!(unread.len(), 2);
        assert_eq!(pool.max_pooled_bytes(), crate::config::DEFAULT_MAX_POOLED_BYTES);
    }
}
