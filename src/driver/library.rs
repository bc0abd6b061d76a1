//! Finds libcuda, and says of every place that was tried what it answered.
//!
//! Two halves, so that the order can be read and tested without a library. [`ladder`] is pure: it
//! turns what is configured into rungs, in order. [`climb`] tries them with an opener that it is
//! given and keeps a line for each, also for a rung that had nothing to try.
//!
//! A library is opened with `RTLD_LOCAL` through a handle of our own, and its symbols are looked up
//! in that handle alone: a second libcuda in the process (a stub that another crate opened, the
//! fake one of the tests) can then never answer in its place. Looking whether a library is mapped
//! already (`RTLD_NOLOAD`) never loads one.

#![allow(unsafe_code)] // opens libraries, asks the dynamic linker

use libloading::Library;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;

/// The environment variable that names the one library to use.
const VARIABLE: &str = "PINPOOL_CUDA_LIBRARY";

/// The names of libcuda, the versioned one first: the bare name is often the link-time stub.
#[cfg(target_os = "linux")]
const NAMES: &[&str] = &["libcuda.so.1", "libcuda.so"];
/// Elsewhere the crate is host-only, so the rungs are empty and the report says so.
#[cfg(not(target_os = "linux"))]
const NAMES: &[&str] = &[];

/// How a rung's files are opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum How {
    /// Only if the process has the library mapped already; loads nothing.
    IfMapped,
    /// By the dynamic linker, from its search path or from the path given.
    Load,
}

/// One step of the search: files that are tried in order, in one way.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Rung {
    /// What the report calls it.
    title: &'static str,
    how: How,
    files: Vec<OsString>,
}

/// What a candidate that could be opened turned out to be.
pub(crate) enum Answer<T> {
    /// The search ends here.
    Use(T),
    /// Not usable, for this reason; the search goes on.
    PassOver(String),
}

/// What a search found, or the report of why it found nothing.
pub(crate) type Search<T> = Result<(T, OsString), String>;

/// What the user set in the environment; empty counts as not set.
pub(crate) fn configured_library() -> Option<OsString> {
    std::env::var_os(VARIABLE).filter(|value| !value.is_empty())
}

/// The whole search, in order.
///
/// A library that the user named is the only one tried, so that a wrong name is an error and not a
/// silent second choice.
pub(crate) fn ladder(configured: Option<&OsStr>) -> Vec<Rung> {
    let explicit = Rung {
        title: VARIABLE,
        how: How::Load,
        files: configured.map(OsStr::to_owned).into_iter().collect(),
    };
    if configured.is_some() {
        return vec![explicit];
    }
    vec![explicit, mapped_names(), Rung { title: "system search", how: How::Load, files: names() }]
}

/// The part of the search that loads nothing: is a library that [`ladder`] would use mapped already?
pub(crate) fn mapped_ladder(configured: Option<&OsStr>) -> Vec<Rung> {
    match configured {
        Some(file) => vec![Rung { title: VARIABLE, how: How::IfMapped, files: vec![file.to_owned()] }],
        None => vec![mapped_names()],
    }
}

fn mapped_names() -> Rung {
    Rung { title: "already loaded", how: How::IfMapped, files: names() }
}

fn names() -> Vec<OsString> {
    NAMES.iter().map(OsString::from).collect()
}

/// Tries every file of every rung until `examine` accepts one.
pub(crate) fn climb<L, T>(
    rungs: &[Rung],
    mut open: impl FnMut(How, &OsStr) -> Result<L, String>,
    mut examine: impl FnMut(L, &OsStr) -> Answer<T>,
) -> Search<T> {
    let mut report = String::new();
    if NAMES.is_empty() {
        let _ = writeln!(report, "this build of pinpool has no CUDA support on {}", std::env::consts::OS);
    }
    for rung in rungs {
        if rung.files.is_empty() {
            let _ = writeln!(report, "{}: (none)", rung.title);
        }
        for file in &rung.files {
            let answer = match open(rung.how, file) {
                Ok(library) => match examine(library, file) {
                    Answer::Use(found) => return Ok((found, file.clone())),
                    Answer::PassOver(reason) => reason,
                },
                Err(reason) => reason,
            };
            let _ = writeln!(report, "{}: {}: {answer}", rung.title, file.display());
        }
    }
    report.truncate(report.trim_end().len());
    Err(report)
}

/// The opener of the real search.
#[cfg(target_os = "linux")]
pub(crate) fn open(how: How, file: &OsStr) -> Result<Library, String> {
    use libloading::os::unix;
    let noload = match how {
        How::IfMapped => libc::RTLD_NOLOAD,
        How::Load => 0,
    };
    // SAFETY: `dlopen` runs the library's initialisers. Those of libcuda are run by every program
    // that uses CUDA, on any thread; with `RTLD_NOLOAD` none runs.
    let opened = unsafe { unix::Library::open(Some(file), libc::RTLD_LAZY | libc::RTLD_LOCAL | noload) };
    match (opened, how) {
        (Ok(library), _) => Ok(library.into()),
        (Err(_), How::IfMapped) => Err("not loaded in this process".into()),
        (Err(error), How::Load) => Err(linker_text(&error)),
    }
}

