//! `cargo run --example soak` for a few seconds: it passes, and it does not where something is wrong.
#![cfg(target_os = "linux")] // It reads what /proc says of itself.

use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;

/// The example, built now: `cargo test --test soak` alone does not build it.
static SOAK: LazyLock<PathBuf> = LazyLock::new(|| {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--locked", "--example", "soak"]);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    let built = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status();
    assert!(built.is_ok_and(|status| status.success()), "the example could not be built");
    // target/debug/deps/soak-.. is this test.
    let folder = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_owned();
    folder.join("examples/soak")
});

/// What it prints, and its exit code.
fn soak(arguments: &str) -> (String, Option<i32>) {
    let small = "--max-bytes 3000000 --memory-bytes 67108864 --cap-bytes 33554432 --threads 3 --streams 2";
    let arguments = small.split(' ').chain(arguments.split(' '));
    let output = Command::new(&*SOAK).args(arguments).output().unwrap();
    (String::from_utf8(output.stdout).unwrap(), output.status.code())
}

#[test]
fn it_passes_in_every_mode() {
    for mode in ["none", "mild", "hard", "lost", "reset"] {
        let (page, code) = soak(&format!("--seconds 2 --faults {mode}"));
        assert_eq!(code, Some(0), "{mode}:\n{page}");
        assert!(page.contains("passed: no discrepancy") && page.contains("   1 s "), "{mode}:\n{page}");
        assert!(
            page.contains("graphs captured") && !page.contains("replays compared 0\n"),
            "{mode}:\n{page}"
        );
        assert!(page.contains("in the books of 2 pools"), "{mode}:\n{page}");
        println!("{page}");
    }
}

#[test]
fn a_wrong_byte_on_a_device_is_found() {
    let (page, code) = soak("--seconds 20 --plant byte --faults none");
    assert_eq!(code, Some(1), "{page}");
    assert!(page.contains("DISCREPANCY: wrong bytes on device"), "{page}");
}

#[test]
fn a_replay_of_what_the_pool_was_not_told_of_is_found() {
    let (page, code) = soak("--seconds 20 --plant capture --faults none");
    assert_eq!(code, Some(1), "{page}");
    let is_found = page.contains("is replayed after") || page.contains("a replay put wrong bytes");
    assert!(is_found, "{page}");
}

#[test]
fn a_buffer_that_nobody_gives_back_is_found() {
    let (page, code) = soak("--seconds 1 --plant leak --faults none");
    assert_eq!(code, Some(1), "{page}");
    assert!(page.contains("DISCREPANCY: ") && page.contains("1 buffers are out and 0 queued"), "{page}");
}

#[test]
fn an_argument_that_is_wrong_is_named() {
    let output = Command::new(&*SOAK).args(["--faults", "cosmic"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("\"cosmic\""));
}
