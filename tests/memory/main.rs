//! Where the memory of buffers lies: huge pages and NUMA nodes as asked for, and everything as usual where the machine
//! refuses, which is told once.
#![cfg(target_os = "linux")]

#[path = "../common/mod.rs"]
mod common;
mod kernel;
#[path = "../tracing/listener.rs"]
#[allow(dead_code)]
mod listener;
mod prewarm;
mod touch;

use common::{KIB, MIB, Rig};
use kernel::{ADVISE_HUGE, MBIND, huge_bytes, policy_of, refusing};
use listener::{Turn, listen};
use pinpool::sim::Sim;
use pinpool::{Driver, Error, HugePages, HugePagesInUse, NumaInUse, PinnedPool, PoolBuilder};
use tracing::Level;

const LARGE: usize = 8 * MIB;
/// The kernel takes it for no node at all on any machine that this runs on.
const NOWHERE: u32 = 1000;
const PREFERRED: i32 = libc::MPOL_PREFERRED;

/// As the suites' own, and fast without optimisation too.
fn all_zero(bytes: &[u8]) -> bool {
    bytes.chunks(4 * KIB).all(|chunk| chunk == &[0; 4 * KIB][..chunk.len()])
}

fn host_pool(settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> PinnedPool {
    settings(PinnedPool::builder().driver(Driver::host_only())).build().unwrap()
}

/// A pool on a machine that seems to have these nodes.
fn rig_with_nodes(nodes: &[u32], node: u32) -> Rig {
    Rig::with(Sim::builder().memory_nodes(nodes).build(), |builder| builder.numa_node(node))
}

/// Events of this name, each with its level and its fields.
fn said(turn: &Turn, name: &str) -> Vec<(Level, String)> {
    let heard = turn.heard().into_iter().filter(|heard| heard.name == name);
    heard.map(|heard| (heard.level, heard.values.join(" "))).collect()
}

/// Taken, written, page-locked by the cleaner, and zero when it is taken again.
fn goes_its_way(rig: &Rig, bytes: usize) {
    let mut buffer = rig.pool.take(bytes);
    assert!(all_zero(&buffer));
    buffer.fill(7);
    drop(buffer);
    rig.drain();
    let buffer = rig.pool.take(bytes);
    assert!(buffer.is_pinned() && all_zero(&buffer), "{:#?}", rig.pool.stats());
    drop(buffer);
    rig.drain();
}

#[test]
fn large_buffers_lie_in_huge_pages_unless_the_settings_or_the_machine_say_otherwise() {
    let _turn = listen(); // on a machine that forbids them this is told
    let pool = host_pool(|builder| builder);
    assert_eq!(pool.stats().huge_pages, HugePagesInUse::Undecided);
    drop(pool.take(MIB));
    assert_eq!(pool.stats().huge_pages, HugePagesInUse::Undecided, "1 MiB is not large");
    let mut buffer = pool.take(LARGE);
    buffer.fill(1);
    match pool.stats().huge_pages {
        HugePagesInUse::Advised => assert!(huge_bytes(&buffer) > 0, "advised, and not given"),
        HugePagesInUse::Refused => println!("this machine forbids them: nothing to show here"),
        other => panic!("{other:?}"),
    }

    let pool = host_pool(|builder| builder.huge_pages(HugePages::Never));
    let mut buffer = pool.take(LARGE);
    buffer.fill(1);
    assert_eq!((pool.stats().huge_pages, huge_bytes(&buffer)), (HugePagesInUse::Never, 0));
}

#[test]
fn where_huge_pages_are_refused_everything_works_and_it_is_told_once() {
    let turn = listen();
    let shown = refusing(ADVISE_HUGE, libc::EINVAL, || {
        let rig = Rig::new();
        for _ in 0..3 {
            goes_its_way(&rig, LARGE);
            rig.pool.clear();
        }
        let stats = rig.pool.stats();
        assert_eq!((stats.misses, stats.huge_pages), (3, HugePagesInUse::Refused));
        assert!(stats.to_string().contains("no huge pages, which this machine forbids"), "{stats}");
        rig.finish();
    });
    if shown {
        let told = said(&turn, "huge_pages_refused");
        assert!(matches!(&told[..], [(Level::WARN, why)] if why.contains("Invalid argument")), "{told:?}");
    }
}

#[test]
fn memory_is_on_the_node_that_was_asked_for_before_anybody_touches_it() {
    let _turn = listen();
    let rig = rig_with_nodes(&[0, 1], 0);
    for bytes in [4 * KIB, LARGE] {
        let buffer = rig.pool.take(bytes);
        let Some(policy) = policy_of(&buffer) else {
            println!("this kernel knows no nodes: nothing to show here");
            return;
        };
        assert_eq!(policy, (PREFERRED, 1), "of {bytes} bytes");
        drop(buffer);
        goes_its_way(&rig, bytes);
    }
    let ahead = rig.pool.take_pinned(64 * KIB).unwrap();
    assert_eq!(policy_of(&ahead), Some((PREFERRED, 1)), "page-locked at once");
    drop(ahead);
    assert_eq!(rig.pool.stats().numa, NumaInUse::Node(0));
    rig.finish();
}

#[test]
fn where_there_is_one_node_nothing_is_asked_of_the_kernel() {
    let turn = listen();
    let shown = refusing(MBIND, libc::EPERM, || {
        let rig = rig_with_nodes(&[0], 0);
        goes_its_way(&rig, 4 * KIB);
        assert_eq!(rig.pool.stats().numa, NumaInUse::Node(0));
        rig.finish();
    });
    assert!(!shown || said(&turn, "numa_refused").is_empty());
}

#[test]
fn a_node_that_there_is_not_is_an_error_that_names_those_that_there_are() {
    let sim = Sim::builder().memory_nodes([0, 2]).build();
    let error = PinnedPool::builder().driver(sim.driver()).numa_node(1).build().unwrap_err();
    assert!(matches!(&error, Error::Setting { name: "numa_node", .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        "numa_node: there is no node 1 with memory for this process; the nodes are 0, 2"
    );
    // The machine's own nodes, whichever they are.
    let error = PinnedPool::builder().driver(Driver::host_only()).numa_node(NOWHERE).build().unwrap_err();
    assert!(error.to_string().contains("there is no node 1000"), "{error}");
    let any = PinnedPool::builder().driver(Driver::host_only()).numa_node(None).build().unwrap();
    assert_eq!(any.stats().numa, NumaInUse::Anywhere);
}

#[test]
fn where_the_kernel_refuses_the_node_everything_works_and_it_is_told_once() {
    let turn = listen();
    for (error, text) in [(libc::EPERM, "not permitted"), (libc::ENOSYS, "not implemented")] {
        let shown = refusing(MBIND, error, || {
            let rig = rig_with_nodes(&[0, 1], 0);
            for bytes in [4 * KIB, LARGE, 4 * KIB] {
                goes_its_way(&rig, bytes);
                rig.pool.clear();
            }
            let stats = rig.pool.stats();
            assert_eq!((stats.misses, stats.numa), (3, NumaInUse::Refused(0)));
            assert!(stats.to_string().contains("on any node, since node 0 was refused"), "{stats}");
            rig.finish();
        });
        if shown {
            let told = said(&turn, "numa_refused");
            let is_right = |why: &str| why.contains("node=0") && why.contains(text);
            assert!(matches!(&told[..], [(Level::WARN, why)] if is_right(why)), "{told:?}");
        }
    }
    // And a kernel that has no such node, though the machine seems to.
    let rig = rig_with_nodes(&[NOWHERE], NOWHERE);
    assert_eq!(rig.pool.stats().numa, NumaInUse::Node(NOWHERE), "the only one");
    let rig = rig_with_nodes(&[0, NOWHERE], NOWHERE);
    goes_its_way(&rig, LARGE);
    assert_eq!(rig.pool.stats().numa, NumaInUse::Refused(NOWHERE));
}

#[test]
fn the_node_of_a_device_is_what_the_driver_says() {
    let near = |node| Sim::builder().attribute(134, node).build().driver().numa_node(0);
    assert_eq!(near(3), Ok(Some(3)));
    // Neither the driver nor the bus: this device is on none.
    let nowhere = Sim::builder().attribute(50, 0xFFFF).build();
    assert_eq!(nowhere.driver().numa_node(0), Ok(None));
    assert!(matches!(nowhere.driver().numa_node(7), Err(Error::Driver(error)) if error.code() == 101));
    assert!(matches!(Driver::host_only().numa_node(0), Err(Error::NoCuda { .. })));
}
