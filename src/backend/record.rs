//! The record of live allocations: bounded, lock-free, and where a second release is found out.

use crate::sync::{AtomicU64, AtomicUsize, Ordering};
use std::fmt;

/// Live allocations that a backend's record holds unless its builder says otherwise. A driver stops near 65 000
/// registrations; the table takes 24 bytes for each of twice as many slots.
pub(super) const DEFAULT_CAPACITY: usize = 16_384;

/// A record larger than this would take gibibytes of table.
const CAPACITY_MAX: usize = 1 << 24;

/// States of a slot's key. Others are a base, moved by [`BASES_FROM`] past these.
const EMPTY: usize = 0;
const DELETED: usize = 1;
const BUSY: usize = 2;
const BASES_FROM: usize = 2;

/// A bounded record of live allocations, by base address. No operation takes a lock or allocates.
///
/// It is what keeps a release honest: of any number of threads that remove one base, one succeeds. Useful by
/// itself, for an allocator of one's own:
///
/// ```
/// use pinpool::backend::AllocationRecord;
///
/// let record = AllocationRecord::new(256);
/// record.insert(0x7f00_0000_0000, 4096, 1)?;
/// assert_eq!(record.remove(0x7f00_0000_0000).map(|found| found.bytes), Some(4096));
/// assert!(record.remove(0x7f00_0000_0000).is_none(), "given back twice");
/// # Ok::<(), pinpool::backend::RecordFull>(())
/// ```
///
/// An insertion and a removal look at one or two slots of a hash table that is at most half full. A base that is
/// not there costs a look at slots up to the first that was never used, in a long-lived record at all of them.
pub struct AllocationRecord {
    slots: Box<[Slot]>,
    capacity: usize,
    /// Entries, and those about to be inserted; never more than the capacity.
    live: AtomicUsize,
    live_bytes: AtomicUsize,
}

/// A slot goes from empty to busy to a base, from there to busy and back, or on to deleted; never to empty again,
/// so that a search may end at an empty one.
#[derive(Default)]
struct Slot {
    key: AtomicUsize,
    bytes: AtomicUsize,
    tag: AtomicU64,
}

/// One live allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Allocation {
    /// The address of its first byte.
    pub base: usize,
    /// Its size.
    pub bytes: usize,
    /// Whatever was inserted with it.
    pub tag: u64,
}

/// There is no room in a record for one more allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordFull {
    /// How many the record holds.
    pub capacity: usize,
}

impl fmt::Display for RecordFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the record of live allocations is full: it holds {}", self.capacity)
    }
}

impl std::error::Error for RecordFull {}

