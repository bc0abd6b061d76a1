//! Fresh memory for a pool: mapped as its settings ask for, and what the machine made of that, told once.

use crate::machine;
use crate::pages::{HUGE_BYTES, Pages};
use crate::placement::{HugePages, HugePagesInUse, NumaInUse, Placement};
use crate::report::say;
use crate::sync::Ordering;
use crate::sync::fixed::AtomicU32;
use std::io;

/// One pool's wishes, and what became of them.
#[derive(Debug)]
pub(crate) struct Mapper {
    placement: Placement,
    /// The node that the pages shall be on, also where there is no other and so nothing to ask for.
    node: Option<u32>,
    huge_pages: AtomicU32,
    /// Not 0 when the kernel refused the node.
    node_refused: AtomicU32,
}

impl Mapper {
    /// `nodes` are all that there are, where that is known; the node is one of them.
    pub(crate) fn new(huge_pages: HugePages, node: Option<u32>, nodes: Option<&[u32]>) -> Self {
        let is_only = |node: &u32| nodes == Some(&[*node]);
        Self {
            placement: Placement { huge_pages, node: node.filter(|node| !is_only(node)) },
            node,
            huge_pages: AtomicU32::new(HugePagesInUse::Undecided as u32),
            node_refused: AtomicU32::new(0),
        }
    }

    /// Fresh pages, all zero; `None` when the system has none.
    pub(crate) fn map(&self, bytes: usize) -> Option<Pages> {
        let (pages, refusals) = Pages::map_as(bytes, self.placement)?;
        if bytes >= HUGE_BYTES && self.huge_pages_in_use() == HugePagesInUse::Undecided {
            self.decide_huge_pages(refusals.huge_pages);
        }
        if let (Some(error), Some(node)) = (refusals.node, self.node)
            && self.node_refused.swap(1, Ordering::Relaxed) == 0
        {
            say!(WARN, "numa_refused", node, %error, "memory cannot be put on the node that was asked for");
        }
        Some(pages)
    }

    /// The same in a forked child, where nothing is looked up and nobody is told.
    pub(crate) fn map_in_child(&self, bytes: usize) -> Option<Pages> {
        Pages::map_as(bytes, self.placement).map(|(pages, _)| pages)
    }

    /// At the first large mapping, because before that nobody cares.
    #[cold]
    fn decide_huge_pages(&self, refused: Option<io::Error>) {
        let reason = match self.placement.huge_pages {
            HugePages::Never => None,
            HugePages::Advise => refused
                .map(|error| error.to_string())
                .or_else(|| machine::huge_pages_forbidden().map(str::to_owned)),
        };
        let now = match (self.placement.huge_pages, &reason) {
            (HugePages::Never, _) => HugePagesInUse::Never,
            (HugePages::Advise, Some(_)) => HugePagesInUse::Refused,
            (HugePages::Advise, None) => HugePagesInUse::Advised,
        };
        let before = self.huge_pages.swap(now as u32, Ordering::Relaxed);
        if let Some(reason) = reason
            && before == HugePagesInUse::Undecided as u32
        {
            say!(WARN, "huge_pages_refused", reason, "large buffers lie in ordinary pages, which is slower");
        }
    }

    pub(crate) fn huge_pages_in_use(&self) -> HugePagesInUse {
        HugePagesInUse::ALL[self.huge_pages.load(Ordering::Relaxed) as usize]
    }

    pub(crate) fn numa_in_use(&self) -> NumaInUse {
        match self.node {
            None => NumaInUse::Anywhere,
            Some(node) if self.node_refused.load(Ordering::Relaxed) != 0 => NumaInUse::Refused(node),
            Some(node) => NumaInUse::Node(node),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn where_there_is_one_node_only_nothing_is_asked_for() {
        let alone = Mapper::new(HugePages::Advise, Some(3), Some(&[3]));
        assert_eq!((alone.placement.node, alone.numa_in_use()), (None, NumaInUse::Node(3)));
        for nodes in [Some(&[3, 4][..]), None] {
            assert_eq!(Mapper::new(HugePages::Advise, Some(3), nodes).placement.node, Some(3));
        }
    }
}
