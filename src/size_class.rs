//! Bytes to class and back; pure.
//!
//! A class is a size of at least one page, a power of two unless the pool's settings ask for finer steps. It is the key
//! of the pool: every block of a class has exactly the class's bytes of memory, whatever length its guard shows.

use crate::error::Error;
use crate::os::page_bytes;

/// What is refused above: the power of two above it is no valid size of a Rust allocation.
const BYTES_MAX: usize = isize::MAX as usize / 2;

/// The largest class is two to this.
const CLASS_LOG2_MAX: usize = usize::BITS as usize - 2;

/// Doublings are cut into steps up to two to this, 1 TiB; with more, not every class would have a number below 256.
const STEPS_LOG2_MAX: usize = if CLASS_LOG2_MAX > 40 { 40 } else { CLASS_LOG2_MAX };

/// From where on [`SizeClasses::steps`] rounds finely: below it a doubling is little memory.
const STEPS_FROM_BYTES: usize = 1 << 20;

/// To which sizes a pool rounds up; see [`PoolBuilder::size_classes`](crate::PoolBuilder::size_classes).
///
/// Buffers are kept by class and handed out by class, so every further class is one more shelf on which something idle
/// may lie that another size could have used. `docs/performance.md` has the waste and the hit rate of each choice
/// on three traces of real sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum SizeClasses {
    /// The next power of two: up to half of a buffer was never asked for, and a quarter where sizes are spread evenly.
    #[default]
    PowerOfTwo,
    /// Above `from_bytes` every doubling is cut into equal steps, so that less than one in `per_doubling + 1` bytes
    /// of a buffer was never asked for. `len()` of a buffer is the size of its class there too.
    ///
    /// Classes stay whole pages: below `per_doubling` pages, whatever `from_bytes` says, and above 1 TiB they are
    /// powers of two. From `per_doubling` times 2 MiB on every class is whole huge pages; between 2 MiB and there a
    /// buffer begins at a huge page as ever, and what is behind its last whole one lies in small pages.
    Steps {
        /// 2, 4 or 8.
        per_doubling: usize,
        /// A power of two, below 1 TiB.
        from_bytes: usize,
    },
}

impl SizeClasses {
    /// That many steps a doubling (2, 4 or 8), above 1 MiB.
    pub const fn steps(per_doubling: usize) -> Self {
        Self::Steps { per_doubling, from_bytes: STEPS_FROM_BYTES }
    }

    /// Refuses what has no classes.
    pub(crate) fn validate(self) -> Result<(), Error> {
        let Self::Steps { per_doubling, from_bytes } = self else { return Ok(()) };
        let refused = |problem| Err(Error::Setting { name: "size_classes", problem });
        if !matches!(per_doubling, 2 | 4 | 8) {
            return refused(format!(
                "{per_doubling} steps a doubling; it can be 2, 4 or 8 (powers of two: SizeClasses::PowerOfTwo)"
            ));
        }
        if !from_bytes.is_power_of_two() || from_bytes >= 1 << STEPS_LOG2_MAX {
            return refused(format!("from {from_bytes} bytes on; it has to be a power of two, below 1 TiB"));
        }
        Ok(())
    }

    /// Reads the text of an environment variable: the number of steps a doubling, 1 for powers of two; behind
    /// a colon from where on.
    pub(crate) fn parse(name: &'static str, text: &str) -> Result<Self, Error> {
        let (steps, from) = text.split_once(':').map_or((text, None), |(steps, from)| (steps, Some(from)));
        let from_bytes = from.map_or(Ok(STEPS_FROM_BYTES), |from| from.trim().parse());
        let read = match (steps.trim().parse(), from_bytes) {
            (Ok(1), Ok(_)) => Ok(Self::PowerOfTwo),
            (Ok(per_doubling @ (2 | 4 | 8)), Ok(from_bytes)) => {
                let read = Self::Steps { per_doubling, from_bytes };
                read.validate().map(|()| read).map_err(|error| match error {
                    Error::Setting { problem, .. } => problem,
                    other => other.to_string(),
                })
            }
            _ => Err(format!(
                "{text:?} is not 1 (powers of two), 2, 4 or 8, nor one of these with the bytes from where on, as in 4:1048576"
            )),
        };
        read.map_err(|problem| Error::Setting { name, problem })
    }
}

/// All classes of a pool, in a byte: how often a doubling is halved again to make its steps (two bits), and from which
/// power of two on (six bits).
///
/// A class carries it along, so that it knows its bytes without the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Classes(u8);

impl Default for Classes {
    fn default() -> Self {
        Self::POWERS_OF_TWO
    }
}

impl Classes {
    pub(crate) const POWERS_OF_TWO: Self = Self(CLASS_LOG2_MAX as u8);

    /// Of settings that were validated.
    pub(crate) fn new(settings: SizeClasses) -> Self {
        match settings {
            SizeClasses::PowerOfTwo => Self::POWERS_OF_TWO,
            SizeClasses::Steps { per_doubling, from_bytes } => {
                let from_bytes = from_bytes.max(per_doubling * page_bytes());
                Self((per_doubling.trailing_zeros() as u8) << 6 | from_bytes.trailing_zeros() as u8)
            }
        }
    }

    /// The logarithms of the steps in a doubling, and of the bytes above which there are any.
    fn parts(self) -> (usize, usize) {
        (usize::from(self.0 >> 6), usize::from(self.0 & 63))
    }

