//! Tries the candidates of the ladder, and keeps what each answered.

use super::ladder::{How, Kind, Rung, Step};
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

/// What became of the search for one of CUDA's libraries: every place that was tried, in order, with what it
/// answered.
///
/// Prints as one line per probe. Plain data: printing it touches no driver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LibraryReport {
    /// `"libcuda"` or `"libcudart"`.
    pub library: &'static str,
    /// Everything that was tried, in order; the last one is the library in use, if there is one.
    pub probes: Vec<Probe>,
    /// The file of the library in use, as the dynamic linker names it.
    pub found: Option<PathBuf>,
    /// Its version as CUDA counts: 12020 is 12.2.
    pub version: Option<u32>,
}

impl fmt::Display for LibraryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&lines(&self.probes))
    }
}

/// One line of a [`LibraryReport`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Probe {
    /// The step of the search.
    pub rung: &'static str,
    /// What was tried; `None` when the step had nothing to try.
    pub place: Option<PathBuf>,
    /// What it answered: the linker's words, a driver's refusal by call, name and number, or what was chosen.
    pub answer: String,
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Some(place) => write!(f, "{}: {}: {}", self.rung, shown(place), self.answer),
            None => write!(f, "{}: {}", self.rung, self.answer),
        }
    }
}

/// One probe a line.
pub(super) fn lines(probes: &[Probe]) -> String {
    probes.iter().map(Probe::to_string).collect::<Vec<_>>().join("\n")
}

/// A path for a report of one line per probe: no control characters, and something for bytes that are no
/// UTF-8.
pub(super) fn shown(path: &Path) -> String {
    let text = path.to_string_lossy();
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(escape).collect()
}

/// What a candidate that could be opened turned out to be.
pub(super) enum Answer<T> {
    /// The search ends here; what it is.
    Use(T, String),
    /// Not usable, for this reason; the search goes on.
    PassOver(String),
}

/// Tries every candidate of every rung until `examine` accepts one. A rung that has nothing to try
/// leaves a line too.
pub(super) fn climb<L, T>(
    rungs: Vec<Rung>,
    mut open: impl FnMut(How, &OsStr) -> Result<L, String>,
    mut examine: impl FnMut(L, &Path) -> Answer<T>,
) -> (Vec<Probe>, Option<T>) {
    let mut probes = Vec::new();
    for Rung { title, steps } in rungs {
        if steps.is_empty() {
            probes.push(Probe { rung: title, place: None, answer: "(none)".into() });
        }
        for step in steps {
            let (how, file) = match step {
                Step::Open(how, file) => (how, file),
                Step::Nothing(place, answer) => {
                    probes.push(Probe { rung: title, place: Some(place), answer });
                    continue;
                }
            };
            let (answer, found) = match open(how, file.as_os_str()) {
                Ok(library) => match examine(library, &file) {
                    Answer::Use(found, what) => (what, Some(found)),
                    Answer::PassOver(reason) => (reason, None),
                },
                Err(reason) => (reason, None),
            };
            probes.push(Probe { rung: title, place: Some(file), answer });
            if found.is_some() {
                return (probes, found);
            }
        }
    }
    (probes, None)
}

/// The report of a library that was not found, or not looked for yet.
pub(super) fn not_found(kind: Kind, probes: Vec<Probe>) -> LibraryReport {
    LibraryReport { library: kind.stem(), probes, found: None, version: None }
}

/// A line that belongs to no probe.
pub(super) fn remark(answer: String) -> Probe {
    Probe { rung: "conflict", place: None, answer }
}
