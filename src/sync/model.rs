//! What stands in for locks, atomics, threads and the clock under `cfg(loom)`, with the names and as much of the
//! behaviour as is used here.
//!
//! Where loom and the real thing differ, and what is done about it:
//!
//! * loom takes a sequentially consistent access for an acquire and a release. A fence before every sequentially
//!   consistent load gives back the order that the language promises between such accesses. It orders earlier
//!   relaxed stores too, which the language does not promise; so a model can miss a fault of that one kind.
//! * A wake-up is never spurious, so that one that is lost cannot hide.
//! * Time stands still but for naps: each moves the one clock by more than the cleaner stays awake without work. A
//!   wait with a deadline that the clock has not reached lasts until it is woken; where nobody wakes it, loom reports
//!   a deadlock, so no model passes because of a timeout.

use loom::sync::atomic::fence;
use std::cell::Cell;
use std::ops::{Add, Deref, DerefMut, Sub};
use std::sync::atomic::Ordering;
use std::time::Duration;

macro_rules! atomic {
    ($name:ident, $value:ty $(, $method:ident)*) => {
        /// The standard library's interface on loom's atomic.
        #[derive(Debug, Default)]
        pub(crate) struct $name(loom::sync::atomic::$name);

        #[allow(dead_code)]
        impl $name {
            pub(crate) fn new(value: $value) -> Self {
                Self(loom::sync::atomic::$name::new(value))
            }
            pub(crate) fn load(&self, order: Ordering) -> $value {
                if order == Ordering::SeqCst {
                    fence(order);
                }
                self.0.load(order)
            }
            pub(crate) fn store(&self, value: $value, order: Ordering) {
                self.0.store(value, order);
            }
            pub(crate) fn compare_exchange(
                &self,
                now: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                if failure == Ordering::SeqCst {
                    fence(failure); // One that fails is a load.
                }
                self.0.compare_exchange(now, new, success, failure)
            }
            pub(crate) fn fetch_update(
                &self,
                success: Ordering,
                failure: Ordering,
                update: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                self.0.fetch_update(success, failure, update)
            }
            $(pub(crate) fn $method(&self, value: $value, order: Ordering) -> $value {
                self.0.$method(value, order)
            })*
        }
    };
}
atomic!(AtomicBool, bool, swap);
atomic!(AtomicU32, u32, swap, fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max);
atomic!(AtomicU64, u64, swap, fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max);
atomic!(AtomicUsize, usize, swap, fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max);

const POISON: &str = "a model that panics has failed already";

/// parking_lot's interface on loom's mutex.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

/// `Some` but while a condition variable has it.
pub(crate) struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

#[allow(dead_code)]
impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().expect(POISON)))
    }

    /// Waits as long as it takes, as every wait with a deadline does here.
    pub(crate) fn try_lock_for(&self, _: Duration) -> Option<MutexGuard<'_, T>> {
        Some(self.lock())
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().expect(POISON)
    }

    pub(crate) fn into_inner(self) -> T {
        self.0.into_inner().expect(POISON)
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_deref().expect(POISON)
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_deref_mut().expect(POISON)
    }
}

/// parking_lot's interface on loom's condition variable.
#[derive(Debug, Default)]
pub(crate) struct Condvar(loom::sync::Condvar);

/// Whether a wait ended with its deadline.
pub(crate) struct Waited(bool);

impl Waited {
    pub(crate) fn timed_out(&self) -> bool {
        self.0
    }
}

#[allow(dead_code)]
impl Condvar {
    pub(crate) fn new() -> Self {
        Self(loom::sync::Condvar::new())
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let taken = guard.0.take().expect(POISON);
        guard.0 = Some(self.0.wait(taken).expect(POISON));
    }

    pub(crate) fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> Waited {
        if Instant::now() >= deadline {
            return Waited(true);
        }
        self.wait(guard);
        Waited(false)
    }

    pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) -> Waited {
        self.wait(guard);
        Waited(false)
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }

    pub(crate) fn notify_one(&self) {
        self.0.notify_one();
    }
}

/// parking_lot's interface on loom's lock for readers and writers.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(loom::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> loom::sync::RwLockReadGuard<'_, T> {
        self.0.read().expect(POISON)
    }

    pub(crate) fn try_read(&self) -> Option<loom::sync::RwLockReadGuard<'_, T>> {
        self.0.try_read().ok()
    }

    pub(crate) fn write(&self) -> loom::sync::RwLockWriteGuard<'_, T> {
        self.0.write().expect(POISON)
    }
}