impl AllocationRecord {
    /// A record for at most `capacity` live allocations, 2^24 at the most; it takes 24 bytes for each of twice as
    /// many slots.
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.min(CAPACITY_MAX);
        let slots = (capacity.max(1) * 2).next_power_of_two();
        Self {
            slots: (0..slots).map(|_| Slot::default()).collect(),
            capacity,
            live: AtomicUsize::new(0),
            live_bytes: AtomicUsize::new(0),
        }
    }

    /// How many live allocations it holds at most.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Live allocations now.
    pub fn len(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of them.
    pub fn bytes(&self) -> usize {
        self.live_bytes.load(Ordering::Relaxed)
    }

    /// Records an allocation, with a number of the caller's.
    ///
    /// A base that is recorded already is recorded twice, and can be removed twice: no two allocations that live
    /// at one time have one base, so whoever allocates never does that.
    ///
    /// # Errors
    ///
    /// [`RecordFull`], and nothing is recorded. (So are the last two addresses there are, which no memory has.)
    pub fn insert(&self, base: usize, bytes: usize, tag: u64) -> Result<(), RecordFull> {
        let full = RecordFull { capacity: self.capacity };
        let key = base.checked_add(BASES_FROM).filter(|key| *key > BUSY).ok_or(full)?;
        let one_more = |live: usize| (live < self.capacity).then_some(live + 1);
        self.live.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).map_err(|_| full)?;
        // At most half of the slots are taken, so this comes to a free one.
        let mut index = self.home_of(base);
        loop {
            let slot = &self.slots[index];
            let found = slot.key.load(Ordering::Relaxed);
            let is_free = found == EMPTY || found == DELETED;
            if is_free && slot.key.compare_exchange(found, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                slot.bytes.store(bytes, Ordering::Relaxed);
                slot.tag.store(tag, Ordering::Relaxed);
                slot.key.store(key, Ordering::Release);
                self.live_bytes.fetch_add(bytes, Ordering::Relaxed);
                return Ok(());
            }
            index = (index + 1) & (self.slots.len() - 1);
        }
    }

    /// Removes the allocation of this base; `None` where there is none, or another thread was faster.
    pub fn remove(&self, base: usize) -> Option<Allocation> {
        let claim = self.claim(base)?;
        let allocation = claim.allocation();
        claim.remove();
        Some(allocation)
    }

    /// Takes the allocation of this base out of everybody else's reach, and keeps its place meanwhile: for a
    /// release that may fail. Of several threads that claim one base, one succeeds.
    pub fn claim(&self, base: usize) -> Option<Claim<'_>> {
        let key = base.checked_add(BASES_FROM).filter(|key| *key > BUSY)?;
        let slot = self.search(base, |slot| {
            // Acquires what `insert` wrote before it published the key.
            slot.key.compare_exchange(key, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })?;
        let (bytes, tag) = (slot.bytes.load(Ordering::Relaxed), slot.tag.load(Ordering::Relaxed));
        Some(Claim { record: self, slot, allocation: Allocation { base, bytes, tag } })
    }

    /// The allocation of this base.
    pub fn find(&self, base: usize) -> Option<Allocation> {
        let slot = self.search(base, |_| true)?;
        slot.read().filter(|allocation| allocation.base == base)
    }

    /// The live allocation that holds this address, wherever in it that lies; looks at every slot.
    pub fn find_containing(&self, address: usize) -> Option<Allocation> {
        let mut all = self.slots.iter().filter_map(Slot::read);
        all.find(|one| (one.base..one.base.saturating_add(one.bytes)).contains(&address))
    }

    /// All live allocations, in no order; one that is inserted or removed meanwhile may be among them or not.
    pub fn allocations(&self) -> Vec<Allocation> {
        self.slots.iter().filter_map(Slot::read).collect()
    }

    /// The slot of a base for which `is_it` agrees, from its home to the first that was never used.
    fn search(&self, base: usize, is_it: impl Fn(&Slot) -> bool) -> Option<&Slot> {
        let key = base.checked_add(BASES_FROM)?;
        let home = self.home_of(base);
        let slots = (0..self.slots.len()).map(|step| &self.slots[(home + step) & (self.slots.len() - 1)]);
        for slot in slots {
            match slot.key.load(Ordering::Acquire) {
                EMPTY => return None,
                found if found == key && is_it(slot) => return Some(slot),
                _ => {}
            }
        }
        None
    }

    /// Addresses differ in their middle bits, so those are spread over the whole table (Fibonacci hashing).
    fn home_of(&self, base: usize) -> usize {
        let spread = (base as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let bits = self.slots.len().trailing_zeros();
        (spread >> (64 - bits.max(1))) as usize & (self.slots.len() - 1)
    }
}

impl Slot {
    fn read(&self) -> Option<Allocation> {
        let key = self.key.load(Ordering::Acquire);
        let base = key.checked_sub(BASES_FROM).filter(|_| key > BUSY)?;
        let (bytes, tag) = (self.bytes.load(Ordering::Relaxed), self.tag.load(Ordering::Relaxed));
        crate::sync::fence(Ordering::Acquire);
        // Unchanged, so these were its own.
        (self.key.load(Ordering::Relaxed) == key).then_some(Allocation { base, bytes, tag })
    }
}

impl fmt::Debug for AllocationRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("AllocationRecord");
        shown.field("len", &self.len()).field("bytes", &self.bytes()).field("capacity", &self.capacity);
        shown.finish_non_exhaustive()
    }
}

/// An allocation that one thread alone holds for a moment; dropped, it is live again.
#[must_use = "the allocation is live again when this is dropped"]
pub struct Claim<'a> {
    record: &'a AllocationRecord,
    slot: &'a Slot,
    allocation: Allocation,
}

impl Claim<'_> {
    /// What is claimed.
    pub fn allocation(&self) -> Allocation {
        self.allocation
    }

    /// It is no longer live.
    pub fn remove(self) {
        self.slot.key.store(DELETED, Ordering::Release);
        self.record.live_bytes.fetch_sub(self.allocation.bytes, Ordering::Relaxed);
        self.record.live.fetch_sub(1, Ordering::Relaxed);
        std::mem::forget(self);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.slot.key.store(self.allocation.base + BASES_FROM, Ordering::Release);
    }
}

