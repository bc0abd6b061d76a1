//! The pool's seam over the simulated device: the same counted, faultable entry points, plus the checks.

use super::calls::Call;
use super::checks::{Access, Origin};
use super::cuda::Cuda;
use crate::driver::{
    CaptureInfo, CaptureMode, ContextHandle, DriverApi, DriverIdentity, EndFlag, EventHandle, GraphHandle,
    HostAccess, Resource, StreamHandle, UserObjectHandle,
};
use crate::error::{CallError, Error};
use std::sync::atomic::Ordering;

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;
/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`.
const NO_DESTRUCTOR_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`.
const MOVE: u32 = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE`.
const PORTABLE: u32 = 1;
const PAGEABLE_MEMORY_ACCESS: i32 = 88;
const PAGEABLE_ACCESS_BY_HOST_TABLES: i32 = 100;
const MEMORY_TYPE: u32 = 2;
const MEMORY_TYPE_HOST: u64 = 1;

#[derive(Debug)]
pub(super) struct SimDriver {
    pub(super) cuda: Cuda,
}

/// Names the call that failed.
pub(super) fn named<T>(call: Call, result: Result<T, u32>) -> Result<T, CallError> {
    result.map_err(|code| CallError::new(call.symbol(), code))
}

/// How every simulated device shows itself to the pool.
pub(super) fn identity(cuda: &Cuda) -> DriverIdentity {
    DriverIdentity { name: "simulated", instance: cuda.core().instance }
}

impl SimDriver {
    /// A call that a capture may forbid, and break over. A pool makes it in relaxed mode, whether or not a stream
    /// captures just now; a driver that refuses to change the mode is no fault of the pool's.
    fn make_unsafe_call<R>(&self, call: Call, make: impl FnOnce() -> R) -> R {
        let thread = self.cuda.core().threads.current();
        let is_relaxed = thread.capture_mode.load(Ordering::Relaxed) == CaptureMode::Relaxed as u32;
        if !is_relaxed && !thread.mode_was_refused.load(Ordering::Relaxed) {
            self.cuda.core().checks.violation(format_args!(
                "{} by a pool on a thread that is not in the relaxed capture mode",
                call.symbol()
            ));
        }
        make()
    }
}

impl DriverApi for SimDriver {
    fn identity(&self) -> DriverIdentity {
        identity(&self.cuda)
    }

    fn is_in_use(&self) -> bool {
        let core = self.cuda.core();
        core.is_initialised.load(Ordering::Acquire) && !core.initialised_in.is_inherited()
    }

    fn is_inherited(&self) -> bool {
        self.cuda.core().initialised_in.is_inherited()
    }

    fn prepare(&self) -> Result<(), Error> {
        if self.is_in_use() {
            return Ok(());
        }
        if self.is_inherited() {
            return Err(Error::ForkedChild);
        }
        Ok(named(Call::Init, self.cuda.cu_init(0))?)
    }

    fn current_context(&self) -> Result<Option<ContextHandle>, CallError> {
        if !self.is_in_use() {
            return Ok(None);
        }
        let context = named(Call::CtxGetCurrent, self.cuda.cu_ctx_get_current())?;
        Ok((context != 0).then_some(ContextHandle(context)))
    }

    fn set_current_context(&self, context: Option<ContextHandle>) -> Result<(), CallError> {
        let handle = context.map_or(0, |context| context.0);
        named(Call::CtxSetCurrent, self.cuda.cu_ctx_set_current(handle))
    }

    fn current_device(&self) -> Result<i32, CallError> {
        named(Call::CtxGetDevice, self.cuda.cu_ctx_get_device())
    }

    fn active_primary_devices(&self) -> Result<Vec<i32>, CallError> {
        let mut active = Vec::new();
        for device in 0..named(Call::DeviceGetCount, self.cuda.cu_device_get_count())? {
            let state = self.cuda.cu_device_primary_ctx_get_state(device);
            let (_, is_active) = named(Call::PrimaryGetState, state)?;
            active.extend(is_active.then_some(device));
        }
        Ok(active)
    }

    fn retain_primary(&self, device: i32) -> Result<ContextHandle, CallError> {
        let retained = self.cuda.cu_device_primary_ctx_retain(device);
        named(Call::PrimaryRetain, retained).map(ContextHandle)
    }

    fn release_primary(&self, device: i32) -> Result<(), CallError> {
        let was_retained = self.cuda.core().is_primary_retained(device);
        let released = self.cuda.cu_device_primary_ctx_release(device);
        // Not by the answer alone, which a fault may give too.
        if released == Err(super::codes::INVALID_CONTEXT) && !was_retained {
            self.cuda.core().checks.violation(format_args!(
                "cuDevicePrimaryCtxRelease: device {device} is released more often than retained"
            ));
        }
        named(Call::PrimaryRelease, released)
    }

    fn context_id(&self, context: ContextHandle) -> Result<u64, CallError> {
        named(Call::CtxGetId, self.cuda.cu_ctx_get_id(context.0))
    }

    fn synchronize_context(&self) -> Result<(), CallError> {
        let done = self.make_unsafe_call(Call::CtxSynchronize, || self.cuda.cu_ctx_synchronize());
        named(Call::CtxSynchronize, done)
    }

    fn reads_pageable_memory(&self, device: i32) -> Result<bool, CallError> {
        let ask =
            |attribute| named(Call::DeviceGetAttribute, self.cuda.cu_device_get_attribute(attribute, device));
        Ok(ask(PAGEABLE_MEMORY_ACCESS)? != 0 || ask(PAGEABLE_ACCESS_BY_HOST_TABLES)? != 0)
    }

    fn create_event(&self) -> Result<EventHandle, CallError> {
        named(Call::EventCreate, self.cuda.cu_event_create(DISABLE_TIMING)).map(EventHandle)
    }

    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), CallError> {
        let recorded = self.cuda.core().record_event(Origin::Pool, event.0, stream.0);
        named(Call::EventRecord, recorded)
    }

    fn query_event(&self, event: EventHandle) -> Result<bool, CallError> {
        match self.make_unsafe_call(Call::EventQuery, || self.cuda.cu_event_query(event.0)) {
            Ok(()) => Ok(true),
            Err(super::codes::NOT_READY) => Ok(false),
            Err(code) => named(Call::EventQuery, Err(code)),
        }
    }

    fn destroy_event(&self, event: EventHandle) -> Result<(), CallError> {
        named(Call::EventDestroy, self.cuda.core().destroy_event(Origin::Pool, event.0))
    }

    fn is_capturing(&self, stream: StreamHandle) -> Result<bool, CallError> {
        let status = self.cuda.cu_stream_is_capturing(stream.0);
        named(Call::StreamIsCapturing, status).map(|status| status != 0)
    }

    fn capture_info(&self, stream: StreamHandle) -> Result<CaptureInfo, CallError> {
        let info = self.cuda.cu_stream_get_capture_info(stream.0);
        let (status, id, graph) = named(Call::StreamGetCaptureInfo, info)?;
        Ok(CaptureInfo::of(status, id, graph))
    }

    fn create_user_object(&self, end: EndFlag) -> Result<UserObjectHandle, CallError> {
        let created = self.cuda.cu_user_object_create(move || end.set(), 1, NO_DESTRUCTOR_SYNC);
        named(Call::UserObjectCreate, created).map(UserObjectHandle)
    }

    fn give_user_object(&self, graph: GraphHandle, object: UserObjectHandle) -> Result<(), CallError> {
        let given = self.cuda.cu_graph_retain_user_object(graph.0, object.0, 1, MOVE);
        named(Call::GraphRetainUserObject, given)
    }

    fn release_user_object(&self, object: UserObjectHandle) -> Result<(), CallError> {
        named(Call::UserObjectRelease, self.cuda.cu_user_object_release(object.0, 1))
    }

    fn stream_id(&self, stream: StreamHandle) -> Result<u64, CallError> {
        named(Call::StreamGetId, self.cuda.cu_stream_get_id(stream.0))
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode, CallError> {
        let old = self.cuda.cu_thread_exchange_stream_capture_mode(mode as u32);
        if old.is_err() {
            self.cuda.core().threads.current().mode_was_refused.store(true, Ordering::Relaxed);
        }
        named(Call::ThreadExchangeCaptureMode, old).map(|old| match old {
            0 => CaptureMode::Global,
            1 => CaptureMode::ThreadLocal,
            _ => CaptureMode::Relaxed,
        })
    }

    fn register(&self, base: usize, bytes: usize) -> Result<(), CallError> {
        let registered = self.make_unsafe_call(Call::MemHostRegister, || {
            self.cuda.cu_mem_host_register(base as *mut u8, bytes, PORTABLE)
        });
        named(Call::MemHostRegister, registered)
    }

    fn unregister(&self, base: usize) -> Result<(), CallError> {
        let unregistered = self
            .make_unsafe_call(Call::MemHostUnregister, || self.cuda.cu_mem_host_unregister(base as *mut u8));
        named(Call::MemHostUnregister, unregistered)
    }

    fn is_page_locked(&self, address: usize) -> Result<bool, CallError> {
        match self.cuda.cu_pointer_get_attribute(MEMORY_TYPE, address as u64) {
            Ok(kind) => Ok(kind == MEMORY_TYPE_HOST),
            // Plain memory, of which the driver knows nothing.
            Err(super::codes::INVALID_VALUE) => Ok(false),
            Err(code) => named(Call::PointerGetAttribute, Err(code)),
        }
    }

    fn may_have(&self, resource: Resource) -> bool {
        match resource {
            Resource::Memory(bytes) => self.cuda.core().may_have(Call::Map, bytes),
            Resource::Thread => self.cuda.core().may_have(Call::StartThread, 0),
        }
    }

    fn memory_nodes(&self) -> Option<Vec<u32>> {
        self.cuda.core().config.memory_nodes.clone()
    }

    fn before_host_access(&self, access: HostAccess, base: usize, bytes: usize) {
        self.cuda.core().before_host_access(Access::from(access), base, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{Fault, Sim};

    struct Rig {
        sim: Sim,
        driver: crate::Driver,
        context: crate::sim::SimContext,
    }

    impl Rig {
        fn new(devices: i32) -> Self {
            let sim = Sim::builder().devices(devices).build();
            sim.expect_violations();
            let (context, driver) = (sim.context(0), sim.driver());
            driver.api().exchange_capture_mode(CaptureMode::Relaxed).expect("mode");
            Self { sim, driver, context }
        }

        fn api(&self) -> &crate::driver::gate::Gate {
            self.driver.api()
        }

        /// What the checks found since the last look; each has to mention every word.
        fn found(&self, words: &[&str]) -> usize {
            let found = self.sim.take_violations();
            for violation in &found {
                assert!(words.iter().all(|word| violation.contains(word)), "{violation}");
            }
            found.len()
        }
    }

    #[test]
    fn the_driver_is_in_use_once_anybody_initialises_it() {
        let sim = Sim::new();
        let driver = sim.driver();
        let api = driver.api();
        assert!(!api.is_in_use());
        assert_eq!(api.current_context(), Ok(None));
        assert_eq!(sim.total_calls(), 0, "asking makes no call");
        sim.fail("cuInit", Fault::once(100));
        assert_eq!(api.prepare(), Err(Error::Driver(CallError::new("cuInit", 100))));
        api.prepare().expect("init");
        assert!(api.is_in_use());
        api.prepare().expect("init");
        assert_eq!(sim.calls("cuInit"), 2, "done is done");
        assert_eq!(api.active_primary_devices(), Ok(vec![]));
        let _context = sim.context(0);
        assert_eq!(api.active_primary_devices(), Ok(vec![0]));
        assert_ne!(api.identity(), Sim::new().driver().api().identity());
        assert_eq!(api.identity(), sim.driver().api().identity());
    }

    #[test]
    fn failures_name_the_symbol_and_are_counted_like_any_call() {
        let rig = Rig::new(1);
        rig.sim.reset_calls();
        rig.sim.fail("cuMemHostRegister", Fault::once(2));
        let page = vec![0; 4096];
        let base = page.as_ptr() as usize;
        assert_eq!(rig.api().register(base, 4096), Err(CallError::new("cuMemHostRegister_v2", 2)));
        rig.api().register(base, 4096).expect("register");
        assert_eq!(rig.api().is_page_locked(base + 1), Ok(true));
        rig.api().unregister(base).expect("unregister");
        assert_eq!(rig.api().is_page_locked(base), Ok(false));
        assert_eq!(rig.api().unregister(base), Err(CallError::new("cuMemHostUnregister", 713)));
        assert_eq!([rig.sim.calls("cuMemHostRegister"), rig.sim.calls("cuMemHostUnregister")], [2, 2]);
        let destroyed = rig.api().destroy_event(EventHandle(1));
        assert_eq!(destroyed, Err(CallError::new("cuEventDestroy_v2", 400)));
    }

    #[test]
    fn device_reads_of_pageable_memory_follow_attributes_88_and_100() {
        for (attribute, reads) in [(99, false), (88, true), (100, true)] {
            let sim = Sim::builder().attribute(attribute, 1).build();
            let _context = sim.context(0);
            assert_eq!(sim.driver().api().reads_pageable_memory(0), Ok(reads));
        }
    }

    #[test]
    fn an_event_reused_before_completion_is_found() {
        let rig = Rig::new(1);
        let stream = rig.context.stream();
        let handle = StreamHandle(stream.handle());
        let event = rig.api().create_event().expect("event");
        rig.api().record_event(event, handle).expect("record");
        assert_eq!(rig.api().query_event(event), Ok(false));
        assert_eq!(rig.found(&[]), 0);
        rig.api().record_event(event, handle).expect("record");
        assert_eq!(rig.found(&["cuEventRecord", "pending"]), 1);
        rig.api().destroy_event(event).expect("destroy");
        assert_eq!(rig.found(&["cuEventDestroy", "pending"]), 1);

        let event = rig.api().create_event().expect("event");
        rig.api().record_event(event, handle).expect("record");
        rig.sim.run_until_idle();
        assert_eq!(rig.api().query_event(event), Ok(true));
        rig.api().record_event(event, handle).expect("record");
        rig.sim.run_until_idle();
        rig.api().destroy_event(event).expect("destroy");
        assert_eq!(rig.found(&[]), 0, "reused after completion is fine");
    }

    #[test]
    fn a_call_that_a_capture_may_forbid_is_found_outside_the_relaxed_mode() {
        let rig = Rig::new(1);
        let event = rig.api().create_event().expect("event");
        for mode in [CaptureMode::Global, CaptureMode::ThreadLocal] {
            rig.api().exchange_capture_mode(mode).expect("mode");
            rig.api().query_event(event).expect("query");
            assert_eq!(rig.found(&["cuEventQuery", "relaxed"]), 1);
            rig.api().synchronize_context().expect("synchronize");
            assert_eq!(rig.found(&["cuCtxSynchronize", "relaxed"]), 1);
            assert!(rig.api().register(0, 0).is_err() && rig.api().unregister(0).is_err());
            assert_eq!(rig.found(&["cuMemHost", "relaxed"]), 2);
        }
        rig.sim.fail("cuThreadExchangeStreamCaptureMode", Fault::once(999));
        assert!(rig.api().exchange_capture_mode(CaptureMode::Relaxed).is_err());
        rig.api().query_event(event).expect("query");
        assert_eq!(rig.found(&[]), 0, "the pool cannot help it");
        let stream = rig.context.stream();
        stream.begin_capture(crate::sim::CaptureMode::Relaxed);
        rig.api().record_event(event, StreamHandle(stream.handle())).expect("record");
        assert_eq!(rig.found(&["cuEventRecord", "captures"]), 1);
    }

    #[test]
    fn a_record_on_a_stream_of_another_context_is_found() {
        let rig = Rig::new(2);
        let event = rig.api().create_event().expect("event");
        let foreign = rig.sim.context(1).stream();
        let recorded = rig.api().record_event(event, StreamHandle(foreign.handle()));
        assert_eq!(recorded, Err(CallError::new("cuEventRecord", 400)));
        assert_eq!(rig.found(&["different contexts"]), 1);
    }

    #[test]
    fn a_release_without_a_retain_is_found() {
        let rig = Rig::new(2);
        rig.api().retain_primary(1).expect("retain");
        rig.api().release_primary(1).expect("release");
        assert_eq!(rig.found(&[]), 0);
        assert!(rig.api().release_primary(1).is_err());
        assert_eq!(rig.found(&["more often than retained"]), 1);
    }

    #[test]
    fn touching_memory_that_a_copy_uses_is_found() {
        let rig = Rig::new(1);
        let (stream, device) = (rig.context.stream(), rig.context.alloc(4096));
        let mut page = vec![1u8; 4096];
        let base = page.as_mut_ptr() as usize;
        rig.api().register(base, 4096).expect("register");
        for is_upload in [true, false] {
            stream.copy_for_test(&device, &mut page[1000..2000], is_upload);
            let touch = |access, from, bytes| rig.api().before_host_access(access, base + from, bytes);
            touch(HostAccess::Zero, 0, 1000);
            touch(HostAccess::HandOut, 2000, 96);
            assert_eq!(rig.found(&[]), 0, "neighbours are nobody's business");
            touch(HostAccess::Zero, 0, 1001);
            assert_eq!(rig.found(&["zeroing", "1000 bytes", "a copy to the"]), 1);
            touch(HostAccess::HandOut, 1999, 2000);
            assert_eq!(rig.found(&["handing out"]), 1);
            rig.sim.run_until_idle();
            touch(HostAccess::Zero, 0, 4096);
            touch(HostAccess::Unmap, 0, 4096);
            assert_eq!(rig.found(&[]), 0, "the copy was executed");
        }
        stream.copy_for_test(&device, &mut page[..], true);
        rig.api().before_host_access(HostAccess::Unmap, base, 4096);
        assert_eq!(rig.found(&["unmapping"]), 1);
        drop(page);
        rig.sim.run_until_idle();
        assert_eq!(rig.sim.pending_operations(), 0, "the copy was cancelled, or this would be a crash");
    }
}
