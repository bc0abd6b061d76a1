//! The controls of the fake library, for Rust tests and examples.

use libloading::Library;
use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The file's name; its inner name is `libcuda.so`.
const FILE: &str = "libfake_cuda.so";

/// Calls a function of the library, with the types that `exported` declares for it.
macro_rules! call {
    ($self:ident.$name:ident($($argument:expr => $kind:ty),*)$(-> $result:ty)?) => {{
        type Function = unsafe extern "C" fn($($kind),*) $(-> $result)?;
        let function = $self.function::<Function>(stringify!($name));
        // SAFETY: the types are those of the function, and pointers are to values that outlive the call.
        unsafe { function($($argument),*) }
    }};
}

/// The fake libcuda of this process, opened so that a later search for `libcuda.so` finds it.
///
/// Everything that uses CUDA in this process (cudarc, pinpool) uses the fake from then on, provided
/// that none of it has loaded a libcuda before: so load it first thing in `main` or in the test.
pub struct Control {
    library: Library,
    path: PathBuf,
}

impl Control {
    /// Finds the library beside the running binary, or in the folder that cargo builds it in, and opens it.
    ///
    /// # Errors
    ///
    /// Says which places were looked at, or what the dynamic linker answered.
    pub fn load() -> Result<Self, String> {
        Self::load_from(&Self::find()?)
    }

    /// Opens the library at a path.
    ///
    /// # Errors
    ///
    /// What the dynamic linker answered.
    pub fn load_from(path: &Path) -> Result<Self, String> {
        // SAFETY: the library has no initialisers of its own, and is never unloaded (`-z nodelete`).
        let library =
            unsafe { Library::new(path) }.map_err(|error| format!("{}: {error:?}", path.display()))?;
        Ok(Self { library, path: path.to_owned() })
    }

