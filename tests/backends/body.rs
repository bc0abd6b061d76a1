//! What every kind of memory has to show, whatever it is run on.

#![allow(unsafe_code)] // Uses memory by its address.

use super::device::{Device, turn};
use pinpool::backend::kind::{self, Kind};
use pinpool::backend::{Backend, BackendError, MemoryBackend, TemporaryContext};
use pinpool::regions::{self, Coverage};
use std::ptr::NonNull;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The driver calls behind a kind, and where its memory is counted from below.
pub struct Names {
    pub obtain: &'static str,
    pub give_back: &'static str,
    pub advice: Option<&'static str>,
    pub live_bytes: fn(&dyn Device) -> usize,
}

pub trait Named: Kind {
    const NAMES: Names;
}

macro_rules! named {
    ($($kind:ident $obtain:literal $give_back:literal $advice:expr, $live:ident;)*) => {$(
        impl Named for kind::$kind {
            const NAMES: Names = Names {
                obtain: $obtain, give_back: $give_back, advice: $advice, live_bytes: |device| device.$live(),
            };
        }
    )*};
}
named! {
    HostPinned "cuMemHostAlloc" "cuMemFreeHost" None, allocated_host_bytes;
    WriteCombined "cuMemHostAlloc" "cuMemFreeHost" None, allocated_host_bytes;
    Unified "cuMemAllocManaged" "cuMemFree" None, managed_bytes;
    DevicePreferred "cuMemAllocManaged" "cuMemFree" Some("cuMemAdvise"), managed_bytes;
    Hbm "cuMemAllocManaged" "cuMemFree" Some("cuMemAdvise"), managed_bytes;
    Gddr "cuMemAllocManaged" "cuMemFree" Some("cuMemAdvise"), managed_bytes;
    Registered "cuMemHostRegister" "cuMemHostUnregister" None, registered_bytes;
}

/// Everything, for one kind.
pub fn all<K: Named>(device: &dyn Device) {
    let _turn = turn();
    memory_is_given_used_and_taken_back::<K>(device);
    sizes_that_cannot_be(device, &backend::<K>(device));
    the_record_bounds_it_and_what_is_too_much_is_rolled_back::<K>(device);
    any_thread_may_give_it_back::<K>(device);
    what_is_not_a_live_allocation_of_its_own_is_refused::<K>(device);
    a_driver_that_refuses_to_give::<K>(device);
    a_driver_that_refuses_to_take_back::<K>(device);
    when_its_context_is_gone::<K>(device);
    what_outlives_the_backend_is_left_alone::<K>(device);
    many_threads_at_once::<K>(device);
    device.assert_clean();
}

fn backend<K: Named>(device: &dyn Device) -> Backend<K> {
    Backend::new(&device.driver()).unwrap_or_else(|error| panic!("{error}"))
}

/// `allocate`, for tests which use the memory as they may.
pub fn allocate<B: MemoryBackend>(backend: &B, bytes: usize) -> Result<NonNull<u8>, BackendError> {
    // SAFETY: the tests use it until they give it back; the host alone touches it.
    unsafe { backend.allocate(bytes) }
}

/// `deallocate`, for tests which do not use the memory afterwards.
pub fn give_back<B: MemoryBackend>(backend: &B, base: NonNull<u8>, bytes: usize) -> Result<(), BackendError> {
    // SAFETY: nobody uses it any more; what is not an allocation is refused.
    unsafe { backend.deallocate(base, bytes) }
}

fn slice(base: NonNull<u8>, bytes: usize) -> &'static mut [u8] {
    // SAFETY: the tests allocated that many bytes there, and use one slice at a time before they give them back.
    unsafe { std::slice::from_raw_parts_mut(base.as_ptr(), bytes) }
}

/// What must be as before when a backend is through: this thread's context and capture mode.
fn unchanged<R>(device: &dyn Device, action: impl FnOnce() -> R) -> R {
    let before = (device.current(), device.capture_mode());
    let result = action();
    assert_eq!((device.current(), device.capture_mode()), before, "the thread's own state is restored");
    result
}

fn live(device: &dyn Device, names: &Names) -> usize {
    (names.live_bytes)(device)
}

fn memory_is_given_used_and_taken_back<K: Named>(device: &dyn Device) {
    let (names, backend) = (K::NAMES, backend::<K>(device));
    let before = (live(device, &names), device.preferring());
    let recorded_regions = regions::live_count();
    for bytes in [1, 300, 4095, 4096, 4097, 2 * MIB, 5 * MIB + 1] {
        let base = unchanged(device, || allocate(&backend, bytes)).unwrap();
        assert_eq!(base.as_ptr() as usize % Backend::<K>::ALIGNMENT, 0);
        let memory = slice(base, bytes);
        assert!(!Backend::<K>::IS_ZEROED || memory.iter().all(|byte| *byte == 0));
        memory.fill(7);
        assert!(memory.iter().all(|byte| *byte == 7));
        assert_eq!(regions::covering(memory), Coverage::Whole);
        assert!(live(device, &names) >= before.0 + bytes);
        assert_eq!(device.preferring(), before.1 + usize::from(names.advice.is_some()));
        let recorded = backend.record().find(base.as_ptr() as usize).unwrap();
        assert_eq!(recorded.bytes, bytes);
        assert_eq!((backend.stats().live, backend.stats().live_bytes), (1, bytes));
        unchanged(device, || give_back(&backend, base, bytes)).unwrap();
        assert_eq!(regions::live_count(), recorded_regions);
        assert_eq!((live(device, &names), device.preferring()), before);
    }
    let stats = backend.stats();
    assert_eq!((stats.live, stats.allocated, stats.released), (0, 7, 7));
    assert_eq!((stats.refused, stats.leaked), (0, 0));
}

