//! The table of events in `docs/operations.md`, which is what users go by.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use tracing::Level;

const OPERATIONS: &str = include_str!("../../docs/operations.md");

/// What the documentation says of an event.
#[derive(Debug)]
pub struct Documented {
    pub levels: Vec<Level>,
    pub fields: BTreeSet<String>,
    /// Some of the fields may be missing.
    pub perhaps: bool,
}

fn in_backticks(cell: &str) -> impl Iterator<Item = String> + '_ {
    cell.split('`').skip(1).step_by(2).map(str::to_owned)
}

/// By name.
pub fn events() -> BTreeMap<String, Documented> {
    let table = OPERATIONS.split("| event | level | fields | when |").nth(1).expect("the table of events");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.flat_map(|row| {
        let cells: Vec<&str> = row.split('|').collect();
        let levels: Vec<Level> =
            cells[2].split(", then").map(|level| level.trim().parse().expect("a level")).collect();
        let fields: BTreeSet<String> = in_backticks(cells[3]).collect();
        let perhaps = cells[3].contains("perhaps");
        let documented =
            move |name| (name, Documented { levels: levels.clone(), fields: fields.clone(), perhaps });
        in_backticks(cells[1]).map(documented).collect::<Vec<_>>()
    })
    .collect()
}

/// The spans, with their fields.
pub fn spans() -> BTreeMap<String, BTreeSet<String>> {
    let text = OPERATIONS.split("Spans, for subscribers that measure:").nth(1).expect("the spans");
    let text = text.split("all on the").next().expect("their end");
    let spans = text.split(')').filter(|span| span.contains('('));
    spans
        .map(|span| {
            let (name, fields) = span.split_once('(').expect("its fields");
            (in_backticks(name).next().expect("its name"), in_backticks(fields).collect())
        })
        .collect()
}

/// The names of all events that the sources can say.
pub fn in_the_sources() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut names);
    names
}

fn collect(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).expect("the sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).expect("a source file");
            let said = text.split("say!(").skip(1).chain(text.split("say_failure!(").skip(1));
            // The name is the first literal; the macros themselves have a variable there.
            let named =
                said.filter_map(|call| call.split_once('"')).filter(|(before, _)| !before.contains('$'));
            names.extend(named.filter_map(|(_, rest)| rest.split('"').next()).map(str::to_owned));
        }
    }
}
