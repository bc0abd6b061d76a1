//! Finding CUDA's libraries on this machine, as it really is: what is found in a process that has mapped, hidden
//! or spoilt them, and what the report says. The order of the search is asserted in `src/driver/ladder_tests`.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // opens libraries

mod child;

use child::{built, copy_of, folder, in_child, is_child, library_path};
use pinpool::driver::{LibraryReport, Probe};
use pinpool::{Driver, Error, PinnedPool};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

fn mapped(path: &Path) -> libloading::Library {
    // SAFETY: the fake libraries have no initialisers.
    unsafe { libloading::Library::new(path) }.unwrap()
}

/// The first line of the list of mappings that names the file.
fn place_in_maps(file: &Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().position(|line| line.ends_with(file.to_str().unwrap())).expect("it is mapped")
}

/// What the search for a library that was chosen by name says of it.
fn answer_for(library: &Path) -> String {
    let reports = Driver::builder().library(library).build().libraries();
    let libcuda = reports.into_iter().find(|report| report.library == "libcuda").unwrap();
    assert_eq!(libcuda.found, None);
    let [Probe { rung: "DriverBuilder::library", place, answer, .. }] = &libcuda.probes[..] else {
        panic!("other probes: {libcuda}");
    };
    assert_eq!(place.as_deref(), Some(library));
    answer.clone()
}

#[test]
fn a_failure_is_told_line_by_line() {
    let nothing = folder("library-nothing");
    // A variable that is empty chooses nothing.
    let chosen = ("PINPOOL_CUDA_LIBRARY", OsStr::new(""));
    in_child("child_with_every_rung_failing", &[("LD_LIBRARY_PATH", nothing.as_os_str()), chosen]);
}

#[test]
#[ignore = "run by a_failure_is_told_line_by_line"]
fn child_with_every_rung_failing() {
    if !is_child() {
        return;
    }
    let pool = PinnedPool::builder().driver(Driver::auto()).build().unwrap();
    let error = match pool.take_pinned(4096) {
        Ok(_) => return println!("this machine has CUDA"),
        Err(error) => error,
    };
    let mut expected = "no usable CUDA driver:
DriverBuilder::library: (none)
PINPOOL_CUDA_LIBRARY: (none)
mapped into this process: (none)
loaded under this name: libcuda.so.1: not loaded in this process
by name: libcuda.so.1: cannot open shared object file: No such file or directory
loaded under this name: libcuda.so: not loaded in this process
by name: libcuda.so: cannot open shared object file: No such file or directory"
        .to_owned();
    let multiarch = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let mut places = vec![
        multiarch.clone(),
        format!("{multiarch}/nvidia/current"),
        "/usr/lib64".into(),
        "/usr/lib".into(),
        "/usr/local/nvidia/lib64".into(),
        "/.singularity.d/libs".into(),
        "/usr/lib/wsl/lib".into(),
        "/run/opengl-driver/lib".into(),
        "/usr/local/cuda/compat".into(),
    ];
    if cfg!(target_arch = "aarch64") {
        places.extend([format!("{multiarch}/tegra"), format!("{multiarch}/nvidia")]);
    }
    for place in places {
        let line = format!("{place}/libcuda.so.1: No such file or directory (os error 2)");
        expected += &format!("\nwell-known folders: {line}");
    }
    assert_eq!(error.to_string(), expected);
}

#[test]
fn a_mapped_library_is_used_whatever_its_version_even_when_its_file_is_gone() {
    in_child("child_with_a_deleted_library", &[]);
}

#[test]
#[ignore = "run by a_mapped_library_is_used_whatever_its_version_even_when_its_file_is_gone"]
fn child_with_a_deleted_library() {
    if !is_child() {
        return;
    }
    let file = copy_of("libfake_cuda.so", folder("library deleted").join("libcuda.so.999.1"));
    let _kept = mapped(&file);
    std::fs::remove_file(&file).unwrap();
    let driver = Driver::cuda().expect("it is still mapped");
    let report = &driver.libraries()[0];
    assert_eq!(report.found.as_deref(), Some(&*file));
    assert_eq!(report.version, Some(13_000));
    assert_eq!(report.probes.len(), 3, "nothing else was tried:\n{report}");
    let last = report.probes.last().unwrap().to_string();
    let expected = format!("mapped into this process: {0}: used: {0}, version 13.0", file.display());
    assert_eq!(last, expected);
}

#[test]
fn a_stub_that_is_mapped_hides_no_real_one() {
    // The stub answers to libcuda.so.1 as long as it is open, so only absolute paths lead past it.
    in_child("child_behind_a_mapped_stub", &[]);
}

