//! The caller's time per segment of `examples/proving_loop`, through cudarc and the fake `libcuda`, in every way of
//! getting memory for a copy.
#![allow(unsafe_code)] // cudarc's `alloc_pinned` gives memory that is not initialised

use crate::device::{Device, text};
use crate::input::{Input, Segment};
use crate::options::Options;
use crate::others::{RegisterStager, VecStager};
use crate::pool::PoolStager;
use crate::staging::{Lane, Outcome, Stager, lanes, run};
use crate::table::{Bar, Suite, Unit};
use cudarc::driver::{CudaContext, PinnedHostSlice};
use std::sync::Arc;

const ALLOC: &str = "alloc_pinned per use";

pub fn add(suite: &mut Suite) {
    let name = "caller time per segment of proving_loop";
    if !suite.wants(name) {
        return;
    }
    let device = Device::find().expect("the fake libcuda was built with this bench");
    let context = CudaContext::new(0).expect("there is a device");
    let options = Options {
        inputs: Vec::new(),
        segments: suite.effort.pick(200, 60, 16),
        in_flight: 3,
        period_ms: 0.0,
        bytes: 1 << 20,
        json: true,
    };
    let input = Input::read(&[]).expect("the sources are there");
    let mut lanes = lanes(&context, &options).expect("there is device memory");
    let bytes = options.bytes;
    let slots = || (0..options.in_flight).map(|_| None).collect();
    let mut stagers: Vec<Box<dyn Stager>> = vec![
        Box::new(PoolStager { bytes, ..PoolStager::default() }),
        Box::new(VecStager { bytes }),
        Box::new(RegisterStager { bytes, in_flight: slots() }),
        Box::new(AllocStager { bytes, context: context.clone(), in_flight: (0..3).map(|_| None).collect() }),
    ];
    let names: Vec<&'static str> = stagers.iter().map(|stager| stager.name()).collect();
    let mut measured: Vec<Vec<Vec<f64>>> = vec![Vec::new(); names.len()];
    for _ in 0..suite.effort.turns() {
        for (column, stager) in measured.iter_mut().zip(&mut stagers) {
            let outcome =
                run(stager.as_mut(), &input, &options, &mut lanes).expect("every segment is staged");
            column.push(times(&outcome));
        }
    }
    drop(stagers);
    let end = pinpool::shutdown();
    assert!(
        end.completed && end.registered_bytes_after == 0,
        "the pool did not let go of everything: {end:?}"
    );
    assert_eq!(device.violations(), Vec::<String>::new());
    let columns = names.into_iter().zip(measured).map(|(name, turns)| crate::table::Column { name, turns });
    suite.add_measured(crate::table::Row {
        name: name.into(),
        unit: Unit::Nanoseconds,
        columns: columns.collect(),
        bars: vec![Bar::Of("vec![0; n]", 1.0), Bar::Of("register per use", 1.0), Bar::Of(ALLOC, 1.0)],
    });
    if let Some(constants) = device.constants() {
        suite.note(format!(
            "proving_loop: segments of {} KiB, a quarter to all of it filled, {} in flight; simulated: {constants}.",
            bytes >> 10,
            options.in_flight
        ));
    }
}

/// The first tenth is left out: a pool has to get its buffers first.
fn times(outcome: &Outcome) -> Vec<f64> {
    assert_eq!(outcome.mismatches, 0, "{}: segments came back wrong", outcome.name);
    outcome.stage_ns[outcome.stage_ns.len() / 10..].iter().map(|ns| *ns as f64).collect()
}

/// `CudaContext::alloc_pinned` (`cuMemHostAlloc`) for every segment.
struct AllocStager {
    bytes: usize,
    context: Arc<CudaContext>,
    in_flight: Vec<Option<PinnedHostSlice<u8>>>,
}

impl Stager for AllocStager {
    fn name(&self) -> &'static str {
        ALLOC
    }

    fn stage(&mut self, slot: usize, segment: &Segment<'_>, onto: &mut Lane) -> Result<(), String> {
        // SAFETY: cuMemHostAlloc gives memory that is not initialised; all of it is written below.
        let mut arena = unsafe { self.context.alloc_pinned::<u8>(self.bytes) }.map_err(text)?;
        let bytes = arena.as_mut_slice().map_err(text)?;
        bytes.fill(0);
        segment.fill(bytes);
        onto.stream.memcpy_htod(&arena, &mut onto.device).map_err(text)?;
        self.in_flight[slot] = Some(arena);
        Ok(())
    }

    fn copied(&mut self, slot: usize) -> Result<(), String> {
        self.in_flight[slot] = None; // frees it, now that the copy is done
        Ok(())
    }
}
