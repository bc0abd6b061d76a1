//! The arithmetic of the classes, against what is said of them.

use super::*;

/// Every kind of classes that settings can ask for.
fn every_kind() -> impl Iterator<Item = (SizeClasses, Classes)> {
    let steps = [2, 4, 8].into_iter().flat_map(|per_doubling| {
        let from = (0..STEPS_LOG2_MAX).map(move |log2| (per_doubling, 1 << log2));
        from.map(|(per_doubling, from_bytes)| SizeClasses::Steps { per_doubling, from_bytes })
    });
    std::iter::once(SizeClasses::PowerOfTwo).chain(steps).map(|kind| {
        kind.validate().unwrap();
        (kind, Classes::new(kind))
    })
}

#[test]
fn lengths_round_up_to_powers_of_two_and_classes_to_pages() {
    let page = page_bytes();
    for (bytes, len) in [(0, 1), (1, 1), (2, 2), (3, 4), (4097, 8192), (1 << 20, 1 << 20)] {
        let (class, rounded) = Classes::POWERS_OF_TWO.of(bytes).unwrap();
        assert_eq!((class.bytes(), rounded), (len.max(page), len));
        assert_eq!(Rounding::of(Classes::POWERS_OF_TWO).of_hit(bytes), Some((class, len)));
    }
}

#[test]
fn the_largest_sizes_are_refused_by_name_and_never_overflow() {
    let limit = isize::MAX as usize / 2;
    for (kind, classes) in every_kind() {
        let (class, len) = classes.of(limit).unwrap();
        assert_eq!((class.bytes(), len), (limit + 1, limit + 1), "{kind:?}");
        assert_eq!(class.index(), classes.count() - 1, "{kind:?}");
        for bytes in [limit + 1, isize::MAX as usize, usize::MAX] {
            assert_eq!(classes.of(bytes), Err(Error::TooLarge { bytes }));
            assert_eq!(Rounding::of(classes).of_hit(bytes), None);
        }
    }
}

#[test]
fn every_class_has_a_number_of_its_own_and_they_grow_with_it() {
    for (kind, classes) in every_kind() {
        assert!(classes.count() <= 256, "{kind:?}: {}", classes.count());
        let all: Vec<_> = classes.all().collect();
        for (index, pair) in all.windows(2).enumerate() {
            assert_eq!(pair[0].index(), index);
            assert!(pair[0] < pair[1] && pair[0].bytes() < pair[1].bytes(), "{kind:?}: {pair:?}");
        }
        // The largest is larger than what anybody may ask for.
        let sizes = page_bytes()..=BYTES_MAX;
        for class in all.iter().filter(|class| sizes.contains(&class.bytes())) {
            assert!(class.bytes().is_multiple_of(page_bytes()), "{kind:?}: {class:?}");
            // A class holds what is as large as it, and gives it that length: rounding twice is rounding once.
            assert_eq!(classes.of(class.bytes()), Ok((*class, class.bytes())), "{kind:?}");
        }
    }
}

/// What is promised of one size.
fn check(kind: SizeClasses, classes: Classes, bytes: usize) {
    let (class, len) = classes.of(bytes).unwrap();
    let context = || format!("{kind:?}, {bytes} bytes: {class:?}, {} bytes, of which {len}", class.bytes());
    assert!(len >= bytes.max(1) && class.bytes() >= len, "{}", context());
    assert_eq!(classes.at(class.index()), class, "{}", context());
    assert!(len > BYTES_MAX || classes.of(len).map(|(class, _)| class) == Ok(class), "{}", context());
    // The next smaller class would not do.
    let smaller = class.index().checked_sub(1).map(|index| classes.at(index).bytes());
    assert!(smaller.is_none_or(|smaller| smaller < bytes.max(page_bytes())), "{}", context());
    if let Some((hit, hit_len)) = Rounding::of(classes).of_hit(bytes) {
        assert_eq!((hit, hit_len), (class, len), "{}", context());
        assert_eq!(len, bytes.next_power_of_two(), "{}", context());
    }
    if let SizeClasses::Steps { per_doubling, from_bytes } = kind
        && bytes > from_bytes.max(per_doubling * page_bytes())
        && bytes <= 1 << STEPS_LOG2_MAX
    {
        assert_eq!(len, class.bytes(), "{}", context());
        assert!((len - bytes) * (per_doubling + 1) < len, "{}", context());
        if len >= per_doubling * (2 << 20) {
            assert!(len.is_multiple_of(2 << 20), "whole huge pages: {}", context());
        }
    } else {
        assert_eq!(len, bytes.next_power_of_two(), "{}", context());
    }
}