fn sizes_that_cannot_be<K: Named>(device: &dyn Device, backend: &Backend<K>) {
    let before = device.calls(K::NAMES.obtain);
    for bytes in [0, usize::MAX, usize::MAX / 2, isize::MAX as usize / 2 + 1] {
        assert_eq!(allocate(backend, bytes), Err(BackendError::Size { bytes }));
    }
    assert_eq!(device.calls(K::NAMES.obtain), before, "the driver is not asked");
    assert_eq!(backend.stats().refused, 4);
}

fn the_record_bounds_it_and_what_is_too_much_is_rolled_back<K: Named>(device: &dyn Device) {
    let names = K::NAMES;
    let backend = Backend::<K>::builder(&device.driver()).record_capacity(2).build().unwrap();
    let before = live(device, &names);
    let two = [allocate(&backend, 4096).unwrap(), allocate(&backend, 4096).unwrap()];
    let with_two = (live(device, &names), device.preferring());
    let calls = || (device.calls(names.obtain), device.calls(names.give_back));
    let (obtained, given_back) = calls();
    let error = unchanged(device, || allocate(&backend, 8192)).unwrap_err();
    assert_eq!(error, BackendError::RecordFull { capacity: 2, leaked: None });
    assert_eq!(calls(), (obtained + 1, given_back + 1), "what was given was released again");
    assert_eq!((live(device, &names), device.preferring()), with_two);
    assert_eq!((backend.stats().rolled_back, backend.stats().live, backend.stats().leaked), (1, 2, 0));

    device.fail(names.give_back, 1, 999);
    let error = allocate(&backend, 8192).unwrap_err();
    device.clear_faults();
    assert!(matches!(error, BackendError::RecordFull { leaked: Some(call), .. } if call.code() == 999));
    assert_eq!((backend.stats().leaked, backend.stats().leaked_bytes), (1, 8192), "it is counted");
    for base in two {
        give_back(&backend, base, 4096).unwrap();
    }
    assert_eq!(live(device, &names), before + 8192, "the leak is all that is left");
    let again = allocate(&backend, 4096).expect("there is room again");
    give_back(&backend, again, 4096).unwrap();
}

fn any_thread_may_give_it_back<K: Named>(device: &dyn Device) {
    let backend = backend::<K>(device);
    let base = allocate(&backend, 64 * KIB).unwrap().as_ptr() as usize;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(device.current(), 0, "this thread has no context");
            let base = NonNull::new(base as *mut u8).unwrap();
            unchanged(device, || give_back(&backend, base, 64 * KIB)).unwrap();
            let base = unchanged(device, || allocate(&backend, 4096)).unwrap();
            unchanged(device, || give_back(&backend, base, 4096)).unwrap();
        });
    });
    assert_eq!((backend.stats().live, backend.stats().released), (0, 2));
}

fn what_is_not_a_live_allocation_of_its_own_is_refused<K: Named>(device: &dyn Device) {
    let (names, backend, other) = (K::NAMES, backend::<K>(device), backend::<K>(device));
    let base = allocate(&backend, 8192).unwrap();
    let mut mine = 0_u8;
    let inside = NonNull::new(base.as_ptr().wrapping_add(4096)).unwrap();
    let calls = device.calls(names.give_back);
    let refused = |result: Result<(), BackendError>| {
        assert!(matches!(result, Err(BackendError::NotOurs { .. })), "{result:?}");
    };
    refused(give_back(&other, base, 8192));
    refused(give_back(&backend, inside, 4096));
    refused(give_back(&backend, NonNull::from(&mut mine), 1));
    refused(give_back(&backend, NonNull::dangling(), 1));
    let wrong = BackendError::WrongSize { address: base.as_ptr() as usize, bytes: 8192, stated: 4096 };
    assert_eq!(give_back(&backend, base, 4096), Err(wrong));
    assert_eq!(device.calls(names.give_back), calls, "the driver is not asked");
    slice(base, 8192).fill(1); // it is live after all that
    give_back(&backend, base, 8192).unwrap();
    refused(give_back(&backend, base, 8192));
    assert_eq!(device.calls(names.give_back), calls + 1);
    assert_eq!((backend.stats().release_refused, backend.stats().leaked), (5, 0));
}

