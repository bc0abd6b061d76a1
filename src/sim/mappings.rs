//! Whether a range of host memory is mapped and writable, and how much of it is there, as the kernel would find when
//! pinning it.
#![allow(unsafe_code)] // Asks the kernel which pages are there.

/// False for a range with a hole, or that cannot be read, or (where asked) not be written.
///
/// Reads the process's own map list: slow for a hot path, exact for a registration.
#[cfg(target_os = "linux")]
pub(super) fn is_mapped_writable(start: usize, bytes: usize, needs_write: bool) -> bool {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else {
        // Without the list nothing can be said against the range.
        return true;
    };
    covers(&maps, start, start.saturating_add(bytes), needs_write)
}

#[cfg(not(target_os = "linux"))]
pub(super) fn is_mapped_writable(_start: usize, _bytes: usize, _needs_write: bool) -> bool {
    true
}

/// How many pages of a mapped range nobody has touched yet.
#[cfg(target_os = "linux")]
pub(super) fn absent_pages(start: usize, bytes: usize) -> usize {
    let page = crate::os::page_bytes();
    let first = start / page * page;
    let count = (start + bytes - first).div_ceil(page);
    let mut there = vec![0_u8; count];
    // SAFETY: mincore writes a byte for each page of the range and touches none of them; a range that is not mapped is an
    // error.
    let answer = unsafe { libc::mincore(first as *mut libc::c_void, count * page, there.as_mut_ptr()) };
    if answer != 0 {
        return 0;
    }
    there.iter().filter(|page| **page & 1 == 0).count()
}

#[cfg(not(target_os = "linux"))]
pub(super) fn absent_pages(_start: usize, _bytes: usize) -> usize {
    0
}

/// Walks the lines of a map list, which are in order of address, from `start` to `end`.
#[cfg(any(target_os = "linux", test))]
fn covers(maps: &str, start: usize, end: usize, needs_write: bool) -> bool {
    let mut reached = start;
    for line in maps.lines() {
        let Some((from, to, may_read, may_write)) = parse(line) else { continue };
        if to <= reached {
            continue;
        }
        if from > reached || !may_read || (needs_write && !may_write) {
            return false;
        }
        reached = to;
        if reached >= end {
            return true;
        }
    }
    false
}

/// `from-to rwxp ...`
#[cfg(any(target_os = "linux", test))]
fn parse(line: &str) -> Option<(usize, usize, bool, bool)> {
    let mut words = line.split(' ');
    let (from, to) = words.next()?.split_once('-')?;
    let permissions = words.next()?;
    let hex = |digits| usize::from_str_radix(digits, 16).ok();
    Some((hex(from)?, hex(to)?, permissions.starts_with('r'), permissions[1..].starts_with('w')))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "1000-3000 rw-p 0 00:00 0\n3000-4000 rw-p 0 00:00 0 [heap]\n\
                        5000-6000 r--p 0 00:00 0\n6000-7000 ---p 0 00:00 0\n";

    #[test]
    fn a_range_may_span_mappings_but_no_hole_and_nothing_unwritable() {
        assert!(covers(MAPS, 0x1800, 0x4000, true));
        assert!(!covers(MAPS, 0x1800, 0x4001, true));
        assert!(!covers(MAPS, 0x3800, 0x5800, false));
        assert!(!covers(MAPS, 0x5000, 0x6000, true));
        assert!(covers(MAPS, 0x5000, 0x6000, false));
        assert!(!covers(MAPS, 0x6000, 0x7000, false));
        assert!(!covers(MAPS, 0x8000, 0x9000, false));
        assert!(!covers(MAPS, 0x800, 0x1800, false));
    }
}
