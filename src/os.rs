//! What the operating system is asked for besides memory: the page size, whether this is a forked
//! child, and how a background thread is scheduled.
#![allow(unsafe_code)] // System calls have no safe form in std; each is one line with its reason.

use crate::sync::fixed::{AtomicPtr, AtomicU32};
use crate::sync::{OnceLock, Ordering};

/// Bytes of a memory page, a power of two.
#[inline]
pub(crate) fn page_bytes() -> usize {
    if cfg!(loom) {
        return 1; // Classes from the first on, so that a model has two and no more.
    }
    // On the path of every take; where the architecture knows one size only, nothing is looked up.
    if cfg!(all(target_arch = "x86_64", unix)) { 4096 } else { asked_page_bytes() }
}

fn asked_page_bytes() -> usize {
    static PAGE: OnceLock<usize> = OnceLock::new();
    *PAGE.get_or_init(query_page_bytes)
}

#[cfg(unix)]
fn query_page_bytes() -> usize {
    // SAFETY: sysconf only reads a constant of the system.
    let answer = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(answer).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(4096)
}

#[cfg(not(unix))]
fn query_page_bytes() -> usize {
    // The allocation granularity of Windows; every page size in use there divides it.
    65536
}

/// A word that a fork sets to zero in the child, so that the child is known without a system call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForkWord(&'static AtomicU32);

impl ForkWord {
    /// The word of this process: one page, mapped at the first call in it and kept for good.
    ///
    /// A forked child gets a word of its own here. What was made in its parent keeps the parent's, which says
    /// "child" in it for ever; what the child makes by itself is at home.
    pub(crate) fn of_this_process() -> Self {
        static CURRENT: ProcessMark = ProcessMark::new();
        loop {
            if let Some(word) = CURRENT.word()
                && !word.is_child()
            {
                return word;
            }
            let page = map_fork_word().unwrap_or_else(|| Box::leak(Box::new(AtomicU32::new(0))));
            page.store(1, Ordering::Relaxed);
            // Of two threads that find none, one makes a page for nothing, once.
            CURRENT.replace_inherited(ForkWord(page));
        }
    }

    /// As a forked child sees its parent's.
    #[cfg(test)]
    pub(crate) fn of_a_parent() -> Self {
        ForkWord(Box::leak(Box::new(AtomicU32::new(0))))
    }

    /// Whether this process is a forked child of the one that made the word.
    #[inline]
    pub(crate) fn is_child(self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }
}

/// In which process some process-wide state was last made; nobody's at first.
#[derive(Debug)]
pub(crate) struct ProcessMark(AtomicPtr<AtomicU32>);

impl ProcessMark {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// The state is this process's from now on, unless it is already.
    pub(crate) fn set(&self) {
        if self.word().is_none_or(ForkWord::is_child) {
            self.replace_inherited(ForkWord::of_this_process());
        }
    }

    /// Whether the state was made by a process that this one is a forked child of.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.word().is_some_and(ForkWord::is_child)
    }

    #[inline]
    fn word(&self) -> Option<ForkWord> {
        // SAFETY: null, or what `replace_inherited` stored, which is never freed.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }.map(ForkWord)
    }

    fn replace_inherited(&self, word: ForkWord) {
        let replace = |known: *mut AtomicU32| {
            // SAFETY: as in `word`.
            let is_ours = unsafe { known.as_ref() }.is_some_and(|known| !ForkWord(known).is_child());
            (!is_ours).then_some(std::ptr::from_ref(word.0).cast_mut())
        };
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, replace);
    }
}

#[cfg(target_os = "linux")]
fn map_fork_word() -> Option<&'static AtomicU32> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh anonymous mapping touches no memory that exists.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), page_bytes(), protection, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the page was just mapped with this length and belongs to nobody else; where the kernel
    // does not know the advice, a fork is simply not noticed.
    unsafe { libc::madvise(page, page_bytes(), libc::MADV_WIPEONFORK) };
    // SAFETY: the page is never unmapped, is aligned, zero-initialised, and used as an atomic only.
    Some(unsafe { &*page.cast::<AtomicU32>() })
}