#[test]
#[ignore = "run by a_stub_that_is_mapped_hides_no_real_one"]
fn child_behind_a_mapped_stub() {
    if !is_child() {
        return;
    }
    let folder = folder("library-behind-stub");
    let real = copy_of("libfake_cuda.so", folder.join("libcuda.so.535"));
    let mut kept = vec![mapped(&real)];
    // The kernel mostly maps downwards, but a hole further up may be large enough for a stub: copies are mapped
    // until one comes first in the list.
    let stub = (0..64)
        .map(|number| copy_of("libfake_stub.so", folder.join(format!("stubs{number}/libcuda.so"))))
        .find(|stub| {
            kept.push(mapped(stub));
            place_in_maps(stub) < place_in_maps(&real)
        })
        .expect("one of so many lies below");
    let report = &Driver::cuda().unwrap().libraries()[0];
    assert_eq!(report.found.as_deref(), Some(&*real));
    let answer = "is the link-time stub: cuDriverGetVersion answered CUDA_ERROR_STUB_LIBRARY (34)";
    assert!(report.to_string().contains(&format!("{}: {answer}", stub.display())), "{report}");
}

#[test]
fn what_is_no_library_is_a_line_and_no_panic_and_no_wait() {
    let folder = folder("library-bad");
    let text = folder.join("libcuda.so.1");
    std::fs::write(&text, "a text file, long enough to be read as the header of a library. ".repeat(4))
        .unwrap();
    assert_eq!(answer_for(&text), "invalid ELF header");

    let empty = folder.join("empty");
    std::fs::write(&empty, "").unwrap();
    assert_eq!(answer_for(&empty), "file too short");

    // Byte 4 is the class, bytes 18 and 19 the machine: 243 is RISC-V.
    for (name, at, value) in [("narrow", 4, 1), ("foreign", 18, 243)] {
        let mut bytes = std::fs::read(built("libfake_stub.so")).unwrap();
        bytes[at] = value;
        let file = folder.join(name);
        std::fs::write(&file, bytes).unwrap();
        let answer = answer_for(&file);
        assert!(answer.contains("ELF") || answer.contains("cannot open"), "{name}: {answer}");
    }

    let truncated = folder.join("truncated");
    let half = std::fs::read(built("libfake_stub.so")).unwrap();
    std::fs::write(&truncated, &half[..200]).unwrap();
    assert!(!answer_for(&truncated).is_empty());

    assert_eq!(answer_for(&folder), "is a folder");
    let looped = folder.join("loop");
    symlink(&looped, &looped).unwrap();
    assert!(answer_for(&looped).contains("symbolic links"), "{}", answer_for(&looped));

    // The linker would wait for a writer, for ever.
    let pipe = folder.join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    if made.is_ok_and(|status| status.success()) {
        assert_eq!(answer_for(&pipe), "is no regular file");
    }
    assert_eq!(answer_for(Path::new("libm.so.6")), "is no libcuda: it lacks cuInit");
    assert_eq!(answer_for(Path::new("/nonexistent/lib")), "No such file or directory (os error 2)");
    assert!(!answer_for(Path::new("with\0zero")).is_empty());
}

#[test]
fn a_path_of_spaces_and_bytes_that_are_no_text_is_used() {
    let odd = folder("library odd").join(OsStr::from_bytes(b"caf\xe9 \xff"));
    let file = copy_of("libfake_cuda.so", odd.join("my libcuda.so"));
    in_child("child_with_an_odd_path", &[("PINPOOL_CUDA_LIBRARY", file.as_os_str())]);
}

#[test]
#[ignore = "run by a_path_of_spaces_and_bytes_that_are_no_text_is_used"]
fn child_with_an_odd_path() {
    if !is_child() {
        return;
    }
    let report = &Driver::cuda().unwrap().libraries()[0];
    assert_eq!(report.found.as_deref(), std::env::var_os("PINPOOL_CUDA_LIBRARY").as_deref().map(Path::new));
    assert!(report.to_string().contains("caf\u{fffd} \u{fffd}"), "{report}");
}

#[test]
fn text_files_under_the_driver_s_names_are_lines_of_the_report() {
    let folder = folder("library-text");
    for name in ["libcuda.so.1", "libcuda.so"] {
        std::fs::write(folder.join(name), "no library").unwrap();
    }
    in_child("child_with_text_files", &[("LD_LIBRARY_PATH", folder.as_os_str())]);
}

#[test]
#[ignore = "run by text_files_under_the_driver_s_names_are_lines_of_the_report"]
fn child_with_text_files() {
    if !is_child() {
        return;
    }
    let report = &Driver::auto().libraries()[0];
    let answers: Vec<&str> =
        report.probes.iter().filter(|probe| probe.rung == "by name").map(|probe| &*probe.answer).collect();
    assert_eq!(answers.len(), 2);
    assert!(answers.iter().all(|answer| answer.ends_with("file too short")), "{answers:?}");
}

#[test]
fn a_choice_that_the_process_does_not_use_is_an_error_that_names_both() {
    in_child("child_that_chooses_another", &[]);
}

