//! The contexts that the pool knows of, and what keeps each alive.
//!
//! The pool makes no context of its own. It knows one because a stream was shown to it, because a
//! thread that dropped a buffer had it current, or because a primary context was found active. On a
//! primary context it holds a retain of its own for as long as it has an event or a registration in
//! it; another context is kept by an owner that its binding gives, or by its caller's promise.

use crate::driver::exit::Visit;
use crate::driver::memory::Attribute;
use crate::driver::{ContextHandle, Driver, EventHandle, KeepAlive, Severity, with_relaxed_capture};
use crate::error::CallError;
use crate::os::ForkWord;
use crate::report::say;
use crate::stream::{Keep, StreamRef};
use crate::sync::{Arc, AtomicBool, Mutex, OnceLock, Ordering, RwLock};
use std::collections::VecDeque;

/// A context that the pool has seen, with the pool's idle events in it.
pub(crate) struct Context {
    pub(crate) handle: ContextHandle,
    /// Tells it from a later context with the same handle; `None` where the driver has no such number.
    pub(crate) id: Option<u64>,
    hold: Hold,
    /// Where it was learned: in a forked child it means nothing.
    fork: ForkWord,
    /// The driver said that it is destroyed; nothing is asked of it again.
    gone: AtomicBool,
    /// Complete events, ready to be recorded; `events.rs` moves them.
    pub(crate) idle_events: Mutex<VecDeque<EventHandle>>,
    /// Events that nobody waits for and that were pending when they were put here; recorded again once complete.
    ///
    /// Never destroyed while the context is in use: another thread may be about to ask one, with an answer that
    /// will not count, and a handle must be valid even then.
    pub(crate) unwanted_events: Mutex<VecDeque<EventHandle>>,
    /// Whether the context's device reads pageable host memory itself; asked once.
    reads_pageable: OnceLock<bool>,
    /// Asked once, before anything is registered in it.
    registering: OnceLock<Registering>,
}

/// What a context's device says about registering host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Registering {
    /// It can be done (attribute 99).
    pub(crate) is_supported: bool,
    /// It adds nothing: the device goes by the host's page tables (attribute 100).
    pub(crate) is_needless: bool,
}

/// What keeps a context alive for us.
enum Hold {
    /// A retain of ours on the primary context of this device.
    Primary(i32),
    /// An owner from the binding; there until the drop.
    Owner(Option<KeepAlive>),
    /// Nothing of ours: the caller's promise, or a context that was merely current at a drop.
    Borrowed,
}

