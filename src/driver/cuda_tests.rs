//! The CUDA back end over the fake libcuda, method by method.
//!
//! What a process has loaded stays loaded, so each case is an ignored test that another one runs in a child.

use super::cuda::CudaDriver;
use super::process::{DRIVER, RETRY_AFTER};
use super::{CaptureMode, ContextHandle, DriverApi, StreamHandle};
use fake_cuda::control::Control;
use std::process::Command;
use std::time::Instant;

const CHILD: &str = "PINPOOL_TEST_CHILD";

fn in_child(case: &str, environment: &[(&str, &str)]) {
    in_child_of_crate(&format!("driver::cuda_tests::{case}"), environment);
}

/// Runs one ignored test of this crate in a child, which starts with these variables only.
pub(crate) fn in_child_of_crate(case: &str, environment: &[(&str, &str)]) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", case, "--ignored", "--nocapture"]);
    child.env_clear().env(CHILD, "1").env("FAKE_CUDA_CLOCK", "stepped").envs(environment.iter().copied());
    // What `.ci/coverage` tells its processes.
    child.envs(std::env::var_os("LLVM_PROFILE_FILE").map(|file| ("LLVM_PROFILE_FILE", file)));
    let output = child.output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{case} in a child:\n{text}");
}

/// Whether this is such a child, and not somebody's `cargo test -- --ignored`.
pub(crate) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

#[test]
fn every_method_makes_the_call_that_it_names() {
    let library = Control::find().expect("cargo builds the fake library beside the tests");
    in_child("child_with_every_method", &[("PINPOOL_CUDA_LIBRARY", library.to_str().unwrap())]);
}

#[test]
#[ignore = "run by every_method_makes_the_call_that_it_names"]
fn child_with_every_method() {
    if !is_child() {
        return;
    }
    let driver = CudaDriver::default();
    assert!(!driver.is_in_use());
    assert_eq!(driver.register(4096, 4096).unwrap_err().to_string(), {
        "cuMemHostRegister_v2: CUDA_ERROR_NOT_INITIALIZED (3)"
    });
    driver.prepare().expect("the environment names the fake library");
    assert!(driver.is_in_use());
    assert_eq!(driver.current_context(), Ok(None));
    assert_eq!(driver.active_primary_devices(), Ok(vec![]));

    let context = driver.retain_primary(0).unwrap();
    assert_eq!(driver.active_primary_devices(), Ok(vec![0]));
    assert_eq!(driver.current_context(), Ok(None), "a retain binds nothing");
    driver.set_current_context(Some(context)).unwrap();
    assert_eq!(driver.current_context(), Ok(Some(context)));
    assert_eq!(driver.current_device(), Ok(0));
    assert_eq!(driver.reads_pageable_memory(0), Ok(false));

    let memory = vec![0_u8; 3 << 12];
    let base = (memory.as_ptr() as usize).next_multiple_of(4096);
    assert_eq!(driver.is_page_locked(base), Ok(false));
    driver.register(base, 8192).unwrap();
    assert_eq!(driver.is_page_locked(base + 5000), Ok(true));
    assert_eq!(driver.register(base + 4096, 4096).unwrap_err().code(), 712);
    assert_eq!(driver.unregister(base + 4096).unwrap_err().code(), 1);
    driver.unregister(base).unwrap();
    assert_eq!(driver.unregister(base).unwrap_err().to_string(), {
        "cuMemHostUnregister: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED (713)"
    });

    let null_stream = StreamHandle(0);
    let event = driver.create_event().unwrap();
    assert_eq!(driver.query_event(event), Ok(true), "never recorded is complete");
    driver.record_event(event, null_stream).unwrap();
    driver.synchronize_context().unwrap();
    assert_eq!(driver.query_event(event), Ok(true));
    driver.destroy_event(event).unwrap();
    assert_eq!(driver.is_capturing(null_stream), Ok(false));
    assert_eq!(driver.exchange_capture_mode(CaptureMode::Relaxed), Ok(CaptureMode::Global));
    assert_eq!(driver.exchange_capture_mode(CaptureMode::Global), Ok(CaptureMode::Relaxed));

    driver.set_current_context(None).unwrap();
    assert_eq!(driver.synchronize_context().unwrap_err().code(), 201);
    driver.release_primary(0).unwrap();
    assert_eq!(driver.release_primary(0).unwrap_err().code(), 201);
}

#[test]
fn a_pending_event_is_not_complete_and_an_unknown_code_is_kept() {
    in_child("child_with_pending_work", &[]);
}

