//! What the children do. Each leaves its pool busy in one way, and ends in one.
#![allow(unsafe_code)] // The C library's ways to end a process, and a fork.

use crate::device::{Device, LEN};
use crate::late;
use pinpool::pin::{Pinned, Region, pin_all};
use pinpool::{PinnedBuffer, PinnedPool};
use std::cell::RefCell;
use std::process::ExitCode;
use std::time::Duration;

/// Said by a child when its pool is as the scenario wants it.
pub const READY: &str = "ready to end";

const SLOW: Duration = Duration::from_millis(300);

pub fn run(scenario: &str) -> ExitCode {
    match scenario {
        "a_static_s_destructor" => late::at_the_very_end(),
        "a_static_s_destructor_with_the_process_wide_pool" => late::at_the_very_end(),
        "a_fini_function" => late::in_the_fini_function(),
        _ => {}
    }
    let device = Device::new();
    match scenario {
        "main_returns" | "exit_is_called" | "a_panic_in_main" | "abort" | "underscore_exit"
        | "quick_exit" => busy(device, &device.pool()),
        "main_returns_with_the_process_wide_pool" => busy(device, pinpool::global()),
        "a_static_s_destructor" | "a_fini_function" => late::keep(device, &device.pool()),
        "a_static_s_destructor_with_the_process_wide_pool" => late::keep(device, pinpool::global()),
        "exit_from_another_thread" => {
            busy(device, &device.pool());
            println!("{READY}");
            std::thread::spawn(|| std::process::exit(4));
            loop {
                drop(pinpool::take(LEN));
            }
        }
        "exit_inside_a_thread_local_destructor" => exit_inside_a_destructor(device),
        "thread_local_destructors" => thread_locals(device),
        "shutdown_and_return" => {
            let pool = device.pool();
            pool.prewarm(LEN, 4).unwrap();
            drop(pool.take(LEN));
            assert!(pool.shutdown().completed);
        }
        "handlers_that_run_before_ours" => early_handler(device),
        "a_fork_that_exits" => fork_that_exits(device),
        "a_cleaner_inside_a_slow_call" => {
            inside(device, "cuEventQuery", |device, _| device.slow("cuEventQuery", SLOW))
        }
        "a_cleaner_inside_a_call_that_hangs" => {
            inside(device, "cuEventQuery", |device, _| device.hang("cuEventQuery"))
        }
        "a_release_lane_inside_a_slow_call" => register_in_the_lane(device, |call| device.slow(call, SLOW)),
        "a_release_lane_inside_a_call_that_hangs" => register_in_the_lane(device, |call| device.hang(call)),
        "a_context_lane_inside_a_slow_call" => unrecorded(device, || device.slow("cuCtxSynchronize", SLOW)),
        "a_context_wait_that_never_ends" => unrecorded(device, || {
            device.hold();
            device.stall();
        }),
        "a_user_s_wait_that_never_ends" => {
            let pool = device.pool();
            busy(device, &pool);
            let before = device.calls("cuCtxSynchronize");
            std::thread::spawn(move || {
                device.bind();
                let mut buffer = pool.take(LEN);
                device.fail_once("cuEventRecord");
                device.record(&mut buffer).unwrap_err();
                buffer.wait()
            });
            device.until_more_calls("cuCtxSynchronize", before);
        }
        "threads_that_go_on" => threads(device, go_on),
        "threads_that_pin_and_wait" => threads(device, pin_and_wait),
        "threads_that_copy" => threads(device, copy),
        other => panic!("no scenario {other}"),
    }
    println!("{READY}");
    match scenario {
        "exit_is_called" => std::process::exit(3),
        "a_panic_in_main" => panic!("on purpose"),
        "abort" => std::process::abort(),
        // SAFETY: ends the process.
        "underscore_exit" => unsafe { libc::_exit(7) },
        "quick_exit" => {
            // SAFETY: ends the process.
            unsafe { quick_exit(8) }
        }
        "threads_that_go_on" | "threads_that_pin_and_wait" | "threads_that_copy" => ExitCode::from(5),
        _ => ExitCode::SUCCESS,
    }
}

unsafe extern "C" {
    fn quick_exit(status: libc::c_int) -> !;
}

/// Buffers out, pooled, queued behind a held stream, and one without a record.
fn busy(device: &'static Device, pool: &PinnedPool) {
    pool.prewarm(LEN, 4).expect("a context is current");
    let [mut out, mut queued, unrecorded] = [(); 3].map(|()| pool.take(LEN));
    assert!(out.is_pinned());
    device.record(&mut out).unwrap();
    drop(unrecorded);
    assert!(pool.drain(Duration::from_secs(20)));
    device.hold();
    device.stall();
    device.record(&mut queued).unwrap();
    drop((queued, pool.take(LEN / 2)));
    std::mem::forget((out, pool.clone()));
}

/// The cleaner asks for an event that stays pending, in a call that is slow or hangs.
fn inside(device: &'static Device, call: &str, fault: impl FnOnce(&Device, &PinnedPool)) {
    let pool = device.pool();
    busy(device, &pool);
    // Counted before the fault: the call that hangs may begin at once, and no other begins after it.
    let before = device.calls(call);
    fault(device, &pool);
    device.until_more_calls(call, before);
    std::mem::forget(pool);
}

fn register_in_the_lane(device: &'static Device, fault: impl FnOnce(&str)) {
    let pool = device.pool();
    busy(device, &pool);
    fault("cuMemHostRegister");
    let before = device.calls("cuMemHostRegister");
    drop(pool.take(2 * LEN));
    device.until_more_calls("cuMemHostRegister", before);
    std::mem::forget(pool);
}

