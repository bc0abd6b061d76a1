//! The seam to CUDA, or to the simulated device.
//!
//! Everything above this module speaks of contexts, streams and events through `DriverApi`; only
//! `cuda.rs` knows a CUDA handle or constant. The rules that every implementation keeps:
//!
//! * **Thread-safe.** Any method may be called from any thread, several at once.
//! * **No panic.** A failure is a [`CallError`] with the driver's own code.
//! * **No retry, no policy.** A method makes the one driver call that it names and reports.
//! * **Lazy.** Constructing a driver opens and initialises nothing; `prepare` does.
//!
//! Handles are plain numbers here. A stream handle is never kept as an identity beyond one record,
//! because the driver reuses handles.

#[cfg(test)]
mod absent_tests;
mod builder;
pub(crate) mod cuda;
mod cuda_memory;
#[cfg(all(test, target_os = "linux"))]
pub(crate) mod cuda_tests;
mod end_flag;
mod entry_points;
pub(crate) mod exit;
mod folders;
pub(crate) mod gate;
mod graphs;
pub(crate) mod host;
mod ladder;
#[cfg(test)]
mod ladder_tests;
pub(crate) mod library;
pub(crate) mod memory;
mod memory_gate;
mod numa;
mod process;
mod relaxed;
pub(crate) mod runtime;
mod runtime_memory;
mod runtime_table;
mod search;
mod severity;
mod table;
mod vendor;

pub use builder::DriverBuilder;
pub(crate) use end_flag::EndFlag;
pub use entry_points::EntryPoints;
pub(crate) use relaxed::with_relaxed_capture;
pub use search::{LibraryReport, Probe};
pub(crate) use severity::Severity;

use crate::error::{CallError, Error};
use crate::os::page_bytes;
pub(crate) use memory::DriverMemory;
use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// A driver handle of the pool: CUDA, no device at all, or the simulated device.
///
/// Cheap to clone; clones share one state. Opens and initialises nothing until a context is known
/// or page-locking is asked for.
#[derive(Clone)]
pub struct Driver {
    gate: gate::Gate,
}

impl Driver {
    /// CUDA where this machine has it, else nothing is page-locked. What a pool uses by default.
    ///
    /// Opens and initialises nothing here. The library is loaded, and `cuInit` called, when a context
    /// is known or page-locking is asked for; then one log line says which library was picked, or one
    /// warning why none. Set `PINPOOL_CUDA_LIBRARY` to the path of a libcuda to use that one only.
    ///
    /// CUDA is used on Linux; elsewhere this is [`Driver::host_only`] with another name.
    pub fn auto() -> Self {
        Self::builder().build()
    }

    /// Settings of the search for CUDA's libraries: one chosen by name, folders to look into, and whether the
    /// runtime library shall be used.
    pub fn builder() -> DriverBuilder {
        DriverBuilder::default()
    }

    /// CUDA, loaded and initialised now (`cuInit`).
    ///
    /// # Errors
    ///
    /// [`Error::NoCuda`] where no library can be used; its report lists every candidate, in the order
    /// tried, with what each answered.
    pub fn cuda() -> Result<Self, Error> {
        let driver = Self::auto();
        driver.api().prepare()?;
        Ok(driver)
    }

    /// No device: nothing is ever page-locked, and no device work is ever outstanding.
    pub fn host_only() -> Self {
        Self::none("no device is to be used: the driver is Driver::host_only()")
    }

    /// No device, and why.
    pub(crate) fn none(reason: &'static str) -> Self {
        Self::from_api(Arc::new(host::HostDriver { reason }))
    }

    pub(crate) fn from_api(api: Arc<dyn DriverApi>) -> Self {
        Self { gate: gate::Gate::new(api) }
    }

    /// What the seam offers; every call passes the gate, which shuts when the process exits.
    #[inline]
    pub(crate) fn api(&self) -> &gate::Gate {
        &self.gate
    }

