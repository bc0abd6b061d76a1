//! The simulated device's own allocations: page-locked host memory, managed memory, and the platforms that refuse
//! registration.
//!
//! Rules are cited from the project's notes on CUDA: "§1.2" is a table of their section 1.2.
#![allow(unsafe_code)] // Touches memory that the driver allocated, and copies from it.

mod sim_common;

use pinpool::sim::{Fault, Sim, SimBuilder};
use sim_common::*;

const PORTABLE: u32 = 1;
const GLOBAL: u32 = 1;
const SET_PREFERRED_LOCATION: u32 = 3;
const DEVICE: i32 = 1;
const HOST: i32 = 2;
const MEMORY_TYPE: u32 = 2;
const DEVICE_POINTER: u32 = 3;
const IS_MANAGED: u32 = 8;

fn with(settings: impl FnOnce(SimBuilder) -> SimBuilder) -> (Sim, pinpool::sim::SimContext) {
    let sim = settings(Sim::builder()).build();
    let context = sim.context(0);
    (sim, context)
}

fn fill(address: usize, bytes: usize, value: u8) {
    // SAFETY: the tests allocated that many bytes there, and have not freed them.
    unsafe { std::ptr::write_bytes(address as *mut u8, value, bytes) };
}

#[test]
fn managed_memory_is_allocated_in_a_context_and_freed_like_device_memory() {
    let (sim, context) = device();
    let cuda = sim.cuda();
    cuda.cu_ctx_set_current(0).unwrap();
    assert_eq!(cuda.cu_mem_alloc_managed(BYTES, GLOBAL), Err(201), "no context");
    context.bind();
    assert_eq!(cuda.cu_mem_alloc_managed(0, GLOBAL), Err(1), "zero bytes");
    assert_eq!(cuda.cu_mem_alloc_managed(BYTES, 0), Err(1), "no attachment");
    assert_eq!(cuda.cu_mem_alloc_managed(BYTES, 4), Err(1), "single attachment");
    let managed = cuda.cu_mem_alloc_managed(BYTES, GLOBAL).unwrap();
    fill(managed as usize, BYTES, 7);
    assert_eq!(cuda.cu_pointer_get_attribute(IS_MANAGED, managed + 1), Ok(1));
    assert_eq!(cuda.cu_pointer_get_attribute(MEMORY_TYPE, managed), Ok(2));
    assert_eq!(sim.managed_bytes(), BYTES);
    let pointer = managed as *mut u8;
    assert_eq!(cuda.cu_mem_free_host(pointer), Err(1), "it is not of cuMemHostAlloc");
    assert_eq!(cuda.cu_mem_host_get_flags(pointer), Err(1));
    assert_eq!(cuda.cu_mem_host_register(pointer, BYTES, PORTABLE), Err(712));
    assert_eq!(cuda.cu_mem_free(managed + 1), Err(1), "an address inside it");
    assert_eq!(cuda.cu_mem_free(managed), Ok(()));
    assert_eq!(cuda.cu_mem_free(managed), Err(1), "twice");
    assert_eq!(sim.managed_bytes(), 0);
}

#[test]
fn advice_is_for_managed_memory_and_for_devices_that_share_it() {
    let (sim, _context) = with(|builder| builder.devices(2));
    let cuda = sim.cuda();
    let managed = cuda.cu_mem_alloc_managed(BYTES, GLOBAL).unwrap();
    let prefer = |address, bytes, place| cuda.cu_mem_advise(address, bytes, SET_PREFERRED_LOCATION, place);
    assert_eq!(prefer(managed, BYTES, (DEVICE, 1)), Ok(()));
    assert_eq!(sim.preferred_devices(), [(managed as usize, 1)]);
    assert_eq!(prefer(managed, BYTES, (HOST, 0)), Ok(()));
    assert_eq!(sim.preferred_devices(), []);
    assert_eq!(prefer(managed, BYTES, (DEVICE, 2)), Err(101), "no such device");
    assert_eq!(prefer(managed, BYTES, (0, 0)), Err(1), "no such kind of place");
    assert_eq!(prefer(managed, 0, (DEVICE, 0)), Err(1));
    assert_eq!(prefer(managed, BYTES + 1, (DEVICE, 0)), Err(1), "beyond its end");
    assert_eq!(cuda.cu_mem_advise(managed, BYTES, 99, (DEVICE, 0)), Err(1), "no such advice");
    let host = cuda.cu_mem_host_alloc(BYTES, PORTABLE).unwrap();
    assert_eq!(prefer(host as u64, BYTES, (DEVICE, 0)), Err(1), "not managed");
    cuda.cu_mem_free(managed).unwrap();

    let (sim, _context) = with(|builder| builder.attribute(89, 0));
    let managed = sim.cuda().cu_mem_alloc_managed(BYTES, GLOBAL).unwrap();
    let advised = sim.cuda().cu_mem_advise(managed, BYTES, SET_PREFERRED_LOCATION, (DEVICE, 0));
    assert_eq!(advised, Err(101), "the host may not touch it while the device works");

    let (sim, _context) = with(|builder| builder.attribute(83, 0));
    assert_eq!(sim.cuda().cu_mem_alloc_managed(BYTES, GLOBAL), Err(801));
}

