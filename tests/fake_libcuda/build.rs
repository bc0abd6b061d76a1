//! Names the shared library `libcuda.so` inside a file that is called `libfake_cuda.so`.
//!
//! The file name keeps anybody from finding it by accident, although cargo puts its folder on the
//! library path of everything that it runs. The inner name makes it stand for libcuda once it was
//! opened by its full path: cudarc asks for `libcuda.so` first of all.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
        // cudarc's `is_culib_present` closes what it opened; unloading would take the device's threads
        // and thread-locals with it.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}