fn a_driver_that_refuses_to_give<K: Named>(device: &dyn Device) {
    let (names, backend) = (K::NAMES, backend::<K>(device));
    let before = live(device, &names);
    for code in [2, 1, 801, 3, 4, 201, 700, 709, 900, 999] {
        device.fail(names.obtain, 1, code);
        let error = unchanged(device, || allocate(&backend, 4096)).unwrap_err();
        assert_eq!(error.code(), Some(code), "{error}");
        assert_eq!(error.is_permanent(), code == 801);
        let Some(advice) = names.advice else { continue };
        device.clear_faults();
        device.fail(advice, 1, code);
        let (obtained, given_back) = (device.calls(names.obtain), device.calls(names.give_back));
        let error = unchanged(device, || allocate(&backend, 4096)).unwrap_err();
        assert_eq!(error.code(), Some(code), "without the advice it would be other memory");
        assert_eq!(device.calls(names.obtain), obtained + 1);
        assert_eq!(device.calls(names.give_back), given_back + 1, "rolled back");
    }
    device.clear_faults();
    assert_eq!((live(device, &names), backend.record().len()), (before, 0));
    assert_eq!((backend.stats().live, backend.stats().leaked, backend.stats().allocated), (0, 0, 0));
    let base = allocate(&backend, 4096).expect("and it works again");
    give_back(&backend, base, 4096).unwrap();
}

fn a_driver_that_refuses_to_take_back<K: Named>(device: &dyn Device) {
    let (names, backend) = (K::NAMES, backend::<K>(device));
    // While a stream captures, the same call may succeed later.
    let base = allocate(&backend, 4096).unwrap();
    device.fail(names.give_back, 1, 900);
    assert_eq!(unchanged(device, || give_back(&backend, base, 4096)).unwrap_err().code(), Some(900));
    assert_eq!((backend.stats().live, backend.stats().leaked), (1, 0), "it is live still");
    device.clear_faults();
    give_back(&backend, base, 4096).unwrap();

    for (leaked, code) in (1..).zip([1, 700, 999, 4, 709]) {
        let base = allocate(&backend, 4096).unwrap();
        device.fail(names.give_back, 1, code);
        let error = unchanged(device, || give_back(&backend, base, 4096)).unwrap_err();
        device.clear_faults();
        assert_eq!(error.code(), Some(code));
        assert!(regions::is_pinned(base.as_ptr()), "a device may still reach it");
        slice(base, 4096).fill(3); // leaked, and not freed
        let again = give_back(&backend, base, 4096);
        assert!(matches!(again, Err(BackendError::NotOurs { .. })), "{again:?}");
        assert_eq!((backend.stats().live, backend.stats().leaked), (0, leaked));
    }
    assert_eq!(backend.stats().leaked_bytes, 5 * 4096);
}

fn when_its_context_is_gone<K: Named>(device: &dyn Device) {
    let names = K::NAMES;
    let context = unchanged(device, || TemporaryContext::new(&device.driver(), 0)).unwrap();
    let backend = Backend::<K>::builder(&device.driver()).context(&context).build().unwrap();
    let before = live(device, &names);
    let base = unchanged(device, || allocate(&backend, 4096)).unwrap();
    unchanged(device, || drop(context));
    assert_eq!(live(device, &names), before, "it went with its context");
    assert!(unchanged(device, || allocate(&backend, 4096)).is_err());
    let error = unchanged(device, || give_back(&backend, base, 4096)).unwrap_err();
    assert!(matches!(error, BackendError::Driver(_)), "{error}");
    assert_eq!((backend.stats().live, backend.stats().leaked), (0, 1));
    unchanged(device, || drop(backend));
}

fn what_outlives_the_backend_is_left_alone<K: Named>(device: &dyn Device) {
    let (names, backend) = (K::NAMES, backend::<K>(device));
    let base = allocate(&backend, 4096).unwrap();
    let (before, calls) = (live(device, &names), device.calls(names.give_back));
    unchanged(device, || drop(backend));
    slice(base, 4096).fill(5);
    assert_eq!((live(device, &names), device.calls(names.give_back)), (before, calls));
    assert!(regions::is_pinned(base.as_ptr()));
}

fn many_threads_at_once<K: Named>(device: &dyn Device) {
    const THREADS: usize = 4;
    const ROUNDS: usize = 40;
    let (names, backend) = (K::NAMES, backend::<K>(device));
    let before = live(device, &names);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let backend = &backend;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let bytes = 1 + (thread * 977 + round * 131) % 9000;
                    let base = allocate(backend, bytes).unwrap();
                    slice(base, bytes).fill(thread as u8);
                    assert!(slice(base, bytes).iter().all(|byte| *byte == thread as u8));
                    give_back(backend, base, bytes).unwrap();
                }
            });
        }
    });
    let stats = backend.stats();
    assert_eq!((stats.live, stats.released), (0, (THREADS * ROUNDS) as u64));
    assert_eq!(live(device, &names), before);
}
