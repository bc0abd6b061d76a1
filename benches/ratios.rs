//! The rows of `take`, `recycle` and `contention` for both pools in one process, as ratios, with bars.
//!
//! `cargo bench --bench ratios` measures, prints the table of `benches/README.md` and fails when a bar is missed.
//! Without cargo's `--bench` (so under `cargo test --benches`), or with `--test`, each row runs once, unjudged.

mod classic;
mod common;

use classic::ClassicPool;
use common::{Pinpool, Rig, Subject, classic_constants, rows};
use std::process::ExitCode;
use std::time::Duration;

/// What a row is held to.
#[derive(Clone, Copy)]
enum Bar {
    None,
    /// The classic pool's time over pinpool's.
    TimesFaster(f64),
    /// pinpool's own time, in nanoseconds.
    Within(f64),
}

/// How often a row is measured: samples, and operations in each.
#[derive(Clone, Copy)]
struct Effort {
    samples: usize,
    operations: u64,
}

/// The medians of a row, in nanoseconds an operation.
struct Row {
    name: &'static str,
    classic_ns: f64,
    pinpool_ns: f64,
    bar: Bar,
}

struct Table {
    rows: Vec<Row>,
    /// Each row once: to see that it runs and that the bytes are right.
    only_once: bool,
}

impl Table {
    /// Measures one row for one pool: the median over the samples of the time an operation took.
    fn median(&self, effort: Effort, mut row: impl FnMut(u64) -> Duration) -> f64 {
        let Effort { samples, operations } =
            if self.only_once { Effort { samples: 1, operations: 1 } } else { effort };
        let of_one = |_| row(operations).as_nanos() as f64 / operations as f64;
        let mut times: Vec<f64> = (0..samples).map(of_one).collect();
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }

    fn add(&mut self, name: &'static str, bar: Bar, classic_ns: f64, pinpool_ns: f64) {
        eprintln!("  {name}");
        self.rows.push(Row { name, classic_ns, pinpool_ns, bar });
    }
}

impl Row {
    fn ratio(&self) -> f64 {
        self.classic_ns / self.pinpool_ns
    }

    fn misses_its_bar(&self) -> bool {
        match self.bar {
            Bar::None => false,
            Bar::TimesFaster(least) => self.ratio() < least,
            Bar::Within(most) => self.pinpool_ns > most,
        }
    }

    fn print(&self) {
        let bar = match self.bar {
            Bar::None => String::new(),
            Bar::TimesFaster(least) => format!("at least {least}x"),
            Bar::Within(most) => format!("within {}", shown(most)),
        };
        let verdict = if self.misses_its_bar() { " MISSED" } else { "" };
        let (classic, pinpool) = (shown(self.classic_ns), shown(self.pinpool_ns));
        println!("| {} | {classic} | {pinpool} | {:.1}x | {bar}{verdict} |", self.name, self.ratio());
    }
}

fn shown(ns: f64) -> String {
    match ns {
        _ if ns < 1e3 => format!("{ns:.0} ns"),
        _ if ns < 1e6 => format!("{:.1} us", ns / 1e3),
        _ => format!("{:.1} ms", ns / 1e6),
    }
}

const KIB_64: usize = 64 << 10;
const MIB_1: usize = 1 << 20;
const BURSTS: Effort = Effort { samples: 300, operations: common::BURST as u64 };
const ALONE: Effort = Effort { samples: 640, operations: 1 };

/// One row for one pool; a function and not a closure, because it is generic.
fn take_burst<S: Subject>(table: &Table) -> f64 {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    table.median(BURSTS, |operations| rows::take_burst(&subject, KIB_64, operations))
}

fn take_alone<S: Subject>(table: &Table) -> f64 {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    table.median(ALONE, |operations| rows::take_alone(&subject, KIB_64, operations))
}

fn drop_burst<S: Subject>(table: &Table) -> f64 {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    table.median(BURSTS, |operations| rows::drop_burst(&subject, &rig, KIB_64, operations))
}

