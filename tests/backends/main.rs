//! The memory backends: one body for every kind of memory, on the simulated device and through the fake libcuda,
//! and what only one of them can show.
#![cfg(all(feature = "cudarc", target_os = "linux"))]
#![allow(unsafe_code)] // Allocating and releasing by address is what is under test.

mod body;
mod device;
mod machines;

use body::all;
use device::{Fake, Simulated};
use pinpool::backend::kind;

macro_rules! everywhere {
    ($($name:ident $kind:ident;)*) => {
        mod on_the_simulated_device {
            use super::*;
            $(#[test] fn $name() { all::<kind::$kind>(&Simulated::new()); })*
        }
        mod through_the_fake_library {
            use super::*;
            $(#[test] fn $name() { all::<kind::$kind>(&Fake::new()); })*
        }
    };
}

everywhere! {
    host_pinned HostPinned;
    write_combined WriteCombined;
    unified Unified;
    device_preferred DevicePreferred;
    hbm Hbm;
    gddr Gddr;
    registered Registered;
}