/// The context lane waits for the context of a buffer that was dropped without a record.
fn unrecorded(device: &'static Device, fault: impl FnOnce()) {
    let pool = device.pool();
    pool.prewarm(LEN, 1).unwrap();
    let buffer = pool.take(LEN);
    fault();
    let before = device.calls("cuCtxSynchronize");
    drop(buffer);
    device.until_more_calls("cuCtxSynchronize", before);
    std::mem::forget(pool);
}

fn threads(device: &'static Device, work: fn(&Device, &PinnedPool)) {
    let pool = device.pool();
    pool.prewarm(LEN, 8).unwrap();
    let (told, ready) = std::sync::mpsc::channel();
    for _ in 0..3 {
        let (pool, told) = (pool.clone(), told.clone());
        std::thread::spawn(move || {
            device.bind();
            for round in 0_u32.. {
                work(device, &pool);
                if round == 20 {
                    told.send(()).unwrap();
                }
            }
        });
    }
    (0..3).for_each(|_| ready.recv().unwrap());
    std::mem::forget(pool);
}

/// Never looks at an error: the process is ending, and it does not know.
fn go_on(device: &Device, pool: &PinnedPool) {
    let mut buffer = pool.take(LEN);
    buffer[0] = 1;
    buffer.set_dirty_len(1);
    let _ = device.record(&mut buffer);
    let _ = buffer.is_quiescent();
    drop(buffer);
    drop(pool.take(LEN)); // without a record
    drop(pool.take(LEN / 4));
}

fn pin_and_wait(device: &Device, pool: &PinnedPool) {
    let driver = device.driver_again();
    let memory = vec![1u8; 4096];
    // SAFETY: the memory outlives the regions; what could not be unregistered keeps it, below.
    if let Ok(regions) = unsafe { pin_all(&driver, &[Region::of(&memory)]) }
        && regions.unpin_all().is_err()
    {
        std::mem::forget(memory);
    }
    if let Ok(pinned) = Pinned::new(&driver, vec![1u8; 4096]) {
        drop(pinned);
    }
    if let Ok(mut buffer) = pool.take_pinned(LEN) {
        let _ = device.record(&mut buffer);
        let _ = buffer.wait();
    }
    let _ = pool.prewarm(LEN / 2, 1);
    pool.trim_to(LEN);
}

/// With cudarc's streams: what it calls inside our functions is made for us, and ends with ours.
fn copy(_: &Device, pool: &PinnedPool) {
    use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
    type Copies = (std::sync::Arc<CudaStream>, RefCell<CudaSlice<u8>>);
    thread_local! {
        // Leaked, because cudarc's destructors are not ours to stop.
        static COPIES: &'static Copies = Box::leak(Box::new({
            let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
            let device = stream.alloc_zeros::<u8>(LEN).unwrap();
            (stream, RefCell::new(device))
        }));
    }
    let (stream, device) = COPIES.with(|copies| *copies);
    let mut device = device.borrow_mut();
    let mut buffer = pool.take(LEN);
    buffer.fill(1);
    let _ = buffer.copy_to(.., stream, &mut *device);
    let _ = pinpool::copy_h2d_async(stream, &[1; 64], &mut *device);
    if let Ok(pending) = pool.take(LEN).download(stream, &*device) {
        let _ = pending.wait();
    }
}

thread_local! {
    static MINE: RefCell<Vec<PinnedBuffer>> = const { RefCell::new(Vec::new()) };
}

/// Of `main`'s thread they run before any exit handler; of a thread that ends, with it.
fn thread_locals(device: &'static Device) {
    let pool = device.pool();
    busy(device, &pool);
    let leave = move || {
        let mut buffer = pool.take(LEN);
        let _ = device.record(&mut buffer);
        MINE.with(|mine| mine.borrow_mut().extend([buffer, pool.take(LEN)]));
    };
    leave();
    std::thread::spawn(leave).join().unwrap();
}

fn exit_inside_a_destructor(device: &'static Device) {
    struct Exits;
    impl Drop for Exits {
        fn drop(&mut self) {
            std::process::exit(6);
        }
    }
    thread_local!(static EXITS: Exits = const { Exits });
    let pool = device.pool();
    busy(device, &pool);
    println!("{READY}");
    let ends = std::thread::spawn(move || {
        EXITS.with(|_| ());
        MINE.with(|mine| mine.borrow_mut().push(pool.take(LEN)));
    });
    let _ = ends.join();
    loop {
        std::thread::park();
    }
}

/// Registered after the driver was used: it runs before the driver's, and before ours.
fn early_handler(device: &'static Device) {
    static POOL: std::sync::OnceLock<(&'static Device, PinnedPool)> = std::sync::OnceLock::new();
    extern "C" fn early() {
        let (device, pool) = POOL.get().unwrap();
        let mut buffer = pool.take_pinned(LEN).expect("the driver is there");
        device.record(&mut buffer).unwrap();
        drop(buffer);
        assert!(pool.shutdown().completed);
    }
    let pool = device.pool();
    pool.prewarm(LEN, 1).unwrap();
    drop(pool.take(LEN));
    POOL.set((device, pool)).ok().unwrap();
    // SAFETY: a function of this program.
    unsafe { libc::atexit(early) };
}

/// The child has the exit handlers too, and none of the threads.
fn fork_that_exits(device: &'static Device) {
    let pool = device.pool();
    busy(device, &pool);
    device.slow("cuEventQuery", SLOW);
    device.until_called_again("cuEventQuery");
    // SAFETY: the child takes, drops and exits, which is what is tested.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(pool.take(LEN));
        std::process::exit(9);
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 9, "the child ended with {status:#x}");
}
