//! How much memory this process may have: what the machine has, and what its control group allows.
//!
//! Page-locked memory cannot be swapped out, so a default that is larger than the container would end the process
//! by the out-of-memory killer although every buffer in it is idle.

use crate::sync::Ordering;
use crate::sync::fixed::AtomicUsize;

/// Idle bytes kept by default where there is memory enough: 4 GiB.
const MOST: usize = 4 << 30;

/// The default is at most this part of the memory that the process may have.
const PART: u64 = 4;

/// The default cap on idle bytes, looked up once: 4 GiB, or a quarter of what the process may have where that is less.
pub(crate) fn default_max_pooled_bytes() -> usize {
    // No lock: a child that was forked meanwhile would find it held for ever. Two threads may both look.
    static DEFAULT: AtomicUsize = AtomicUsize::new(UNKNOWN);
    const UNKNOWN: usize = usize::MAX;
    match DEFAULT.load(Ordering::Relaxed) {
        UNKNOWN => {
            let share = share_of(allowed_bytes(|path| std::fs::read_to_string(path).ok()));
            DEFAULT.store(share, Ordering::Relaxed);
            share
        }
        known => known,
    }
}

fn share_of(allowed: Option<u64>) -> usize {
    let part = allowed.map_or(u64::MAX, |bytes| bytes / PART);
    usize::try_from(part).map_or(MOST, |part| part.min(MOST))
}

/// The smallest of all limits that can be seen; `None` where nothing can be read, as on other systems than Linux.
fn allowed_bytes(read: impl Fn(&str) -> Option<String>) -> Option<u64> {
    let total = read("/proc/meminfo").as_deref().and_then(total_bytes);
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let files = limit_files(&groups);
    let limits = files.iter().filter_map(|file| limit_bytes(&read(file)?));
    limits.chain(total).min()
}

/// `MemTotal:       24652340 kB`
fn total_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// A limit as both versions write it; `None` for none, which is `max` in version 2 and in version 1 the largest number
/// of whole pages.
fn limit_bytes(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|bytes| *bytes < 1 << 60)
}

/// The files with the limits of the process's group and of all groups above it, in both versions.
///
/// A container often sees its own group as the root while `/proc/self/cgroup` gives the path on the host, whose
/// files are not there then; so the root is always among them.
fn limit_files(groups: &str) -> Vec<String> {
    let mut files = Vec::new();
    for line in groups.lines() {
        // `0::/user.slice/job` in version 2, `9:cpu,memory:/docker/4711` in version 1.
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        if controllers.is_empty() {
            add_upwards(&mut files, "/sys/fs/cgroup", path, "memory.max");
        } else if controllers.split(',').any(|controller| controller == "memory") {
            add_upwards(&mut files, "/sys/fs/cgroup/memory", path, "memory.limit_in_bytes");
        }
    }
    files
}

fn add_upwards(files: &mut Vec<String>, root: &str, path: &str, name: &str) {
    let mut group = path.trim_end_matches('/');
    while !group.is_empty() {
        files.push(format!("{root}{group}/{name}"));
        group = group.rfind('/').map_or("", |slash| &group[..slash]);
    }
    files.push(format!("{root}/{name}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MEMINFO: &str = "MemTotal:       25165824 kB\nMemFree:         1048576 kB\n";

    /// What is allowed on a machine with 24 GiB and these files.
    fn allowed(files: &[(&str, &str)]) -> Option<u64> {
        let find =
            |path: &str| files.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_owned());
        allowed_bytes(|path| if path == "/proc/meminfo" { Some(MEMINFO.to_owned()) } else { find(path) })
    }

    #[test]
    fn a_machine_without_control_groups_has_its_memory() {
        assert_eq!(allowed(&[]), Some(24 * GIB));
        assert_eq!(allowed_bytes(|_| None), None);
        assert_eq!(allowed_bytes(|_| Some("no such thing".into())), None);
    }

    #[test]
    fn version_2_takes_the_smallest_limit_on_the_way_up() {
        let job = [
            ("/proc/self/cgroup", "0::/kubepods.slice/pod1/box\n"),
            ("/sys/fs/cgroup/kubepods.slice/memory.max", "17179869184\n"),
            ("/sys/fs/cgroup/kubepods.slice/pod1/memory.max", "2147483648\n"),
            ("/sys/fs/cgroup/kubepods.slice/pod1/box/memory.max", "max\n"),
        ];
        assert_eq!(allowed(&job), Some(2 * GIB));
        assert_eq!(allowed(&job[..2]), Some(16 * GIB));
        assert_eq!(allowed(&job[..1]), Some(24 * GIB));
    }

    #[test]
    fn in_a_container_the_root_has_the_limit() {
        for groups in ["0::/\n", "0::/system.slice/docker-4711.scope\n"] {
            let files = [("/proc/self/cgroup", groups), ("/sys/fs/cgroup/memory.max", "1073741824\n")];
            assert_eq!(allowed(&files), Some(GIB), "{groups}");
        }
    }

    #[test]
    fn version_1_is_read_from_its_own_tree_also_beside_version_2() {
        let groups = "12:cpuset:/\n9:cpu,memory:/docker/4711\n1:name=systemd:/docker/4711\n0::/\n";
        let unlimited = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        let own = ("/sys/fs/cgroup/memory/docker/4711/memory.limit_in_bytes", "536870912\n");
        assert_eq!(allowed(&[("/proc/self/cgroup", groups), unlimited, own]), Some(GIB / 2));
        assert_eq!(allowed(&[("/proc/self/cgroup", groups), unlimited]), Some(24 * GIB));
    }

    #[test]
    fn the_default_is_a_quarter_and_at_most_4_gib() {
        assert_eq!(share_of(Some(2 * GIB)), 512 << 20);
        assert_eq!(share_of(Some(16 * GIB)), MOST);
        assert_eq!(share_of(Some(512 * GIB)), MOST);
        assert_eq!(share_of(None), MOST);
        assert!((1..=MOST).contains(&default_max_pooled_bytes()));
    }
}
