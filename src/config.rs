//! The settings of a pool, validated.

use crate::error::Error;
use crate::limits::default_max_pooled_bytes;
use crate::placement::HugePages;
use crate::size_class::SizeClasses;
use std::fmt;
use std::time::Duration;

/// How long a block may lie on its shelf unneeded by default: longer than the pauses between the batches of
/// most programs, and short enough that the memory of a burst comes back the same hour.
pub(crate) const DEFAULT_MAX_IDLE_TIME: Duration = Duration::from_secs(300);

/// What a pool is built with; `PoolBuilder` fills it in.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) max_pooled_bytes: usize,
    pub(crate) max_registered_bytes: usize,
    /// How long a block may lie on its shelf unneeded; `None`: for ever.
    pub(crate) max_idle_time: Option<Duration>,
    /// The largest dirty prefix that a taker zeroes itself rather than miss.
    pub(crate) harvest_zero_limit_bytes: usize,
    /// How long a taker waits at most for a block that is in the cleaner's hands, besides its zeroing.
    pub(crate) harvest_wait_limit: Duration,
    /// How long `shutdown` waits for device work before it quarantines what is left.
    pub(crate) shutdown_timeout: Duration,
    pub(crate) thread_name: String,
    pub(crate) backing: Backing,
    pub(crate) huge_pages: HugePages,
    /// The NUMA node that fresh memory prefers.
    pub(crate) numa_node: Option<u32>,
    /// A miss is faulted in before it is handed out.
    pub(crate) prefault_misses: bool,
    pub(crate) size_classes: SizeClasses,
    /// How many threads touch memory for `prewarm`, its caller's among them; `None`: as many as are of use.
    pub(crate) prewarm_threads: Option<usize>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_pooled_bytes: default_max_pooled_bytes(),
            max_registered_bytes: usize::MAX,
            // In a model a sleep with a timer would hide a wake-up that is lost.
            max_idle_time: (!cfg!(loom)).then_some(DEFAULT_MAX_IDLE_TIME),
            harvest_zero_limit_bytes: usize::MAX,
            harvest_wait_limit: Duration::from_micros(100),
            shutdown_timeout: Duration::from_secs(10),
            thread_name: "pinpool-cleaner".into(),
            backing: Backing::Auto,
            huge_pages: HugePages::Advise,
            numa_node: None,
            prefault_misses: false,
            size_classes: SizeClasses::PowerOfTwo,
            prewarm_threads: None,
        }
    }
}

impl Settings {
    /// Refuses what a thread could not be named, and a time that would keep nothing.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        if self.thread_name.is_empty() || self.thread_name.contains('\0') {
            return Err(Error::Setting {
                name: "thread_name",
                problem: format!("{:?} is empty or has a NUL byte in it", self.thread_name),
            });
        }
        if self.max_idle_time == Some(Duration::ZERO) {
            return Err(Error::Setting {
                name: "max_idle_time",
                problem: "0 would keep nothing; max_pooled_bytes(0) says that, and None turns ageing off"
                    .into(),
            });
        }
        if self.prewarm_threads == Some(0) {
            return Err(Error::Setting {
                name: "prewarm_threads",
                problem: "0 threads do nothing; 1 is the one that calls `prewarm`".into(),
            });
        }
        self.size_classes.validate()
    }
}

/// What a pool page-locks; see [`PoolBuilder::backing`](crate::PoolBuilder::backing).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum Backing {
    /// The pool's own pages where they can be registered; memory of the driver's where registering is not
    /// supported (801, or the device says so); nothing where the device goes by the host's page tables, because
    /// there is nothing to gain; and nothing where nothing works.
    #[default]
    Auto,
    /// The pool's own pages, registered with the driver (`cuMemHostRegister`). A buffer keeps its address when it
    /// is page-locked.
    Registered,
    /// Memory that the driver allocates page-locked (`cuMemHostAlloc`). A fresh buffer is still pageable; after its
    /// first return one of these stands in its place.
    HostPinned,
}

/// What a pool page-locks on this machine, as far as it knows: [`Stats::backing`](crate::Stats::backing).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum BackingInUse {
    /// Nothing was page-locked yet.
    #[default]
    Undecided,
    /// The pool's own pages, registered.
    Registered,
    /// Memory of the driver's, because registering is not supported or because the settings say so.
    HostPinned,
    /// Nothing by itself: the device goes by the host's page tables (attribute 100), so any memory is as good.
    HostPageTables,
    /// Nothing: the driver supports neither way.
    Pageable,
}

impl BackingInUse {
    /// By number.
    pub(crate) const ALL: [Self; 5] =
        [Self::Undecided, Self::Registered, Self::HostPinned, Self::HostPageTables, Self::Pageable];
}

impl fmt::Display for BackingInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BackingInUse::Undecided => "nothing yet",
            BackingInUse::Registered => "its own pages, registered",
            BackingInUse::HostPinned => "memory of the driver's (cuMemHostAlloc)",
            BackingInUse::HostPageTables => "nothing: the device goes by the host's page tables",
            BackingInUse::Pageable => "nothing: the driver supports neither way",
        })
    }
}

/// Reads a number of bytes from the text of an environment variable.
pub(crate) fn parse_bytes(name: &'static str, text: &str) -> Result<usize, Error> {
    text.trim().parse().map_err(|_| Error::Setting {
        name,
        problem: format!("{text:?} is not a number of bytes (digits only, at most {})", usize::MAX),
    })
}

/// Reads a number of seconds from the text of an environment variable.
pub(crate) fn parse_seconds(name: &'static str, text: &str) -> Result<Duration, Error> {
    text.trim().parse().map(Duration::from_secs).map_err(|_| Error::Setting {
        name,
        problem: format!("{text:?} is not a number of seconds (digits only)"),
    })
}

/// Reads a switch from the text of an environment variable: 1, true, yes, on, or 0, false, no, off.
pub(crate) fn parse_switch(name: &'static str, text: &str) -> Result<bool, Error> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Ok(true),
        "" | "0" | "false" | "no" | "off" => Ok(false),
        _ => Err(Error::Setting {
            name,
            problem: format!("{text:?} is neither 1 (true, yes, on) nor 0 (false, no, off)"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_switches_are_read_or_refused_by_name() {
        assert_eq!(parse_bytes("X", " 4096 ").unwrap(), 4096);
        assert!(parse_bytes("X", "4 GiB").unwrap_err().to_string().starts_with("X: \"4 GiB\""));
        assert_eq!(parse_seconds("Z", "90").unwrap(), Duration::from_secs(90));
        assert!(parse_seconds("Z", "5 min").unwrap_err().to_string().starts_with("Z: \"5 min\""));
        assert!(parse_switch("Y", "1").unwrap() && !parse_switch("Y", "off").unwrap());
        assert!(parse_switch("Y", "maybe").is_err());
    }

    #[test]
    fn a_thread_name_that_the_system_cannot_take_is_refused() {
        let settings = Settings { thread_name: "a\0b".into(), ..Settings::default() };
        assert!(settings.validate().is_err());
    }
}
