//! The simulated device's page-locked memory and copies, rule by rule.
//!
//! Rules are cited from the project's notes on CUDA: "§1.2 register" is that table of their section 1.2.

mod sim_common;

use pinpool::sim::Sim;
use sim_common::*;
use std::thread;
use std::time::Duration;

const PORTABLE: u32 = 1;
const READ_ONLY: u32 = 8;

/// An address inside `bytes`, for calls that only look at the number.
fn at(bytes: &[u8], offset: usize) -> *mut u8 {
    bytes[offset..].as_ptr().cast_mut()
}

#[test]
fn registering_needs_a_living_context() {
    // §1.2 register: no current context 201, a dead one 709.
    let sim = Sim::new();
    let memory = vec![0; BYTES];
    let register = || sim.cuda().cu_mem_host_register(at(&memory, 0), BYTES, PORTABLE);
    assert_eq!(register(), Err(3), "before cuInit");
    sim.cuda().cu_init(0).expect("init");
    assert_eq!(register(), Err(201));
    let context = sim.cuda().cu_device_primary_ctx_retain(0).expect("retain");
    assert_eq!(register(), Err(201), "retaining does not bind");
    sim.cuda().cu_ctx_set_current(context).expect("bind");
    sim.cuda().cu_device_primary_ctx_release(0).expect("release");
    assert_eq!(register(), Err(709));
}

#[test]
fn bad_arguments_of_a_registration_are_refused() {
    // §1.2 register: NULL or zero bytes, unknown flags, a device pointer: 1.
    let (sim, context) = device();
    let memory = vec![0; BYTES];
    let device = context.alloc(BYTES);
    let register = |address, bytes, flags| sim.cuda().cu_mem_host_register(address, bytes, flags);
    assert_eq!(register(std::ptr::null_mut(), BYTES, PORTABLE), Err(1));
    assert_eq!(register(at(&memory, 0), 0, PORTABLE), Err(1));
    assert_eq!(register(at(&memory, 0), BYTES, 16), Err(1));
    assert_eq!(register(at(&memory, 0), usize::MAX, PORTABLE), Err(1));
    assert_eq!(register(device.address() as *mut u8, BYTES, PORTABLE), Err(1));
    assert_eq!(sim.registered_bytes(), 0);
}

#[test]
fn registration_is_byte_exact() {
    // §1.2 register: any overlap is 712; unaligned ranges and neighbours on one page are fine.
    let (sim, _context) = device();
    let memory = vec![0; PAGE];
    let register = |from, bytes| sim.cuda().cu_mem_host_register(at(&memory, from), bytes, PORTABLE);
    assert_eq!(register(1003, 500), Ok(()), "unaligned");
    for (from, bytes) in [(1003, 500), (1003, 1), (1502, 10), (900, 104), (1100, 10), (900, 2000)] {
        assert_eq!(register(from, bytes), Err(712), "{bytes} bytes from {from}");
    }
    assert_eq!(register(903, 100), Ok(()), "the neighbour below, on the same page");
    assert_eq!(register(1503, 100), Ok(()), "the neighbour above, on the same page");
    let ranges = [(903, 100), (1003, 500), (1503, 100)].map(|(from, n)| (at(&memory, from) as usize, n));
    assert_eq!(sim.live_registrations(), ranges);
    assert_eq!(sim.registered_bytes(), 700);
    for (from, _) in ranges {
        sim.cuda().cu_mem_host_unregister(from as *mut u8).expect("unregister");
    }
    assert_eq!(sim.registered_bytes(), 0);
}

#[test]
fn unregistering_tells_interior_from_unknown_pointers_and_needs_no_context() {
    // §1.2 unregister.
    let (sim, _context) = device();
    let memory = vec![0; PAGE];
    let unregister = |address| sim.cuda().cu_mem_host_unregister(address);
    assert_eq!(unregister(at(&memory, 0)), Err(713), "never registered");
    assert_eq!(unregister(std::ptr::null_mut()), Err(1));
    sim.cuda().cu_mem_host_register(at(&memory, 100), 1000, PORTABLE).expect("register");
    assert_eq!(unregister(at(&memory, 101)), Err(1), "interior");
    assert_eq!(unregister(at(&memory, 1099)), Err(1), "interior, the last byte");
    assert_eq!(unregister(at(&memory, 1100)), Err(713), "one past the end");
    assert_eq!(unregister(at(&memory, 99)), Err(713), "one before the start");
    let allocated = sim.cuda().cu_mem_host_alloc(BYTES, 0).expect("alloc");
    assert_eq!(unregister(allocated), Err(1), "of cuMemHostAlloc");
    sim.cuda().cu_ctx_set_current(0).expect("unbind");
    assert_eq!(unregister(at(&memory, 100)), Ok(()), "without a context");
    assert_eq!(unregister(at(&memory, 100)), Err(713), "a second time");
}

