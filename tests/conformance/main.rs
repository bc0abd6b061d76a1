//! One body of rules that a CUDA driver keeps, run against the simulated device, against the fake libcuda
//! over it, and against a real driver where there is one, so that the simulated device cannot drift away
//! from what it simulates.
//!
//! The rules are the rows of the semantics tables that the pool relies on; `rules.rs` has one function for
//! each table. What they are run against is behind the trait in `entry.rs`.
#![cfg(target_os = "linux")]

mod entry;
mod library;
mod rules;
mod simulated;

use fake_cuda::control::Control;
use library::Library;
use simulated::Simulated;

#[test]
fn the_simulated_device_keeps_the_rules() {
    let device = Simulated::new();
    rules::all(&device);
    device.assert_clean();
}

#[test]
fn the_fake_library_keeps_the_rules() {
    let control = Control::load().expect("cargo builds the fake library beside the tests");
    assert!(control.set_stepped());
    rules::all(&Library::fake(&control));
    control.assert_clean();
}

#[test]
#[ignore = "needs a GPU: cargo test --test conformance -- --ignored --exact a_real_driver_keeps_the_rules"]
fn a_real_driver_keeps_the_rules() {
    rules::all(&Library::real().expect("libcuda.so.1 can be opened"));
}
