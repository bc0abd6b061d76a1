//! A machine made of a list, for the tests of the ladder's order.

use super::shown;
use crate::driver::folders::{Entry, Folders};
use crate::driver::ladder::{Environment, Kind, Request, Rung, Surroundings, ladder};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// What is mapped, what is set, and which folders hold what.
#[derive(Default)]
pub struct Machine {
    pub maps: &'static str,
    pub linked: Vec<PathBuf>,
    pub environment: Environment,
    pub request: Request,
    /// Files; a name that ends in `/` is an empty folder, and one that ends in `!` cannot be read.
    pub files: Vec<&'static str>,
    /// Links to folders: from, to.
    pub links: BTreeMap<&'static str, &'static str>,
    pub arm: bool,
}

impl Machine {
    pub fn rungs(&self, kind: Kind) -> Vec<Rung> {
        let architecture = if self.arm { "aarch64" } else { "x86_64" };
        let (linked, environment) = (&self.linked[..], &self.environment);
        let around = Surroundings { maps: Ok(self.maps.as_bytes()), linked, environment, architecture };
        ladder(kind, &self.request, &around, self)
    }

    /// The whole ladder, one candidate a line, as far as the first rung of names.
    pub fn before_names(&self, kind: Kind) -> Vec<String> {
        let all = shown(&self.rungs(kind));
        let end = all.iter().position(|line| line.starts_with("loaded under this name")).unwrap_or(all.len());
        all[..end].to_vec()
    }

    fn resolved(&self, folder: &Path) -> PathBuf {
        let mut path = folder.to_owned();
        for _ in 0..40 {
            let behind = |(from, to): (&&str, &&str)| Some(Path::new(to).join(path.strip_prefix(from).ok()?));
            match self.links.iter().find_map(behind) {
                // Without the slash that joining nothing leaves.
                Some(next) => path = next.components().collect(),
                None => break,
            }
        }
        path
    }
}

impl Folders for Machine {
    fn list(&self, folder: &Path) -> io::Result<Vec<Entry>> {
        let folder = self.resolved(folder);
        let mut entries: BTreeMap<OsString, bool> = BTreeMap::new();
        let mut exists = false;
        for file in &self.files {
            if file.strip_suffix('!').is_some_and(|locked| Path::new(locked) == folder) {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            let Ok(inside) = Path::new(file.trim_end_matches(['/', '!'])).strip_prefix(&folder) else {
                continue;
            };
            exists = true;
            let mut parts = inside.components();
            if let Some(first) = parts.next() {
                let is_folder = parts.next().is_some() || file.ends_with(['/', '!']);
                *entries.entry(first.as_os_str().to_owned()).or_default() |= is_folder;
            }
        }
        for from in self.links.keys() {
            if let Ok(inside) = Path::new(from).strip_prefix(&folder)
                && inside.components().count() == 1
            {
                entries.insert(inside.as_os_str().to_owned(), true);
            }
        }
        if !exists {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(entries.into_iter().map(|(name, is_folder)| Entry { name, is_folder }).collect())
    }

    fn identity(&self, folder: &Path) -> Option<(u64, u64)> {
        let path = self.resolved(folder);
        let hash =
            path.as_os_str().as_encoded_bytes().iter().fold(7_u64, |hash, byte| {
                hash.wrapping_mul(1_099_511_628_211).wrapping_add(u64::from(*byte))
            });
        Some((1, hash))
    }
}
