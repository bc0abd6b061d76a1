//! Which bytes of a buffer may differ from zero, and the writer that keeps count of them.

use std::io;

/// What is known of the bytes that differ from zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dirty {
    /// Nobody took a mutable slice yet; a copy from the device may still have written, so at a drop
    /// everything counts as dirty.
    Unknown,
    /// A mutable slice was taken.
    Everything,
    /// The caller or the writer said it: at most so many bytes from the start.
    Prefix(usize),
}

impl Dirty {
    /// Bytes to zero before the next taker of a buffer of `len` bytes.
    pub(crate) fn bytes(self, len: usize) -> usize {
        match self {
            Dirty::Prefix(bytes) => bytes.min(len),
            Dirty::Unknown | Dirty::Everything => len,
        }
    }
}

/// Writes into a `PinnedBuffer` from its start; made by `PinnedBuffer::writer`.
///
/// Keeps the buffer's dirty length exact, so that only what was written is re-zeroed. Writing past the
/// end gives `WriteZero` from `write_all`, as a slice does.
#[derive(Debug)]
pub struct Writer<'a> {
    bytes: &'a mut [u8],
    written: usize,
    dirty: &'a mut Dirty,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(bytes: &'a mut [u8], dirty: &'a mut Dirty) -> Self {
        if *dirty == Dirty::Unknown {
            *dirty = Dirty::Prefix(0);
        }
        Self { bytes, written: 0, dirty }
    }

    /// Bytes written so far.
    pub fn position(&self) -> usize {
        self.written
    }

    /// Bytes that still fit.
    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.written
    }
}

impl io::Write for Writer<'_> {
    fn write(&mut self, source: &[u8]) -> io::Result<usize> {
        let count = source.len().min(self.remaining());
        self.bytes[self.written..self.written + count].copy_from_slice(&source[..count]);
        self.written += count;
        if let Dirty::Prefix(bytes) = self.dirty {
            *bytes = (*bytes).max(self.written);
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_writer_keeps_the_prefix_exact_and_never_hides_an_earlier_slice() {
        let mut bytes = [0; 8];
        let mut dirty = Dirty::Unknown;
        let mut writer = Writer::new(&mut bytes, &mut dirty);
        assert_eq!(writer.write(b"abc").unwrap(), 3);
        assert_eq!((writer.position(), writer.remaining()), (3, 5));
        assert!(writer.write_all(b"too long").is_err());
        assert_eq!(dirty.bytes(8), 8);

        let mut dirty = Dirty::Unknown;
        Writer::new(&mut bytes, &mut dirty).write_all(b"ab").unwrap();
        assert_eq!(dirty, Dirty::Prefix(2));
        Writer::new(&mut bytes, &mut dirty).write_all(b"a").unwrap();
        assert_eq!(dirty, Dirty::Prefix(2));
        let mut dirty = Dirty::Everything;
        Writer::new(&mut bytes, &mut dirty).write_all(b"a").unwrap();
        assert_eq!(dirty, Dirty::Everything);
    }
}
