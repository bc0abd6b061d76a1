//! A machine without CUDA, with the link-time stub, or with a wrongly named library: an error that lists
//! what was tried, no panic, and nothing opened before it is needed.
//!
//! Each case needs a process of its own, since what a process has loaded stays loaded: the cases are the
//! ignored tests below, run by the others in a child with an environment made for them.
#![cfg(target_os = "linux")]

mod child;

use child::{in_child, is_child, is_mapped};
use pinpool::{Driver, Error};
use std::ffi::OsStr;
use std::path::PathBuf;

/// The names that the search asks for.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// A folder for the library path that holds nothing, or links to the fake under the driver's names.
fn library_folder(case: &str, with_fake: bool) -> PathBuf {
    let folder = child::folder(case);
    for name in NAMES.iter().filter(|_| with_fake) {
        std::os::unix::fs::symlink(child::built("libfake_cuda.so"), folder.join(name)).unwrap();
    }
    folder
}

fn report_of(error: Error) -> String {
    match error {
        Error::NoCuda { report } => report,
        other => panic!("another error: {other}"),
    }
}

#[test]
fn without_a_library_there_is_a_report_and_no_panic() {
    let folder = library_folder("none", false);
    in_child("child_without_a_library", &[("LD_LIBRARY_PATH", folder.as_os_str())]);
}

#[test]
#[ignore = "run by without_a_library_there_is_a_report_and_no_panic"]
fn child_without_a_library() {
    if !is_child() {
        return;
    }
    assert_eq!(Driver::auto().name(), "cuda");
    match Driver::cuda() {
        // The system has a real driver, which no environment can hide: nothing to show here.
        Ok(_) => println!("this machine has CUDA"),
        Err(error) => {
            let report = report_of(error);
            // Line by line in tests/library.rs.
            assert!(
                report.starts_with("DriverBuilder::library: (none)\nPINPOOL_CUDA_LIBRARY: (none)\n"),
                "{report}"
            );
        }
    }
}

#[test]
fn a_named_library_that_is_not_there_is_an_error_that_names_it() {
    // A usable library under the usual names must not be taken in its place.
    let folder = library_folder("named", true);
    in_child(
        "child_with_a_wrong_name",
        &[
            ("LD_LIBRARY_PATH", folder.as_os_str()),
            ("PINPOOL_CUDA_LIBRARY", OsStr::new("/nonexistent/libcuda.so.1")),
        ],
    );
}

#[test]
#[ignore = "run by a_named_library_that_is_not_there_is_an_error_that_names_it"]
fn child_with_a_wrong_name() {
    if !is_child() {
        return;
    }
    let report = report_of(Driver::cuda().unwrap_err());
    assert_eq!(report.lines().count(), 1, "nothing else is tried:\n{report}");
    assert!(report.starts_with("PINPOOL_CUDA_LIBRARY: /nonexistent/libcuda.so.1: "), "{report}");
    assert!(report.contains("No such file"), "what the system said:\n{report}");
}

#[test]
fn the_stub_is_recognised_and_passed_over() {
    let path = child::library_path("stub", "libfake_stub.so", &NAMES);
    in_child("child_with_a_stub", &[("LD_LIBRARY_PATH", &path)]);
}

#[test]
#[ignore = "run by the_stub_is_recognised_and_passed_over"]
fn child_with_a_stub() {
    if !is_child() {
        return;
    }
    let report = report_of(Driver::cuda().unwrap_err());
    let names: Vec<&str> = report.lines().filter(|line| line.contains(": libcuda.so")).collect();
    let stub = "is the link-time stub: cuDriverGetVersion answered CUDA_ERROR_STUB_LIBRARY (34)";
    assert_eq!(
        names,
        [
            "loaded under this name: libcuda.so.1: not loaded in this process",
            &format!("by name: libcuda.so.1: {stub}"),
            // Closed again: as long as it is open it answers whoever asks for the real one.
            "loaded under this name: libcuda.so: not loaded in this process",
            &format!("by name: libcuda.so: {stub}"),
        ],
        "{report}"
    );
    assert!(!is_mapped("libcuda.so"));
}

#[test]
fn nothing_is_opened_before_it_is_needed_and_one_line_says_what_was_picked() {
    let folder = library_folder("lazy", true);
    let output = in_child(
        "child_that_waits",
        &[("LD_LIBRARY_PATH", folder.as_os_str()), ("FAKE_CUDA_CLOCK", OsStr::new("stepped"))],
    );
    assert_eq!(output.matches("pinpool uses CUDA").count(), 1, "{output}");
    assert!(output.contains("libcuda.so.1"), "{output}");
}

#[test]
#[ignore = "run by nothing_is_opened_before_it_is_needed_and_one_line_says_what_was_picked"]
fn child_that_waits() {
    if !is_child() {
        return;
    }
    tracing_subscriber::fmt().with_max_level(tracing_subscriber::filter::LevelFilter::INFO).init();
    let driver = Driver::auto();
    assert_eq!(driver.clone().name(), "cuda");
    assert!(!is_mapped("libfake_cuda.so"), "Driver::auto() opened the library");
    Driver::cuda().expect("the fake is on the library path");
    Driver::cuda().expect("the second time it is there already");
    assert!(is_mapped("libfake_cuda.so"));
}

#[test]
fn a_failure_is_warned_of_once() {
    let output = in_child(
        "child_that_fails_twice",
        &[("PINPOOL_CUDA_LIBRARY", OsStr::new("/nonexistent/libcuda.so.1"))],
    );
    assert_eq!(output.matches("WARN").count(), 1, "{output}");
}

#[test]
#[ignore = "run by a_failure_is_warned_of_once"]
fn child_that_fails_twice() {
    if !is_child() {
        return;
    }
    tracing_subscriber::fmt().with_max_level(tracing_subscriber::filter::LevelFilter::INFO).init();
    let first = Driver::cuda().unwrap_err();
    assert_eq!(Driver::cuda().unwrap_err(), first);
}

#[test]
fn a_driver_without_a_device_is_reported_with_its_code() {
    let folder = library_folder("deviceless", true);
    in_child("child_without_a_device", &[("LD_LIBRARY_PATH", folder.as_os_str())]);
}

#[test]
#[ignore = "run by a_driver_without_a_device_is_reported_with_its_code"]
fn child_without_a_device() {
    if !is_child() {
        return;
    }
    let fake = fake_cuda::control::Control::load().unwrap();
    assert!(fake.set_devices(0));
    let report = report_of(Driver::cuda().unwrap_err());
    assert!(report.contains("libfake_cuda.so: cuInit: CUDA_ERROR_NO_DEVICE (100)"), "{report}");
}
