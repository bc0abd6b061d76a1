//! What a case is made of: a setup and a list of operations, how they are drawn, and how a failing one is printed.
//!
//! Guards and streams are named by an index that is taken modulo how many there are, and what makes no sense at its place
//! does nothing, so that every part of a script is a script and shrinking finds a short one.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

pub const KIB: usize = 1 << 10;

/// What a script runs on.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// 0: no device at all, `Driver::host_only`.
    pub devices: u8,
    /// The device reads pageable memory itself (attribute 88).
    pub reads_pageable: bool,
    /// What is page-locked is memory of the driver's (`Backing::HostPinned`).
    pub allocates: bool,
    pub contexts: Contexts,
    pub cap: usize,
    pub ceiling: usize,
    pub zero_limit: usize,
    /// Of the simulated device: which stream goes on at a step.
    pub seed: u64,
}

/// What becomes of the application's contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Contexts {
    /// They are there all the time.
    Stay,
    /// They are ended, left, and made anew; besides the primary ones there may be one that was created.
    Change,
    /// And at the start there are none.
    Late,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum How {
    Plain,
    Try,
    Exact,
    Unzeroed,
    Pinned,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Text {
    /// All of it, by a slice.
    Whole,
    /// So many 255ths, by a slice, and `set_dirty_len`.
    Prefix(u8),
    /// So many 255ths, by the writer.
    Written(u8),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Times {
    Once,
    Second,
    Always,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    Take(How, usize),
    Fill(u8, Text),
    /// Guard, stream, so many 255ths; recorded or not.
    CopyOut(u8, u8, u8, bool),
    /// Guard, stream: a copy from the device, recorded.
    CopyBack(u8, u8),
    Record(u8, u8),
    /// On another thread or here.
    Drop(u8, bool),
    AssumeQuiescent(u8),
    Wait(u8),
    IsQuiescent(u8),
    Hold(u8),
    Release(u8),
    Step(u8),
    RunUntilIdle,
    /// Destroys a stream, whose work goes on, and makes another, which gets the same handle.
    Renew(u8),
    /// Another device's context becomes current.
    Bind(u8),
    /// The cleaner works until nothing is left that it can do.
    Settle,
    Drain,
    SetCap(usize),
    TrimTo(usize),
    Clear,
    Prewarm(usize, u8),
    Shutdown,
    /// So many times ten minutes pass.
    LetTimePass(u8),
    /// Memory of the application's own is page-locked.
    PinOwn,
    /// Own memory, stream: a copy to the device, recorded.
    CopyOwn(u8, u8),
    DropOwn(u8),
    /// Stream, mode.
    BeginCapture(u8, u8),
    EndCapture(u8),
    /// Graph, stream.
    Launch(u8, u8),
    DropGraph(u8),
    /// The application makes a context, if it has none there: one for each device, and one of its own.
    MakeContext(u8),
    /// A context is reset or destroyed with everything in it.
    EndContext(u8),
    /// The application lets go of its streams and of the context.
    LeaveContext(u8),
    /// Entry point (an index into [`FAULTS`]).
    Fail(u8, Times),
    ClearFaults,
    /// The device of a context is lost: unfinished work is never done, and every call answers 700.
    Break(u8),
}

/// Entry points with a code that each may answer.
pub const FAULTS: &[(&str, u32)] = &[
    ("cuMemHostRegister", 2),
    ("cuMemHostRegister", 712),
    ("cuMemHostUnregister", 1),
    ("cuMemHostAlloc", 2),
    ("cuMemFreeHost", 1),
    ("cuEventRecord", 999),
    ("cuEventQuery", 999),
    ("cuEventCreate", 2),
    ("cuCtxSynchronize", 999),
    ("cuStreamIsCapturing", 999),
    ("cuCtxSetCurrent", 999),
];

/// What the scripts of one test have in common.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    pub name: &'static str,
    pub devices: &'static [u8],
    pub caps: &'static [usize],
    pub has_ceiling: bool,
    pub has_faults: bool,
    /// Contexts come and go.
    pub has_contexts: bool,
    /// Streams capture graphs.
    pub has_graphs: bool,
    /// The application page-locks memory of its own.
    pub has_own: bool,
    pub operations: usize,
}

pub fn setups(profile: Profile) -> impl Strategy<Value = Setup> {
    let contexts: &[Contexts] =
        if profile.has_contexts { &[Contexts::Change, Contexts::Late] } else { &[Contexts::Stay] };
    let ceilings: &[usize] = if profile.has_ceiling { &[64 * KIB, 20 * KIB, 8 * KIB] } else { &[usize::MAX] };
    (
        select(profile.devices),
        prop::bool::weighted(0.15),
        prop::bool::weighted(0.2),
        select(contexts),
        select(profile.caps),
        select(ceilings),
        select(vec![usize::MAX, usize::MAX, 5000, 0]),
        1..1000u64,
    )
        .prop_map(|(devices, reads_pageable, allocates, contexts, cap, ceiling, zero_limit, seed)| {
            Setup {
                devices,
                reads_pageable: reads_pageable && devices > 0,
                allocates: allocates && devices > 0,
                contexts,
                cap,
                ceiling,
                zero_limit,
                seed,
            }
        })
}

pub fn scripts(profile: Profile) -> impl Strategy<Value = (Setup, Vec<Op>)> {
    (setups(profile), vec(operations(profile), 1..profile.operations))
}

fn sizes() -> impl Strategy<Value = usize> {
    prop_oneof![
        30 => select(vec![1, 4096, 100, 5000, 8192, 3000, 12_000, 33_000]),
        3 => 0..70_000usize,
        1 => select(vec![300 * KIB, 1500 * KIB]),
    ]
}

fn operations(profile: Profile) -> impl Strategy<Value = Op> {
    let guard = 0..6u8;
    let stream = 0..6u8;
    let how = prop_oneof![
        8 => Just(How::Plain),
        1 => Just(How::Try),
        1 => Just(How::Exact),
        2 => Just(How::Unzeroed),
        1 => Just(How::Pinned),
    ];
    let text = prop_oneof![
        Just(Text::Whole),
        any::<u8>().prop_map(Text::Prefix),
        any::<u8>().prop_map(Text::Written),
    ];
    let caps = select(profile.caps).prop_union(select(&[0, 4 * KIB, 12 * KIB, 20 * KIB][..]));
    let times = prop_oneof![4 => Just(Times::Once), 1 => Just(Times::Second), 1 => Just(Times::Always)];
    let faults = if profile.has_faults { 10 } else { 0 };
    let contexts = if profile.has_contexts { 8 } else { 0 };
    let graphs = if profile.has_graphs { 45 } else { 0 };
    let own = if profile.has_own { 3 } else { 0 };
    let of_guards = prop_oneof![
        22 => (how, sizes()).prop_map(|(how, size)| Op::Take(how, size)),
        14 => (guard.clone(), text).prop_map(|(guard, text)| Op::Fill(guard, text)),
        16 => (guard.clone(), stream.clone(), any::<u8>(), prop::bool::weighted(0.8))
            .prop_map(|(guard, stream, part, recorded)| Op::CopyOut(guard, stream, part, recorded)),
        3 => (guard.clone(), stream.clone()).prop_map(|(guard, stream)| Op::CopyBack(guard, stream)),
        8 => (guard.clone(), stream.clone()).prop_map(|(guard, stream)| Op::Record(guard, stream)),
        20 => (guard.clone(), prop::bool::weighted(0.1)).prop_map(|(guard, away)| Op::Drop(guard, away)),
        6 => guard.clone().prop_map(Op::AssumeQuiescent),
        2 => guard.clone().prop_map(Op::Wait),
        2 => guard.prop_map(Op::IsQuiescent),
    ];
    let of_device = prop_oneof![
        5 => stream.clone().prop_map(Op::Hold),
        4 => stream.clone().prop_map(Op::Release),
        8 => (1..6u8).prop_map(Op::Step),
        3 => Just(Op::RunUntilIdle),
        1 => stream.clone().prop_map(Op::Renew),
        1 => (0..3u8).prop_map(Op::Bind),
    ];
    let of_pool = prop_oneof![
        16 => Just(Op::Settle),
        1 => Just(Op::Drain),
        2 => caps.prop_map(Op::SetCap),
        2 => select(vec![0, 4 * KIB, 8 * KIB, 16 * KIB, 40 * KIB]).prop_map(Op::TrimTo),
        1 => Just(Op::Clear),
        2 => (sizes(), 1..4u8).prop_map(|(size, count)| Op::Prewarm(size, count)),
        1 => Just(Op::Shutdown),
        2 => select(vec![1, 3, 7]).prop_map(Op::LetTimePass),
    ];
    let of_faults = prop_oneof![
        18 => (0..FAULTS.len() as u8, times).prop_map(|(call, times)| Op::Fail(call, times)),
        12 => Just(Op::ClearFaults),
        1 => (0..2u8).prop_map(Op::Break),
    ];
    let of_own = prop_oneof![
        2 => Just(Op::PinOwn),
        4 => (0..3u8, stream.clone()).prop_map(|(own, stream)| Op::CopyOwn(own, stream)),
        2 => (0..3u8).prop_map(Op::DropOwn),
    ];
    let of_graphs = prop_oneof![
        8 => (stream.clone(), 0..3u8).prop_map(|(stream, mode)| Op::BeginCapture(stream, mode)),
        8 => stream.clone().prop_map(Op::EndCapture),
        9 => (0..4u8, stream).prop_map(|(graph, stream)| Op::Launch(graph, stream)),
        8 => (0..4u8).prop_map(Op::DropGraph),
    ];
    let index = prop_oneof![3 => Just(0u8), 2 => 1..3u8];
    let of_contexts = prop_oneof![
        8 => index.clone().prop_map(Op::MakeContext),
        3 => index.clone().prop_map(Op::EndContext),
        2 => index.prop_map(Op::LeaveContext),
    ];
    prop_oneof![80 => of_guards, 22 => of_device, 25 => of_pool, own => of_own, graphs => of_graphs, contexts => of_contexts, faults => of_faults]
}

/// As a test that can be pasted into `regressions.rs`.
pub fn as_a_test(setup: &Setup, script: &[Op]) -> String {
    let lines: String = script.iter().map(|op| format!("            {op:?},\n")).collect();
    format!(
        "#[test]\nfn named_for_the_promise_that_was_broken() {{\n    replay(\n        {setup:?},\n        &[\n{lines}        \
         ],\n    );\n}}\n"
    )
}
