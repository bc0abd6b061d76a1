//! What the machine says of its memory in `/sys` and `/proc`: which NUMA nodes there are, and whether it has huge pages
//! to give.
//!
//! Files are read and nothing is called. What cannot be read says nothing, as on other systems than Linux.

use crate::error::Error;

const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
/// The switch for this one size, where the kernel has one for each; `inherit` leaves it to the other.
const TRANSPARENT_2_MIB: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled";
const STATUS: &str = "/proc/self/status";
/// Nodes with memory; older kernels have `online` only.
const NODE_LISTS: [&str; 2] = ["/sys/devices/system/node/has_memory", "/sys/devices/system/node/online"];

/// The largest number of a node that can be asked for: the largest that any kernel is built with.
pub(crate) const NODE_MAX: u32 = 1023;

fn file(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// Why advised memory gets no huge pages here; `None` when nothing speaks against them.
pub(crate) fn huge_pages_forbidden() -> Option<&'static str> {
    forbidden(file)
}

fn forbidden(read: impl Fn(&str) -> Option<String>) -> Option<&'static str> {
    let status = read(STATUS).unwrap_or_default();
    if field(&status, "THP_enabled:") == Some("0") {
        return Some("they are switched off for this process (prctl PR_SET_THP_DISABLE)");
    }
    let chosen =
        |path| read(path).and_then(|text| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned()));
    let global = chosen(TRANSPARENT);
    match chosen(TRANSPARENT_2_MIB).filter(|own| own != "inherit").or(global)?.as_str() {
        "never" => Some("/sys/kernel/mm/transparent_hugepage says never"),
        _ => None,
    }
}

/// The NUMA nodes whose memory this process may use, in order; `None` where that cannot be known.
pub(crate) fn memory_nodes() -> Option<Vec<u32>> {
    nodes(file)
}

/// Refuses a node that is not among them; `known` are they where that is known.
pub(crate) fn check_node(node: u32, known: Option<&[u32]>) -> Result<(), Error> {
    let is_known = known.is_none_or(|known| known.contains(&node));
    if is_known && node <= NODE_MAX {
        return Ok(());
    }
    let names: Vec<String> = known.unwrap_or_default().iter().map(u32::to_string).collect();
    let problem = match names.is_empty() {
        true => format!("there is no node {node}; the largest number of a node is {NODE_MAX}"),
        false => {
            format!(
                "there is no node {node} with memory for this process; the nodes are {}",
                names.join(", ")
            )
        }
    };
    Err(Error::Setting { name: "numa_node", problem })
}

fn nodes(read: impl Fn(&str) -> Option<String>) -> Option<Vec<u32>> {
    let there = NODE_LISTS.iter().find_map(|path| list(&read(path)?))?;
    // A control group (cpuset) may take some away.
    let status = read(STATUS).unwrap_or_default();
    let mine = field(&status, "Mems_allowed_list:").and_then(list);
    let allowed = |node: &u32| mine.as_ref().is_none_or(|mine| mine.contains(node));
    Some(there.into_iter().filter(allowed).collect())
}

/// `0-1,4`; `None` for what is no such list, or for an empty one.
fn list(text: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        numbers.extend(first..=last.min(NODE_MAX));
    }
    (!numbers.is_empty()).then_some(numbers)
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    Some(text.lines().find_map(|line| line.strip_prefix(name))?.trim())
}

/// The node that a device on the PCI bus is at, as the machine has it; `None` where it does not say.
pub(crate) fn node_of_pci(domain: u32, bus: u32, device: u32) -> Option<u32> {
    pci_node(file, domain, bus, device)
}

fn pci_node(read: impl Fn(&str) -> Option<String>, domain: u32, bus: u32, device: u32) -> Option<u32> {
    let path = format!("/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node");
    // -1 where the firmware does not know, or there is one node only.
    read(&path)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with these files.
    fn machine<'a>(files: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |path| files.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_owned())
    }

    #[test]
    fn huge_pages_are_forbidden_by_the_system_the_size_or_the_process() {
        let says = |files: &[(&str, &str)]| forbidden(machine(files));
        assert_eq!(says(&[]), None, "what cannot be read forbids nothing");
        for (text, is_forbidden) in [
            ("always [madvise] never\n", false),
            ("[always] madvise never\n", false),
            ("always madvise [never]\n", true),
        ] {
            assert_eq!(says(&[(TRANSPARENT, text)]).is_some(), is_forbidden, "{text}");
            let inherits = [(TRANSPARENT, text), (TRANSPARENT_2_MIB, "always [inherit] madvise never\n")];
            assert_eq!(says(&inherits).is_some(), is_forbidden, "{text}");
        }
        let own = |text| [(TRANSPARENT, "always [madvise] never"), (TRANSPARENT_2_MIB, text)];
        assert!(says(&own("always inherit madvise [never]\n")).is_some());
        let other =
            [(TRANSPARENT, "always madvise [never]"), (TRANSPARENT_2_MIB, "always inherit [madvise] never")];
        assert_eq!(says(&other), None, "the size's own switch counts");
        let off = [(STATUS, "Threads:\t1\nTHP_enabled:\t0\n"), (TRANSPARENT, "[always] madvise never")];
        assert!(says(&off).is_some_and(|why| why.contains("PR_SET_THP_DISABLE")));
    }

    #[test]
    fn nodes_are_those_with_memory_that_the_process_may_use() {
        let allowed = |files: &[(&str, &str)]| nodes(machine(files));
        assert_eq!(allowed(&[]), None);
        let [with_memory, online] = NODE_LISTS;
        assert_eq!(allowed(&[(online, "0-1\n")]), Some(vec![0, 1]));
        assert_eq!(allowed(&[(online, "0-3\n"), (with_memory, "0,2-3\n")]), Some(vec![0, 2, 3]));
        let caged = [(with_memory, "0-3\n"), (STATUS, "Mems_allowed:\t2\nMems_allowed_list:\t1-2\n")];
        assert_eq!(allowed(&caged), Some(vec![1, 2]));
        assert_eq!(allowed(&[(online, "what\n")]), None);
    }

    #[test]
    fn an_unknown_node_is_refused_with_those_that_there_are() {
        assert_eq!(check_node(1, Some(&[0, 1])), Ok(()));
        assert_eq!(check_node(1, None), Ok(()), "the kernel will tell");
        let refused = check_node(7, Some(&[0, 1])).unwrap_err().to_string();
        assert_eq!(refused, "numa_node: there is no node 7 with memory for this process; the nodes are 0, 1");
        assert!(check_node(NODE_MAX + 1, None).is_err());
    }

    #[test]
    fn a_pci_device_has_a_node_or_none() {
        let files = [
            ("/sys/bus/pci/devices/0000:3b:00.0/numa_node", "1\n"),
            ("/sys/bus/pci/devices/0001:0a:1f.0/numa_node", "-1\n"),
        ];
        assert_eq!(pci_node(machine(&files), 0, 0x3b, 0), Some(1));
        assert_eq!(pci_node(machine(&files), 1, 0x0a, 0x1f), None);
        assert_eq!(pci_node(machine(&files), 2, 0, 0), None);
    }
}
