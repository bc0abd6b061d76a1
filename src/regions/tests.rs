//! The record against its plain definitions.

use super::*;

fn with(regions: &[(usize, usize)]) -> Regions {
    let mut record = Regions::new();
    for (id, (base, end)) in regions.iter().enumerate() {
        record.insert(Region { base: *base, end: *end, id: id as u64 + 1 });
    }
    record
}

const WORLDS: [&[(usize, usize)]; 9] = [
    &[],
    &[(4, 8)],
    &[(4, 8), (8, 12)],
    &[(8, 12), (4, 8), (1, 3)],
    &[(4, 8), (2, 14)],
    &[(2, 14), (4, 8), (4, 6), (12, 16)],
    &[(4, 8), (4, 10), (0, 1), (5, 9)],
    &[(2, 14), (4, 8), (6, 8), (4, 6), (6, 10)],
    &[(1, 3), (5, 7), (9, 12), (3, 5), (14, 15)],
];

/// The plain definition, byte by byte and region by region.
fn naive(regions: &[(usize, usize)], start: usize, end: usize) -> Coverage {
    let has = |byte: usize| regions.iter().any(|(base, end)| (*base..*end).contains(&byte));
    match (start..end).filter(|byte| has(*byte)).count() {
        0 => Coverage::None,
        _ if regions.iter().any(|(base, last)| *base <= start && end <= *last) => Coverage::Whole,
        _ => Coverage::Part,
    }
}

#[test]
fn every_slice_of_a_small_world_is_answered_as_by_the_definition() {
    for world in WORLDS {
        let record = with(world);
        for (start, end) in (0..18).flat_map(|start| (start..18).map(move |end| (start, end))) {
            assert_eq!(record.coverage(start, end), naive(world, start, end), "{world:?} {start}..{end}");
        }
    }
}

#[cfg(feature = "cudarc")]
#[test]
fn the_slices_of_a_small_world_are_cut_at_every_edge_inside_them() {
    for world in WORLDS {
        let record = with(world);
        for (start, end) in (0..18).flat_map(|start| (start + 1..18).map(move |end| (start, end))) {
            let is_edge = |at: &usize| world.iter().any(|(base, last)| base == at || last == at);
            let inside = (start + 1..end).filter(is_edge);
            let expected: Vec<_> = [start].into_iter().chain(inside).chain([end]).collect();
            assert_eq!(record.edges_within(start, end), expected, "{world:?} {start}..{end}");
        }
    }
}

/// Only what overlaps is looked through one by one, so that a look-up among thousands stays quick.
#[test]
fn regions_that_only_touch_lie_in_the_sorted_part_of_the_record() {
    for world in WORLDS {
        let record = with(world);
        let overlaps = |index: usize| {
            let (base, end) = world[index];
            world[..index].iter().any(|(other, last)| *other < end && base < *last)
        };
        let expected = (0..world.len()).filter(|index| overlaps(*index)).count();
        assert!(record.overlapping.len() <= expected, "{world:?}: {} apart", record.overlapping.len());
    }
}

#[test]
fn regions_with_one_base_count_as_one() {
    for world in WORLDS {
        let mut bases: Vec<_> = world.iter().map(|(base, _)| *base).collect();
        bases.sort_unstable();
        bases.dedup();
        assert_eq!(with(world).count(), bases.len(), "{world:?}");
    }
}

#[cfg(all(feature = "cudarc", not(loom)))]
#[test]
fn the_pieces_of_a_slice_are_pinned_where_a_region_covers_them() {
    let bytes = vec![0u8; 1000];
    let base = bytes.as_ptr();
    // The record is the process's, so other tests may have regions in it, elsewhere.
    let noted = [(100, 300), (400, 800)]
        .map(|(start, end)| ExternalRegion::note(base.wrapping_add(start), end - start));
    let piece = |start: usize, end: usize, pinned| Piece { range: start..end, pinned };
    let all = [
        piece(0, 100, false),
        piece(100, 300, true),
        piece(300, 400, false),
        piece(400, 800, true),
        piece(800, 1000, false),
    ];
    assert_eq!(pieces(&bytes)[..], all);
    assert_eq!(pieces(&bytes[100..300])[..], [piece(0, 200, true)]);
    assert_eq!(pieces(&bytes[150..350])[..], [piece(0, 150, true), piece(150, 200, false)]);
    assert_eq!(pieces(&bytes[350..450])[..], [piece(0, 50, false), piece(50, 100, true)]);
    drop(noted);
    assert_eq!(pieces(&bytes)[..], [piece(0, 1000, false)]);
}

#[cfg(not(loom))]
#[test]
fn a_look_up_goes_round_the_copies_to_one_that_is_not_being_written() {
    let record = Record::new();
    let _first = record.copies[0].regions.write();
    assert_eq!(record.read(0, Regions::count), 0, "from the first copy it goes on to the last");
    let _last = record.copies[COPY_COUNT - 1].regions.write();
    assert_eq!(record.read(0, Regions::count), 0);
}

/// On one copy they would take each other's cache line.
#[cfg(not(loom))]
#[test]
fn threads_look_at_copies_of_their_own_and_stay_with_them() {
    let copies: std::collections::BTreeSet<_> = (0..64)
        .map(|_| {
            let thread = crate::sync::thread::spawn(|| (copy_of_this_thread(), copy_of_this_thread()));
            let (first, second) = thread.join().unwrap();
            assert_eq!(first, second);
            first
        })
        .collect();
    assert!(copies.len() > COPY_COUNT / 2, "{copies:?}");
    assert!(copies.iter().all(|copy| *copy < COPY_COUNT), "{copies:?}");
}

#[test]
fn removing_one_of_several_leaves_the_others_and_the_longest_truth() {
    let mut record = with(&[(4, 8), (4, 12), (4, 8)]);
    assert_eq!(record.count(), 1, "one base is one region");
    record.remove(Token { base: 4, id: 1 });
    assert_eq!(record.coverage(4, 12), Coverage::Whole);
    record.remove(Token { base: 4, id: 2 });
    assert_eq!(record.coverage(4, 12), Coverage::Part);
    assert_eq!(record.count(), 1);
    record.remove(Token { base: 4, id: 3 });
    assert_eq!((record.coverage(4, 12), record.count()), (Coverage::None, 0));
    record.remove(Token { base: 4, id: 3 });
}

#[test]
fn a_region_at_the_end_of_the_address_space_does_not_wrap() {
    let record = with(&[(usize::MAX - 4, usize::MAX)]);
    assert_eq!(record.coverage(usize::MAX - 2, usize::MAX - 1), Coverage::Whole);
    assert_eq!(record.coverage(0, 4), Coverage::None);
}