#[test]
fn a_registration_vanishes_with_its_context() {
    // §1.2 unregister: the registering context was destroyed meanwhile.
    let (sim, context) = device();
    let memory = vec![0; BYTES];
    sim.cuda().cu_mem_host_register(at(&memory, 0), BYTES, PORTABLE).expect("register");
    sim.cuda().cu_device_primary_ctx_reset(0).expect("reset");
    assert_eq!(sim.registered_bytes(), 0);
    assert_eq!(sim.cuda().cu_mem_host_unregister(at(&memory, 0)), Err(709));
    assert_eq!(sim.cuda().cu_device_primary_ctx_retain(0), Ok(context.handle()), "alive again");
    sim.cuda().cu_mem_host_register(at(&memory, 0), BYTES, PORTABLE).expect("it is not registered any more");
    sim.cuda().cu_mem_host_unregister(at(&memory, 0)).expect("unregister");
}

#[test]
#[cfg(target_os = "linux")]
fn only_mapped_and_writable_memory_can_be_registered() {
    // §1.2 register: a hole, PROT_NONE or PROT_READ: 1. (Several mappings: see `mappings.rs`.)
    let (sim, _context) = device();
    let register = |base, bytes, flags| sim.cuda().cu_mem_host_register(base, bytes, flags);
    for middle in [None, Some(libc::PROT_NONE), Some(libc::PROT_READ)] {
        let pages = three_pages(middle);
        assert_eq!(register(pages, 3 * PAGE, PORTABLE), Err(1), "{middle:?}");
        assert_eq!(register(pages, PAGE + 1, PORTABLE), Err(1), "{middle:?}, its first byte");
        assert_eq!(register(pages, PAGE, PORTABLE), Ok(()), "the page before it");
    }
    let whole = three_pages(Some(libc::PROT_READ | libc::PROT_WRITE));
    assert_eq!(register(whole, 3 * PAGE, PORTABLE), Ok(()));

    // §1.2 register: READ_ONLY needs attribute 113.
    let read_only = three_pages(Some(libc::PROT_READ));
    assert_eq!(register(read_only, 3 * PAGE, PORTABLE | READ_ONLY), Err(801));
    let able = Sim::builder().attribute(113, 1).build();
    let _context = able.context(0);
    assert_eq!(able.cuda().cu_mem_host_register(read_only, 3 * PAGE, PORTABLE | READ_ONLY), Ok(()));

    let trusting = Sim::builder().mapping_check(false).build();
    let _context = trusting.context(0);
    assert_eq!(trusting.cuda().cu_mem_host_register(three_pages(None), 3 * PAGE, PORTABLE), Ok(()));
}

#[test]
fn limits_of_the_driver_and_of_the_device() {
    // §1.2 register: no support 801; 512 GiB in one call 2; too many registrations 2; IOMEMORY 800.
    let memory = vec![0; PAGE];
    let unable = Sim::builder().attribute(99, 0).build();
    let _unable = unable.context(0);
    assert_eq!(unable.cuda().cu_mem_host_register(at(&memory, 0), BYTES, PORTABLE), Err(801));
    assert!(unable.cuda().cu_mem_host_alloc(BYTES, 0).is_ok(), "allocating page-locked memory still works");

    let sim = Sim::builder().registrations_max(2).build();
    let _context = sim.context(0);
    let register = |from, bytes, flags| sim.cuda().cu_mem_host_register(at(&memory, from), bytes, flags);
    assert_eq!(register(0, 1 << 39, PORTABLE), Err(2));
    assert_eq!(register(0, 100, 4), Err(800));
    assert_eq!([register(0, 100, 1), register(100, 100, 1), register(200, 100, 1)], [Ok(()), Ok(()), Err(2)]);
}

#[test]
fn a_copy_lies_in_one_registration_or_in_none() {
    // §1.3: no straddling, neither of plain memory nor of two registrations (1). §2 decides pinned or pageable.
    let (sim, context) = device();
    let stream = context.stream();
    let (memory, dst) = (vec![3; 4096], context.alloc(4096));
    sim.cuda().cu_mem_host_register(at(&memory, 1000), 1000, PORTABLE).expect("register");
    sim.cuda().cu_mem_host_register(at(&memory, 2000), 1000, PORTABLE).expect("register");
    let copy = |from, bytes| raw_upload(&sim, dst.address(), at(&memory, from), bytes, stream.handle());
    assert_eq!(copy(999, 2), Err(1), "starts before a registration");
    assert_eq!(copy(2999, 2), Err(1), "ends after one");
    assert_eq!(copy(1999, 2), Err(1), "crosses from one to the next");
    assert_eq!(copy(500, 3500), Err(1), "contains both");
    stream.hold();
    assert_eq!(copy(1000, 1000), Ok(()), "all of one: returns although the stream is held");
    assert_eq!(copy(2500, 500), Ok(()));
    assert_eq!(sim.pending_operations(), 2);
    stream.release();
    assert_eq!(copy(0, 1000), Ok(()), "none of it: waited for the stream");
    assert_eq!(sim.pending_operations(), 0);
    assert_eq!(copy(0, 0), Ok(()), "nothing to copy");
}

