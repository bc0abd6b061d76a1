//! How CUDA's libraries are looked for, as a program may set it.

use super::Driver;
use super::cuda::CudaDriver;
use super::ladder::{Kind, Request, chooses};
use super::library::chosen_by_environment;
use super::runtime::RuntimeDriver;
use std::path::PathBuf;
use std::sync::Arc;

/// Settings of the search for CUDA's libraries; see [`Driver::builder`].
///
/// ```
/// use pinpool::{Driver, PinnedPool};
///
/// // A Python extension hands in the interpreter's `sys.path`.
/// let sys_path = ["/opt/app/lib/python3.12/site-packages"];
/// let driver = Driver::builder().python_path(sys_path).build();
/// let pool = PinnedPool::builder().driver(driver).build()?;
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "settings do nothing before `build`"]
pub struct DriverBuilder {
    request: Request,
    runtime: bool,
}

impl DriverBuilder {
    /// The one library to use, a path or a name for the dynamic linker; nothing else is tried. Comes before
    /// `PINPOOL_CUDA_LIBRARY`.
    ///
    /// A file whose name begins with `libcudart` is used as a runtime, as with [`runtime`](Self::runtime).
    pub fn library(mut self, path: impl Into<PathBuf>) -> Self {
        self.request.library = Some(path.into());
        self
    }

    /// Where NVIDIA's Python packages (and with them libcudart) may be installed: environments
    /// (`/opt/venv`), package folders (`.../site-packages`) or `nvidia` folders. Looked into before `VIRTUAL_ENV`
    /// and `CONDA_PREFIX`.
    pub fn vendor_roots(mut self, roots: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        self.request.vendor_roots.extend(roots.into_iter().map(Into::into));
        self
    }

    /// The running Python's `sys.path`, for a host program that has one: a folder `nvidia` in an entry is
    /// searched for libcudart.
    pub fn python_path(mut self, entries: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        self.request.python_path.extend(entries.into_iter().map(Into::into));
        self
    }

    /// Uses the runtime library (libcudart) and not the driver library (libcuda).
    ///
    /// For a process that carries only a runtime, for example one that forwards its calls to another machine.
    /// Everywhere else the driver library is the better choice, and the default: cudarc's streams belong to it, it
    /// can hold a context alive, and it can say which devices are in use without using them.
    ///
    /// On a runtime, streams are recorded as [`RawStream::of_runtime`](crate::RawStream::of_runtime), and where no
    /// libcuda is in use in the process either, the pool knows only the devices that it was shown, by such a
    /// record or by [`PoolBuilder::context_of`](crate::PoolBuilder::context_of).
    pub fn runtime(mut self) -> Self {
        self.runtime = true;
        self
    }

    /// The driver. Opens and initialises nothing, as [`Driver::auto`].
    pub fn build(self) -> Driver {
        let by_name = self.request.library.clone().or_else(chosen_by_environment);
        let is_runtime = self.runtime || by_name.is_some_and(|file| chooses(&file) == Kind::Runtime);
        match is_runtime {
            true => Driver::from_api(Arc::new(RuntimeDriver::new(self.request))),
            false => Driver::from_api(Arc::new(CudaDriver::new(self.request))),
        }
    }
}
