//! A device, a stream and a pool for a child: over the fake libcuda, by its raw functions, so that every call at the
//! end is pinpool's; or on the simulated device.
#![allow(unsafe_code)] // The driver's own functions, by their C prototypes.

use fake_cuda::control::Control;
use pinpool::sim::{Fault, Sim, SimContext, SimStream};
use pinpool::{Driver, Error, PinnedBuffer, PinnedPool, RawStream};
use std::time::Duration;

/// Bytes of every buffer here.
pub const LEN: usize = 64 << 10;

pub enum Device {
    Fake { control: Control, stream: usize, raw: RawStream, context: usize },
    Sim { sim: Sim, _context: SimContext, stream: SimStream },
}

impl Device {
    /// Initialises it and makes a context that is current on this thread, and a stream.
    pub fn new() -> &'static Self {
        let device =
            if std::env::var_os("PINPOOL_EXIT_ON_SIM").is_some() { Self::sim() } else { Self::fake() };
        Box::leak(Box::new(device))
    }

    fn sim() -> Self {
        let sim = Sim::real_time();
        let context = sim.context(0);
        let stream = context.stream();
        Self::Sim { sim, _context: context, stream }
    }

    fn fake() -> Self {
        let control = Control::load().expect("cargo builds the fake library beside the tests");
        assert_eq!(control.initialize(), 0);
        let (mut context, mut stream) = (0, 0);
        // SAFETY: the C prototype.
        let retain: unsafe extern "C" fn(*mut usize, i32) -> u32 =
            unsafe { control.symbol("cuDevicePrimaryCtxRetain") }.unwrap();
        // SAFETY: writes one pointer.
        assert_eq!(unsafe { retain(&mut context, 0) }, 0);
        let device = Self::Fake { control, stream: 0, raw: raw_stream(context, 0), context };
        device.bind();
        let Self::Fake { control, .. } = device else { unreachable!() };
        // SAFETY: the C prototype.
        let create: unsafe extern "C" fn(*mut usize, u32) -> u32 =
            unsafe { control.symbol("cuStreamCreate") }.unwrap();
        // SAFETY: writes one pointer.
        assert_eq!(unsafe { create(&mut stream, 1) }, 0);
        Self::Fake { control, stream, raw: raw_stream(context, stream), context }
    }

    /// Makes the context current on this thread.
    pub fn bind(&self) {
        match self {
            Self::Fake { control, context, .. } => {
                // SAFETY: the C prototype.
                let bind: unsafe extern "C" fn(usize) -> u32 =
                    unsafe { control.symbol("cuCtxSetCurrent") }.unwrap();
                // SAFETY: a living context.
                assert_eq!(unsafe { bind(*context) }, 0);
            }
            Self::Sim { _context: context, .. } => context.bind(),
        }
    }

    pub fn driver(&self) -> Driver {
        match self {
            Self::Fake { .. } => Driver::cuda().expect("the fake is loaded"),
            Self::Sim { sim, .. } => sim.driver(),
        }
    }

    /// As [`Self::driver`], where nothing may be initialised any more.
    pub fn driver_again(&self) -> Driver {
        match self {
            Self::Fake { .. } => Driver::auto(),
            Self::Sim { sim, .. } => sim.driver(),
        }
    }

    pub fn pool(&self) -> PinnedPool {
        PinnedPool::builder().driver(self.driver()).build().unwrap()
    }

    pub fn record(&self, buffer: &mut PinnedBuffer) -> Result<(), Error> {
        match self {
            Self::Fake { raw, .. } => buffer.record_last_use(raw),
            Self::Sim { stream, .. } => buffer.record_last_use(stream),
        }
    }

    /// From now on the stream executes nothing.
    pub fn hold(&self) {
        match self {
            Self::Fake { control, stream, .. } => control.hold(*stream),
            Self::Sim { stream, .. } => stream.hold(),
        }
    }

    /// Enqueues something, so that a held stream has work.
    pub fn stall(&self) {
        match self {
            Self::Fake { control, stream, .. } => control.stall(*stream, Duration::from_micros(1)),
            Self::Sim { sim, stream, .. } => sim.stall(stream.handle(), Duration::from_micros(1)),
        }
    }

    pub fn slow(&self, call: &str, extra: Duration) {
        match self {
            Self::Fake { control, .. } => control.slow(call, extra),
            Self::Sim { sim, .. } => sim.fail(call, Fault::slow(extra)),
        }
    }

    pub fn fail_once(&self, call: &str) {
        match self {
            Self::Fake { control, .. } => control.fail(call, 1, 2),
            Self::Sim { sim, .. } => sim.fail(call, Fault::once(2)),
        }
    }

    pub fn hang(&self, call: &str) {
        match self {
            Self::Fake { control, .. } => control.hang(call),
            Self::Sim { sim, .. } => sim.fail(call, Fault::hang()),
        }
    }

    pub fn calls(&self, call: &str) -> u64 {
        match self {
            Self::Fake { control, .. } => control.calls(call),
            Self::Sim { sim, .. } => sim.calls(call),
        }
    }

    /// Waits until a call of this function begins that was not there before.
    pub fn until_called_again(&self, call: &str) {
        self.until_more_calls(call, self.calls(call));
    }

    /// Waits until there were more calls than these.
    pub fn until_more_calls(&self, call: &str, before: u64) {
        while self.calls(call) == before {
            std::thread::yield_now();
        }
    }
}

fn raw_stream(context: usize, stream: usize) -> RawStream {
    // SAFETY: the context and the stream live until the process ends.
    unsafe { RawStream::new(context as *mut _, stream as *mut _) }
}
