//! The process-wide pool behind `pinpool::take`.
#![allow(unsafe_code)] // A pool that lives for ever, found again in a forked child.

use crate::buffer::PinnedBuffer;
use crate::config::{parse_bytes, parse_seconds, parse_switch};
use crate::driver::Driver;
use crate::error::Error;
use crate::pool::{PinnedPool, PoolBuilder, ShutdownReport};
use crate::report::say;
use crate::size_class::SizeClasses;
use crate::stats::Stats;
use crate::sync::Ordering;
use crate::sync::fixed::AtomicPtr;
use std::time::Duration;

/// Environment variables, read once.
const DISABLE: &str = "PINPOOL_DISABLE";
const MAX_POOLED_BYTES: &str = "PINPOOL_MAX_POOLED_BYTES";
const MAX_IDLE_SECONDS: &str = "PINPOOL_MAX_IDLE_SECONDS";
const SIZE_CLASSES: &str = "PINPOOL_SIZE_CLASSES";

/// Null until the pool is made, which no lock guards: a child that was forked meanwhile would find it held for ever.
static GLOBAL: AtomicPtr<PinnedPool> = AtomicPtr::new(std::ptr::null_mut());

/// The process-wide pool: the [defaults of the builder](PoolBuilder), or what [`init_global`] or the environment said
/// before its first use.
///
/// Never dropped, so nothing of it runs when the process exits; an explicit [`shutdown`] is for programs that
/// want their memory back, or its report, earlier.
///
/// In a forked child of a process that used CUDA it is the parent's, and hands out plain memory. In one whose parent
/// has not used CUDA it is a new pool with the same settings.
pub fn global() -> &'static PinnedPool {
    match stands_in(&GLOBAL) {
        Some(pool) if pool.is_inherited() => of_forked_child(pool),
        Some(pool) => pool,
        None => made_of_the_environment(),
    }
}

#[cold]
fn made_of_the_environment() -> &'static PinnedPool {
    let read = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let mut unread = Vec::new();
    let pool = from_environment(read, &mut unread);
    let Ok(pool) = put(&GLOBAL, std::ptr::null_mut(), pool) else { return global() };
    // Only now: whoever listens may use the pool.
    for error in unread {
        say!(WARN, "environment", %error, "an environment variable cannot be read; the default is used");
    }
    pool
}

/// What one of the two places here holds.
#[inline]
fn stands_in(place: &AtomicPtr<PinnedPool>) -> Option<&'static PinnedPool> {
    // SAFETY: null, or a pool that was leaked by `put`.
    unsafe { place.load(Ordering::Acquire).as_ref() }
}

/// Puts a pool in the place of another, or of none, for good; gives it back where somebody else was faster.
fn put(
    place: &AtomicPtr<PinnedPool>,
    instead_of: *mut PinnedPool,
    pool: PinnedPool,
) -> Result<&'static PinnedPool, PinnedPool> {
    let pool = Box::into_raw(Box::new(pool));
    match place.compare_exchange(instead_of, pool, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: leaked above.
        Ok(_) => Ok(unsafe { &*pool }),
        // SAFETY: leaked above, and nobody has seen it.
        Err(_) => Err(*unsafe { Box::from_raw(pool) }),
    }
}

/// The pool of this process, which is a forked child of the one that made the parent's.
#[cold]
fn of_forked_child(parents: &'static PinnedPool) -> &'static PinnedPool {
    static POOL: AtomicPtr<PinnedPool> = AtomicPtr::new(std::ptr::null_mut());
    loop {
        let known = stands_in(&POOL);
        if let Some(pool) = known
            && !pool.is_inherited()
        {
            return pool;
        }
        let Some(renewed) = parents.renewed() else { return parents };
        let known = known.map_or(std::ptr::null_mut(), |known| std::ptr::from_ref(known).cast_mut());
        drop(put(&POOL, known, renewed));
    }
}

/// Makes the process-wide pool with settings of one's own; the environment is not read then.
///
/// # Errors
///
/// [`Error::Setting`] when the pool exists already: call it before the first use. Else as
/// [`PoolBuilder::build`].
pub fn init_global(builder: PoolBuilder) -> Result<&'static PinnedPool, Error> {
    let exists = || Error::Setting {
        name: "init_global",
        problem: "the process-wide pool exists already; call this before the first take".into(),
    };
    if stands_in(&GLOBAL).is_some() {
        return Err(exists());
    }
    put(&GLOBAL, std::ptr::null_mut(), builder.build()?).map_err(|_| exists())
}

