//! Tasks that wait for a buffer, and are to be woken to ask again: the cleaner is their timer.

use crate::sync::{AtomicUsize, Instant, Mutex, Ordering};
use std::task::Waker;
use std::time::Duration;

/// The waiting tasks of a pool.
#[derive(Debug, Default)]
pub(crate) struct Sleepers {
    tasks: Mutex<Vec<Sleeper>>,
    count: AtomicUsize,
}

#[derive(Debug)]
struct Sleeper {
    id: u64,
    due: Instant,
    waker: Waker,
}

impl Sleepers {
    /// One order a task; a later one with the same id replaces it.
    pub(crate) fn wake_at(&self, id: u64, due: Instant, waker: &Waker) {
        let sleeper = Sleeper { id, due, waker: waker.clone() };
        let mut tasks = self.tasks.lock();
        match tasks.iter_mut().find(|other| other.id == id) {
            Some(other) => *other = sleeper,
            None => tasks.push(sleeper),
        }
        self.count.store(tasks.len(), Ordering::SeqCst);
    }

    /// Whether a task waits to be woken.
    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// How long until the next task is to be woken.
    pub(crate) fn next_wake(&self) -> Option<Duration> {
        if !self.any() {
            return None;
        }
        let due = self.tasks.lock().iter().map(|sleeper| sleeper.due).min();
        due.map(|due| due.saturating_duration_since(Instant::now()))
    }

    /// Wakes the tasks whose time has come.
    pub(crate) fn wake_due(&self) {
        let now = Instant::now();
        self.wake(|sleeper| sleeper.due <= now);
    }

    pub(crate) fn wake_all(&self) {
        self.wake(|_| true);
    }

    fn wake(&self, is_due: impl Fn(&Sleeper) -> bool) {
        let due: Vec<Sleeper> = {
            let mut tasks = self.tasks.lock();
            let (due, left) = std::mem::take(&mut *tasks).into_iter().partition(is_due);
            *tasks = left;
            self.count.store(tasks.len(), Ordering::SeqCst);
            due
        };
        // Outside the lock: a waker may run the task, which orders again.
        due.into_iter().for_each(|sleeper| sleeper.waker.wake());
    }
}
