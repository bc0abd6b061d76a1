//! Every interleaving of the protocols: `cargo loom`.
#![cfg(loom)]

macro_rules! models {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            pinpool::models::$name();
        }
    )*};
}

models! {
    /// Fault: `Bell::park` without its last look. loom: deadlock, the cleaner sleeps for ever.
    a_return_is_never_slept_through;

    /// Fault: `Bell::stop` without its last look. loom: "nobody saw the return".
    a_return_during_the_stop_is_dealt_with_by_exactly_one_thread;

    /// Fault: a `store` instead of the exchange in `Bell::ring_hard`. loom: two threads are started.
    only_one_of_two_first_returns_starts_the_thread;

    a_returned_buffer_is_there_for_the_next_take;
}
