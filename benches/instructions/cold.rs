//! What an operation needs that no cache has: the cache lines of code and of data that a single call touches.
//!
//! A cold call takes about as long as it waits for lines, and so that number, which is the same in every run, stands for
//! its time, which is not. Callgrind's caches are set up for it: first levels of two lines, so that every line goes to
//! the last level, and between two calls the last level is filled with something else. What misses there is a line that
//! the call touched for the first time.

use crate::alternatives::SyncPool;
use crate::classic::ClassicPool;
use crate::common::rows;
use crate::common::{Guard, Pinpool, Rig, Subject};
use crate::{BURST, BYTES, callgrind, read_count};
use std::hint::black_box;

/// Two lines in the first levels; fewer valgrind does not take.
const CACHES: [&str; 4] = ["--cache-sim=yes", "--I1=128,2,64", "--D1=128,2,64", "--LL=1048576,16,64"];
/// Twice the last level.
const OTHER_BYTES: usize = 2 << 20;

/// An operation, the function that is counted, by pool, and the most lines that it may touch in pinpool.
pub const OPERATIONS: [(&str, [&str; 3], u64); 3] = [
    ("take, a hit", ["cold_take_of_pinpool", "cold_take_of_classic", "cold_take_of_sync"], 27),
    ("record_last_use", ["cold_record_of_pinpool", "cold_record_of_classic", "cold_record_of_sync"], 170),
    ("drop, recorded", ["cold_drop_of_pinpool", "cold_drop_of_classic", "cold_drop_of_sync"], 54),
];

/// Lines of code and of data, of one call.
pub fn lines_of(function: &str) -> Result<(u64, u64), String> {
    let text = callgrind(function, &CACHES)?;
    let read = |label| read_count(&text, label).ok_or_else(|| format!("callgrind said:\n{text}"));
    let each = |all: u64| (all + BURST as u64 / 2) / BURST as u64;
    Ok((each(read("LLi misses:")?), each(read("LLd misses:")?)))
}

macro_rules! counted {
    ($($take:ident, $record:ident, $give_back:ident, $subject:ty;)*) => {$(
        #[inline(never)]
        fn $take(subject: &$subject, taken: &mut Vec<<$subject as Subject>::Buffer>) {
            // The name keeps the linker from making one function of several.
            black_box(stringify!($take));
            taken.push(black_box(subject).take(BYTES));
        }

        #[inline(never)]
        fn $record(buffer: &mut <$subject as Subject>::Buffer, rig: &Rig) {
            black_box(stringify!($record));
            black_box(buffer).record(&rig.stream);
        }

        #[inline(never)]
        fn $give_back(taken: &mut Vec<<$subject as Subject>::Buffer>) {
            black_box(stringify!($give_back));
            drop(black_box(taken).pop());
        }
    )*
    /// Runs a path; false when it is none of these.
    pub fn run(function: &str) -> bool {
        $(
            if [stringify!($take), stringify!($record), stringify!($give_back)].contains(&function) {
                one_by_one(
                    |subject, taken| $take(subject, taken),
                    |buffer, rig| $record(buffer, rig),
                    |taken| $give_back(taken),
                );
                return true;
            }
        )*
        false
    }};
}
counted! {
    cold_take_of_pinpool, cold_record_of_pinpool, cold_drop_of_pinpool, Pinpool;
    cold_take_of_classic, cold_record_of_classic, cold_drop_of_classic, ClassicPool;
    cold_take_of_sync, cold_record_of_sync, cold_drop_of_sync, SyncPool;
}

/// A burst of each, one at a time with cold caches, after one that is not counted and warms the pool up.
fn one_by_one<S: Subject>(
    take: impl Fn(&S, &mut Vec<S::Buffer>),
    record: impl Fn(&mut S::Buffer, &Rig),
    give_back: impl Fn(&mut Vec<S::Buffer>),
) {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, BYTES);
    let mut taken: Vec<S::Buffer> = Vec::with_capacity(BURST);
    taken.extend((0..BURST).map(|_| subject.take(BYTES)));
    taken.iter_mut().for_each(|buffer| buffer.record(&rig.stream));
    taken.clear();
    crate::common::wait_until_ready(&subject, BYTES, BURST);
    let other = vec![1u8; OTHER_BYTES];
    let chill = || {
        let sum: u64 = black_box(&other).iter().step_by(64).map(|byte| u64::from(*byte)).sum();
        assert_eq!(sum, (OTHER_BYTES / 64) as u64);
    };
    for _ in 0..BURST {
        chill();
        take(&subject, &mut taken);
    }
    assert!(taken.iter().all(Guard::is_pinned), "every counted take was a hit");
    for buffer in &mut taken {
        chill();
        record(buffer, &rig);
    }
    for _ in 0..BURST {
        chill();
        give_back(&mut taken);
    }
}