#[test]
#[ignore = "run by a_choice_that_the_process_does_not_use_is_an_error_that_names_both"]
fn child_that_chooses_another() {
    if !is_child() {
        return;
    }
    let folder = folder("library-other");
    let other = child::anonymous_copy(folder.join("other.so"));
    let fake = fake_cuda::control::Control::load().unwrap();
    assert_eq!(fake.initialize(), 0, "as somebody else in this process would");
    let driver = Driver::builder().library(&other).build();
    let pool = PinnedPool::builder().driver(driver.clone()).build().unwrap();
    let error = pool.take_pinned(4096).unwrap_err();
    let expected =
        Error::LibraryMismatch { ours: other, theirs: fake.path().to_owned(), user: "this process" };
    assert_eq!(error, expected);
    assert!(driver.libraries()[0].to_string().contains("this process has"), "{}", driver.libraries()[0]);
    // Whoever chose the right one, by another name for it, is served.
    let link = folder.join("link.so");
    symlink(fake.path(), &link).unwrap();
    assert_eq!(Driver::builder().library(link).build().libraries()[0].version, Some(13_000));
    assert!(Driver::cuda().is_ok());
}

fn runtime_report(driver: &Driver) -> LibraryReport {
    driver.libraries().into_iter().find(|report| report.library == "libcudart").unwrap()
}

#[test]
fn a_runtime_is_found_in_a_python_environment_with_link_loops_and_locked_folders() {
    in_child("child_with_a_python_environment", &[]);
}

#[test]
#[ignore = "run by a_runtime_is_found_in_a_python_environment_with_link_loops_and_locked_folders"]
fn child_with_a_python_environment() {
    if !is_child() {
        return;
    }
    let folder = folder("library venv");
    let vendor = folder.join("lib/python3.12/site-packages/nvidia");
    std::fs::create_dir_all(vendor.join("cu14")).unwrap();
    symlink(&vendor, vendor.join("cu14/up")).unwrap();
    symlink("missing", vendor.join("dangling")).unwrap();
    let locked = vendor.join("locked");
    std::fs::create_dir_all(&locked).unwrap();
    std::fs::set_permissions(&locked, PermissionsExt::from_mode(0o000)).unwrap();
    std::fs::write(vendor.join("libcudart.so.99"), "no library").unwrap();
    let library = copy_of("libfake_cudart.so", vendor.join("cu14").join("any").join("libcudart.so.14"));

    let driver = Driver::builder().vendor_roots([&folder]).build();
    let report = runtime_report(&driver);
    // The folder is root's own where the tests run as root, so whether it can be read differs.
    let lines: Vec<String> = report.probes.iter().skip(3).map(Probe::to_string).collect();
    assert_eq!(report.found.as_deref(), Some(&*library), "{report}");
    assert_eq!(report.version, Some(12_090));
    assert_eq!(lines.len(), 2, "{report}");
    assert!(lines[0].ends_with("nvidia/libcudart.so.99: file too short"), "{report}");
    assert!(lines[1].ends_with("libcudart.so.14, version 12.9"), "{report}");
    std::fs::set_permissions(&locked, PermissionsExt::from_mode(0o755)).unwrap();
}

#[test]
fn a_runtime_is_found_where_the_running_python_looks() {
    in_child("child_with_a_python_path", &[]);
}

#[test]
#[ignore = "run by a_runtime_is_found_where_the_running_python_looks"]
fn child_with_a_python_path() {
    if !is_child() {
        return;
    }
    let (empty, packages) = (folder("library python none"), folder("library python path"));
    let library = copy_of("libfake_cudart.so", packages.join("nvidia/cuda_runtime/lib/libcudart.so.12"));
    let report = runtime_report(&Driver::builder().python_path([empty, packages]).build());
    assert_eq!(report.found.as_deref(), Some(&*library), "{report}");
}

#[test]
fn a_runtime_without_a_driver_is_refused_by_name() {
    in_child("child_with_an_insufficient_driver", &[("FAKE_CUDART_CODE", OsStr::new("35"))]);
}

#[test]
#[ignore = "run by a_runtime_without_a_driver_is_refused_by_name"]
fn child_with_an_insufficient_driver() {
    if !is_child() {
        return;
    }
    let library = copy_of("libfake_cudart.so", folder("library-35").join("libcudart.so.12"));
    let driver = Driver::builder().library(&library).build();
    assert_eq!(driver.name(), "cudart", "a choice of that name is a choice of a runtime");
    let answer = runtime_report(&driver).probes.pop().unwrap().answer;
    assert_eq!(answer, "cudaGetDeviceCount: cudaErrorInsufficientDriver (35)");
}

#[test]
fn a_library_on_the_library_path_is_found_by_name() {
    let path = library_path("library-by-name", "libfake_cuda.so", &["libcuda.so.1"]);
    in_child("child_with_a_library_path", &[("LD_LIBRARY_PATH", &path)]);
}

#[test]
#[ignore = "run by a_library_on_the_library_path_is_found_by_name"]
fn child_with_a_library_path() {
    if !is_child() {
        return;
    }
    let report = &Driver::cuda().unwrap().libraries()[0];
    let last = report.probes.last().unwrap();
    assert_eq!((last.rung, last.place.as_deref()), ("by name", Some(Path::new("libcuda.so.1"))), "{report}");
    assert!(report.found.as_ref().unwrap().ends_with("library-by-name/libcuda.so.1"));
}
