//! One run of a scenario: a simulated device in steps, a pool on it, and what its copies have to bring about.
#![allow(unsafe_code)] // Enqueueing a copy promises that the memory stays valid until it is done.

use crate::device::{self, Context, Device, Memory, Own, Stream};
use crate::kind::Kind;
use crate::points::{Mode, Point};
use pinpool::pin::Pinned;
use pinpool::{Error, PinnedBuffer, PinnedPool, PoolBuilder, Stats};
use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

pub const KIB: usize = 1 << 10;
/// One page: what a run zeroes, copies and compares costs nearly nothing.
pub const LEN: usize = 4 * KIB;

/// Long enough that only a hang reaches it.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// How long a run waits for what may never come, because an answer says so for ever.
pub const STUCK: Duration = Duration::from_millis(15);

/// What a scenario's device and pool are like.
pub struct Settings {
    pub device: Kind,
    pub pool: fn(PoolBuilder) -> PoolBuilder,
    /// Whether the application uses the second device too.
    pub two_devices: bool,
    /// What else it has; see `device.rs`.
    pub own: Own,
}

pub struct Stage {
    pub pool: PinnedPool,
    copies: RefCell<Vec<Copied>>,
    pub context: Context,
    /// The second device's, where the scenario has one; not the calling thread's.
    other: Option<Context>,
    pub device: Device,
    /// What shall fail.
    pub point: Option<Point>,
    name: String,
    /// A context that the scenario made, to be destroyed at the end; 0 for none.
    own_context: Cell<usize>,
    at_the_end: RefCell<Vec<AtTheEnd>>,
    /// Further pools of the scenario, which are shut down.
    others: RefCell<Vec<PinnedPool>>,
    /// False once a pool is gone whose books nobody can read any more.
    books_are_whole: Cell<bool>,
    /// The scenario itself shut the pool down, and so has had a report with reasons.
    has_shut_down: Cell<bool>,
}

type AtTheEnd = Box<dyn FnOnce(&Device)>;

/// A copy that the driver took, and what it has to bring to the device.
struct Copied {
    device: Memory,
    expected: Vec<u8>,
}

impl Stage {
    /// `name` is that of the pool's thread, so that a panic there is known to be this run's.
    pub fn new(settings: &Settings, name: &str, point: Option<Point>) -> Self {
        let device = device::make(settings.device, settings.own);
        let other = settings.two_devices.then(|| device.context(1));
        let context = device.context(0);
        // A cleaner that is taken off its core in mid-move must not make a take give up on it.
        let builder = PinnedPool::builder().driver(device.driver()).harvest_wait_limit(PATIENCE);
        let stuck = point.is_some_and(|point| point.may_stick());
        let timeout = if stuck { STUCK } else { PATIENCE };
        let builder = builder.shutdown_timeout(timeout).thread_name(name);
        let pool = (settings.pool)(builder).build().unwrap();
        device.reset_calls();
        if point.is_some_and(|point| point.is_a_lie()) {
            device.expect_violations();
        }
        if let Some(point) = point {
            device::fail(&device, point);
        }
        Self {
            pool,
            copies: RefCell::default(),
            context,
            other,
            device,
            point,
            has_shut_down: Cell::new(false),
            name: name.into(),
            own_context: Cell::new(0),
            others: RefCell::default(),
            at_the_end: RefCell::default(),
            books_are_whole: Cell::new(true),
        }
    }

    /// Whether something may be pending for ever in this run, so that nothing may be waited for.
    pub fn may_stick(&self) -> bool {
        self.point.is_some_and(|point| point.may_stick())
    }

    /// A buffer of zeros; `None` where the system refuses the memory.
    pub fn take(&self, len: usize) -> Option<PinnedBuffer> {
        match self.pool.try_take(len) {
            Ok(buffer) => {
                assert_eq!(buffer.len(), len);
                assert!(all_zero(&buffer), "old bytes reached a taker");
                Some(buffer)
            }
            Err(Error::OutOfMemory { bytes }) => {
                assert!(bytes >= len && self.point.is_some_and(|point| point.entry == "mmap"));
                None
            }
            Err(error) => panic!("try_take: {error}"),
        }
    }

