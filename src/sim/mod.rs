//! A simulated CUDA driver with its devices, for tests and benches of staging code without a GPU.
//!
//! It is faithful where staging code goes wrong: a copy from page-locked memory reads the host bytes when the
//! stream *executes* it, so a buffer that is reused too early puts wrong bytes into device memory, and a test
//! sees them.
//!
//! ```
//! use pinpool::sim::Sim;
//!
//! let sim = Sim::new(); // the stepped clock: nothing happens on the device by itself
//! let context = sim.context(0);
//! let (stream, device) = (context.stream(), context.alloc(4096));
//! let mut staging = vec![1u8; 4096];
//! sim.cuda().cu_mem_host_register(staging.as_mut_ptr(), 4096, 1).unwrap();
//!
//! // SAFETY: `staging` lives until the stream has executed the copy.
//! unsafe { stream.copy_to_device(&staging, &device) };
//! staging.fill(2); // the mistake: the copy was only enqueued
//! sim.run_until_idle();
//! assert_eq!(device.read(), vec![2u8; 4096], "and so the device got the wrong bytes");
//!
//! sim.cuda().cu_mem_host_unregister(staging.as_mut_ptr()).unwrap();
//! sim.assert_clean();
//! ```
//!
//! # With a pool
//!
//! ```
//! use pinpool::{PinnedPool, sim::Sim};
//!
//! let sim = Sim::new();
//! let context = sim.context(0);
//! let (stream, device) = (context.stream(), context.alloc(4096));
//! let pool = PinnedPool::builder().driver(sim.driver()).build()?;
//!
//! let mut buffer = pool.take_pinned(4096)?; // a first `take` is a miss: pageable, so its copy waits
//! buffer.fill(7);
//! // SAFETY: the pool keeps the memory until the recorded use is done.
//! # #[allow(unsafe_code)]
//! unsafe { stream.copy_to_device(&buffer, &device) };
//! buffer.record_last_use(&stream)?;
//! drop(buffer); // the copy has not begun
//!
//! sim.run_until_idle();
//! assert_eq!(device.read(), vec![7u8; 4096]);
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! A pool has the driver that it was built with, and the process-wide one (`pinpool::take`) has CUDA's, so it refuses
//! simulated streams, unless [`init_global`](crate::init_global) was told otherwise before its first use.
//!
//! # Handles
//!
//! [`Sim::context`], [`SimContext::stream`] and [`SimContext::alloc`] play the application. [`Sim::driver`] is what
//! a pool is built with; it makes the same calls, which [`Sim::calls`] counts and [`Sim::fail`] makes fail.
//! [`Sim::cuda`] are the entry points themselves.
//!
//! # Clocks
//!
//! | | who executes what a stream holds | for |
//! |---|---|---|
//! | stepped ([`Sim::new`]) | [`Sim::step`], [`Sim::run_until_idle`], or a call that has to wait for it, which then executes what it needs and nothing else | tests: an interleaving is written down, not a matter of luck |
//! | real time ([`Sim::real_time`]) | a thread, when latency and bandwidth say that the operation is done | examples and soak tests |
//! | zero cost ([`Sim::zero_cost`]) | the call that enqueues it; the thread does what was held or stalled | benches |
//!
//! On all of them a stream on [`hold`](Sim::hold) executes nothing. A call that waits for a held stream (a
//! synchronise, a synchronous copy, any copy of pageable memory, an unregister) blocks until its release, so
//! hold and wait on different threads.
//!
//! # Checks
//!
//! These are noted as violations, printed, and panic at the next [`Sim::step`], [`Sim::run_until_idle`] or
//! [`Sim::assert_clean`], or when the last handle is dropped. They do not panic where they happen: that may be a
//! thread of the pool, where a panic would only leave the test hanging.
//!
//! * `cuMemHostUnregister`, `cuMemFreeHost`, and `cuMemFree` of managed memory, while an unfinished operation uses
//!   the memory.
//! * A pool that zeroes, unmaps or hands out such memory.
//! * A pool that records an event again, or destroys it, while its record is pending, or records it on a
//!   stream of another context; or that releases a primary context more often than it retained it.
//! * A pool that records an event in a capture, or that makes a call which a capture could forbid while its thread is
//!   not in the relaxed mode.
//! * The launch of a graph that uses memory which the pool has zeroed, unmapped or handed out since the capture.
//! * A host function that panics.
//!
//! # What is not simulated
//!
//! Kernels, graphs that are built rather than captured, memory that a graph allocates or frees, the driver's
//! end with the process. In a forked child every call is answered 3, as by the real driver. Managed memory is host
//! memory that prefers a place: it does not migrate, and is not
//! on the device's side of a copy. `cuMemFree` of device memory does not wait. A pageable copy to the device always waits
//! for its stream, also one of 64 KiB or less, which a real driver may take over at once.

