//! What makes other crates' types acceptable to the pool.

#[cfg(feature = "cudarc")]
mod cudarc;
