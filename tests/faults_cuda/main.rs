//! The same as `tests/faults`, through the real path: cudarc, the search for libcuda, the pool's own table, and a
//! fake libcuda; with mappings and threads that the system itself refuses, and with scenarios of cudarc's own copies.
//!
//! There is one libcuda in a process, so each scenario is a process, and some run side by side. `PINPOOL_FAULTS`,
//! `PINPOOL_FAULTS_SEED`, `PINPOOL_FAULTS_ONLY` and `PINPOOL_FAULTS_TRACE` are as there.
#![cfg(all(feature = "cudarc", target_os = "linux"))]

#[path = "../faults/checks.rs"]
mod checks;
mod children;
mod copies;
mod device;
#[path = "../faults/hangs.rs"]
mod hangs;
#[path = "../faults/kind.rs"]
mod kind;
#[path = "../faults/points.rs"]
mod points;
mod raw;
#[path = "../faults/scenarios.rs"]
mod scenarios;
#[path = "../faults/stage.rs"]
mod stage;
#[path = "../faults/sweep.rs"]
mod sweep;
mod system;
