//! What the machine says of itself without any driver: files to read, nothing to call.

use pinpool::{Driver, HugePagesInUse, PinnedPool};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Facts; `None` where the system does not say.
pub struct Machine {
    pub kernel: Option<String>,
    pub wsl: bool,
    pub container: Option<&'static str>,
    /// Bytes that the control group allows.
    pub memory_limit: Option<u64>,
    pub memory_total: Option<u64>,
    /// `RLIMIT_MEMLOCK`, soft, in the system's words.
    pub memlock_limit: Option<String>,
    /// The first line of the kernel module's version, where it is loaded.
    pub kernel_module: Option<String>,
    pub device_nodes: Vec<&'static str>,
    pub huge_pages: Option<String>,
    pub huge_pages_defrag: Option<String>,
    pub large_buffer: LargeBuffer,
    /// The kernel's list, for example `0-1`.
    pub memory_nodes: Option<String>,
    pub visible_devices: Vec<(&'static str, String)>,
}

impl Machine {
    pub fn look() -> Self {
        let kernel = line("/proc/version");
        let wsl = kernel.as_deref().is_some_and(|text| text.to_lowercase().contains("microsoft"));
        let nodes = ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/dxg", "/dev/nvhost-gpu"];
        let variables = ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"];
        Self {
            wsl,
            kernel,
            container: container(),
            memory_limit: memory_limit(),
            memory_total: kib("/proc/meminfo", "MemTotal:"),
            memlock_limit: field("/proc/self/limits", "Max locked memory").map(|rest| {
                let words: Vec<&str> = rest.split_whitespace().collect();
                words.first().map_or(String::new(), |soft| (*soft).to_owned())
            }),
            kernel_module: line("/proc/driver/nvidia/version"),
            device_nodes: nodes.into_iter().filter(|node| Path::new(node).exists()).collect(),
            huge_pages: chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
            huge_pages_defrag: chosen("/sys/kernel/mm/transparent_hugepage/defrag"),
            large_buffer: LargeBuffer::look(),
            memory_nodes: line("/sys/devices/system/node/has_memory"),
            visible_devices: variables
                .into_iter()
                .filter_map(|n| Some((n, std::env::var(n).ok()?)))
                .collect(),
        }
    }

    /// Whether anything speaks for an NVIDIA driver in the kernel. `/dev/nvidiactl` does not: a libcuda that
    /// root runs makes it, also where there is no module.
    pub fn has_kernel_driver(&self) -> bool {
        self.kernel_module.is_some() || self.device_nodes.iter().any(|node| *node != "/dev/nvidiactl")
    }

    pub fn lines(&self) -> Vec<String> {
        let or_unknown = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".into());
        let bytes = |value: Option<u64>| value.map_or("no limit known".into(), super::page::bytes);
        let mut lines = vec![
            format!("kernel: {}", or_unknown(&self.kernel)),
            match &self.kernel_module {
                Some(version) => format!("NVIDIA kernel module: {version}"),
                None => "NVIDIA kernel module: not loaded, or not visible here".into(),
            },
            match self.device_nodes.is_empty() {
                true => "device nodes: none".into(),
                false => format!("device nodes: {}", self.device_nodes.join(" ")),
            },
            format!("container: {}", self.container.unwrap_or("no sign of one")),
            format!("WSL: {}", if self.wsl { "yes" } else { "no" }),
            format!(
                "memory: {}; control group limit: {}",
                bytes(self.memory_total),
                bytes(self.memory_limit)
            ),
            format!(
                "RLIMIT_MEMLOCK: {} (limits mlock; CUDA's page-locking does not go by it)",
                or_unknown(&self.memlock_limit)
            ),
            format!(
                "transparent huge pages: {}, defrag {} (pinpool advises them for 2 MiB and more; \
                 `never` makes page-locking slower)",
                or_unknown(&self.huge_pages),
                or_unknown(&self.huge_pages_defrag)
            ),
            self.large_buffer.line(),
            format!("NUMA nodes with memory: {}", or_unknown(&self.memory_nodes)),
        ];
        lines.extend(self.visible_devices.iter().map(|(name, value)| format!("{name}={value}")));
        lines
    }