    /// A buffer that has been through the pool: page-locked, unless a fault prevents it.
    pub fn warm(&self, len: usize) -> Option<PinnedBuffer> {
        drop(self.take(len));
        self.settle();
        self.take(len)
    }

    /// Fills the buffer and enqueues a copy of all of it; the device must get these bytes and no others.
    pub fn upload(&self, buffer: &mut PinnedBuffer, stream: &Stream, seed: u8) {
        let bytes = pattern(seed, buffer.len());
        buffer.copy_from_slice(&bytes);
        self.upload_as_it_is(buffer, stream);
    }

    /// As [`Self::upload`], without a write before.
    pub fn upload_as_it_is(&self, buffer: &PinnedBuffer, stream: &Stream) {
        self.upload_slice(buffer, stream);
    }

    /// Enqueues a copy of memory that a pool or a caretaker keeps until it is done.
    pub fn upload_slice(&self, buffer: &[u8], stream: &Stream) {
        let device = stream.context().alloc(buffer.len());
        let expected = buffer.to_vec();
        let cuda = self.device.cuda();
        // SAFETY: the buffer is handed back to the pool, whose promise is that the memory stays valid and
        // unchanged until the copy is done; the simulated device checks that promise.
        let taken = unsafe {
            cuda.cu_memcpy_htod_async(device.address(), buffer.as_ptr(), buffer.len(), stream.handle())
        };
        if taken.is_ok() {
            self.copies.borrow_mut().push(Copied { device, expected });
        }
    }

    /// Enqueues a copy of a fresh buffer of the device into the buffer; gives the bytes that must arrive.
    pub fn download(&self, buffer: &mut PinnedBuffer, stream: &Stream) -> Option<Vec<u8>> {
        let (device, bytes) = device::fresh(stream.context(), buffer.len());
        let len = buffer.len();
        let to = buffer.as_mut_ptr();
        // SAFETY: as in `upload_as_it_is`; nobody reads the buffer before the copy is done.
        let taken =
            unsafe { self.device.cuda().cu_memcpy_dtoh_async(to, device.address(), len, stream.handle()) };
        self.copies.borrow_mut().push(Copied { expected: bytes.clone(), device });
        taken.is_ok().then_some(bytes)
    }

    /// Records, and forgives what the fault of this run explains.
    pub fn record(&self, buffer: &mut PinnedBuffer, stream: &Stream) -> bool {
        match device::record(buffer, stream) {
            Ok(()) => true,
            Err(error) => {
                self.explain(&error);
                false
            }
        }
    }

    pub fn record_pinned(&self, pinned: &mut Pinned<Vec<u8>>, stream: &Stream) {
        if let Err(error) = device::record_pinned(pinned, stream) {
            self.explain(&error);
        }
    }

    /// What callers pinned and let go is no longer registered, unless the driver would not have it so.
    pub fn settle_callers_memory(&self) {
        let deadline = Instant::now() + if self.point.is_some() { STUCK } else { PATIENCE };
        while self.device.registered_bytes() > 0 && Instant::now() < deadline {
            self.device.run_until_idle();
            assert!(self.point.is_some() || Instant::now() < deadline, "it stays registered");
            std::thread::yield_now();
        }
        if self.device.registered_bytes() > 0 {
            self.forget_registrations();
        }
    }

    /// What keeps the caller's memory page-locked is gone at its end, with what it could not give back.
    pub fn has_a_caretaker(&self) {
        device::has_caretaker();
        if self.point.is_some_and(|point| point.mode != Mode::Once) {
            self.a_pool_has_gone();
        }
    }

    /// Memory of the caller's stays registered; it is in no pool's books.
    pub fn forget_registrations(&self) {
        assert!(self.point.is_some(), "nothing failed");
        self.a_pool_has_gone();
    }

    /// Panics unless the error is this run's fault.
    pub fn explain(&self, error: &Error) {
        let Some(point) = self.point else { panic!("an error without a fault: {error}") };
        let text = error.to_string();
        let code = format!("({})", point.code);
        let refused = matches!(error, Error::OutOfMemory { .. } | Error::Setting { .. });
        assert!(
            text.contains(&code) || refused || text.contains("lost") || text.contains("no CUDA context"),
            "{text}"
        );
    }

