//! Is a user better off with this pool than with anything else? Every row for pinpool and for the alternatives, in
//! one process, on the same simulated device, with answers checked and a bar for each.
//!
//! ```text
//! cargo bench --bench verdict                   measures, prints the table of `benches/README.md`, writes a page with
//!                                               plots under `target/verdict/`, fails when a bar is missed
//! cargo bench --bench verdict -- --quick        few samples; fails only on a wrong answer
//! cargo bench --bench verdict -- --json         prints a list of objects instead of the table
//! cargo bench --bench verdict -- "take hit"     the rows with that in their name
//! cargo bench --bench verdict -- --repeat 5     so many runs, each a process of its own, and their medians
//! cargo bench --bench verdict -- --against PATH  pinpool's numbers here and with another build of this bench, by turns
//! ```
//!
//! Without cargo's `--bench` (so under `cargo test --benches`) each row runs once, unjudged, and the bench checks its own
//! reports (`check.rs`).

mod alternatives;
mod arguments;
mod check;
#[path = "../classic/mod.rs"]
mod classic;
#[path = "../common/mod.rs"]
mod common;
#[cfg(target_os = "linux")]
mod fork;
mod fresh;
mod hot;
mod memory;
mod page;
mod ready;
mod report;
mod steady;
mod table;
mod turns;

// The main job is measured as it is, so its parts are the example's.
#[cfg(feature = "cudarc")]
mod caller;
#[cfg(feature = "cudarc")]
#[path = "../../examples/proving_loop/device.rs"]
#[allow(dead_code)]
mod device;
#[cfg(feature = "cudarc")]
#[path = "../../examples/proving_loop/input.rs"]
#[allow(dead_code)]
mod input;
#[cfg(feature = "cudarc")]
#[path = "../../examples/proving_loop/options.rs"]
#[allow(dead_code)]
mod options;
#[cfg(feature = "cudarc")]
#[path = "../../examples/proving_loop/others.rs"]
mod others;
#[cfg(feature = "cudarc")]
#[path = "../../examples/proving_loop/pool.rs"]
#[allow(dead_code)]
mod pool;
#[cfg(feature = "cudarc")]
#[path = "../../examples/proving_loop/staging.rs"]
#[allow(dead_code)]
mod staging;

use arguments::Arguments;
use std::process::ExitCode;
use table::{Effort, Suite};

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<ExitCode, String> {
    if std::env::args().any(|argument| argument == "--help") {
        println!("{}", arguments::USAGE);
        return Ok(ExitCode::SUCCESS);
    }
    let arguments = Arguments::read(std::env::args().skip(1))?;
    if arguments.effort == Effort::Once {
        check::all();
        let suite = measured(&arguments);
        assert_eq!(check::faults_of(&report::as_json(&suite)), Vec::<String>::new());
        println!("{} rows ran once, unjudged.", suite.rows.len());
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(other) = &arguments.against {
        println!("{}", turns::compared(other, &arguments)?);
        return Ok(ExitCode::SUCCESS);
    }
    let suite = if arguments.repeat > 0 { turns::repeated(&arguments)? } else { measured(&arguments) };
    if suite.rows.is_empty() {
        return Err(format!("no row has {:?} in its name", arguments.wanted));
    }
    let json = report::as_json(&suite);
    if arguments.as_json {
        println!("{json}");
    } else {
        println!("{}", report::as_table(&suite));
        suite.notes.iter().for_each(|note| println!("* {note}"));
    }
    match page::write(&suite) {
        Ok(path) => eprintln!("plots: {}", path.display()),
        Err(error) => eprintln!("the page with the plots could not be written: {error}"),
    }
    let faults = check::faults_of(&json);
    if !faults.is_empty() {
        return Err(format!("the report is wrong: {faults:#?}"));
    }
    let missed = suite.missed();
    eprintln!("{} of {} rows miss their bar: {missed:?}", missed.len(), suite.rows.len());
    Ok(ExitCode::from(u8::from(suite.is_failed())))
}

/// Every row that was asked for, measured in this process.
fn measured(arguments: &Arguments) -> Suite {
    let notes = vec![common::classic_constants()];
    let wanted = arguments.wanted.clone();
    let mut suite = Suite { rows: Vec::new(), effort: arguments.effort, wanted, notes };
    #[cfg(feature = "cudarc")]
    caller::add(&mut suite); // first, since it has to load the fake libcuda before anything looks for one
    hot::add(&mut suite);
    ready::add(&mut suite);
    steady::add(&mut suite);
    fresh::add(&mut suite);
    memory::add(&mut suite);
    #[cfg(target_os = "linux")]
    fork::add(&mut suite);
    suite.note("The ratio is of the medians; between brackets the least and the greatest of a turn, so it may lie outside.".into());
    suite
}