impl Context {
    fn new(driver: &Driver, handle: ContextHandle, hold: Hold) -> Arc<Self> {
        Arc::new(Self {
            handle,
            id: driver.api().context_id(handle).ok(),
            hold,
            fork: ForkWord::of_this_process(),
            gone: AtomicBool::new(false),
            idle_events: Mutex::default(),
            unwanted_events: Mutex::default(),
            reads_pageable: OnceLock::new(),
            registering: OnceLock::new(),
        })
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Whether the driver still binds it.
    pub(crate) fn can_be_current(&self, driver: &Driver) -> bool {
        with_current(driver, self.handle, || driver.api().current_device()).is_ok_and(|device| device.is_ok())
    }

    /// Waits for all work of the context (`cuCtxSynchronize`); blocks.
    pub(crate) fn synchronize(&self, driver: &Driver) -> Result<(), CallError> {
        with_current(driver, self.handle, || driver.api().synchronize_context()).and_then(|result| result)
    }

    /// Whether its handle still stands for it, as far as the driver can say: not ended, and no other in its place.
    pub(crate) fn is_itself(&self, driver: &Driver) -> bool {
        !self.is_gone() && self.id.is_none_or(|id| driver.api().context_id(self.handle) == Ok(id))
    }

    /// What its device says about registering. Where it cannot be asked, the first attempt tells.
    pub(crate) fn registering(&self, driver: &Driver) -> Registering {
        *self.registering.get_or_init(|| {
            let asked = with_current(driver, self.handle, || {
                let device = driver.api().current_device()?;
                let has = |attribute| driver.api().attribute(attribute, device).map(|value| value != 0);
                Ok(Registering {
                    is_supported: has(Attribute::HostRegister)?,
                    is_needless: has(Attribute::HostPageTables)?,
                })
            });
            let unknown = Registering { is_supported: true, is_needless: false };
            asked.and_then(|result| result).unwrap_or(unknown)
        })
    }

    /// Whether it is a primary context on which the pool holds a retain of its own.
    pub(crate) fn is_primary(&self) -> bool {
        matches!(self.hold, Hold::Primary(_))
    }
}

impl Drop for Context {
    /// The last owner of a context destroys it, which is a driver call of the binding's.
    fn drop(&mut self) {
        let Hold::Owner(owner) = &mut self.hold else { return };
        let owner = owner.take();
        match Visit::begin() {
            Some(_inside) if !self.fork.is_child() => drop(owner),
            _ => std::mem::forget(owner),
        }
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("handle", &self.handle).field("primary", &self.is_primary()).finish()
    }
}

/// All contexts of one pool.
#[derive(Debug, Default)]
pub(crate) struct Contexts {
    known: RwLock<Vec<Arc<Context>>>,
}

impl Contexts {
    /// The context of a stream; learned with its keeper when it is new.
    pub(crate) fn of_stream(&self, driver: &Driver, stream: &StreamRef<'_>) -> Arc<Context> {
        if let Some(context) = self.find(stream.context) {
            return context;
        }
        let hold = match &stream.keep {
            Keep::Primary(device) => {
                with_relaxed_capture(driver, || retain_if_same(driver, *device, stream.context))
            }
            Keep::Owner(owner) => Hold::Owner(Some(owner())),
            Keep::Caller => Hold::Borrowed,
        };
        self.add(driver, Context::new(driver, stream.context, hold))
    }

    /// A context that is or was a thread's current one; asks the driver whether it is a primary one.
    ///
    /// `None` when it went away meanwhile, and its device work with it. An error says nothing of its work, so
    /// whoever waits must not go on as if there were none.
    pub(crate) fn learn_current(
        &self,
        driver: &Driver,
        handle: ContextHandle,
    ) -> Result<Option<Arc<Context>>, CallError> {
        if let Some(context) = self.find(handle) {
            return Ok(Some(context));
        }
        let device = with_current(driver, handle, || driver.api().current_device()).and_then(|device| device);
        match device.and_then(|device| retain_if_active_and_same(driver, device, handle)) {
            Ok(hold) => Ok(Some(self.add(driver, Context::new(driver, handle, hold)))),
            Err(error) => {
                say!(DEBUG, "context_unusable", %error, "a context that was seen current cannot be used");
                if is_about_a_dead_context(&error) { Ok(None) } else { Err(error) }
            }
        }
    }

    /// Every active primary context; creates none. After an error there may be one that is not known.
    pub(crate) fn learn_active_primaries(&self, driver: &Driver) -> Result<(), CallError> {
        if !driver.api().is_in_use() {
            return Ok(());
        }
        for device in driver.api().active_primary_devices()? {
            let known = |context: &Arc<Context>| {
                !context.is_gone() && matches!(context.hold, Hold::Primary(primary) if primary == device)
            };
            if self.known.read().iter().any(known) {
                continue;
            }
            let handle = driver.api().retain_primary(device)?;
            // Dropped by `add`, retain and all, if another thread learned it meanwhile.
            drop(self.add(driver, Context::new(driver, handle, Hold::Primary(device))));
        }
        Ok(())
    }

    /// Where to register: a primary context if one is known, since the pool can keep it alive itself.
    pub(crate) fn for_registration(&self) -> Option<Arc<Context>> {
        let known = self.known.read();
        let usable = || known.iter().filter(|context| !context.is_gone());
        usable().find(|context| context.is_primary()).or_else(|| usable().next()).cloned()
    }

