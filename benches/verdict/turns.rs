//! Several runs, each a process of its own: of this build for medians over runs (`--repeat`), or by turns with another
//! build (`--against`), so that what else the machine does falls on both.

use crate::arguments::Arguments;
use crate::report::AT_MOST;
use crate::table::{Bar, Column, Effort, Row, Suite, Unit, median, shown, shown_ratio};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};

/// By turns without a number: each is the first twice.
const TURNS: usize = 4;

/// All runs as one suite, of which each run is a turn.
pub fn repeated(arguments: &Arguments) -> Result<Suite, String> {
    let binary = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut rows: Vec<Row> = Vec::new();
    for number in 1..=arguments.repeat {
        eprintln!("run {number} of {}", arguments.repeat);
        for row in read(&run(&binary, arguments)?)? {
            match rows.iter_mut().find(|known| known.name == row.name) {
                Some(known) => merge(known, row),
                None => rows.push(row),
            }
        }
    }
    let notes = vec![format!(
        "Medians of the medians of {} runs, each a process of its own; between brackets the least and the greatest ratio of a run.",
        arguments.repeat
    )];
    Ok(Suite { rows, effort: arguments.effort, wanted: arguments.wanted.clone(), notes })
}

/// Pinpool's numbers with another build and with this one, by turns; nothing is judged.
pub fn compared(other: &Path, arguments: &Arguments) -> Result<String, String> {
    let binary = std::env::current_exe().map_err(|error| error.to_string())?;
    let turns = if arguments.repeat == 0 { TURNS } else { arguments.repeat };
    let mut runs = Vec::new();
    for number in 1..=turns {
        eprintln!("turn {number} of {turns}");
        let rows_of = |build: &Path| read(&run(build, arguments)?);
        // Each is the first every other time, so that what comes with being second falls on both.
        if number % 2 == 1 {
            let there = rows_of(other)?;
            runs.push((there, rows_of(&binary)?));
        } else {
            let here = rows_of(&binary)?;
            runs.push((rows_of(other)?, here));
        }
    }
    let compared = both(&runs);
    Ok(if arguments.as_json { as_json(&compared) } else { as_table(&compared) })
}

/// A row that both builds have.
pub struct Both {
    pub row: String,
    pub unit: Unit,
    pub there: f64,
    pub here: f64,
    /// This build's over the other's: of the medians, and the least and the greatest of a turn.
    pub ratio: [f64; 3],
    /// The same of the first alternative, which is the same code in both: what the machine did meanwhile.
    pub noise: Option<[f64; 3]>,
}

/// For each turn the rows of the other build and of this one.
pub fn both(runs: &[(Vec<Row>, Vec<Row>)]) -> Vec<Both> {
    let Some((_, first)) = runs.first() else { return Vec::new() };
    let of = |row: &Row| {
        let same = |rows: &[Row]| rows.iter().position(|other| other.name == row.name);
        let pairs: Option<Vec<(&Row, &Row)>> =
            runs.iter().map(|(there, here)| Some((&there[same(there)?], &here[same(here)?]))).collect();
        let pairs = pairs?;
        let (there, here): (Vec<f64>, Vec<f64>) =
            pairs.iter().map(|(there, here)| (there.pinpool(), here.pinpool())).unzip();
        let alternative = row.columns.get(1).map(|column| column.name);
        let noise: Option<(Vec<f64>, Vec<f64>)> = alternative
            .and_then(|name| {
                let of = |row: &Row| row.column(name).map(Column::median);
                pairs.iter().map(|(there, here)| Some((of(there)?, of(here)?))).collect::<Option<Vec<_>>>()
            })
            .map(|pairs| pairs.into_iter().unzip());
        Some(Both {
            row: row.name.clone(),
            unit: row.unit,
            there: median(there.iter().copied()),
            here: median(here.iter().copied()),
            ratio: ratios(&there, &here),
            noise: noise.map(|(there, here)| ratios(&there, &here)),
        })
    };
    first.iter().filter_map(of).collect()
}

fn ratios(there: &[f64], here: &[f64]) -> [f64; 3] {
    let of_turns: Vec<f64> = there.iter().zip(here).map(|(there, here)| here / there).collect();
    let of_medians = median(here.iter().copied()) / median(there.iter().copied());
    let least = of_turns.iter().copied().fold(f64::INFINITY, f64::min);
    [of_medians, least, of_turns.iter().copied().fold(f64::NEG_INFINITY, f64::max)]
}