    pub fn json(&self) -> Value {
        json!({
            "kernel": self.kernel,
            "kernel_module": self.kernel_module,
            "device_nodes": self.device_nodes,
            "container": self.container,
            "wsl": self.wsl,
            "memory_total_bytes": self.memory_total,
            "memory_limit_bytes": self.memory_limit,
            "memlock_limit": self.memlock_limit,
            "transparent_huge_pages": self.huge_pages,
            "transparent_huge_pages_defrag": self.huge_pages_defrag,
            "large_buffer": {
                "bytes": LARGE_BYTES,
                "huge_pages": format!("{:?}", self.large_buffer.huge_pages),
                "huge_bytes": self.large_buffer.huge_bytes,
            },
            "memory_nodes": self.memory_nodes,
            "visible_devices": self.visible_devices.iter().map(|(n, v)| format!("{n}={v}")).collect::<Vec<_>>(),
        })
    }
}

const LARGE_BYTES: usize = 64 << 20;

/// A large buffer of a pool, written from end to end.
pub struct LargeBuffer {
    pub huge_pages: HugePagesInUse,
    /// How much of it the kernel says to lie in huge pages.
    pub huge_bytes: Option<usize>,
}

impl LargeBuffer {
    fn look() -> Self {
        let pool = PinnedPool::builder().driver(Driver::host_only()).build();
        let Ok(pool) = pool else { return Self { huge_pages: HugePagesInUse::Undecided, huge_bytes: None } };
        let Ok(mut buffer) = pool.try_take(LARGE_BYTES) else {
            return Self { huge_pages: pool.stats().huge_pages, huge_bytes: None };
        };
        buffer.fill(1);
        Self { huge_pages: pool.stats().huge_pages, huge_bytes: huge_bytes(&buffer) }
    }

    fn line(&self) -> String {
        let total = super::page::bytes(LARGE_BYTES as u64);
        match self.huge_bytes {
            Some(huge) => {
                let huge = super::page::bytes(huge as u64);
                format!("a buffer of {total}: {}; {huge} of it lie in huge pages", self.huge_pages)
            }
            None => format!("a buffer of {total}: {}", self.huge_pages),
        }
    }
}

/// How much of the mappings that these bytes lie in is in huge pages.
fn huge_bytes(bytes: &[u8]) -> Option<usize> {
    let (start, end) = (bytes.as_ptr() as usize, bytes.as_ptr() as usize + bytes.len());
    let maps = fs::read_to_string("/proc/self/smaps").ok()?;
    let hex = |digits| usize::from_str_radix(digits, 16).ok();
    let (mut is_in, mut huge) = (false, 0);
    for line in maps.lines() {
        let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        if let Some((from, to)) = range.and_then(|(from, to)| Some((hex(from)?, hex(to)?))) {
            is_in = from < end && start < to;
        } else if is_in && let Some(kib) = line.strip_prefix("AnonHugePages:") {
            huge += kib.trim().trim_end_matches("kB").trim().parse::<usize>().ok()? << 10;
        }
    }
    Some(huge.min(bytes.len()))
}

fn container() -> Option<&'static str> {
    let signs =
        [("/.dockerenv", "docker"), ("/run/.containerenv", "podman"), ("/.singularity.d", "singularity")];
    let by_file = signs.into_iter().find(|(sign, _)| Path::new(sign).exists()).map(|(_, name)| name);
    by_file.or_else(|| std::env::var_os("KUBERNETES_SERVICE_HOST").map(|_| "kubernetes"))
}

/// The smallest limit that can be seen; version 2 of control groups, then 1.
fn memory_limit() -> Option<u64> {
    let files = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limit: u64 = files.iter().find_map(|file| line(file)?.parse().ok())?;
    // "No limit" of version 1 is a number near the largest one.
    (limit < 1 << 60).then_some(limit)
}

fn line(file: &str) -> Option<String> {
    Some(fs::read_to_string(file).ok()?.lines().next()?.to_owned())
}

/// What follows a name in a file of names and values.
pub fn field(file: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    Some(text.lines().find_map(|line| line.strip_prefix(name))?.trim().to_owned())
}

/// The same for a value in KiB, in bytes.
pub fn kib(file: &str, name: &str) -> Option<u64> {
    Some(field(file, name)?.trim_end_matches("kB").trim().parse::<u64>().ok()? << 10)
}

/// The word in brackets: `always [madvise] never`.
fn chosen(file: &str) -> Option<String> {
    let text = line(file)?;
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}
