//! Which addresses are page-locked: a process-wide record of every registration that passes through this
//! library, of all pools, all [`pin`](crate::pin)ned memory and all drivers alike.
//!
//! Pinning a buffer changes what a copy from it *means*: an asynchronous copy from pageable memory has read
//! its source when the call returns, one from page-locked memory has not. Code that copies from memory that
//! others made can ask here which of the two it has.
//!
//! ```
//! use pinpool::regions::{self, Coverage, ExternalRegion};
//!
//! let bytes = vec![0u8; 8192];
//! assert_eq!(regions::covering(&bytes), Coverage::None);
//!
//! // Another library page-locked the first half; from now on that is known.
//! let noted = ExternalRegion::note(bytes.as_ptr(), 4096);
//! assert!(regions::is_pinned(bytes.as_ptr()));
//! assert_eq!(regions::covering(&bytes[..4096]), Coverage::Whole);
//! assert_eq!(regions::covering(&bytes), Coverage::Part);
//!
//! drop(noted);
//! assert!(!regions::is_pinned(bytes.as_ptr()));
//! ```
//!
//! # What the answers are worth
//!
//! A region is recorded *before* the driver is asked to register it, and forgotten *after* the driver has
//! unregistered it and before its memory can be used for anything else. So at every moment the record holds
//! at least what is registered: in between the answer is "page-locked" for memory that is not, which costs
//! somebody a synchronisation, and never the other way round. A region whose unregistration failed stays
//! recorded, because its memory stays registered (and is leaked).
//!
//! The record is this library's own. [`pin::driver_says_page_locked`](crate::pin::driver_says_page_locked)
//! asks the driver instead.
//!
//! In a forked child every answer is no: the registrations belong to the parent.
//!
//! # What a look-up costs
//!
//! It stands on copy paths, so it waits for nobody: there are 16 copies of the record, each behind a lock of
//! its own on cache lines of its own, and a thread reads the copy that is its own (from the 17th thread on
//! it shares one, which costs a cache line that moves, not a wait). Whoever registers, which takes
//! microseconds to seconds in the driver, writes all 16, one after the other; a look-up that finds its own
//! copy being written reads the one before it, which is written already.
//!
//! With nothing page-locked a look-up is one load. Measured with `cargo bench --bench regions` on two cores of
//! a shared virtual machine; among N means that N regions are recorded:
//!
//! | nanoseconds | none | among 1 | among 1 000 | among 16 384 |
//! |---|---|---|---|---|
//! | a look-up | 3 | 10 | 21 | 94 |
//! | a look-up, two threads at once | | 21 | 23 | 99 |
//! | recording a region and forgetting it | | 600 | 890 | 930 |
//!
//! The limit: whoever registers waits for a thread that lost its processor in the middle of a look-up.

#[cfg(test)]
mod tests;

use crate::os::ProcessMark;
use crate::sync::{AtomicUsize, Mutex, Ordering, RwLock, fixed, process_wide};
use std::cell::Cell;
use std::collections::BTreeMap;

/// How much of a slice is page-locked, as far as this library knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Coverage {
    /// No byte of it, or it is empty.
    None,
    /// Some bytes of it, or all of them but in several regions: the driver refuses an asynchronous copy
    /// that crosses from one registration into another, or out of one.
    Part,
    /// All of it, inside one region.
    Whole,
}

/// Whether the byte at `ptr` lies in a recorded region.
pub fn is_pinned<T>(ptr: *const T) -> bool {
    let address = ptr as usize;
    read(|regions| regions.coverage(address, address.saturating_add(1)) != Coverage::None).unwrap_or(false)
}

/// How much of `bytes` lies in recorded regions.
pub fn covering(bytes: &[u8]) -> Coverage {
    let start = bytes.as_ptr() as usize;
    read(|regions| regions.coverage(start, start + bytes.len())).unwrap_or(Coverage::None)
}

/// A part of a slice that lies inside one region, or in none.
#[cfg(feature = "cudarc")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Bytes of the slice.
    pub(crate) range: std::ops::Range<usize>,
    pub(crate) pinned: bool,
}