    /// Asks the driver, and not the pool's own books, whether all of this memory is page-locked.
    ///
    /// Asks for the first byte, the last byte and one byte of every page between them
    /// (`cuPointerGetAttributes`, or `cudaPointerGetAttributes` on a runtime), some hundred nanoseconds each: for
    /// a test or a diagnosis, not for a hot path. Managed memory does not count, since it migrates. Loads
    /// nothing: while nobody in this process uses CUDA, nothing is page-locked by it, so the answer is false, and
    /// for an empty slice it is true.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the driver refuses the question.
    pub fn is_page_locked(&self, memory: &[u8]) -> Result<bool, Error> {
        self.is_range_page_locked(memory.as_ptr() as usize, memory.len())
    }

    pub(crate) fn is_range_page_locked(&self, base: usize, bytes: usize) -> Result<bool, Error> {
        let Some(last) = bytes.checked_sub(1).and_then(|offset| base.checked_add(offset)) else {
            return Ok(bytes == 0);
        };
        if !self.gate.is_in_use() {
            return Ok(false);
        }
        let (mut address, page) = (base, page_bytes());
        while address < last {
            if !self.gate.is_page_locked(address)? {
                return Ok(false);
            }
            let Some(next) = (address / page + 1).checked_mul(page) else { break };
            address = next;
        }
        Ok(self.gate.is_page_locked(last)?)
    }

    /// Looks for libcuda and for libcudart now, as page-locking would, and says what every place answered.
    ///
    /// Loads and initialises (`cuInit`, `cudaGetDeviceCount`), but makes no context. What is in use already is
    /// reported as that. Empty for a driver that is not CUDA.
    pub fn libraries(&self) -> Vec<LibraryReport> {
        self.gate.libraries()
    }

    /// What this driver is: `"cuda"`, `"cudart"`, `"host"`, `"simulated"` or `"injected"`.
    pub fn name(&self) -> &'static str {
        self.gate.identity().name
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// Which driver a stream or a context belongs to; two are the same driver when both fields agree.
#[derive(Clone, Copy, Eq, Debug)]
pub(crate) struct DriverIdentity {
    /// `"cuda"`, `"host"`, `"simulated"`, `"injected"`.
    pub(crate) name: &'static str,
    /// Distinguishes simulated and injected drivers of one process; 0 for the others.
    pub(crate) instance: u64,
}

impl PartialEq for DriverIdentity {
    /// Every record compares two; nearly always both names are one string.
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.instance == other.instance && (std::ptr::eq(self.name, other.name) || self.name == other.name)
    }
}

impl DriverIdentity {
    /// The CUDA driver; there is one in a process.
    pub(crate) const CUDA: Self = Self { name: "cuda", instance: 0 };
    /// CUDA through its runtime library.
    pub(crate) const RUNTIME: Self = Self { name: "cudart", instance: 0 };

    /// The driver of a libcuda that is not the one we call; `error` names both.
    #[cfg(feature = "cudarc")]
    pub(crate) fn note_other_cuda(error: Error) -> Self {
        OTHER_CUDA.get_or_init(|| error);
        Self { name: "other libcuda", instance: 1 }
    }

    /// Why a pool with this driver does not take a stream of another one to record.
    pub(crate) fn refusal(self, stream: Self) -> Error {
        self.refusal_by("record_last_use", stream)
    }

    /// Why that call does not take a stream, or a context, of another driver.
    pub(crate) fn refusal_by(self, call: &'static str, stream: Self) -> Error {
        match OTHER_CUDA.get() {
            Some(error) if stream.instance != 0 && self == Self::CUDA => error.clone(),
            _ => Error::ForeignStream { stream: stream.name, pool: self.name, call },
        }
    }
}

/// What is wrong with the streams of another libcuda in this process, once one was seen.
static OTHER_CUDA: OnceLock<Error> = OnceLock::new();

/// A context, `CUcontext` as a number; never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct ContextHandle(pub(crate) usize);

/// A stream, `CUstream` as a number: 0 the null stream, 1 legacy, 2 per-thread, else a pointer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct StreamHandle(pub(crate) usize);

impl StreamHandle {
    /// Whether the handle's meaning depends on the thread's current context or on the thread itself.
    pub(crate) fn is_implicit(self) -> bool {
        self.0 <= 2
    }
}

/// An event, `CUevent` as a number; never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct EventHandle(pub(crate) usize);

/// A graph, `CUgraph` as a number; never 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GraphHandle(pub(crate) usize);

