//! Collections in the memory of each backend, through the fake libcuda; and what their release waits for.
#![cfg(all(feature = "cudarc", feature = "allocator-api2", target_os = "linux"))]
#![allow(unsafe_code)] // A copy from a collection promises that the memory stays valid.

use allocator_api2::vec::Vec;
use cudarc::driver::CudaContext;
use fake_cuda::control::Control;
use hashbrown::HashMap;
use pinpool::Driver;
use pinpool::backend::kind::{self, Kind};
use pinpool::backend::{Backend, BackendError, HostPinned, InBackend, MemoryBackend, Unified};
use pinpool::regions::{self, Coverage};
use pinpool::sim::{Fault, Sim};
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

const COUNT: usize = 3000;

fn fake() -> (MutexGuard<'static, Control>, Arc<CudaContext>) {
    static FAKE: LazyLock<Mutex<Control>> = LazyLock::new(|| {
        let control = Control::load().expect("cargo builds the fake library beside the tests");
        assert!(control.set_stepped(), "used before it was loaded");
        Mutex::new(control)
    });
    let control = FAKE.lock().unwrap_or_else(PoisonError::into_inner);
    (control, CudaContext::new(0).unwrap())
}

fn collections_live_in<K: Kind>() {
    let (fake, _context) = fake();
    let memory = InBackend::new(Backend::<K>::new(&Driver::auto()).unwrap()).unwrap();
    let live = || fake.allocated_host_bytes() + fake.managed_bytes() + fake.registered_bytes();
    let before = live();

    let mut numbers: Vec<u64, _> = Vec::new_in(memory.clone());
    assert_eq!(memory.backend().stats().allocated, 0, "an empty one has no memory");
    numbers.extend(0..COUNT as u64); // grows several times
    numbers.shrink_to_fit();
    assert!(numbers.iter().copied().eq(0..COUNT as u64));
    let bytes = bytemuck::cast_slice::<u64, u8>(&numbers);
    assert_eq!(regions::covering(bytes), Coverage::Whole);
    assert_eq!(memory.backend().record().find(bytes.as_ptr() as usize).unwrap().bytes, COUNT * 8);

    let hasher = BuildHasherDefault::<DefaultHasher>::default();
    let mut table = HashMap::with_hasher_in(hasher, memory.clone());
    for number in &numbers {
        table.insert(*number, number * 7);
    }
    table.retain(|number, _| number % 3 != 0);
    assert!(numbers.iter().all(|number| table.get(number).is_none_or(|value| *value == number * 7)));
    assert_eq!(table.len(), COUNT - COUNT / 3);
    assert!(live() > before);
    let boxed = allocator_api2::boxed::Box::new_in([7_u8; 64], memory.clone());
    assert_eq!(boxed[63], 7);

    drop((numbers, table, boxed));
    let stats = memory.backend().stats();
    assert_eq!((stats.live, stats.leaked, stats.released), (0, 0, stats.allocated));
    assert_eq!(live(), before);
    fake.assert_clean();
}

macro_rules! each {
    ($($name:ident $kind:ident;)*) => {$(
        #[test]
        fn $name() {
            collections_live_in::<kind::$kind>();
        }
    )*};
}
each! {
    in_host_pinned_memory HostPinned;
    in_write_combined_memory WriteCombined;
    in_unified_memory Unified;
    in_memory_that_prefers_the_device DevicePreferred;
    in_hbm Hbm;
    in_gddr Gddr;
    in_registered_memory Registered;
}

#[test]
fn a_refused_allocation_is_an_error_and_the_collection_stays_as_it_was() {
    let sim = Sim::new();
    let _context = sim.context(0);
    let memory = InBackend::new(HostPinned::new(&sim.driver()).unwrap()).unwrap();
    let mut numbers: Vec<u32, _> = Vec::with_capacity_in(1024, memory.clone());
    numbers.extend(0..1024);
    sim.fail("cuMemHostAlloc", Fault::always(2));
    assert!(numbers.try_reserve(1).is_err());
    assert!(Vec::<u8, _>::new_in(memory.clone()).try_reserve(1).is_err(), "and no other memory in its place");
    sim.clear_faults();
    assert!(numbers.iter().copied().eq(0..1024));

    #[derive(Clone, Copy)]
    #[repr(align(4096))]
    struct Aligned(#[allow(dead_code)] u8);
    let mut aligned: Vec<Aligned, _> = Vec::new_in(memory);
    assert!(aligned.try_reserve(1).is_err(), "the driver promises no such alignment");
    aligned.clear();
}

#[test]
fn a_collection_that_is_dropped_waits_for_the_copies_from_it() {
    let sim = Sim::new();
    let context = sim.context(0);
    let (stream, device) = (context.stream(), context.alloc(4096));
    let memory = InBackend::new(HostPinned::new(&sim.driver()).unwrap()).unwrap();
    let mut bytes: Vec<u8, _> = Vec::with_capacity_in(4096, memory.clone());
    bytes.resize(4096, 5);
    // SAFETY: the collection's release waits for the copy.
    unsafe { stream.copy_to_device(&bytes, &device) };
    assert_eq!(sim.pending_operations(), 1);
    drop(bytes);
    assert_eq!((sim.pending_operations(), sim.allocated_host_bytes()), (0, 0));
    assert_eq!(device.read(), [5; 4096]);

    // Where the driver cannot say that the devices are done, nothing is freed.
    let mut bytes: Vec<u8, _> = Vec::with_capacity_in(4096, memory.clone());
    bytes.resize(4096, 6);
    sim.fail("cuCtxSynchronize", Fault::once(900));
    drop(bytes);
    let stats = memory.backend().stats();
    assert_eq!((stats.live, stats.leaked, stats.leaked_bytes), (0, 1, 4096));
    assert_eq!(sim.allocated_host_bytes(), 4096);
    sim.assert_clean();
}

#[test]
fn memory_that_the_host_may_not_touch_at_any_moment_takes_no_collection() {
    let sim = Sim::builder().attribute(89, 0).build();
    let _context = sim.context(0);
    let unified = Unified::new(&sim.driver()).unwrap();
    let error = InBackend::new(unified).unwrap_err();
    assert!(matches!(error, BackendError::Unsuitable { backend: Unified::NAME, .. }), "{error}");
}
