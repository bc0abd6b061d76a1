//! The shelves at random: against a naive model, and from several threads at once.

use super::*;
use crate::size_class::{Classes, SizeClasses};
use crate::sync::{AtomicUsize, Ordering, thread};
use std::collections::VecDeque;

/// Splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

const PAGE: usize = 4096;

/// Steps of a page between eight pages and sixteen, and powers of two around them.
fn classes() -> Classes {
    Classes::new(SizeClasses::Steps { per_doubling: 8, from_bytes: PAGE })
}

fn block_of(class: SizeClass) -> Ready {
    let out = Out::fresh(Pages::map(class.bytes()).expect("a few pages"), class);
    out.never_handed_out().into_ready(&Driver::host_only()).expect("nothing is dirty")
}

fn free(block: Ready) {
    block.retire().release(&Driver::host_only());
}

/// What the shelves promise, without room that stays with classes and without locks.
#[derive(Default)]
struct Model {
    cap_bytes: usize,
    /// Smallest first; what lay longest in front, by its address and when it was shelved.
    shelves: Vec<(usize, VecDeque<(usize, Duration)>)>,
    evicted: Vec<usize>,
}

impl Model {
    fn pooled_bytes(&self) -> usize {
        self.shelves.iter().map(|(bytes, blocks)| bytes * blocks.len()).sum()
    }

    fn evict_to(&mut self, bytes_max: usize, lowest: usize) -> bool {
        while self.pooled_bytes() > bytes_max {
            let largest = self.shelves[lowest..].iter_mut().rev().find(|(_, blocks)| !blocks.is_empty());
            let Some((address, _)) = largest.and_then(|(_, blocks)| blocks.pop_front()) else { return false };
            self.evicted.push(address);
        }
        true
    }

    fn push(&mut self, index: usize, address: usize, now: Duration) -> bool {
        let Some(room_bytes) = self.cap_bytes.checked_sub(self.shelves[index].0) else { return false };
        let fits = self.evict_to(room_bytes, index);
        if fits {
            self.shelves[index].1.push_back((address, now));
        }
        fits
    }

    fn age_out(&mut self, max_age: Duration, now: Duration) {
        for (_, blocks) in &mut self.shelves {
            let old = blocks.iter().filter(|(_, since)| now - *since >= max_age).count();
            self.evicted.extend(blocks.drain(..old.div_ceil(8)).map(|(address, _)| address));
        }
    }
}

const HOUR: Duration = Duration::from_secs(3600);

#[test]
#[cfg(feature = "sim")]
fn they_do_what_a_naive_model_does() {
    let seed = std::env::var("PINPOOL_SHELF_SEED").ok().and_then(|seed| seed.parse().ok());
    for seed in seed.map_or(0..12, |seed: u64| seed..seed + 1) {
        println!("PINPOOL_SHELF_SEED={seed}");
        script(Random(seed));
    }
}

#[cfg(feature = "sim")]
fn script(mut random: Random) {
    let owner = Arc::new(());
    let (counts, clock) = (Arc::new(Counts::new(classes())), Arc::new(Clock::default()));
    let mut all: Vec<_> = (1..24).map(|pages| classes().of(pages * PAGE).unwrap().0).collect();
    all.dedup();
    let most_bytes = 60 * PAGE;
    let shelf = Shelf::new(most_bytes, counts, clock.clone(), Arc::downgrade(&owner));
    let shelves = all.iter().map(|class| (class.bytes(), VecDeque::new())).collect();
    let mut model = Model { cap_bytes: most_bytes, shelves, evicted: Vec::new() };
    let (mut out, mut evicted, mut now) = (Vec::new(), Vec::new(), Duration::ZERO);
    for step in 0..3_000 {
        clock.tick();
        let index = if random.below(3) == 0 { random.below(all.len()) } else { random.below(4) };
        let class = all[index];
        match random.below(24) {
            0..9 => {
                let found = out.iter().position(|block: &Ready| block.class() == class);
                let block = found.map_or_else(|| block_of(class), |place| out.swap_remove(place));
                let address = block.address();
                let kept = match shelf.push(block, owner.clone(), |block| evicted.push(block)) {
                    Placed::Kept => true,
                    Placed::Refused(block) => {
                        free(block);
                        false
                    }
                    Placed::Stranded(_) => panic!("nothing is registered"),
                };
                assert_eq!(kept, model.push(index, address, now), "step {step}: kept");
            }
            9..19 => {
                let popped = shelf.pop(class).map(|(block, _)| block);
                let expected = model.shelves[index].1.pop_back().map(|(address, _)| address);
                assert_eq!(popped.as_ref().map(Ready::address), expected, "step {step}: popped");
                out.extend(popped);
            }
            19 => {
                let cap_bytes = [0, random.below(most_bytes), most_bytes, usize::MAX][random.below(4)];
                shelf.set_cap(cap_bytes, |block| evicted.push(block));
                model.evict_to(cap_bytes, 0);
                model.cap_bytes = cap_bytes;
            }
            20 => {
                let bytes = random.below(most_bytes);
                shelf.trim_to(bytes, |block| evicted.push(block));
                model.evict_to(bytes, 0);
            }
            21 => {
                // Halves, because real time passes too.
                let max_age = HOUR * random.below(30) as u32 + HOUR / 2;
                shelf.age_out(|_| max_age, |block| evicted.push(block));
                model.age_out(max_age, now);
            }
            22 => {
                let time = HOUR * random.below(10) as u32;
                clock.skip(time);
                now += time;
            }
            _ => out.drain(..out.len() / 2).for_each(free),
        }
        let addresses: Vec<_> = evicted.iter().map(Ready::address).collect();
        assert_eq!(addresses, model.evicted, "step {step}: evicted, in this order");
        evicted.drain(..).for_each(free);
        model.evicted.clear();
        let pooled = all.iter().map(|class| shelf.counts(*class).pooled);
        let expected = model.shelves.iter().map(|(_, blocks)| [blocks.len() as u64, 0]);
        assert!(pooled.eq(expected), "step {step}: the numbers of blocks");
        let blocks: usize = model.shelves.iter().map(|(_, blocks)| blocks.len()).sum();
        assert_eq!(Arc::strong_count(&owner) - 1, blocks, "step {step}: a reference for each block");
    }
    shelf.trim_to(0, |block| out.push(block));
    out.into_iter().for_each(free);
    assert_eq!(Arc::strong_count(&owner), 1);
}

