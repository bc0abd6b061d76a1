//! A background pool of page-locked ("pinned") host buffers for copies to a GPU.
//!
//! The modules, bottom up; a file imports only from layers below its own and from its left in its own,
//! and a test checks it:
//!
//! 0: code_name error sync
//! 1: os size_class zero pages config stats
//! 2: driver stream raw_stream sim
//! 3: contexts events block dirty
//! 4: inbox pending shelf queues
//! 5: home
//! 6: registrar harvest buffer
//! 7: lanes
//! 8: cleaner
//! 9: pool
//! 10: global interop

mod code_name;
mod error;
mod sync;

mod config;
mod os;
mod pages;
mod size_class;
mod stats;
mod zero;

pub mod driver;
mod raw_stream;
#[cfg(feature = "sim")]
pub mod sim;
mod stream;

mod block;
mod contexts;
mod dirty;
mod events;

mod inbox;
mod pending;
mod queues;
mod shelf;

mod home;

mod buffer;
mod harvest;
mod registrar;

mod lanes;

mod cleaner;

mod pool;

mod global;
mod interop;

pub use buffer::PinnedBuffer;
pub use dirty::Writer;
pub use driver::Driver;
pub use error::{CallError, Error};
pub use global::{clear, global, set_max_pooled_bytes, shutdown, stats, take, take_pinned, try_take};
#[cfg(feature = "cudarc")]
pub use interop::check_cudarc;
#[cfg(feature = "sim")]
pub use pool::CleanerHold;
pub use pool::{ContextWaitHold, PinnedPool, PoolBuilder, ShutdownReport};
pub use raw_stream::RawStream;
pub use stats::{ClassStats, Stats};
pub use stream::AsStream;

/// The README's example, compiled.
#[cfg(all(doctest, feature = "cudarc"))]
#[doc = include_str!("../README.md")]
struct Readme;
