//! A background pool of page-locked ("pinned") host buffers for copies to a GPU.
//!
//! A caller takes a buffer, fills it, enqueues a copy, records the last use on its stream and drops the guard.
//! Everything slow (waiting for the device, page-locking, re-zeroing, giving memory back) happens on threads of the
//! pool, off the caller's path.
//!
//! * [`take`] and the other functions here use the process-wide pool; [`PinnedPool`] is a pool of one's own.
//! * [`PinnedBuffer`] says what may be done with a buffer, and what it costs to forget something.
//! * [`safety`] says what each way to copy is known to be doing, and what the caller still owes.
//! * [`architecture`] tells how it works and what it promises.
//! * [`pin`] page-locks memory that you own already; [`regions`] tells what is page-locked.
//! * [`backend`] is memory of the driver's for allocators and arenas, of several kinds.
//! * [`operations`] says what to watch, what each number means, and which events are told through `tracing`.
//! * [`mutation`] tells which planted faults the tests find in the files that hand memory over, and which they do not.
//! * [`pinning`] tells what page-locking is and what it costs; [`performance`] what the pool costs, and how to tune it.
//! * [`finding_cuda`] tells where CUDA's libraries are looked for, and what to do when page-locking does not engage.
//! * With feature `sim`, `sim` is a simulated device, to test staging code on a machine without a GPU.
//!
//! Without CUDA everything works with plain memory:
//!
//! ```
//! use std::io::Write;
//!
//! let mut buffer = pinpool::take(300);
//! assert_eq!(buffer.len(), 512);
//! assert!(buffer.iter().all(|byte| *byte == 0));
//! buffer.writer().write_all(b"staged")?;
//! drop(buffer); // back to the pool, which zeroes six bytes
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! # The modules
//!
//! Bottom up; a file imports only from layers below its own, and a test checks it:
//!
//! 0: code_name error sync quarantine
//! 1: os limits placement machine size_class zero pages pace config stats clock report
//! 2: driver stream raw_stream sim
//! 3: spawn contexts backing mapper driver_pages holds captures events notes regions fate block dirty
//! 4: inbox bell pending boundary shelf queues sleepers pause
//! 5: home
//! 6: context_end registrar harvest buffer views waiting
//! 7: lanes
//! 8: cleaner
//! 9: pool pin backend
//! 10: global interop
//! 11: models

#[doc = include_str!("../docs/architecture.md")]
pub mod architecture {}

#[doc = include_str!("../docs/safety.md")]
pub mod safety {}

#[doc = include_str!("../docs/performance.md")]
pub mod performance {}

#[doc = include_str!("../docs/pinning.md")]
pub mod pinning {}

#[doc = include_str!("../docs/finding-cuda.md")]
pub mod finding_cuda {}

#[doc = include_str!("../docs/operations.md")]
pub mod operations {}

#[doc = include_str!("../docs/mutation.md")]
pub mod mutation {}

mod code_name;
mod error;
mod quarantine;
mod sync;

mod clock;
mod config;
mod limits;
mod machine;
mod os;
mod pace;
mod pages;
mod placement;
mod report;
mod size_class;
mod stats;
mod zero;

pub mod driver;
mod raw_stream;
#[cfg(feature = "sim")]
pub mod sim;
mod stream;

mod backing;
mod block;
mod captures;
mod contexts;
mod dirty;
mod driver_pages;
mod events;
mod fate;
mod holds;
mod mapper;
mod notes;
pub mod regions;
mod spawn;

mod bell;
mod boundary;
mod inbox;
mod pause;
mod pending;
mod queues;
mod shelf;
mod sleepers;

mod home;

mod buffer;
mod context_end;
mod harvest;
mod registrar;
mod views;
mod waiting;

mod lanes;

mod cleaner;

pub mod backend;
#[doc = include_str!("../docs/pinning-your-own-memory.md")]
pub mod pin;
mod pool;

mod global;
mod interop;

#[cfg(loom)]
#[doc(hidden)]
pub mod models;

pub use backend::is_cuda_available;
pub use buffer::PinnedBuffer;
pub use config::{Backing, BackingInUse};
pub use dirty::Writer;
pub use driver::Driver;
pub use error::{CallError, Error};
pub use global::{
    clear, drain, global, init_global, max_pooled_bytes, prewarm, set_max_pooled_bytes, shutdown, stats,
    take, take_exact, take_pinned, take_unzeroed, trim_to, try_take,
};
pub use holds::GraphHold;
#[cfg(feature = "cudarc")]
pub use interop::{Pending, check_cudarc, copy_h2d_async};
pub use placement::{HugePages, HugePagesInUse, NumaInUse};
#[cfg(feature = "sim")]
pub use pool::CleanerHold;
pub use pool::{ContextWaitHold, PinnedPool, PoolBuilder, ShutdownReport};
pub use raw_stream::RawStream;
pub use size_class::SizeClasses;
pub use stats::{ClassStats, Stats};
pub use stream::AsStream;
pub use views::{View, ViewMut};
pub use waiting::Wait;

/// The README's example, compiled.
#[cfg(all(doctest, feature = "cudarc"))]
#[doc = include_str!("../README.md")]
struct Readme;
