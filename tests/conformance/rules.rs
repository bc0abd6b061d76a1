//! The rules, one function for each table of the semantics that the pool relies on.

#![allow(unsafe_code)] // memory that is written while a copy is in flight

use super::entry::Entry;
use std::alloc::Layout;

const INVALID_VALUE: u32 = 1;
const NOT_INITIALIZED: u32 = 3;
const INVALID_DEVICE: u32 = 101;
const INVALID_CONTEXT: u32 = 201;
const INVALID_HANDLE: u32 = 400;
const NOT_READY: u32 = 600;
const CONTEXT_IS_DESTROYED: u32 = 709;
const ALREADY_REGISTERED: u32 = 712;
const NOT_REGISTERED: u32 = 713;

const PORTABLE: u32 = 1;
const MEMORY_TYPE_HOST: u32 = 1;
const CONCURRENT_MANAGED_ACCESS: i32 = 89;
const PAGE: usize = 4096;
const DEVICE: i32 = 0;
const MIB: usize = 1 << 20;

/// Runs every rule, on a driver that nobody in this process has initialised.
pub fn all(cuda: &dyn Entry) {
    before_initialisation(cuda);
    assert_eq!(cuda.init(0), Ok(()));
    assert_eq!(cuda.init(0), Ok(()), "initialising again is allowed");
    without_a_context(cuda);

    let primary = cuda.primary_retain(DEVICE).expect("device 0 has a primary context");
    contexts(cuda, primary);
    cuda.context_set_current(primary).unwrap();
    registrations_are_byte_exact(cuda);
    unregistering(cuda);
    copies_that_straddle(cuda);
    host_allocations(cuda);
    managed_allocations(cuda);
    what_an_address_is(cuda);
    events(cuda);
    events_of_another_context(cuda, primary);
    a_pinned_copy_reads_when_it_is_executed(cuda);
    a_pageable_copy_has_read_when_it_returns(cuda);
    capture_modes(cuda);
    registrations_of_every_thread(cuda, primary);
    assert_eq!(cuda.context_current(), Ok(primary));
    after_the_last_release(cuda);
}

/// Page-aligned memory that is written once, so that its pages exist.
struct Memory {
    base: *mut u8,
    layout: Layout,
}

impl Memory {
    fn new(bytes: usize, fill: u8) -> Self {
        let layout = Layout::from_size_align(bytes, PAGE).unwrap();
        // SAFETY: the layout is not empty.
        let base = unsafe { std::alloc::alloc(layout) };
        assert!(!base.is_null());
        let memory = Self { base, layout };
        memory.fill(fill);
        memory
    }

    fn at(&self, offset: usize) -> usize {
        assert!(offset < self.layout.size());
        self.base as usize + offset
    }

