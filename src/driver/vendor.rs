//! NVIDIA's Python packages: where libcudart lies when no linker knows of it.
//!
//! pip puts it below `site-packages/nvidia/`, in `cuda_runtime/lib/` for CUDA 12 and in `cu13/lib/` for
//! CUDA 13, and will put it elsewhere for 14. So no component is named here: the whole vendor folder is
//! searched, for a file of the right name. conda puts it into `lib/` of the environment.

use super::folders::{Entry, Folders};
use super::ladder::{Environment, How, Kind, Request, Step};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// How deep below the vendor folder a library may lie; today it is two.
const DEPTH_MAX: usize = 6;

/// How many folders one vendor folder may have before the search of it ends; some hundred is usual.
const FOLDERS_MAX: usize = 4000;

/// The candidates beneath every root: those of the program first, then those of the environment.
pub(super) fn packages(
    kind: Kind,
    request: &Request,
    environment: &Environment,
    folders: &dyn Folders,
) -> Vec<Step> {
    let mut steps = Vec::new();
    for root in &request.vendor_roots {
        steps.extend(beneath_root(kind, root, folders));
    }
    // An empty entry of `sys.path` stands for the current folder, where nobody installs packages.
    for entry in request.python_path.iter().filter(|entry| !entry.as_os_str().is_empty()) {
        steps.extend(search(kind, &entry.join("nvidia"), folders));
    }
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(root) = environment.get(variable) {
            steps.extend(beneath_root(kind, Path::new(root), folders));
        }
    }
    let mut seen = Vec::new();
    steps.retain(|step| {
        let new = !seen.contains(step);
        seen.push(step.clone());
        new
    });
    steps
}

/// A root is an environment (`lib/python3.12/site-packages` in it), a package folder (`nvidia` in it), or
/// the vendor folder itself.
fn beneath_root(kind: Kind, root: &Path, folders: &dyn Folders) -> Vec<Step> {
    if root.file_name() == Some(OsStr::new("nvidia")) {
        return search(kind, root, folders);
    }
    let mut vendors = vec![root.join("nvidia")];
    let mut steps = Vec::new();
    for lib in ["lib", "lib64"].map(|name| root.join(name)) {
        let mut entries = folders.list(&lib).unwrap_or_default();
        entries.sort_by(|one, other| one.name.cmp(&other.name));
        let is_python =
            |entry: &&Entry| entry.is_folder && entry.name.as_encoded_bytes().starts_with(b"python");
        for python in entries.iter().filter(is_python) {
            let packages = ["site-packages", "dist-packages"].map(|name| lib.join(&python.name).join(name));
            vendors.extend(packages.map(|packages| packages.join("nvidia")));
        }
        // conda's own packages.
        steps.extend(files_of(kind, &lib, &entries));
    }
    let exists =
        |folder: &PathBuf| folders.list(folder).map_or_else(|e| e.kind() != ErrorKind::NotFound, |_| true);
    let existing: Vec<&PathBuf> = vendors.iter().filter(|folder| exists(folder)).collect();
    for vendor in &existing {
        steps.extend(search(kind, vendor, folders));
    }
    if steps.is_empty() {
        // A root with nothing in it is said once, and not once for each place where it could have been.
        let what = match folders.list(root) {
            Ok(_) => "has no folder nvidia".into(),
            Err(error) => unreadable(&error),
        };
        steps.push(Step::Nothing(root.to_owned(), what));
    }
    steps
}

/// The libraries right in one folder, or one line that says why there are none.
pub(super) fn flat(kind: Kind, folder: &Path, folders: &dyn Folders) -> Vec<Step> {
    match folders.list(folder) {
        Ok(entries) => {
            let found = files_of(kind, folder, &entries);
            if found.is_empty() { vec![nothing_in(kind, folder)] } else { found }
        }
        Err(error) => vec![Step::Nothing(folder.to_owned(), unreadable(&error))],
    }
}