/// A value that cannot be read goes to `unread`, and the default stands.
fn from_environment(read: impl Fn(&str) -> Option<String>, unread: &mut Vec<Error>) -> PinnedPool {
    // Set to nothing is not set.
    let read = |name: &str| read(name).filter(|text| !text.trim().is_empty());
    let disabled = parsed(read, DISABLE, parse_switch, unread);
    let cap = parsed(read, MAX_POOLED_BYTES, parse_bytes, unread);
    let idle = parsed(read, MAX_IDLE_SECONDS, parse_seconds, unread);
    let classes = parsed(read, SIZE_CLASSES, SizeClasses::parse, unread);
    let mut builder = PinnedPool::builder().driver(Driver::auto());
    if let Some(time) = idle {
        builder = builder.max_idle_time(Some(time).filter(|time| !time.is_zero()));
    }
    if let Some(bytes) = cap {
        builder = builder.max_pooled_bytes(bytes);
    }
    if let Some(classes) = classes {
        builder = builder.size_classes(classes);
    }
    if disabled == Some(true) {
        builder = builder.driver(Driver::none("PINPOOL_DISABLE is set")).max_pooled_bytes(0);
    }
    builder.build().expect("the default settings are valid")
}

fn parsed<T>(
    read: impl Fn(&str) -> Option<String>,
    name: &'static str,
    parse: fn(&'static str, &str) -> Result<T, Error>,
    unread: &mut Vec<Error>,
) -> Option<T> {
    let value = read(name).map(|text| parse(name, &text)).transpose();
    value.unwrap_or_else(|error| {
        unread.push(error);
        None
    })
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

/// [`PinnedPool::take_exact`] of the process-wide pool.
///
/// # Errors
///
/// As [`PinnedPool::take_exact`].
pub fn take_exact(len: usize) -> Result<PinnedBuffer, Error> {
    global().take_exact(len)
}

/// [`PinnedPool::take_unzeroed`] of the process-wide pool.
///
/// # Errors
///
/// As [`PinnedPool::take_unzeroed`].
pub fn take_unzeroed(min_size: usize) -> Result<PinnedBuffer, Error> {
    global().take_unzeroed(min_size)
}

/// [`PinnedPool::prewarm`] of the process-wide pool.
///
/// # Errors
///
/// As [`PinnedPool::prewarm`].
pub fn prewarm(min_size: usize, count: usize) -> Result<usize, Error> {
    global().prewarm(min_size, count)
}

/// [`PinnedPool::drain`] of the process-wide pool.
pub fn drain(timeout: Duration) -> bool {
    global().drain(timeout)
}

/// [`PinnedPool::trim_to`] of the process-wide pool.
pub fn trim_to(bytes: usize) {
    global().trim_to(bytes);
}

/// [`PinnedPool::max_pooled_bytes`] of the process-wide pool.
pub fn max_pooled_bytes() -> usize {
    global().max_pooled_bytes()
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
        let pool = from_environment(|name| (name == SIZE_CLASSES).then(|| "4:65536".into()), &mut unread);
        assert_eq!(pool.take(65537).len(), 81920, "a step of a quarter of 64 KiB");
        assert_eq!(pool.renewed().unwrap().take(65537).len(), 81920, "in a forked child too");
        let pool = from_environment(|name| (name == DISABLE).then(|| "1".into()), &mut unread);
        assert!(unread.is_empty());
        assert_eq!(pool.max_pooled_bytes(), 0);
        let pool = from_environment(|_| Some("  ".into()), &mut unread);
        assert!(unread.is_empty(), "set to nothing is not set: {unread:?}");
        assert_eq!(pool.max_pooled_bytes(), crate::limits::default_max_pooled_bytes());
        let pool = from_environment(|_| Some("nonsense".into()), &mut unread);
        assert_eq!(unread.len(), 4, "{unread:?}");
        assert_eq!(pool.max_pooled_bytes(), crate::limits::default_max_pooled_bytes());
    }
    #[cfg(all(feature = "sim", not(loom)))]
    #[test]
    fn the_environment_says_how_long_a_buffer_lies_unneeded() {
        let aged_out = |seconds: &str| {
            let read = |name: &str| (name == MAX_IDLE_SECONDS).then(|| seconds.to_owned());
            let mut unread = Vec::new();
            let pool = from_environment(read, &mut unread);
            assert!(unread.is_empty(), "{unread:?}");
            drop(pool.take(1));
            assert!(pool.drain(Duration::from_secs(20)));
            pool.let_time_pass(Duration::from_secs(60));
            pool.stats().aged_out
        };
        assert_eq!([aged_out("30"), aged_out("90"), aged_out("0")], [1, 0, 0], "0 is for ever");
    }
}
