//! A simulated device, for tests and benches of staging code on a machine without a GPU.

mod core;
mod cuda;
mod faults;
mod handles;

use crate::Driver;
pub use cuda::Cuda;
pub use faults::Fault;
pub use handles::{SimBuffer, SimContext, SimStream};
use std::sync::Arc;
use std::time::Duration;

/// A simulated CUDA driver with its devices. Cheap to clone; clones share one state.
#[derive(Clone)]
pub struct Sim {
    cuda: Arc<Cuda>,
}

/// Settings of a [`Sim`].
#[derive(Clone, Debug, Default)]
pub struct SimBuilder {
    _devices: i32,
}

#[allow(unused_variables)]
impl SimBuilder {
    /// How many devices there are; 0 makes `cuInit` answer 100.
    pub fn devices(self, devices: i32) -> Self {
        todo!()
    }
    /// Where all randomness comes from.
    pub fn seed(self, seed: u64) -> Self {
        todo!()
    }
    /// Runs by itself, on a thread of its own.
    pub fn real_time(self) -> Self {
        todo!()
    }
    /// Real time in which everything is free: work is executed by the call that enqueues it.
    pub fn zero_cost(self) -> Self {
        todo!()
    }
    /// Whether registering and unregistering stall every other driver call.
    pub fn driver_lock(self, on: bool) -> Self {
        todo!()
    }
    /// Whether `cuMemHostUnregister` waits for outstanding work.
    pub fn unregister_waits(self, on: bool) -> Self {
        todo!()
    }
    /// Overrides a device attribute (`CUdevice_attribute`).
    pub fn attribute(self, attribute: i32, value: i32) -> Self {
        todo!()
    }
    /// Builds the device.
    pub fn build(self) -> Sim {
        todo!()
    }
}

impl Default for Sim {
    fn default() -> Self {
        Self::new()
    }
}

#[allow(unused_variables)]
impl Sim {
    /// One device, stepped.
    pub fn new() -> Self {
        Self::builder().build()
    }
    /// One device in real time, in which everything is free.
    pub fn zero_cost() -> Self {
        Self::builder().zero_cost().build()
    }
    /// Settings.
    pub fn builder() -> SimBuilder {
        SimBuilder::default()
    }
    /// The raw entry points.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }
    /// The driver for a pool.
    pub fn driver(&self) -> Driver {
        todo!()
    }
    /// Retains the primary context of a device and binds it to the calling thread.
    pub fn context(&self, device: i32) -> SimContext {
        todo!()
    }
    /// From now on the stream executes nothing.
    pub fn hold(&self, stream: usize) {
        todo!()
    }
    /// Ends [`hold`](Self::hold).
    pub fn release(&self, stream: usize) {
        todo!()
    }
    /// Enqueues an operation that takes this long (one step on the stepped clock).
    pub fn stall(&self, stream: usize, duration: Duration) {
        todo!()
    }
    /// Executes one operation of one stream that is not held; false when nothing could run.
    pub fn step(&self) -> bool {
        todo!()
    }
    /// Steps until nothing can run.
    pub fn run_until_idle(&self) {
        todo!()
    }
    /// Operations enqueued and not yet executed.
    pub fn pending_operations(&self) -> usize {
        todo!()
    }
    /// How often an entry point was called, for example `"cuEventQuery"`.
    pub fn calls(&self, name: &str) -> u64 {
        todo!()
    }
    /// How often any entry point was called.
    pub fn total_calls(&self) -> u64 {
        todo!()
    }
    /// How often the calling thread called an entry point.
    pub fn calls_by_this_thread(&self, name: &str) -> u64 {
        todo!()
    }
    /// Sets all call counters to zero.
    pub fn reset_calls(&self) {
        todo!()
    }
    /// Makes an entry point fail.
    pub fn fail(&self, name: &str, fault: Fault) {
        todo!()
    }
    /// Ends all faults and lets hanging calls go on.
    pub fn clear_faults(&self) {
        todo!()
    }
    /// What the checks found so far.
    pub fn violations(&self) -> Vec<String> {
        todo!()
    }
    /// Takes what the checks found, so that it no longer panics.
    pub fn take_violations(&self) -> Vec<String> {
        todo!()
    }
    /// Violations are collected and no longer panic; for tests of the checks.
    pub fn expect_violations(&self) {
        todo!()
    }
    /// Panics, listing the violations, if there are any.
    pub fn assert_clean(&self) {
        todo!()
    }
    /// Bytes that are registered now (`cuMemHostRegister`).
    pub fn registered_bytes(&self) -> usize {
        todo!()
    }
    /// Address and size of each registration.
    pub fn live_registrations(&self) -> Vec<(usize, usize)> {
        todo!()
    }
}
