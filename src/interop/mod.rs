//! What makes other crates' types acceptable to the pool.

#[cfg(feature = "cudarc")]
mod cudarc;
#[cfg(feature = "cudarc")]
mod cudarc_library;

#[cfg(feature = "cudarc")]
pub use cudarc_library::check_cudarc;