fn as_table(rows: &[Both]) -> String {
    let shown_ratios = |ratio: [f64; 3]| {
        let [median, least, most] =
            ratio.map(|ratio| if ratio.is_finite() { shown_ratio(ratio) } else { "-".into() });
        format!("{median} ({least} to {most})")
    };
    let of = |row: &Both| {
        let noise = row.noise.map_or(String::new(), shown_ratios);
        let (there, here) = (shown(row.there, row.unit), shown(row.here, row.unit));
        format!("| {} | {there} | {here} | {} | {noise} |\n", row.row, shown_ratios(row.ratio))
    };
    let head = "| | the other build | this build | this over that (of turns) | the same of the first alternative |\n\
                |---|---|---|---|---|\n";
    rows.iter().fold(head.to_owned(), |text, row| text + &of(row))
}

fn as_json(rows: &[Both]) -> String {
    let of = |row: &Both| {
        json!({ "row": row.row, "unit": crate::report::unit_name(row.unit), "there": row.there, "here": row.here,
                "ratio": row.ratio, "noise": row.noise })
    };
    serde_json::to_string_pretty(&rows.iter().map(of).collect::<Vec<_>>()).expect("numbers and strings")
}

/// What a run prints. Its exit status says whether bars were missed, which is for us to judge.
fn run(binary: &Path, arguments: &Arguments) -> Result<String, String> {
    let quick = (arguments.effort == Effort::Quick).then_some("--quick");
    let wanted = Some(arguments.wanted.as_str()).filter(|wanted| !wanted.is_empty());
    let options = ["--bench", "--json"].into_iter().chain(quick).chain(wanted);
    let output = Command::new(binary).args(options).stderr(Stdio::piped()).output();
    let output = output.map_err(|error| format!("{}: {error}", binary.display()))?;
    match output.status.code() {
        Some(0 | 1) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        _ => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(format!("{}: {}\n{said}", binary.display(), output.status))
        }
    }
}

/// The rows of a run, each column with its median alone. Fields that an older build does not print are left out.
pub fn read(text: &str) -> Result<Vec<Row>, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("no list of rows: {error}"))?;
    let rows = value.as_array().ok_or("no list of rows")?;
    rows.iter().map(|row| read_row(row).ok_or_else(|| format!("not a row: {row}"))).collect()
}

fn read_row(row: &Value) -> Option<Row> {
    // What could not be measured is null.
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let column = |name: &str, value: &Value| Column { name: kept(name), turns: vec![vec![number(value)]] };
    let mut columns = vec![column("pinpool", row.get("pinpool")?)];
    let first = row.get("against").and_then(Value::as_str);
    let others = row.get("alternatives")?.as_object()?;
    columns.extend(
        others
            .iter()
            .filter(|(name, _)| Some(name.as_str()) == first)
            .map(|(name, value)| column(name, value)),
    );
    columns.extend(
        others
            .iter()
            .filter(|(name, _)| Some(name.as_str()) != first)
            .map(|(name, value)| column(name, value)),
    );
    let no_bars = Vec::new();
    let bars = row.get("bars").and_then(Value::as_array).unwrap_or(&no_bars);
    Some(Row {
        name: row.get("row")?.as_str()?.to_owned(),
        unit: Unit::ALL.into_iter().find(|unit| row["unit"] == crate::report::unit_name(*unit))?,
        columns,
        bars: bars.iter().map(read_bar).collect::<Option<Vec<_>>>()?,
    })
}

fn read_bar(bar: &Value) -> Option<Bar> {
    let (is_at_most, value) = (bar.get("is")?.as_str()? == AT_MOST, bar.get("value")?.as_f64()?);
    Some(match (bar.get("of")?.as_str(), is_at_most) {
        (Some(name), true) => Bar::Of(kept(name), value),
        (Some(name), false) => Bar::AtLeastOf(kept(name), value),
        (None, true) => Bar::AtMost(value),
        (None, false) => Bar::AtLeast(value),
    })
}

/// Names are constants everywhere else; the few that are read stay until the end.
fn kept(name: &str) -> &'static str {
    name.to_owned().leak()
}

/// One more run of a row.
fn merge(known: &mut Row, row: Row) {
    for column in row.columns {
        if let Some(known) = known.columns.iter_mut().find(|known| known.name == column.name) {
            known.turns.extend(column.turns);
        }
    }
}
