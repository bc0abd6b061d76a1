//! CUDA in this process: whether somebody uses it already, and making it usable.
//!
//! One state for the process, as CUDA itself has. Two questions must not be confused:
//!
//! * Is CUDA *in use*? A look at what is mapped, and at whether somebody has called `cuInit`; loads and
//!   initialises nothing.
//! * *Make it usable*: loads the library and calls `cuInit(0)`, at the first real need.
//!
//! No lock is taken on a call that a `take` or a `drop` can make: the table is behind a `OnceLock`.

use super::library::{self, Answer};
use super::table::{STUB_LIBRARY, Table};
use crate::code_name::code_name;
use crate::error::{CallError, Error};
use libloading::Library;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long a failure to load is believed before the libraries are looked for again.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(10);

/// The state of CUDA in this process.
pub(super) struct Process {
    /// The library whose functions are called; set once somebody initialised it.
    chosen: OnceLock<&'static Table>,
    /// A library that was found mapped although nobody has initialised it yet.
    mapped: OnceLock<&'static Table>,
    /// What [`library::loads_so_far`] said before the last probe that found nothing.
    loads_at_last_probe: AtomicU64,
    /// The last failure of `prepare`. Only `prepare` takes this lock, which is held while the
    /// library initialises so that two threads do not both do it; no `take` or `drop` wants it.
    pub(super) failure: Mutex<Option<(Instant, String)>>,
}

pub(super) static PROCESS: Process = Process {
    chosen: OnceLock::new(),
    mapped: OnceLock::new(),
    loads_at_last_probe: AtomicU64::new(0),
    failure: Mutex::new(None),
};

impl Process {
    /// The table, if CUDA is in use; looks again for a library only when one was loaded since.
    pub(super) fn table_in_use(&self) -> Option<&'static Table> {
        if let Some(table) = self.chosen.get() {
            return Some(table);
        }
        let table = self.mapped.get().copied().or_else(|| self.probe_mapped())?;
        if !table.is_initialized() {
            return None;
        }
        self.choose(table, "a library that the process uses already");
        self.chosen.get().copied()
    }

    fn probe_mapped(&self) -> Option<&'static Table> {
        let loads = library::loads_so_far();
        if self.loads_at_last_probe.load(Ordering::Acquire) == loads {
            return None;
        }
        let configured = library::configured_library();
        let rungs = library::mapped_ladder(configured.as_deref());
        match library::climb(&rungs, library::open, |opened, _| examine(opened)) {
            Ok((table, _)) => Some(self.mapped.get_or_init(|| table)),
            Err(_) => {
                // The counter was read first: a library loaded during the probe is looked at next time.
                self.loads_at_last_probe.store(loads, Ordering::Release);
                None
            }
        }
    }

    /// Loads a library and initialises it, unless that was done before, or failed a moment ago.
    pub(super) fn load_and_initialize(&self) -> Result<(), Error> {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if self.chosen.get().is_some() {
            return Ok(());
        }
        if let Some((when, report)) = &*failure
            && when.elapsed() < RETRY_AFTER
        {
            return Err(Error::NoCuda { report: report.clone() });
        }
        let configured = library::configured_library();
        let rungs = library::ladder(configured.as_deref());
        match library::climb(&rungs, library::open, |opened, _| examine_and_initialize(opened)) {
            Ok((table, file)) => {
                *failure = None;
                self.choose(table, &file.to_string_lossy());
                Ok(())
            }
            Err(report) => {
                if failure.is_none() {
                    tracing::warn!("pinpool page-locks nothing, since no CUDA driver can be used:\n{report}");
                }
                *failure = Some((Instant::now(), report.clone()));
                Err(Error::NoCuda { report })
            }
        }
    }

    fn choose(&self, table: &'static Table, library: &str) {
        if self.chosen.set(table).is_ok() {
            let version = table.version().unwrap_or(0);
            tracing::info!(library, version, "pinpool uses CUDA");
        }
    }
}

/// Whether an opened library is a libcuda, without initialising it.
fn examine(library: Library) -> Answer<&'static Table> {
    match table_of(&library) {
        Ok(table) => Answer::Use(keep(library, table)),
        Err(reason) => Answer::PassOver(reason),
    }
}

/// The same, and initialises it: only a library that could be initialised ends the search.
fn examine_and_initialize(library: Library) -> Answer<&'static Table> {
    let table = match table_of(&library) {
        Ok(table) => keep(library, table),
        Err(reason) => return Answer::PassOver(reason),
    };
    match table.initialize() {
        Ok(()) => Answer::Use(table),
        Err(STUB_LIBRARY) => Answer::PassOver(stub("cuInit")),
        Err(code) => Answer::PassOver(CallError::new("cuInit", code).to_string()),
    }
}

fn table_of(library: &Library) -> Result<Table, String> {
    let table =
        Table::of(library).map_err(|symbol| format!("is no libcuda that can be used: it lacks {symbol}"))?;
    match table.version() {
        Ok(_) => Ok(table),
        Err(STUB_LIBRARY) => Err(stub("cuDriverGetVersion")),
        Err(code) => Err(CallError::new("cuDriverGetVersion", code).to_string()),
    }
}

fn stub(call: &str) -> String {
    format!("is the link-time stub: {call} answered {} ({STUB_LIBRARY})", code_name(STUB_LIBRARY))
}

/// Makes the table permanent. A libcuda that was used is never closed: it has threads of its own
/// and exit handlers, and the addresses in the table must stay valid for the process's whole life.
fn keep(library: Library, table: Table) -> &'static Table {
    std::mem::forget(library);
    Box::leak(Box::new(table))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    #[cfg(target_os = "linux")]
    fn a_library_that_is_not_libcuda_is_passed_over_and_says_why() {
        let other =
            library::open(library::How::Load, OsStr::new("libm.so.6")).expect("the C library has a libm");
        let Answer::PassOver(reason) = examine_and_initialize(other) else {
            panic!("libm was taken for libcuda");
        };
        assert!(reason.contains("it lacks cuInit"), "{reason}");
    }
}
