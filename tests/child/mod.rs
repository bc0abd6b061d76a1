//! Tests that need a process of their own, since what a process has loaded stays loaded: the cases are ignored
//! tests, run by others in a child with an environment made for them. And the libraries that they find there.
#![allow(dead_code)] // Each test file uses its own part.

pub mod forked;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

const CHILD: &str = "PINPOOL_TEST_CHILD";

/// Runs one ignored test of this binary in a child, which starts with these variables only; gives its output.
pub fn in_child(case: &str, environment: &[(&str, &OsStr)]) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", case, "--ignored", "--nocapture", "--test-threads=1"]);
    child.env_clear().env(CHILD, "1").envs(environment.iter().copied()).envs(coverage());
    let output = child.output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{case} in a child:\n{text}");
    text
}

/// What `.ci/coverage` tells its processes, and so a part of every environment that is made for one.
pub fn coverage() -> Option<(&'static str, OsString)> {
    let name = "LLVM_PROFILE_FILE";
    Some((name, std::env::var_os(name)?))
}

/// Whether this is such a child, and not somebody's `cargo test -- --ignored`.
pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// An empty folder of this name, made afresh.
pub fn folder(name: impl AsRef<Path>) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A library that cargo has built beside the tests: `libfake_cuda.so`, `libfake_cudart.so`, `libfake_stub.so`.
pub fn built(file: &str) -> PathBuf {
    let beside = |folder: &str| Some(std::env::current_exe().ok()?.parent()?.join(folder).join(file));
    let places: Vec<PathBuf> = [".", "deps", "../deps"].into_iter().filter_map(beside).collect();
    places.iter().find(|place| place.is_file()).expect("cargo builds the libraries beside the tests").clone()
}

/// A copy of a built library under another name, a library of its own to the dynamic linker.
pub fn copy_of(file: &str, to: impl AsRef<Path>) -> PathBuf {
    let to = to.as_ref();
    std::fs::create_dir_all(to.parent().unwrap()).unwrap();
    std::fs::copy(built(file), to).unwrap();
    to.to_owned()
}

/// A copy of the fake libcuda that the linker finds under no name of libcuda, as it finds no real one under
/// `libcuda.so`: the name inside, that one, is made another.
pub fn anonymous_copy(to: impl AsRef<Path>) -> PathBuf {
    let to = copy_of("libfake_cuda.so", to);
    let mut bytes = std::fs::read(&to).unwrap();
    let (name, other) = (b"\0libcuda.so\0", b"\0another.so\0");
    // The linker's table of names is the first place of the file that has it.
    let at = bytes.windows(name.len()).position(|window| window == name).expect("it has a name");
    bytes[at..][..other.len()].copy_from_slice(other);
    std::fs::write(&to, bytes).unwrap();
    to
}

/// A folder that holds a copy of a library under each of these names, for `LD_LIBRARY_PATH`.
pub fn library_path(case: &str, file: &str, names: &[&str]) -> OsString {
    let folder = folder(case);
    for name in names {
        copy_of(file, folder.join(name));
    }
    folder.into()
}

/// What the process has mapped that bears this name.
pub fn is_mapped(name: &str) -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().contains(name)
}