thread_local! {
    /// The clock of the model that this thread runs; loom runs all threads of a model on one.
    static CLOCK: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Longer than the cleaner looks around without work before it parks.
const A_NAP: Duration = Duration::from_millis(200);

/// Longer than any model's clock runs.
const A_LIFE: Duration = Duration::from_secs(1 << 29);

fn time_passes(duration: Duration) {
    CLOCK.set(CLOCK.get() + duration.max(A_NAP));
}

/// A moment of the model's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(Duration);

#[allow(dead_code)]
impl Instant {
    /// Back to the beginning, which is no moment zero, so that there is a past.
    pub(crate) fn reset() {
        CLOCK.set(Duration::from_secs(3600));
    }

    pub(crate) fn now() -> Self {
        Self(CLOCK.get())
    }

    pub(crate) fn elapsed(&self) -> Duration {
        Self::now() - *self
    }

    pub(crate) fn checked_add(&self, duration: Duration) -> Option<Self> {
        self.0.checked_add(duration).map(Self)
    }

    pub(crate) fn saturating_duration_since(&self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0 + duration)
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }
}

/// Threads of a model, with the park token as std describes it.
///
/// loom has five threads and never one more in a model, the first included. So a model whose pool is started more than
/// once refuses the threads of lanes: then the cleaner does their work, as it does where the system refuses.
pub(crate) mod thread {
    use super::{A_LIFE, Condvar, Duration, Mutex, time_passes};
    use crate::sync::fixed;
    pub(crate) use loom::thread::yield_now;
    use std::cell::{Cell, RefCell};
    use std::sync::Arc;

    thread_local! {
        /// Of the model that this thread runs: how the names of threads end that cannot be started.
        static REFUSED: Cell<&'static [&'static str]> = const { Cell::new(&[]) };
        static NAMED: Cell<u64> = const { Cell::new(0) };
    }

    loom::thread_local! {
        static CURRENT: RefCell<Thread> = RefCell::new(Thread::new());
    }

    /// Before a model's first thread.
    pub(crate) fn begin(refused: &'static [&'static str]) {
        REFUSED.set(refused);
        NAMED.set(0);
    }

    #[derive(Debug, Default)]
    struct Parker {
        token: Mutex<bool>,
        given: Condvar,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct ThreadId(u64);

    /// A handle to wake a thread by.
    #[derive(Debug, Clone)]
    pub(crate) struct Thread {
        id: ThreadId,
        parker: Arc<Parker>,
    }

    impl Thread {
        fn new() -> Self {
            Self { id: ThreadId(NAMED.replace(NAMED.get() + 1)), parker: Arc::default() }
        }

        pub(crate) fn id(&self) -> ThreadId {
            self.id
        }

        pub(crate) fn unpark(&self) {
            *self.parker.token.lock() = true;
            self.parker.given.notify_all();
        }
    }

    pub(crate) fn current() -> Thread {
        CURRENT.with(|current| current.borrow().clone())
    }

    pub(crate) fn park() {
        let parker = current().parker;
        let mut token = parker.token.lock();
        while !*token {
            parker.given.wait(&mut token);
        }
        *token = false;
    }

    /// Takes the token if there is one, and lets time pass: the timer may fire at any moment.
    ///
    /// Not within a model's life if it is that long.
    pub(crate) fn park_timeout(duration: Duration) {
        if duration >= A_LIFE {
            return park();
        }
        *current().parker.token.lock() = false;
        sleep(duration);
    }

    pub(crate) fn sleep(duration: Duration) {
        time_passes(duration);
        yield_now();
    }

    /// std's, as far as it is used here.
    #[derive(Debug)]
    pub(crate) struct JoinHandle<T> {
        handle: loom::thread::JoinHandle<()>,
        thread: Thread,
        /// What the thread left; no step of the model.
        left: Arc<fixed::Mutex<Option<T>>>,
    }

    impl<T> JoinHandle<T> {
        pub(crate) fn thread(&self) -> &Thread {
            &self.thread
        }

        pub(crate) fn is_finished(&self) -> bool {
            self.left.lock().is_some()
        }

        pub(crate) fn join(self) -> std::thread::Result<T> {
            self.handle.join()?;
            Ok(self.left.lock().take().expect("a thread that has ended left its result"))
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct Builder {
        name: String,
    }

    impl Builder {
        pub(crate) fn new() -> Self {
            Self::default()
        }

        pub(crate) fn name(self, name: String) -> Self {
            Self { name }
        }

        pub(crate) fn spawn<T: Send + 'static>(
            self,
            body: impl FnOnce() -> T + Send + 'static,
        ) -> std::io::Result<JoinHandle<T>> {
            if REFUSED.get().iter().any(|end| self.name.ends_with(end)) {
                return Err(std::io::Error::other("a model refuses it"));
            }
            let (left, thread) = (Arc::new(fixed::Mutex::new(None)), Thread::new());
            let (leaves, own) = (left.clone(), thread.clone());
            let builder = loom::thread::Builder::new().stack_size(STACK_WORDS);
            let handle = builder.spawn(move || {
                CURRENT.with(|current| current.replace(own));
                let result = body();
                *leaves.lock() = Some(result);
            })?;
            Ok(JoinHandle { handle, thread, left })
        }
    }

    /// loom's default is too small for the cleaner's frames.
    const STACK_WORDS: usize = 0x8000;

    pub(crate) fn spawn<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        Builder::new().spawn(body).expect("a model's threads are made of memory")
    }
}
