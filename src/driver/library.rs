//! The dynamic linker: opens libraries, and says which file something came from.
//!
//! A library is opened with `RTLD_LOCAL` through a handle of our own, and its symbols are looked up
//! in that handle alone: a second libcuda in the process (a stub that another crate opened, the
//! fake one of the tests) can then never answer in its place. Looking whether a library is loaded
//! (`RTLD_NOLOAD`) never loads one.

#![allow(unsafe_code)] // opens libraries, asks the dynamic linker

use super::folders::RealFolders;
use super::ladder::{Environment, How, Kind, Request, Rung, Surroundings, VARIABLES, ladder, mapped};
use libloading::Library;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The whole search, for this process as it is now. Reads, lists and asks; opens nothing.
pub(super) fn rungs_here(kind: Kind, request: &Request) -> Vec<Rung> {
    let maps = std::fs::read("/proc/self/maps").map_err(|error| error.to_string());
    let (linked, environment) = (linked(kind), environment());
    let around = Surroundings {
        maps: maps.as_deref().map_err(Clone::clone),
        linked: &linked,
        environment: &environment,
        architecture: std::env::consts::ARCH,
    };
    ladder(kind, request, &around, &RealFolders)
}

/// The part of the search that loads nothing: what of this kind has the process loaded already? Asks the
/// linker and not `/proc`, since it runs on a caller's thread.
pub(super) fn loaded_here(kind: Kind) -> Vec<Rung> {
    let linked = linked(kind);
    let environment = Environment::new();
    let around = Surroundings { maps: Ok(b""), linked: &linked, environment: &environment, architecture: "" };
    vec![Rung { title: "mapped into this process", steps: mapped(kind, &around) }]
}

fn environment() -> Environment {
    let set = VARIABLES.iter().filter_map(|name| Some((*name, std::env::var_os(name)?)));
    set.filter(|(_, value)| !value.is_empty()).collect()
}

/// What the environment chose, if it chose anything.
pub(super) fn chosen_by_environment() -> Option<PathBuf> {
    environment().get(VARIABLES[0]).map(PathBuf::from)
}

/// The opener of the real search.
#[cfg(target_os = "linux")]
pub(super) fn open(how: How, file: &OsStr) -> Result<Library, String> {
    use libloading::os::unix;
    if let Some(reason) = cannot_be_a_library(how, Path::new(file)) {
        return Err(reason);
    }
    let noload = match how {
        How::IfLoaded => libc::RTLD_NOLOAD,
        How::Load => 0,
    };
    // SAFETY: `dlopen` runs the library's initialisers. Those of libcuda are run by every program
    // that uses CUDA, on any thread; with `RTLD_NOLOAD` none runs.
    let opened = unsafe { unix::Library::open(Some(file), libc::RTLD_LAZY | libc::RTLD_LOCAL | noload) };
    match (opened, how) {
        (Ok(library), _) => Ok(library.into()),
        (Err(_), How::IfLoaded) => Err("not loaded in this process".into()),
        (Err(error), How::Load) => Err(linker_text(&error, file)),
    }
}

/// The opener where the crate is host-only.
#[cfg(not(target_os = "linux"))]
pub(super) fn open(_: How, _: &OsStr) -> Result<Library, String> {
    Err("not opened: pinpool uses CUDA on Linux only".into())
}

/// What the linker must not be given: it would wait for ever on a pipe. Only for paths; a bare name is
/// looked for by the linker itself.
#[cfg(target_os = "linux")]
fn cannot_be_a_library(how: How, file: &Path) -> Option<String> {
    if !file.as_os_str().as_encoded_bytes().contains(&b'/') {
        return None;
    }
    match std::fs::metadata(file) {
        Ok(found) if found.is_dir() => Some("is a folder".into()),
        Ok(found) if !found.is_file() => Some("is no regular file".into()),
        Ok(_) => None,
        // A library whose file is gone can still be loaded; the linker knows it by this name.
        Err(_) if how == How::IfLoaded => None,
        Err(error) => Some(error.to_string()),
    }
}

/// What the dynamic linker said, which libloading keeps in the source of its error, without the file
/// name that stands before it in a report anyway.
#[cfg(target_os = "linux")]
fn linker_text(error: &libloading::Error, file: &OsStr) -> String {
    let text = match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    };
    let prefix = format!("{}: ", file.to_string_lossy());
    text.strip_prefix(&prefix).unwrap_or(&text).to_owned()
}

/// The files that the linker has loaded under one of the names, or under a name like them.
#[cfg(target_os = "linux")]
fn linked(kind: Kind) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = Vec::new();
    let mut add = |file: PathBuf| {
        if !files.contains(&file) {
            files.push(file);
        }
    };
    for file in loaded_files() {
        if kind.is_called(file.file_name().unwrap_or_default()) {
            add(file);
        }
    }
    for name in kind.names() {
        // Its file may have any name: what counts is the name inside it.
        if let Some(file) = loaded_under(OsStr::new(name)) {
            add(file);
        }
    }
    files
}

#[cfg(not(target_os = "linux"))]
fn linked(_: Kind) -> Vec<PathBuf> {
    Vec::new()
}

