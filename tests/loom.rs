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
    a_buffer_whose_work_is_done_is_there_for_the_next_take;
    no_buffer_is_given_out_while_the_device_uses_it;
    a_drop_during_a_shutdown_is_dealt_with;
    two_shutdowns_at_once_are_both_obeyed;
    a_closed_pool_keeps_nothing_and_ends_its_threads;
    a_drain_waits_for_everything_returned_before_it;
    what_a_caller_evicts_is_unregistered_and_freed;
    no_context_wide_wait_is_made_while_they_are_held;
    a_waiting_task_is_always_woken;
    a_waiting_task_is_woken_in_spite_of_a_shutdown;
    a_held_cleaner_does_nothing_and_goes_on_afterwards;
    a_return_ends_a_long_sleep_with_a_timer;
    nothing_handed_over_is_lost_or_doubled;
    every_job_of_a_lane_gives_its_result_once;
    a_lane_without_a_thread_loses_no_result;
    what_an_abandoned_lane_holds_is_counted_once;
    a_shelved_block_is_popped_once_and_the_counts_stay_right;
    the_cap_holds_at_every_moment;
    a_lowered_cap_is_obeyed_when_the_call_returns;
    an_event_is_never_given_to_two_uses;
    what_is_registered_is_never_missed_by_a_look_up;
    a_waiter_never_misses_an_announcement;
    no_more_is_reserved_than_the_ceiling_allows;
    the_outcome_of_a_slow_wait_reaches_its_task;
}
