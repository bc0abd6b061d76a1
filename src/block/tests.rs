//! A block's states, without a pool.

use super::*;

fn fresh(bytes: usize) -> Out {
    let class = SizeClass::of(bytes).unwrap();
    Out::fresh(Pages::map(class.bytes()).unwrap(), class)
}

#[test]
fn only_the_dirty_prefix_is_zeroed_and_only_then_is_it_ready() {
    let driver = Driver::host_only();
    let (whole, dirty) = (4 * zero::STEP_BYTES, zero::STEP_BYTES + 5);
    let mut out = fresh(whole);
    out.slice_mut(whole).fill(9);
    let returned = out.give_back(dirty, None, 0, 0);
    let quiescent = returned.settle(&driver, Proof::NothingOutstanding);
    let mut quiescent = quiescent.into_ready(&driver).expect_err("dirty");
    let mut job = zero::Job::of(dirty);
    let steps: Vec<_> =
        std::iter::from_fn(|| Some(quiescent.zero_step(&driver, &mut job)).filter(|bytes| *bytes > 0))
            .collect();
    assert_eq!(steps, [zero::STEP_BYTES, dirty - zero::STEP_BYTES], "what was zeroed, step by step");
    let out = quiescent.into_ready(&driver).expect("clean").hand_out();
    let bytes = out.slice(whole);
    assert!(bytes[..dirty].iter().all(|byte| *byte == 0));
    assert!(bytes[dirty..].iter().all(|byte| *byte == 9), "bytes beyond the prefix are not touched");
    let retiring = out.give_back(0, None, 0, 0).settle(&driver, Proof::NothingOutstanding).retire();
    assert!(matches!(retiring.release(&driver), Released::Pageable));
}

#[test]
fn what_was_left_dirty_stays_dirty_for_the_next_return() {
    let mut out = fresh(8192);
    out.0.dirty_bytes = 5000;
    let returned = out.give_back(10, None, 0, 0);
    assert_eq!(returned.dirty_bytes(), 5000);
}

#[test]
#[cfg(target_os = "linux")]
fn what_could_not_be_faulted_in_is_tried_again_by_the_next_step() {
    let Some(nowhere) = Pages::nowhere() else { return };
    let mut out = fresh(4096);
    let real = std::mem::replace(&mut out.0.pages, ManuallyDrop::new(nowhere));
    out.populate();
    assert_eq!(out.0.source, Source::Mapped, "no page is there, and nobody may think so");
    drop(ManuallyDrop::into_inner(std::mem::replace(&mut out.0.pages, real)));
    out.populate();
    assert_eq!(out.0.source, Source::Populated);
    let _ = out.never_handed_out().retire().release(&Driver::host_only());
}
