//! libcuda's C ABI over pinpool's simulated device.
//!
//! Two halves that meet only at run time:
//!
//! * The shared library `libfake_cuda.so`: the driver functions ([`abi`]) and functions of its own to
//!   control the device (`fake_cuda_hold` and so on, [`exported`]). It says to the dynamic linker that
//!   it is `libcuda.so`.
//! * [`control::Control`], for Rust tests and examples: finds that file beside the running binary, opens
//!   it by its full path and calls the control functions in it.
//!
//! A program that links this crate also has a second, unused copy of the device in its own binary.
//! `Control` never touches it: it goes through `dlsym`, so that it speaks of the device that cudarc
//! and pinpool use.
//!
//! Environment, read when the library is first called: `FAKE_CUDA_CLOCK=stepped` (default: real time),
//! `FAKE_CUDA_STUB=1` (every function answers 34, as the toolkit's link-time stub does), `FAKE_CUDA_REFUSE=801`
//! (registering and unregistering answer that code; with 0 they answer success and do nothing),
//! `FAKE_CUDA_CONFIDENTIAL=1` (registering answers 801, allocating works), `FAKE_CUDA_ATTRIBUTES=99=0,100=1`
//! (what the devices answer for these attributes),
//! `FAKE_CUDA_USER_OBJECTS=0` (there are none: 801), and what [`process`] lists: what a call meets after the driver has
//! gone with its process, or in a forked child.

pub mod abi;
pub mod control;
mod device;
pub mod exported;
pub mod process;
