//! The same as `tests/faults`, through the real path: cudarc, the search for libcuda, the pool's own table, and a
//! fake libcuda. Each driver call of each scenario fails in turn once, and each entry point for the whole scenario.
#![cfg(all(feature = "cudarc", target_os = "linux"))]

mod interop;

use cudarc::driver::CudaSlice;
use interop::{LEN, Mode, PATIENCE, Rig, pattern};
use pinpool::{Error, PinnedBuffer};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

const CODES: [u32; 12] = [2, 1, 712, 801, 800, 4, 3, 201, 709, 700, 999, 600];

/// What the pool calls; cudarc calls some of it too.
const ENTRIES: [&str; 20] = [
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxGetState",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxGetDevice",
    "cuCtxGetId",
    "cuCtxSynchronize",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuStreamIsCapturing",
    "cuStreamGetId",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventDestroy_v2",
    "cuThreadExchangeStreamCaptureMode",
];

/// One run: a pool on the fake device, and what its copies have to bring there.
struct Stage {
    rig: Rig,
    copies: RefCell<Vec<(CudaSlice<u8>, Vec<u8>)>>,
    /// Device memory of zeros, made before anything fails.
    spare: RefCell<Vec<CudaSlice<u8>>>,
}

impl Stage {
    fn new(mode: Mode) -> Self {
        let rig = Rig::new(mode);
        let spare = (0..4).map(|_| rig.device(LEN)).collect();
        Self { rig, copies: RefCell::default(), spare: RefCell::new(spare) }
    }

    fn warm(&self) -> PinnedBuffer {
        drop(self.rig.pool.take(LEN));
        self.settle();
        let mut buffer = self.rig.pool.take(LEN);
        assert!(buffer.iter().all(|byte| *byte == 0), "old bytes reached a taker");
        buffer.copy_from_slice(&pattern(3, LEN));
        buffer
    }

    /// A copy that the driver took must bring what the buffer holds now.
    fn expect(&self, device: CudaSlice<u8>, buffer: &[u8], taken: bool) {
        match taken {
            true => self.copies.borrow_mut().push((device, buffer.to_vec())),
            false => self.spare.borrow_mut().push(device),
        }
    }

    fn device(&self) -> CudaSlice<u8> {
        self.spare.borrow_mut().pop().expect("enough of it")
    }

    fn settle(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.rig.fake.run_until_idle();
            if self.rig.pool.drain(Duration::from_millis(3)) {
                return;
            }
            assert!(Instant::now() < deadline, "the pool does not settle: {:#?}", self.rig.pool.stats());
        }
    }
}

type Scenario = (&'static str, Mode, fn(&Stage));

const SCENARIOS: &[Scenario] = &[
    ("a copy that records itself", Mode::Tracked, copy_to),
    ("an upload", Mode::Tracked, upload),
    ("a download", Mode::Tracked, download),
    ("cudarc's own copy, noted", Mode::Tracked, noted),
    ("cudarc's own copy on the default stream, noted and recorded", Mode::DefaultStream, noted_and_recorded),
    ("cudarc's own copy of a slice, forgotten", Mode::Untracked, forgotten),
    ("a write after a copy", Mode::Tracked, write_again),
    ("page-locking by name", Mode::Tracked, by_name),
    ("clear, shutdown and restart", Mode::Tracked, restart),
];

fn copy_to(stage: &Stage) {
    let (mut buffer, mut device) = (stage.warm(), stage.device());
    let taken = buffer.copy_to(.., &stage.rig.stream, &mut device).is_ok();
    let bytes = pattern(3, LEN);
    stage.expect(device, &bytes, taken);
    stage.rig.fake.run_until_idle();
    drop(buffer);
    stage.settle();
}

fn upload(stage: &Stage) {
    let (buffer, mut device) = (stage.warm(), stage.device());
    let taken = buffer.upload(.., &stage.rig.stream, &mut device).is_ok();
    stage.expect(device, &pattern(3, LEN), taken);
    stage.settle();
}

fn download(stage: &Stage) {
    let (buffer, device) = (stage.warm(), stage.device());
    if let Ok(pending) = buffer.download(&stage.rig.stream, &device) {
        stage.rig.fake.run_until_idle();
        if let Ok(buffer) = pending.wait() {
            assert!(read(&buffer).is_none_or(|all_zero| all_zero), "other bytes than the device had");
        }
    }
    stage.expect(device, &[], false);
    stage.settle();
}

/// Whether it is all zero; `None` where a read panics as promised.
fn read(buffer: &PinnedBuffer) -> Option<bool> {
    promised(|| buffer.iter().all(|byte| *byte == 0))
}

fn noted(stage: &Stage) {
    let (buffer, mut device) = (stage.warm(), stage.device());
    let taken = stage.rig.stream.memcpy_htod(&buffer, &mut device).is_ok();
    stage.expect(device, &pattern(3, LEN), taken);
    drop(buffer);
    stage.settle();
}

fn noted_and_recorded(stage: &Stage) {
    let (mut buffer, mut device) = (stage.warm(), stage.device());
    let taken = stage.rig.stream.memcpy_htod(&buffer.view(..), &mut device).is_ok();
    stage.expect(device, &pattern(3, LEN), taken);
    let _ = buffer.record_last_use(&stage.rig.other);
    stage.rig.fake.run_until_idle();
    drop(buffer);
    stage.settle();
}

fn forgotten(stage: &Stage) {
    let (buffer, mut device) = (stage.warm(), stage.device());
    let taken = stage.rig.stream.memcpy_htod(&buffer[..], &mut device).is_ok();
    stage.expect(device, &pattern(3, LEN), taken);
    drop(buffer);
    // Nothing is stepped here: only a wait for the context executes the copy.
    stage.rig.pool.drain(PATIENCE);
    drop(stage.rig.pool.take(LEN));
    stage.settle();
}

fn write_again(stage: &Stage) {
    let (mut buffer, mut device) = (stage.warm(), stage.device());
    let taken = buffer.copy_to(.., &stage.rig.stream, &mut device).is_ok();
    stage.expect(device, &pattern(3, LEN), taken);
    stage.rig.fake.run_until_idle();
    promised(|| buffer.fill(9));
    drop(buffer);
    stage.settle();
}

/// Runs an access that panics only as promised.
fn promised<R>(access: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(access)) {
        Ok(result) => Some(result),
        Err(panic) => {
            let text = panic.downcast::<String>().expect("a text");
            assert!(text.starts_with("the buffer cannot be "), "{text}");
            None
        }
    }
}