#[test]
fn a_copy_from_managed_memory_reads_when_the_stream_executes_it() {
    let (sim, context) = device();
    let (stream, device) = (context.stream(), context.alloc(BYTES));
    let managed = sim.cuda().cu_mem_alloc_managed(BYTES, GLOBAL).unwrap();
    let address = managed as usize;
    fill(address, BYTES, 1);
    // SAFETY: the memory is freed after the copy was executed.
    let copied = unsafe {
        sim.cuda().cu_memcpy_htod_async(device.address(), address as *const u8, BYTES, stream.handle())
    };
    copied.unwrap();
    fill(address, BYTES, 2);
    sim.run_until_idle();
    assert_eq!(device.read(), vec![2; BYTES]);
    sim.cuda().cu_mem_free(managed).unwrap();
}

#[test]
fn freeing_what_a_copy_uses_is_found_and_does_not_crash() {
    let (sim, context) = device();
    sim.expect_violations();
    let (stream, device) = (context.stream(), context.alloc(BYTES));
    let managed = sim.cuda().cu_mem_alloc_managed(BYTES, GLOBAL).unwrap();
    // SAFETY: the device drops the copy when the memory is freed.
    let copied = unsafe {
        sim.cuda().cu_memcpy_htod_async(device.address(), managed as *const u8, BYTES, stream.handle())
    };
    copied.unwrap();
    sim.cuda().cu_mem_free(managed).unwrap();
    sim.run_until_idle();
    let found = sim.take_violations();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("cuMemFree of managed memory"), "{found:?}");
}

#[test]
fn freeing_needs_a_context_and_says_when_that_of_the_memory_is_gone() {
    // §1.2 unregister and free: 201 is listed for cuMemFreeHost; what vanished with its context is 709.
    let (sim, context) = device();
    let cuda = sim.cuda();
    let other = cuda.cu_ctx_create(0, 0).unwrap();
    let host = cuda.cu_mem_host_alloc(BYTES, PORTABLE).unwrap();
    let managed = cuda.cu_mem_alloc_managed(BYTES, GLOBAL).unwrap();
    cuda.cu_ctx_set_current(0).unwrap();
    assert_eq!(cuda.cu_mem_free_host(host), Err(201));
    assert_eq!(cuda.cu_mem_free(managed), Err(201));
    context.bind();
    cuda.cu_ctx_destroy(other).unwrap();
    assert_eq!(cuda.cu_mem_free_host(host), Err(709));
    assert_eq!(cuda.cu_mem_free(managed), Err(709));
    assert_eq!((sim.allocated_host_bytes(), sim.managed_bytes()), (0, 0));
    fill(host as usize, BYTES, 1); // the memory itself outlives the mistake
}

#[test]
fn a_broken_context_frees_nothing() {
    // §5: a sticky error is the answer to everything, freeing included.
    let (sim, context) = device();
    let host = sim.cuda().cu_mem_host_alloc(BYTES, PORTABLE).unwrap();
    context.break_with(700);
    assert_eq!(sim.cuda().cu_mem_free_host(host), Err(700));
    assert_eq!(sim.allocated_host_bytes(), BYTES);
}

