//! What all handles of one simulated device share.

pub(super) struct Core {}
