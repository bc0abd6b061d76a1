//! The one path by which every kind of memory is allocated, recorded, rolled back and released.
#![allow(unsafe_code)] // The trait's functions are unsafe, because memory is released by its address.

use super::MemoryBackend;
use super::error::BackendError;
use super::kind::Kind;
use super::record::{AllocationRecord, Claim, DEFAULT_CAPACITY};
use super::stats::{BackendStats, Counters};
use super::temporary::TemporaryContext;
use crate::captures::Captures;
use crate::contexts::{Context, Contexts, with_current};
use crate::driver::{Driver, Severity};
use crate::error::{CallError, Error};
use crate::events::with_relaxed_capture;
use crate::os::ForkWord;
use crate::regions;
use crate::report::say;
use crate::stream::AsStream;
use crate::sync::Arc;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`.
const CAPTURE_IMPLICIT: u32 = 906;

/// A backend for one kind of memory, in one context. See the [module](super) for which kind to take.
///
/// Shared by reference, or in an `Arc`: an allocation and a release take no lock of pinpool's and allocate nothing.
/// The driver takes its own.
///
/// What is not released when the backend is dropped is leaked: somebody may use it still.
pub struct Backend<K: Kind> {
    driver: Driver,
    contexts: Contexts,
    /// What the pools of this driver know of captures, and who forbids waits.
    captures: Arc<Captures>,
    /// `Some` until the backend is dropped.
    context: Option<Arc<Context>>,
    device: i32,
    is_always_touchable: bool,
    record: AllocationRecord,
    counters: Counters,
    fork: ForkWord,
    kind: PhantomData<fn() -> K>,
}

impl<K: Kind> Backend<K> {
    /// A backend in a context of the application: the calling thread's, if it is a primary one; else a primary
    /// context that is active; else the thread's. None is created, and a primary one stays retained for as long as
    /// the backend lives.
    ///
    /// Loads and initialises CUDA where nobody has yet.
    ///
    /// # Errors
    ///
    /// [`BackendError::Unavailable`] where CUDA cannot be used or there is no context;
    /// [`BackendError::Unsuitable`] where the device has no such memory; [`BackendError::ForkedChild`].
    pub fn new(driver: &Driver) -> Result<Self, BackendError> {
        Self::builder(driver).build()
    }

    /// Settings: the context, and how many allocations may live at once.
    pub fn builder<'a>(driver: &Driver) -> BackendBuilder<'a, K> {
        BackendBuilder {
            driver: driver.clone(),
            choice: Choice::OfTheApplication,
            record_capacity: DEFAULT_CAPACITY,
            kind: PhantomData,
        }
    }

    /// The record of what is live.
    pub fn record(&self) -> &AllocationRecord {
        &self.record
    }

    /// The device that its context belongs to.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// What it did and holds.
    pub fn stats(&self) -> BackendStats {
        self.counters.snapshot(&self.record)
    }

    /// Runs a driver call in the backend's context, with this thread's captures out of the way, and restores both.
    ///
    /// Not where the context has ended and another may have its handle: what was allocated in it has ended too, and
    /// the driver may have given its address to somebody else.
    fn in_context<R>(&self, call: impl FnOnce() -> R) -> Result<R, CallError> {
        const CONTEXT_IS_DESTROYED: u32 = 709;
        // It is `Some` for as long as anybody can call.
        let Some(context) = &self.context else {
            return Err(CallError::new("cuCtxSetCurrent", CONTEXT_IS_DESTROYED));
        };
        with_relaxed_capture(&self.driver, || {
            if !context.is_itself(&self.driver) {
                return Err(CallError::new("cuCtxSetCurrent", CONTEXT_IS_DESTROYED));
            }
            with_current(&self.driver, context.handle, call)
        })
    }

    fn try_allocate(&self, bytes: usize) -> Result<NonNull<u8>, BackendError> {
        if self.fork.is_child() {
            return Err(BackendError::ForkedChild);
        }
        if bytes == 0 || bytes > isize::MAX as usize / 2 {
            return Err(BackendError::Size { bytes });
        }
        let base = self.obtain(bytes)?;
        // A driver that says yes and gives nothing has not allocated.
        let pointer = NonNull::new(base as *mut u8).ok_or(BackendError::OutOfMemory { bytes })?;
        self.record_or_roll_back(base, bytes)?;
        Ok(pointer)
    }

    fn obtain(&self, bytes: usize) -> Result<usize, BackendError> {
        let obtained = self.in_context(|| K::obtain(&self.driver, self.device, bytes));
        match obtained {
            Ok(Ok(base)) => Ok(base),
            Ok(Err(refusal)) => {
                if refusal.is_leak {
                    self.counters.leaked(bytes);
                }
                Err(refusal.error)
            }
            Err(call) => Err(call.into()),
        }
    }

    fn give_back(&self, base: usize, bytes: usize) -> Result<(), CallError> {
        self.in_context(|| K::give_back(&self.driver, base, bytes))?
    }

    /// Records a fresh allocation, or releases it again.
    fn record_or_roll_back(&self, base: usize, bytes: usize) -> Result<(), BackendError> {
        // Nobody else knows the memory yet, so this is early enough.
        let region = regions::note(base, bytes);
        let Err(full) = self.record.insert(base, bytes, region.id()) else { return Ok(()) };
        self.counters.rolled_back();
        let released = self.give_back(base, bytes);
        match &released {
            Ok(()) => regions::forget(region),
            Err(error) => {
                self.counters.leaked(bytes);
                say!(WARN, "backend_leaked", bytes, backend = K::NAME, %error, "an allocation that could not be recorded is leaked");
            }
        }
        Err(BackendError::RecordFull { capacity: full.capacity, leaked: released.err() })
    }

    /// Releases what is claimed; what the driver refuses for good is leaked, and counted.
    fn release(&self, claim: Claim<'_>) -> Result<(), BackendError> {
        let allocation = claim.allocation();
        match self.give_back(allocation.base, allocation.bytes) {
            Ok(()) => {
                regions::forget(regions::Token::of(allocation.base, allocation.tag));
                claim.remove();
                self.counters.released();
                Ok(())
            }
            Err(error) => {
                // Once the capture is over, the same call may succeed, so it stays live.
                if Severity::of(&error) == Severity::Capture {
                    drop(claim);
                } else {
                    self.leak(claim, &error);
                }
                Err(error.into())
            }
        }
    }

    fn leak(&self, claim: Claim<'_>, error: &dyn fmt::Display) {
        let bytes = claim.allocation().bytes;
        claim.remove();
        self.counters.leaked(bytes);
        say!(WARN, "backend_leaked", bytes, backend = K::NAME, %error, "memory is leaked: it could not be released");
    }

    fn claim(&self, base: usize, bytes: usize) -> Result<Claim<'_>, BackendError> {
        let not_ours = || BackendError::NotOurs { backend: K::NAME, address: base };
        let claim = self.record.claim(base).ok_or_else(not_ours)?;
        match claim.allocation().bytes {
            actual if actual == bytes => Ok(claim),
            actual => Err(BackendError::WrongSize { address: base, bytes: actual, stated: bytes }),
        }
    }
}

// SAFETY: what `allocate` gives comes from the driver or from the system and is nobody else's until `deallocate`
// gives it back: the record hands each base to one release.
unsafe impl<K: Kind> MemoryBackend for Backend<K> {
    const NAME: &'static str = K::NAME;
    const CAN_CACHE_ON_HOST: bool = K::CAN_CACHE_ON_HOST;
    const IS_ZEROED: bool = K::IS_ZEROED;

    unsafe fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, BackendError> {
        let allocated = self.try_allocate(bytes);
        match &allocated {
            Ok(_) => self.counters.allocated(),
            Err(_) => self.counters.refused(),
        }
        allocated
    }

    unsafe fn deallocate(&self, base: NonNull<u8>, bytes: usize) -> Result<(), BackendError> {
        if self.fork.is_child() {
            return Err(BackendError::ForkedChild);
        }
        let released = self.claim(base.as_ptr() as usize, bytes).and_then(|claim| self.release(claim));
        if released.is_err() {
            self.counters.release_refused();
        }
        released
    }

    unsafe fn leak(&self, base: NonNull<u8>, bytes: usize) -> Result<(), BackendError> {
        if self.fork.is_child() {
            return Err(BackendError::ForkedChild);
        }
        let claim = self.claim(base.as_ptr() as usize, bytes)?;
        self.leak(claim, &"its user asked for it");
        Ok(())
    }

    fn wait_for_devices(&self) -> Result<(), BackendError> {
        if self.fork.is_child() {
            return Err(BackendError::ForkedChild);
        }
        let _wait = UnderWay::begin(&self.captures);
        if self.captures.waits_are_held() {
            return Err(BackendError::ContextWaitsHeld);
        }
        with_relaxed_capture(&self.driver, || {
            self.contexts.learn_active_primaries(&self.driver)?;
            let contexts = self.contexts.usable();
            // Such a wait is refused while a stream of the context captures, and it breaks the capture too.
            if contexts.iter().any(|context| self.captures.forbid_wait_for(&self.driver, context)) {
                return Err(CallError::new("cuCtxSynchronize", CAPTURE_IMPLICIT));
            }
            contexts.iter().try_for_each(|context| context.synchronize(&self.driver))
        })?;
        Ok(())
    }

    fn is_always_touchable(&self) -> bool {
        self.is_always_touchable
    }
}

/// A wait for contexts, which a hold of such waits looks for.
struct UnderWay<'a>(&'a Captures);

impl<'a> UnderWay<'a> {
    fn begin(captures: &'a Captures) -> Self {
        captures.wait_begins();
        Self(captures)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.wait_is_over();
    }
}

impl<K: Kind> Drop for Backend<K> {
    fn drop(&mut self) {
        if self.fork.is_child() {
            return;
        }
        if let Some(context) = self.context.take()
            && !self.record.is_empty()
        {
            // What is left lives in it: whoever uses it must not find the context gone.
            let (count, bytes) = (self.record.len(), self.record.bytes());
            say!(
                WARN,
                "backend_dropped_early",
                count,
                bytes,
                backend = K::NAME,
                "a backend is dropped before its allocations"
            );
            std::mem::forget(context);
        }
        with_relaxed_capture(&self.driver, || self.contexts.release_unused(&self.driver));
    }
}

impl<K: Kind> fmt::Debug for Backend<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Backend");
        shown.field("kind", &K::NAME).field("driver", &self.driver).field("device", &self.device);
        shown.field("record", &self.record).finish_non_exhaustive()
    }
}

/// Settings of a backend that is about to be made; see [`Backend::builder`].
#[must_use = "settings do nothing before `build`"]
pub struct BackendBuilder<'a, K: Kind> {
    driver: Driver,
    choice: Choice<'a>,
    record_capacity: usize,
    kind: PhantomData<fn() -> K>,
}

/// Which context.
enum Choice<'a> {
    OfTheApplication,
    Given(Learn<'a>),
}

type Learn<'a> = Box<dyn FnOnce(&Driver, &Contexts) -> Result<Arc<Context>, Error> + 'a>;

impl<'a, K: Kind> BackendBuilder<'a, K> {
    /// Allocates in the context of this stream.
    pub fn context_of<S: AsStream>(mut self, stream: &'a S) -> Self {
        self.choice = Choice::Given(Box::new(move |driver, contexts| {
            stream.with_stream_ref(|stream| {
                let ours = driver.api().identity();
                if stream.driver != ours {
                    return Err(ours.refusal_by("context_of", stream.driver));
                }
                Ok(contexts.of_stream(driver, stream))
            })
        }));
        self
    }

    /// Allocates in a temporary context. Whoever destroys it while the backend lives gets errors from then on, and
    /// what was allocated in it is gone.
    pub fn context(mut self, context: &'a TemporaryContext) -> Self {
        let (handle, of) = (context.handle(), context.driver().api().identity());
        self.choice = Choice::Given(Box::new(move |driver, contexts| {
            let ours = driver.api().identity();
            if of != ours {
                return Err(ours.refusal_by("context", of));
            }
            contexts.learn_current(driver, handle)?.ok_or_else(no_context)
        }));
        self
    }

    /// How many allocations may live at once, by default 16 384. The one that is too many is refused.
    pub fn record_capacity(mut self, allocations: usize) -> Self {
        self.record_capacity = allocations;
        self
    }

    /// Makes the backend; asks the device whether it has such memory, and allocates none.
    ///
    /// # Errors
    ///
    /// As [`Backend::new`].
    pub fn build(self) -> Result<Backend<K>, BackendError> {
        let driver = self.driver;
        driver.api().prepare().map_err(unavailable)?;
        let contexts = Contexts::default();
        let context = with_relaxed_capture(&driver, || match self.choice {
            Choice::OfTheApplication => contexts
                .of_the_caller(&driver)
                .map_err(Error::from)
                .and_then(|found| found.ok_or_else(no_context)),
            Choice::Given(learn) => learn(&driver, &contexts),
        });
        // From here on its drop gives the context up again.
        let mut backend = Backend {
            captures: Captures::of(&driver),
            driver,
            contexts,
            context: Some(context.map_err(unavailable)?),
            device: 0,
            is_always_touchable: true,
            record: AllocationRecord::new(self.record_capacity),
            counters: Counters::default(),
            fork: ForkWord::of_this_process(),
            kind: PhantomData,
        };
        backend.device = backend.in_context(|| backend.driver.api().current_device())??;
        K::check(&backend.driver, backend.device)?;
        backend.is_always_touchable = K::is_always_touchable(&backend.driver, backend.device);
        Ok(backend)
    }
}

impl<K: Kind> fmt::Debug for BackendBuilder<'_, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("BackendBuilder");
        shown.field("kind", &K::NAME).field("record_capacity", &self.record_capacity).finish_non_exhaustive()
    }
}

fn unavailable(error: Error) -> BackendError {
    match error {
        Error::ForkedChild => BackendError::ForkedChild,
        error => BackendError::Unavailable(error),
    }
}

fn no_context() -> Error {
    let reason = "no CUDA context is current on this thread and no primary context is active; create the context \
                  first, or make it current on this thread (none is created here)";
    Error::NotPinned { bytes: 0, reason: reason.into() }
}