/// Every library beneath a vendor folder, the newest version first; a line for each folder that could
/// not be read, and one when there was nothing.
fn search(kind: Kind, vendor: &Path, folders: &dyn Folders) -> Vec<Step> {
    let mut walk = Walk { kind, folders, visited: BTreeSet::new(), found: Vec::new(), remarks: Vec::new() };
    walk.folder(vendor, 0);
    let Walk { mut found, mut remarks, visited, .. } = walk;
    if visited.len() >= FOLDERS_MAX {
        remarks.push(Step::Nothing(
            vendor.into(),
            format!("has more than {FOLDERS_MAX} folders; not all searched"),
        ));
    }
    found.sort_by(|one, other| {
        let version = |file: &PathBuf| version_of(file.file_name().unwrap_or_default());
        version(other).cmp(&version(one)).then_with(|| one.cmp(other))
    });
    let mut steps: Vec<Step> = found.into_iter().map(|file| Step::Open(How::Load, file)).collect();
    steps.append(&mut remarks);
    if steps.is_empty() { vec![nothing_in(kind, vendor)] } else { steps }
}

struct Walk<'a> {
    kind: Kind,
    folders: &'a dyn Folders,
    /// Folders by what they are and not by name, so that a link back up ends there.
    visited: BTreeSet<(u64, u64)>,
    found: Vec<PathBuf>,
    remarks: Vec<Step>,
}

impl Walk<'_> {
    fn folder(&mut self, folder: &Path, depth: usize) {
        if self.visited.len() >= FOLDERS_MAX {
            return;
        }
        // Where the system cannot tell, the depth alone ends a circle.
        if let Some(identity) = self.folders.identity(folder)
            && !self.visited.insert(identity)
        {
            return;
        }
        let mut entries = match self.folders.list(folder) {
            Ok(entries) => entries,
            Err(error) => return self.remarks.push(Step::Nothing(folder.to_owned(), unreadable(&error))),
        };
        entries.sort_by(|one, other| one.name.cmp(&other.name));
        for entry in entries {
            let path = folder.join(&entry.name);
            if entry.is_folder {
                // Headers are many folders and no library.
                if depth < DEPTH_MAX && entry.name != "include" {
                    self.folder(&path, depth + 1);
                }
            } else if self.kind.is_called(&entry.name) {
                self.found.push(path);
            }
        }
    }
}

fn files_of(kind: Kind, folder: &Path, entries: &[Entry]) -> Vec<Step> {
    let is_ours = |entry: &&Entry| !entry.is_folder && kind.is_called(&entry.name);
    let mut names: Vec<&OsString> = entries.iter().filter(is_ours).map(|entry| &entry.name).collect();
    names.sort_by(|one, other| version_of(other).cmp(&version_of(one)).then_with(|| one.cmp(other)));
    names.into_iter().map(|name| Step::Open(How::Load, folder.join(name))).collect()
}

/// The version in a file name, for comparing: `libcudart.so.12.9` is `[12, 9]`, no version is lowest.
fn version_of(name: &OsStr) -> Vec<u64> {
    let bytes = name.as_encoded_bytes();
    let after = bytes.windows(4).position(|window| window == b".so.").map_or(bytes.len(), |at| at + 4);
    numbers(&bytes[after..])
}

/// Numbers between dots; what is no number counts as 0.
pub(super) fn numbers(text: &[u8]) -> Vec<u64> {
    let parts = text.split(|byte| *byte == b'.').filter(|part| !part.is_empty());
    parts.map(|part| std::str::from_utf8(part).ok().and_then(|part| part.parse().ok()).unwrap_or(0)).collect()
}

fn nothing_in(kind: Kind, folder: &Path) -> Step {
    Step::Nothing(folder.to_owned(), format!("has no {} in it", kind.stem()))
}

fn unreadable(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => "no such folder".into(),
        _ => format!("cannot be read: {error}"),
    }
}
