//! Who page-locks for the functions of `pin`, and looks after what they page-locked: one per driver.
//!
//! It is a pool that keeps nothing. What was pinned and is dropped makes a block's whole journey (returned,
//! waited for, unregistered on the release lane, freed) on a pool's threads, so no waiting is written twice.
//! It lives as long as anything is page-locked through it, dropped and waited for included, and gives up its
//! threads and its retains on contexts afterwards.

use super::{Region, stats};
use crate::block::Quiescent;
use crate::cleaner;
use crate::config::Settings;
use crate::context_end;
use crate::contexts::{Context, with_current};
use crate::driver::{Driver, DriverIdentity};
use crate::error::{CallError, Error};
use crate::events::with_relaxed_capture;
use crate::home::Home;
use crate::os::ProcessMark;
use crate::pages::populate_foreign;
use crate::regions::{self, Token};
use crate::sync::Arc;
use crate::sync::fixed::Mutex;
use std::sync::Weak;

/// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`.
const NOT_REGISTERED: u32 = 713;

#[derive(Debug)]
pub(super) struct Caretaker {
    home: Arc<Home>,
}

/// The process that page-locked something: its forked children touch none of the locks here, and pin nothing.
pub(super) static PINNED_IN: ProcessMark = ProcessMark::new();

/// Caretakers by driver; those without a user are on their way out.
static CARETAKERS: Mutex<Vec<(DriverIdentity, Weak<Caretaker>)>> = Mutex::new(Vec::new());

impl Caretaker {
    /// The caretaker of a driver, which is made usable first: page-locking was asked for by name.
    pub(super) fn of(driver: &Driver) -> Result<Arc<Self>, Error> {
        if PINNED_IN.is_inherited() {
            return Err(in_forked_child(0));
        }
        driver.api().prepare()?;
        PINNED_IN.set();
        let identity = driver.api().identity();
        let mut caretakers = CARETAKERS.lock();
        caretakers.retain(|(_, caretaker)| caretaker.strong_count() > 0);
        let known = caretakers.iter().find(|(of, _)| *of == identity);
        if let Some(caretaker) = known.and_then(|(_, caretaker)| caretaker.upgrade()) {
            return Ok(caretaker);
        }
        let caretaker = Arc::new(Self { home: Home::new(driver.clone(), settings(), cleaner::start) });
        caretakers.push((identity, Arc::downgrade(&caretaker)));
        Ok(caretaker)
    }

    pub(super) fn home(&self) -> &Arc<Home> {
        &self.home
    }

    fn driver(&self) -> &Driver {
        &self.home.driver
    }

    fn context(&self, bytes: usize) -> Result<Arc<Context>, Error> {
        // What is known of the caller's context may be about an earlier one with its handle.
        context_end::look_at_all(&self.home);
        self.home.contexts.of_the_caller(self.driver())?.ok_or_else(|| Error::NotPinned {
            bytes,
            reason: "no CUDA context is current on this thread and no primary context is active; create the \
                     context first, or make it current on this thread (none is created here)"
                .into(),
        })
    }

    /// Runs the driver's register call in a context, and notes what came of it.
    fn in_a_context(
        &self,
        bytes: usize,
        register: impl FnOnce(&Arc<Context>) -> Result<(), CallError>,
    ) -> Result<Arc<Context>, Error> {
        with_relaxed_capture(self.driver(), || {
            let context = self.context(bytes)?;
            let result = with_current(self.driver(), context.handle, || register(&context));
            match result.and_then(|result| result) {
                Ok(()) => Ok(context),
                Err(error) => {
                    context_end::has_ended(&self.home, &context, &error);
                    Err(error.into())
                }
            }
        })
        .inspect_err(|_| stats::STATS.refused())
    }

    /// Page-locks memory whose owner stays the caller.
    pub(super) fn register(self: &Arc<Self>, region: Region) -> Result<Registered, Error> {
        // The driver would do it, with every other call of the process waiting for it.
        populate_foreign(region.base, region.len);
        // Before it is pinned, so that nobody takes pinned memory for pageable.
        let token = regions::note(region.base, region.len);
        let registered =
            self.in_a_context(region.len, |_| self.driver().api().register(region.base, region.len));
        match registered {
            Ok(context) => {
                stats::STATS.registered(region.len);
                Ok(Registered { region, token, _context: context, caretaker: self.clone() })
            }
            Err(error) => {
                regions::forget(token);
                Err(error)
            }
        }
    }

    /// Page-locks a block that the caretaker will own.
    pub(super) fn pin(&self, block: &mut Quiescent, bytes: usize) -> Result<(), Error> {
        block.populate();
        self.in_a_context(bytes, |context| block.register(self.driver(), context.clone()))?;
        let counts = &self.home.counts;
        // Without a ceiling: what a caller asks for by name is the caller's to limit.
        counts.reserve(block.class().bytes(), usize::MAX);
        counts.registered(block.class());
        counts.class(block.class()).misses.of(true).add(1);
        Ok(())
    }
}

impl Drop for Caretaker {
    /// Nothing is page-locked through it any more.
    fn drop(&mut self) {
        let home = &self.home;
        if home.is_over() {
            return;
        }
        if home.bell.is_stopped() && !home.inbox.has_arrivals() && home.counts.registered_bytes() == 0 {
            // No block was ever dropped, so no thread of it runs; its end would do this.
            with_relaxed_capture(&home.driver, || home.contexts.release_unused(&home.driver));
        }
        home.close();
    }
}

fn settings() -> Settings {
    Settings { max_pooled_bytes: 0, thread_name: "pinpool-caretaker".into(), ..Settings::default() }
}

pub(super) fn in_forked_child(bytes: usize) -> Error {
    Error::NotPinned { bytes, reason: "this is a forked child, where CUDA cannot be used".into() }
}

/// Memory of the caller's that is page-locked.
#[derive(Debug)]
pub(super) struct Registered {
    region: Region,
    token: Token,
    /// Kept for as long as something is registered in it.
    _context: Arc<Context>,
    caretaker: Arc<Caretaker>,
}

impl Registered {
    pub(super) fn region(&self) -> Region {
        self.region
    }

    /// Unregisters it; the failure gives it back, since the memory may be page-locked still.
    pub(super) fn unregister(self) -> Result<(), (Self, CallError)> {
        let driver = self.caretaker.driver();
        let result = with_relaxed_capture(driver, || driver.api().unregister(self.region.base));
        match result {
            Ok(()) => {
                regions::forget(self.token);
                stats::STATS.unregistered(self.region.len);
                Ok(())
            }
            Err(error) => {
                stats::STATS.not_unregistered();
                if !self.is_still_registered(&error) {
                    regions::forget(self.token);
                    stats::STATS.unregistered(self.region.len);
                }
                Err((self, error))
            }
        }
    }

    /// Whether the memory has to be taken for page-locked after this failure to unregister it.
    pub(super) fn is_still_registered(&self, error: &CallError) -> bool {
        error.code() != NOT_REGISTERED
    }

    /// The same base was registered before: one region, as long as the longer of the two.
    pub(super) fn absorb(&mut self, mut earlier: Self) {
        if earlier.region.len > self.region.len {
            std::mem::swap(self, &mut earlier);
        }
        regions::forget(earlier.token);
        stats::STATS.unregistered(earlier.region.len);
    }
}