/// What a stream that may capture says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CaptureInfo {
    /// It captures nothing.
    Nothing,
    /// Its capture was broken, and will end without a graph.
    Broken,
    /// The number of the capture, which no other one has, and the graph that it makes.
    Graph(u64, GraphHandle),
}

impl CaptureInfo {
    /// From `CUstreamCaptureStatus` and the two out-parameters. An active capture without a graph is none that
    /// anything could be tied to.
    pub(crate) fn of(status: u32, id: u64, graph: usize) -> Self {
        match status {
            1 if graph != 0 => CaptureInfo::Graph(id, GraphHandle(graph)),
            2 => CaptureInfo::Broken,
            _ => CaptureInfo::Nothing,
        }
    }
}

/// An object that lives as long as the graphs that keep it, `CUuserObject` as a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct UserObjectHandle(pub(crate) usize);

/// `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: u32 = 801;

/// How a thread's driver calls interact with stream captures (`CUstreamCaptureMode`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CaptureMode {
    /// The default of every thread.
    Global = 0,
    /// Only this thread's own captures forbid calls.
    ThreadLocal = 1,
    /// No capture forbids a call of this thread.
    Relaxed = 2,
}

impl CaptureMode {
    /// From CUDA's number.
    pub(crate) fn of(number: u32) -> Self {
        match number {
            1 => CaptureMode::ThreadLocal,
            2 => CaptureMode::Relaxed,
            _ => CaptureMode::Global,
        }
    }
}

/// What the pool is about to do to host memory; the simulated device checks it against work in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HostAccess {
    /// Zeroes the bytes.
    Zero,
    /// Unmaps the bytes.
    Unmap,
    /// Hands the bytes to a caller who may write them.
    HandOut,
    /// Has mapped the bytes just now.
    Mapped,
}

/// What the pool is about to ask of the operating system; a test may have it refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Resource {
    /// Fresh memory of so many bytes.
    Memory(usize),
    /// A thread.
    Thread,
}

/// Keeps a context alive for as long as it is held, for example an `Arc<CudaContext>`.
pub(crate) type KeepAlive = Arc<dyn Any + Send + Sync>;

/// The entry points that the pool needs. Method by method, the CUDA driver function it stands for.
pub(crate) trait DriverApi: DriverMemory + Send + Sync + fmt::Debug {
    /// Which driver this is; never touches the driver.
    fn identity(&self) -> DriverIdentity;

    /// Whether this process uses the driver already, so that contexts and device work can exist.
    ///
    /// Loads and initialises nothing: for CUDA it looks whether libcuda is mapped already.
    /// Cheap once true; while false, a caller on a hot path asks rarely.
    fn is_in_use(&self) -> bool;

    /// Whether this is a forked child of a process that initialised the driver: then it can never be used here.
    fn is_inherited(&self) -> bool {
        false
    }

    /// Loads the library where needed and calls `cuInit(0)`; cheap when done before.
    fn prepare(&self) -> Result<(), Error>;

    /// Looks for the libraries and reports; empty for what has none.
    fn libraries(&self) -> Vec<LibraryReport> {
        Vec::new()
    }

    /// `cuCtxGetCurrent`: the calling thread's context. `None` when there is none or the driver is not in use.
    fn current_context(&self) -> Result<Option<ContextHandle>, CallError>;

    /// `cuCtxSetCurrent`; `None` unbinds.
    fn set_current_context(&self, context: Option<ContextHandle>) -> Result<(), CallError>;

    /// `cuCtxGetDevice`: the device ordinal handle of the *current* context.
    fn current_device(&self) -> Result<i32, CallError>;

    /// The devices whose primary context is active (`cuDevicePrimaryCtxGetState`); creates none.
    fn active_primary_devices(&self) -> Result<Vec<i32>, CallError>;

    /// `cuDevicePrimaryCtxRetain`.
    fn retain_primary(&self, device: i32) -> Result<ContextHandle, CallError>;

    /// `cuDevicePrimaryCtxRelease_v2`.
    fn release_primary(&self, device: i32) -> Result<(), CallError>;

