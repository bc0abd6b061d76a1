//! CUDA in this process: whether somebody uses it already, and making it usable.
//!
//! One state for the process and for each of CUDA's libraries, as CUDA itself has. Two questions must not be
//! confused:
//!
//! * Is it *in use*? A look at what is loaded, and at whether somebody has initialised it; loads and
//!   initialises nothing. Whoever chose another library does not change the answer: device work goes
//!   through the one that is in use, and the pool must wait for it.
//! * *Make it usable*: climbs the ladder and initialises, at the first real need.
//!
//! No lock is taken on a call that a `take` or a `drop` can make: what was found is behind `OnceLock`s.

use super::exit::{self, FirstUse};
use super::ladder::{Kind, Request};
use super::library;
use super::runtime_table::RuntimeTable;
use super::search::{Answer, LibraryReport, Probe, climb, lines, not_found};
use super::table::Table;
use crate::error::{CallError, Error};
use crate::os::ProcessMark;
use crate::report::say;
use libloading::Library;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long a failure to load is believed before the libraries are looked for again.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(10);

/// What every function of the toolkit's link-time stub answers.
const STUB_LIBRARY: u32 = 34;

/// A library's functions.
pub(super) trait Entries: Sized + Sync + Send + 'static {
    /// The table of this library, or why it is none.
    fn of(library: &Library) -> Result<Self, String>;

    /// An address inside the library.
    fn address(&self) -> usize;

    /// Its version; asks without initialising, so that a stub is known before it is asked for more.
    fn version(&self) -> Result<u32, CallError>;

    /// Whether somebody in this process has initialised it.
    fn is_initialized(&self) -> bool;

    /// Initialises it; makes no context.
    fn initialize(&self) -> Result<(), CallError>;
}

/// A library that can be called; never closed, so that the table stays valid for the process's whole life.
pub(super) struct Found<T> {
    pub(super) table: T,
    /// As the dynamic linker names it.
    pub(super) file: PathBuf,
    version: u32,
}

/// The state of one of CUDA's libraries in this process.
pub(super) struct Process<T: Entries> {
    kind: Kind,
    /// The library whose functions are called, and how it was found; set once it is initialised.
    chosen: OnceLock<(&'static Found<T>, Vec<Probe>)>,
    /// Libraries that are loaded although nobody has initialised them yet.
    loaded: [OnceLock<&'static Found<T>>; 4],
    /// What [`library::loads_so_far`] said before the last look that found nothing in use.
    /// In which process `chosen` was set: CUDA works only where it was initialised, not in a forked child.
    chosen_in: ProcessMark,
    loads_at_last_look: AtomicU64,
    /// The last failure of `prepare`. Only `prepare` takes this lock, which is held while the
    /// library initialises so that two threads do not both do it; no `take` or `drop` wants it.
    pub(super) failure: Mutex<Option<Failure>>,
}

/// A search that found nothing.
pub(super) struct Failure {
    request: Request,
    pub(super) when: Instant,
    probes: Vec<Probe>,
}

/// libcuda.
pub(super) static DRIVER: Process<Table> = Process::new(Kind::Driver);

/// libcudart.
pub(super) static RUNTIME: Process<RuntimeTable> = Process::new(Kind::Runtime);

impl<T: Entries> Process<T> {
    const fn new(kind: Kind) -> Self {
        Self {
            kind,
            chosen: OnceLock::new(),
            loaded: [const { OnceLock::new() }; 4],
            chosen_in: ProcessMark::new(),
            loads_at_last_look: AtomicU64::new(0),
            failure: Mutex::new(None),
        }
    }

    /// Whether a process that this one is a forked child of used it.
    pub(super) fn is_inherited(&self) -> bool {
        self.chosen_in.is_inherited()
    }

    /// The table, if the library is in use; looks again only when a library was loaded since.
    pub(super) fn table_in_use(&self) -> Option<&'static T> {
        self.in_use().map(|found| &found.table)
    }

    pub(super) fn in_use(&self) -> Option<&'static Found<T>> {
        if let Some((found, _)) = self.chosen.get() {
            return (!self.chosen_in.is_inherited()).then_some(found);
        }
        self.look_at_loaded();
        let loaded = self.loaded.iter().map_while(|slot| slot.get());
        let found = *loaded.into_iter().find(|found| found.table.is_initialized())?;
        let what = "in use in this process already".to_owned();
        let place = Some(found.file.clone());
        if self.choose(found, vec![Probe { rung: "mapped into this process", place, answer: what }]) {
            say_found(found);
        }
        self.chosen.get().map(|(found, _)| *found)
    }

    fn look_at_loaded(&self) {
        let loads = library::loads_so_far();
        if self.loads_at_last_look.load(Ordering::Acquire) == loads {
            return;
        }
        climb(library::loaded_here(self.kind), library::open, |opened, file| {
            if let Ok(found) = examine::<T>(self.kind, &opened, file) {
                self.remember(opened, found);
            }
            // On to the next: the first that is loaded need not be the one that is in use.
            Answer::<()>::PassOver(String::new())
        });
        // The counter was read first: a library loaded during the look is looked at next time.
        self.loads_at_last_look.store(loads, Ordering::Release);
    }

    fn remember(&self, library: Library, found: Found<T>) {
        let address = found.table.address();
        let mut found = Some(keep(library, found));
        for slot in &self.loaded {
            let kept = slot.get_or_init(|| found.take().expect("taken once"));
            if found.is_none() || kept.table.address() == address {
                return;
            }
        }
    }

