//! The search for CUDA's libraries as data: which files are tried, in which order, in which way.
//!
//! [`ladder`] decides the order from what it is given and opens nothing, so that the order can be read,
//! and asserted as a list, on any machine. `search.rs` tries the candidates.
//!
//! The order, and why:
//!
//! 1. What somebody chose by name. A wrong name is an error and not a silent second choice, so nothing
//!    follows it.
//! 2. What the process has mapped already: another copy beside it would be a second, separate CUDA.
//! 3. For libcudart, NVIDIA's Python packages, which put it where no linker looks.
//! 4. The names that the dynamic linker knows, the versioned one first: the bare name is a development
//!    link, and on build machines it is the stub. Each is first looked for among what is loaded.
//! 5. The folders where distributions put it without telling the linker.

use super::folders::Folders;
use super::vendor;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// The environment variable that names the one library to use.
pub(super) const VARIABLE: &str = "PINPOOL_CUDA_LIBRARY";

/// The variables that the search reads.
pub(super) const VARIABLES: [&str; 5] = [VARIABLE, "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"];

/// The part of the environment that the search reads; a variable that is empty counts as not set.
pub(super) type Environment = BTreeMap<&'static str, OsString>;

/// Which of CUDA's libraries is looked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// The driver library, which comes with the kernel module.
    Driver,
    /// The runtime library, which comes with a toolkit, a Python package or an application.
    Runtime,
}

impl Kind {
    /// The name without version, as a report shows it.
    pub(super) fn stem(self) -> &'static str {
        match self {
            Kind::Driver => "libcuda",
            Kind::Runtime => "libcudart",
        }
    }

    /// The names that the dynamic linker is asked for, in order.
    pub(super) fn names(self) -> &'static [&'static str] {
        match self {
            Kind::Driver => &["libcuda.so.1", "libcuda.so"],
            Kind::Runtime => &["libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"],
        }
    }

    /// Whether a file is called like this library: `libcudart.so.12`, `libcudart.so`, and
    /// `libcudart-9335f6a2.so.12`, as wheels that carry a copy of their own rename it.
    pub(super) fn is_called(self, file_name: &OsStr) -> bool {
        let name = file_name.as_encoded_bytes();
        let Some(rest) = name.strip_prefix(self.stem().as_bytes()) else { return false };
        let rest = match rest.strip_prefix(b"-") {
            Some(hash) => &hash[hash.iter().take_while(|byte| byte.is_ascii_hexdigit()).count()..],
            None => rest,
        };
        let Some(version) = rest.strip_prefix(b".so") else { return false };
        version.is_empty()
            || version.starts_with(b".") && version.iter().all(|byte| byte.is_ascii_digit() || *byte == b'.')
    }
}

/// How a candidate is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum How {
    /// Only if the process has it loaded; loads nothing.
    IfLoaded,
    /// For real.
    Load,
}

/// One line of the report to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// A candidate to open.
    Open(How, PathBuf),
    /// A place that has no candidate, and why.
    Nothing(PathBuf, String),
}

/// One step of the search: a title and what is tried under it, perhaps nothing.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Rung {
    pub(super) title: &'static str,
    pub(super) steps: Vec<Step>,
}

/// What a program asked for ([`DriverBuilder`](super::DriverBuilder)).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Request {
    pub(super) library: Option<PathBuf>,
    pub(super) vendor_roots: Vec<PathBuf>,
    pub(super) python_path: Vec<PathBuf>,
}

/// What the search knows of the process and the machine, read beforehand.
pub(super) struct Surroundings<'a> {
    /// The text of `/proc/self/maps`, or why it cannot be read.
    pub(super) maps: Result<&'a [u8], String>,
    /// Files that the dynamic linker itself has loaded under one of the names, or under a name like it:
    /// knows libraries whose file has another name, and works without `/proc`.
    pub(super) linked: &'a [PathBuf],
    pub(super) environment: &'a Environment,
    /// As `std::env::consts::ARCH`.
    pub(super) architecture: &'a str,
}

/// Every rung, in order. Opens nothing; lists folders through `folders` alone.
pub(super) fn ladder(
    kind: Kind,
    request: &Request,
    around: &Surroundings<'_>,
    folders: &dyn Folders,
) -> Vec<Rung> {
    let from_environment = around.environment.get(VARIABLE).map(PathBuf::from);
    let choices = [("DriverBuilder::library", request.library.clone()), (VARIABLE, from_environment)];
    let mut rungs = Vec::new();
    for (title, choice) in choices {
        match choice {
            Some(file) if chooses(&file) == kind => {
                return vec![Rung { title, steps: vec![Step::Open(How::Load, file)] }];
            }
            Some(file) => {
                let answer = format!("is no choice of a {}", kind.stem());
                rungs.push(Rung { title, steps: vec![Step::Nothing(file, answer)] });
            }
            None => rungs.push(Rung { title, steps: Vec::new() }),
        }
    }
    rungs.push(Rung { title: "mapped into this process", steps: mapped(kind, around) });
    if kind == Kind::Runtime {
        let steps = vendor::packages(kind, request, around.environment, folders);
        rungs.push(Rung { title: "vendor packages", steps });
    }
    for name in kind.names() {
        for (title, how) in [("loaded under this name", How::IfLoaded), ("by name", How::Load)] {
            rungs.push(Rung { title, steps: vec![Step::Open(how, PathBuf::from(name))] });
        }
    }
    rungs.push(Rung { title: "well-known folders", steps: well_known(kind, around, folders) });
    rungs
}

