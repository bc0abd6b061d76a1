//! Scripts that failed once, as the properties printed them.

use crate::replay;
use crate::script::Contexts;
use crate::script::How::*;
use crate::script::Op::*;
use crate::script::Setup;

/// One device, nothing out of the ordinary, and room for all.
fn one_device() -> Setup {
    Setup {
        devices: 1,
        reads_pageable: false,
        allocates: false,
        contexts: Contexts::Stay,
        cap: 1 << 26,
        ceiling: usize::MAX,
        zero_limit: usize::MAX,
        seed: 1,
    }
}

/// A block that one taker passed over, because it had more to zero than a taker may, is there for one that does not mind;
/// without a device nothing has to be waited for.
#[test]
fn without_a_device_a_block_that_one_taker_passed_over_is_there_for_the_next() {
    replay(
        Setup {
            devices: 0,
            reads_pageable: false,
            allocates: false,
            contexts: Contexts::Stay,
            cap: 67108864,
            ceiling: usize::MAX,
            zero_limit: 0,
            seed: 1,
        },
        &[Take(Plain, 1), Drop(0, false), Take(Plain, 1), Take(Unzeroed, 1)],
    );
}

/// Two that were shelved together, of which one was trimmed: the other one is still the coldest.
#[test]
fn what_is_left_of_a_trimmed_pair_goes_before_what_was_shelved_later() {
    replay(
        Setup {
            devices: 1,
            reads_pageable: false,
            allocates: false,
            contexts: Contexts::Stay,
            cap: 16384,
            ceiling: usize::MAX,
            zero_limit: usize::MAX,
            seed: 1,
        },
        &[
            Take(Plain, 1),
            Take(Plain, 1),
            Drop(0, false),
            Take(Plain, 1),
            Drop(0, false),
            Take(Plain, 1),
            Prewarm(1, 1),
            TrimTo(8192),
            Settle,
            SetCap(4096),
        ],
    );
}

/// What nobody waits for may be pending all the same: the stream that was recorded is behind.
#[test]
fn an_event_of_a_buffer_that_was_proven_quiescent_is_not_recorded_again_while_it_is_pending() {
    replay(
        one_device(),
        &[
            Take(Plain, 1),
            Record(0, 0),
            AssumeQuiescent(0),
            Drop(0, false),
            Settle,
            Take(Plain, 1),
            Record(0, 0),
        ],
    );
}

#[test]
fn a_buffer_that_one_of_two_streams_is_done_with_is_not_harvested() {
    replay(
        one_device(),
        &[
            Prewarm(1, 1),
            Take(Plain, 1),
            Hold(1),
            Record(0, 0),
            CopyOut(0, 1, 255, true),
            RunUntilIdle,
            Drop(0, false),
            Settle,
            Take(Plain, 1),
        ],
    );
}

/// Three of one age, two aged out, and which of them is left nobody can say: it may be as old as they were.
#[test]
fn what_is_left_of_an_old_group_is_old() {
    replay(one_device(), &[Prewarm(1, 3), LetTimePass(7), SetCap(4096), Settle, LetTimePass(1)]);
}

/// A buffer that was out when its context ended, and comes back when the pool knows it.
#[test]
fn a_buffer_of_a_context_that_has_ended_is_not_shelved() {
    replay(
        Setup { contexts: Contexts::Change, ..one_device() },
        &[
            Take(Pinned, 1),
            EndContext(0),
            MakeContext(0),
            Take(Pinned, 5000),
            Drop(0, false),
            Settle,
            Take(Plain, 1),
        ],
    );
}

/// The new context has the old one's handle: what is recorded there is not over when the end of the old one is noticed.
#[test]
fn a_record_in_a_context_made_anew_does_not_end_with_the_old_one() {
    replay(
        Setup { contexts: Contexts::Change, ..one_device() },
        &[Take(Plain, 1), CopyOut(0, 0, 0, true), EndContext(0), MakeContext(0), Record(0, 0), Wait(0)],
    );
}