/// Cuts a slice at the edges of regions, so that no piece crosses one.
#[cfg(feature = "cudarc")]
pub(crate) fn pieces(bytes: &[u8]) -> smallvec::SmallVec<[Piece; 1]> {
    let start = bytes.as_ptr() as usize;
    let end = start + bytes.len();
    let whole = || std::iter::once(Piece { range: 0..bytes.len(), pinned: false }).collect();
    read(|regions| {
        let edges = regions.edges_within(start, end);
        let piece = |pair: &[usize]| Piece {
            range: pair[0] - start..pair[1] - start,
            pinned: regions.coverage(pair[0], pair[1]) != Coverage::None,
        };
        edges.windows(2).map(piece).collect()
    })
    .unwrap_or_else(whole)
}

/// How many regions are recorded now; several with one base are one.
pub fn live_count() -> usize {
    read(Regions::count).unwrap_or(0)
}

/// Memory that somebody page-locked by another route, recorded for as long as this value lives.
///
/// It may overlap other regions, and the same memory may be noted several times: the record holds what any
/// note that still lives says. Noting pins nothing, and memory that is wrongly noted is only copied more
/// carefully than it need be.
#[derive(Debug)]
#[must_use = "the region is forgotten when this is dropped"]
pub struct ExternalRegion {
    token: Token,
}

impl ExternalRegion {
    /// Records `len` bytes from `ptr` on. Nothing is read or written there. Zero bytes are no region.
    pub fn note(ptr: *const u8, len: usize) -> Self {
        Self { token: note(ptr as usize, len) }
    }
}

impl Drop for ExternalRegion {
    fn drop(&mut self) {
        forget(self.token);
    }
}

/// Names one recorded region; ids are never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token {
    base: usize,
    /// 0 names nothing: an empty region, or one that was noted in a forked child.
    id: u64,
}

impl Token {
    /// What [`id`](Self::id) and the base name together.
    pub(crate) fn of(base: usize, id: u64) -> Self {
        Self { base, id }
    }

    /// The number that names the region beside its base.
    pub(crate) fn id(self) -> u64 {
        self.id
    }
}

/// Records a region; called before the driver registers it.
pub(crate) fn note(base: usize, bytes: usize) -> Token {
    // A child must not touch the locks, which another thread of its parent may have held.
    if bytes == 0 || RECORDED_IN.is_inherited() {
        return Token { base, id: 0 };
    }
    RECORDED_IN.set();
    static NEXT_ID: fixed::AtomicU64 = fixed::AtomicU64::new(1);
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    RECORD.note(Region { base, end: base.saturating_add(bytes), id });
    Token { base, id }
}

/// Forgets a region; called once the driver has unregistered it, or has refused to register it.
pub(crate) fn forget(token: Token) {
    if token.id == 0 || RECORDED_IN.is_inherited() {
        return;
    }
    RECORD.forget(token);
}

process_wide! {
    static RECORD: Record = Record::new();
}

/// A model has two: a reader's own, and the one that it goes on to.
const COPY_COUNT: usize = if cfg!(loom) { 2 } else { 16 };

/// The copies of the record: a reader wants one, a writer all of them, in order.
struct Record {
    copies: [OneCopy; COPY_COUNT],
    writer: Mutex<()>,
    /// Regions that are in the record, or about to be: never less than there are in any copy.
    recorded: AtomicUsize,
}

/// Where the record is kept. A child of a process that recorded nothing keeps one of its own.
static RECORDED_IN: ProcessMark = ProcessMark::new();

#[repr(align(128))] // Two cache lines, since processors fetch them in pairs.
struct OneCopy {
    regions: RwLock<Regions>,
}

/// Looks at this thread's copy; `None` when nothing is recorded, or in a forked child.
#[inline]
fn read<R>(look: impl FnOnce(&Regions) -> R) -> Option<R> {
    if RECORD.is_empty() || RECORDED_IN.is_inherited() {
        return None;
    }
    Some(RECORD.read(copy_of_this_thread(), look))
}

impl Record {
    #[cfg(not(loom))]
    const fn new() -> Self {
        Self {
            copies: [const { OneCopy { regions: RwLock::new(Regions::new()) } }; COPY_COUNT],
            writer: Mutex::new(()),
            recorded: AtomicUsize::new(0),
        }
    }

    #[cfg(loom)]
    fn new() -> Self {
        let copy = || OneCopy { regions: RwLock::new(Regions::new()) };
        Self { copies: [copy(), copy()], writer: Mutex::new(()), recorded: AtomicUsize::new(0) }
    }

