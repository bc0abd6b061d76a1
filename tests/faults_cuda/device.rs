//! What the sweep plays on: the fake libcuda, by cudarc's contexts and streams, and pinpool's own table of functions.
//! One process has one; between two runs everything on it comes to an end, as it does when an application lets go of the
//! last context.
#![allow(unsafe_code)] // Turning off the tracking of events is an unsafe promise.

use crate::kind::Kind;
use crate::points::{Mode as FaultMode, OF_THE_POOL, Point};
use crate::raw::Cuda;
use crate::stage::PATIENCE;
use crate::system;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use fake_cuda::control::Control;
use pinpool::pin::Pinned;
use pinpool::{Driver, Error, PinnedBuffer};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub use crate::system::of_the_application;

/// Device memory of a context in one piece, from which runs cut theirs.
const ARENA_BYTES: usize = 256 << 10;
/// What the device's memory holds at first.
const FILL: u8 = 0xCD;
/// More than any scenario has.
const STREAMS: usize = 5;
/// Length of what cudarc copies by itself.
pub const OWN_LEN: usize = crate::stage::LEN;
const OWN_COPIES: usize = 2;

/// For threads that may be about to end, or may stay.
const A_WHILE: Duration = Duration::from_millis(20);

/// Whether memory of the caller's was page-locked in the last run.
static HAS_CARETAKER: AtomicBool = AtomicBool::new(false);
/// How many there are between two runs.
static THREADS: AtomicUsize = AtomicUsize::new(0);

static FAKE: OnceLock<Control> = OnceLock::new();

pub fn fake() -> &'static Control {
    FAKE.get().expect("a device was made")
}

/// How the application uses cudarc; what `SyncOnDrop::Record` does depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// A stream of its own, and event tracking: cudarc records.
    Tracked,
    /// The default stream alone: cudarc records nothing.
    DefaultStream,
    /// A stream of its own, tracking disabled, as with CUDA graphs: cudarc records nothing.
    Untracked,
}

/// Whether the scenario copies with cudarc's own functions, and how.
pub type Own = Option<Mode>;

pub const NOTHING: Own = None;

pub struct Device {
    fake: &'static Control,
    driver: Driver,
    own: Own,
    mapped_before: usize,
}

/// Two devices that move only when they are stepped. A process has one kind of them.
pub fn make(kind: Kind, own: Own) -> Device {
    let fake = FAKE.get_or_init(|| {
        let fake = Control::load().expect("cargo builds the fake library beside the tests");
        assert!(fake.set_stepped() && fake.set_devices(2) && fake.set_mapping_check(false));
        if let Some((attribute, value)) = kind.attribute() {
            assert!(fake.set_attribute(attribute, value));
        }
        fake
    });
    fake.clear_faults();
    system::refuse_nothing();
    assert!(wait(PATIENCE, threads_have_ended), "threads of the run before are left");
    THREADS.store(system::threads(), Ordering::Relaxed);
    for device in 0..2 {
        // What a pool could not give back, because the driver refused to have it.
        while fake.primary_retains(device) > 0 {
            Cuda.cu_device_primary_ctx_release(device).expect("it is retained");
        }
    }
    // As far as a refusal let the run before leave this thread.
    fake.bind(0);
    let driver = Driver::cuda().expect("the fake library");
    Cuda.cu_thread_exchange_stream_capture_mode(0).expect("nothing fails any more");
    fake.forget_violations();
    Device { fake, driver, own, mapped_before: system::mapped_bytes() }
}

