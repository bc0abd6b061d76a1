//! A backend in a forked child: errors, no driver call, and the parent's memory left alone. One test, because a fork
//! takes along only the thread that makes it.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // `fork`, and allocating by address.

use pinpool::backend::{
    BackendError, HostPinned, MemoryBackend, Registered, TemporaryContext, is_cuda_available,
};
use pinpool::sim::Sim;
use pinpool::{Error, regions};

#[test]
fn in_a_forked_child_a_backend_refuses_and_the_parent_goes_on() {
    let sim = Sim::new();
    let _context = sim.context(0);
    let driver = sim.driver();
    let (pinned, registered) = (HostPinned::new(&driver).unwrap(), Registered::new(&driver).unwrap());
    // SAFETY: used by the host alone until it is given back.
    let base = unsafe { pinned.allocate(4096) }.unwrap();
    // SAFETY: as above.
    let other = unsafe { registered.allocate(4096) }.unwrap();
    let context = TemporaryContext::new(&driver, 0).unwrap();
    // Once it was asked here, a child must not even look at what the answer is kept in.
    let _ = is_cuda_available();
    let calls = sim.total_calls();

    // SAFETY: the child runs what is under test, and `_exit`.
    let process = unsafe { libc::fork() };
    assert!(process >= 0);
    if process == 0 {
        let child = std::panic::AssertUnwindSafe(|| {
            // SAFETY: it is refused.
            let refused = unsafe { pinned.allocate(4096) };
            assert_eq!(refused, Err(BackendError::ForkedChild));
            // SAFETY: it is refused.
            assert_eq!(unsafe { pinned.deallocate(base, 4096) }, Err(BackendError::ForkedChild));
            // SAFETY: it is refused.
            assert_eq!(unsafe { registered.deallocate(other, 4096) }, Err(BackendError::ForkedChild));
            assert_eq!(pinned.wait_for_devices(), Err(BackendError::ForkedChild));
            assert_eq!(HostPinned::new(&driver).err(), Some(BackendError::ForkedChild));
            assert!(TemporaryContext::new(&driver, 0).is_err() && !is_cuda_available());
            // SAFETY: it is refused.
            assert_eq!(unsafe { pinned.leak(base, 4096) }, Err(BackendError::ForkedChild));
            assert_eq!(context.with(|| ()), Err(Error::ForkedChild), "nothing is run in it");
            assert!(!regions::is_pinned(base.as_ptr()));
            drop((pinned, registered, context));
            assert_eq!(sim.total_calls(), calls, "the driver is not called");
        });
        let code = i32::from(std::panic::catch_unwind(child).is_err());
        // SAFETY: ends the process without running anything of the parent's.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: waits for the child that was made above.
    assert_eq!(unsafe { libc::waitpid(process, &mut status, 0) }, process);
    assert_eq!(status, 0, "the child found something else");

    // SAFETY: nobody uses it any more.
    assert_eq!(unsafe { pinned.deallocate(base, 4096) }, Ok(()));
    // SAFETY: nobody uses it any more.
    assert_eq!(unsafe { registered.deallocate(other, 4096) }, Ok(()));
    drop((pinned, registered, context));
    assert_eq!((sim.allocated_host_bytes(), sim.registered_bytes()), (0, 0));
    sim.assert_clean();
}
