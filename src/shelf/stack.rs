//! The blocks of one class in the order in which they were shelved; the last few lie beside the lock.
//!
//! A cold take pays for every cache line that it has to wait for. So the top of the stack is in the line of the lock
//! itself, and only a taker that comes several times in a row goes to the queue behind it.

use crate::block::Ready;
use crate::clock::Tick;
use crate::sync::Mutex;
use std::collections::VecDeque;

/// As many as fit into the line.
const TOP: usize = 3;

/// A block with what a hit must know of it, so that the block itself is not touched before its user does.
#[derive(Debug)]
pub(super) struct Shelved {
    pub(super) block: Ready,
    pub(super) pinned: bool,
    pub(super) since: Tick,
}

const _: () = assert!(size_of::<Shelved>() == 16, "the moment lies where padding would");

/// Laid out as written: what a pop touches comes first.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Stack {
    /// Filled from the start; the last filled one is the top.
    top: [Option<Ready>; TOP],
    filled: u8,
    /// Bit `n`: `top[n]` is page-locked.
    pinned: u8,
    since: [Tick; TOP],
    /// What was shelved before; its front lay longest. Always has room for the top.
    rest: VecDeque<Shelved>,
}

impl Stack {
    /// The block that was shelved last, and whether it is page-locked.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<(Ready, bool)> {
        if self.filled == 0 {
            self.refill();
        }
        let place = self.filled.checked_sub(1)?;
        self.filled = place;
        let block = self.top[usize::from(place)].take()?;
        Some((block, self.pinned >> place & 1 != 0))
    }

    #[cold]
    fn refill(&mut self) {
        let moved = self.rest.len().min(TOP);
        for place in (0..moved).rev() {
            if let Some(Shelved { block, pinned, since }) = self.rest.pop_back() {
                self.put(place, block, pinned, since);
            }
        }
        self.filled = moved as u8;
    }

    // Small, and needed in two places: left to itself, the compiler makes a call of it in some builds and in others not.
    #[inline(always)]
    fn put(&mut self, place: usize, block: Ready, pinned: bool, since: Tick) {
        // Nothing is there. Said like this, because an assignment looks for what it has to drop.
        std::mem::forget(self.top[place].replace(block));
        self.pinned = self.pinned & !(1 << place) | u8::from(pinned) << place;
        self.since[place] = since;
    }

    /// How many blocks there are.
    #[inline]
    pub(super) fn len(&self) -> usize {
        usize::from(self.filled) + self.rest.len()
    }

    /// Appends. The queue has room for it, and for all that is here besides: [`reserve`] saw to that.
    #[inline]
    pub(super) fn push(&mut self, shelved: Shelved) {
        let Shelved { block, pinned, since } = shelved;
        debug_assert!(self.rest.capacity() > self.len(), "the queue would grow under the lock");
        if usize::from(self.filled) == TOP {
            self.settle();
        }
        self.put(usize::from(self.filled), block, pinned, since);
        self.filled += 1;
    }

    /// All blocks, those that lay longest first.
    pub(super) fn all(&mut self) -> &mut VecDeque<Shelved> {
        self.settle();
        &mut self.rest
    }

    /// Moves the top to the queue; the next pop gets it back.
    fn settle(&mut self) {
        for place in 0..usize::from(self.filled) {
            if let Some(block) = self.top[place].take() {
                let pinned = self.pinned >> place & 1 != 0;
                self.rest.push_back(Shelved { block, pinned, since: self.since[place] });
            }
        }
        self.filled = 0;
    }
}

/// Makes room for so many blocks. The queue grows outside the lock, since takers want it; nobody else makes it grow
/// meanwhile.
pub(super) fn reserve(lock: &Mutex<Stack>, blocks: usize) {
    if lock.lock().rest.capacity() >= blocks {
        return;
    }
    let mut wider = VecDeque::with_capacity((2 * blocks).max(16));
    let mut stack = lock.lock();
    wider.append(&mut stack.rest);
    std::mem::swap(&mut stack.rest, &mut wider);
    // The outgrown storage is freed after the lock.
    drop(stack);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::block::Out;
    use crate::clock::Clock;
    use crate::driver::Driver;
    use crate::pages::Pages;
    use crate::size_class::SizeClass;

    fn ready() -> Ready {
        let class = SizeClass::of(1).unwrap();
        let out = Out::fresh(Pages::map(class.bytes()).unwrap(), class);
        out.never_handed_out().into_ready(&Driver::host_only()).unwrap()
    }

    /// Against a plain list, with the sizes that go over the top and back, and the whole looked at in between.
    #[test]
    fn it_gives_what_a_plain_list_would() {
        let clock = Clock::default();
        let lock = Mutex::new(Stack::default());
        let mut list: Vec<(usize, bool)> = Vec::new();
        let mut random = 7u32;
        for step in 0..2_000u32 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let choice = random >> 28;
            if choice < 8 || (choice < 9 && list.len() < 3) {
                let (block, pinned) = (ready(), step % 3 == 0);
                let address = block.address();
                reserve(&lock, list.len() + 1);
                let capacity = lock.lock().rest.capacity();
                lock.lock().push(Shelved { block, pinned, since: clock.tick() });
                list.push((address, pinned));
                assert_eq!(lock.lock().rest.capacity(), capacity, "the queue grew under the lock");
            } else if choice < 15 {
                let popped = lock.lock().pop();
                assert_eq!(popped.as_ref().map(|(block, pinned)| (block.address(), *pinned)), list.pop());
                popped.map(|(block, _)| block.retire().release(&Driver::host_only()));
            } else {
                let mut stack = lock.lock();
                let all: Vec<_> = stack.all().iter().map(|one| (one.block.address(), one.pinned)).collect();
                assert_eq!(all, list);
            }
        }
        assert!(list.len() > TOP, "it grew: {}", list.len());
    }

    #[test]
    fn the_last_few_lie_beside_the_lock() {
        let (clock, lock) = (Clock::default(), Mutex::new(Stack::default()));
        for count in 1..=2 * TOP + 1 {
            reserve(&lock, count);
            let mut stack = lock.lock();
            stack.push(Shelved { block: ready(), pinned: false, since: clock.tick() });
            assert_eq!(usize::from(stack.filled), (count - 1) % TOP + 1, "of {count}");
            assert_eq!(usize::from(stack.filled) + stack.rest.len(), count);
        }
        let mut stack = lock.lock();
        for one in stack.all().drain(..) {
            one.block.retire().release(&Driver::host_only());
        }
    }
}
