//! The input, and the rows that a segment is made of.

use std::fs;
use std::path::{Path, PathBuf};

pub const ROW_BYTES: usize = 64;
/// Input bytes in a row; the rest says where the row belongs.
const CARGO_BYTES: usize = 48;

/// All input bytes, read around and around.
pub struct Input {
    bytes: Vec<u8>,
    pub files: usize,
}

impl Input {
    /// Reads the named files, or the sources and pages of this repository when none are named.
    pub fn read(named: &[PathBuf]) -> Result<Self, String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut files = named.to_vec();
        if files.is_empty() {
            for folder in ["src", "tests", "benches", "examples", "docs"] {
                collect(&root.join(folder), &mut files);
            }
            files.sort();
        }
        let mut bytes = Vec::new();
        for file in &files {
            let more = fs::read(file).map_err(|why| format!("cannot read {}: {why}", file.display()))?;
            bytes.extend_from_slice(&more);
        }
        match bytes.is_empty() {
            true => Err("the input is empty; name files with --input".into()),
            false => Ok(Self { bytes, files: files.len() }),
        }
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The rows of one segment. Their number varies from a quarter of the arena to all of it.
    pub fn segment(&self, number: usize, arena_bytes: usize) -> Segment<'_> {
        let rows_max = arena_bytes / ROW_BYTES;
        let quarter = rows_max.div_ceil(4);
        let varying = mix(number as u64, 0x9E37_79B9_7F4A_7C15) as usize % (rows_max - quarter + 1);
        let start = number.wrapping_mul(7919 * CARGO_BYTES) % self.bytes.len();
        Segment { input: &self.bytes, number, rows: quarter + varying, start, arena_bytes }
    }
}

/// One segment's worth of rows, made from the input when asked.
#[derive(Clone, Copy)]
pub struct Segment<'a> {
    input: &'a [u8],
    number: usize,
    rows: usize,
    start: usize,
    arena_bytes: usize,
}

impl Segment<'_> {
    /// Writes the rows to the front of the arena; gives the bytes written.
    pub fn fill(&self, arena: &mut [u8]) -> usize {
        let mut at = self.start;
        for (row, out) in arena.chunks_exact_mut(ROW_BYTES).take(self.rows).enumerate() {
            at = self.write_row(row, at, out);
        }
        self.rows * ROW_BYTES
    }

    /// The checksum of the arena as it has to arrive: the rows, then zeros. Reads only the input.
    pub fn checksum(&self) -> u64 {
        let mut sum = Checksum::new();
        let mut at = self.start;
        let mut one = [0; ROW_BYTES];
        for row in 0..self.rows {
            at = self.write_row(row, at, &mut one);
            sum.add(&one);
        }
        one.fill(0);
        (self.rows..self.arena_bytes / ROW_BYTES).for_each(|_| sum.add(&one));
        sum.0
    }

    fn write_row(&self, row: usize, at: usize, out: &mut [u8]) -> usize {
        let (cargo, place) = out.split_at_mut(CARGO_BYTES);
        let first = (self.input.len() - at).min(CARGO_BYTES);
        cargo[..first].copy_from_slice(&self.input[at..at + first]);
        for (offset, byte) in cargo[first..].iter_mut().enumerate() {
            *byte = self.input[offset % self.input.len()];
        }
        place[..8].copy_from_slice(&(self.number as u64).to_le_bytes());
        place[8..].copy_from_slice(&(row as u64).to_le_bytes());
        (at + CARGO_BYTES) % self.input.len()
    }
}

/// The checksum of what came back from the device.
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut sum = Checksum::new();
    bytes.chunks_exact(ROW_BYTES).for_each(|row| sum.add(row));
    sum.0
}

/// Depends on every byte and on its place.
struct Checksum(u64);

impl Checksum {
    fn new() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }

    fn add(&mut self, row: &[u8]) {
        for word in row.chunks_exact(8) {
            self.0 = mix(self.0, u64::from_le_bytes(word.try_into().expect("8 bytes")));
        }
    }
}

fn mix(state: u64, word: u64) -> u64 {
    (state ^ word).wrapping_mul(0x9FB2_1C65_1E98_DF25).rotate_left(29)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => collect(&path, files),
            false => files.push(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARENA_BYTES: usize = 64 * ROW_BYTES;

    fn input() -> Input {
        Input { bytes: (0..=250).collect(), files: 1 }
    }

    #[test]
    fn a_filled_arena_has_the_checksum_of_its_segment() {
        for number in 0..200 {
            let input = input();
            let segment = input.segment(number, ARENA_BYTES);
            let mut arena = vec![0; ARENA_BYTES];
            let filled = segment.fill(&mut arena);
            assert!((ARENA_BYTES / 4..=ARENA_BYTES).contains(&filled), "{filled}");
            assert_eq!(checksum(&arena), segment.checksum());
        }
    }

    #[test]
    fn any_other_byte_another_place_or_a_stale_tail_changes_it() {
        let input = input();
        let segment = input.segment(3, ARENA_BYTES);
        let mut arena = vec![0; ARENA_BYTES];
        let filled = segment.fill(&mut arena);
        for at in [0, filled / 2, filled - 1, ARENA_BYTES - 1] {
            arena[at] ^= 1;
            assert_ne!(checksum(&arena), segment.checksum(), "byte {at}");
            arena[at] ^= 1;
        }
        arena.swap(0, ROW_BYTES + 1);
        assert_ne!(checksum(&arena), segment.checksum());
        assert_ne!(input.segment(4, ARENA_BYTES).checksum(), segment.checksum());
    }
}