    /// Steps the device and waits until everything that was returned is dealt with. False when it may never be.
    pub fn settle(&self) -> bool {
        let deadline = Instant::now() + if self.may_stick() { STUCK } else { PATIENCE };
        loop {
            self.device.run_until_idle();
            if self.pool.drain(Duration::from_millis(3)) {
                return true;
            }
            if Instant::now() > deadline {
                assert!(self.may_stick(), "the pool did not settle: {:#?}", self.pool.stats());
                return false;
            }
        }
    }

    /// A shutdown in the middle: bounded, and its report agrees with the statistics.
    pub fn shutdown(&self) {
        self.has_shut_down.set(true);
        self.device.run_until_idle();
        let started = Instant::now();
        let report = self.pool.shutdown();
        let stats = self.pool.stats();
        assert!(started.elapsed() < PATIENCE + Duration::from_secs(3), "{report:#?}");
        assert!(report.completed || self.may_stick(), "{report:#?}");
        assert_eq!(report.registered_bytes_after, stats.registered_bytes);
        assert_eq!(report.checked_out_buffers, stats.checked_out_buffers);
        assert!(report.quarantined_bytes <= stats.quarantined_bytes);
    }

    pub fn other(&self) -> &Context {
        self.other.as_ref().expect("a scenario of two devices")
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// How long to wait for what may never come.
    pub fn patience(&self) -> Duration {
        if self.may_stick() { STUCK } else { PATIENCE }
    }

    /// What another pool leaves behind is in its own books.
    pub fn keep(&self, pool: PinnedPool) {
        self.others.borrow_mut().push(pool);
    }

    /// What the further pools still have, now that nothing fails any more.
    pub fn shut_others_down(&self) {
        for pool in &*self.others.borrow() {
            pool.drain(PATIENCE);
            assert!(pool.shutdown().completed);
        }
    }

    pub fn a_pool_has_gone(&self) {
        self.books_are_whole.set(false);
    }

    /// Whether everything on the device is in books that can be read: always, when nothing failed.
    pub fn books_are_whole(&self) -> bool {
        self.books_are_whole.get() || self.point.is_none()
    }

    /// Statistics of all pools, the stage's own first.
    pub fn all_stats(&self) -> Vec<Stats> {
        let others = self.others.borrow();
        std::iter::once(&self.pool).chain(&*others).map(PinnedPool::stats).collect()
    }

    /// Makes the stage's context the current one again, after another was made and made current.
    pub fn restore(&self, other: usize) {
        self.own_context.set(other);
        self.context.bind();
    }

    pub fn has_shut_down(&self) -> bool {
        self.has_shut_down.get()
    }

    /// Lets go of the pools and of the application's device memory.
    pub fn end(self) -> (Device, Context) {
        device::let_go(&self.context);
        (self.device, self.context)
    }

    /// Done when nothing fails any more, as an application ends what it could not end before.
    pub fn at_the_end_of_faults(&self, action: impl FnOnce(&Device) + 'static) {
        self.at_the_end.borrow_mut().push(Box::new(action));
    }

    /// Nothing fails any more.
    pub fn end_faults(&self) {
        self.device.clear_faults();
        for action in self.at_the_end.take() {
            action(&self.device);
        }
        device::forgive(&self.context);
    }

    /// A copy that the driver took otherwise: what it has to bring.
    #[allow(dead_code)] // Only cudarc takes copies by itself.
    pub fn expect(&self, device: Memory, expected: Vec<u8>) {
        self.copies.borrow_mut().push(Copied { device, expected });
    }

    pub fn forget_copies(&self) {
        self.copies.borrow_mut().clear();
    }

    /// Every copy that the driver took has brought its bytes to the device.
    pub fn check_copies(&self) {
        for Copied { device, expected } in &*self.copies.borrow() {
            assert_eq!(device.len(), expected.len());
            assert!(device.read() == *expected, "the device has other bytes than the buffer had");
        }
    }
}

/// A recognisable pattern without a zero byte; marked here and there only, since it is made some ten thousand times.
pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    let mut bytes = vec![seed | 1; len];
    for at in (0..len).step_by(61) {
        bytes[at] = (at / 61) as u8 | 1;
    }
    bytes
}

pub fn all_zero(bytes: &[u8]) -> bool {
    const ZEROS: [u8; 4 * LEN] = [0; 4 * LEN];
    *bytes == ZEROS[..bytes.len()]
}