#[test]
#[ignore = "run by a_pending_event_is_not_complete_and_an_unknown_code_is_kept"]
fn child_with_pending_work() {
    if !is_child() {
        return;
    }
    let fake = Control::load().unwrap();
    let driver = CudaDriver::default();
    driver.prepare().expect("the fake is mapped as libcuda.so");
    let context: ContextHandle = driver.retain_primary(0).unwrap();
    driver.set_current_context(Some(context)).unwrap();
    let event = driver.create_event().unwrap();
    fake.hold(0);
    fake.stall(0, std::time::Duration::from_nanos(1));
    driver.record_event(event, StreamHandle(0)).unwrap();
    assert_eq!(driver.query_event(event), Ok(false));
    fake.release(0);
    fake.run_until_idle();
    assert_eq!(driver.query_event(event), Ok(true));

    // A code of a driver newer than this crate is a number like any other.
    fake.fail("cuEventQuery", 1, 4711);
    assert_eq!(
        driver.query_event(event).unwrap_err().to_string(),
        "cuEventQuery: CUDA_ERROR_UNLISTED (4711)"
    );
}

#[test]
fn in_use_means_mapped_and_initialised_by_somebody() {
    // A library that could be loaded is on the path, so that a probe that loads shows itself.
    let library = Control::find().expect("cargo builds the fake library beside the tests");
    let folder = library.with_file_name("pinpool-library-path");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["libcuda.so.1", "libcuda.so"] {
        let _ = std::fs::remove_file(folder.join(name));
        std::os::unix::fs::symlink(&library, folder.join(name)).unwrap();
    }
    in_child("child_that_looks", &[("LD_LIBRARY_PATH", folder.to_str().unwrap())]);
}

#[test]
#[ignore = "run by in_use_means_mapped_and_initialised_by_somebody"]
fn child_that_looks() {
    if !is_child() {
        return;
    }
    let driver = CudaDriver::default();
    assert!(!driver.is_in_use(), "this process has no libcuda");
    assert!(
        !std::fs::read_to_string("/proc/self/maps").unwrap().contains("libfake_cuda"),
        "looking loads nothing"
    );
    let start = Instant::now();
    for _ in 0..1000 {
        assert!(!driver.is_in_use());
    }
    println!("is_in_use without a libcuda: {} ns", start.elapsed().as_nanos() / 1000);

    let fake = Control::load().unwrap();
    assert!(!driver.is_in_use(), "mapped, but nobody has called cuInit");
    assert_eq!(driver.current_context(), Ok(None));
    assert_eq!(fake.calls("cuInit"), 0, "looking initialises nothing");
    assert_eq!(fake.initialize(), 0);
    assert!(driver.is_in_use(), "seen at once, without a wait");
    assert_eq!(driver.prepare(), Ok(()));
    assert_eq!(fake.calls("cuInit"), 1, "and not initialised again");
}

#[test]
fn a_stub_in_the_process_is_not_cuda_in_use() {
    in_child("child_with_a_stub", &[("FAKE_CUDA_STUB", "1")]);
}

#[test]
#[ignore = "run by a_stub_in_the_process_is_not_cuda_in_use"]
fn child_with_a_stub() {
    if !is_child() {
        return;
    }
    let _stub = Control::load().unwrap();
    let driver = CudaDriver::default();
    assert!(!driver.is_in_use());
    assert_eq!(driver.current_context(), Ok(None));
    let error = driver.prepare().unwrap_err().to_string();
    assert!(error.contains("loaded under this name: libcuda.so: is the link-time stub"), "{error}");
}

#[test]
fn a_failure_is_believed_for_a_while_and_then_tried_again() {
    let missing = std::env::temp_dir().join("pinpool-no-such-folder/libcuda.so.1");
    in_child("child_that_tries_again", &[("LD_LIBRARY_PATH", missing.to_str().unwrap())]);
}

#[test]
#[ignore = "run by a_failure_is_believed_for_a_while_and_then_tried_again"]
fn child_that_tries_again() {
    if !is_child() {
        return;
    }
    let driver = CudaDriver::default();
    let Err(error) = driver.prepare() else { return println!("this machine has CUDA") };
    let fake = Control::load().unwrap();
    assert_eq!(driver.prepare(), Err(error), "the libraries are not looked for at every call");
    assert_eq!(fake.calls("cuInit"), 0);
    // As if the time had passed.
    if let Some(failure) = &mut *DRIVER.failure.lock().unwrap() {
        failure.when = failure.when.checked_sub(RETRY_AFTER).expect("the clock is older than that");
    }
    assert_eq!(driver.prepare(), Ok(()));
    assert_eq!(fake.calls("cuInit"), 1);
}
