//! What the cleaner waits for: recorded events, by stream, in record order.
//!
//! Events of one stream complete in order, so only the head of each stream is asked: the cost of a look is
//! per stream, not per block. That is a hint for whom to ask, never a proof: the driver reuses stream
//! handles, so a queue whose head stays pending for long gets its followers asked too.

use crate::block::Returned;
use crate::contexts::Context;
use crate::driver::{Driver, EventHandle};
use crate::error::CallError;
use crate::events::StreamKey;
use crate::pace::Usual;
use crate::pending::{EntryId, Pending};
use crate::size_class::SizeClass;
use crate::sync::{Arc, Instant};
use std::collections::VecDeque;
use std::time::Duration;

/// A head that is pending for longer than this gets its followers asked, once in the same time.
const HEAD_IS_STUCK_AFTER: Duration = Duration::from_millis(10);

/// Queues of streams that are idle are kept for reuse up to this many.
const IDLE_QUEUES_KEPT: usize = 64;

/// One recorded use of a pending block.
struct Token {
    sequence: u64,
    class: SizeClass,
    id: EntryId,
    event: EventHandle,
    context: Arc<Context>,
}

struct StreamQueue {
    key: StreamKey,
    tokens: VecDeque<Token>,
    /// When the present head was first seen pending.
    head_since: Option<Instant>,
    usual: Usual,
    followers_asked_at: Option<Instant>,
}

/// All streams that something waits for.
#[derive(Default)]
pub(crate) struct Queues {
    streams: Vec<StreamQueue>,
}

/// A use whose event could not be asked.
pub(crate) struct Failure {
    pub(crate) class: SizeClass,
    pub(crate) id: EntryId,
    pub(crate) context: Arc<Context>,
    pub(crate) error: CallError,
}

/// What one token's look gave.
enum Look {
    Complete,
    /// Its block is gone, most likely to a taker who found it complete: it ended before this look.
    Gone,
    /// Failed, or its context has ended: not asked again, and nothing is known of when it ended.
    Over,
    Pending,
}

impl Queues {
    /// Adds the uses of a block that is about to be pending under `id`.
    pub(crate) fn add(&mut self, block: &Returned, id: EntryId) {
        for used in block.uses() {
            let token = Token {
                sequence: used.sequence,
                class: block.class(),
                id,
                event: used.event,
                context: used.context.clone(),
            };
            let queue = match self.streams.iter().position(|queue| queue.key == used.key) {
                Some(index) => &mut self.streams[index],
                None => {
                    self.streams.push(StreamQueue {
                        key: used.key,
                        tokens: VecDeque::new(),
                        head_since: None,
                        usual: Usual::default(),
                        followers_asked_at: None,
                    });
                    self.streams.last_mut().expect("just pushed")
                }
            };
            // Returns come almost in record order; look for the place from the back.
            let place = queue.tokens.iter().rposition(|other| other.sequence < token.sequence);
            queue.tokens.insert(place.map_or(0, |index| index + 1), token);
        }
    }

    /// Asks the head of every stream, and passes on what is complete. Failures go to `failed`.
    pub(crate) fn poll(&mut self, driver: &Driver, pending: &Pending, mut failed: impl FnMut(Failure)) {
        for queue in &mut self.streams {
            let mut moved_on = false;
            while let Some(token) = queue.tokens.front() {
                let seen = look(driver, pending, token, &mut failed);
                if let Look::Pending = seen {
                    break;
                }
                // Of the heads that are found together only the first one was waited for.
                match (seen, queue.head_since) {
                    (Look::Complete, Some(since)) if !moved_on => queue.usual.learn(since.elapsed()),
                    (Look::Gone, Some(since)) if !moved_on => queue.usual.learn_at_most(since.elapsed()),
                    _ => {}
                }
                moved_on = true;
                queue.tokens.pop_front();
            }
            if queue.tokens.is_empty() {
                queue.head_since = None;
                continue;
            }
            let now = Instant::now();
            if moved_on || queue.head_since.is_none() {
                queue.head_since = Some(now);
                queue.followers_asked_at = None;
            }
            ask_followers_of_a_stuck_head(queue, now, |token| look(driver, pending, token, &mut failed));
        }
        if self.streams.len() > IDLE_QUEUES_KEPT {
            self.streams.retain(|queue| !queue.tokens.is_empty());
        }
    }

    /// How long to sleep until the next look; `None` when nothing is waited for.
    pub(crate) fn nap(&mut self) -> Option<Duration> {
        let waiting = self.streams.iter_mut().filter(|queue| !queue.tokens.is_empty());
        let nap = |queue: &mut StreamQueue| {
            queue.usual.nap_at(queue.head_since.map_or(Duration::ZERO, |since| since.elapsed()))
        };
        waiting.map(nap).min()
    }

    pub(crate) fn clear(&mut self) {
        self.streams.clear();
    }
}

fn ask_followers_of_a_stuck_head(
    queue: &mut StreamQueue,
    now: Instant,
    mut look: impl FnMut(&Token) -> Look,
) {
    let since = queue.followers_asked_at.or(queue.head_since).unwrap_or(now);
    if queue.tokens.len() > 1 && now - since >= HEAD_IS_STUCK_AFTER {
        queue.followers_asked_at = Some(now);
        let mut index = 0;
        queue.tokens.retain(|token| {
            index += 1;
            index == 1 || matches!(look(token), Look::Pending)
        });
    }
}