    /// Where to do by name what a caller asks for: the calling thread's context where that is a primary one, which
    /// can be kept alive; else an active primary one; else the thread's. None is made.
    pub(crate) fn of_the_caller(&self, driver: &Driver) -> Result<Option<Arc<Context>>, CallError> {
        let current = driver.api().current_context()?;
        let current = current.map(|handle| self.learn_current(driver, handle)).transpose()?.flatten();
        if let Some(context) = &current
            && context.is_primary()
        {
            return Ok(current);
        }
        self.learn_active_primaries(driver)?;
        let known = self.for_registration();
        Ok(known.filter(|context| context.is_primary() || current.is_none()).or(current))
    }

    /// Whether any known device reads pageable host memory itself, so that a copy from it may still
    /// read after the call has returned.
    pub(crate) fn any_reads_pageable(&self, driver: &Driver) -> bool {
        self.usable().iter().any(|context| {
            if let Some(answer) = context.reads_pageable.get() {
                return *answer;
            }
            let answer = with_current(driver, context.handle, || {
                let device = driver.api().current_device()?;
                driver.api().reads_pageable_memory(device)
            });
            match answer.and_then(|result| result) {
                Ok(answer) => *context.reads_pageable.get_or_init(|| answer),
                // Where the driver cannot say, a wait too many is better than one too few; it is asked again.
                Err(_) => true,
            }
        })
    }

    /// Every context that may have device work outstanding.
    pub(crate) fn usable(&self) -> Vec<Arc<Context>> {
        self.known.read().iter().filter(|context| !context.is_gone()).cloned().collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.known.read().is_empty()
    }

    /// Destroys the pooled events and gives up the keeper of every context that nothing refers to; for
    /// `shutdown`, with nothing registered.
    ///
    /// A guard that is still out keeps the contexts of its records: their events are asked after its drop.
    pub(crate) fn release_unused(&self, driver: &Driver) {
        let mut unused = Vec::new();
        self.known.write().retain(|context| {
            // Under the lock nobody else can get a reference from the list.
            let is_unused = Arc::strong_count(context) == 1;
            if is_unused {
                unused.push(context.clone());
            }
            !is_unused
        });
        for context in unused {
            if !self.release(driver, &context) {
                // The retain is ours still; the next shutdown tries again.
                self.known.write().push(context);
            }
        }
    }

    /// A context has ended: it is forgotten, so that its handle is learned afresh, and its retain is given up. False
    /// when that was done before.
    ///
    /// A reset ends a primary context and releases nobody's retain of it; "it is safe for other modules to call
    /// cuDevicePrimaryCtxRelease even after resetting the device" is NVIDIA's word.
    pub(crate) fn end(&self, driver: &Driver, context: &Arc<Context>) -> bool {
        if context.gone.swap(true, Ordering::Relaxed) {
            return false;
        }
        self.known.write().retain(|known| !Arc::ptr_eq(known, context));
        release_retain(driver, context);
        true
    }

    fn find(&self, handle: ContextHandle) -> Option<Arc<Context>> {
        self.known.read().iter().find(|context| context.handle == handle && !context.is_gone()).cloned()
    }

    /// Adds a context unless another thread was faster; gives the one that is known afterwards.
    fn add(&self, driver: &Driver, context: Arc<Context>) -> Arc<Context> {
        let earlier = {
            let mut known = self.known.write();
            let same = |other: &&Arc<Context>| other.handle == context.handle && !other.is_gone();
            let earlier = known.iter().find(same).cloned();
            if earlier.is_none() {
                known.push(context.clone());
            }
            earlier
        };
        match earlier {
            Some(earlier) => {
                self.release(driver, &context);
                earlier
            }
            None => context,
        }
    }