#[test]
fn a_copy_stays_within_one_device_allocation() {
    let (sim, context) = device();
    let (stream, memory, dst) = (context.stream(), vec![3; BYTES], context.alloc(BYTES));
    let copy = |address, bytes| raw_upload(&sim, address, at(&memory, 0), bytes, stream.handle());
    assert_eq!(copy(dst.address() + 1, BYTES), Err(1));
    assert_eq!(copy(dst.address() - 1, 1), Err(1));
    assert_eq!(copy(dst.address() + 1, BYTES - 1), Ok(()));
    assert_eq!(dst.read()[1..], vec![3; BYTES - 1]);
    assert_ne!(dst.read()[0], 3);
    let address = dst.address();
    drop(dst);
    assert_eq!(copy(address, 1), Err(1), "freed");
}

#[test]
fn allocated_host_memory_is_page_locked_aligned_and_not_zero() {
    // §1.2, the rows of cuMemHostAlloc, cuMemFreeHost and cuMemHostGetFlags.
    let (sim, _context) = device();
    let cuda = sim.cuda();
    let memory = cuda.cu_mem_host_alloc(BYTES, 0).expect("alloc");
    assert_eq!(memory as usize % PAGE, 0);
    let mut copied = vec![9; BYTES];
    let device = cuda.cu_mem_alloc(BYTES).expect("device memory");
    let stream = cuda.cu_stream_create(1).expect("stream");
    assert_eq!(raw_upload(&sim, device, memory, BYTES, stream), Ok(()));
    assert_eq!(sim.pending_operations(), 1, "page-locked, so the copy waits for a step");
    sim.run_until_idle();
    raw_download_now(&sim, &mut copied, device).expect("copy");
    assert_eq!(copied, vec![0x32; BYTES], "its contents are not to be relied on");
    assert_eq!(cuda.cu_mem_host_get_flags(memory), Ok(2), "DEVICEMAP is implied");
    assert_eq!(cuda.cu_mem_host_register(memory, BYTES, PORTABLE), Err(712));

    let mut registered = Pinned::new(&sim, 0);
    assert_eq!(cuda.cu_mem_host_get_flags(registered.address()), Err(1));
    assert_eq!(cuda.cu_mem_free_host(registered.address()), Err(1));
    assert_eq!(cuda.cu_mem_host_get_device_pointer(memory, 0), Ok(memory as u64));
    assert_eq!(cuda.cu_mem_host_get_device_pointer(memory, 1), Err(1));
    assert_eq!(cuda.cu_mem_host_get_device_pointer(at(&copied, 0), 0), Err(1));
    assert_eq!(cuda.cu_mem_free_host(memory), Ok(()));
    assert_eq!(cuda.cu_mem_free_host(memory), Err(1));
    let empty = cuda.cu_mem_host_alloc(0, 0).expect("zero bytes succeed");
    assert_eq!(cuda.cu_mem_free_host(empty), Ok(()));
    assert_eq!(cuda.cu_mem_host_alloc(BYTES, 8), Err(1));
}

#[test]
fn the_driver_tells_what_an_address_is() {
    // §1.2, cuPointerGetAttribute(MEMORY_TYPE): 1 host, 2 device, an error for plain memory.
    let (sim, context) = device();
    let mut pinned = Pinned::new(&sim, 0);
    let (plain, device) = (vec![0; 16], context.alloc(16));
    let ask = |attribute, address| sim.cuda().cu_pointer_get_attribute(attribute, address);
    let base = pinned.address() as u64;
    assert_eq!([ask(2, base), ask(2, base + 10), ask(2, base + BYTES as u64 - 1)], [Ok(1); 3]);
    assert_eq!(ask(2, device.address()), Ok(2));
    assert_eq!(ask(2, at(&plain, 0) as u64), Err(1));
    assert_eq!([ask(11, base + 5), ask(12, base + 5)], [Ok(base), Ok(BYTES as u64)]);
    assert_eq!(ask(1, base), Ok(context.handle() as u64));
}

