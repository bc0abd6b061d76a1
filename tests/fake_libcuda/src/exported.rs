//! The device's controls, for a program that opened the library: C functions to be found by `dlsym`.
//!
//! Those that configure the device answer false when it exists already, which is since the first call of
//! any driver function. None unwinds.

use crate::device::{self, Clock};
use pinpool::sim::Fault;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

macro_rules! controls {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty $body:block)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        ///
        /// A pointer is valid: a name is a C string, a buffer has the capacity stated.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> $result {
            catch_unwind(AssertUnwindSafe(|| $body)).unwrap_or_default()
        }
    )*};
}

controls! {
    /// From now on the stream executes nothing.
    fn fake_cuda_hold(stream: usize) -> () { device::sim().hold(stream) }

    /// Ends a hold.
    fn fake_cuda_release(stream: usize) -> () { device::sim().release(stream) }

    /// From now on the stream says that it captures a graph, or that it does not.
    fn fake_cuda_pretend_capture(stream: usize, is_capturing: bool) -> () {
        device::sim().pretend_capture(stream, is_capturing)
    }

    /// From now on the functions of user objects that have become due are not run; false lets them run.
    fn fake_cuda_hold_user_objects(are_held: bool) -> () { device::sim().hold_user_objects(are_held) }

    /// User objects that something still refers to.
    fn fake_cuda_user_objects() -> usize { device::sim().user_objects() }

    /// Enqueues an operation that takes this long.
    fn fake_cuda_stall(stream: usize, ns: u64) -> () { device::sim().stall(stream, Duration::from_nanos(ns)) }

    /// Executes one operation of one stream that is not held; false when nothing could run.
    fn fake_cuda_step() -> bool { device::sim().step() }

    /// Steps until nothing can run.
    fn fake_cuda_run_until_idle() -> () { device::sim().run_until_idle() }

    /// Operations enqueued and not yet executed.
    fn fake_cuda_pending_operations() -> usize { device::sim().pending_operations() }

    /// How often a driver function was called since the last reset.
    fn fake_cuda_calls(name: *const c_char) -> u64 {
        // SAFETY: a C string by the contract.
        let name = unsafe { text(name) };
        device::sim().calls(&name)
    }

    /// How often any driver function was called since the last reset.
    fn fake_cuda_total_calls() -> u64 { device::sim().total_calls() }

    /// Sets the call counters to zero.
    fn fake_cuda_reset_calls() -> () { device::sim().reset_calls() }

    /// Makes the `nth` call from now of a function fail with this code; 0 makes every call fail.
    fn fake_cuda_fail(name: *const c_char, nth: u64, code: u32) -> () {
        // SAFETY: a C string by the contract.
        let name = unsafe { text(name) };
        let fault = if nth == 0 { Fault::always(code) } else { Fault::nth(nth, code) };
        device::sim().fail(&name, fault)
    }

    /// Makes the `nth` call from now of a function and all later ones fail with this code, and where it `spreads`, from
    /// then on every call of every function.
    fn fake_cuda_fail_from(name: *const c_char, nth: u64, code: u32, spreads: bool) -> () {
        // SAFETY: a C string by the contract.
        let name = unsafe { text(name) };
        let fault = if spreads { Fault::ends_everything(nth, code) } else { Fault::from_nth(nth, code) };
        device::sim().fail(&name, fault)
    }

    /// Makes every call of a function take this much longer.
    fn fake_cuda_slow(name: *const c_char, ns: u64) -> () {
        // SAFETY: a C string by the contract.
        let name = unsafe { text(name) };
        device::sim().fail(&name, Fault::slow(Duration::from_nanos(ns)))
    }

    /// Makes every call of a function block until the faults are cleared.
    fn fake_cuda_hang(name: *const c_char) -> () {
        // SAFETY: a C string by the contract.
        let name = unsafe { text(name) };
        device::sim().fail(&name, Fault::hang())
    }

    /// How many calls hang now.
    fn fake_cuda_hanging_calls() -> usize { device::sim().hanging_calls() }

    /// Ends all faults.
    fn fake_cuda_clear_faults() -> () { device::sim().clear_faults() }

    /// How many violations the device's checks have found.
    fn fake_cuda_violations() -> usize { device::sim().violations().len() }

    /// Forgets the violations.
    fn fake_cuda_forget_violations() -> () { drop(device::sim().take_violations()) }

    /// Prints the violations to standard error.
    fn fake_cuda_print_violations() -> () {
        for violation in device::sim().violations() {
            eprintln!("simulated device: {violation}");
        }
    }

    /// Writes a violation's text, cut to `capacity` bytes, without a final zero; gives its whole length.
    fn fake_cuda_violation_text(index: usize, buffer: *mut u8, capacity: usize) -> usize {
        let violations = device::sim().violations();
        let Some(violation) = violations.get(index) else { return 0 };
        let length = violation.len().min(capacity);
        // SAFETY: the buffer has `capacity` bytes by the contract.
        unsafe { std::ptr::copy_nonoverlapping(violation.as_ptr(), buffer, length) };
        violation.len()
    }

    /// Bytes that are registered now.
    fn fake_cuda_registered_bytes() -> usize { device::sim().registered_bytes() }

    /// The part of them that was registered as portable.
    fn fake_cuda_portable_bytes() -> usize { device::sim().portable_bytes() }

    /// Bytes of page-locked host memory that are allocated now.
    fn fake_cuda_allocated_host_bytes() -> usize { device::sim().allocated_host_bytes() }

    /// Bytes of managed memory that are allocated now.
    fn fake_cuda_managed_bytes() -> usize { device::sim().managed_bytes() }

    /// How many managed allocations prefer a device.
    fn fake_cuda_preferring() -> usize { device::sim().preferred_devices().len() }

    /// How often a device's primary context is retained now, by whomever.
    fn fake_cuda_primary_retains(device: i32) -> u32 { device::sim().primary_retains(device) }

    /// Events that exist, whoever made them.
    fn fake_cuda_live_events() -> usize { device::sim().live_events() }

    /// Makes a context current on the calling thread; counted nowhere, and met by no fault.
    fn fake_cuda_bind(context: usize) -> () { device::sim().bind(context) }

    /// Events that exist and take the time.
    fn fake_cuda_timed_events() -> usize { device::sim().timed_events() }

    /// The device will run by itself at these rates.
    fn fake_cuda_set_real_time(latency_ns: u64, bytes_per_second: u64, register_ns_per_page: u64) -> bool {
        device::configure(|settings| {
            settings.clock = Clock::RealTime {
                latency: Duration::from_nanos(latency_ns),
                bytes_per_second,
                register_per_page: Duration::from_nanos(register_ns_per_page),
            };
        })
    }

    /// The device will move only when it is stepped.
    fn fake_cuda_set_stepped() -> bool { device::configure(|settings| settings.clock = Clock::Stepped) }

    /// What the devices will answer for an attribute (`CUdevice_attribute`).
    fn fake_cuda_set_attribute(number: i32, value: i32) -> bool {
        device::configure(|settings| settings.attributes.push((number, value)))
    }

    /// Whether registering will look at the mapping.
    fn fake_cuda_set_mapping_check(on: bool) -> bool {
        device::configure(|settings| settings.mapping_check = on)
    }

    /// The devices will refuse every registration.
    fn fake_cuda_set_confidential_computing(on: bool) -> bool {
        device::configure(|settings| settings.confidential_computing = on)
    }

    /// How many bytes can be page-locked at once.
    fn fake_cuda_set_pinned_bytes_max(bytes: usize) -> bool {
        device::configure(|settings| settings.pinned_bytes_max = bytes)
    }

    /// How many devices there will be; with 0, `cuInit` answers 100.
    fn fake_cuda_set_devices(count: i32) -> bool { device::configure(|settings| settings.devices = count) }
}

/// # Safety
///
/// `name` is a C string.
unsafe fn text(name: *const c_char) -> String {
    // SAFETY: the contract.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}
