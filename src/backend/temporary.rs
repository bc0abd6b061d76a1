//! A context of one's own, for a test or a probe.

use crate::contexts::with_current;
use crate::driver::{ContextHandle, Driver};
use crate::error::{CallError, Error};
use crate::events::with_relaxed_capture;
use crate::os::ForkWord;
use crate::report::say;
use std::fmt;

/// A context that is made for a moment (`cuCtxCreate`) and destroyed when this is dropped.
///
/// For tests and probes only: it takes memory on the device, and its creation takes long. Nothing else in this
/// library makes a context. What is current on the calling thread stays current throughout, whatever fails.
///
/// ```
/// use pinpool::backend::TemporaryContext;
/// # let sim = pinpool::sim::Sim::new();
/// # let driver = sim.driver();
///
/// let context = TemporaryContext::new(&driver, 0)?;
/// context.with(|| println!("current here, and only here"))?;
/// # Ok::<(), pinpool::Error>(())
/// ```
pub struct TemporaryContext {
    driver: Driver,
    /// `None` once it was destroyed by name.
    context: Option<ContextHandle>,
    handle: ContextHandle,
    fork: ForkWord,
}

impl TemporaryContext {
    /// Makes one on a device; loads and initialises CUDA where nobody has yet.
    ///
    /// # Errors
    ///
    /// [`Error::NoCuda`], [`Error::ForkedChild`], or [`Error::Driver`]: 101 for no such device, 2 for one that is full.
    pub fn new(driver: &Driver, device: i32) -> Result<Self, Error> {
        driver.api().prepare()?;
        let context = with_relaxed_capture(driver, || driver.api().create_context(device))?;
        // From here on its drop destroys it, also when it cannot be popped.
        let fork = ForkWord::of_this_process();
        let made = Self { driver: driver.clone(), context: Some(context), handle: context, fork };
        driver.api().pop_context()?;
        Ok(made)
    }

    /// Runs `action` with the context current on this thread, and restores what was current, also after a panic.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when it cannot be made current; `action` is not run then.
    pub fn with<R>(&self, action: impl FnOnce() -> R) -> Result<R, Error> {
        if self.fork.is_child() {
            return Err(Error::ForkedChild);
        }
        Ok(with_current(&self.driver, self.handle, action)?)
    }

    /// Destroys it now, and says whether that worked.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] with the driver's code; the context may live on then.
    pub fn destroy(mut self) -> Result<(), Error> {
        Ok(self.destroy_once()?)
    }

    pub(super) fn handle(&self) -> ContextHandle {
        self.handle
    }

    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    fn destroy_once(&mut self) -> Result<(), CallError> {
        let Some(context) = self.context.take() else { return Ok(()) };
        if self.fork.is_child() {
            return Ok(()); // The parent's.
        }
        with_relaxed_capture(&self.driver, || self.driver.api().destroy_context(context))
    }
}

impl Drop for TemporaryContext {
    fn drop(&mut self) {
        if let Err(error) = self.destroy_once() {
            say!(WARN, "context_not_destroyed", %error, "a temporary context could not be destroyed");
        }
    }
}

impl fmt::Debug for TemporaryContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TemporaryContext").field("driver", &self.driver).finish_non_exhaustive()
    }
}
