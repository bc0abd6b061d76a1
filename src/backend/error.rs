//! What a backend answers when it does not do what was asked.

use super::record::RecordFull;
use crate::error::{CallError, Error};
use std::fmt;

/// Why a backend could not be made, or why it allocated or released nothing. There is no other memory in place of
/// what was refused: which backend to try next is the caller's choice.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendError {
    /// Zero bytes, or more than an address space holds. No driver was asked.
    Size {
        /// Bytes asked for.
        bytes: usize,
    },
    /// CUDA cannot be used in this process, or there is no context to allocate in.
    Unavailable(Error),
    /// The device cannot do what this backend promises.
    Unsuitable {
        /// The backend.
        backend: &'static str,
        /// Which property of the device is missing, and what that would lead to.
        reason: String,
    },
    /// A driver call failed.
    Driver(CallError),
    /// The system has no memory for it.
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// The record of live allocations is full; the memory, which the driver had given already, was released again.
    RecordFull {
        /// How many live allocations it holds; see [`BackendBuilder::record_capacity`](super::BackendBuilder::record_capacity).
        capacity: usize,
        /// Why the driver did not take the memory back, which is leaked and counted then.
        leaked: Option<CallError>,
    },
    /// The address is no live allocation of this backend: another one gave it, or it was given back before. Nothing
    /// was done.
    NotOurs {
        /// The backend that was asked.
        backend: &'static str,
        /// The address.
        address: usize,
    },
    /// The allocation has another size. Nothing was done; it is live still.
    WrongSize {
        /// The address.
        address: usize,
        /// Its size.
        bytes: usize,
        /// The size that was stated.
        stated: usize,
    },
    /// A wait for the devices was asked for while [`PinnedPool::hold_context_waits`](crate::PinnedPool::hold_context_waits)
    /// forbids such waits. Nothing was waited for.
    ContextWaitsHeld,
    /// This is a forked child, where CUDA cannot be used; the memory is the parent's.
    ForkedChild,
}

impl BackendError {
    /// The driver's result code, when it was the driver that refused.
    pub fn code(&self) -> Option<u32> {
        match self {
            BackendError::Driver(call) | BackendError::Unavailable(Error::Driver(call)) => Some(call.code()),
            _ => None,
        }
    }

    /// Whether the machine, and not this one call, stands in the way: another call will be refused as well.
    pub fn is_permanent(&self) -> bool {
        const NOT_SUPPORTED: u32 = 801;
        match self {
            BackendError::Unavailable(_) | BackendError::Unsuitable { .. } | BackendError::ForkedChild => {
                true
            }
            BackendError::Driver(call) => call.code() == NOT_SUPPORTED,
            _ => false,
        }
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackendError::Size { bytes: 0 } => f.write_str("zero bytes are no allocation"),
            BackendError::Size { bytes } => {
                write!(f, "{bytes} bytes are too many; at most {} can be represented", isize::MAX / 2)
            }
            BackendError::Unavailable(Error::NotPinned { reason, .. }) => f.write_str(reason),
            BackendError::Unavailable(error) => error.fmt(f),
            BackendError::Unsuitable { backend, reason } => write!(f, "{backend} memory: {reason}"),
            BackendError::Driver(call) => call.fmt(f),
            BackendError::OutOfMemory { bytes } => write!(f, "the system has no {bytes} bytes"),
            BackendError::RecordFull { capacity, leaked } => {
                RecordFull { capacity: *capacity }.fmt(f)?;
                match leaked {
                    None => f.write_str("; what the driver had given was released again"),
                    Some(call) => write!(f, "; what the driver had given is leaked, for {call}"),
                }
            }
            BackendError::NotOurs { backend, address } => write!(
                f,
                "{address:#x} is no live allocation of this {backend} backend: another one gave it, or it was \
                 given back before"
            ),
            BackendError::WrongSize { address, bytes, stated } => {
                write!(f, "the allocation at {address:#x} has {bytes} bytes and not {stated}")
            }
            BackendError::ContextWaitsHeld => f.write_str(
                "not possible now: `hold_context_waits` forbids a wait for the devices; ask again when the hold is dropped",
            ),
            BackendError::ForkedChild => f.write_str("this is a forked child, where CUDA cannot be used"),
        }
    }
}

impl std::error::Error for BackendError {}

impl From<CallError> for BackendError {
    fn from(call: CallError) -> Self {
        BackendError::Driver(call)
    }
}