/// Whether it comes about in time.
fn wait(patience: Duration, is_so: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + patience;
    while !is_so() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

fn threads_have_ended() -> bool {
    let between_runs = THREADS.load(Ordering::Relaxed);
    between_runs == 0 || system::threads() <= between_runs
}

pub fn has_caretaker() {
    HAS_CARETAKER.store(true, Ordering::Relaxed);
}

/// Whether the process is as before the last run. Who page-locks memory of the caller's stays, with threads and
/// retains, as long as some of it could not be given back.
pub fn is_as_before() -> bool {
    let gave_up_contexts = || (0..2).all(|device| fake().primary_retains(device) == 0);
    !HAS_CARETAKER.swap(false, Ordering::Relaxed)
        || wait(A_WHILE, || threads_have_ended() && gave_up_contexts())
}

pub fn fail(device: &Device, Point { entry, nth, code, mode }: Point) {
    match mode {
        _ if system::refuse(entry, nth, mode != FaultMode::Once) => {}
        FaultMode::Once => device.fake.fail(entry, nth, code),
        FaultMode::Forever => device.fake.fail_from(entry, nth, code),
        FaultMode::Everything => device.fake.end_everything(entry, nth, code),
    }
}

pub fn hang(device: &Device, entry: &str) {
    device.fake.hang(entry);
}

pub fn record(buffer: &mut PinnedBuffer, stream: &Stream) -> Result<(), Error> {
    buffer.record_last_use(&stream.cudarc)
}

pub fn record_pinned(pinned: &mut Pinned<Vec<u8>>, stream: &Stream) -> Result<(), Error> {
    pinned.record_last_use(&stream.cudarc)
}

/// Device memory, and what it holds.
pub fn fresh(context: &Context, len: usize) -> (Memory, Vec<u8>) {
    (context.alloc(len), vec![FILL; len])
}

/// cudarc keeps errors for the next call; an application that goes on has seen them.
pub fn forgive(context: &Context) {
    while context.inner.cudarc.check_err().is_err() {}
    if let Some(own) = &context.inner.own {
        while own.stream.context().check_err().is_err() {}
    }
}

/// The application lets go of its streams and of cudarc's memory.
pub fn let_go(context: &Context) {
    context.inner.given.borrow_mut().clear();
    context.inner.streams.borrow_mut().clear();
    if let Some(own) = &context.inner.own {
        own.slices.borrow_mut().clear();
        own.spare.borrow_mut().clear();
    }
}

impl Device {
    pub fn context(&self, ordinal: usize) -> Context {
        Context::new(ordinal, self.own.filter(|_| ordinal == 0))
    }

    pub fn driver(&self) -> Driver {
        self.driver.clone()
    }

    pub fn cuda(&self) -> Cuda {
        Cuda
    }

    pub fn reset_calls(&self) {
        self.fake.reset_calls();
        system::reset_calls();
    }

    pub fn called(&self) -> Vec<(&'static str, u64)> {
        let count = |entry: &'static str| match system::ENTRIES.contains(&entry) {
            true => (entry, system::calls(entry)),
            false => (entry, self.fake.calls(entry)),
        };
        OF_THE_POOL.iter().map(|entry| count(entry)).filter(|(_, count)| *count > 0).collect()
    }

    pub fn clear_faults(&self) {
        self.fake.clear_faults();
        system::refuse_nothing();
    }

    pub fn run_until_idle(&self) {
        self.fake.run_until_idle();
    }

    pub fn pending_operations(&self) -> usize {
        self.fake.pending_operations()
    }

    pub fn hanging_calls(&self) -> usize {
        self.fake.hanging_calls()
    }

    /// The last run's have gone with their contexts.
    pub fn registered_bytes(&self) -> usize {
        self.fake.registered_bytes()
    }

    pub fn allocated_host_bytes(&self) -> usize {
        self.fake.allocated_host_bytes()
    }

    pub fn managed_bytes(&self) -> usize {
        self.fake.managed_bytes()
    }

    /// What earlier runs quarantined stays mapped.
    pub fn mapped_bytes(&self) -> usize {
        system::mapped_bytes() - self.mapped_before
    }

    pub fn live_events(&self) -> usize {
        self.fake.live_events()
    }

    pub fn assert_clean(&self) {
        self.fake.assert_clean();
    }

    pub fn take_violations(&self) {
        self.fake.forget_violations();
    }

    /// They are only kept anyway.
    pub fn expect_violations(&self) {}
}

/// A context of cudarc's, with what the application needs in it, made before anything fails.
#[derive(Clone)]
pub struct Context {
    inner: Rc<InContext>,
}

struct InContext {
    streams: RefCell<Vec<Arc<CudaStream>>>,
    /// Not destroyed while something fails: that is no part of what is tested.
    given: RefCell<Vec<Arc<CudaStream>>>,
    arena: u64,
    arena_used: Cell<usize>,
    own: Option<OwnCopies>,
    cudarc: Arc<CudaContext>,
}

