//! The settings of a pool, by name, and what is checked before one is built.

use super::PinnedPool;
use crate::cleaner;
use crate::config::{Backing, Settings};
use crate::driver::Driver;
use crate::error::Error;
use crate::home::{Home, memory_nodes};
use crate::machine;
use crate::placement::HugePages;
use crate::size_class::SizeClasses;
use crate::stream::AsStream;
use std::time::Duration;

/// Settings of a pool that is about to be built.
#[derive(Debug, Default)]
#[must_use = "settings do nothing before `build`"]
pub struct PoolBuilder {
    driver: Option<Driver>,
    settings: Settings,
    learn: Vec<LearnedContext>,
}

/// A context that the pool shall know from the start.
type LearnContext = Box<dyn FnOnce(&Home) -> Result<(), Error> + Send>;

struct LearnedContext(LearnContext);

impl std::fmt::Debug for LearnedContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LearnedContext")
    }
}

impl PoolBuilder {
    /// Which driver to use; [`Driver::auto`] without it.
    pub fn driver(mut self, driver: Driver) -> Self {
        self.driver = Some(driver);
        self
    }

    /// Makes the context of this stream known, so that the pool can page-lock before it has seen a copy.
    /// The pool keeps a clone of the stream's handle: an `Arc<CudaStream>`, an `Arc<SimStream>` or a `RawStream`.
    pub fn context_of<S: AsStream + Clone + Send + 'static>(mut self, stream: &S) -> Self {
        let stream = stream.clone();
        self.learn.push(LearnedContext(Box::new(move |home| {
            stream.with_stream_ref(|stream| {
                let pool = home.driver.api().identity();
                if stream.driver != pool {
                    return Err(pool.refusal_by("context_of", stream.driver));
                }
                home.contexts.of_stream(&home.driver, stream);
                Ok(())
            })
        })));
        self
    }

    /// Idle bytes kept; 0 keeps nothing. By default 4 GiB, or a quarter of the memory that the process may have where
    /// that is less: what the machine has, or what a control group (a container's limit, version 1 or 2) allows.
    ///
    /// Leave room for all that is idle at once: the buffers of every class that are in use at the busiest moment,
    /// times the class. With less, as many as fit are kept, and the others are plain memory at every take: the
    /// statistics count `passed_over`, and `misses`.
    pub fn max_pooled_bytes(mut self, bytes: usize) -> Self {
        self.settings.max_pooled_bytes = bytes;
        self
    }

    /// A hard ceiling on everything page-locked, out or idle, by default none. Over it a block stays
    /// pageable; idle blocks of other classes are let go first.
    pub fn max_registered_bytes(mut self, bytes: usize) -> Self {
        self.settings.max_registered_bytes = bytes;
        self
    }

    /// How long a buffer may lie on its shelf before it is given back, by default 5 minutes; `None`: for ever.
    ///
    /// Shelves give the buffer that came last, so one that lies for so long was not needed at any moment of that
    /// time: of each class the pool keeps as many as were in use at once. What is too old goes bit by bit, an eighth
    /// of each class at a time, sixteen times in `max_idle_time`. Where a returned buffer cannot be kept because others
    /// fill the cap, those of other classes go after an eighth of the time.
    ///
    /// Buffers of `prewarm` age like all others. The statistics count `aged_out`.
    pub fn max_idle_time(mut self, time: impl Into<Option<Duration>>) -> Self {
        self.settings.max_idle_time = time.into();
        self
    }

    /// The largest dirty prefix, in bytes, that a `take` zeroes itself to use a buffer that was returned
    /// and is not shelved yet; by default any. Beyond it such a take maps fresh memory.
    pub fn harvest_zero_limit(mut self, bytes: usize) -> Self {
        self.settings.harvest_zero_limit_bytes = bytes;
        self
    }

    /// How long a `take` that would map fresh memory waits at most for a buffer of its class that the
    /// background thread is just then working on, besides the time to zero it; by default 100 us. Never
    /// waits for the device.
    pub fn harvest_wait_limit(mut self, limit: Duration) -> Self {
        self.settings.harvest_wait_limit = limit;
        self
    }

    /// What is page-locked: the pool's own pages, or memory of the driver's; by default whichever this machine
    /// supports. [`Stats::backing`](crate::Stats::backing) says which it is.
    pub fn backing(mut self, backing: Backing) -> Self {
        self.settings.backing = backing;
        self
    }

    /// Whether buffers of 2 MiB and more lie in huge pages, by default where the machine allows it: their first fill is
    /// 4 to 5 times faster than with ordinary pages, and page-locking 10 times.
    ///
    /// The machine may forbid them (`transparent_hugepage` is `never`, a `prctl`, a kernel without): then everything
    /// works with ordinary pages, one event says so, and [`Stats::huge_pages`](crate::Stats::huge_pages).
    pub fn huge_pages(mut self, huge_pages: HugePages) -> Self {
        self.settings.huge_pages = huge_pages;
        self
    }

    /// The NUMA node that the memory of buffers comes from, as long as it has some free (`mbind`, `MPOL_PREFERRED`); by
    /// default whichever node the thread is on that first touches a buffer.
    ///
    /// Copies are fastest from the node that the device is at: [`Driver::numa_node`] finds it. Memory that the driver
    /// allocates ([`Backing::HostPinned`]) lies where the driver puts it. Where the kernel refuses (a container without
    /// `mbind`), memory is as without this, one event says so, and [`Stats::numa`](crate::Stats::numa).
    ///
    /// [`build`](Self::build) refuses a node that the machine does not have, or that the process may not use, with an
    /// error that names those that there are. On a machine with one node nothing is asked of the kernel.
    pub fn numa_node(mut self, node: impl Into<Option<u32>>) -> Self {
        self.settings.numa_node = node.into();
        self
    }

    /// Whether a take that misses faults all pages of its fresh memory in before it returns; by default it does not, and
    /// each page is faulted in when it is first written.
    ///
    /// That moves the cost from the first fill to the take: some ten milliseconds for 64 MiB. Both together get a fifth
    /// cheaper or more on ordinary pages, and no cheaper and up to twice as dear on huge ones, where a fill finds the lines that were
    /// zeroed right before it warm. So it pays where the fill is the part that must not be slow, or is done by a system
    /// call (`read` into the buffer), and not where little of the buffer is written. `prewarm` makes misses go away instead.
    pub fn prefault_misses(mut self, on: bool) -> Self {
        self.settings.prefault_misses = on;
        self
    }

    /// To which sizes requests are rounded up, by default powers of two: finer steps waste less memory, and more
    /// different classes share less of it.
    ///
    /// `len()` of a buffer is the size of its class, so with other classes it may be no power of two.
    pub fn size_classes(mut self, classes: SizeClasses) -> Self {
        self.settings.size_classes = classes;
        self
    }

    /// How many threads touch fresh memory for `prewarm`, its caller's among them; by default as many as there are cores, at
    /// most 8. With 1 no thread is started.
    ///
    /// They live as long as the call. Fewer are started for less than 16 MiB each, and none where the pool does not
    /// register its own pages ([`backing`](Self::backing)).
    pub fn prewarm_threads(mut self, threads: usize) -> Self {
        self.settings.prewarm_threads = Some(threads);
        self
    }

    /// How long `shutdown` waits for outstanding device work, by default 10 s.
    pub fn shutdown_timeout(mut self, timeout: Duration) -> Self {
        self.settings.shutdown_timeout = timeout;
        self
    }

    /// The name of the background thread; its lanes add a suffix. By default `pinpool-cleaner`.
    pub fn thread_name(mut self, name: impl Into<String>) -> Self {
        self.settings.thread_name = name.into();
        self
    }

    /// Builds the pool. Starts no thread and touches no driver, unless `context_of` was given.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] names what is out of range; [`Error::ForeignStream`] a stream of another driver.
    pub fn build(self) -> Result<PinnedPool, Error> {
        self.settings.validate()?;
        let driver = self.driver.unwrap_or_else(Driver::auto);
        if let Some(node) = self.settings.numa_node {
            machine::check_node(node, memory_nodes(&driver).as_deref())?;
        }
        let home = Home::new(driver, self.settings, cleaner::start);
        for learn in self.learn {
            (learn.0)(&home)?;
        }
        Ok(PinnedPool::new(home))
    }
}

impl PinnedPool {
    /// For a forked child: a pool of its own with the same settings, unless CUDA was used before the fork, which
    /// cannot be used after it.
    pub(crate) fn renewed(&self) -> Option<Self> {
        let Home { driver, settings, .. } = &**self.home();
        let is_usable = !driver.api().is_inherited();
        is_usable.then(|| Self::new(Home::new(driver.clone(), settings.clone(), cleaner::start)))
    }
}
