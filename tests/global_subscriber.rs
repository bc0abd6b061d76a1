//! Making the process-wide pool, seen by a subscriber that uses it.

mod child;

use child::{in_child, is_child};
use std::time::Duration;

const LEN: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

/// The value that cannot be read is reported while the process-wide pool is made.
#[test]
fn a_subscriber_may_use_the_process_wide_pool_while_it_is_made() {
    in_child("a_subscriber_that_takes", &[("PINPOOL_MAX_POOLED_BYTES", "nonsense".as_ref())]);
}

#[test]
#[ignore = "run in a child by the test above"]
fn a_subscriber_that_takes() {
    if !is_child() {
        return;
    }
    struct Taking;
    impl tracing::Subscriber for Taking {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            thread_local!(static INSIDE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });
            if !INSIDE.replace(true) {
                drop(pinpool::take(LEN));
                INSIDE.set(false);
            }
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        tracing::subscriber::with_default(Taking, || drop(pinpool::take(LEN)));
        done.send(()).unwrap();
    });
    finished.recv_timeout(PATIENCE / 4).expect("the pool waits for itself");
}
