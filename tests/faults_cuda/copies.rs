//! Scenarios of cudarc's own copies, and of the guard's copies through cudarc.

use crate::checks::is_promised;
use crate::device::{Mode, OwnCopies};
use crate::kind::Kind;
use crate::scenarios::Scenario;
use crate::stage::{LEN, Settings, Stage, all_zero, pattern};
use pinpool::PinnedBuffer;
use std::panic::{AssertUnwindSafe, catch_unwind};

const SEED: u8 = 3;

pub const SCENARIOS: &[Scenario] = &[
    of(Mode::Tracked, "cudarc: a copy that records itself", copy_to),
    of(Mode::Tracked, "cudarc: an upload", upload),
    of(Mode::Tracked, "cudarc: a download", download),
    of(Mode::Tracked, "cudarc: its own copy, noted", noted),
    of(
        Mode::DefaultStream,
        "cudarc: its own copy on the default stream, noted and recorded",
        noted_and_recorded,
    ),
    of(Mode::Untracked, "cudarc: its own copy of a slice, forgotten", forgotten),
    of(Mode::Tracked, "cudarc: a write after a copy", write_again),
];

const fn of(mode: Mode, name: &'static str, play: fn(&Stage)) -> Scenario {
    let settings =
        Settings { device: Kind::Ordinary, pool: |pool| pool, own: Some(mode), two_devices: false };
    Scenario { name, settings, play }
}

/// A buffer with the pattern in it.
fn filled(stage: &Stage) -> Option<(PinnedBuffer, &OwnCopies)> {
    let mut buffer = stage.warm(LEN)?;
    buffer.copy_from_slice(&pattern(SEED, LEN));
    Some((buffer, stage.context.own()))
}

/// Copies with `copy`; what the driver took has to arrive.
fn copied<E>(
    stage: &Stage,
    own: &OwnCopies,
    copy: impl FnOnce(&mut cudarc::driver::CudaSlice<u8>) -> Result<(), E>,
) {
    let (mut slice, memory) = own.take();
    if copy(&mut slice).is_ok() {
        stage.expect(memory, pattern(SEED, LEN));
    }
    own.keep(slice);
}

fn copy_to(stage: &Stage) {
    let Some((mut buffer, own)) = filled(stage) else { return };
    copied(stage, own, |slice| buffer.copy_to(.., &own.stream, slice));
    stage.device.run_until_idle();
    drop(buffer);
    stage.settle();
}

fn upload(stage: &Stage) {
    let Some((buffer, own)) = filled(stage) else { return };
    copied(stage, own, |slice| buffer.upload(.., &own.stream, slice).map_err(drop));
    stage.settle();
}

fn download(stage: &Stage) {
    let Some((buffer, own)) = filled(stage) else { return };
    let (slice, _) = own.take();
    if let Ok(pending) = buffer.download(&own.stream, &slice) {
        stage.device.run_until_idle();
        // Dropped without a wait where the answer may never come.
        if !stage.may_stick()
            && let Ok(buffer) = pending.wait()
        {
            assert!(
                promised(stage, || all_zero(&buffer)).is_none_or(|is| is),
                "other bytes than the device had"
            );
        }
    }
    own.keep(slice);
    stage.settle();
}

fn noted(stage: &Stage) {
    let Some((buffer, own)) = filled(stage) else { return };
    copied(stage, own, |slice| own.stream.memcpy_htod(&buffer, slice));
    drop(buffer);
    stage.settle();
}

fn noted_and_recorded(stage: &Stage) {
    let Some((mut buffer, own)) = filled(stage) else { return };
    copied(stage, own, |slice| own.stream.memcpy_htod(&buffer.view(..), slice));
    if let Err(error) = buffer.record_last_use(&own.other) {
        stage.explain(&error);
    }
    stage.device.run_until_idle();
    drop(buffer);
    stage.settle();
}

fn forgotten(stage: &Stage) {
    let Some((buffer, own)) = filled(stage) else { return };
    copied(stage, own, |slice| own.stream.memcpy_htod(&buffer[..], slice));
    drop(buffer);
    // Nothing is stepped here: only a wait for the context executes the copy.
    stage.pool.drain(stage.patience());
    drop(stage.take(LEN));
    stage.settle();
}

fn write_again(stage: &Stage) {
    let Some((mut buffer, own)) = filled(stage) else { return };
    copied(stage, own, |slice| buffer.copy_to(.., &own.stream, slice));
    stage.device.run_until_idle();
    if !stage.may_stick() {
        promised(stage, || buffer.fill(9));
    }
    drop(buffer);
    stage.settle();
}

/// Runs an access that panics only as promised.
fn promised<R>(stage: &Stage, access: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(access)) {
        Ok(result) => Some(result),
        Err(panic) => {
            let text = panic.downcast::<String>().expect("a text");
            assert!(is_promised(&text) && stage.point.is_some(), "{text}");
            None
        }
    }
}
