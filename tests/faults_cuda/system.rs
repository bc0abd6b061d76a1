//! What the pool asks of the operating system: counted, and refused at will. The functions below have the names of
//! libc's, so the linker gives them to everything in this binary; libc itself has its own.
#![allow(unsafe_code)] // C functions with C's contracts.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub const ENTRIES: [&str; 2] = ["mmap", "pthread_create"];

thread_local! {
    static IS_OF_THE_APPLICATION: Cell<bool> = const { Cell::new(false) };
}

/// What the calling thread asks for meanwhile is not the pool's.
pub fn of_the_application<R>(action: impl FnOnce() -> R) -> R {
    IS_OF_THE_APPLICATION.set(true);
    let result = action();
    IS_OF_THE_APPLICATION.set(false);
    result
}

#[derive(Default)]
struct Calls {
    made: u64,
    /// From which call on, and whether for ever.
    refused: Option<(u64, bool)>,
}

impl Calls {
    /// Counts a call; false when it shall be refused.
    fn count(&mut self) -> bool {
        self.made += 1;
        self.refused.is_none_or(|(nth, forever)| self.made != nth && !(forever && self.made > nth))
    }
}

struct System {
    calls: [Calls; 2],
    mapped: BTreeMap<usize, usize>,
}

fn system() -> MutexGuard<'static, System> {
    static SYSTEM: Mutex<System> = Mutex::new(System {
        calls: [const { Calls { made: 0, refused: None } }; 2],
        mapped: BTreeMap::new(),
    });
    SYSTEM.lock().unwrap_or_else(PoisonError::into_inner)
}

fn place(entry: &str) -> Option<usize> {
    ENTRIES.iter().position(|known| *known == entry)
}

/// Makes the `nth` call from now fail, and where it shall be for ever all later ones too. False for the driver's.
pub fn refuse(entry: &str, nth: u64, forever: bool) -> bool {
    let Some(place) = place(entry) else { return false };
    let calls = &mut system().calls[place];
    calls.refused = Some((calls.made + nth, forever));
    true
}

pub fn refuse_nothing() {
    system().calls.iter_mut().for_each(|calls| calls.refused = None);
}

pub fn reset_calls() {
    system().calls.iter_mut().for_each(|calls| *calls = Calls::default());
}

pub fn calls(entry: &str) -> u64 {
    place(entry).map_or(0, |place| system().calls[place].made)
}

/// Bytes that were mapped here and not unmapped.
pub fn mapped_bytes() -> usize {
    system().mapped.values().sum()
}

/// Threads of this process.
pub fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").expect("a Linux").count()
}

/// # Safety
/// mmap's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    let is_granted = IS_OF_THE_APPLICATION.get() || system().calls[0].count();
    if !is_granted {
        return libc::MAP_FAILED;
    }
    // SAFETY: the caller's contract; the arguments are mmap's, and so is the answer.
    let base = unsafe { libc::syscall(libc::SYS_mmap, address, bytes, protection, flags, file, offset) };
    if base != -1 {
        system().mapped.insert(base as usize, bytes);
    }
    base as *mut c_void
}

/// # Safety
/// munmap's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, bytes: usize) -> c_int {
    // Before it is unmapped: another thread may get the address at once.
    system().mapped.remove(&(address as usize));
    // SAFETY: the caller's contract.
    (unsafe { libc::syscall(libc::SYS_munmap, address, bytes) }) as c_int
}

type Body = extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(*mut c_void, *const c_void, Body, *mut c_void) -> c_int;

/// # Safety
/// pthread_create's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut c_void,
    attributes: *const c_void,
    body: Body,
    argument: *mut c_void,
) -> c_int {
    static LIBCS: AtomicUsize = AtomicUsize::new(0);
    let is_granted = IS_OF_THE_APPLICATION.get() || system().calls[1].count();
    if !is_granted {
        return libc::EAGAIN;
    }
    if LIBCS.load(Ordering::Relaxed) == 0 {
        // SAFETY: looks for a name, after this binary's own.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr()) };
        LIBCS.store(found as usize, Ordering::Relaxed);
    }
    // SAFETY: libc's function of that name, whose type this is.
    let create = unsafe { std::mem::transmute::<usize, Create>(LIBCS.load(Ordering::Relaxed)) };
    // SAFETY: the caller's contract.
    unsafe { create(thread, attributes, body, argument) }
}
