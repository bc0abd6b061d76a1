//! The controls of the fake library, for Rust tests and examples.

use libloading::Library;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The file's name; its inner name is `libcuda.so`.
const FILE: &str = "libfake_cuda.so";

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
        self.call("fake_cuda_hold", |f: unsafe extern "C" fn(usize)| unsafe { f(stream) })
    }

    /// Ends a hold.
    pub fn release(&self, stream: usize) {
        self.call("fake_cuda_release", |f: unsafe extern "C" fn(usize)| unsafe { f(stream) })
    }

    /// Enqueues an operation that takes this long.
    pub fn stall(&self, stream: usize, duration: Duration) {
        let ns = nanoseconds(duration);
        self.call("fake_cuda_stall", |f: unsafe extern "C" fn(usize, u64)| unsafe { f(stream, ns) })
    }

    /// Executes one operation of one stream that is not held; false when nothing could run.
    pub fn step(&self) -> bool {
        self.call("fake_cuda_step", |f: unsafe extern "C" fn() -> bool| unsafe { f() })
    }

    /// Steps until nothing can run.
    pub fn run_until_idle(&self) {
        self.call("fake_cuda_run_until_idle", |f: unsafe extern "C" fn()| unsafe { f() })
    }

    /// Operations enqueued and not yet executed.
    pub fn pending_operations(&self) -> usize {
        self.call("fake_cuda_pending_operations", |f: unsafe extern "C" fn() -> usize| unsafe { f() })
    }

    /// How often a driver function was called, for example `"cuEventQuery"`.
    pub fn calls(&self, name: &str) -> u64 {
        let name = c_string(name);
        self.call("fake_cuda_calls", |f: unsafe extern "C" fn(*const i8) -> u64| unsafe {
            f(name.as_ptr().cast())
        })
    }

    /// How often any driver function was called.
    pub fn total_calls(&self) -> u64 {
        self.call("fake_cuda_total_calls", |f: unsafe extern "C" fn() -> u64| unsafe { f() })
    }

    /// Sets the call counters to zero.
    pub fn reset_calls(&self) {
        self.call("fake_cuda_reset_calls", |f: unsafe extern "C" fn()| unsafe { f() })
    }

    /// Makes the `nth` call from now of a function fail with this code; 0 makes every call fail.
    pub fn fail(&self, name: &str, nth: u64, code: u32) {
        let name = c_string(name);
        self.call("fake_cuda_fail", |f: unsafe extern "C" fn(*const i8, u64, u32)| unsafe {
            f(name.as_ptr().cast(), nth, code)
        })
    }

    /// Makes every call of a function take this much longer.
    pub fn slow(&self, name: &str, extra: Duration) {
        let (name, ns) = (c_string(name), nanoseconds(extra));
        self.call("fake_cuda_slow", |f: unsafe extern "C" fn(*const i8, u64)| unsafe {
            f(name.as_ptr().cast(), ns)
        })
    }

    /// Makes every call of a function block until [`clear_faults`](Self::clear_faults).
    pub fn hang(&self, name: &str) {
        let name = c_string(name);
        self.call("fake_cuda_hang", |f: unsafe extern "C" fn(*const i8)| unsafe { f(name.as_ptr().cast()) })
    }

    /// Ends all faults.
    pub fn clear_faults(&self) {
        self.call("fake_cuda_clear_faults", |f: unsafe extern "C" fn()| unsafe { f() })
    }

    /// What the device's checks have found.
    pub fn violations(&self) -> Vec<String> {
        let count = self.call("fake_cuda_violations", |f: unsafe extern "C" fn() -> usize| unsafe { f() });
        (0..count).map(|index| self.violation(index)).collect()
    }

    fn violation(&self, index: usize) -> String {
        type Function = unsafe extern "C" fn(usize, *mut u8, usize) -> usize;
        let mut text = vec![0; 4096];
        let length = self.call("fake_cuda_violation_text", |f: Function| unsafe {
            f(index, text.as_mut_ptr(), text.len())
        });
        text.truncate(length);
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Panics, listing the violations, if there are any.
    pub fn assert_clean(&self) {
        let violations = self.violations();
        assert!(violations.is_empty(), "the simulated device found:\n{}", violations.join("\n"));
    }

    /// Bytes that are registered now.
    pub fn registered_bytes(&self) -> usize {
        self.call("fake_cuda_registered_bytes", |f: unsafe extern "C" fn() -> usize| unsafe { f() })
    }

    /// The device will run by itself at these rates. False once a driver function was called.
    #[must_use]
    pub fn set_real_time(
        &self,
        latency: Duration,
        bytes_per_second: u64,
        register_per_page: Duration,
    ) -> bool {
        type Function = unsafe extern "C" fn(u64, u64, u64) -> bool;
        self.call("fake_cuda_set_real_time", |f: Function| unsafe {
            f(nanoseconds(latency), bytes_per_second, nanoseconds(register_per_page))
        })
    }

    /// The device will move only when it is stepped. False once a driver function was called.
    #[must_use]
    pub fn set_stepped(&self) -> bool {
        self.call("fake_cuda_set_stepped", |f: unsafe extern "C" fn() -> bool| unsafe { f() })
    }

    /// How many devices there will be. False once a driver function was called.
    #[must_use]
    pub fn set_devices(&self, count: i32) -> bool {
        self.call("fake_cuda_set_devices", |f: unsafe extern "C" fn(i32) -> bool| unsafe { f(count) })
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

    fn call<F: Copy, R>(&self, name: &str, call: impl FnOnce(F) -> R) -> R {
        // SAFETY: each caller gives the type that `exported` declares for the name.
        match unsafe { self.symbol::<F>(name) } {
            Some(function) => call(function),
            None => {
                panic!("{} lacks {name}; it and this binary are of different builds", self.path.display())
            }
        }
    }
}

fn c_string(name: &str) -> CString {
    CString::new(name).expect("the name of a driver function has no zero byte")
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
