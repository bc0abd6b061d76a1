//! libcuda's C ABI over pinpool's simulated device.
