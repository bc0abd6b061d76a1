//! Waiting for a buffer in async code, whatever the runtime: the pool's cleaner polls anyway, so it wakes the task.

use crate::buffer::{NotedWait, PinnedBuffer};
use crate::error::Error;
use crate::sync::{Arc, Mutex, thread};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Resolves when all recorded and noted uses of a buffer are done; made by [`PinnedBuffer::done`].
///
/// Needs no particular runtime. Polling it asks the driver; in between the pool's cleaner does, and wakes the task.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Wait<'a> {
    buffer: &'a PinnedBuffer,
    /// The context-wide wait that a thread makes for this one.
    elsewhere: Option<Arc<Elsewhere>>,
}

#[derive(Debug, Default)]
struct Elsewhere {
    state: Mutex<(Option<Result<(), Error>>, Option<Waker>)>,
}

impl PinnedBuffer {
    /// The awaitable form of [`wait`](Self::wait).
    pub fn done(&self) -> Wait<'_> {
        Wait { buffer: self, elsewhere: None }
    }
}

impl Future for Wait<'_> {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let waker = context.waker();
        let buffer = self.buffer;
        if self.elsewhere.is_none()
            && let Some(wait) = buffer.noted_wait()
        {
            self.elsewhere = Some(Elsewhere::start(wait));
        }
        match self.elsewhere.as_ref().map(|elsewhere| elsewhere.poll(waker)) {
            Some(Poll::Pending) => return Poll::Pending,
            Some(Poll::Ready(Err(error))) => return Poll::Ready(Err(error)),
            Some(Poll::Ready(Ok(()))) | None => {}
        }
        // Registered before the question, so that a completion in between wakes the task.
        buffer.wake_when_done(waker);
        match buffer.recorded_uses_are_done() {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl Elsewhere {
    /// For uses that only a blocking, context-wide wait can answer for: the task must not block, so a thread
    /// of its own does. Rare: copies that record themselves note nothing.
    fn start(wait: NotedWait) -> Arc<Self> {
        let elsewhere = Arc::new(Self::default());
        let ours = elsewhere.clone();
        let body = move || {
            let result = wait.block();
            let mut state = ours.state.lock();
            state.0 = Some(result);
            if let Some(waker) = state.1.take() {
                waker.wake();
            }
        };
        if let Err(error) = thread::Builder::new().name("pinpool-wait".into()).spawn(body) {
            let message = Error::Setting { name: "thread", problem: format!("a thread to wait on: {error}") };
            elsewhere.state.lock().0 = Some(Err(message));
        }
        elsewhere
    }

    fn poll(&self, waker: &Waker) -> Poll<Result<(), Error>> {
        let mut state = self.state.lock();
        match &state.0 {
            Some(result) => Poll::Ready(result.clone()),
            None => {
                state.1 = Some(waker.clone());
                Poll::Pending
            }
        }
    }
}