impl fmt::Debug for Claim<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Claim").field(&self.allocation).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn it_holds_exactly_as_many_as_it_says() {
        for capacity in [0, 1, 2, 3, 256, 1000] {
            let record = AllocationRecord::new(capacity);
            for index in 0..capacity {
                record.insert((index + 1) * 4096, 10, 0).unwrap();
            }
            let refused = record.insert(4096 * 4096, 10, 0);
            assert_eq!(refused, Err(RecordFull { capacity }));
            assert_eq!((record.len(), record.bytes()), (capacity, capacity * 10));
            if capacity > 0 {
                assert!(record.remove(4096).is_some());
                assert_eq!(record.insert(4096 * 4096, 10, 0), Ok(()), "a place that is free again is used");
            }
        }
    }

    #[test]
    fn addresses_that_no_memory_has_are_refused_and_not_found() {
        let record = AllocationRecord::new(4);
        for base in [0, usize::MAX, usize::MAX - 1] {
            assert!(record.insert(base, 1, 0).is_err() && record.remove(base).is_none());
            assert!(record.find(base).is_none() && record.claim(base).is_none());
        }
        assert!(record.is_empty());
        record.insert(1, 1, 0).unwrap();
        assert!(record.find(1).is_some() && record.find(2).is_none());
    }

    #[test]
    fn a_claim_is_exclusive_and_given_up_it_is_live_again() {
        let record = AllocationRecord::new(4);
        record.insert(4096, 100, 7).unwrap();
        let claim = record.claim(4096).unwrap();
        assert!(record.claim(4096).is_none() && record.remove(4096).is_none() && record.find(4096).is_none());
        assert_eq!(record.len(), 1, "its place is kept");
        drop(claim);
        assert_eq!(record.find(4096), Some(Allocation { base: 4096, bytes: 100, tag: 7 }));
        record.claim(4096).unwrap().remove();
        assert!(record.is_empty() && record.find(4096).is_none() && record.allocations().is_empty());
    }

    #[test]
    fn random_sequences_agree_with_a_plain_map() {
        let seed = 20_261_129_u64;
        let mut random = seed;
        let mut next = move || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize
        };
        let record = AllocationRecord::new(100);
        let mut plain: BTreeMap<usize, Allocation> = BTreeMap::new();
        for step in 0..20_000_u64 {
            let base = (1 + next() % 200) << 12;
            if next() % 2 == 0 && !plain.contains_key(&base) {
                let inserted = record.insert(base, 1 + next() % 4096, step);
                assert_eq!(inserted.is_ok(), plain.len() < 100, "seed {seed}, step {step}");
                if inserted.is_ok() {
                    plain.insert(base, record.find(base).unwrap());
                }
            } else {
                assert_eq!(record.remove(base), plain.remove(&base), "seed {seed}, step {step}");
            }
            let inside = base + 100;
            let holds = plain.get(&base).filter(|one| one.bytes > 100).copied();
            assert_eq!(record.find_containing(inside), holds, "seed {seed}, step {step}");
            assert_eq!((record.len(), record.find(base)), (plain.len(), plain.get(&base).copied()));
        }
        let mut all = record.allocations();
        all.sort_by_key(|one| one.base);
        assert_eq!(all, plain.into_values().collect::<Vec<_>>());
        assert_eq!(record.bytes(), all.iter().map(|one| one.bytes).sum::<usize>());
    }

    #[test]
    fn of_many_threads_that_remove_one_base_one_succeeds() {
        const THREADS: usize = 4;
        const ROUNDS: usize = 3000;
        let record = AllocationRecord::new(THREADS);
        let removed = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (record, removed) = (&record, &removed);
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let base = (thread * ROUNDS + round + 1) << 8;
                        record.insert(base, 256, base as u64).unwrap();
                        // Everybody tries to remove everybody's, and whoever does finds the right entry.
                        for other in 0..THREADS {
                            let base = (other * ROUNDS + round + 1) << 8;
                            if let Some(found) = record.remove(base) {
                                assert_eq!((found.base, found.bytes, found.tag), (base, 256, base as u64));
                                removed.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                        if record.remove(base).is_some() {
                            removed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(removed.load(Ordering::Relaxed), THREADS * ROUNDS);
        assert!(record.is_empty() && record.bytes() == 0);
    }
}
