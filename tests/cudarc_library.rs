//! cudarc looks for a libcuda by itself: it is led to ours, or the difference is an error, and it is never called
//! where it would panic.
#![cfg(all(feature = "cudarc", target_os = "linux"))]

mod child;

use child::{anonymous_copy, copy_of, folder, in_child, is_child, is_mapped, library_path};
use cudarc::driver::{CudaContext, result, sys};
use pinpool::{Driver, Error, PinnedPool, check_cudarc};

fn driver_of(library: &std::path::Path) -> Driver {
    Driver::builder().library(library).build()
}

#[test]
fn without_a_library_for_cudarc_there_is_an_error_and_no_panic() {
    in_child("child_without_a_library", &[]);
}

#[test]
#[ignore = "run by without_a_library_for_cudarc_there_is_an_error_and_no_panic"]
fn child_without_a_library() {
    if !is_child() {
        return;
    }
    if Driver::cuda().is_ok() {
        return println!("this machine has CUDA");
    }
    assert!(matches!(check_cudarc(&Driver::auto()), Err(Error::NoCuda { .. })));
    // Ours is found, by its path, and cudarc would still find none.
    let ours = anonymous_copy(folder("cudarc-none").join("mine.so"));
    let Err(Error::NoCuda { report }) = check_cudarc(&driver_of(&ours)) else {
        panic!("cudarc would have panicked");
    };
    assert!(report.starts_with("cudarc would find no library, and panic:\ncudarc: libcuda.so: "), "{report}");
    assert!(report.lines().last().unwrap().starts_with("cudarc: libcuda.so.1: "), "{report}");
}

#[test]
fn cudarc_is_led_to_the_library_that_was_chosen() {
    in_child("child_that_is_led", &[]);
}

#[test]
#[ignore = "run by cudarc_is_led_to_the_library_that_was_chosen"]
fn child_that_is_led() {
    if !is_child() {
        return;
    }
    // No name leads there: only that it is loaded already.
    let ours = copy_of("libfake_cuda.so", folder("cudarc led").join("chosen.so"));
    assert_eq!(check_cudarc(&driver_of(&ours)).unwrap(), ours);
    let context = CudaContext::new(0).expect("cudarc has the same one");
    let stream = context.new_stream().unwrap();
    let pool = PinnedPool::builder().driver(driver_of(&ours)).context_of(&stream).build().unwrap();
    assert!(pool.take_pinned(4096).unwrap().is_pinned());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains("cudarc led/chosen.so") && !maps.contains("libfake_cuda.so"));
}

#[test]
fn a_stub_that_cudarc_would_open_is_seen_before_it_does() {
    let path = library_path("cudarc-stub", "libfake_stub.so", &["libcuda.so"]);
    in_child("child_before_a_stub", &[("LD_LIBRARY_PATH", &path)]);
    in_child("child_behind_a_stub", &[("LD_LIBRARY_PATH", &path)]);
}

#[test]
#[ignore = "run by a_stub_that_cudarc_would_open_is_seen_before_it_does"]
fn child_before_a_stub() {
    if !is_child() {
        return;
    }
    let ours = anonymous_copy(folder("cudarc-before-stub").join("libcuda.so.535"));
    let error = check_cudarc(&driver_of(&ours)).unwrap_err();
    let Error::LibraryMismatch { ours: named, theirs, user: "cudarc" } = &error else { panic!("{error}") };
    assert_eq!(named, &ours);
    assert!(theirs.ends_with("cudarc-stub/libcuda.so"), "{error}");
    assert!(!is_mapped("cudarc-stub"), "looking has not let cudarc keep it");
}

#[test]
#[ignore = "run by a_stub_that_cudarc_would_open_is_seen_before_it_does"]
fn child_behind_a_stub() {
    if !is_child() {
        return;
    }
    // cudarc came first, and has the stub for good.
    assert_eq!(result::init().unwrap_err().0, sys::CUresult::CUDA_ERROR_STUB_LIBRARY);
    let ours = copy_of("libfake_cuda.so", folder("cudarc-behind-stub").join("libcuda.so.535"));
    let error = check_cudarc(&driver_of(&ours)).unwrap_err().to_string();
    assert!(error.contains("cudarc-behind-stub/libcuda.so.535, but cudarc has "), "{error}");
    assert!(error.contains("cudarc-stub/libcuda.so: both must use one file"), "{error}");
}

#[test]
fn a_stream_of_another_libcuda_is_refused_and_the_error_names_both() {
    let path = library_path("cudarc-other", "libfake_cuda.so", &["libcuda.so"]);
    in_child("child_with_two_libraries", &[("LD_LIBRARY_PATH", &path)]);
}

#[test]
#[ignore = "run by a_stream_of_another_libcuda_is_refused_and_the_error_names_both"]
fn child_with_two_libraries() {
    if !is_child() {
        return;
    }
    let ours = anonymous_copy(folder("cudarc-ours").join("libcuda.so.535"));
    let driver = driver_of(&ours);
    assert_eq!(driver.libraries()[0].found.as_ref(), Some(&ours), "ours is initialised first");
    let pool = PinnedPool::builder().driver(driver).build().unwrap();
    let stream = CudaContext::new(0).expect("cudarc has one of its own").new_stream().unwrap();
    let error = pool.take(4096).record_last_use(&stream).unwrap_err();
    let Error::LibraryMismatch { ours: named, theirs, user: "cudarc" } = &error else { panic!("{error}") };
    assert_eq!(named, &ours);
    assert!(theirs.ends_with("cudarc-other/libcuda.so"), "{error}");
    let host = PinnedPool::builder().driver(Driver::host_only()).build().unwrap();
    assert!(matches!(host.take(1).record_last_use(&stream), Err(Error::ForeignStream { pool: "host", .. })));
}

#[test]
fn only_cuda_s_own_driver_has_to_do_with_cudarc() {
    assert!(matches!(check_cudarc(&Driver::host_only()), Err(Error::ForeignStream { pool: "host", .. })));
}
