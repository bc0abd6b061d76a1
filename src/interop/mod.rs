//! What makes other crates' types acceptable to the pool.

#[cfg(feature = "cudarc")]
mod any_source;
#[cfg(feature = "cudarc")]
mod copies;
#[cfg(feature = "cudarc")]
mod cudarc;
#[cfg(feature = "cudarc")]
mod cudarc_library;
#[cfg(feature = "cudarc")]
mod host_slice;

#[cfg(feature = "cudarc")]
pub use any_source::copy_h2d_async;
#[cfg(feature = "cudarc")]
pub use copies::Pending;
#[cfg(feature = "cudarc")]
pub use cudarc_library::check_cudarc;
