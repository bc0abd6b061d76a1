//! Where returned blocks wait; the only hand-over between callers and the cleaner.
//!
//! A bounded crossbeam channel per class, so that a hand-over allocates nothing and a taker can look
//! for a block of *its* class; an unbounded one takes what overflows, so that nothing is ever lost.
//! `bell.rs` wakes the cleaner, but only when it sleeps without a timer.

use crate::size_class::{Classes, SizeClass};
use crate::sync::{AtomicU64, OnceLock, Ordering};
#[cfg(not(loom))]
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded, unbounded};
#[cfg(loom)]
use shim::{Receiver, Sender, TrySendError, bounded, unbounded};

/// Returned blocks of one class that wait without an allocation; more go to the overflow.
/// In a model the second one does.
const SLOTS_PER_CLASS: usize = if cfg!(loom) { 1 } else { 1024 };

/// Both ends of a channel; they live together, so neither is ever disconnected.
type Ends<T> = (Sender<T>, Receiver<T>);

/// Returned values by class, and the flags that say where to look.
///
/// Apart from its neighbours, because every drop writes the flags.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Inbox<T> {
    /// Bit `n`: something may wait in class `n`, or in one whose number is greater by 64, or twice that, and so on. The
    /// top bit: in the overflow too.
    arrivals: AtomicU64,
    classes: Box<[OnceLock<Ends<T>>]>,
    overflow: Ends<(SizeClass, T)>,
    all: Classes,
}

const OVERFLOW_BIT: u64 = 1 << 63;

#[cfg(any(test, loom))]
impl<T> Default for Inbox<T> {
    fn default() -> Self {
        Self::new(Classes::POWERS_OF_TWO)
    }
}

impl<T> Inbox<T> {
    pub(crate) fn new(all: Classes) -> Self {
        Self {
            classes: all.all().map(|_| OnceLock::new()).collect(),
            overflow: unbounded(),
            arrivals: AtomicU64::new(0),
            all,
        }
    }

    /// Leaves a value for the cleaner. Never blocks and never loses it.
    #[inline]
    pub(crate) fn push(&self, class: SizeClass, value: T) {
        let slot = &self.classes[class.index()];
        let (sender, _) = slot.get_or_init(|| bounded(SLOTS_PER_CLASS));
        match sender.try_send(value) {
            Ok(()) => self.flag_class(class),
            Err(refused) => self.push_over(class, refused.into_inner()),
        }
    }

    #[cold]
    #[inline(never)]
    fn push_over(&self, class: SizeClass, value: T) {
        // The receiver lives beside the sender, so a refusal is impossible.
        let _ = self.overflow.0.send((class, value));
        self.flag(OVERFLOW_BIT);
    }

    /// Says that the cleaner should look at the class, without a value.
    #[inline]
    pub(crate) fn flag_class(&self, class: SizeClass) {
        self.flag(1 << (class.index() % 64));
    }

    #[inline]
    fn flag(&self, bit: u64) {
        // Set every time, even when it is set already: one atomic operation is cheaper than the fence
        // that a look before it would need to be ordered after the push.
        self.arrivals.fetch_or(bit, Ordering::SeqCst);
    }

    /// One value of the class, for a taker; never blocks.
    pub(crate) fn pop(&self, class: SizeClass) -> Option<T> {
        self.classes[class.index()].get()?.1.try_recv().ok()
    }

    /// How many of the class wait, besides those in the overflow.
    pub(crate) fn waiting(&self, class: SizeClass) -> usize {
        self.classes[class.index()].get().map_or(0, |(_, receiver)| receiver.len())
    }

    /// Whether a look is worth while.
    pub(crate) fn has_arrivals(&self) -> bool {
        self.arrivals.load(Ordering::SeqCst) != 0
    }

