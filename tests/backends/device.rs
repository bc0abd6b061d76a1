//! What the bodies run on: the simulated device, or the fake libcuda below pinpool's own CUDA path.

#![allow(unsafe_code)] // Calls the fake library by symbol.

use cudarc::driver::CudaContext;
use fake_cuda::control::Control;
use pinpool::Driver;
use pinpool::sim::{Fault, Sim, SimContext};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// The record of regions is the process's, so the tests of this binary run one after the other.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A driver with the application's context current on the calling thread, and a view from below.
pub trait Device: Sync {
    fn driver(&self) -> Driver;
    fn calls(&self, name: &str) -> u64;
    /// The nth call from now fails; 0 makes every call fail.
    fn fail(&self, name: &str, nth: u64, code: u32);
    fn clear_faults(&self);
    fn registered_bytes(&self) -> usize;
    fn allocated_host_bytes(&self) -> usize;
    fn managed_bytes(&self) -> usize;
    /// Managed allocations that prefer a device.
    fn preferring(&self) -> usize;
    /// The current context of this thread.
    fn current(&self) -> usize;
    /// The stream capture mode of this thread; left as it is.
    fn capture_mode(&self) -> u32;
    fn assert_clean(&self);
}

pub struct Simulated {
    pub context: SimContext,
    pub sim: Sim,
}

impl Simulated {
    pub fn new() -> Self {
        Self::of(Sim::new())
    }

    pub fn of(sim: Sim) -> Self {
        Self { context: sim.context(0), sim }
    }
}

impl Device for Simulated {
    fn driver(&self) -> Driver {
        self.sim.driver()
    }
    fn calls(&self, name: &str) -> u64 {
        self.sim.calls(name)
    }
    fn fail(&self, name: &str, nth: u64, code: u32) {
        self.sim.fail(name, if nth == 0 { Fault::always(code) } else { Fault::nth(nth, code) });
    }
    fn clear_faults(&self) {
        self.sim.clear_faults();
    }
    fn registered_bytes(&self) -> usize {
        self.sim.registered_bytes()
    }
    fn allocated_host_bytes(&self) -> usize {
        self.sim.allocated_host_bytes()
    }
    fn managed_bytes(&self) -> usize {
        self.sim.managed_bytes()
    }
    fn preferring(&self) -> usize {
        self.sim.preferred_devices().len()
    }
    fn current(&self) -> usize {
        self.sim.cuda().cu_ctx_get_current().unwrap()
    }
    fn capture_mode(&self) -> u32 {
        let mode = self.sim.cuda().cu_thread_exchange_stream_capture_mode(0).unwrap();
        self.sim.cuda().cu_thread_exchange_stream_capture_mode(mode).unwrap();
        mode
    }
    fn assert_clean(&self) {
        self.sim.assert_clean();
    }
}

/// The fake library of this process, which one test has at a time; the context is cudarc's.
pub struct Fake {
    _context: Arc<CudaContext>,
    control: MutexGuard<'static, Control>,
}

impl Fake {
    pub fn new() -> Self {
        static CONTROL: LazyLock<Mutex<Control>> = LazyLock::new(|| {
            let control = Control::load().expect("cargo builds the fake library beside the tests");
            assert!(control.set_stepped() && control.set_devices(2), "used before it was loaded");
            Mutex::new(control)
        });
        let control = CONTROL.lock().unwrap_or_else(PoisonError::into_inner);
        control.clear_faults();
        Self { _context: CudaContext::new(0).unwrap(), control }
    }

    fn symbol<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the callers name the C prototype.
        unsafe { self.control.symbol::<F>(name) }.expect("the fake has it")
    }
}

impl Device for Fake {
    fn driver(&self) -> Driver {
        Driver::auto()
    }
    fn calls(&self, name: &str) -> u64 {
        self.control.calls(name)
    }
    fn fail(&self, name: &str, nth: u64, code: u32) {
        self.control.fail(name, nth, code);
    }
    fn clear_faults(&self) {
        self.control.clear_faults();
    }
    fn registered_bytes(&self) -> usize {
        self.control.registered_bytes()
    }
    fn allocated_host_bytes(&self) -> usize {
        self.control.allocated_host_bytes()
    }
    fn managed_bytes(&self) -> usize {
        self.control.managed_bytes()
    }
    fn preferring(&self) -> usize {
        self.control.preferring()
    }
    fn current(&self) -> usize {
        let current = self.symbol::<unsafe extern "C" fn(*mut usize) -> u32>("cuCtxGetCurrent");
        let mut context = 0;
        // SAFETY: it writes one pointer.
        assert_eq!(unsafe { current(&mut context) }, 0);
        context
    }
    fn capture_mode(&self) -> u32 {
        let exchange =
            self.symbol::<unsafe extern "C" fn(*mut u32) -> u32>("cuThreadExchangeStreamCaptureMode");
        let mut mode = 0;
        // SAFETY: it reads and writes one number.
        assert_eq!(unsafe { exchange(&mut mode) }, 0);
        let was = mode;
        // SAFETY: as above.
        assert_eq!(unsafe { exchange(&mut mode) }, 0);
        was
    }
    fn assert_clean(&self) {
        self.control.assert_clean();
    }
}