/// Which library a name that somebody chose stands for; only its file name is looked at.
pub(super) fn chooses(file: &Path) -> Kind {
    let name = file.file_name().unwrap_or_default().as_encoded_bytes();
    if name.starts_with(b"libcudart") { Kind::Runtime } else { Kind::Driver }
}

/// The libraries that the process has mapped, by absolute path, in the order of their addresses; then
/// those that only the dynamic linker knows to be ours.
pub(super) fn mapped(kind: Kind, around: &Surroundings<'_>) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut add = |step: Step| {
        if !steps.contains(&step) {
            steps.push(step);
        }
    };
    match &around.maps {
        Ok(text) => {
            let files = text.split(|byte| *byte == b'\n').filter_map(mapped_file);
            let ours = files.filter(|file| kind.is_called(file.file_name().unwrap_or_default()));
            ours.for_each(|file| add(Step::Open(How::IfLoaded, file)));
        }
        Err(reason) => add(Step::Nothing("/proc/self/maps".into(), format!("cannot be read: {reason}"))),
    }
    around.linked.iter().for_each(|file| add(Step::Open(How::IfLoaded, file.clone())));
    steps
}

/// The file of one line of `/proc/self/maps`: what follows address, permissions, offset, device and
/// inode, spaces included. A file that was deleted or replaced since is named as it was.
fn mapped_file(line: &[u8]) -> Option<PathBuf> {
    let mut rest = line;
    for _ in 0..5 {
        rest = rest.trim_ascii_start();
        rest = &rest[rest.iter().position(u8::is_ascii_whitespace)?..];
    }
    let path = rest.trim_ascii_start();
    let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
    path.starts_with(b"/").then(|| path_of_bytes(path))
}

#[cfg(unix)]
fn path_of_bytes(path: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    PathBuf::from(OsStr::from_bytes(path))
}

#[cfg(not(unix))]
fn path_of_bytes(path: &[u8]) -> PathBuf {
    PathBuf::from(String::from_utf8_lossy(path).into_owned())
}

/// Where distributions, containers and subsystems put libcuda, for one architecture.
fn driver_folders(architecture: &str) -> Vec<PathBuf> {
    let multiarch = format!("/usr/lib/{architecture}-linux-gnu");
    let mut all = vec![
        multiarch.clone(),                     // Debian, Ubuntu
        format!("{multiarch}/nvidia/current"), // Debian, where alternatives do not show it
        "/usr/lib64".into(),                   // RHEL, Fedora, SUSE
        "/usr/lib".into(),                     // Arch
        "/usr/local/nvidia/lib64".into(),      // GKE, Container-Optimized OS, old nvidia-docker
        "/.singularity.d/libs".into(),         // Singularity, Apptainer
        "/usr/lib/wsl/lib".into(),             // WSL 2
        "/run/opengl-driver/lib".into(),       // NixOS
        "/usr/local/cuda/compat".into(),       // forward compatibility packages
    ];
    if architecture == "aarch64" {
        // Jetson, old and new.
        all.extend([format!("{multiarch}/tegra"), format!("{multiarch}/nvidia")]);
    }
    all.into_iter().map(PathBuf::from).collect()
}

fn runtime_folders(around: &Surroundings<'_>, folders: &dyn Folders) -> Vec<PathBuf> {
    let homes = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| around.environment.get(name));
    let mut all: Vec<PathBuf> = homes.map(|home| Path::new(home).join("lib64")).collect();
    all.push("/usr/local/cuda/lib64".into());
    // Toolkits of one version each, the newest first.
    let local = Path::new("/usr/local");
    let mut versions: Vec<(Vec<u64>, PathBuf)> = folders
        .list(local)
        .unwrap_or_default()
        .into_iter()
        .filter_map(|entry| {
            let version = entry.name.as_encoded_bytes().strip_prefix(b"cuda-")?;
            Some((vendor::numbers(version), local.join(&entry.name).join("lib64")))
        })
        .collect();
    versions.sort_by(|one, other| other.cmp(one));
    all.extend(versions.into_iter().map(|(_, folder)| folder));
    all.push("/opt/cuda/lib64".into());
    all.push(format!("/usr/lib/{}-linux-gnu", around.architecture).into());
    all.push("/usr/lib64".into());
    let mut seen = Vec::new();
    all.retain(|folder| {
        let new = !seen.contains(folder);
        seen.push(folder.clone());
        new
    });
    all
}

fn well_known(kind: Kind, around: &Surroundings<'_>, folders: &dyn Folders) -> Vec<Step> {
    match kind {
        // One file each, so that the report names the very path that was missing.
        Kind::Driver => {
            let files = driver_folders(around.architecture).into_iter().map(|f| f.join("libcuda.so.1"));
            files.map(|file| Step::Open(How::Load, file)).collect()
        }
        // The version is part of every name, so the folders are looked through.
        Kind::Runtime => runtime_folders(around, folders)
            .into_iter()
            .flat_map(|folder| vendor::flat(kind, &folder, folders))
            .collect(),
    }
}
