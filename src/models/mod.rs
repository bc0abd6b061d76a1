//! Models of the protocols, on the real code, for `tests/loom.rs`: each function is one model, run through its
//! interleavings by loom. What each promises, and the planted fault that it was seen to find, stands there.
#![allow(missing_docs)] // Only under `cfg(loom)`, where nobody but that test looks.

mod device;
mod hand_over;
mod store;
mod wake;
mod whole;

pub use hand_over::*;
pub use store::*;
pub use wake::*;
pub use whole::*;

use crate::config::Settings;
use crate::driver::Driver;
use crate::home::Home;
use crate::inbox::Inbox;
use crate::sync::{Arc, Instant, Ordering, fixed, thread};
use std::time::Duration;

/// Longer than any model's clock runs.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// Runs every interleaving with at most `preemptions` switches away from a thread that could go on.
///
/// Where a model is small enough, `None`: all of them.
fn check(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    check_without(&[], preemptions, model);
}

/// As [`check`], where threads whose names end so cannot be started.
fn check_without(
    refused: &'static [&'static str],
    preemptions: Option<usize>,
    model: impl Fn() + Send + Sync + 'static,
) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 20_000;
    let runs = Arc::new(fixed::AtomicUsize::new(0));
    let counted = runs.clone();
    let started = std::time::Instant::now();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        Instant::reset();
        thread::begin(refused);
        model();
    });
    let runs = runs.load(Ordering::Relaxed);
    eprintln!("{runs} interleavings, preemptions {preemptions:?}, {:.1?}", started.elapsed());
}

/// A pool's shared state, whose cleaner cannot be started.
fn home() -> Arc<Home> {
    Home::new(Driver::host_only(), Settings::default(), |_| None)
}

/// As the cleaner's look at its inbox.
fn take_all<T>(inbox: &Inbox<T>) -> Vec<T> {
    if !inbox.has_arrivals() {
        return Vec::new();
    }
    let flagged = inbox.take_flags();
    let mut taken = Vec::new();
    if flagged.overflow {
        taken.extend(std::iter::from_fn(|| inbox.pop_overflow()));
    }
    for class in flagged {
        taken.extend(std::iter::from_fn(|| inbox.pop(class)));
    }
    taken
}
