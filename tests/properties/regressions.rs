//! Scripts that failed once, as the properties printed them.

use crate::replay;
use crate::script::How::*;
use crate::script::Op::*;
use crate::script::Setup;

/// A block that one taker passed over, because it had more to zero than a taker may, is there for one that does not mind;
/// without a device nothing has to be waited for.
#[test]
fn without_a_device_a_block_that_one_taker_passed_over_is_there_for_the_next() {
    replay(
        Setup {
            devices: 0,
            reads_pageable: false,
            cap: 67108864,
            ceiling: usize::MAX,
            zero_limit: 0,
            seed: 1,
        },
        &[Take(Plain, 1), Drop(0, false), Take(Plain, 1), Take(Unzeroed, 1)],
    );
}