    /// Where the library is: in the folder of the running test, or in `deps` beside an example.
    ///
    /// # Errors
    ///
    /// Says which places were looked at.
    pub fn find() -> Result<PathBuf, String> {
        let binary = std::env::current_exe().map_err(|error| format!("the running binary: {error}"))?;
        let places: Vec<PathBuf> = ["", "deps", "../deps"]
            .iter()
            .filter_map(|folder| Some(binary.parent()?.join(folder).join(FILE)))
            .collect();
        let found = places.iter().find(|place| place.is_file());
        found.cloned().ok_or_else(|| format!("{FILE} is in none of {places:?}; it is built by `cargo test`"))
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// From now on the stream executes nothing. Takes a `CUstream` as a number, 0 for the null stream.
    pub fn hold(&self, stream: usize) {
        call!(self.fake_cuda_hold(stream => usize))
    }

    /// Ends a hold.
    pub fn release(&self, stream: usize) {
        call!(self.fake_cuda_release(stream => usize))
    }

    /// From now on the stream says that it captures a graph, or that it does not. It captures nothing.
    pub fn pretend_capture(&self, stream: usize, is_capturing: bool) {
        call!(self.fake_cuda_pretend_capture(stream => usize, is_capturing => bool))
    }

    /// From now on the functions of user objects that have become due are not run; false lets them run.
    pub fn hold_user_objects(&self, are_held: bool) {
        call!(self.fake_cuda_hold_user_objects(are_held => bool))
    }

    /// User objects that something still refers to.
    pub fn user_objects(&self) -> usize {
        call!(self.fake_cuda_user_objects() -> usize)
    }

    /// Enqueues an operation that takes this long.
    pub fn stall(&self, stream: usize, duration: Duration) {
        call!(self.fake_cuda_stall(stream => usize, nanoseconds(duration) => u64))
    }

    /// Executes one operation of one stream that is not held; false when nothing could run.
    pub fn step(&self) -> bool {
        call!(self.fake_cuda_step() -> bool)
    }

    /// Steps until nothing can run.
    pub fn run_until_idle(&self) {
        call!(self.fake_cuda_run_until_idle())
    }

    /// Operations enqueued and not yet executed.
    pub fn pending_operations(&self) -> usize {
        call!(self.fake_cuda_pending_operations() -> usize)
    }

    /// How often a driver function was called, for example `"cuEventQuery"`.
    pub fn calls(&self, name: &str) -> u64 {
        call!(self.fake_cuda_calls(c_string(name).as_ptr() => *const c_char) -> u64)
    }

    /// How often any driver function was called.
    pub fn total_calls(&self) -> u64 {
        call!(self.fake_cuda_total_calls() -> u64)
    }

    /// Sets the call counters to zero.
    pub fn reset_calls(&self) {
        call!(self.fake_cuda_reset_calls())
    }

    /// Makes the `nth` call from now of a function fail with this code; 0 makes every call fail.
    pub fn fail(&self, name: &str, nth: u64, code: u32) {
        call!(self.fake_cuda_fail(c_string(name).as_ptr() => *const c_char, nth => u64, code => u32))
    }

    /// Makes the `nth` call from now of a function and all later ones fail with this code.
    pub fn fail_from(&self, name: &str, nth: u64, code: u32) {
        self.fail_on(name, nth, code, false)
    }

    /// As [`fail_from`](Self::fail_from), and from that call on every function answers the code.
    pub fn end_everything(&self, name: &str, nth: u64, code: u32) {
        self.fail_on(name, nth, code, true)
    }

    fn fail_on(&self, name: &str, nth: u64, code: u32, spreads: bool) {
        call!(self.fake_cuda_fail_from(
            c_string(name).as_ptr() => *const c_char, nth => u64, code => u32, spreads => bool
        ))
    }

    /// Makes every call of a function take this much longer.
    pub fn slow(&self, name: &str, extra: Duration) {
        call!(self.fake_cuda_slow(c_string(name).as_ptr() => *const c_char, nanoseconds(extra) => u64))
    }

    /// Makes every call of a function block until [`clear_faults`](Self::clear_faults).
    pub fn hang(&self, name: &str) {
        call!(self.fake_cuda_hang(c_string(name).as_ptr() => *const c_char))
    }

    /// How many calls hang now.
    pub fn hanging_calls(&self) -> usize {
        call!(self.fake_cuda_hanging_calls() -> usize)
    }

    /// Ends all faults.
    pub fn clear_faults(&self) {
        call!(self.fake_cuda_clear_faults())
    }

    /// What the device's checks have found.
    pub fn violations(&self) -> Vec<String> {
        let count = call!(self.fake_cuda_violations() -> usize);
        (0..count).map(|index| self.violation(index)).collect()
    }

    fn violation(&self, index: usize) -> String {
        let mut text = vec![0; 4096];
        let (buffer, capacity) = (text.as_mut_ptr(), text.len());
        let length = call!(
            self.fake_cuda_violation_text(index => usize, buffer => *mut u8, capacity => usize) -> usize
        );
        text.truncate(length);
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Forgets what the device's checks have found.
    pub fn forget_violations(&self) {
        call!(self.fake_cuda_forget_violations())
    }

    /// Panics, listing the violations, if there are any.
    pub fn assert_clean(&self) {
        let violations = self.violations();
        assert!(violations.is_empty(), "the simulated device found:\n{}", violations.join("\n"));
    }

    /// Bytes that are registered now.
    pub fn registered_bytes(&self) -> usize {
        call!(self.fake_cuda_registered_bytes() -> usize)
    }

    /// The part of [`registered_bytes`](Self::registered_bytes) that was registered as portable.
    pub fn portable_bytes(&self) -> usize {
        call!(self.fake_cuda_portable_bytes() -> usize)
    }

    /// Bytes of page-locked host memory that are allocated now (`cuMemHostAlloc`).
    pub fn allocated_host_bytes(&self) -> usize {
        call!(self.fake_cuda_allocated_host_bytes() -> usize)
    }

    /// Bytes of managed memory that are allocated now.
    pub fn managed_bytes(&self) -> usize {
        call!(self.fake_cuda_managed_bytes() -> usize)
    }

    /// How many managed allocations prefer a device.
    pub fn preferring(&self) -> usize {
        call!(self.fake_cuda_preferring() -> usize)
    }

    /// How often a device's primary context is retained now, by whomever.
    pub fn primary_retains(&self, device: i32) -> u32 {
        call!(self.fake_cuda_primary_retains(device => i32) -> u32)
    }

    /// Events that exist, whoever made them.
    pub fn live_events(&self) -> usize {
        call!(self.fake_cuda_live_events() -> usize)
    }

    /// Makes a context current on the calling thread, by its handle; counted nowhere, and met by no fault.
    pub fn bind(&self, context: usize) {
        call!(self.fake_cuda_bind(context => usize))
    }

    /// Events that exist and take the time.
    pub fn timed_events(&self) -> usize {
        call!(self.fake_cuda_timed_events() -> usize)
    }

    /// The device will run by itself at these rates. False once a driver function was called.
    #[must_use]
    pub fn set_real_time(
        &self,
        latency: Duration,
        bytes_per_second: u64,
        register_per_page: Duration,
    ) -> bool {
        let (latency_ns, register_ns) = (nanoseconds(latency), nanoseconds(register_per_page));
        call!(self.fake_cuda_set_real_time(
            latency_ns => u64, bytes_per_second => u64, register_ns => u64
        ) -> bool)
    }

    /// The device will move only when it is stepped. False once a driver function was called.
    #[must_use]
    pub fn set_stepped(&self) -> bool {
        call!(self.fake_cuda_set_stepped() -> bool)
    }

    /// What the devices will answer for an attribute. False once a driver function was called.
    #[must_use]
    pub fn set_attribute(&self, number: i32, value: i32) -> bool {
        call!(self.fake_cuda_set_attribute(number => i32, value => i32) -> bool)
    }

    /// Whether registering will refuse what is not mapped, or cannot be written; it does so unless told otherwise. False
    /// once a driver function was called.
    #[must_use]
    pub fn set_mapping_check(&self, on: bool) -> bool {
        call!(self.fake_cuda_set_mapping_check(on => bool) -> bool)
    }

    /// The devices will refuse every registration (801). False once a driver function was called.
    #[must_use]
    pub fn set_confidential_computing(&self, on: bool) -> bool {
        call!(self.fake_cuda_set_confidential_computing(on => bool) -> bool)
    }

    /// How many bytes can be page-locked at once. False once a driver function was called.
    #[must_use]
    pub fn set_pinned_bytes_max(&self, bytes: usize) -> bool {
        call!(self.fake_cuda_set_pinned_bytes_max(bytes => usize) -> bool)
    }

    /// How many devices there will be. False once a driver function was called.
    #[must_use]
    pub fn set_devices(&self, count: i32) -> bool {
        call!(self.fake_cuda_set_devices(count => i32) -> bool)
    }

    /// Calls `cuInit(0)`, as another user of CUDA in this process would; gives the result code.
    pub fn initialize(&self) -> u32 {
        call!(self.cuInit(0 => u32) -> u32)
    }

    /// The address of a driver function of the fake, for a test that calls it by itself.
    ///
    /// # Safety
    ///
    /// `F` is the function pointer type of the C prototype.
    pub unsafe fn symbol<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the contract.
        unsafe { self.library.get::<F>(name) }.ok().map(|symbol| *symbol)
    }

    fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: `call!` gives the function's type.
        let function = unsafe { self.symbol::<F>(name) };
        function.unwrap_or_else(|| {
            panic!("{} and this binary are of different builds: no {name}", self.path.display())
        })
    }
}

fn c_string(name: &str) -> CString {
    CString::new(name).expect("the name of a driver function has no zero byte")
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