    /// The classes in which something may wait; their flags are cleared, so look after this call.
    pub(crate) fn take_flags(&self) -> Flagged {
        let flags = self.arrivals.swap(0, Ordering::SeqCst);
        Flagged { flags, row: 0, row_left: flags, all: self.all, overflow: flags & OVERFLOW_BIT != 0 }
    }

    /// One value that found its class full.
    pub(crate) fn pop_overflow(&self) -> Option<T> {
        self.overflow.1.try_recv().ok().map(|(_, value)| value)
    }
}

/// The classes whose flag was set, smallest first.
pub(crate) struct Flagged {
    flags: u64,
    /// The number of the class that the lowest bit stands for, and the bits whose classes of that row are not given yet.
    row: usize,
    row_left: u64,
    all: Classes,
    /// Something may wait in the overflow too.
    pub(crate) overflow: bool,
}

impl Iterator for Flagged {
    type Item = SizeClass;

    fn next(&mut self) -> Option<SizeClass> {
        while self.row < self.all.count() {
            let index = self.row + self.row_left.trailing_zeros() as usize;
            if self.row_left != 0 && index < self.all.count() {
                self.row_left &= self.row_left - 1;
                return Some(self.all.at(index));
            }
            self.row += 64;
            self.row_left = self.flags;
        }
        None
    }
}

/// A queue to a background lane, bounded so that a hand-over allocates nothing.
#[derive(Debug)]
pub(crate) struct LaneQueue<T> {
    sender: Sender<T>,
    receiver: Receiver<T>,
}

impl<T> LaneQueue<T> {
    pub(crate) fn new(slots: usize) -> Self {
        let (sender, receiver) = bounded(slots);
        Self { sender, receiver }
    }

    /// Gives the value back when the queue is full.
    pub(crate) fn try_push(&self, value: T) -> Result<(), T> {
        self.sender.try_send(value).map_err(TrySendError::into_inner)
    }

    pub(crate) fn pop(&self) -> Option<T> {
        self.receiver.try_recv().ok()
    }

    /// Whether a value would find a slot, where nobody else pushes.
    pub(crate) fn has_room(&self) -> bool {
        !self.sender.is_full()
    }

    /// Waits for a value.
    pub(crate) fn pop_wait(&self) -> Option<T> {
        self.receiver.recv().ok()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.receiver.is_empty()
    }
}

/// crossbeam-channel cannot be modelled, so under loom its part is played by a queue behind a mutex, with the
/// same names and as much of their behaviour as is used here.
#[cfg(loom)]
mod shim {
    use crate::sync::{Arc, Condvar, Mutex};
    use std::collections::VecDeque;

    #[derive(Debug)]
    pub(super) struct Channel<T> {
        queue: Mutex<VecDeque<T>>,
        filled: Condvar,
    }

    #[derive(Debug)]
    pub(super) struct Sender<T>(Arc<Channel<T>>, usize);
    #[derive(Debug)]
    pub(super) struct Receiver<T>(Arc<Channel<T>>);
    #[derive(Debug)]
    pub(super) enum TrySendError<T> {
        Full(T),
        #[allow(dead_code)] // Both ends live together.
        Disconnected(T),
    }

    pub(super) fn bounded<T>(slots: usize) -> (Sender<T>, Receiver<T>) {
        let channel = Arc::new(Channel { queue: Mutex::new(VecDeque::new()), filled: Condvar::new() });
        (Sender(channel.clone(), slots), Receiver(channel))
    }

    pub(super) fn unbounded<T>() -> (Sender<T>, Receiver<T>) {
        bounded(usize::MAX)
    }

    impl<T> Sender<T> {
        pub(super) fn try_send(&self, value: T) -> Result<(), TrySendError<T>> {
            let mut queue = self.0.queue.lock();
            if queue.len() == self.1 {
                return Err(TrySendError::Full(value));
            }
            queue.push_back(value);
            drop(queue);
            self.0.filled.notify_all();
            Ok(())
        }

