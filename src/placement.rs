//! How the memory of a pool lies in the machine: in pages of which size, and on which NUMA node.

use std::{fmt, io};

/// Whether large buffers shall lie in huge pages; see [`PoolBuilder::huge_pages`](crate::PoolBuilder::huge_pages).
///
/// Memory that an administrator has reserved (hugetlbfs) is no choice here; `docs/architecture.md` says why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum HugePages {
    /// Buffers of 2 MiB and more are aligned to 2 MiB, and the kernel is advised to use huge pages
    /// (`MADV_HUGEPAGE`). Where the machine forbids them everything works, with ordinary pages.
    #[default]
    Advise,
    /// Ordinary pages, also where the machine gives huge ones to everybody (`MADV_NOHUGEPAGE`): for large buffers of
    /// which little is written at first, since the first byte written to a huge page costs 2 MiB of zeroing.
    Never,
}

/// What became of [`HugePages`] on this machine: [`Stats::huge_pages`](crate::Stats::huge_pages).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum HugePagesInUse {
    /// No buffer of 2 MiB or more was mapped yet.
    #[default]
    Undecided,
    /// They are advised, and nothing that can be seen speaks against them.
    Advised,
    /// Ordinary pages, because the settings say so.
    Never,
    /// Ordinary pages, because the machine forbids huge ones. The event `huge_pages_refused` has the reason.
    Refused,
}

impl HugePagesInUse {
    /// By number.
    pub(crate) const ALL: [Self; 4] = [Self::Undecided, Self::Advised, Self::Never, Self::Refused];
}

impl fmt::Display for HugePagesInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            HugePagesInUse::Undecided => "no large buffer yet",
            HugePagesInUse::Advised => "huge pages advised",
            HugePagesInUse::Never => "no huge pages, as set",
            HugePagesInUse::Refused => "no huge pages, which this machine forbids",
        })
    }
}

/// Where the memory of a pool lies: [`Stats::numa`](crate::Stats::numa).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum NumaInUse {
    /// Wherever the kernel puts it: on the node of the thread that first touches it, unless the process has a policy.
    #[default]
    Anywhere,
    /// On this node, as long as it has memory free.
    Node(u32),
    /// Wherever the kernel puts it: this node was asked for, and the kernel refused. The event `numa_refused` has
    /// the reason.
    Refused(u32),
}

impl fmt::Display for NumaInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NumaInUse::Anywhere => f.write_str("on any node"),
            NumaInUse::Node(node) => write!(f, "on node {node}"),
            NumaInUse::Refused(node) => write!(f, "on any node, since node {node} was refused"),
        }
    }
}

/// What is asked of the kernel for a fresh mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Placement {
    pub(crate) huge_pages: HugePages,
    /// The node that it shall prefer.
    pub(crate) node: Option<u32>,
}

/// What the kernel refused of it; the mapping is good all the same.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    pub(crate) huge_pages: Option<io::Error>,
    pub(crate) node: Option<io::Error>,
}