/// The opener where the crate is host-only.
#[cfg(not(target_os = "linux"))]
pub(crate) fn open(_: How, _: &OsStr) -> Result<Library, String> {
    Err("not opened: pinpool uses CUDA on Linux only".into())
}

/// What the dynamic linker said, which libloading keeps in the source of its error.
#[cfg(target_os = "linux")]
fn linker_text(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

/// How many libraries this process has loaded so far; grows with each, never falls.
///
/// As long as it stands still no library was mapped, so a probe that found nothing need not be
/// repeated. It costs no system call, unlike a probe, which searches the library path.
#[cfg(target_os = "linux")]
pub(crate) fn loads_so_far() -> u64 {
    unsafe extern "C" fn first_only(
        info: *mut libc::dl_phdr_info,
        bytes: libc::size_t,
        adds: *mut libc::c_void,
    ) -> libc::c_int {
        if bytes >= std::mem::size_of::<libc::dl_phdr_info>() {
            // SAFETY: `dl_iterate_phdr` passes a valid structure of `bytes` bytes, which covers the field.
            let count = unsafe { (*info).dlpi_adds };
            // SAFETY: the pointer is to the `u64` of the caller below, which outlives the call.
            unsafe { adds.cast::<u64>().write(count) };
        }
        // Every entry carries the same counter, so the first one ends the iteration.
        1
    }
    let mut adds = 0_u64;
    // SAFETY: the callback matches the prototype, does not unwind, and writes only to `adds`.
    unsafe { libc::dl_iterate_phdr(Some(first_only), (&raw mut adds).cast()) };
    adds
}

/// Never changes where nothing can be found.
#[cfg(not(target_os = "linux"))]
pub(crate) fn loads_so_far() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn titles(rungs: &[Rung]) -> Vec<String> {
        rungs
            .iter()
            .flat_map(|rung| rung.files.iter().map(|file| format!("{}: {}", rung.title, file.display())))
            .collect()
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_mapped_library_comes_before_one_that_must_be_loaded() {
        assert_eq!(
            titles(&ladder(None)),
            [
                "already loaded: libcuda.so.1",
                "already loaded: libcuda.so",
                "system search: libcuda.so.1",
                "system search: libcuda.so"
            ]
        );
    }

    #[test]
    fn a_named_library_is_the_only_one_tried() {
        let named = OsStr::new("/opt/other/libcuda.so.1");
        assert_eq!(titles(&ladder(Some(named))), ["PINPOOL_CUDA_LIBRARY: /opt/other/libcuda.so.1"]);
        let mapped = mapped_ladder(Some(named));
        assert_eq!(titles(&mapped), ["PINPOOL_CUDA_LIBRARY: /opt/other/libcuda.so.1"]);
        assert!(mapped.iter().all(|rung| rung.how == How::IfMapped));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_report_has_a_line_for_every_candidate_and_for_an_empty_rung() {
        let found: Search<()> = climb(
            &ladder(None),
            |how, file| match (how, file.to_str()) {
                (How::Load, Some("libcuda.so.1")) => Ok(()),
                _ => Err("absent".into()),
            },
            |(), _| Answer::PassOver("is a stub".into()),
        );
        assert_eq!(
            found.unwrap_err(),
            "PINPOOL_CUDA_LIBRARY: (none)\n\
             already loaded: libcuda.so.1: absent\n\
             already loaded: libcuda.so: absent\n\
             system search: libcuda.so.1: is a stub\n\
             system search: libcuda.so: absent"
        );
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_search_goes_on_past_a_stub_and_stops_at_the_first_that_is_accepted() {
        let mut opened = Vec::new();
        let found = climb(
            &ladder(None),
            |how, file| {
                opened.push((how, file.to_owned()));
                Ok(())
            },
            |(), file| {
                if file == "libcuda.so" { Answer::Use(7) } else { Answer::PassOver("is a stub".into()) }
            },
        );
        assert_eq!(found, Ok((7, OsString::from("libcuda.so"))));
        assert_eq!(opened.len(), 2);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_load_counter_moves_when_a_library_is_loaded_and_not_when_one_is_looked_for() {
        // The test binary links neither, and no other test of this crate's opens them.
        let (present, absent) = (OsStr::new("libresolv.so.2"), OsStr::new("libpinpool-no-such-library.so"));
        assert!(open(How::IfMapped, present).is_err(), "looking must not load it");
        let before = loads_so_far();
        if let Ok(library) = open(How::Load, present) {
            assert!(open(How::IfMapped, present).is_ok());
            assert!(loads_so_far() > before);
            drop(library);
        }
        assert!(open(How::IfMapped, absent).is_err());
    }
}
