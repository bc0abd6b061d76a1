//! What the tests of the cudarc integration share: the fake libcuda in steps, cudarc's context and stream on it,
//! a pool, and the pressure that a buffer in flight must survive.
#![allow(dead_code)] // Each test file uses its own part.
#![allow(unsafe_code)] // Turning off the tracking of events is an unsafe promise.

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use fake_cuda::control::Control;
use pinpool::{Driver, PinnedBuffer, PinnedPool, regions};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub const LEN: usize = 64 << 10;

/// Long enough that only a hang reaches it.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The device of this process, without faults and with counters at zero, for one test at a time.
pub fn fake() -> MutexGuard<'static, Control> {
    static FAKE: LazyLock<Mutex<Control>> = LazyLock::new(|| {
        let control = Control::load().expect("cargo builds the fake library beside the tests");
        assert!(control.set_stepped(), "a driver function was called before the fake was loaded");
        assert!(control.set_devices(2));
        Mutex::new(control)
    });
    let control = FAKE.lock().unwrap_or_else(PoisonError::into_inner);
    control.clear_faults();
    control.reset_calls();
    control
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

pub const MODES: [Mode; 3] = [Mode::Tracked, Mode::DefaultStream, Mode::Untracked];

pub struct Rig {
    pub pool: PinnedPool,
    pub stream: Arc<CudaStream>,
    /// A stream of the same context through another `Arc`, so that the mode is as it was.
    pub other: Arc<CudaStream>,
    pub context: Arc<CudaContext>,
    pub registered_before: usize,
    pub regions_before: usize,
    pub fake: MutexGuard<'static, Control>,
}

impl Rig {
    pub fn new(mode: Mode) -> Self {
        let fake = fake();
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
        let registered_before = fake.registered_bytes();
        let regions_before = regions::live_count();
        let driver = Driver::cuda().unwrap();
        let builder = PinnedPool::builder().driver(driver).shutdown_timeout(PATIENCE);
        Self {
            pool: builder.build().unwrap(),
            stream,
            other,
            context,
            registered_before,
            regions_before,
            fake,
        }
    }

    pub fn handle(&self) -> usize {
        self.stream.cu_stream() as usize
    }

    pub fn hold(&self) {
        self.fake.hold(self.handle());
    }

    pub fn release(&self) {
        self.fake.release(self.handle());
    }

    pub fn drain(&self) {
        assert!(self.pool.drain(PATIENCE), "the pool did not settle: {:#?}", self.pool.stats());
    }

    /// A page-locked buffer of exactly this length, filled with the pattern.
    pub fn filled(&self, len: usize, bytes: &[u8]) -> PinnedBuffer {
        drop(self.pool.take(len));
        self.drain();
        let mut buffer = self.pool.take_exact(len).unwrap();
        assert!(buffer.is_pinned(), "{:#?}", self.pool.stats());
        buffer.copy_from_slice(bytes);
        buffer
    }

    /// Device memory of zeros, there already.
    pub fn device(&self, len: usize) -> CudaSlice<u8> {
        let device = self.stream.alloc_zeros::<u8>(len).unwrap();
        self.stream.synchronize().unwrap();
        device
    }

    pub fn on_device(&self, device: &CudaSlice<u8>) -> Vec<u8> {
        self.stream.clone_dtoh(device).unwrap()
    }

    /// Pinned bytes that were registered by this rig and are still.
    pub fn registered(&self) -> usize {
        self.fake.registered_bytes() - self.registered_before
    }

