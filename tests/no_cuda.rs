//! A machine without CUDA, with the link-time stub, or with a wrongly named library: an error that lists
//! what was tried, no panic, and nothing opened before it is needed.
//!
//! Each case needs a process of its own, since what a process has loaded stays loaded: the cases are the
//! ignored tests below, run by the others in a child with an environment made for them.
#![cfg(target_os = "linux")]

use pinpool::{Driver, Error};
use std::path::PathBuf;
use std::process::Command;

/// The inner name of the fake library, and the names that the search asks for.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

const CHILD: &str = "PINPOOL_TEST_CHILD";

fn fake_library() -> PathBuf {
    fake_cuda::control::Control::find().expect("cargo builds the fake library beside the tests")
}

/// A folder for the library path that holds nothing, or links to the fake under the driver's names.
fn library_folder(case: &str, with_fake: bool) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(case);
    std::fs::create_dir_all(&folder).unwrap();
    for name in NAMES {
        let link = folder.join(name);
        let _ = std::fs::remove_file(&link);
        if with_fake {
            std::os::unix::fs::symlink(fake_library(), link).unwrap();
        }
    }
    folder
}

/// Runs one ignored test of this file in a child, which starts with these variables only.
fn in_child(case: &str, environment: &[(&str, &str)]) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", case, "--ignored", "--nocapture", "--test-threads=1"]);
    child.env_clear().env(CHILD, "1").envs(environment.iter().copied());
    let output = child.output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{case} in a child:\n{text}");
    text
}

/// Whether this is a child with the right environment, and not somebody's `cargo test -- --ignored`.
fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

fn report_of(error: Error) -> String {
    match error {
        Error::NoCuda { report } => report,
        other => panic!("another error: {other}"),
    }
}

fn is_mapped(name: &str) -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().contains(name)
}

#[test]
fn without_a_library_there_is_a_report_and_no_panic() {
    let folder = library_folder("none", false);
    in_child("child_without_a_library", &[("LD_LIBRARY_PATH", folder.to_str().unwrap())]);
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
            ("LD_LIBRARY_PATH", folder.to_str().unwrap()),
            ("PINPOOL_CUDA_LIBRARY", "/nonexistent/libcuda.so.1"),
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
    let folder = library_folder("stub", true);
    in_child("child_with_a_stub", &[("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("FAKE_CUDA_STUB", "1")]);
}

#[test]
#[ignore = "run by the_stub_is_recognised_and_passed_over"]
fn child_with_a_stub() {
    if !is_child() {
        return;
    }
    let report = report_of(Driver::cuda().unwrap_err());
    let stubs: Vec<&str> = report.lines().filter(|line| line.contains("link-time stub")).collect();
    assert_eq!(stubs.len(), 2, "the search went on after the first stub:\n{report}");
    assert!(stubs[0].starts_with("by name: libcuda.so.1: "), "{report}");
    let recognised = "cuDriverGetVersion answered CUDA_ERROR_STUB_LIBRARY (34)";
    assert!(stubs[0].contains(recognised), "before anything is initialised:\n{report}");
}

#[test]
fn nothing_is_opened_before_it_is_needed_and_one_line_says_what_was_picked() {
    let folder = library_folder("lazy", true);
    let output = in_child(
        "child_that_waits",
        &[("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("FAKE_CUDA_CLOCK", "stepped")],
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
    let output = in_child("child_that_fails_twice", &[("PINPOOL_CUDA_LIBRARY", "/nonexistent/libcuda.so.1")]);
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
    in_child("child_without_a_device", &[("LD_LIBRARY_PATH", folder.to_str().unwrap())]);
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