mod allocations;
mod builder;
mod calls;
mod captures;
mod checks;
mod codes;
mod contexts;
mod core;
mod cuda;
mod driver;
mod driver_lock;
mod driver_memory;
mod engine;
mod events;
mod faults;
mod graph_handles;
mod graphs;
mod handles;
mod host_memory;
mod mappings;
mod memory;
mod random;
mod realtime;
mod registrations;
mod resources;
mod state;
mod streams;
mod threads;
mod user_objects;

use crate::driver::Driver;
pub use builder::SimBuilder;
use calls::Call;
pub use cuda::Cuda;
pub use faults::Fault;
pub use graph_handles::{CaptureMode, SimGraph};
pub use handles::{SimBuffer, SimContext, SimStream};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A simulated CUDA driver with its devices. Cheap to clone; clones share one state.
#[derive(Clone)]
pub struct Sim {
    session: Arc<Session>,
}

/// What the handles in a test's hands share; a pool's driver is not among them.
struct Session {
    cuda: Cuda,
}

impl Default for Sim {
    fn default() -> Self {
        Self::new()
    }
}

/// Making one, and looking at it.
impl Sim {
    /// One device on the stepped clock.
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// One device in real time, in which everything is free; see [`SimBuilder::zero_cost`].
    pub fn zero_cost() -> Self {
        Self::builder().zero_cost().build()
    }

    /// One device in real time; see [`SimBuilder::real_time`].
    pub fn real_time() -> Self {
        Self::builder().real_time().build()
    }

    /// Settings; as they are, one device on the stepped clock.
    pub fn builder() -> SimBuilder {
        SimBuilder::default()
    }

    pub(crate) fn from_settings(settings: SimBuilder) -> Self {
        Self { session: Arc::new(Session { cuda: Cuda::new(settings) }) }
    }

    /// The driver to build a pool with. It is in use once anybody has called `cuInit`.
    pub fn driver(&self) -> Driver {
        Driver::from_api(Arc::new(driver::SimDriver { cuda: self.cuda().clone() }))
    }

    /// Plays the application: calls `cuInit`, retains the primary context of a device and makes it current
    /// on the calling thread.
    ///
    /// # Panics
    /// When there is no such device, or `cuInit` was made to fail.
    pub fn context(&self, device: i32) -> SimContext {
        self.cuda().cu_init(0).unwrap_or_else(|code| panic!("cuInit failed: {code}"));
        SimContext::retain(self.clone(), device)
    }

    /// As [`context`](Self::context), with a context of the application's own (`cuCtxCreate`), destroyed when the last
    /// handle of it, its streams and its buffers is dropped. Whoever lets a pool know it keeps it, as with any
    /// [`RawStream`](crate::RawStream).
    ///
    /// # Panics
    /// As there.
    pub fn create_context(&self, device: i32) -> SimContext {
        self.cuda().cu_init(0).unwrap_or_else(|code| panic!("cuInit failed: {code}"));
        SimContext::create(self.clone(), device)
    }

    /// The raw entry points.
    pub fn cuda(&self) -> &Cuda {
        &self.session.cuda
    }
}

/// Control of the clock. The handles are those of streams; 0 to 2 mean a default stream of the current context.
impl Sim {
    /// From now on the stream executes nothing, on any clock, until [`release`](Self::release).
    ///
    /// # Panics
    /// When there is no such stream.
    pub fn hold(&self, stream: usize) {
        self.core().set_held(stream, true);
    }

    /// Ends [`hold`](Self::hold).
    ///
    /// # Panics
    /// When there is no such stream.
    pub fn release(&self, stream: usize) {
        self.core().set_held(stream, false);
    }

    /// From now on the stream says that it captures a graph, or that it does not. It captures nothing: what is
    /// enqueued is executed.
    ///
    /// # Panics
    /// When there is no such stream.
    pub fn pretend_capture(&self, stream: usize, is_capturing: bool) {
        self.core().pretend_capture(stream, is_capturing);
    }

    /// From now on the functions of user objects (`cuUserObjectCreate`) that have become due are not run, as the driver
    /// may take its time with them; false lets them run.
    pub fn hold_user_objects(&self, are_held: bool) {
        self.core().hold_destructors(are_held);
    }

    /// User objects that something still refers to.
    pub fn user_objects(&self) -> usize {
        self.core().user_objects.living()
    }

    /// Makes a context current on the calling thread, by its handle, 0 for none; counted nowhere, and met by no fault.
    pub fn bind(&self, context: usize) {
        self.core().threads.current().current.store(context, std::sync::atomic::Ordering::Relaxed);
    }

    /// Enqueues an operation that takes this long in real time, and one step on the stepped clock.
    ///
    /// # Panics
    /// When there is no such stream.
    pub fn stall(&self, stream: usize, duration: Duration) {
        self.core().stall(stream, duration);
    }

