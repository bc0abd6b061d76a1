//! Bytes to class and back; pure.
//!
//! A class is a power of two of at least one page. It is the key of the pool: every block of a class
//! has exactly the class's bytes of memory, whatever length its guard shows.

use crate::error::Error;
use crate::os::page_bytes;

/// How many classes an array indexed by [`SizeClass::index`] needs.
/// A model has two: every loop over all of them is part of each of its interleavings.
pub(crate) const CLASS_COUNT: usize = if cfg!(loom) { 2 } else { 63 };

/// A power-of-two number of bytes, at least a page.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct SizeClass(u8);

impl SizeClass {
    /// The class that holds `bytes`, which may be 0.
    ///
    /// Refused above `isize::MAX / 2`, before any arithmetic can overflow: the power of two above
    /// it is no valid size of a Rust allocation.
    pub(crate) fn of(bytes: usize) -> Result<Self, Error> {
        let rounded = Self::rounded_len(bytes)?;
        Ok(Self(rounded.max(page_bytes()).trailing_zeros() as u8))
    }

    /// The class and the length of `take(bytes)`, without an error to carry along: for the path of a hit.
    #[inline]
    pub(crate) fn of_hit(bytes: usize) -> Option<(Self, usize)> {
        if bytes > isize::MAX as usize / 2 {
            return None;
        }
        let len = bytes.next_power_of_two();
        Some((Self(len.max(page_bytes()).trailing_zeros() as u8), len))
    }

    /// What `take(bytes)` gives as the length: the next power of two, 1 for 0.
    pub(crate) fn rounded_len(bytes: usize) -> Result<usize, Error> {
        if bytes > isize::MAX as usize / 2 {
            return Err(Error::TooLarge { bytes });
        }
        Ok(bytes.next_power_of_two())
    }

    /// The class at an array position, for loops over all classes.
    pub(crate) fn at(index: usize) -> Self {
        debug_assert!(index < CLASS_COUNT);
        Self(index as u8)
    }

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    pub(crate) fn bytes(self) -> usize {
        1 << self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_round_up_to_powers_of_two_and_classes_to_pages() {
        let page = page_bytes();
        for (bytes, len) in [(0, 1), (1, 1), (2, 2), (3, 4), (4097, 8192), (1 << 20, 1 << 20)] {
            assert_eq!(SizeClass::rounded_len(bytes).unwrap(), len);
            assert_eq!(SizeClass::of(bytes).unwrap().bytes(), len.max(page));
            assert_eq!(SizeClass::of_hit(bytes), Some((SizeClass::of(bytes).unwrap(), len)));
        }
    }

    #[test]
    fn the_largest_sizes_are_refused_by_name_and_never_overflow() {
        let limit = isize::MAX as usize / 2;
        assert_eq!(SizeClass::of(limit).unwrap().bytes(), 1 << 62);
        assert!(SizeClass::of(limit).unwrap().index() < CLASS_COUNT);
        for bytes in [limit + 1, isize::MAX as usize, usize::MAX] {
            assert_eq!(SizeClass::of(bytes), Err(Error::TooLarge { bytes }));
            assert_eq!(SizeClass::of_hit(bytes), None);
        }
    }
}
