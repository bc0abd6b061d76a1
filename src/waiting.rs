//! Waiting for a buffer in async code, whatever the runtime: the pool's cleaner is the timer that wakes the task.

use crate::buffer::{PinnedBuffer, SlowWait};
use crate::error::Error;
use crate::notes::Notes;
use crate::spawn::spawn;
use crate::sync::{Arc, Instant, Mutex, Ordering, fixed};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

const NAP_MIN: Duration = Duration::from_micros(20);
const NAP_MAX: Duration = Duration::from_millis(1);

/// Resolves when the uses of a buffer that are recorded and noted are done; made by [`PinnedBuffer::done`].
///
/// Needs no particular runtime. Polling it asks the driver, without waiting; while something is outstanding, a
/// thread of the pool wakes the task after naps that grow to a millisecond, and the task asks again. A use that
/// only a context-wide wait can answer for (cudarc's own copies, until a record covers them) is waited for on a
/// thread of its own.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Wait<'a> {
    buffer: &'a PinnedBuffer,
    id: u64,
    nap: Duration,
    slow: Slow,
}

/// How far the part that blocks in the driver is.
#[derive(Debug)]
enum Slow {
    NotAsked,
    Running(Arc<Elsewhere>),
    Over(Notes),
}

/// A wait on another thread.
#[derive(Debug, Default)]
struct Elsewhere {
    state: Mutex<ElsewhereState>,
}

#[derive(Debug, Default)]
struct ElsewhereState {
    outcome: Option<Result<Notes, Error>>,
    /// The latest poll's.
    waker: Option<Waker>,
}

impl PinnedBuffer {
    /// The awaitable form of [`wait`](Self::wait).
    pub fn done(&self) -> Wait<'_> {
        static NEXT: fixed::AtomicU64 = fixed::AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Wait { buffer: self, id, nap: NAP_MIN, slow: Slow::NotAsked }
    }
}

impl Future for Wait<'_> {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let waker = context.waker();
        let buffer = self.buffer;
        if let Slow::NotAsked = self.slow {
            self.slow = match buffer.slow_wait()? {
                Some(wait) => Slow::Running(Elsewhere::start(wait)),
                None => Slow::Over(Notes::new()),
            };
        }
        if let Slow::Running(elsewhere) = &self.slow {
            match elsewhere.poll(waker) {
                Poll::Ready(notes) => self.slow = Slow::Over(notes?),
                Poll::Pending => return Poll::Pending,
            }
        }
        if buffer.recorded_uses_are_done()? {
            if let Slow::Over(waited) = &self.slow {
                buffer.waits_are_over(waited);
            }
            return Poll::Ready(Ok(()));
        }
        // By time and not by the events, whose handles are the guard's: the wake-up may outlive both, and it
        // comes whether or not the work ends between the question and this.
        buffer.home().wake_at(self.id, Instant::now() + self.nap, waker);
        self.nap = (self.nap * 2).min(NAP_MAX);
        Poll::Pending
    }
}

impl Elsewhere {
    /// For uses that only a blocking wait can answer for: the task must not block, so a thread of its own does.
    /// Rare, since copies that record themselves note nothing.
    fn start(wait: SlowWait) -> Arc<Self> {
        let elsewhere = Arc::new(Self::default());
        let ours = elsewhere.clone();
        let driver = wait.driver().clone();
        let body = move || ours.finish(wait.block());
        if let Err(error) = spawn(&driver, "pinpool-wait".into(), body) {
            let problem = format!("a thread to wait on could not be started: {error}");
            elsewhere.finish(Err(Error::Setting { name: "thread", problem }));
        }
        elsewhere
    }

    fn finish(&self, outcome: Result<Notes, Error>) {
        let waker = {
            let mut state = self.state.lock();
            state.outcome = Some(outcome);
            state.waker.take()
        };
        // Outside the lock: an executor may poll at once.
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn poll(&self, waker: &Waker) -> Poll<Result<Notes, Error>> {
        let mut state = self.state.lock();
        match &state.outcome {
            Some(outcome) => Poll::Ready(outcome.clone()),
            None => {
                state.waker = Some(waker.clone());
                Poll::Pending
            }
        }
    }
}