    /// Loads a library and initialises it, unless that was done before, or failed a moment ago.
    pub(super) fn load_and_initialize(&self, request: &Request) -> Result<(), Error> {
        if self.chosen_in.is_inherited() {
            // Before the lock, which another thread of the parent may have held.
            return Err(Error::ForkedChild);
        }
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((found, _)) = self.chosen.get() {
            return self.is_the_chosen(request, &found.file);
        }
        if let Some(failure) = &*failure
            && failure.request == *request
            && failure.when.elapsed() < RETRY_AFTER
        {
            return Err(Error::NoCuda { report: lines(&failure.probes) });
        }
        let rungs = library::rungs_here(self.kind, request);
        match climb(rungs, library::open, |opened, file| self.examine_and_initialize(opened, file)) {
            (probes, Some(found)) => {
                *failure = None;
                let is_first = self.choose(found, probes);
                // Whoever listens may ask for the same lock.
                drop(failure);
                if is_first {
                    say_found(found);
                }
                Ok(())
            }
            (probes, None) => {
                let library = self.kind.stem();
                let is_first = failure.is_none();
                let report = lines(&probes);
                *failure = Some(Failure { request: request.clone(), when: Instant::now(), probes });
                drop(failure);
                if is_first {
                    say!(
                        WARN,
                        "cuda_missing",
                        library,
                        report,
                        "pinpool page-locks nothing: no library can be used"
                    );
                }
                Err(Error::NoCuda { report })
            }
        }
    }

    /// Whether what is in use is what was chosen by name, if anything was.
    pub(super) fn is_the_chosen(&self, request: &Request, in_use: &Path) -> Result<(), Error> {
        let by_name = request.library.clone().or_else(library::chosen_by_environment);
        match by_name.filter(|file| super::ladder::chooses(file) == self.kind) {
            Some(file) if !library::stands_for(&file, in_use) => {
                Err(Error::LibraryMismatch { ours: file, theirs: in_use.to_owned(), user: "this process" })
            }
            _ => Ok(()),
        }
    }

    /// What was looked for and found so far.
    pub(super) fn report(&self) -> LibraryReport {
        if let Some((found, probes)) = self.chosen.get() {
            let (file, version) = (found.file.clone(), found.version);
            let (found, version) = (Some(file), Some(version));
            return LibraryReport { library: self.kind.stem(), probes: probes.clone(), found, version };
        }
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        not_found(self.kind, failure.as_ref().map(|failure| failure.probes.clone()).unwrap_or_default())
    }

    /// Whether an opened library is the one looked for, and can be initialised: only that ends the search.
    fn examine_and_initialize(&self, library: Library, file: &Path) -> Answer<&'static Found<T>> {
        let found = match examine::<T>(self.kind, &library, file) {
            Ok(found) => keep(library, found),
            // Closed again. Of the stub nothing was used, and as long as it is open its inner name,
            // libcuda.so.1, would answer whoever asks for the real one.
            Err(reason) => return Answer::PassOver(reason),
        };
        match found.table.initialize() {
            Ok(()) => {
                let version = version_text(found.version);
                Answer::Use(found, format!("used: {}, version {version}", super::search::shown(&found.file)))
            }
            Err(error) => Answer::PassOver(refusal(self.kind, &error)),
        }
    }

    /// True the first time.
    fn choose(&self, found: &'static Found<T>, probes: Vec<Probe>) -> bool {
        let is_first = self.chosen.set((found, probes)).is_ok();
        if is_first {
            self.chosen_in.set();
            exit::watch(FirstUse::Initialised);
        }
        is_first
    }
}

fn say_found<T>(found: &Found<T>) {
    let (library, version) = (found.file.display(), found.version);
    say!(INFO, "cuda_found", %library, version, "pinpool uses CUDA");
}

/// Whether an opened library is the one looked for, without initialising it.
fn examine<T: Entries>(kind: Kind, library: &Library, file: &Path) -> Result<Found<T>, String> {
    let table = T::of(library)?;
    let version = table.version().map_err(|error| refusal(kind, &error))?;
    let file = library::file_of(table.address()).unwrap_or_else(|| file.to_owned());
    Ok(Found { table, file, version })
}

fn refusal(kind: Kind, error: &CallError) -> String {
    let (call, name) = (error.call(), error.name());
    match (kind, error.code()) {
        (Kind::Driver, STUB_LIBRARY) => {
            format!("is the link-time stub: {call} answered {name} ({STUB_LIBRARY})")
        }
        // A runtime loads a libcuda of its own choice, by its bare name.
        (Kind::Runtime, STUB_LIBRARY) => format!("{error}: the libcuda that it found is the link-time stub"),
        _ => error.to_string(),
    }
}

/// Makes it permanent. A library that was used is never closed: it has threads of its own
/// and exit handlers, and the addresses in the table must stay valid for the process's whole life.
fn keep<T: Entries>(library: Library, found: Found<T>) -> &'static Found<T> {
    std::mem::forget(library);
    Box::leak(Box::new(found))
}

/// 12020 as "12.2".
fn version_text(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::ladder::How;
    use std::ffi::OsStr;

    #[test]
    #[cfg(target_os = "linux")]
    fn a_library_that_is_not_libcuda_is_passed_over_and_says_why() {
        let other = library::open(How::Load, OsStr::new("libm.so.6")).expect("the C library has a libm");
        let answer = DRIVER.examine_and_initialize(other, Path::new("libm.so.6"));
        let Answer::PassOver(reason) = answer else { panic!("libm was taken for libcuda") };
        assert_eq!(reason, "is no libcuda: it lacks cuInit");
    }

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!((version_text(12020), version_text(13000)), ("12.2".into(), "13.0".into()));
    }
}