/// Calls `look` for each loaded object, until it says that it has seen enough.
#[cfg(target_os = "linux")]
fn each_loaded(mut look: impl FnMut(&libc::dl_phdr_info) -> bool) {
    /// A closure behind a pointer that C can carry.
    type Look<'a> = &'a mut dyn FnMut(&libc::dl_phdr_info) -> bool;

    unsafe extern "C" fn forward(
        info: *mut libc::dl_phdr_info,
        bytes: libc::size_t,
        look: *mut libc::c_void,
    ) -> libc::c_int {
        if bytes < std::mem::size_of::<libc::dl_phdr_info>() {
            return 1;
        }
        // SAFETY: the pointer is to the closure below, which outlives `dl_iterate_phdr`.
        let look = unsafe { &mut *look.cast::<Look<'_>>() };
        // SAFETY: `dl_iterate_phdr` passes a valid structure, and it covers the type.
        let info = unsafe { &*info };
        libc::c_int::from(look(info))
    }
    let mut look: Look<'_> = &mut look;
    // SAFETY: the callback matches the prototype; the closures given here do not unwind.
    unsafe { libc::dl_iterate_phdr(Some(forward), (&raw mut look).cast()) };
}

/// The names of all loaded objects, as the linker keeps them.
#[cfg(target_os = "linux")]
fn loaded_files() -> Vec<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let mut files = Vec::new();
    each_loaded(|object| {
        if !object.dlpi_name.is_null() {
            // SAFETY: the linker's own string, valid during the call.
            let name = unsafe { std::ffi::CStr::from_ptr(object.dlpi_name) };
            files.push(PathBuf::from(OsStr::from_bytes(name.to_bytes())));
        }
        false
    });
    files
}

/// How many libraries this process has loaded so far; grows with each, never falls.
///
/// As long as it stands still no library was mapped, so a probe that found nothing need not be
/// repeated. It costs no system call, unlike a probe, which searches the library path.
#[cfg(target_os = "linux")]
pub(super) fn loads_so_far() -> u64 {
    let mut adds = 0;
    // Every object carries the same counter, so the first one is enough.
    each_loaded(|object| {
        adds = object.dlpi_adds;
        true
    });
    adds
}

/// Never changes where nothing can be found.
#[cfg(not(target_os = "linux"))]
pub(super) fn loads_so_far() -> u64 {
    0
}

/// The file that an address of this process belongs to, as the linker names it (`dladdr`).
#[cfg(target_os = "linux")]
pub(crate) fn file_of(address: usize) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    // SAFETY: all-zero is a valid `Dl_info`: pointers that may be null.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `dladdr` takes any address, and writes the structure when it belongs to a loaded object.
    let found = unsafe { libc::dladdr(address as *const libc::c_void, &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: `dladdr` succeeded, so this is the linker's own string for an object that is loaded.
    let name = unsafe { std::ffi::CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// Nothing is loaded where the crate is host-only.
#[cfg(not(target_os = "linux"))]
pub(crate) fn file_of(_: usize) -> Option<PathBuf> {
    None
}

/// The file of an open library, by a function that it has.
fn origin_of(library: &Library) -> Option<PathBuf> {
    ["cuInit", "cudaRuntimeGetVersion"].iter().find_map(|symbol| {
        // SAFETY: the symbol is only turned into a number.
        let found = unsafe { library.get::<unsafe extern "C" fn()>(*symbol) }.ok()?;
        file_of(*found as usize)
    })
}

/// Whether two paths are one file: the same name, or the same file under two names.
pub(crate) fn is_same_file(one: &Path, other: &Path) -> bool {
    use super::folders::Folders;
    let identity = |path: &Path| RealFolders.identity(path);
    one == other || matches!((identity(one), identity(other)), (Some(a), Some(b)) if a == b)
}

/// Whether a name that somebody chose, a path or a bare name, stands for a file that is loaded.
pub(super) fn stands_for(name: &Path, file: &Path) -> bool {
    let is_bare = name.components().count() == 1 && !name.is_absolute();
    is_same_file(name, file)
        || is_bare && loaded_under(name.as_os_str()).is_some_and(|f| is_same_file(&f, file))
}

/// Which file the linker would open under a name, or its answer: opens and closes it. The library must have
/// the function, since the caller means to call it.
#[cfg(feature = "cudarc")]
pub(crate) fn would_open(name: &OsStr, function: &str) -> Result<PathBuf, String> {
    let library = open(How::Load, name)?;
    // SAFETY: the symbol is only turned into a number.
    match unsafe { library.get::<unsafe extern "C" fn()>(function) } {
        Ok(found) => file_of(*found as usize).ok_or_else(|| "has no file name".to_owned()),
        Err(_) => Err(format!("lacks {function}")),
    }
}

/// The file that is loaded under a name; loads nothing.
pub(crate) fn loaded_under(name: &OsStr) -> Option<PathBuf> {
    origin_of(&open(How::IfLoaded, name).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn the_load_counter_moves_when_a_library_is_loaded_and_not_when_one_is_looked_for() {
        // The test binary links neither, and no other test of this crate's opens them.
        let (present, absent) = (OsStr::new("libresolv.so.2"), OsStr::new("libpinpool-no-such-library.so"));
        assert!(open(How::IfLoaded, present).is_err(), "looking must not load it");
        let before = loads_so_far();
        if let Ok(library) = open(How::Load, present) {
            assert!(open(How::IfLoaded, present).is_ok());
            assert!(loads_so_far() > before);
            drop(library);
        }
        assert!(open(How::IfLoaded, absent).is_err());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn an_address_is_traced_to_its_file() {
        let file = file_of(libc::getpid as *const () as usize).expect("libc is a loaded object");
        assert!(file.to_string_lossy().contains("libc.so"), "{file:?}");
        assert_eq!(file_of(16), None);
    }

    #[test]
    #[cfg(unix)]
    fn a_link_and_its_target_are_one_file() {
        assert!(is_same_file(Path::new("/proc/self/exe"), &std::env::current_exe().unwrap()));
        assert!(!is_same_file(Path::new("/proc/self/exe"), Path::new("/nonexistent")));
        assert!(is_same_file(Path::new("/nonexistent"), Path::new("/nonexistent")));
    }
}
