//! The one public error, and the failure of one driver call.
//!
//! Nothing in this file touches the driver: an error must be printable on a machine without CUDA,
//! after the driver is gone, and inside a forked child.

use crate::code_name::{code_name, runtime_code_name};
use std::fmt;
use std::path::PathBuf;

/// What went wrong, named so that a reader knows what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The size cannot be represented: its power of two, or its mapping, would not fit the address space.
    TooLarge {
        /// Bytes asked for.
        bytes: usize,
    },
    /// The operating system refused to map the memory.
    OutOfMemory {
        /// Bytes of the mapping that was refused.
        bytes: usize,
    },
    /// A driver call failed.
    Driver(CallError),
    /// No CUDA driver can be used; the text lists every library that was tried and what it answered.
    NoCuda {
        /// The reason, one probe a line.
        report: String,
    },
    /// Two files stand for one of CUDA's libraries in this process: what one of them page-locks, makes or
    /// knows, the other does not.
    LibraryMismatch {
        /// The file that pinpool uses, or was told to use.
        ours: PathBuf,
        /// The file that somebody else in this process uses or would load.
        theirs: PathBuf,
        /// Who that is: `"cudarc"`, or `"this process"` for whoever initialised CUDA first.
        user: &'static str,
    },
    /// The stream belongs to another driver than the pool's, for example a simulated stream on a real pool.
    ForeignStream {
        /// The driver that the stream belongs to.
        stream: &'static str,
        /// The driver that the pool uses.
        pool: &'static str,
        /// What the stream was given to: `"record_last_use"`, or a builder's `"context_of"`, for example.
        call: &'static str,
    },
    /// The stream is capturing a graph, where an event of the pool would prove nothing about a replay.
    Capturing,
    /// A builder setting is out of its range.
    Setting {
        /// The builder method or the environment variable.
        name: &'static str,
        /// What is wrong, and what is accepted.
        problem: String,
    },
    /// Only a context-wide wait could say whether the device is done with the buffer, and such waits are held, or
    /// would break a capture that the pool knows of.
    ContextWaitsHeld,
    /// A range does not lie in the buffer.
    Range {
        /// First element of the range.
        start: usize,
        /// One past its last.
        end: usize,
        /// Elements that there are.
        len: usize,
    },
    /// The bytes of a buffer cannot be seen as elements of this type.
    Layout {
        /// Bytes of the buffer.
        bytes: usize,
        /// The element type.
        element: &'static str,
        /// Bytes of one element.
        element_bytes: usize,
        /// What does not fit.
        problem: String,
    },
    /// This is a forked child of the process that used CUDA, where CUDA cannot be used.
    ForkedChild,
    /// Page-locking was asked for and could not be done.
    NotPinned {
        /// Bytes of the buffer.
        bytes: usize,
        /// Why, and what to do about it.
        reason: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::TooLarge { bytes } => {
                write!(
                    f,
                    "a buffer of {bytes} bytes is too large; at most {} can be represented",
                    isize::MAX / 2
                )
            }
            Error::OutOfMemory { bytes } => {
                write!(f, "the operating system refused to map {bytes} bytes")
            }
            Error::Driver(call) => call.fmt(f),
            Error::NoCuda { report } => write!(f, "no usable CUDA driver:\n{report}"),
            Error::LibraryMismatch { ours, theirs, user } => write!(
                f,
                "pinpool has {}, but {user} has {}: both must use one file. Take the wrong one (often the \
                 toolkit's stub) off the library path, or name the right one by PINPOOL_CUDA_LIBRARY",
                ours.display(),
                theirs.display()
            ),
            Error::ForeignStream { stream, pool, call } => {
                // Two simulated devices, for example, have one name.
                let article = if stream == pool { "another" } else { "the" };
                let (whose, remedy) = match *call {
                    "context_of" => ("the stream", "give the builder the stream's driver, or a stream of its own"),
                    "context" => ("the context", "give the builder the context's driver, or a context of its own"),
                    "check_cudarc" => ("a stream of cudarc's", "cudarc works with `Driver::cuda()` alone"),
                    _ => ("the stream", "use a buffer of a pool that was built with the stream's driver"),
                };
                write!(
                    f,
                    "{call}: {whose} belongs to {article} {stream} driver, and this one is the {pool} driver; {remedy}"
                )
            }
            Error::Capturing => f.write_str(
                "the stream is capturing a graph; a buffer whose copy is captured is read again at \
                 every replay, so no event can say when it is free",
            ),
            Error::Setting { name, problem } => write!(f, "{name}: {problem}"),
            Error::ContextWaitsHeld => f.write_str(
                "only a wait for a whole context could say whether the device is done with the buffer, and that is \
                 not possible now: `hold_context_waits` forbids it, or a stream of the context captures a graph, \
                 which it would break; a use that was recorded needs none",
            ),
            Error::Range { start, end, len } => {
                write!(f, "the range {start}..{end} does not lie in the {len} elements of the buffer")
            }
            Error::Layout { bytes, element, element_bytes, problem } => {
                write!(
                    f,
                    "{bytes} bytes cannot be seen as {element} of {element_bytes} bytes each: {problem}"
                )
            }
            Error::ForkedChild => f.write_str(
                "this is a forked child, where CUDA cannot be used: the streams, the events and the page-locked \
                 memory are its parent's",
            ),
            Error::NotPinned { bytes, reason } => {
                write!(f, "a buffer of {bytes} bytes could not be page-locked: {reason}")
            }
        }
    }
}