        pub(super) fn send(&self, value: T) -> Result<(), TrySendError<T>> {
            self.try_send(value)
        }

        pub(super) fn is_full(&self) -> bool {
            self.0.queue.lock().len() == self.1
        }
    }

    impl<T> Receiver<T> {
        pub(super) fn try_recv(&self) -> Result<T, ()> {
            self.0.queue.lock().pop_front().ok_or(())
        }

        pub(super) fn recv(&self) -> Result<T, ()> {
            let mut queue = self.0.queue.lock();
            loop {
                if let Some(value) = queue.pop_front() {
                    return Ok(value);
                }
                self.0.filled.wait(&mut queue);
            }
        }

        pub(super) fn is_empty(&self) -> bool {
            self.0.queue.lock().is_empty()
        }

        pub(super) fn len(&self) -> usize {
            self.0.queue.lock().len()
        }
    }

    impl<T> TrySendError<T> {
        pub(super) fn into_inner(self) -> T {
            match self {
                TrySendError::Full(value) | TrySendError::Disconnected(value) => value,
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::size_class::SizeClasses;

    #[test]
    fn an_overflowing_class_loses_nothing() {
        let inbox = Inbox::default();
        let class = SizeClass::of(1).unwrap();
        let count = SLOTS_PER_CLASS * 2 + 7;
        (0..count).for_each(|number| inbox.push(class, number));
        let flagged = inbox.take_flags();
        assert!(flagged.overflow);
        let mut seen: Vec<_> = std::iter::from_fn(|| inbox.pop_overflow()).collect();
        for class in flagged {
            seen.extend(std::iter::from_fn(|| inbox.pop(class)));
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..count).collect::<Vec<_>>());
        assert!(!inbox.has_arrivals());
    }

    #[test]
    fn the_overflow_is_flagged_when_something_is_there_and_only_then() {
        let inbox = Inbox::default();
        let class = SizeClass::of(1).unwrap();
        (0..SLOTS_PER_CLASS).for_each(|number| inbox.push(class, number));
        let mut flagged = inbox.take_flags();
        assert!(!flagged.overflow, "everything found a slot");
        assert_eq!((flagged.next(), flagged.next()), (Some(class), None));
        inbox.push(class, SLOTS_PER_CLASS);
        let mut flagged = inbox.take_flags();
        assert!(flagged.overflow && flagged.next().is_none(), "its class is full");
        assert_eq!(inbox.pop_overflow(), Some(SLOTS_PER_CLASS));
    }

    /// Several classes share a flag, one of them with the overflow, where there are more classes than flags.
    #[test]
    fn what_waits_in_any_of_many_classes_is_found_smallest_first() {
        let classes = Classes::new(SizeClasses::Steps { per_doubling: 8, from_bytes: 1 });
        assert!(classes.count() > 3 * 64, "{}", classes.count());
        let inbox = Inbox::new(classes);
        let given: Vec<usize> =
            (12..classes.count()).filter(|index| index % 7 == 0 || index % 64 == 63).collect();
        given.iter().rev().for_each(|index| inbox.push(classes.at(*index), *index));
        let flagged = inbox.take_flags();
        let mut found = Vec::new();
        for class in flagged {
            found.extend(std::iter::from_fn(|| inbox.pop(class)));
        }
        assert_eq!(found, given);
        assert!(!inbox.has_arrivals() && inbox.pop_overflow().is_none());
    }

    #[test]
    fn a_full_queue_gives_a_value_back_and_says_what_it_is() {
        let queue = LaneQueue::new(1);
        assert!(queue.is_empty() && queue.has_room() && queue.pop().is_none());
        assert_eq!((queue.try_push(1), queue.try_push(2)), (Ok(()), Err(2)));
        assert!(!queue.is_empty() && !queue.has_room());
        assert_eq!((queue.pop_wait(), queue.is_empty()), (Some(1), true));
    }
}