#[test]
fn device_memory_is_limited_filled_and_copied() {
    let sim = Sim::builder().device_memory_bytes(4096).build();
    let context = sim.context(0);
    let cuda = sim.cuda();
    let (first, second) = (context.alloc(2048), context.alloc(1024));
    assert_eq!(cuda.cu_mem_get_info(), Ok((1024, 4096)));
    assert_eq!(cuda.cu_mem_alloc(1025), Err(2));
    assert_eq!(cuda.cu_mem_alloc(0), Err(1));
    cuda.cu_memset_d8(first.address(), 8, 2048).expect("fill");
    cuda.cu_memcpy_dtod(second.address(), first.address(), 1024).expect("copy");
    assert_ne!(second.read(), vec![8; 1024], "the host does not wait");
    sim.run_until_idle();
    assert_eq!(second.read(), vec![8; 1024]);
    raw_upload_now(&sim, second.address(), &[5; 1024]).expect("copy");
    assert_eq!(second.read(), vec![5; 1024], "a synchronous copy is done when it returns");
    drop(first);
    assert_eq!(cuda.cu_mem_get_info(), Ok((3072, 4096)));
}

#[test]
fn unregistering_waits_for_the_context_and_the_check_comes_first() {
    // §1.4: an undocumented implicit synchronise, a switch. §9: unregister while an operation covers it.
    let (sim, context) = device();
    sim.expect_violations();
    let (stream, dst) = (context.stream(), context.alloc(BYTES));
    let mut src = Pinned::new(&sim, 1);
    let address = src.address() as usize;
    stream.hold();
    upload(&stream, &src.bytes, &dst);
    thread::scope(|scope| {
        let unregister = scope.spawn(|| sim.cuda().cu_mem_host_unregister(address as *mut u8));
        let is_found = eventually(|| !sim.violations().is_empty());
        let (is_back, registered) = (unregister.is_finished(), sim.registered_bytes());
        stream.release();
        assert_eq!(unregister.join().expect("the other thread"), Ok(()));
        assert!(is_found, "the check comes first");
        assert!(!is_back && registered == BYTES, "it waits");
    });
    assert_eq!(dst.read(), vec![1; BYTES], "what it waited for is done");
    let violations = sim.take_violations();
    assert_eq!(violations.len(), 1);
    assert!(
        violations[0].contains("cuMemHostUnregister") && violations[0].contains(&format!("{address:#x}"))
    );

    let other = context.stream();
    sim.stall(other.handle(), Duration::ZERO);
    let mut unused = Pinned::new(&sim, 1);
    sim.cuda().cu_mem_host_unregister(unused.address()).expect("unregister");
    assert_eq!(sim.pending_operations(), 0, "it waits for work that does not use the range, too");
    assert!(sim.take_violations().is_empty(), "which is no violation");
}

#[test]
fn unregistering_can_be_told_not_to_wait() {
    let sim = Sim::builder().unregister_waits(false).build();
    let context = sim.context(0);
    let stream = context.stream();
    stream.hold();
    sim.stall(stream.handle(), Duration::ZERO);
    let mut pinned = Pinned::new(&sim, 1);
    assert_eq!(sim.cuda().cu_mem_host_unregister(pinned.address()), Ok(()));
    assert_eq!(sim.pending_operations(), 1);
}

#[test]
fn freeing_host_memory_in_use_is_found_and_the_copy_does_not_touch_it() {
    let sim = Sim::builder().unregister_waits(false).build();
    let context = sim.context(0);
    sim.expect_violations();
    let (stream, dst) = (context.stream(), context.alloc(BYTES));
    let memory = sim.cuda().cu_mem_host_alloc(BYTES, 0).expect("alloc");
    raw_upload(&sim, dst.address(), memory, BYTES, stream.handle()).expect("copy");
    sim.cuda().cu_mem_free_host(memory).expect("free");
    assert_eq!(sim.take_violations().len(), 1);
    sim.run_until_idle();
    assert_eq!(dst.read(), vec![0xCD; BYTES], "the copy was cancelled");
}

#[test]
#[should_panic(expected = "cuMemHostUnregister")]
fn a_violation_panics_at_the_next_step() {
    let (sim, context) = device();
    let (stream, dst) = (context.stream(), context.alloc(BYTES));
    let mut src = Pinned::new(&sim, 1);
    upload(&stream, &src.bytes, &dst);
    sim.cuda().cu_mem_host_unregister(src.address()).expect("unregister");
    sim.step();
}

#[test]
#[should_panic(expected = "seed 77")]
fn a_violation_panics_when_the_last_handle_goes() {
    let sim = Sim::builder().seed(77).build();
    let context = sim.context(0);
    let (stream, dst) = (context.stream(), context.alloc(BYTES));
    let mut src = Pinned::new(&sim, 1);
    upload(&stream, &src.bytes, &dst);
    sim.cuda().cu_mem_host_unregister(src.address()).expect("unregister");
}