impl std::error::Error for Error {}

impl From<CallError> for Error {
    fn from(call: CallError) -> Self {
        Error::Driver(call)
    }
}

/// One driver call that did not succeed: which, and with what result code.
///
/// Prints as `cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallError {
    call: &'static str,
    code: u32,
    /// The driver's own name for the code, where it was asked when the call failed.
    named: Option<&'static str>,
}

impl CallError {
    pub(crate) fn new(call: &'static str, code: u32) -> Self {
        Self { call, code, named: None }
    }

    /// With the name that the driver itself gives to the code.
    pub(crate) fn named(call: &'static str, code: u32, named: Option<&'static str>) -> Self {
        Self { call, code, named }
    }

    /// The driver function, for example `cuEventRecord`; for a runtime library its function.
    pub fn call(&self) -> &'static str {
        self.call
    }

    /// The result code (`CUresult`, or `cudaError_t` of a runtime library), never 0.
    pub fn code(&self) -> u32 {
        self.code
    }

    /// The symbolic name of the code, from a table of our own unless the driver gave one.
    pub fn name(&self) -> &'static str {
        // The two libraries share most numbers and no name.
        let from_table = if self.call.starts_with("cuda") { runtime_code_name } else { code_name };
        self.named.unwrap_or_else(|| from_table(self.code))
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.name(), self.code)
    }
}

impl fmt::Debug for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for CallError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_failure_shows_call_name_and_number() {
        let error = Error::from(CallError::new("cuMemHostRegister_v2", 2));
        assert_eq!(error.to_string(), "cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)");
    }

    #[test]
    fn a_runtime_s_failure_has_the_runtime_s_name() {
        let error = CallError::new("cudaGetDeviceCount", 35);
        assert_eq!(error.to_string(), "cudaGetDeviceCount: cudaErrorInsufficientDriver (35)");
        assert_eq!(CallError::new("cudaHostRegister", 4711).name(), "cudaErrorUnlisted");
    }

    #[test]
    fn a_mismatch_names_both_files() {
        let error = Error::LibraryMismatch { ours: "/a/b".into(), theirs: "/c/d".into(), user: "cudarc" };
        let text = error.to_string();
        assert!(text.contains("pinpool has /a/b, but cudarc has /c/d"), "{text}");
    }

    #[test]
    fn a_size_error_names_the_size() {
        assert!(Error::TooLarge { bytes: usize::MAX }.to_string().contains(&usize::MAX.to_string()));
    }
}