    fn note(&self, region: Region) {
        let _turn = self.writer.lock();
        self.recorded.fetch_add(1, Ordering::Release);
        for copy in &self.copies {
            copy.regions.write().insert(region);
        }
    }

    fn forget(&self, token: Token) {
        let _turn = self.writer.lock();
        for copy in &self.copies {
            copy.regions.write().remove(token);
        }
        self.recorded.fetch_sub(1, Ordering::Release);
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.recorded.load(Ordering::Acquire) == 0
    }

    /// Looks at one copy, the given one if it is not being written.
    #[inline]
    fn read<R>(&self, mut index: usize, look: impl FnOnce(&Regions) -> R) -> R {
        loop {
            // The writer has one copy at a time, and goes upwards: the next one down is free, and written.
            if let Some(regions) = self.copies[index].regions.try_read() {
                return look(&regions);
            }
            index = index.checked_sub(1).unwrap_or(COPY_COUNT - 1);
        }
    }
}

#[inline]
fn copy_of_this_thread() -> usize {
    if cfg!(loom) {
        return COPY_COUNT - 1; // The one that is written last.
    }
    const UNSET: usize = usize::MAX;
    thread_local! {
        static COPY: Cell<usize> = const { Cell::new(UNSET) };
    }
    static NEXT: fixed::AtomicUsize = fixed::AtomicUsize::new(0);
    COPY.with(|copy| {
        if copy.get() == UNSET {
            copy.set(NEXT.fetch_add(1, Ordering::Relaxed) % COPY_COUNT);
        }
        copy.get()
    })
}

#[derive(Debug, Clone, Copy)]
struct Region {
    base: usize,
    /// One past the last byte.
    end: usize,
    id: u64,
}

/// One copy of the record.
struct Regions {
    /// By base; no two of these overlap, as the driver sees to for what it registers.
    disjoint: BTreeMap<usize, Region>,
    /// What overlaps a region that was there before: notes of memory page-locked elsewhere, and memory
    /// that two drivers registered. Few, so they are looked through one by one.
    overlapping: Vec<Region>,
}

impl Regions {
    const fn new() -> Self {
        Self { disjoint: BTreeMap::new(), overlapping: Vec::new() }
    }

    fn insert(&mut self, region: Region) {
        match self.last_before(region.end) {
            Some(other) if other.end > region.base => self.overlapping.push(region),
            _ => drop(self.disjoint.insert(region.base, region)),
        }
    }

    fn remove(&mut self, token: Token) {
        if self.disjoint.get(&token.base).is_some_and(|region| region.id == token.id) {
            self.disjoint.remove(&token.base);
        } else {
            self.overlapping.retain(|region| region.id != token.id);
        }
    }

    /// The only disjoint region that can hold the byte before `end`.
    fn last_before(&self, end: usize) -> Option<Region> {
        self.disjoint.range(..end).next_back().map(|(_, region)| *region)
    }

    fn coverage(&self, start: usize, end: usize) -> Coverage {
        if start >= end {
            return Coverage::None;
        }
        let mut coverage = Coverage::None;
        for region in self.last_before(end).iter().chain(&self.overlapping) {
            if region.base <= start && end <= region.end {
                return Coverage::Whole;
            }
            if region.base < end && start < region.end {
                coverage = Coverage::Part;
            }
        }
        coverage
    }

    /// `start`, every base and end strictly between, and `end`; sorted, each once.
    #[cfg(feature = "cudarc")]
    fn edges_within(&self, start: usize, end: usize) -> Vec<usize> {
        let below = self.disjoint.range(..end).rev().take_while(|(_, region)| region.end > start);
        let regions = below.map(|(_, region)| region).chain(&self.overlapping);
        let inside =
            regions.flat_map(|region| [region.base, region.end]).filter(|edge| start < *edge && *edge < end);
        let mut edges: Vec<usize> = [start, end].into_iter().chain(inside).collect();
        edges.sort_unstable();
        edges.dedup();
        edges
    }

    fn count(&self) -> usize {
        let others = &self.overlapping;
        let is_new = |(index, region): (usize, &Region)| {
            let seen_before = others[..index].iter().any(|other| other.base == region.base);
            !seen_before && !self.disjoint.contains_key(&region.base)
        };
        self.disjoint.len() + others.iter().enumerate().filter(|one| is_new(*one)).count()
    }
}