/// Everybody at once, and one who alone says what the cap is: it is obeyed when the call has returned, and from then on.
#[test]
fn the_cap_is_obeyed_while_everybody_pushes_and_pops() {
    const MOST: usize = 40 * PAGE;
    let owner = Arc::new(());
    let (counts, clock) = (Arc::new(Counts::new(classes())), Arc::new(Clock::default()));
    let shelf = Shelf::new(MOST, counts, clock, Arc::downgrade(&owner));
    let all = [1, 2, 8, 9].map(|pages| classes().of(pages * PAGE).unwrap().0);
    let (made, freed, at_work) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(3));
    let free = |block: Ready| {
        freed.fetch_add(1, Ordering::Relaxed);
        free(block);
    };
    let pooled_bytes = || {
        let bytes = |class: &SizeClass| shelf.counts(*class).pooled[0] as usize * class.bytes();
        shelf.while_within_the_cap(|| all.iter().map(bytes).sum::<usize>())
    };
    let user = |seed: u64| {
        let mut random = Random(seed);
        let mut held: Vec<Ready> = Vec::new();
        for _ in 0..6_000 {
            let class = all[random.below(all.len())];
            match random.below(5) {
                0 | 1 => held.extend(shelf.pop(class).map(|(block, _)| block)),
                2 if held.len() < 8 => {
                    made.fetch_add(1, Ordering::Relaxed);
                    held.push(block_of(class));
                }
                _ => {
                    let Some(block) = held.pop() else { continue };
                    let placed = shelf.push(block, owner.clone(), free);
                    if let Placed::Refused(block) | Placed::Stranded(block) = placed {
                        free(block);
                    }
                }
            }
        }
        held.into_iter().for_each(free);
        at_work.fetch_sub(1, Ordering::SeqCst);
    };
    let user = &user;
    thread::scope(|scope| {
        for seed in 1..4 {
            scope.spawn(move || user(seed));
        }
        scope.spawn(|| {
            let mut random = Random(7);
            while at_work.load(Ordering::SeqCst) > 0 {
                shelf.trim_to(random.below(2 * MOST), free);
                shelf.evict_pinned_of_others(all[random.below(4)], MOST, Duration::ZERO, free);
                shelf.age_out(|_| Duration::from_millis(10), free);
                // Whoever reads both: it has been the same all the time, since no two are alike.
                let (before_bytes, found_bytes, after_bytes) =
                    (shelf.cap_bytes(), pooled_bytes(), shelf.cap_bytes());
                let obeys = before_bytes != after_bytes || found_bytes <= after_bytes;
                assert!(obeys, "{found_bytes} bytes are pooled, and the cap is {after_bytes}");
            }
        });
        let mut random = Random(8);
        while at_work.load(Ordering::SeqCst) > 0 {
            let cap_bytes = random.below(MOST);
            shelf.set_cap(cap_bytes, free);
            for _ in 0..random.below(50) {
                let found_bytes = pooled_bytes();
                assert!(
                    found_bytes <= cap_bytes,
                    "{found_bytes} bytes are pooled under a cap of {cap_bytes}"
                );
            }
        }
    });
    shelf.set_cap(0, free);
    assert_eq!((made.into_inner(), pooled_bytes()), (freed.load(Ordering::Relaxed), 0), "a block is lost");
    assert_eq!(Arc::strong_count(&owner), 1, "a reference to the owner is lost");
}