fn by_name(stage: &Stage) {
    for _ in 0..2 {
        if let Ok(buffer) = stage.rig.pool.take_pinned(LEN) {
            assert!(buffer.is_pinned());
        }
        let _ = stage.rig.pool.prewarm(2 * LEN, 2);
        stage.settle();
    }
}

fn restart(stage: &Stage) {
    drop(stage.warm());
    stage.settle();
    stage.rig.pool.clear();
    drop(stage.warm());
    stage.settle();
    let report = stage.rig.pool.shutdown();
    assert!(report.completed, "{report:?}");
    drop(stage.warm());
    stage.settle();
}

/// What must hold afterwards; gives whether memory was quarantined.
fn check(stage: Stage, code: u32) -> bool {
    stage.rig.fake.clear_faults();
    // cudarc keeps errors of its own for the next call.
    while stage.rig.context.check_err().is_err() {}
    stage.rig.context.bind_to_thread().unwrap();
    stage.settle();
    stage.rig.fake.assert_clean();
    for (device, expected) in stage.copies.borrow().iter() {
        assert!(stage.rig.on_device(device) == *expected, "the device has other bytes than the buffer had");
    }
    let pool = &stage.rig.pool;
    match pool.take_pinned(LEN) {
        Ok(mut buffer) => {
            buffer.record_last_use(&stage.rig.stream).expect("a record afterwards");
            stage.rig.fake.run_until_idle();
        }
        Err(Error::NotPinned { reason, .. }) => {
            let explained = ["device is lost", "pauses", "supports neither"];
            assert!(explained.iter().any(|why| reason.contains(why)), "{reason}");
            assert!(pool.take(LEN).iter().all(|byte| *byte == 0));
        }
        Err(error) => panic!("take_pinned afterwards: {error}"),
    }
    stage.settle();
    let report = pool.shutdown();
    assert!(report.completed, "{report:?}");
    let stats = pool.stats();
    assert!(stats.is_balanced(), "{stats:#?}");
    assert_eq!(stats.registered_bytes, stats.quarantined_pinned_bytes, "what is registered is quarantined");
    if code != 801 {
        // With that the driver's own memory may have taken the place of registered memory.
        assert_eq!(stats.registered_bytes, stage.rig.registered(), "the driver counts otherwise: {stats:#?}");
    }
    stage.rig.fake.assert_clean();
    stats.quarantined_bytes > 0
}

#[test]
fn every_driver_call_can_fail_through_cudarc_and_libcuda() {
    let started = Instant::now();
    let (mut points, mut runs, mut leaking, mut number) = (0, 0, 0, 0);
    let mut failures = Vec::new();
    for (name, mode, play) in SCENARIOS {
        let mut run = |fault: Option<(&str, u64, u32)>| {
            let mut called = BTreeMap::new();
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                let stage = Stage::new(*mode);
                stage.rig.fake.reset_calls();
                if let Some((entry, nth, code)) = fault {
                    stage.rig.fake.fail(entry, nth, code);
                }
                play(&stage);
                called = ENTRIES.iter().map(|entry| (*entry, stage.rig.fake.calls(entry))).collect();
                check(stage, fault.map_or(0, |(_, _, code)| code))
            }));
            runs += 1;
            match outcome {
                Ok(leaks) => leaking += usize::from(leaks),
                Err(panic) => {
                    let text = panic.downcast::<String>().map_or_else(|_| "no text".into(), |text| *text);
                    failures.push(format!("{name} with {fault:?}: {}", &text[..text.len().min(300)]));
                }
            }
            called
        };
        for (entry, count) in run(None) {
            for nth in 1..=count {
                run(Some((entry, nth, CODES[number % CODES.len()])));
                number += 1;
                points += 1;
            }
            if count > 0 {
                // Always: not with a code that says "pending" for ever, or that a living context is gone.
                let codes = [999, 700, 2, 4];
                run(Some((entry, 0, codes[number % codes.len()])));
            }
        }
    }
    println!(
        "faults through libcuda: {} scenarios, {points} fault points, {} codes, {runs} runs in {:.1} s; {leaking} runs \
         quarantined memory",
        SCENARIOS.len(),
        CODES.len(),
        started.elapsed().as_secs_f64(),
    );
    assert!(failures.is_empty(), "{} runs failed:\n{}", failures.len(), failures.join("\n"));
}