#[test]
fn confidential_computing_refuses_registration_and_nothing_else() {
    // §1.2 register: 801 for every size and flag, and it does not stick.
    let (sim, _context) = with(|builder| builder.confidential_computing(true));
    let mut memory = vec![0u8; BYTES];
    for flags in [0, PORTABLE, 8] {
        assert_eq!(sim.cuda().cu_mem_host_register(memory.as_mut_ptr(), BYTES, flags), Err(801));
    }
    assert_eq!(sim.cuda().cu_device_get_attribute(99, 0), Ok(1), "the attribute does not tell");
    let host = sim.cuda().cu_mem_host_alloc(BYTES, PORTABLE).unwrap();
    assert_eq!(sim.cuda().cu_pointer_get_attribute(MEMORY_TYPE, host as u64), Ok(1));
    sim.cuda().cu_mem_free_host(host).unwrap();
}

#[test]
fn the_budget_of_wsl_counts_registered_and_allocated_memory_together() {
    // §1.2 register: over the budget of WSL2: 2.
    let (sim, _context) = with(|builder| builder.pinned_bytes_max(2 * PAGE));
    let cuda = sim.cuda();
    let mut memory = vec![0u8; 3 * PAGE];
    let host = cuda.cu_mem_host_alloc(PAGE, PORTABLE).unwrap();
    assert_eq!(cuda.cu_mem_host_register(memory.as_mut_ptr(), 2 * PAGE, PORTABLE), Err(2));
    assert_eq!(cuda.cu_mem_host_register(memory.as_mut_ptr(), PAGE, PORTABLE), Ok(()));
    assert_eq!(cuda.cu_mem_host_alloc(1, PORTABLE), Err(2));
    assert!(cuda.cu_mem_alloc_managed(8 * PAGE, GLOBAL).is_ok(), "managed memory is not page-locked");
    cuda.cu_mem_free_host(host).unwrap();
    assert_eq!(cuda.cu_mem_host_register(memory[PAGE..].as_mut_ptr(), PAGE, PORTABLE), Ok(()));
    for offset in [0, PAGE] {
        cuda.cu_mem_host_unregister(memory[offset..].as_mut_ptr()).unwrap();
    }
}

#[test]
fn the_device_has_another_address_for_registered_memory_where_attribute_91_is_0() {
    // §1.3: distinct addresses for registered memory; memory of cuMemHostAlloc has the same.
    let (sim, _context) = with(|builder| builder.attribute(91, 0));
    let cuda = sim.cuda();
    let mut memory = Pinned::new(&sim, 1);
    let address = memory.address();
    let on_device = cuda.cu_mem_host_get_device_pointer(address, 0).unwrap();
    assert_ne!(on_device, address as u64);
    assert_eq!(cuda.cu_pointer_get_attribute(DEVICE_POINTER, address as u64), Ok(on_device));
    let host = cuda.cu_mem_host_alloc(BYTES, PORTABLE).unwrap();
    assert_eq!(cuda.cu_mem_host_get_device_pointer(host, 0), Ok(host as u64));
    cuda.cu_mem_free_host(host).unwrap();
    drop(memory);

    let (sim, _context) = device();
    let mut memory = Pinned::new(&sim, 1);
    let address = memory.address();
    assert_eq!(sim.cuda().cu_mem_host_get_device_pointer(address, 0), Ok(address as u64));
}

#[test]
fn where_host_page_tables_serve_a_copy_from_any_memory_reads_when_it_is_executed() {
    let (sim, context) = with(|builder| builder.attribute(100, 1));
    let (stream, device) = (context.stream(), context.alloc(BYTES));
    let mut plain = vec![1u8; BYTES];
    upload(&stream, &plain, &device);
    assert_eq!(sim.pending_operations(), 1, "the call did not wait");
    plain.fill(2);
    sim.run_until_idle();
    assert_eq!(device.read(), vec![2; BYTES]);
}

#[test]
fn faults_and_budgets_reach_the_new_entry_points() {
    let (sim, _context) = device();
    let cuda = sim.cuda();
    sim.fail("cuMemAllocManaged", Fault::budget(PAGE, 2));
    let first = cuda.cu_mem_alloc_managed(PAGE, GLOBAL).unwrap();
    assert_eq!(cuda.cu_mem_alloc_managed(1, GLOBAL), Err(2));
    sim.fail("cuMemAdvise", Fault::once(999));
    let advise = || cuda.cu_mem_advise(first, PAGE, SET_PREFERRED_LOCATION, (DEVICE, 0));
    assert_eq!([advise(), advise()], [Err(999), Ok(())]);
    assert_eq!((sim.calls("cuMemAdvise_v2"), sim.calls("cuMemAllocManaged")), (2, 2));
    cuda.cu_mem_free(first).unwrap();
}
