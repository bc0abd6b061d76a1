//! NVIDIA's own libraries on a machine without a GPU: found by the ladder, refused by name. They are fetched when
//! `tests/real_libraries.sh` runs, which also runs these tests and counts what it could not fetch.
#![cfg(target_os = "linux")]

mod child;

use child::{in_child, is_child};
use pinpool::Driver;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// Where the script has put these parts: `cu12` and `cu13` (Python environments), `driver` and `stub` (folders with
/// libraries). `None`, and one line that says why, where one is missing, or would not be alone here.
fn parts<const N: usize>(names: [&str; N]) -> Option<[PathBuf; N]> {
    let root = PathBuf::from(std::env::var_os("PINPOOL_REAL_LIBRARIES").unwrap_or_default());
    let missing = names.iter().find(|name| !root.join(name).is_dir());
    if Driver::cuda().is_ok() {
        println!("skipped: this machine has CUDA, whose libraries answer otherwise");
    } else if let Some(name) = missing {
        println!("skipped: {name} was not fetched; run tests/real_libraries.sh");
    } else {
        return Some(names.map(|name| root.join(name)));
    }
    None
}

/// The reports of both searches in a child with this environment.
fn reports(environment: &[(&str, &OsStr)]) -> String {
    let output = in_child("child_that_looks_for_libraries", environment);
    println!("{output}");
    output
}

#[test]
#[ignore = "run by the tests below"]
fn child_that_looks_for_libraries() {
    if is_child() {
        Driver::auto().libraries().iter().for_each(|report| println!("\n{report}"));
    }
}

/// Asserts one whole line.
fn assert_line(output: &str, rung: &str, place: impl AsRef<Path>, answer: &str) {
    let line = format!("{rung}: {}: {answer}", place.as_ref().display());
    assert!(output.lines().any(|other| other == line), "no line {line}\nin\n{output}");
}

fn package(environment: &Path, library: &str) -> PathBuf {
    environment.join("lib/python3/site-packages/nvidia").join(library)
}

const RUNTIME_12: &str = "cuda_runtime/lib/libcudart.so.12";
const RUNTIME_13: &str = "cu13/lib/libcudart.so.13";
const INSUFFICIENT: &str = "cudaGetDeviceCount: cudaErrorInsufficientDriver (35)";

#[test]
#[ignore = "run by tests/real_libraries.sh"]
fn runtime_12_without_a_driver() {
    let Some([packages]) = parts(["cu12"]) else { return };
    let output = reports(&[("VIRTUAL_ENV", packages.as_os_str())]);
    assert_line(&output, "vendor packages", package(&packages, RUNTIME_12), INSUFFICIENT);
}

#[test]
#[ignore = "run by tests/real_libraries.sh"]
fn runtime_13_without_a_driver() {
    let Some([packages]) = parts(["cu13"]) else { return };
    let output = reports(&[("VIRTUAL_ENV", packages.as_os_str())]);
    assert_line(&output, "vendor packages", package(&packages, RUNTIME_13), INSUFFICIENT);
}

#[test]
#[ignore = "run by tests/real_libraries.sh"]
fn driver_without_a_device() {
    let Some([driver]) = parts(["driver"]) else { return };
    let library = driver.join("libcuda.so.1");
    let no_device = "cuInit: CUDA_ERROR_NO_DEVICE (100)";
    let output = reports(&[("PINPOOL_CUDA_LIBRARY", library.as_os_str())]);
    assert_line(&output, "PINPOOL_CUDA_LIBRARY", library, no_device);
    let output = reports(&[("LD_LIBRARY_PATH", driver.as_os_str())]);
    assert_line(&output, "by name", "libcuda.so.1", no_device);
}

#[test]
#[ignore = "run by tests/real_libraries.sh"]
fn runtime_12_with_a_driver_and_no_device() {
    let Some([driver, packages]) = parts(["driver", "cu12"]) else { return };
    let output = reports(&[("LD_LIBRARY_PATH", driver.as_os_str()), ("VIRTUAL_ENV", packages.as_os_str())]);
    let no_device = "cudaGetDeviceCount: cudaErrorNoDevice (100)";
    assert_line(&output, "vendor packages", package(&packages, RUNTIME_12), no_device);
}

#[test]
#[ignore = "run by tests/real_libraries.sh"]
fn runtime_13_with_a_driver_that_is_older() {
    let Some([driver, packages]) = parts(["driver", "cu13"]) else { return };
    let output = reports(&[("LD_LIBRARY_PATH", driver.as_os_str()), ("VIRTUAL_ENV", packages.as_os_str())]);
    assert_line(&output, "vendor packages", package(&packages, RUNTIME_13), INSUFFICIENT);
}

#[test]
#[ignore = "run by tests/real_libraries.sh"]
fn stub_without_a_driver() {
    let Some([stub]) = parts(["stub"]) else { return };
    let output = reports(&[("LD_LIBRARY_PATH", stub.as_os_str())]);
    let answer = "is the link-time stub: cuDriverGetVersion answered CUDA_ERROR_STUB_LIBRARY (34)";
    assert_line(&output, "by name", "libcuda.so", answer);
}

#[test]
#[ignore = "run by tests/real_libraries.sh"]
fn stub_in_front_of_the_driver() {
    let Some([stub, driver]) = parts(["stub", "driver"]) else { return };
    let mut path = OsString::from(&stub);
    path.push(":");
    path.push(&driver);
    let output = reports(&[("LD_LIBRARY_PATH", &path)]);
    // The versioned name leads past it, and the bare one to it.
    assert_line(&output, "by name", "libcuda.so.1", "cuInit: CUDA_ERROR_NO_DEVICE (100)");
    let answer = "is the link-time stub: cuDriverGetVersion answered CUDA_ERROR_STUB_LIBRARY (34)";
    assert_line(&output, "by name", "libcuda.so", answer);
}

#[test]
#[ignore = "run by tests/real_libraries.sh"]
fn runtime_12_with_a_stub() {
    let Some([stub, packages]) = parts(["stub", "cu12"]) else { return };
    // The runtime asks for libcuda.so.1, under which a stub is found where somebody has linked it so.
    let linked = child::folder("real-stub-as-driver");
    std::os::unix::fs::symlink(stub.join("libcuda.so"), linked.join("libcuda.so.1")).unwrap();
    let output = reports(&[("LD_LIBRARY_PATH", linked.as_os_str()), ("VIRTUAL_ENV", packages.as_os_str())]);
    let answer =
        "cudaGetDeviceCount: cudaErrorStubLibrary (34): the libcuda that it found is the link-time stub";
    assert_line(&output, "vendor packages", package(&packages, RUNTIME_12), answer);
}