fn look(driver: &Driver, pending: &Pending, token: &Token, failed: &mut impl FnMut(Failure)) -> Look {
    if !pending.contains(token.class, token.id) {
        // Its event may wait for something else by now.
        return Look::Gone;
    }
    if token.context.is_gone() {
        // Its work ended with it, and the handle is nobody's, or another's.
        pending.event_complete(token.class, token.id);
        return Look::Over;
    }
    match pending.ask(|| driver.api().query_event(token.event)) {
        Ok(true) => {
            pending.event_complete(token.class, token.id);
            Look::Complete
        }
        Ok(false) => Look::Pending,
        Err(error) if crate::driver::Severity::of(&error) == crate::driver::Severity::Capture => {
            Look::Pending
        }
        Err(error) => {
            failed(Failure { class: token.class, id: token.id, context: token.context.clone(), error });
            Look::Over
        }
    }
}

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
    use super::*;
    use crate::block::Out;
    use crate::contexts::Contexts;
    use crate::driver::with_relaxed_capture;
    use crate::events;
    use crate::pages::Pages;
    use crate::pending::Stage;
    use crate::size_class::Classes;
    use crate::stream::sealed::AsStreamRef;

    /// A held stream, and blocks that wait for it.
    struct Waiting {
        sim: crate::sim::Sim,
        driver: Driver,
        stream: crate::sim::SimStream,
        pending: Pending,
        queues: Queues,
        ids: Vec<EntryId>,
    }

    impl Waiting {
        fn of(blocks: usize) -> Self {
            let sim = crate::sim::Sim::new();
            let (device, driver) = (sim.context(0), sim.driver());
            device.bind();
            let (stream, contexts) = (device.stream(), Contexts::default());
            stream.hold();
            let (pending, mut queues) = (Pending::new(Classes::POWERS_OF_TWO), Queues::default());
            let mut wait = |_| {
                let mut block = Out::fresh(Pages::map(class().bytes()).unwrap(), class());
                stream.with_stream_ref(|stream| {
                    let context = contexts.of_stream(&driver, stream);
                    let recorded = events::record(&driver, context, None, stream, None);
                    block.add_use(recorded.unwrap_or_else(|_| panic!("the device records")));
                });
                let (block, id) = (block.give_back(0, None, 0, 0), pending.reserve_id());
                queues.add(&block, id);
                pending.insert_as(id, Stage::Waiting(1), block);
                id
            };
            let ids = (0..blocks).map(&mut wait).collect();
            let mut all = Self { sim, driver, stream, pending, queues, ids };
            all.queues.streams[0].usual.learn(Duration::from_millis(30));
            assert!(all.poll().is_some(), "its stream is held");
            // As if no time had passed since, however slow this machine is.
            all.queues.streams[0].head_since = Some(Instant::now() + Duration::from_secs(3600));
            all
        }

        fn poll(&mut self) -> Option<Duration> {
            let Self { queues, driver, pending, .. } = self;
            with_relaxed_capture(driver, || queues.poll(driver, pending, |_| panic!("nothing fails")));
            queues.nap()
        }

        fn usual(&self) -> Duration {
            self.queues.streams[0].usual.mean()
        }

        fn end(self) {
            for id in self.ids {
                self.pending.remove(class(), id).into_iter().for_each(Returned::quarantine);
            }
        }
    }

    fn class() -> SizeClass {
        SizeClass::of(1).unwrap()
    }

    #[test]
    fn what_a_taker_found_complete_makes_the_next_one_expected_sooner() {
        let mut waiting = Waiting::of(1);
        let expected = waiting.usual();
        waiting.stream.release();
        waiting.sim.run_until_idle();
        waiting.pending.remove(class(), waiting.ids[0]).expect("a taker finds it").quarantine();
        assert_eq!(waiting.poll(), None);
        let now = waiting.usual();
        assert!(now < expected, "{now:?}, as if it had been pending all the time");
        waiting.end();
    }

    #[test]
    fn of_those_that_are_found_together_only_the_first_was_waited_for() {
        let (mut one, mut three) = (Waiting::of(1), Waiting::of(3));
        for waiting in [&mut one, &mut three] {
            waiting.stream.release();
            waiting.sim.run_until_idle();
            assert_eq!(waiting.poll(), None);
        }
        assert_eq!(one.usual(), three.usual());
        one.end();
        three.end();
    }

    #[test]
    fn the_next_head_is_waited_for_since_it_became_the_head() {
        let mut waiting = Waiting::of(2);
        waiting.stream.release();
        assert!(waiting.sim.step());
        assert!(waiting.poll().is_some(), "the second one is pending");
        assert_eq!(waiting.queues.streams[0].tokens.len(), 1);
        assert!(waiting.queues.streams[0].head_since.is_some_and(|since| since <= Instant::now()));
        waiting.sim.run_until_idle();
        assert_eq!(waiting.poll(), None);
        waiting.end();
    }
}