    fn fill(&self, value: u8) {
        // SAFETY: the allocation has this size; the device only reads it, through the driver.
        unsafe { std::ptr::write_bytes(self.base, value, self.layout.size()) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; the rules have unregistered it.
        unsafe { std::alloc::dealloc(self.base, self.layout) };
    }
}

fn before_initialisation(cuda: &dyn Entry) {
    assert_eq!(cuda.context_current(), Err(NOT_INITIALIZED));
    assert_eq!(cuda.event_create(), Err(NOT_INITIALIZED));
    assert_eq!(cuda.event_query(0), Err(INVALID_HANDLE), "a NULL event is refused even before cuInit");
    assert_eq!(cuda.init(1), Err(INVALID_VALUE), "flags must be 0");
    assert_eq!(cuda.context_current(), Err(NOT_INITIALIZED));
}

fn without_a_context(cuda: &dyn Entry) {
    let memory = Memory::new(PAGE, 0);
    assert_eq!(cuda.context_current(), Ok(0));
    assert_eq!(cuda.context_device(), Err(INVALID_CONTEXT));
    assert_eq!(cuda.register(memory.at(0), PAGE, PORTABLE), Err(INVALID_CONTEXT));
    assert_eq!(cuda.event_create(), Err(INVALID_CONTEXT));
    assert_eq!(cuda.context_set_current(0), Ok(()), "unbinding nothing is allowed");
}

fn contexts(cuda: &dyn Entry, primary: usize) {
    assert_eq!(cuda.context_current(), Ok(0), "a retain does not make the context current");
    assert_eq!(cuda.primary_is_active(DEVICE), Ok(true));
    assert_eq!(cuda.primary_retain(DEVICE), Ok(primary), "there is one primary context for a device");
    assert_eq!(cuda.primary_release(DEVICE), Ok(()));
    assert_eq!(cuda.primary_is_active(DEVICE), Ok(true), "one retain is left");
    cuda.context_set_current(primary).unwrap();
    assert_eq!(cuda.context_current(), Ok(primary));
    assert_eq!(cuda.context_device(), Ok(DEVICE));
    cuda.context_set_current(0).unwrap();
    assert_eq!(cuda.context_current(), Ok(0));
}

fn registrations_are_byte_exact(cuda: &dyn Entry) {
    let memory = Memory::new(8 * PAGE, 0);
    let register = |offset, bytes| cuda.register(memory.at(offset), bytes, PORTABLE);
    assert_eq!(register(0, 0), Err(INVALID_VALUE), "nothing to register");
    assert_eq!(cuda.register(0, PAGE, PORTABLE), Err(INVALID_VALUE), "no address");

    assert_eq!(register(2 * PAGE, 2 * PAGE), Ok(()));
    assert_eq!(register(2 * PAGE, 2 * PAGE), Err(ALREADY_REGISTERED), "the same range");
    assert_eq!(register(2 * PAGE, PAGE), Err(ALREADY_REGISTERED), "its head");
    assert_eq!(register(3 * PAGE, 2 * PAGE), Err(ALREADY_REGISTERED), "over its end");
    assert_eq!(register(PAGE, 2 * PAGE), Err(ALREADY_REGISTERED), "over its start");
    assert_eq!(register(2 * PAGE + 64, 64), Err(ALREADY_REGISTERED), "inside it");
    assert_eq!(register(0, 8 * PAGE), Err(ALREADY_REGISTERED), "around it");
    assert_eq!(register(4 * PAGE, PAGE), Ok(()), "the next byte is free");

    assert_eq!(register(6 * PAGE, 100), Ok(()), "neither address nor size need be whole pages");
    assert_eq!(register(6 * PAGE + 128, 100), Ok(()), "a neighbour on the same page");
    assert_eq!(register(6 * PAGE + 96, 8), Err(ALREADY_REGISTERED), "the first one's last bytes");
    for offset in [2 * PAGE, 4 * PAGE, 6 * PAGE, 6 * PAGE + 128] {
        assert_eq!(cuda.unregister(memory.at(offset)), Ok(()));
    }
    assert_eq!(register(0, 8 * PAGE), Ok(()), "all of it is free again");
    assert_eq!(cuda.unregister(memory.at(0)), Ok(()));
}

fn unregistering(cuda: &dyn Entry) {
    let memory = Memory::new(4 * PAGE, 0);
    assert_eq!(cuda.register(memory.at(0), 2 * PAGE, PORTABLE), Ok(()));
    assert_eq!(cuda.unregister(memory.at(PAGE)), Err(INVALID_VALUE), "an interior address");
    assert_eq!(cuda.unregister(memory.at(3 * PAGE)), Err(NOT_REGISTERED), "an address it does not know");
    assert_eq!(cuda.unregister(memory.at(0)), Ok(()));
    assert_eq!(cuda.unregister(memory.at(0)), Err(NOT_REGISTERED), "a second time");
}

fn host_allocations(cuda: &dyn Entry) {
    let memory = cuda.host_alloc(PAGE, PORTABLE).unwrap();
    assert_eq!(cuda.memory_type(memory), Ok(MEMORY_TYPE_HOST));
    assert_eq!(
        cuda.host_flags(memory),
        Ok(PORTABLE | 2),
        "mapped for the device, as unified addressing implies"
    );
    assert_eq!(cuda.unregister(memory), Err(INVALID_VALUE), "it was not registered");
    assert_eq!(cuda.host_free(memory + 1), Err(INVALID_VALUE), "an address inside it");
    assert_eq!(cuda.host_free(memory), Ok(()));
    assert_eq!(cuda.host_free(memory), Err(INVALID_VALUE), "twice");
    assert_eq!(cuda.host_alloc(PAGE, 8), Err(INVALID_VALUE), "an unknown flag");
    let registered = Memory::new(PAGE, 0);
    cuda.register(registered.at(0), PAGE, PORTABLE).unwrap();
    assert_eq!(cuda.host_free(registered.at(0)), Err(INVALID_VALUE));
    assert_eq!(cuda.host_flags(registered.at(0)), Err(INVALID_VALUE));
    cuda.unregister(registered.at(0)).unwrap();
}

fn managed_allocations(cuda: &dyn Entry) {
    assert_eq!(cuda.managed_alloc(0, 1), Err(INVALID_VALUE), "zero bytes");
    assert_eq!(cuda.managed_alloc(PAGE, 0), Err(INVALID_VALUE), "no attachment");
    let memory = cuda.managed_alloc(PAGE, 1).unwrap();
    let prefers = cuda.prefer_device(memory, PAGE, DEVICE);
    let is_concurrent = cuda.device_attribute(CONCURRENT_MANAGED_ACCESS, DEVICE).unwrap() != 0;
    assert_eq!(prefers, if is_concurrent { Ok(()) } else { Err(INVALID_DEVICE) });
    assert_eq!(cuda.host_free(memory as usize), Err(INVALID_VALUE));
    assert_eq!(cuda.free(memory), Ok(()));
    assert_eq!(cuda.free(memory), Err(INVALID_VALUE), "twice");
    let plain = Memory::new(PAGE, 0);
    assert_eq!(cuda.prefer_device(plain.at(0) as u64, PAGE, DEVICE), Err(INVALID_VALUE), "not managed");
}

fn copies_that_straddle(cuda: &dyn Entry) {
    let memory = Memory::new(4 * PAGE, 1);
    let (stream, to) = (cuda.stream_create().unwrap(), cuda.alloc(4 * PAGE).unwrap());
    assert_eq!(cuda.register(memory.at(0), 2 * PAGE, PORTABLE), Ok(()));
    assert_eq!(
        cuda.copy_to_device(to, memory.at(PAGE), 2 * PAGE, stream),
        Err(INVALID_VALUE),
        "over its end"
    );
    assert_eq!(cuda.copy_to_device(to, memory.at(PAGE), PAGE, stream), Ok(()), "inside it");
    assert_eq!(cuda.copy_to_device(to, memory.at(2 * PAGE), PAGE, stream), Ok(()), "outside it");
    cuda.stream_synchronize(stream).unwrap();
    cuda.unregister(memory.at(0)).unwrap();
    cuda.free(to).unwrap();
    cuda.stream_destroy(stream).unwrap();
}

fn what_an_address_is(cuda: &dyn Entry) {
    let memory = Memory::new(2 * PAGE, 0);
    assert_eq!(
        cuda.memory_type(memory.at(0)),
        Err(INVALID_VALUE),
        "plain memory, asked by the singular query"
    );
    assert_eq!(cuda.memory_type_and_device(memory.at(0)), Ok((0, -1)), "and by the plural one");
    cuda.register(memory.at(0), PAGE, PORTABLE).unwrap();
    assert_eq!(cuda.memory_type(memory.at(100)), Ok(MEMORY_TYPE_HOST));
    assert_eq!(cuda.memory_type_and_device(memory.at(100)).map(|both| both.0), Ok(MEMORY_TYPE_HOST));
    assert_eq!(cuda.memory_type(memory.at(PAGE)), Err(INVALID_VALUE), "the next page is not registered");
    cuda.unregister(memory.at(0)).unwrap();
    assert_eq!(cuda.memory_type(memory.at(0)), Err(INVALID_VALUE));
}

fn events(cuda: &dyn Entry) {
    let memory = Memory::new(PAGE, 1);
    cuda.register(memory.at(0), PAGE, PORTABLE).unwrap();
    let (stream, to) = (cuda.stream_create().unwrap(), cuda.alloc(PAGE).unwrap());
    let (event, idle) = (cuda.event_create().unwrap(), cuda.event_create().unwrap());
    assert_eq!(cuda.event_query(event), Ok(()), "never recorded is complete");
    assert_eq!(cuda.event_synchronize(event), Ok(()));

    cuda.event_record(idle, stream).unwrap();
    assert_eq!(cuda.event_synchronize(idle), Ok(()), "no work before it");
    cuda.hold(stream);
    cuda.copy_to_device(to, memory.at(0), PAGE, stream).unwrap();
    cuda.event_record(event, stream).unwrap();
    assert_eq!(cuda.event_query(event), Err(NOT_READY));
    assert_eq!(cuda.event_query(idle), Ok(()), "later work does not alter an event");
    cuda.event_record(idle, stream).unwrap();
    assert_eq!(cuda.event_query(idle), Err(NOT_READY), "but a new record does");
    cuda.release(stream);
    assert_eq!(cuda.event_synchronize(idle), Ok(()));
    assert_eq!(cuda.event_query(event), Ok(()), "events of one stream complete in order");

    assert_eq!(cuda.event_record(0, stream), Err(INVALID_HANDLE));
    assert_eq!(cuda.event_query(0), Err(INVALID_HANDLE));
    for event in [event, idle] {
        cuda.event_destroy(event).unwrap();
    }
    cuda.unregister(memory.at(0)).unwrap();
    cuda.free(to).unwrap();
    cuda.stream_destroy(stream).unwrap();
}

fn events_of_another_context(cuda: &dyn Entry, primary: usize) {
    let stream = cuda.stream_create().unwrap();
    let other = cuda.context_create(DEVICE).unwrap();
    cuda.context_set_current(other).unwrap();
    let event = cuda.event_create().unwrap();
    assert_eq!(cuda.event_record(event, stream), Err(INVALID_HANDLE));
    cuda.event_destroy(event).unwrap();
    cuda.context_destroy(other).unwrap();
    cuda.context_set_current(primary).unwrap();
    cuda.stream_destroy(stream).unwrap();
}

fn a_pinned_copy_reads_when_it_is_executed(cuda: &dyn Entry) {
    let memory = Memory::new(MIB, 1);
    cuda.register(memory.at(0), MIB, PORTABLE).unwrap();
    let (stream, to) = (cuda.stream_create().unwrap(), cuda.alloc(MIB).unwrap());
    cuda.hold(stream);
    cuda.copy_to_device(to, memory.at(0), MIB, stream).unwrap();
    // Against every rule for real code; here it shows when the bytes are read.
    memory.fill(2);
    cuda.release(stream);
    cuda.stream_synchronize(stream).unwrap();
    assert_eq!(cuda.read(to, MIB).unwrap(), vec![2; MIB], "what the memory held at the time of the copy");
    cuda.unregister(memory.at(0)).unwrap();
    cuda.free(to).unwrap();
    cuda.stream_destroy(stream).unwrap();
}

fn a_pageable_copy_has_read_when_it_returns(cuda: &dyn Entry) {
    let memory = Memory::new(MIB, 1);
    let (stream, to) = (cuda.stream_create().unwrap(), cuda.alloc(MIB).unwrap());
    cuda.copy_to_device(to, memory.at(0), MIB, stream).unwrap();
    memory.fill(2);
    cuda.stream_synchronize(stream).unwrap();
    assert_eq!(cuda.read(to, MIB).unwrap(), vec![1; MIB], "what the memory held at the time of the call");
    cuda.free(to).unwrap();
    cuda.stream_destroy(stream).unwrap();
}

fn capture_modes(cuda: &dyn Entry) {
    let stream = cuda.stream_create().unwrap();
    assert_eq!(cuda.stream_is_capturing(stream), Ok(0));
    assert_eq!(cuda.exchange_capture_mode(2), Ok(0), "a thread starts in the global mode");
    assert_eq!(cuda.exchange_capture_mode(0), Ok(2), "and gets back the mode that it had");

    // A question about an event breaks the capture of its own thread, unless the thread is in the relaxed mode.
    let event = cuda.event_create().unwrap();
    cuda.stream_begin_capture(stream, 1).unwrap();
    assert_eq!(cuda.stream_is_capturing(stream), Ok(1));
    assert_eq!(cuda.exchange_capture_mode(2), Ok(0));
    assert_eq!(cuda.event_query(event), Ok(()));
    assert_eq!(cuda.exchange_capture_mode(0), Ok(2));
    let graph = cuda.stream_end_capture(stream).expect("nothing has broken it");
    cuda.graph_destroy(graph).unwrap();
    cuda.stream_begin_capture(stream, 1).unwrap();
    assert_eq!(cuda.event_query(event), Err(900));
    assert_eq!(cuda.stream_is_capturing(stream), Ok(2));
    assert_eq!(cuda.stream_end_capture(stream), Err(901));
    assert_eq!(cuda.stream_is_capturing(stream), Ok(0), "only the end leaves the capture");
    cuda.event_destroy(event).unwrap();
    cuda.stream_destroy(stream).unwrap();
}

fn registrations_of_every_thread(cuda: &dyn Entry, primary: usize) {
    let memory = Memory::new(PAGE, 0);
    cuda.register(memory.at(0), PAGE, PORTABLE).unwrap();
    cuda.context_set_current(0).unwrap();
    assert_eq!(cuda.unregister(memory.at(0)), Ok(()), "unregistering needs no current context");
    cuda.context_set_current(primary).unwrap();
}

fn after_the_last_release(cuda: &dyn Entry) {
    let memory = Memory::new(PAGE, 0);
    assert_eq!(cuda.primary_release(DEVICE), Ok(()));
    assert_eq!(cuda.primary_is_active(DEVICE), Ok(false));
    assert_eq!(cuda.register(memory.at(0), PAGE, PORTABLE), Err(CONTEXT_IS_DESTROYED));
    assert_eq!(cuda.primary_release(DEVICE), Err(INVALID_CONTEXT), "nothing is left to release");
    cuda.context_set_current(0).unwrap();
}
