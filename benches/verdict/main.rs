//! Is a user better off with this pool than with anything else? Every row for pinpool and for the alternatives, in
//! one process, on the same simulated device, with answers checked and a bar for each.
//!
//! ```text
//! cargo bench --bench verdict                   measures, prints the table of `benches/README.md`, writes a page with
//!                                               plots under `target/verdict/`, fails when a bar is missed
//! cargo bench --bench verdict -- --quick        few samples; fails only on a wrong answer
//! cargo bench --bench verdict -- --json         prints a list of objects instead of the table
//! cargo bench --bench verdict -- "take hit"     the rows with that in their name
//! ```
//!
//! Without cargo's `--bench` (so under `cargo test --benches`) each row runs once, unjudged.

mod alternatives;
#[path = "../classic/mod.rs"]
mod classic;
#[path = "../common/mod.rs"]
mod common;
#[cfg(target_os = "linux")]
mod fork;
mod hot;
mod memory;
mod page;
mod ready;
mod report;
mod steady;
mod table;

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

use std::process::ExitCode;
use table::{Effort, Suite};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let effort = match () {
        () if has("--test") || !has("--bench") => Effort::Once,
        () if has("--quick") => Effort::Quick,
        () => Effort::Full,
    };
    let wanted = arguments.iter().find(|argument| !argument.starts_with("--")).cloned().unwrap_or_default();
    let mut suite = Suite { rows: Vec::new(), effort, wanted, notes: vec![common::classic_constants()] };
    #[cfg(feature = "cudarc")]
    caller::add(&mut suite); // first, since it has to load the fake libcuda before anything looks for one
    hot::add(&mut suite);
    ready::add(&mut suite);
    steady::add(&mut suite);
    memory::add(&mut suite);
    #[cfg(target_os = "linux")]
    fork::add(&mut suite);
    suite.note("Medians; between brackets the least and the greatest ratio of a turn.".into());

    if effort == Effort::Once {
        println!("{} rows ran once, unjudged.", suite.rows.len());
        return ExitCode::SUCCESS;
    }
    if has("--json") {
        println!("{}", report::as_json(&suite));
    } else {
        println!("{}", report::as_table(&suite));
        suite.notes.iter().for_each(|note| println!("* {note}"));
    }
    match page::write(&suite) {
        Ok(path) => eprintln!("plots: {}", path.display()),
        Err(error) => eprintln!("the page with the plots could not be written: {error}"),
    }
    let missed: Vec<&str> =
        suite.rows.iter().filter(|row| !row.is_ok()).map(|row| row.name.as_str()).collect();
    eprintln!("{} of {} rows miss their bar: {missed:?}", missed.len(), suite.rows.len());
    ExitCode::from(u8::from(effort == Effort::Full && !missed.is_empty()))
}
