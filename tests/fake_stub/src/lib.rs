//! A library like the CUDA toolkit's link-time stub: it has libcuda's functions, each answers 34
//! (`CUDA_ERROR_STUB_LIBRARY`), and none writes anything.
//!
//! As in an old driver, functions are missing that came later and that pinpool can do without.
//!
//! A library of its own, beside the fake libcuda that can play a stub too, because a test of "a stub in front
//! of the real one" needs both in one process.

#![allow(unsafe_code)] // exports C functions by their bare names

macro_rules! stubs {
    ($($name:ident)*) => {$(
        #[doc = concat!("`", stringify!($name), "`; takes what it is given and answers 34.")]
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        pub extern "C" fn $name() -> u32 {
            34
        }
    )*};
}

stubs! {
    cuInit cuDriverGetVersion cuGetErrorName cuGetErrorString cuGetProcAddress_v2
    cuDeviceGetCount cuDeviceGet cuDeviceGetAttribute
    cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxGetState
    cuCtxGetCurrent cuCtxSetCurrent cuCtxGetDevice cuCtxSynchronize
    cuEventCreate cuEventRecord cuEventQuery cuEventDestroy_v2
    cuMemHostRegister_v2 cuMemHostUnregister
}
