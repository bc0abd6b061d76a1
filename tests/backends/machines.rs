//! Machines that refuse one kind of memory or another, processes without CUDA or without a context, and contexts.

use super::body::{allocate, give_back};
use super::device::{Device, Fake, Simulated, turn};
use pinpool::backend::kind::{self, Kind};
use pinpool::backend::{
    Backend, BackendError, DevicePreferred, DeviceSupport, Gddr, Hbm, HostPinned, MemoryBackend, Registered,
    TemporaryContext, Unified, WriteCombined, is_cuda_available,
};
use pinpool::sim::{CaptureMode, Sim, SimBuilder};
use pinpool::{Driver, Error, PinnedPool};

fn machine(settings: impl FnOnce(SimBuilder) -> SimBuilder) -> Simulated {
    Simulated::of(settings(Sim::builder()).build())
}

fn why<T>(result: Result<T, BackendError>) -> String {
    result.err().expect("it was expected to be refused").to_string()
}

#[test]
fn without_managed_memory_there_is_none_and_nothing_else_in_its_place() {
    let _turn = turn();
    let machine = machine(|builder| builder.attribute(83, 0));
    let driver = machine.driver();
    let text = why(Unified::new(&driver));
    assert_eq!(text, "unified memory: device 0 has no managed memory (attribute 83 is 0)");
    for text in [why(DevicePreferred::new(&driver)), why(Hbm::new(&driver)), why(Gddr::new(&driver))] {
        assert!(text.contains("attribute 83"), "{text}");
    }
    assert!(HostPinned::new(&driver).is_ok() && Registered::new(&driver).is_ok());
    assert_eq!((machine.managed_bytes(), machine.allocated_host_bytes()), (0, 0));
}

#[test]
fn where_the_host_may_not_touch_managed_memory_at_any_moment_nothing_prefers_the_device() {
    let _turn = turn();
    let machine = machine(|builder| builder.attribute(89, 0));
    let driver = machine.driver();
    for refused in [DevicePreferred::new(&driver).err(), Hbm::new(&driver).err(), Gddr::new(&driver).err()] {
        let error = refused.expect("an error at creation, not a fault later");
        assert!(error.to_string().contains("attribute 89") && error.is_permanent(), "{error}");
    }
    let unified = Unified::new(&driver).unwrap();
    assert!(!unified.is_always_touchable());
    assert!(HostPinned::new(&driver).unwrap().is_always_touchable());
    assert_eq!(machine.sim.calls("cuMemAllocManaged"), 0);
}

#[test]
fn where_registration_is_refused_host_pinned_memory_works() {
    let _turn = turn();
    let cases: [fn(SimBuilder) -> SimBuilder; 2] =
        [|builder| builder.attribute(99, 0), |builder| builder.confidential_computing(true)];
    for (case, settings) in cases.into_iter().enumerate() {
        let machine = machine(settings);
        let driver = machine.driver();
        let error = match Registered::new(&driver) {
            Err(error) => error, // the attribute tells
            Ok(registered) => allocate(&registered, 4096).unwrap_err(),
        };
        assert!(error.is_permanent(), "case {case}: {error}");
        assert_eq!((machine.allocated_host_bytes(), machine.registered_bytes()), (0, 0), "no fallback");
        let pinned = HostPinned::new(&driver).unwrap();
        let base = allocate(&pinned, 4096).unwrap();
        assert!(driver.is_page_locked(&[]).unwrap());
        assert_eq!(machine.sim.cuda().cu_mem_host_get_flags(base.as_ptr()), Ok(3), "portable and mapped");
        give_back(&pinned, base, 4096).unwrap();
    }
}

#[test]
fn write_combined_memory_is_asked_for_by_name_only() {
    let _turn = turn();
    let machine = Simulated::new();
    let (pinned, combined) =
        (HostPinned::new(&machine.driver()).unwrap(), WriteCombined::new(&machine.driver()).unwrap());
    let (one, other) = (allocate(&pinned, 4096).unwrap(), allocate(&combined, 4096).unwrap());
    let flags = |base: std::ptr::NonNull<u8>| machine.sim.cuda().cu_mem_host_get_flags(base.as_ptr());
    assert_eq!((flags(one), flags(other)), (Ok(3), Ok(7)));
    const { assert!(HostPinned::CAN_CACHE_ON_HOST && !WriteCombined::CAN_CACHE_ON_HOST) };
    const { assert!(!DevicePreferred::CAN_CACHE_ON_HOST && !Hbm::CAN_CACHE_ON_HOST) };
    const { assert!(!HostPinned::CAN_RESET && !HostPinned::CAN_GUARD && !HostPinned::CAN_DECOMMIT) };
    give_back(&pinned, one, 4096).unwrap();
    give_back(&combined, other, 4096).unwrap();
}

