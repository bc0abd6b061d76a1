//! The interleavings of the protocols between the threads, on the real code: `cargo loom`.
//!
//! Each test is named for its promise and runs the model of that name in `src/models`. Each was seen to fail: with the
//! planted fault that stands above it loom said what stands behind the colon. A model without a bound is run through
//! everything, the others through all interleavings with up to three, two or one preemptions; every model says on
//! stderr how many those were. Where `deadlock` stands, loom found a thread that nobody would ever wake.
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

// Waking the cleaner.
models! {
    /// `Bell::park` without its last look: deadlock.
    a_return_is_never_slept_through;

    /// `Bell::park_for` without its last look: deadlock.
    a_return_ends_a_long_sleep_with_a_timer;

    /// `Bell::stop` without its last look: "nobody saw the return".
    a_return_during_the_stop_is_dealt_with_by_exactly_one_thread;

    /// A load and a store instead of the exchange in `Bell::ring_hard`: two threads are started.
    only_one_of_two_first_returns_starts_the_thread;

    /// `Progress::announce` without its fence, or without its lock: deadlock.
    a_waiter_never_misses_an_announcement;
}

// Queues between callers, the cleaner and its lanes.
models! {
    /// `Inbox::push` sets the flag before the value is there: one of two values is not found.
    nothing_handed_over_is_lost_or_doubled;

    /// `Lane::stop` gives its order while jobs are in the backlog: one of three results is missing.
    every_job_of_a_lane_gives_its_result_once;

    /// `Lane::work_inline` goes on where there is no place for a result: two of three are missing.
    a_lane_without_a_thread_loses_no_result;

    /// `give_result` does not look whether the lane was abandoned: deadlock, a result in a queue that nobody reads.
    what_an_abandoned_lane_holds_is_counted_once;

    /// The lane does not say that it is about to wait, or `hold_context_waits` does not wait for one that is, as both did
    /// not: "a context-wide wait is under way while they are held".
    no_context_wide_wait_is_made_while_they_are_held;
}

// What threads share and look things up in.
models! {
    /// `pop` counts after it has released the lock: the number of blocks is wrong.
    a_shelved_block_is_popped_once_and_the_counts_stay_right;

    /// `Shelf::push` without the budget's lock, or without adding to the budget's bound: more is pooled than the cap
    /// allows.
    the_cap_holds_at_every_moment;

    /// `Shelf::set_cap` evicts before it takes the lock: "the call has returned", and the shelf is too full. An evicted
    /// block's reference to the owner is not taken over: "references to the owner". The cap is set before the lock to evict
    /// is taken: "whoever reads both".
    a_lowered_cap_is_obeyed_when_the_call_returns;

    /// `Shelf::set_cap` does not take back what is allotted, or takes it back without the lock of the class: "what is
    /// pushed later obeys too". It leaves room where it found a shelf empty: "the call has returned".
    the_room_that_a_taker_made_goes_with_the_cap;

    /// `events::discard` or `events::revive` gives out an event that is pending: "recorded again while its earlier work
    /// is pending".
    an_event_is_never_given_to_two_uses;

    /// The writer leaves a copy out, or does not count the region: "registered, and the record says no".
    what_is_registered_is_never_missed_by_a_look_up;

    /// `Counts::reserve` by a load and a store: both of two fit where one does.
    no_more_is_reserved_than_the_ceiling_allows;
}

// A whole pool, with its threads.
models! {
    /// `Pending::pop_done` marks the move after it has released the lock; or a taker does not look again when something
    /// was put down: "a take mapped fresh memory while its buffer was on its way".
    a_returned_buffer_is_there_for_the_next_take;

    /// `take_pinned` looks once in each place, as it did: the same.
    a_buffer_whose_work_is_done_is_there_for_the_next_take;

    /// A taker does not ask the driver: "Zero of memory in use". `Pending::event_complete` takes another entry of the
    /// class for the one that was asked about: deadlock, a block whose end nobody asks for.
    no_buffer_is_given_out_while_the_device_uses_it;

    /// `Bell::stop` without its last look, or with one that was made before it said that it stops: deadlock, nobody deals
    /// with the return. `Cleaner::end` quarantines what arrived meanwhile: "left: 2, right: 0" bytes.
    a_drop_during_a_shutdown_is_dealt_with;

    /// The cleaner stops although a newer order was given, or `stop_is_done` takes the newer order's deadline away:
    /// deadlock.
    two_shutdowns_at_once_are_both_obeyed;

    /// `must_end` does not look whether the pool was closed: the thread never ends (loom: too many branches).
    a_closed_pool_keeps_nothing_and_ends_its_threads;

    /// A drop counts in one drain epoch and its block says another: deadlock, a drain that nothing ends.
    a_drain_waits_for_everything_returned_before_it;

    /// `Home::let_go` rings before it hands over: after the shutdown an evicted buffer is left.
    what_a_caller_evicts_is_unregistered_and_freed;

    /// `Home::wake_at` does not ring: deadlock.
    a_waiting_task_is_always_woken;

    /// The cleaner's last look does not ask for waiting tasks: deadlock.
    a_waiting_task_is_woken_in_spite_of_a_shutdown;

    /// `Home::wake_at` does not wake the task itself where there is no thread: deadlock.
    a_waiting_task_is_woken_where_no_thread_can_be_started;

    /// `Elsewhere::finish` takes the waker first and says the outcome afterwards: deadlock.
    the_outcome_of_a_slow_wait_reaches_its_task;

    /// `hold_cleaner` does not wait until the cleaner rests: "the cleaner works while it is held".
    a_held_cleaner_does_nothing_and_goes_on_afterwards;
}
