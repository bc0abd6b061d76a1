//! The rows of `take`, `recycle` and `contention` for both pools in one process, as ratios, with bars.
//!
//! `cargo bench --bench ratios` measures, prints the table of `benches/README.md` and fails when a bar is missed.
//! `cargo bench --bench ratios -- "take hit"` measures the rows with that in their name.
//! Without cargo's `--bench` (so under `cargo test --benches`), or with `--test`, each row runs once, unjudged.

mod classic;
mod common;

use classic::ClassicPool;
use common::rows::{self, Use};
use common::{Pinpool, Rig, Subject, classic_constants};
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
    /// Rows whose name has this in it; all when nothing was asked for.
    wanted: String,
}

impl Table {
    /// The times of one row for one pool, in nanoseconds an operation.
    fn measure(&self, effort: Effort, mut row: impl FnMut(u64) -> Duration) -> Vec<f64> {
        let Effort { samples, operations } =
            if self.only_once { Effort { samples: 1, operations: 1 } } else { effort };
        let of_one = |_| row(operations).as_nanos() as f64 / operations as f64;
        (0..samples).map(of_one).collect()
    }

    /// Measures both pools by turns, so that what else the machine does meanwhile falls on both.
    fn add(
        &mut self,
        name: &'static str,
        bar: Bar,
        classic: impl Fn(&Self) -> Vec<f64>,
        pinpool: impl Fn(&Self) -> Vec<f64>,
    ) {
        if !name.contains(&self.wanted) {
            return;
        }
        eprintln!("  {name}");
        let turns = if self.only_once { 1 } else { TURNS };
        let (mut classic_ns, mut pinpool_ns) = (Vec::new(), Vec::new());
        for _ in 0..turns {
            classic_ns.extend(classic(self));
            pinpool_ns.extend(pinpool(self));
        }
        self.rows.push(Row { name, classic_ns: median(classic_ns), pinpool_ns: median(pinpool_ns), bar });
    }
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
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

const KIB_4: usize = 4 << 10;
const KIB_64: usize = 64 << 10;
const MIB_1: usize = 1 << 20;
const TURNS: usize = 5;
const BURSTS: Effort = Effort { samples: 300, operations: common::BURST as u64 };
const ALONE: Effort = Effort { samples: 192, operations: 1 };

/// One row for one pool; a function and not a closure, because it is generic.
fn take_burst<S: Subject>(table: &Table) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    table.measure(BURSTS, |operations| rows::take_burst(&subject, &rig, KIB_64, operations))
}

fn take_alone<S: Subject>(table: &Table) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    table.measure(ALONE, |operations| rows::take_alone(&subject, &rig, KIB_64, operations))
}

fn drop_burst<S: Subject>(table: &Table) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    table.measure(BURSTS, |operations| rows::drop_burst(&subject, &rig, KIB_64, operations))
}

fn drop_alone<S: Subject>(table: &Table) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    table.measure(ALONE, |operations| rows::drop_alone(&subject, &rig, KIB_64, operations))
}

fn record<S: Subject>(table: &Table) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    table.measure(BURSTS, |operations| rows::record(&subject, &rig, KIB_64, operations))
}

fn take_drop<S: Subject>(table: &Table, threads: usize, between: Use) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_4);
    let effort = Effort { samples: 5, operations: 20_000 };
    let how = (threads, between);
    let one = |operations| rows::take_drop_loop(&subject, &rig, KIB_4, how, operations) / threads as u32;
    table.measure(effort, one)
}

fn pinned_again<S: Subject>(table: &Table, bytes: usize) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S = rows::with_one(&rig, bytes);
    let samples = if S::NAME == "pinpool" { 100 } else { 3 };
    let effort = Effort { samples, operations: 1 };
    table.measure(effort, |operations| rows::drop_to_pinned_take(&subject, &rig, bytes, operations))
}

fn shelved_again<S: Subject>(table: &Table, bytes: usize) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S = rows::with_one(&rig, bytes);
    let samples = if S::NAME == "pinpool" { 100 } else { 3 };
    table.measure(Effort { samples, operations: 1 }, |operations| {
        rows::drop_to_shelf(&subject, &rig, bytes, operations)
    })
}

fn others_ready<S: Subject>(table: &Table) -> Vec<f64> {
    let rig = Rig::new();
    let subject: S = rows::warmed(&rig, KIB_64);
    let pending = if table.only_once { Duration::from_millis(20) } else { Duration::from_secs(2) };
    let effort = Effort { samples: 1, operations: 1 };
    table.measure(effort, |_| rows::others_ready(&subject, &rig, KIB_64, pending))
}

fn main() -> ExitCode {
    let has = |flag: &str| std::env::args().any(|argument| argument == flag);
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with("--")).unwrap_or_default();
    let mut table = Table { rows: Vec::new(), only_once: has("--test") || !has("--bench"), wanted };
    let t = &mut table;
    macro_rules! row {
        ($name:literal, $bar:expr, $measure:ident $(, $more:expr)*) => {
            t.add($name, $bar, |t| $measure::<ClassicPool>(t $(, $more)*), |t| $measure::<Pinpool>(t $(, $more)*));
        };
    }
    row!("take hit, burst of 64", Bar::TimesFaster(1.0), take_burst);
    row!("take hit, one per 200 us", Bar::TimesFaster(1.0), take_alone);
    row!("drop, burst of 64", Bar::None, drop_burst);
    row!("drop, one per 200 us", Bar::TimesFaster(5.0), drop_alone);
    row!("record_last_use", Bar::None, record);
    row!("take, drop in a loop, 4 KiB, 1 thread", Bar::None, take_drop, 1, Use::Nothing);
    row!("take, drop in a loop, 4 KiB, 2 threads", Bar::None, take_drop, 2, Use::Nothing);
    row!("take, record, drop in a loop, 4 KiB, 1 thread", Bar::None, take_drop, 1, Use::Record);
    row!("take, record, drop in a loop, 4 KiB, 2 threads", Bar::None, take_drop, 2, Use::Record);
    row!("drop to pinned take, 64 KiB dirty", Bar::TimesFaster(1000.0), pinned_again, KIB_64);
    row!("drop to pinned take, 1 MiB dirty", Bar::None, pinned_again, MIB_1);
    row!("drop to shelf with no taker, 64 KiB dirty", Bar::None, shelved_again, KIB_64);
    row!("one event pending for 2 s: 63 others ready", Bar::Within(5e6), others_ready);

    if table.only_once {
        println!("{} rows ran once, unjudged.", table.rows.len());
        return ExitCode::SUCCESS;
    }
    println!("| | classic | pinpool | ratio | bar |\n|---|---|---|---|---|");
    table.rows.iter().for_each(Row::print);
    println!("\n{}. Medians; the simulated device is free of cost in both.", classic_constants());
    let missed = table.rows.iter().filter(|row| row.misses_its_bar()).count();
    println!("{missed} bars missed.");
    ExitCode::from(u8::from(missed > 0))
}
