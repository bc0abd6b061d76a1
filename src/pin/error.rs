//! What `pin` reports: which piece of memory, and why.

use super::Region;
use crate::error::Error;
use std::fmt;

/// Memory that could not be page-locked, or unregistered: which, and why not.
///
/// Prints as `region 2 (65536 bytes at 0x7f3a5c000000): cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinError(Box<Inner>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Inner {
    index: Option<usize>,
    region: Region,
    cause: Error,
    still_registered: Vec<PinError>,
}

impl PinError {
    /// About one piece of memory.
    pub(super) fn of(region: Region, cause: Error) -> Self {
        Self(Box::new(Inner { index: None, region, cause, still_registered: Vec::new() }))
    }

    /// About one of several.
    pub(super) fn of_nth(index: usize, region: Region, cause: Error) -> Self {
        Self(Box::new(Inner { index: Some(index), region, cause, still_registered: Vec::new() }))
    }

    /// With what the rollback could not unregister.
    pub(super) fn leaving(mut self, still_registered: Vec<PinError>) -> Self {
        self.0.still_registered = still_registered;
        self
    }

    /// Which of the regions, counted from 0; `None` where there was only one.
    pub fn index(&self) -> Option<usize> {
        self.0.index
    }

    /// The memory. Zero bytes long where only a base was given.
    pub fn region(&self) -> Region {
        self.0.region
    }

    /// Why.
    pub fn cause(&self) -> &Error {
        &self.0.cause
    }

    /// The driver's result code, when it was the driver that refused.
    pub fn code(&self) -> Option<u32> {
        match &self.0.cause {
            Error::Driver(call) => Some(call.code()),
            _ => None,
        }
    }

    /// What was registered before the failure and could not be unregistered after it: this memory has to be
    /// taken for page-locked, and must never be freed. Empty in every healthy rollback.
    pub fn still_registered(&self) -> &[PinError] {
        &self.0.still_registered
    }
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { index, region, cause, still_registered } = &*self.0;
        match index {
            Some(index) => write!(f, "region {index} ({} bytes at {:#x}): ", region.len, region.base)?,
            None if region.len == 0 => write!(f, "memory at {:#x}: ", region.base)?,
            None => write!(f, "{} bytes at {:#x}: ", region.len, region.base)?,
        }
        match cause {
            // It says which buffer, which was said already.
            Error::NotPinned { reason, .. } => f.write_str(reason)?,
            cause => cause.fmt(f)?,
        }
        if let Some(first) = still_registered.first() {
            let count = still_registered.len();
            write!(f, "; {count} of those before it could not be unregistered, the first: {first}")?;
        }
        Ok(())
    }
}

impl std::error::Error for PinError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0.cause)
    }
}

impl From<PinError> for Error {
    /// The cause alone; the region is lost.
    fn from(error: PinError) -> Self {
        error.0.cause
    }
}
