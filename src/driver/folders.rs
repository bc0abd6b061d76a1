//! Looking into folders, behind a seam: a test can be a machine that this one is not.

use std::ffi::OsString;
use std::io;
use std::path::Path;

/// One entry of a folder.
pub(super) struct Entry {
    pub(super) name: OsString,
    /// A folder, or a link to one.
    pub(super) is_folder: bool,
}

/// What the search asks of a file system.
pub(super) trait Folders {
    /// The entries of a folder, in any order.
    fn list(&self, folder: &Path) -> io::Result<Vec<Entry>>;

    /// What is the same for two paths to one folder, where the system can tell.
    fn identity(&self, folder: &Path) -> Option<(u64, u64)>;
}

/// The file system of this machine.
pub(super) struct RealFolders;

impl Folders for RealFolders {
    fn list(&self, folder: &Path) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            // One unreadable entry does not hide its neighbours.
            let Ok(entry) = entry else { continue };
            let is_folder = match entry.file_type() {
                Ok(kind) if kind.is_symlink() => entry.path().is_dir(),
                Ok(kind) => kind.is_dir(),
                Err(_) => false,
            };
            entries.push(Entry { name: entry.file_name(), is_folder });
        }
        Ok(entries)
    }

    #[cfg(unix)]
    fn identity(&self, folder: &Path) -> Option<(u64, u64)> {
        use std::os::unix::fs::MetadataExt;
        let found = std::fs::metadata(folder).ok()?;
        Some((found.dev(), found.ino()))
    }

    #[cfg(not(unix))]
    fn identity(&self, _: &Path) -> Option<(u64, u64)> {
        None
    }
}