    /// False when the driver did not take the retain back, though the context is there.
    fn release(&self, driver: &Driver, context: &Context) -> bool {
        if context.is_gone() {
            return true;
        }
        let mut events = std::mem::take(&mut *context.idle_events.lock());
        // One that is pending even now ends with its context.
        let unwanted = std::mem::take(&mut *context.unwanted_events.lock());
        events.extend(unwanted.into_iter().filter(|event| driver.api().query_event(*event) == Ok(true)));
        // One that cannot be destroyed keeps none of the others.
        let destroy = |event: &EventHandle| {
            if let Err(error) = driver.api().destroy_event(*event) {
                say!(DEBUG, "events_not_destroyed", %error, "an event of the pool could not be destroyed");
            }
        };
        let destroy_all = || with_current(driver, context.handle, || events.iter().for_each(destroy));
        if let Err(error) = destroy_all().or_else(|_| destroy_all()) {
            say!(DEBUG, "events_not_destroyed", %error, "events of the pool could not be destroyed");
        }
        release_retain(driver, context)
    }
}

/// False when the driver did not take it.
fn release_retain(driver: &Driver, context: &Context) -> bool {
    match context.hold {
        Hold::Primary(device) => release_primary(driver, device),
        _ => true,
    }
}

/// Runs `action` with the context current on this thread, and restores what was current before.
pub(crate) fn with_current<R>(
    driver: &Driver,
    context: ContextHandle,
    action: impl FnOnce() -> R,
) -> Result<R, CallError> {
    // Without the answer nothing could be restored.
    let before = driver.api().current_context()?;
    if before == Some(context) {
        return Ok(action());
    }
    driver.api().set_current_context(Some(context))?;
    let _restored = Restore { driver, before };
    Ok(action())
}

/// Makes the thread's own context current again, also when a panic passes through.
struct Restore<'a> {
    driver: &'a Driver,
    before: Option<ContextHandle>,
}

impl Drop for Restore<'_> {
    fn drop(&mut self) {
        let api = self.driver.api();
        // It was valid a moment ago, so a refusal may be for that moment only.
        let restored = api.set_current_context(self.before).or_else(|_| api.set_current_context(self.before));
        if let Err(error) = restored {
            say!(DEBUG, "context_not_restored", %error, "a thread's context could not be restored");
            // None at all is an error at the thread's next call; ours would be a call in the wrong context.
            let _ = api.set_current_context(None);
        }
    }
}

/// Retains the device's primary context if that is the given one.
fn retain_if_same(driver: &Driver, device: i32, handle: ContextHandle) -> Hold {
    match driver.api().retain_primary(device) {
        Ok(primary) if primary == handle => Hold::Primary(device),
        Ok(_) => {
            release_primary(driver, device);
            Hold::Borrowed
        }
        Err(_) => Hold::Borrowed,
    }
}

/// As [`retain_if_same`], but only where the primary context is active, so that none is created.
fn retain_if_active_and_same(driver: &Driver, device: i32, handle: ContextHandle) -> Result<Hold, CallError> {
    let active = driver.api().active_primary_devices()?;
    Ok(if active.contains(&device) { retain_if_same(driver, device, handle) } else { Hold::Borrowed })
}

/// Whether a failure to look at a context says that it is destroyed: from other functions, or with other codes, it
/// says nothing about this one.
fn is_about_a_dead_context(error: &CallError) -> bool {
    match error.call() {
        "cuCtxSetCurrent" => Severity::of(error) == Severity::Gone && !matches!(error.code(), 3 | 4),
        "cuCtxGetDevice" => error.code() == CONTEXT_IS_DESTROYED,
        _ => false,
    }
}

/// `CUDA_ERROR_CONTEXT_IS_DESTROYED`.
const CONTEXT_IS_DESTROYED: u32 = 709;

/// Gives a retain up; a refusal may be for the moment only. False when it was not taken.
fn release_primary(driver: &Driver, device: i32) -> bool {
    let release = || driver.api().release_primary(device);
    let Err(error) = release().or_else(|_| release()) else { return true };
    say!(DEBUG, "context_not_released", device, %error, "a primary context could not be released");
    // With a context or a driver that is gone the retain went too.
    Severity::of(&error) == Severity::Gone
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_dropped_with_its_context_and_not_in_a_forked_child() {
        let driver = Driver::host_only();
        for (fork, owners_left) in [(ForkWord::of_this_process(), 1), (ForkWord::of_a_parent(), 2)] {
            let owner = Arc::new(());
            let hold = Hold::Owner(Some(owner.clone()));
            let mut context = Context::new(&driver, ContextHandle(1), hold);
            Arc::get_mut(&mut context).expect("nobody else has it").fork = fork;
            drop(context);
            // The last owner destroys the context, which in a child would call the parent's driver.
            assert_eq!(Arc::strong_count(&owner), owners_left);
        }
    }
}
