//! In a forked child nothing is page-locked, nothing hangs, and the record of regions answers no. One test,
//! because a fork takes along only the thread that makes it.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // `fork`, and the promises of `pin_all` and `register_region`.

use pinpool::PinnedPool;
use pinpool::pin::{self, Pinned, Region, pin_all, register_region, unregister_region};
use pinpool::regions::{self, Coverage, ExternalRegion};
use pinpool::sim::Sim;
use std::sync::atomic::{AtomicBool, Ordering};

const LEN: usize = 64 << 10;

/// Whole pages, so that advice about the memory would be taken.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

// SAFETY: bytes, without padding.
unsafe impl bytemuck::Zeroable for Page {}
// SAFETY: bytes, without padding; any are valid.
unsafe impl bytemuck::Pod for Page {}

const WHY: &str = "this is a forked child, where CUDA cannot be used";

/// Runs `child` in a fork, and gives what it says on its way out.
fn in_fork(child: impl FnOnce() -> Result<(), String>) -> String {
    let mut ends = [0; 2];
    // SAFETY: pipe writes two descriptors.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: the child runs nothing but `child`, a write and `_exit`; the C library's allocator is usable in
    // the child, and pinpool's locks are what is under test.
    let process = unsafe { libc::fork() };
    assert!(process >= 0);
    if process == 0 {
        let said = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)) {
            Ok(Ok(())) => "fine".to_owned(),
            Ok(Err(what)) => what,
            Err(panic) => format!("panicked: {:?}", panic.downcast_ref::<String>()),
        };
        // SAFETY: writes this many bytes of a string that lives.
        unsafe { libc::write(ends[1], said.as_ptr().cast(), said.len()) };
        // SAFETY: ends the process without running anything of the parent's.
        unsafe { libc::_exit(0) };
    }
    // What the child drops the parent keeps.
    std::mem::forget(child);
    // SAFETY: this end is the child's.
    unsafe { libc::close(ends[1]) };
    let mut ready = libc::pollfd { fd: ends[0], events: libc::POLLIN, revents: 0 };
    // SAFETY: one descriptor that is open.
    let answered = unsafe { libc::poll(&mut ready, 1, 10_000) };
    if answered != 1 {
        // SAFETY: the child is ours and not yet waited for.
        unsafe { libc::kill(process, libc::SIGKILL) };
        return "it hangs".to_owned();
    }
    let mut said = vec![0u8; 4096];
    // SAFETY: reads at most this many bytes into memory of that length.
    let count = unsafe { libc::read(ends[0], said.as_mut_ptr().cast(), said.len()) };
    // SAFETY: waits for the child that was made above.
    unsafe { libc::waitpid(process, std::ptr::null_mut(), 0) };
    String::from_utf8_lossy(&said[..count.max(0) as usize]).into_owned()
}

fn is_mapped(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let at = |text| usize::from_str_radix(text, 16).unwrap();
        (at(start)..at(end)).contains(&address)
    })
}

fn check(holds: bool, what: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what.to_owned()) }
}

#[test]
fn a_forked_child_pins_nothing_and_knows_it() {
    let sim = Sim::new();
    let (_context, driver) = (sim.context(0), sim.driver());
    let pool = PinnedPool::builder().driver(driver.clone()).build().unwrap();
    pool.prewarm(LEN, 1).unwrap();
    let memory = Pinned::new(&driver, vec![Page([7; 4096]); LEN / 4096]).unwrap();
    let other = vec![8u8; LEN];
    let noted = ExternalRegion::note(other.as_ptr(), LEN);
    // SAFETY: the memory outlives the regions.
    let pinned = unsafe { pin_all(&driver, &[Region::of(&vec![1u8; LEN].leak()[..])]) }.unwrap();
    let calls = sim.total_calls();
    let (memory, noted, pinned, other, driver_of_child) = (memory, noted, pinned, other, driver.clone());
    let said = in_fork(|| {
        let driver = driver_of_child;
        check(!regions::is_pinned(memory.as_ptr()), "the parent's region is reported")?;
        check(regions::covering(&other) == Coverage::None, "the parent's note is reported")?;
        check(regions::live_count() == 0, "live_count is not 0")?;
        let mine = ExternalRegion::note(other.as_ptr(), LEN);
        check(regions::covering(&other) == Coverage::None, "a note in the child is reported")?;
        drop(mine);
        let bytes = vec![1u8; LEN];
        // SAFETY: nothing is registered.
        let region = unsafe { register_region(&driver, bytes.as_ptr(), LEN) }.unwrap_err();
        check(region.to_string().ends_with(WHY), &format!("register_region: {region}"))?;
        // SAFETY: nothing is registered.
        let gone = unsafe { unregister_region(&driver, bytes.as_ptr()) }.unwrap_err();
        check(gone.to_string().ends_with(WHY), &format!("unregister_region: {gone}"))?;
        // SAFETY: nothing is registered.
        let all = unsafe { pin_all(&driver, &[Region::of(&bytes)]) }.unwrap_err();
        check(all.to_string().ends_with(WHY), &format!("pin_all: {all}"))?;
        let (owned, bytes) = Pinned::new(&driver, bytes).unwrap_err();
        check(owned.to_string().ends_with(WHY) && bytes.len() == LEN, &format!("Pinned: {owned}"))?;
        let take = pool.take_pinned(LEN).unwrap_err().to_string();
        check(take.ends_with(WHY), &format!("take_pinned: {take}"))?;
        let prewarm = pool.prewarm(LEN, 1).unwrap_err().to_string();
        check(prewarm.ends_with(WHY), &format!("prewarm: {prewarm}"))?;
        let mut plain = pool.take(LEN);
        plain.fill(1);
        let address = plain.as_ptr() as usize;
        drop(plain);
        check(!is_mapped(address), "pageable memory of the child's own is not unmapped")?;
        // What was the parent's can be read here, and dropping it does nothing to the parent.
        check(memory.iter().all(|page| page.0 == [7; 4096]), "the copy of the parent's bytes")?;
        let unpinned = memory.unpin().err().map(|error| error.to_string()).unwrap_or_default();
        check(unpinned.ends_with(WHY), &format!("unpin: {unpinned}"))?;
        drop((noted, pinned));
        let still = Pinned::new(&driver, vec![7u8; LEN]).is_err();
        check(still && sim.total_calls() == calls, "the driver was called")
    });
    assert_eq!(said, "fine");
    // The child's drops were its own.
    assert_eq!(pin::stats().pinned_buffers, 1);
    assert_eq!(sim.registered_bytes(), 3 * LEN);
    sim.assert_clean();

    // Forks while another thread writes the record, so that its locks are held in the child for ever.
    let stop = AtomicBool::new(false);
    let bytes = [0u8; 64];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                drop(ExternalRegion::note(bytes.as_ptr(), bytes.len()));
            }
        });
        for _ in 0..20 {
            let said = in_fork(|| {
                drop(ExternalRegion::note(bytes.as_ptr(), bytes.len()));
                check(regions::covering(&bytes) == Coverage::None, "the parent's region is reported")
            });
            if said != "fine" {
                stop.store(true, Ordering::Relaxed);
            }
            assert_eq!(said, "fine");
        }
        stop.store(true, Ordering::Relaxed);
    });
}
