//! Memory that the caller owns: registered by name, all or nothing, and owned.
#![allow(unsafe_code)] // Registering lends the driver a pointer.

use crate::device::Stream;
use crate::stage::{LEN, Stage, pattern};
use pinpool::pin::{Pinned, Region, pin_all, register_region, unregister_region};

pub fn regions(stage: &Stage) {
    let driver = stage.device.driver();
    let memory = vec![1_u8; LEN];
    stage.has_a_caretaker();
    // SAFETY: the memory is freed below only if it is not registered any more.
    if unsafe { register_region(&driver, memory.as_ptr(), LEN) }.is_err() {
        assert!(stage.point.is_some());
        return;
    }
    // SAFETY: no work of a device is outstanding, and the registration is this function's.
    if unsafe { unregister_region(&driver, memory.as_ptr()) }.is_err() {
        assert!(stage.point.is_some());
        stage.device.clear_faults();
        // SAFETY: as above. What stays registered must stay allocated, and be known: it can be tried again.
        unsafe { unregister_region(&driver, memory.as_ptr()) }.expect("the driver is asked again");
    }
}

pub fn pin_all_regions(stage: &Stage) {
    let driver = stage.device.driver();
    let memory = [vec![1_u8; LEN], vec![2; LEN], vec![3; LEN]];
    let regions = memory.each_ref().map(|part| Region::of(part));
    stage.has_a_caretaker();
    // SAFETY: the memory is freed below only if nothing of it is registered any more.
    let left = match unsafe { pin_all(&driver, &regions) } {
        Ok(pinned) => {
            let stream = stage.context.stream();
            stage.upload_slice(&memory[1], &stream);
            stage.device.run_until_idle();
            pinned.unpin_all().err().map_or(0, |errors| errors.len())
        }
        Err(error) => error.still_registered().len(),
    };
    assert_eq!(left * LEN, stage.device.registered_bytes(), "the error names what is left");
    assert!(left == 0 || stage.point.is_some());
    if left > 0 {
        std::mem::forget(memory);
        stage.forget_registrations();
    }
}

pub fn pinned_vec(stage: &Stage) {
    let stream = stage.context.stream();
    stage.has_a_caretaker();
    if let Some(mut pinned) = pinned(stage, &stream) {
        stage.record_pinned(&mut pinned, &stream);
        stage.device.run_until_idle();
        drop(pinned);
    }
    // And without a record.
    drop(pinned(stage, &stream));
    stage.settle_callers_memory();
}

pub fn unpinned_vec(stage: &Stage) {
    let stream = stage.context.stream();
    stage.has_a_caretaker();
    if let Some(pinned) = pinned(stage, &stream)
        && !stage.may_stick()
    {
        match pinned.unpin() {
            Ok(vec) => assert!(vec == pattern(5, LEN), "the memory was changed"),
            Err(error) => assert!(stage.point.is_some(), "{error}"),
        }
    }
    stage.settle_callers_memory();
}

fn pinned(stage: &Stage, stream: &Stream) -> Option<Pinned<Vec<u8>>> {
    match Pinned::new(&stage.device.driver(), pattern(5, LEN)) {
        Ok(pinned) => {
            stage.upload_slice(&pinned, stream);
            Some(pinned)
        }
        Err((error, vec)) => {
            assert!(stage.point.is_some(), "{error}");
            assert!(vec == pattern(5, LEN), "it comes back as it was");
            None
        }
    }
}