    /// Runs something that may ask an event again and again, on another thread, and the device meanwhile.
    pub fn stepping<R: Send>(&self, action: impl FnOnce() -> R + Send) -> R {
        std::thread::scope(|scope| {
            let thread = scope.spawn(action);
            while !thread.is_finished() {
                self.fake.run_until_idle();
                std::thread::yield_now();
            }
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Runs something that must wait for the held stream, on another thread, and releases the stream
    /// once it waits. Panics if it did not wait.
    pub fn must_wait<R: Send>(&self, action: impl FnOnce() -> R + Send) -> R {
        self.drain();
        self.fake.reset_calls();
        let (result, waited) = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.context.bind_to_thread().unwrap();
                action()
            });
            // It waits in the driver, or asks an event again and again.
            let fake = &self.fake;
            let in_driver = || fake.calls("cuCtxSynchronize") + fake.calls("cuStreamSynchronize") > 0;
            until("a wait", || in_driver() || fake.calls("cuEventQuery") > 2 || thread.is_finished());
            let waited = !thread.is_finished();
            self.release();
            // Whoever asks an event does not step the device; what was enqueued meanwhile runs too.
            while !thread.is_finished() {
                self.fake.run_until_idle();
                std::thread::yield_now();
            }
            (thread.join(), waited)
        });
        let result = result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        assert!(waited, "it did not wait for the device");
        result
    }

    /// Checks that everything came home.
    pub fn finish(self) {
        self.fake.run_until_idle();
        self.drain();
        let stats = self.pool.stats();
        assert_eq!(stats.quarantined_bytes, 0, "{stats:#?}");
        assert!(self.pool.shutdown().completed);
        let stats = self.pool.stats();
        assert!(stats.is_balanced() && stats.registered_bytes == 0, "{stats:#?}");
        assert_eq!(self.registered(), 0);
        assert_eq!(regions::live_count(), self.regions_before, "a region is not forgotten");
        self.fake.assert_clean();
    }
}

/// What happens to the pool while a buffer is in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pressure {
    Takes,
    LoweredCap,
    Clear,
    TrimTo,
    Shutdown,
}

pub const PRESSURES: [Pressure; 5] =
    [Pressure::Takes, Pressure::LoweredCap, Pressure::Clear, Pressure::TrimTo, Pressure::Shutdown];

impl Pressure {
    /// Applies it while the block at `address` is in flight; the simulated device checks every access besides.
    pub fn apply(self, rig: &Rig, address: usize, len: usize) {
        rig.fake.run_until_idle();
        let pool = &rig.pool;
        match self {
            Pressure::Takes => std::thread::scope(|scope| {
                for thread in 0..4 {
                    scope.spawn(move || {
                        for round in 0..8 {
                            let mut other = pool.take(len);
                            assert_ne!(other.as_ptr() as usize, address, "reused in flight");
                            assert!(other.iter().all(|byte| *byte == 0));
                            other.fill(thread * 8 + round + 1);
                        }
                    });
                }
            }),
            Pressure::LoweredCap => {
                pool.set_max_pooled_bytes(0);
                pool.set_max_pooled_bytes(1 << 30);
            }
            Pressure::Clear => pool.clear(),
            Pressure::TrimTo => pool.trim_to(0),
            Pressure::Shutdown => {
                // It waits for the buffer, so the stream has to be released meanwhile.
                std::thread::scope(|scope| {
                    let shutdown = scope.spawn(|| pool.shutdown());
                    for _ in 0..1000 {
                        std::thread::yield_now();
                    }
                    let early = shutdown.is_finished();
                    rig.release();
                    rig.fake.run_until_idle();
                    let report = shutdown.join().unwrap();
                    assert!(!early, "it did not wait for the device: {report:?}");
                    assert!(report.completed && report.quarantined_bytes == 0, "{report:?}");
                });
                return;
            }
        }
        assert!(rig.registered() >= len, "unregistered in flight");
        rig.fake.assert_clean();
        rig.release();
    }
}

/// A recognisable pattern without a zero byte.
pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index as u8).wrapping_mul(13).wrapping_add(seed) | 1).collect()
}

/// Waits for what some thread is about to do.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::yield_now();
    }
}

/// The message of a panic.
pub fn panic_of(action: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(action)).expect_err("no panic");
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => (*panic.downcast::<&str>().expect("a message")).into(),
    }
}