    /// Executes one operation of one stream that can go on; false when nothing can run. The stream is
    /// picked by the seed. Off the stepped clock: waits for the next operation to be done.
    ///
    /// # Panics
    /// When a check has found a violation.
    pub fn step(&self) -> bool {
        self.core().checks.report();
        self.core().step()
    }

    /// Steps until nothing can run: what is left waits for a held stream.
    ///
    /// # Panics
    /// When a check has found a violation.
    pub fn run_until_idle(&self) {
        while self.step() {}
    }

    /// Operations that were enqueued and are not done.
    pub fn pending_operations(&self) -> usize {
        self.core().state.lock().pending_operations
    }
}

/// Counters and faults. Entry points are named as in CUDA's headers, with or without `_v2`; any other name panics.
/// Two more names stand for what a pool asks of the operating system: `"mmap"` for fresh memory and
/// `"pthread_create"` for a thread; whatever the code, a fault makes the system refuse.
impl Sim {
    /// How often an entry point was called, for example `"cuEventQuery"`, by whomever.
    pub fn calls(&self, name: &str) -> u64 {
        self.core().threads.calls(Call::named(name))
    }

    /// How often any entry point was called.
    pub fn total_calls(&self) -> u64 {
        self.core().threads.total_calls()
    }

    /// How often the calling thread called an entry point.
    pub fn calls_by_this_thread(&self, name: &str) -> u64 {
        self.core().threads.current().calls(Call::named(name))
    }

    /// Sets all call counters to zero.
    pub fn reset_calls(&self) {
        self.core().threads.reset_calls();
    }

    /// Makes an entry point fail, be slow or hang.
    pub fn fail(&self, name: &str, fault: Fault) {
        self.core().faults.arm(Call::named(name), fault);
    }

    /// Ends all faults; hanging calls go on.
    pub fn clear_faults(&self) {
        self.core().faults.clear();
    }

    /// How many calls hang now because of [`Fault::hang`]; to wait until one does.
    pub fn hanging_calls(&self) -> usize {
        self.core().faults.hanging()
    }
}

/// Checks.
impl Sim {
    /// What the checks have found.
    pub fn violations(&self) -> Vec<String> {
        self.core().checks.violations()
    }

    /// Takes what the checks have found, so that it panics no more.
    pub fn take_violations(&self) -> Vec<String> {
        self.core().checks.take()
    }

    /// From now on violations are only collected; for tests which show that a check finds something.
    pub fn expect_violations(&self) {
        self.core().checks.expect();
    }

    /// Panics, listing the violations, when there are any.
    pub fn assert_clean(&self) {
        self.core().checks.assert_clean();
    }

    /// Bytes that are registered now (`cuMemHostRegister`).
    pub fn registered_bytes(&self) -> usize {
        self.core().state.lock().registered_bytes()
    }

    /// Bytes that are page-locked for every context: registered with `CU_MEMHOSTREGISTER_PORTABLE`, or allocated with
    /// `CU_MEMHOSTALLOC_PORTABLE`.
    pub fn portable_bytes(&self) -> usize {
        let state = self.core().state.lock();
        let registered = state.registrations.values().filter(|one| one.is_portable).map(|one| one.bytes);
        registered.sum::<usize>() + state.portable_allocated_bytes()
    }

    /// Bytes of `cuMemHostAlloc` that are not freed.
    pub fn allocated_host_bytes(&self) -> usize {
        self.core().state.lock().allocated_bytes(false)
    }

    /// Address and size in bytes of each allocation of `cuMemHostAlloc`, by address.
    pub fn live_host_allocations(&self) -> Vec<(usize, usize)> {
        self.core().state.lock().allocations(false)
    }

    /// Bytes of managed memory that are not freed.
    pub fn managed_bytes(&self) -> usize {
        self.core().state.lock().allocated_bytes(true)
    }

    /// Address of each managed allocation that was advised to prefer a device, and which.
    pub fn preferred_devices(&self) -> Vec<(usize, i32)> {
        self.core().state.lock().preferences()
    }

    /// How often a device's primary context is retained now, by whomever; 0 where there is no such device.
    pub fn primary_retains(&self, device: i32) -> u32 {
        let index = self.core().device_index(device);
        index.map_or(0, |index| self.core().state.lock().contexts[index].retains())
    }

    /// Events that exist and take the time (made without `CU_EVENT_DISABLE_TIMING`), which makes a record dearer.
    pub fn timed_events(&self) -> usize {
        self.core().state.lock().timed_events()
    }

    /// Address and size in bytes of each registration, by address.
    pub fn live_registrations(&self) -> Vec<(usize, usize)> {
        let state = self.core().state.lock();
        state.registrations.iter().map(|(address, registration)| (*address, registration.bytes)).collect()
    }

    fn core(&self) -> &core::Core {
        self.cuda().core()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.cuda.core().abandon();
        if !std::thread::panicking() {
            self.cuda.core().checks.report();
        }
    }
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sim").field("instance", &self.core().instance).finish_non_exhaustive()
    }
}