#[cfg(not(target_os = "linux"))]
fn map_fork_word() -> Option<&'static AtomicU32> {
    None
}

/// Nanoseconds on a clock that goes by the system's tick, some milliseconds: read in a few nanoseconds, where a precise one
/// takes twenty or more.
#[cfg(all(target_os = "linux", not(loom)))]
pub(crate) fn coarse_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: clock_gettime writes the timespec that it is given, and nothing else.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(not(any(target_os = "linux", loom)))]
pub(crate) fn coarse_ns() -> u64 {
    static BORN: OnceLock<crate::sync::Instant> = OnceLock::new();
    BORN.get_or_init(crate::sync::Instant::now).elapsed().as_nanos() as u64
}

/// No time passes in a model.
#[cfg(loom)]
pub(crate) fn coarse_ns() -> u64 {
    0
}

/// Bytes of a cache line, where it is known.
const LINE_BYTES: usize = 64;

/// Fetches the start of a value, three cache lines at most, to be written soon; waits for nothing.
#[inline]
pub(crate) fn prefetch<T>(value: &T) {
    let start = std::ptr::from_ref(value).cast::<i8>();
    let lines = size_of::<T>().div_ceil(LINE_BYTES).min(3);
    for line in 0..lines {
        prefetch_line(start.wrapping_add(line * LINE_BYTES));
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn prefetch_line(address: *const i8) {
    use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
    // SAFETY: a prefetch is a hint that touches no memory and cannot fault, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_ET0>(address) };
}

#[cfg(not(target_arch = "x86_64"))]
fn prefetch_line(_: *const i8) {}

thread_local! {
    /// Set once by [`tune_background_thread`].
    static IS_BACKGROUND: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Whether the calling thread is one of the pool's own.
pub(crate) fn is_background_thread() -> bool {
    IS_BACKGROUND.get()
}

/// Makes short naps short, and keeps a woken background thread from running on its waker's core.
///
/// A timed sleep of 5 us takes 63 us with the default timer slack. With the default policy a woken
/// cleaner may preempt the thread that dropped a buffer, and do the zeroing in its time slice;
/// `SCHED_BATCH` never preempts on wake-up.
#[cfg(all(target_os = "linux", not(loom)))]
pub(crate) fn tune_background_thread() {
    IS_BACKGROUND.set(true);
    // SAFETY: PR_SET_TIMERSLACK sets a number of the calling thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong, 0, 0, 0) };
    // SAFETY: all-zero is a valid sched_param: SCHED_BATCH demands priority 0.
    let parameter: libc::sched_param = unsafe { std::mem::zeroed() };
    // SAFETY: 0 is the calling thread, and the parameter outlives the call; a refusal is harmless.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &parameter) };
}

/// In a model all threads are one to the system, so none is marked.
#[cfg(loom)]
pub(crate) fn tune_background_thread() {}

#[cfg(not(any(target_os = "linux", loom)))]
pub(crate) fn tune_background_thread() {
    IS_BACKGROUND.set(true);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_size_is_a_power_of_two() {
        assert!(page_bytes().is_power_of_two() && page_bytes() >= 4096);
        assert_eq!(page_bytes(), asked_page_bytes(), "what is taken for known is what the system says");
    }

    #[test]
    #[cfg(not(loom))]
    fn the_coarse_clock_goes_as_fast_as_the_precise_one() {
        let (coarse, precise) = (coarse_ns(), std::time::Instant::now());
        while coarse_ns() == coarse {
            assert!(precise.elapsed().as_secs() < 10, "it stands still");
            std::hint::spin_loop();
        }
        let moved_ns = coarse_ns() - coarse;
        // It may have been behind by a tick at the start, of at most 10 ms.
        assert!(moved_ns <= precise.elapsed().as_nanos() as u64 + 20_000_000, "{moved_ns} ns");
    }

    #[test]
    fn the_parent_is_not_a_child() {
        assert!(!ForkWord::of_this_process().is_child());
        let mark = ProcessMark::new();
        assert!(!mark.is_inherited());
        mark.set();
        assert!(!mark.is_inherited());
    }
}