    /// `cuCtxGetId`: a number that no other context of the process ever has; 709 or 201 when the context has ended. A
    /// driver that cannot say answers anything else.
    fn context_id(&self, _context: ContextHandle) -> Result<u64, CallError> {
        Err(CallError::new("cuCtxGetId", 801))
    }

    /// `cuCtxSynchronize` of the current context; blocks.
    fn synchronize_context(&self) -> Result<(), CallError>;

    /// Whether devices read pageable host memory themselves (attributes 88 or 100 of `device`), so
    /// that a copy from it may still read when the call has returned.
    fn reads_pageable_memory(&self, device: i32) -> Result<bool, CallError>;

    /// `cuEventCreate` with timing disabled, in the current context.
    fn create_event(&self) -> Result<EventHandle, CallError>;

    /// `cuEventRecord`.
    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CallError>;

    /// `cuEventQuery`: true when complete, false for 600.
    fn query_event(&self, event: EventHandle) -> Result<bool, CallError>;

    /// `cuEventDestroy_v2`.
    fn destroy_event(&self, event: EventHandle) -> Result<(), CallError>;

    /// `cuStreamIsCapturing`: true for an active or an invalidated capture.
    fn is_capturing(&self, stream: StreamHandle) -> Result<bool, CallError>;

    /// `cuStreamGetCaptureInfo`. Like the next three, 801 where the library lacks it.
    fn capture_info(&self, _stream: StreamHandle) -> Result<CaptureInfo, CallError> {
        Err(CallError::new("cuStreamGetCaptureInfo_v2", NOT_SUPPORTED))
    }

    /// `cuUserObjectCreate` with one reference: sets the flag some time after the last one is gone.
    fn create_user_object(&self, _end: EndFlag) -> Result<UserObjectHandle, CallError> {
        Err(CallError::new("cuUserObjectCreate", NOT_SUPPORTED))
    }

    /// `cuGraphRetainUserObject`: our reference becomes the graph's, and that of what is made of the graph.
    fn give_user_object(&self, _graph: GraphHandle, _object: UserObjectHandle) -> Result<(), CallError> {
        Err(CallError::new("cuGraphRetainUserObject", NOT_SUPPORTED))
    }

    /// `cuUserObjectRelease` of our reference.
    fn release_user_object(&self, _object: UserObjectHandle) -> Result<(), CallError> {
        Err(CallError::new("cuUserObjectRelease", NOT_SUPPORTED))
    }

    /// `cuStreamGetId`: a number that no other stream of the process ever has. Asked only after `is_capturing`,
    /// because on a capturing stream it may break the capture.
    fn stream_id(&self, stream: StreamHandle) -> Result<u64, CallError>;

    /// `cuThreadExchangeStreamCaptureMode`; gives the mode that the thread had.
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode, CallError>;

    /// `cuMemHostRegister_v2` with `CU_MEMHOSTREGISTER_PORTABLE`, in the current context.
    ///
    /// Safe to call with any range, since the driver validates it; *keeping* the range mapped until
    /// `unregister` is the duty of whoever owns the memory (`pages.rs`).
    fn register(&self, base: usize, bytes: usize) -> Result<(), CallError>;

    /// `cuMemHostUnregister` of a base that was registered.
    fn unregister(&self, base: usize) -> Result<(), CallError>;

    /// Asks the driver whether the address is page-locked host memory (`cuPointerGetAttributes`).
    fn is_page_locked(&self, address: usize) -> Result<bool, CallError>;

    /// Asked before the operating system is. Only the simulated device ever says no, so that every refusal can be
    /// made to happen, one by one, where a limit of the process would strike the whole test.
    fn may_have(&self, _resource: Resource) -> bool {
        true
    }

    /// Whether there can ever be a context; a driver that has none is not asked at every drop which one is current.
    fn has_contexts(&self) -> bool {
        true
    }

    /// The NUMA nodes with memory, if the driver shall be asked instead of the system. Only the simulated device ever
    /// is, so that a machine with several can be had.
    fn memory_nodes(&self) -> Option<Vec<u32>> {
        None
    }

    /// Told before the pool zeroes, unmaps or hands out memory, and after it has mapped some. Only the simulated device looks at it.
    fn before_host_access(&self, _access: HostAccess, _base: usize, _bytes: usize) {}
}