fn drop_alone<S: Subject>(table: &Table) -> f64 {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    table.median(ALONE, |operations| rows::drop_alone(&subject, &rig, KIB_64, operations))
}

fn record<S: Subject>(table: &Table) -> f64 {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    table.median(BURSTS, |operations| rows::record(&subject, &rig, KIB_64, operations))
}

fn take_drop<S: Subject>(table: &Table, threads: usize) -> f64 {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, 4 << 10);
    let effort = Effort { samples: 15, operations: 20_000 };
    table.median(effort, |operations| rows::take_drop_loop(&subject, &rig, 4 << 10, threads, operations))
        / threads as f64
}

fn pinned_again<S: Subject>(table: &Table, bytes: usize) -> f64 {
    let rig = Rig::new();
    let subject: S = rows::with_one(&rig, bytes);
    let samples = if S::NAME == "pinpool" { 300 } else { 15 };
    let effort = Effort { samples, operations: 1 };
    table.median(effort, |operations| rows::drop_to_pinned_take(&subject, &rig, bytes, operations))
}

fn shelved_again<S: Subject>(table: &Table, bytes: usize) -> f64 {
    let rig = Rig::new();
    let subject: S = rows::with_one(&rig, bytes);
    let samples = if S::NAME == "pinpool" { 300 } else { 15 };
    table.median(Effort { samples, operations: 1 }, |operations| {
        rows::drop_to_shelf(&subject, &rig, bytes, operations)
    })
}

fn others_ready<S: Subject>(table: &Table) -> f64 {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    let pending = if table.only_once { Duration::from_millis(20) } else { Duration::from_secs(2) };
    let effort = Effort { samples: 3, operations: 1 };
    table.median(effort, |_| rows::others_ready(&subject, &rig, KIB_64, pending))
}

fn main() -> ExitCode {
    let has = |flag: &str| std::env::args().any(|argument| argument == flag);
    let mut table = Table { rows: Vec::new(), only_once: has("--test") || !has("--bench") };
    let t = &mut table;
    macro_rules! row {
        ($name:literal, $bar:expr, $measure:ident $(, $more:expr)*) => {
            let (classic, pinpool) = ($measure::<ClassicPool>(t $(, $more)*), $measure::<Pinpool>(t $(, $more)*));
            t.add($name, $bar, classic, pinpool);
        };
    }
    row!("take hit, burst of 64", Bar::TimesFaster(1.0), take_burst);
    row!("take hit, one per 200 us", Bar::TimesFaster(1.0), take_alone);
    row!("drop, burst of 64", Bar::None, drop_burst);
    row!("drop, one per 200 us", Bar::TimesFaster(5.0), drop_alone);
    row!("record_last_use", Bar::None, record);
    row!("take, record, drop in a loop, 4 KiB, 1 thread", Bar::None, take_drop, 1);
    row!("take, record, drop in a loop, 4 KiB, 2 threads", Bar::None, take_drop, 2);
    row!("drop to pinned take, 64 KiB dirty", Bar::TimesFaster(1000.0), pinned_again, KIB_64);
    row!("drop to pinned take, 1 MiB dirty", Bar::None, pinned_again, MIB_1);
    row!("drop to shelf with no taker, 64 KiB dirty", Bar::None, shelved_again, KIB_64);
    row!("one event pending for 2 s: 63 others ready", Bar::Within(5e6), others_ready);

    println!("| | classic | pinpool | ratio | bar |\n|---|---|---|---|---|");
    table.rows.iter().for_each(Row::print);
    println!("\n{}. Medians; the simulated device is free of cost in both.", classic_constants());
    let missed = table.rows.iter().filter(|row| row.misses_its_bar()).count();
    if table.only_once {
        println!("Each row ran once, unjudged.");
        return ExitCode::SUCCESS;
    }
    println!("{missed} bars missed.");
    ExitCode::from(u8::from(missed > 0))
}
