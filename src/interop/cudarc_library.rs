//! Whether cudarc calls the libcuda that pinpool calls.
//!
//! cudarc opens a libcuda of its own choice: it asks the dynamic linker for a list of bare names, with
//! `libcuda.so` first, which on a build machine can be the stub, and `libcuda.so.1` last. Two libraries
//! in one process are two CUDAs: a stream of one is a wild pointer to the other, and memory that one
//! has page-locked is ordinary memory to the other. So it is looked at, and a difference is an error.

#![allow(unsafe_code)] // asks cudarc's library for a string of its own

use crate::driver::library::{file_of, is_same_file, would_open};
use crate::driver::{Driver, DriverIdentity, cuda};
use crate::error::Error;
use crate::report::say;
use cudarc::driver::sys;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The names that cudarc 0.19 asks for, in its order; those for other systems and the toolkits' numbered
/// Windows names, which no Linux has, are left out.
const CANDIDATES: [&str; 11] = [
    "libcuda.so",
    "libcuda64.so",
    "libcuda64_10.so",
    "libcuda64_11.so",
    "libcuda64_12.so",
    "libcuda.so.13",
    "libcuda.so.12",
    "libcuda.so.11",
    "libcuda.so.10",
    "libcuda.so.9",
    "libcuda.so.1",
];

/// Makes cudarc use the libcuda that this driver uses, or says why that cannot be. Gives the file.
///
/// Call it before anything of cudarc's: then a machine without CUDA is an error here, where cudarc
/// would panic. In this order it
///
/// 1. loads and initialises the driver's library, as [`Driver::cuda`] does;
/// 2. looks what cudarc would open. A library that is loaded as `libcuda.so.1` answers to that name, so
///    step 1 leads cudarc to it, unless a file called `libcuda.so` lies on the library path: cudarc asks
///    for that first;
/// 3. if that is the same file, lets cudarc open it, and asks it for an address inside (`cuGetErrorName`).
///
/// A context is not made. Recording a stream of cudarc's makes the third step by itself, once.
///
/// # Errors
///
/// [`Error::NoCuda`] where pinpool or cudarc has no library; [`Error::LibraryMismatch`] with both files;
/// [`Error::ForeignStream`] for a driver that is not CUDA's.
pub fn check_cudarc(driver: &Driver) -> Result<PathBuf, Error> {
    let identity = driver.api().identity();
    if identity != DriverIdentity::CUDA {
        return Err(identity.refusal_by("check_cudarc", DriverIdentity::CUDA));
    }
    driver.api().prepare()?;
    let ours = cuda::file_in_use().ok_or_else(|| no_library(String::new()))?;
    let theirs = match cfg!(feature = "dynamic-linking") {
        // It was bound when the program was started.
        true => ask_cudarc(),
        false => {
            let opened = first_that_opens()?;
            if !is_same_file(&ours, &opened) {
                return Err(mismatch(ours, opened));
            }
            ask_cudarc()
        }
    };
    match theirs {
        Some(theirs) if is_same_file(&ours, &theirs) => Ok(theirs),
        Some(theirs) => Err(mismatch(ours, theirs)),
        // It answers nothing about itself, which only a stub does.
        None => Err(mismatch(ours, "libcuda.so (a stub, which answers nothing)".into())),
    }
}

/// Which driver a stream of cudarc's belongs to: ours, or a libcuda that we do not call.
pub(super) fn identity_of_streams() -> DriverIdentity {
    static VERDICT: OnceLock<DriverIdentity> = OnceLock::new();
    if let Some(verdict) = VERDICT.get() {
        return *verdict;
    }
    // While no library of ours is in use, nothing of ours can be called with the stream either.
    let Some(ours) = cuda::file_in_use() else { return DriverIdentity::CUDA };
    let mut refused = None;
    let verdict = *VERDICT.get_or_init(|| match ask_cudarc() {
        Some(theirs) if !is_same_file(&ours, &theirs) => {
            let error = mismatch(ours, theirs);
            refused = Some(error.clone());
            DriverIdentity::note_other_cuda(error)
        }
        _ => DriverIdentity::CUDA,
    });
    // Only now: whoever listens may come here again, which would wait for itself.
    if let Some(error) = refused {
        say!(ERROR, "streams_refused", %error, "streams of cudarc's are refused");
    }
    verdict
}

fn mismatch(ours: PathBuf, theirs: PathBuf) -> Error {
    Error::LibraryMismatch { ours, theirs, user: "cudarc" }
}

fn no_library(report: String) -> Error {
    Error::NoCuda { report }
}

/// What cudarc would open, without letting it; with a library that can answer [`ask_cudarc`].
fn first_that_opens() -> Result<PathBuf, Error> {
    let mut report = String::from("cudarc would find no library, and panic:");
    for name in CANDIDATES {
        match would_open(OsStr::new(name), "cuGetErrorName") {
            Ok(file) => return Ok(file),
            Err(answer) => {
                let _ = write!(report, "\ncudarc: {name}: {answer}");
            }
        }
    }
    Err(no_library(report))
}

/// The file of the library that cudarc calls, by the address of a text in it. Only where cudarc has
/// opened one, or can: it would panic elsewhere.
fn ask_cudarc() -> Option<PathBuf> {
    let mut text = std::ptr::null();
    // SAFETY: cuGetErrorName writes one pointer, to a constant inside the library, and works before cuInit.
    unsafe { sys::cuGetErrorName(sys::CUresult::CUDA_SUCCESS, &mut text) };
    if text.is_null() { None } else { file_of(text as usize) }
}