#[test]
fn the_budget_of_a_small_machine_is_an_error_and_comes_back() {
    let _turn = turn();
    let machine = machine(|builder| builder.pinned_bytes_max(64 << 10));
    let pinned = HostPinned::new(&machine.driver()).unwrap();
    let first = allocate(&pinned, 48 << 10).unwrap();
    assert_eq!(allocate(&pinned, 32 << 10).unwrap_err().code(), Some(2));
    give_back(&pinned, first, 48 << 10).unwrap();
    let again = allocate(&pinned, 64 << 10).unwrap();
    give_back(&pinned, again, 64 << 10).unwrap();
}

#[test]
fn without_cuda_or_without_a_context_there_is_an_error() {
    let _turn = turn();
    let text = why(HostPinned::new(&Driver::host_only()));
    assert!(text.contains("host_only"), "{text}");
    let sim = Sim::new();
    let text = why(Unified::new(&sim.driver()));
    assert!(text.starts_with("no CUDA context is current"), "{text}");
    assert_eq!(sim.calls("cuCtxCreate") + sim.calls("cuDevicePrimaryCtxRetain"), 0, "none is made");
    let none = Sim::builder().devices(0).build();
    assert_eq!(why(Registered::new(&none.driver())), "cuInit: CUDA_ERROR_NO_DEVICE (100)");
}

#[test]
fn a_backend_keeps_the_primary_context_that_its_application_drops() {
    let _turn = turn();
    let Simulated { sim, context } = Simulated::new();
    let pinned = HostPinned::new(&sim.driver()).unwrap();
    let base = allocate(&pinned, 4096).unwrap();
    drop(context);
    assert_eq!(sim.allocated_host_bytes(), 4096, "the context lives");
    give_back(&pinned, base, 4096).unwrap();
    drop(pinned);
    assert_eq!(sim.cuda().cu_device_primary_ctx_get_state(0), Ok((0, false)), "and is given up at the end");
    sim.assert_clean();
}

#[test]
fn what_outlives_its_backend_keeps_the_context_too() {
    let _turn = turn();
    let Simulated { sim, context } = Simulated::new();
    let pinned = HostPinned::new(&sim.driver()).unwrap();
    let base = allocate(&pinned, 4096).unwrap();
    drop(context);
    drop(pinned);
    assert_eq!(sim.allocated_host_bytes(), 4096, "somebody may use it still");
    assert_eq!(sim.cuda().cu_mem_host_get_flags(base.as_ptr()), Ok(3));
}

#[test]
fn the_context_can_be_that_of_a_stream_and_must_be_of_the_same_driver() {
    let _turn = turn();
    let sim = Sim::builder().devices(2).build();
    let (first, second) = (sim.context(0), sim.context(1));
    let (stream, _other) = (second.stream(), first.stream());
    first.bind();
    let there = HostPinned::builder(&sim.driver()).context_of(&stream).build();
    let error = pinpool::backend::Backend::<pinpool::backend::kind::Hbm>::builder(&Sim::new().driver())
        .context_of(&stream)
        .build();
    let there = there.unwrap();
    assert_eq!((there.device(), HostPinned::new(&sim.driver()).unwrap().device()), (1, 0));
    assert!(why(error).contains("simulated"), "another simulated device");
    let hbm = Hbm::builder(&sim.driver()).context_of(&stream).build().unwrap();
    let base = allocate(&hbm, 4096).unwrap();
    assert_eq!(sim.preferred_devices(), [(base.as_ptr() as usize, 1)]);
    give_back(&hbm, base, 4096).unwrap();
}

/// A backend at work beside a capture, on its thread and on another one.
fn works_beside_a_capture<K: Kind>() {
    let machine = Simulated::new();
    let (stream, blocking) = (machine.context.stream(), machine.context.blocking_stream());
    let backend = Backend::<K>::new(&machine.driver()).unwrap();
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        stream.begin_capture(mode);
        let round = || give_back(&backend, allocate(&backend, 4096).unwrap(), 4096).unwrap();
        round();
        std::thread::scope(|scope| scope.spawn(round).join()).unwrap();
        drop(Backend::<K>::new(&machine.driver()).unwrap());
        assert!(stream.end_capture().is_ok(), "the capture is broken: {mode:?}");
    }
    blocking.begin_capture(CaptureMode::Global);
    let refused = backend.wait_for_devices().unwrap_err();
    assert_eq!(refused.code(), Some(906));
    assert!(blocking.end_capture().is_ok(), "a wait would have broken the capture");
    backend.wait_for_devices().unwrap();
    machine.sim.assert_clean();
}

#[test]
fn a_backend_breaks_no_capture() {
    let _turn = turn();
    works_beside_a_capture::<kind::HostPinned>();
    works_beside_a_capture::<kind::Unified>();
    works_beside_a_capture::<kind::DevicePreferred>();
    works_beside_a_capture::<kind::Registered>();
}

