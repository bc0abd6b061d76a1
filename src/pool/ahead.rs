//! Fresh blocks, faulted in by several threads while the one that page-locks them is at work on others.
//!
//! The first touch of memory is most of what page-locking it costs, and goes as fast as there are cores; the driver's part
//! cannot be shared, since it holds a lock of the process.

use super::fresh::fresh;
use crate::block::Out;
use crate::error::Error;
use crate::home::Home;
use crate::report::{Kind, say_failure};
use crate::size_class::SizeClass;
use crate::spawn::spawn;
use crate::sync::{Arc, Condvar, Mutex, parallelism, thread};
use std::collections::VecDeque;

/// A thread for less takes longer to start than it saves.
const BYTES_PER_THREAD: usize = 16 << 20;

/// Without other word, more threads than this are of no use to any memory.
const THREADS_MAX: usize = 8;

/// Gives fresh blocks, in no order, and frees those that nobody wanted.
pub(super) struct Ahead<'a> {
    home: &'a Home,
    class: SizeClass,
    /// Not mapped yet.
    wanted: usize,
    /// Mapped, and not given yet.
    mapped: usize,
    /// How many may be.
    mapped_max: usize,
    shared: Arc<Shared>,
    threads: Vec<thread::JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    blocks: Mutex<Blocks>,
    moved: Condvar,
}

#[derive(Default)]
struct Blocks {
    untouched: VecDeque<Out>,
    touched: VecDeque<Out>,
    is_over: bool,
}

impl<'a> Ahead<'a> {
    /// For `count` blocks. Asks whether the pages will be registered only where threads would help: where they are
    /// not, touching them is in vain.
    pub(super) fn new(
        home: &'a Home,
        class: SizeClass,
        count: usize,
        registers_pages: impl FnOnce() -> bool,
    ) -> Self {
        let helpers = helpers(home, class, count);
        let helpers = if helpers > 0 && registers_pages() { helpers } else { 0 };
        let mut ahead = Self {
            home,
            class,
            wanted: count,
            mapped: 0,
            mapped_max: 2 * helpers + 1,
            shared: Arc::default(),
            threads: Vec::new(),
        };
        ahead.start(helpers);
        ahead
    }

    fn start(&mut self, helpers: usize) {
        for _ in 0..helpers {
            let shared = self.shared.clone();
            let name = format!("{}-prewarm", self.home.settings.thread_name);
            match spawn(&self.home.driver, name.clone(), move || shared.touch_all()) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    let is_first = self.home.said.is_first(Kind::ThreadRefused);
                    let thread = name.as_str();
                    say_failure!(is_first, "thread_refused", thread, %error, "prewarm does with fewer threads");
                    return;
                }
            }
        }
    }

    /// One more block. An error when no memory can be had for it, and none was mapped before.
    pub(super) fn next(&mut self) -> Result<Out, Error> {
        if self.threads.is_empty() {
            return fresh(self.home, self.class);
        }
        self.map_more()?;
        let block = self.shared.take();
        self.mapped -= 1;
        Ok(block)
    }

    fn map_more(&mut self) -> Result<(), Error> {
        while self.wanted > 0 && self.mapped < self.mapped_max && self.has_room() {
            match fresh(self.home, self.class) {
                Ok(block) => self.shared.offer(block),
                Err(error) if self.mapped == 0 => return Err(error),
                // What there is comes first.
                Err(_) => break,
            }
            self.wanted -= 1;
            self.mapped += 1;
        }
        Ok(())
    }

    /// On the shelf, for one more than is on its way. The one that was asked for goes through in any case.
    fn has_room(&self) -> bool {
        let promised_bytes = self.mapped.saturating_mul(self.class.bytes());
        self.mapped == 0 || self.home.shelf.has_room_for(self.class, promised_bytes)
    }
}

impl Drop for Ahead<'_> {
    /// Waits for the threads, each of which finishes its block, at most.
    fn drop(&mut self) {
        self.shared.blocks.lock().is_over = true;
        self.shared.moved.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        let rest = std::mem::take(&mut *self.shared.blocks.lock());
        for block in rest.untouched.into_iter().chain(rest.touched) {
            // Pageable and never shown to a device.
            let _ = block.never_handed_out().retire().release(&self.home.driver);
        }
    }
}

impl Shared {
    fn offer(&self, block: Out) {
        self.blocks.lock().untouched.push_back(block);
        self.moved.notify_all();
    }

    /// A touched one, or one that this thread touches, or the first that another one is done with; there is one.
    fn take(&self) -> Out {
        let mut blocks = self.blocks.lock();
        loop {
            if let Some(block) = blocks.touched.pop_front() {
                return block;
            }
            if let Some(mut block) = blocks.untouched.pop_front() {
                drop(blocks);
                block.populate();
                return block;
            }
            self.moved.wait(&mut blocks);
        }
    }

    /// Until it is over.
    fn touch_all(&self) {
        let mut blocks = self.blocks.lock();
        while !blocks.is_over {
            match blocks.untouched.pop_front() {
                Some(mut block) => {
                    drop(blocks);
                    block.populate();
                    blocks = self.blocks.lock();
                    blocks.touched.push_back(block);
                    self.moved.notify_all();
                }
                None => self.moved.wait(&mut blocks),
            }
        }
    }
}

/// How many threads besides the caller's are of use.
fn helpers(home: &Home, class: SizeClass, count: usize) -> usize {
    let useful = class.bytes().saturating_mul(count) / BYTES_PER_THREAD;
    if useful < 2 || count < 2 {
        return 0;
    }
    let most = home.settings.prewarm_threads.unwrap_or_else(|| parallelism().min(THREADS_MAX));
    most.min(useful).min(count).saturating_sub(1)
}
