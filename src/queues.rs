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
    /// Failed, or its block is gone: not asked again, and nothing is known of when it ended.
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
                if let (Look::Complete, false, Some(since)) = (seen, moved_on, queue.head_since) {
                    queue.usual.learn(since.elapsed());
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
    pub(crate) fn nap(&self) -> Option<Duration> {
        let waiting = self.streams.iter().filter(|queue| !queue.tokens.is_empty());
        let nap = |queue: &StreamQueue| {
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
        // A taker harvested the block; its event may wait for something else by now.
        return Look::Over;
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