/// What cudarc's own copies need.
pub struct OwnCopies {
    pub stream: Arc<CudaStream>,
    /// A stream of the same context through another `Arc`, so that the mode is as it was.
    pub other: Arc<CudaStream>,
    spare: RefCell<Vec<(CudaSlice<u8>, Memory)>>,
    slices: RefCell<Vec<CudaSlice<u8>>>,
}

impl OwnCopies {
    fn new(mode: Mode) -> Self {
        let context = CudaContext::new(0).unwrap();
        let stream = match mode {
            Mode::DefaultStream => context.default_stream(),
            _ => context.new_stream().unwrap(),
        };
        if mode == Mode::Untracked {
            // SAFETY: the tests order their streams themselves.
            unsafe { context.disable_event_tracking() };
        }
        let other = CudaContext::new(0).unwrap().new_stream().unwrap();
        let spare = |_| {
            let slice = stream.alloc_zeros::<u8>(OWN_LEN).unwrap();
            let address = slice.device_ptr(&stream).0;
            (slice, Memory { context: context.cu_ctx() as usize, address, bytes: OWN_LEN })
        };
        let spare = RefCell::new((0..OWN_COPIES).map(spare).collect());
        stream.synchronize().unwrap();
        Self { stream, other, spare, slices: RefCell::default() }
    }

    /// Zeros on the device, and where they are.
    pub fn take(&self) -> (CudaSlice<u8>, Memory) {
        self.spare.borrow_mut().pop().expect("enough of it")
    }

    /// Keeps it until nothing fails any more.
    pub fn keep(&self, slice: CudaSlice<u8>) {
        self.slices.borrow_mut().push(slice);
    }
}

impl Context {
    fn new(ordinal: usize, own: Own) -> Self {
        let cudarc = CudaContext::new(ordinal).unwrap();
        let streams = (0..STREAMS).map(|_| cudarc.new_stream().unwrap()).collect();
        let arena = Cuda.cu_mem_alloc(ARENA_BYTES).unwrap();
        let own = own.map(OwnCopies::new);
        let (given, arena_used) = (RefCell::default(), Cell::new(0));
        let streams = RefCell::new(streams);
        Self { inner: Rc::new(InContext { streams, given, arena, arena_used, own, cudarc }) }
    }

    pub fn own(&self) -> &OwnCopies {
        self.inner.own.as_ref().expect("a scenario of cudarc's copies")
    }

    pub fn handle(&self) -> usize {
        self.inner.cudarc.cu_ctx() as usize
    }

    pub fn bind(&self) {
        fake().bind(self.handle());
    }

    pub fn stream(&self) -> Stream {
        let stream = self.inner.streams.borrow_mut().pop().expect("enough streams");
        self.inner.given.borrow_mut().push(stream.clone());
        Stream { cudarc: stream, context: self.clone() }
    }

    pub fn default_stream(&self) -> Stream {
        Stream { cudarc: self.inner.cudarc.default_stream(), context: self.clone() }
    }

    pub fn alloc(&self, bytes: usize) -> Memory {
        let at = self.inner.arena_used.get();
        self.inner.arena_used.set(at + bytes);
        assert!(at + bytes <= ARENA_BYTES, "a larger arena is needed");
        Memory { context: self.handle(), address: self.inner.arena + at as u64, bytes }
    }
}

pub struct Stream {
    cudarc: Arc<CudaStream>,
    context: Context,
}

impl Stream {
    pub fn hold(&self) {
        fake().hold(self.handle());
    }

    pub fn release(&self) {
        fake().release(self.handle());
    }

    pub fn handle(&self) -> usize {
        self.cudarc.cu_stream() as usize
    }

    pub fn context(&self) -> &Context {
        &self.context
    }
}

/// Device memory; the context frees it.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    context: usize,
    address: u64,
    bytes: usize,
}

impl Memory {
    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    /// What it holds now, when nothing fails any more.
    pub fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes];
        let current = Cuda.cu_ctx_get_current().expect("nothing fails any more");
        fake().bind(self.context);
        // SAFETY: the vector has that many bytes.
        let read = unsafe { Cuda.cu_memcpy_dtoh(bytes.as_mut_ptr(), self.address, self.bytes) };
        fake().bind(current);
        read.expect("nothing fails any more");
        bytes
    }
}
