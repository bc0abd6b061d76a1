//! The driver functions. Each is one line over the entry point of the simulated device that has its name.
//!
//! A panic never crosses the C boundary, where it would end the process: it becomes 999.

mod contexts;
mod graphs;
mod lookup;
mod memory;
mod streams;
mod unsupported;

use crate::{device, process};
use pinpool::sim::Cuda;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub(crate) const INVALID_VALUE: u32 = 1;
const STUB_LIBRARY: u32 = 34;
const UNKNOWN: u32 = 999;

/// Defines exported functions, and the list of them that `cuGetProcAddress` searches.
macro_rules! exports {
    ($list:ident: $(fn $name:ident($($argument:ident: $kind:ty),*) |$cuda:pat_param| $body:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            ///
            /// The C prototype's: every pointer is NULL or valid for what the function reads or writes.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            pub unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
                // SAFETY: the caller keeps the contract above; the body is only run during this call.
                #[allow(unused_unsafe)]
                unsafe { $crate::abi::answer(stringify!($name), |$cuda| $body) }
            }
        )*

        pub(super) fn $list() -> Vec<(&'static str, *const ())> {
            vec![$((stringify!($name), $name as *const ())),*]
        }
    };
}
pub(crate) use exports;

/// Runs one driver function's body and turns its outcome into a result code.
pub(crate) fn answer(function: &str, body: impl FnOnce(&'static Cuda) -> Result<(), u32>) -> u32 {
    if device::is_stub() {
        return STUB_LIBRARY;
    }
    let _inside = match process::enter(function) {
        Ok(inside) => inside,
        Err(code) => return code,
    };
    match catch_unwind(AssertUnwindSafe(|| body(device::cuda()))) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code,
        Err(_) => UNKNOWN,
    }
}

/// Writes an out-parameter. NULL is refused before anything is made that the caller could not name.
///
/// # Safety
///
/// `to` is NULL or valid for a write.
pub(crate) unsafe fn out<T>(to: *mut T, make: impl FnOnce() -> Result<T, u32>) -> Result<(), u32> {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    let value = make()?;
    // SAFETY: not NULL, and valid by the contract.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes an out-parameter that may be left out.
///
/// # Safety
///
/// `to` is NULL or valid for a write.
pub(crate) unsafe fn out_optional<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: not NULL, and valid by the contract.
        unsafe { to.write(value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_result_code() {
        assert_eq!(answer("a test", |_| panic!("inside a driver function")), UNKNOWN);
        assert_eq!(answer("a test", |_| Ok(())), 0);
        assert_eq!(answer("a test", |_| Err(713)), 713);
    }

    #[test]
    fn an_out_pointer_that_is_null_is_refused_before_anything_is_made() {
        // SAFETY: NULL is allowed.
        let refused = unsafe { out::<usize>(std::ptr::null_mut(), || unreachable!()) };
        assert_eq!(refused, Err(INVALID_VALUE));
    }
}
