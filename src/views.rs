//! Ranges of a buffer, typed or not, that note their uses: what a copy should be given instead of a slice.

use crate::buffer::PinnedBuffer;
use crate::error::Error;
use bytemuck::Pod;
use std::marker::PhantomData;
use std::ops::{Bound, Deref, DerefMut, Range, RangeBounds};

impl PinnedBuffer {
    /// A range of the buffer as a copy source that notes its use: `stream.memcpy_htod(&buf.view(..n), ..)`.
    ///
    /// # Panics
    ///
    /// As slicing does, when the range does not lie in the buffer.
    pub fn view(&self, range: impl RangeBounds<usize>) -> View<'_, u8> {
        View::of(self, range).unwrap_or_else(|error| panic!("{error}"))
    }

    /// A range of the buffer as a copy destination; a mutable access like any other.
    ///
    /// # Panics
    ///
    /// As slicing does, when the range does not lie in the buffer.
    pub fn view_mut(&mut self, range: impl RangeBounds<usize>) -> ViewMut<'_, u8> {
        ViewMut::of(self, range).unwrap_or_else(|error| panic!("{error}"))
    }

    /// A range of elements of `T` as a copy source; the range counts elements.
    ///
    /// # Errors
    ///
    /// [`Error::Range`] when it does not lie in the buffer, [`Error::Layout`] when `T` cannot stand there.
    pub fn view_of<T: Pod>(&self, range: impl RangeBounds<usize>) -> Result<View<'_, T>, Error> {
        View::of(self, range)
    }

    /// A range of elements of `T` as a copy destination; a mutable access like any other.
    ///
    /// # Errors
    ///
    /// As [`view_of`](Self::view_of).
    pub fn view_mut_of<T: Pod>(&mut self, range: impl RangeBounds<usize>) -> Result<ViewMut<'_, T>, Error> {
        ViewMut::of(self, range)
    }
}

/// A range of a [`PinnedBuffer`] as a copy source; derefs to `[T]`.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T = u8> {
    buffer: &'a PinnedBuffer,
    /// In bytes; validated.
    start: usize,
    end: usize,
    element: PhantomData<T>,
}

/// A range of a [`PinnedBuffer`] as a copy destination; derefs to `[T]`, mutably.
#[derive(Debug)]
pub struct ViewMut<'a, T = u8> {
    buffer: &'a mut PinnedBuffer,
    /// In bytes; validated.
    start: usize,
    end: usize,
    element: PhantomData<T>,
}

impl<'a, T: Pod> View<'a, T> {
    pub(crate) fn of(buffer: &'a PinnedBuffer, range: impl RangeBounds<usize>) -> Result<Self, Error> {
        let Range { start, end } = bytes_of::<T>(buffer.len(), range)?;
        Ok(Self { buffer, start, end, element: PhantomData })
    }

    #[cfg(feature = "cudarc")]
    pub(crate) fn buffer(&self) -> &'a PinnedBuffer {
        self.buffer
    }
}

impl<'a, T: Pod> ViewMut<'a, T> {
    pub(crate) fn of(buffer: &'a mut PinnedBuffer, range: impl RangeBounds<usize>) -> Result<Self, Error> {
        let Range { start, end } = bytes_of::<T>(buffer.len(), range)?;
        // A mutable access: waits for what is noted, and makes everything dirty.
        let _: &mut [u8] = buffer;
        Ok(Self { buffer, start, end, element: PhantomData })
    }

    #[cfg(feature = "cudarc")]
    pub(crate) fn buffer_mut(&mut self) -> &mut PinnedBuffer {
        self.buffer
    }

    #[cfg(feature = "cudarc")]
    pub(crate) fn buffer(&self) -> &PinnedBuffer {
        self.buffer
    }

    /// The elements, for a copy of the device into them that is noted.
    #[cfg(feature = "cudarc")]
    pub(crate) fn destination(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.buffer.destination()[self.start..self.end])
    }
}

/// The bytes of a range of elements of `T`, if it lies in a buffer of `len` bytes and `T` can stand there.
pub(crate) fn bytes_of<T: Pod>(len: usize, range: impl RangeBounds<usize>) -> Result<Range<usize>, Error> {
    let element_bytes = size_of::<T>();
    let layout = |problem: &str| Error::Layout {
        bytes: len,
        element: std::any::type_name::<T>(),
        element_bytes,
        problem: problem.into(),
    };
    if element_bytes == 0 {
        return Err(layout("it has no bytes"));
    }
    // The buffer is page-aligned, so an element that starts at a multiple of its size is aligned, as long as a
    // page is a multiple of its alignment.
    if align_of::<T>() > crate::os::page_bytes() {
        return Err(layout("its alignment is larger than a page"));
    }
    let elements = len / element_bytes;
    let start = match range.start_bound() {
        Bound::Included(start) => Some(*start),
        Bound::Excluded(start) => start.checked_add(1),
        Bound::Unbounded => Some(0),
    };
    let end = match range.end_bound() {
        Bound::Included(end) => end.checked_add(1),
        Bound::Excluded(end) => Some(*end),
        // "Everything" must be everything: a rest that is no element would be left out silently.
        Bound::Unbounded if !len.is_multiple_of(element_bytes) => {
            return Err(layout("its length is no multiple of the element's"));
        }
        Bound::Unbounded => Some(elements),
    };
    match (start, end) {
        (Some(start), Some(end)) if start <= end && end <= elements => {
            Ok(start * element_bytes..end * element_bytes)
        }
        _ => Err(Error::Range {
            start: start.unwrap_or(usize::MAX),
            end: end.unwrap_or(usize::MAX),
            len: elements,
        }),
    }
}

impl<T: Pod> Deref for View<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.buffer[self.start..self.end])
    }
}

impl<T: Pod> Deref for ViewMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.buffer[self.start..self.end])
    }
}

impl<T: Pod> DerefMut for ViewMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.buffer[self.start..self.end])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_validated_in_elements() {
        assert_eq!(bytes_of::<u8>(10, ..).unwrap(), 0..10);
        assert_eq!(bytes_of::<u32>(16, 1..=2).unwrap(), 4..12);
        assert_eq!(bytes_of::<u32>(18, 0..4).unwrap(), 0..16);
        assert_eq!(bytes_of::<u8>(10, 10..).unwrap(), 10..10);
        assert!(matches!(bytes_of::<u32>(18, ..), Err(Error::Layout { .. })));
        assert!(matches!(bytes_of::<()>(8, ..), Err(Error::Layout { .. })));
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = bytes_of::<u8>(10, 5..4);
        assert_eq!(backwards, Err(Error::Range { start: 5, end: 4, len: 10 }));
        assert_eq!(
            bytes_of::<u8>(10, ..=usize::MAX),
            Err(Error::Range { start: 0, end: usize::MAX, len: 10 })
        );
    }
}
