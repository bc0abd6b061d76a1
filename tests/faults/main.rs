//! Every driver call can fail, everywhere: each call of each scenario of a buffer's journey fails in turn, once,
//! for ever, or with everything after it, with every relevant code; so does each mapping and each start of a thread.
//!
//! After each run: nobody panicked, the simulated device saw no use of memory in flight and has the right bytes, the
//! books balance with the device's and with what is mapped, what is left behind is what is counted as quarantined, and the
//! pool works on, or says that the device is lost and gives out plain memory.
//!
//! By default the codes are spread over the calls; `PINPOOL_FAULTS=all` runs every call with every code.

mod checks;
mod hangs;
mod points;
mod scenarios;
mod stage;
mod sweep;