    /// How many there are: what an array indexed by [`SizeClass::index`] needs; at most 256.
    /// A model has two: every loop over all of them is part of each of its interleavings.
    pub(crate) fn count(self) -> usize {
        if cfg!(loom) { 2 } else { self.index_of_doubling(CLASS_LOG2_MAX) + 1 }
    }

    /// The class whose bytes are two to `log2`.
    fn index_of_doubling(self, log2: usize) -> usize {
        let (steps_log2, from_log2) = self.parts();
        let cut = log2.min(STEPS_LOG2_MAX).saturating_sub(from_log2);
        // Every doubling is one step at least, and those that are cut are as many more.
        log2 + (cut << steps_log2) - cut
    }

    /// The class that holds `bytes`, which may be 0, and the length of `take(bytes)`: the next power of two, 1 for 0,
    /// or where the steps are finer, the bytes of the class.
    ///
    /// Refused above `isize::MAX / 2`, before any arithmetic can overflow.
    pub(crate) fn of(self, bytes: usize) -> Result<(SizeClass, usize), Error> {
        match Rounding::of(self).of_hit(bytes) {
            Some(found) => Ok(found),
            None => self.of_finer(bytes),
        }
    }

    /// As [`Self::of`], where [`Rounding::of_hit`] gave nothing.
    fn of_finer(self, bytes: usize) -> Result<(SizeClass, usize), Error> {
        if bytes > BYTES_MAX {
            return Err(Error::TooLarge { bytes });
        }
        // There are steps, so it is 2 or more: two to `log2` is less than `bytes`, and twice that is not.
        let log2 = (bytes - 1).ilog2() as usize;
        let steps_log2 = if log2 < STEPS_LOG2_MAX { self.parts().0 } else { 0 };
        let step_log2 = log2 - steps_log2;
        let steps = (bytes - (1 << log2)).div_ceil(1 << step_log2);
        let index = self.index_of_doubling(log2) + steps;
        Ok((SizeClass::new(index, self), (1 << log2) + (steps << step_log2)))
    }

    /// The class at an array position, for loops over all classes.
    pub(crate) fn at(self, index: usize) -> SizeClass {
        debug_assert!(index < self.count());
        SizeClass::new(index, self)
    }

    /// Every class, smallest first.
    pub(crate) fn all(self) -> impl DoubleEndedIterator<Item = SizeClass> + ExactSizeIterator {
        (0..self.count()).map(move |index| self.at(index))
    }
}

/// What a take must know of the classes before it can look at a shelf. A pool's handle has one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rounding {
    /// Up to here sizes are rounded to powers of two. Where there are no finer steps it is the largest size that there
    /// is, so that one comparison tells what is refused from what is not, and the finer classes cost the others nothing.
    coarse_bytes_max: usize,
    classes: Classes,
}

impl Rounding {
    pub(crate) fn of(classes: Classes) -> Self {
        let is_coarse = classes == Classes::POWERS_OF_TWO;
        let coarse_bytes_max = if is_coarse { BYTES_MAX } else { 1 << classes.parts().1 };
        Self { coarse_bytes_max, classes }
    }

    /// The class and the length of `take(bytes)` where they are a power of two, without an error to carry along: for
    /// the path of a hit. [`Classes::of`] knows the others.
    #[inline]
    pub(crate) fn of_hit(self, bytes: usize) -> Option<(SizeClass, usize)> {
        if bytes > self.coarse_bytes_max {
            return None;
        }
        let len = bytes.next_power_of_two();
        let index = len.max(page_bytes()).trailing_zeros() as usize;
        Some((SizeClass::new(index, self.classes), len))
    }

    /// As [`Classes::of`], where [`Self::of_hit`] gave nothing.
    pub(crate) fn of_finer(self, bytes: usize) -> Result<(SizeClass, usize), Error> {
        self.classes.of_finer(bytes)
    }

    /// As [`Classes::of`].
    pub(crate) fn of_any(self, bytes: usize) -> Result<(SizeClass, usize), Error> {
        self.classes.of(bytes)
    }
}

/// A size, at least a page; of one pool's classes, the larger one is the greater.
///
/// One number, so that it stays in one register: its place among the classes, and below that the classes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SizeClass(u16);

impl SizeClass {
    /// For tests of what is the same with all classes.
    #[cfg(test)]
    pub(crate) fn of(bytes: usize) -> Result<Self, Error> {
        Classes::POWERS_OF_TWO.of(bytes).map(|(class, _)| class)
    }

    #[inline]
    fn new(index: usize, classes: Classes) -> Self {
        Self((index << 8) as u16 | u16::from(classes.0))
    }

    /// Where it stands in an array of as many as there are classes.
    #[inline]
    pub(crate) fn index(self) -> usize {
        usize::from(self.0 >> 8)
    }

    /// Never a part of its callers: moved out of a branch that is not taken, it would cost a take fifty instructions.
    #[inline(never)]
    pub(crate) fn bytes(self) -> usize {
        let (steps_log2, from_log2) = Classes(self.0 as u8).parts();
        let index = self.index();
        let Some(behind) = index.checked_sub(from_log2) else { return 1 << index };
        let cut = STEPS_LOG2_MAX.saturating_sub(from_log2);
        if behind >> steps_log2 < cut {
            let (log2, steps) = (from_log2 + (behind >> steps_log2), behind & ((1 << steps_log2) - 1));
            (1 << log2) + (steps << (log2 - steps_log2))
        } else {
            1 << (from_log2 + cut + (behind - (cut << steps_log2)))
        }
    }
}

impl std::fmt::Debug for SizeClass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SizeClass({}: {} bytes)", self.index(), self.bytes())
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
