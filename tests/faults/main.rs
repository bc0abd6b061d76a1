//! Every driver call can fail, everywhere: each call of each scenario of a buffer's journey fails in turn, once,
//! for ever, or with everything after it, with every relevant code; so does each mapping and each start of a thread.
//!
//! After each run: nobody panicked, the simulated device saw no use of memory in flight and has the right bytes, the
//! books balance with the device's and with what is mapped, what is left behind is what is counted as quarantined, and the
//! pool works on, or says that the device is lost and gives out plain memory.
//!
//! By default the codes are spread over the calls, from `PINPOOL_FAULTS_SEED` on; `PINPOOL_FAULTS=all` runs every call with
//! every code, and `PINPOOL_FAULTS_SHARE` an n-th of the runs. `PINPOOL_FAULTS_ONLY` names one scenario, and with
//! `PINPOOL_FAULTS_TRACE` each run says what it is.
//!
//! `tests/faults_cuda` plays the same scenarios through cudarc and libcuda's C interface.

mod checks;
mod device;
mod hangs;
mod kind;
mod points;
mod scenarios;
mod simulated;
mod stage;
mod sweep;