/// What a pool of the same driver knows of captures binds the backends too.
#[test]
fn a_backend_s_wait_obeys_the_holds_and_the_captures_that_a_pool_knows() {
    let _turn = turn();
    let machine = Simulated::new();
    let stream = machine.context.stream();
    let backend = HostPinned::new(&machine.driver()).unwrap();
    let pool = PinnedPool::builder().driver(machine.driver()).build().unwrap();
    let hold = pool.hold_context_waits();
    assert_eq!(backend.wait_for_devices(), Err(BackendError::ContextWaitsHeld));
    drop(hold);
    backend.wait_for_devices().unwrap();
    let mut buffer = pool.take(4096);
    buffer.record_last_use(&stream).unwrap();
    stream.begin_capture(CaptureMode::Global);
    assert_eq!(backend.wait_for_devices().unwrap_err().code(), Some(906), "the pool was shown the stream");
    assert!(stream.end_capture().is_ok(), "a wait would have broken the capture");
    backend.wait_for_devices().unwrap();
    drop(buffer);
    assert!(pool.shutdown().completed);
    machine.sim.assert_clean();
}

/// Made and destroyed, whatever fails on the way.
fn temporary_contexts_balance(device: &dyn Device) {
    let driver = device.driver();
    let current = device.current();
    let made = || (device.calls("cuCtxCreate_v2"), device.calls("cuCtxDestroy_v2"));
    let (created, destroyed) = made();
    let context = TemporaryContext::new(&driver, 0).unwrap();
    assert_eq!(device.current(), current, "the thread keeps its own");
    let inside = context.with(|| device.current()).unwrap();
    assert!(inside != 0 && inside != current && device.current() == current);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = context.with(|| panic!("in the middle"));
    }));
    assert!(panicked.is_err());
    assert_eq!(device.current(), current, "also when a panic passes through");
    assert_eq!(context.destroy(), Ok(()));
    assert_eq!(made(), (created + 1, destroyed + 1));

    device.fail("cuCtxCreate_v2", 1, 2);
    assert!(TemporaryContext::new(&driver, 0).is_err());
    device.clear_faults();
    assert_eq!(device.current(), current);
    assert_eq!(made(), (created + 2, destroyed + 1), "nothing was made");

    device.fail("cuCtxPopCurrent_v2", 1, 999);
    assert!(TemporaryContext::new(&driver, 0).is_err());
    device.clear_faults();
    assert_eq!(device.current(), current);
    assert_eq!(made(), (created + 3, destroyed + 2), "what was made is destroyed");

    let context = TemporaryContext::new(&driver, 0).unwrap();
    device.fail("cuCtxDestroy_v2", 1, 999);
    assert!(context.destroy().is_err(), "and it is told, not tried again at the drop");
    device.clear_faults();
    assert_eq!(made(), (created + 4, destroyed + 3));
    assert!(TemporaryContext::new(&driver, 77).is_err(), "no such device");
    assert_eq!(device.current(), current);
}

#[test]
fn temporary_contexts_are_balanced_on_every_path() {
    let _turn = turn();
    temporary_contexts_balance(&Simulated::new());
    temporary_contexts_balance(&Fake::new());
}

#[test]
fn what_a_device_supports_is_told() {
    let _turn = turn();
    let sim = Sim::builder().devices(2).attribute(99, 0).attribute(100, 1).attribute(91, 0).build();
    let support = DeviceSupport::of_all(&sim.driver()).unwrap();
    assert_eq!(support.len(), 2);
    assert!(support[1].device == 1 && support[1].managed_memory && support[1].concurrent_managed_access);
    assert!(!support[0].host_register && support[0].host_page_tables && !support[0].host_pointer_serves);
    assert_eq!(sim.calls("cuDevicePrimaryCtxRetain"), 0, "no context is made");
    let error = DeviceSupport::of(&sim.driver(), 2).unwrap_err();
    assert!(matches!(error, Error::Driver(call) if call.code() == 101));
    assert!(matches!(DeviceSupport::of_all(&Driver::host_only()), Err(Error::NoCuda { .. })));
}

#[test]
fn cuda_is_available_from_any_thread_and_is_looked_for_once() {
    let _turn = turn();
    let fake = Fake::new();
    let current = fake.current();
    let counts = || (fake.calls("cuCtxCreate_v2"), fake.calls("cuDevicePrimaryCtxRetain"));
    let (initialised, before) = (fake.calls("cuInit"), counts());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert!(is_cuda_available()));
        }
    });
    let asked = fake.calls("cuDeviceGetCount");
    assert!((0..1000).all(|_| is_cuda_available()));
    assert_eq!(fake.calls("cuDeviceGetCount"), asked, "cheap after that");
    assert!(fake.calls("cuInit") <= initialised + 1);
    assert_eq!((fake.current(), counts()), (current, before), "no context was made, none is retained");
}
