//! What the kernel says of memory, and how it is made to refuse: by a filter on the calls of one thread, as a container
//! has one.
#![allow(unsafe_code)] // System calls have no safe form in std.

use std::ops::Range;

/// A system call, perhaps only one with this advice, and perhaps only for more bytes than this.
#[derive(Clone, Copy)]
pub struct Call {
    number: libc::c_long,
    advice: Option<libc::c_int>,
    above_bytes: Option<usize>,
}

pub const MBIND: Call = Call { number: libc::SYS_mbind, advice: None, above_bytes: None };
pub const ADVISE_HUGE: Call = advice(libc::MADV_HUGEPAGE);
pub const POPULATE: Call = advice(libc::MADV_POPULATE_WRITE);

const fn advice(advice: libc::c_int) -> Call {
    Call { number: libc::SYS_madvise, advice: Some(advice), above_bytes: None }
}

impl Call {
    pub fn of_more_than(self, bytes: usize) -> Self {
        Self { above_bytes: Some(bytes), ..self }
    }
}

/// Runs `body` on a thread of its own whose calls are answered with this error. False where threads may not be filtered
/// here, so that nothing was shown.
#[must_use]
pub fn refusing(call: Call, error: i32, body: impl FnOnce() + Send) -> bool {
    std::thread::scope(|scope| {
        let filtered = scope.spawn(|| {
            if !filter(call, error) {
                println!("this machine lets no thread be filtered: nothing to show here");
                return false;
            }
            body();
            true
        });
        filtered.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn filter(call: Call, error: i32) -> bool {
    // The low halves of the second and the third argument, behind the number, the machine and the address of the call.
    const NUMBER_AT: u32 = 0;
    const LENGTH_AT: u32 = 16 + 8;
    const ADVICE_AT: u32 = 16 + 2 * 8;
    const IS_EQUAL: u16 = 0x15;
    const IS_ABOVE: u16 = 0x25;
    let mut tests = vec![(NUMBER_AT, IS_EQUAL, u32::try_from(call.number).expect("a small number"))];
    tests.extend(call.advice.map(|advice| (ADVICE_AT, IS_EQUAL, advice as u32)));
    tests.extend(call.above_bytes.map(|bytes| (LENGTH_AT, IS_ABOVE, bytes as u32)));
    let mut program = Vec::new();
    for (index, (at, test, value)) in tests.iter().enumerate() {
        // One that does not hold goes on to the last line.
        let to_last = (2 * (tests.len() - index) - 1) as u8;
        program.push(libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: *at });
        program.push(libc::sock_filter { code: *test, jt: 0, jf: to_last, k: *value });
    }
    for answer in [libc::SECCOMP_RET_ERRNO | error as u32, libc::SECCOMP_RET_ALLOW] {
        program.push(libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: answer });
    }
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: a switch of the calling thread, without which an ordinary user may not filter.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    let mode = libc::SECCOMP_MODE_FILTER as libc::c_ulong;
    // SAFETY: the program is whole and outlives the call; it holds for the calling thread alone, which is a test's own.
    unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) == 0 }
}

/// The policy of the memory at this address (`MPOL_*`) and the nodes in it; `None` where the kernel has none.
pub fn policy_of(bytes: &[u8]) -> Option<(i32, u64)> {
    const OF_ADDRESS: libc::c_long = 2;
    let mut mode: libc::c_int = -1;
    let mut nodes = [0 as libc::c_ulong; 16];
    let bits = (nodes.len() as libc::c_long) * libc::c_long::from(libc::c_ulong::BITS);
    let (mode_at, nodes_at) = (&raw mut mode, nodes.as_mut_ptr());
    // SAFETY: get_mempolicy writes one int and so many bits of nodes, for an address that is only looked up.
    let answer = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, mode_at, nodes_at, bits, bytes.as_ptr(), OF_ADDRESS)
    };
    (answer == 0).then_some((mode, nodes[0]))
}

/// How many pages of these bytes have been touched.
pub fn pages_there(bytes: &[u8]) -> usize {
    const PAGE: usize = 4096;
    let mut there = vec![0_u8; bytes.len().div_ceil(PAGE)];
    // SAFETY: mincore writes a byte for each page and touches none; buffers begin with a page.
    let answer = unsafe { libc::mincore(bytes.as_ptr() as *mut _, bytes.len(), there.as_mut_ptr()) };
    assert_eq!(answer, 0, "mincore");
    there.iter().filter(|page| **page & 1 == 1).count()
}

/// How many of these bytes lie in huge pages, rounded to the mappings that they are in.
pub fn huge_bytes(bytes: &[u8]) -> usize {
    let Range { start, end } = bytes.as_ptr_range();
    let (start, end) = (start as usize, end as usize);
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("this process's mappings");
    let (mut is_in, mut huge) = (false, 0);
    for line in maps.lines() {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let range = range.and_then(|(from, to)| Some((hex(from)?, hex(to)?)));
        if let Some((from, to)) = range {
            is_in = from < end && start < to;
        } else if is_in && let Some(kib) = line.strip_prefix("AnonHugePages:") {
            huge += kib.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") << 10;
        }
    }
    huge
}

fn hex(digits: &str) -> Option<usize> {
    usize::from_str_radix(digits, 16).ok()
}