#[test]
fn sizes_get_the_smallest_class_that_holds_them_and_waste_what_is_said() {
    let mut seed = 0x5eed_0005_u64;
    println!("the seed is {seed:#x}");
    for (kind, classes) in every_kind() {
        check(kind, classes, 0);
        for class in classes.all() {
            let around = [class.bytes() - 1, class.bytes(), class.bytes() + 1];
            around
                .into_iter()
                .filter(|bytes| *bytes <= BYTES_MAX)
                .for_each(|bytes| check(kind, classes, bytes));
        }
        let mut last = (0, None);
        let mut sizes: Vec<usize> = Vec::new();
        for _ in 0..500 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // As many of every magnitude.
            sizes.push((seed >> 2 >> (seed >> 58)) as usize & (BYTES_MAX >> (seed & 31)));
        }
        sizes.sort_unstable();
        for bytes in sizes {
            check(kind, classes, bytes);
            let (class, len) = classes.of(bytes).unwrap();
            assert!(Some(class) >= last.1 && len >= last.0, "{kind:?}: it falls at {bytes}");
            last = (len, Some(class));
        }
    }
}

#[test]
fn eighths_are_what_one_would_write_down() {
    let classes = Classes::new(SizeClasses::steps(8));
    let mib = |sixteenths: usize| sixteenths << 16;
    for (bytes, len) in [
        (mib(16), mib(16)),
        (mib(16) + 1, mib(18)),
        (mib(18), mib(18)),
        (mib(31), mib(32)),
        (mib(33), mib(36)),
        (mib(16 * 65), mib(16 * 72)),
    ] {
        assert_eq!(classes.of(bytes).unwrap().1, len, "{bytes}");
    }
}

#[test]
fn settings_that_have_no_classes_are_refused_by_name() {
    let steps = |per_doubling, from_bytes| SizeClasses::Steps { per_doubling, from_bytes };
    for (kind, part) in [
        (steps(0, 4096), "0 steps"),
        (steps(1, 4096), "SizeClasses::PowerOfTwo"),
        (steps(3, 4096), "3 steps"),
        (steps(16, 4096), "16 steps"),
        (steps(4, 0), "from 0 bytes"),
        (steps(4, 5000), "from 5000 bytes"),
        (steps(4, 1 << 40), "below 1 TiB"),
        (steps(4, usize::MAX), "below 1 TiB"),
    ] {
        let error = kind.validate().unwrap_err().to_string();
        assert!(error.starts_with("size_classes") && error.contains(part), "{kind:?}: {error}");
    }
}

#[test]
fn the_environment_says_steps_and_from_where_on() {
    let parse = |text| SizeClasses::parse("X", text);
    assert_eq!(parse("1"), Ok(SizeClasses::PowerOfTwo));
    assert_eq!(parse(" 8 "), Ok(SizeClasses::steps(8)));
    assert_eq!(parse("4: 65536"), Ok(SizeClasses::Steps { per_doubling: 4, from_bytes: 65536 }));
    for text in ["3", "eight", "4:", "4:1 MiB", "4:5000", ":4096", "-4"] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.starts_with("X: "), "{text}: {error}");
    }
    for text in ["3", "7", "eight"] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.contains("1 (powers of two), 2, 4 or 8"), "{text}: {error}");
    }
}
