//! Hysteresis at the cap: what would be let go at its next return is not page-locked.
//!
//! The shelves alone cannot say that the cap is too small for what is in use: while everything is out they are
//! empty, whatever comes back first would be page-locked, and what comes back last, page-locked long since,
//! would push it out again, round after round. So a page-locked block that has to go for the cap is taken as a
//! sign, and for a while after it all that is page-locked counts against the cap, out or idle.
//!
//! Only for a while: a caller may hold page-locked buffers for good, and they must not keep the pool from
//! serving the others. After it one block is tried; only when that leads to no other sign is everything as before.

use crate::sync::Instant;
use std::time::Duration;

/// How long a sign counts.
const WHILE: Duration = Duration::from_secs(10);

/// Whether the cap was lately too small for what is page-locked.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Boundary(State);

#[derive(Debug, Clone, Copy, Default)]
enum State {
    /// What is idle counts.
    #[default]
    Open,
    /// All that is page-locked counts.
    Full { until: Instant },
    /// One block was tried; all that is page-locked counts.
    Probing { until: Instant },
}

impl Boundary {
    /// A page-locked block has to go, because the cap has no room for it.
    pub(crate) fn overflowed(&mut self, now: Instant) {
        self.0 = State::Full { until: now + WHILE };
    }

    /// Whether a block for which the shelves have room is to be page-locked; `all_fits` says whether it would fit
    /// if all that is page-locked were on the shelves.
    pub(crate) fn admits(&mut self, now: Instant, all_fits: impl FnOnce() -> bool) -> bool {
        match self.0 {
            State::Open => true,
            State::Full { until } if now >= until => {
                if !all_fits() {
                    self.0 = State::Probing { until: now + WHILE };
                }
                true
            }
            State::Probing { until } if now >= until => {
                self.0 = State::Open;
                true
            }
            State::Full { .. } | State::Probing { .. } => all_fits(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sign_counts_for_a_while_then_one_block_is_tried() {
        let start = Instant::now();
        let mut boundary = Boundary::default();
        assert!(boundary.admits(start, || false), "without a sign the shelves alone count");
        boundary.overflowed(start);
        assert!(!boundary.admits(start, || false) && boundary.admits(start, || true));
        let later = start + WHILE;
        assert!(boundary.admits(later, || false), "one is tried");
        assert!(!boundary.admits(later, || false), "one and not two");
        boundary.overflowed(later);
        assert!(!boundary.admits(later + WHILE / 2, || false), "the try went wrong");
        assert!(boundary.admits(later + WHILE, || false), "the next try");
        let open = later + WHILE * 2;
        assert!(boundary.admits(open, || false) && boundary.admits(open, || false), "the try went well");
    }
}
