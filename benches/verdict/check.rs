//! What this bench says about itself: its JSON has every field, `ok` follows from the numbers beside it, the exit status
//! from `ok`, and its runs can be put together. Run by `cargo test --benches`; the first part at every run.

use crate::arguments::Arguments;
use crate::report::{self, AT_LEAST, AT_MOST};
use crate::table::{Bar, Column, Effort, Row, Suite, Unit};
use crate::turns;
use serde_json::Value;

/// What whoever reads the JSON may rely on: a field, and whether it may be null.
const FIELDS: [(&str, Kind, bool); 10] = [
    ("row", Kind::Text, false),
    ("unit", Kind::Text, false),
    ("pinpool", Kind::Number, false),
    ("classic", Kind::Number, true),
    ("against", Kind::Text, true),
    ("alternatives", Kind::Object, false),
    ("ratio", Kind::Number, true),
    ("bar", Kind::Text, false),
    ("bars", Kind::List, false),
    ("ok", Kind::Flag, false),
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Text,
    Number,
    Flag,
    Object,
    List,
}

/// The JSON of a run against itself; what is wrong with it.
pub fn faults_of(json: &str) -> Vec<String> {
    let rows = match serde_json::from_str(json) {
        Ok(Value::Array(rows)) => rows,
        Ok(other) => return vec![format!("not a list: {other}")],
        Err(error) => return vec![format!("not JSON: {error}")],
    };
    rows.iter().flat_map(faults_of_row).collect()
}

fn faults_of_row(row: &Value) -> Vec<String> {
    let mut faults: Vec<String> = Vec::new();
    for (field, kind, may_be_null) in FIELDS {
        let is_right = match row.get(field) {
            // A row of which nothing could be measured has no number; it must not be ok then, if it has a bar.
            Some(Value::Null) => may_be_null || field == "pinpool",
            Some(value) => kind_of(value) == Some(kind),
            None => false,
        };
        if !is_right {
            faults.push(format!("{field} is not a {kind:?} in {row}"));
        }
    }
    if !faults.is_empty() {
        return faults;
    }
    let bars = row["bars"].as_array().map_or(&[][..], Vec::as_slice);
    let meets = |bar: &Value| {
        let (Some(ours), Some(limit)) = (row["pinpool"].as_f64(), bar["limit"].as_f64()) else {
            return false;
        };
        match bar["is"].as_str() {
            Some(AT_MOST) => ours <= limit,
            Some(AT_LEAST) => ours >= limit,
            _ => false,
        }
    };
    if row["ok"] != bars.iter().all(meets) {
        faults.push(format!("ok does not follow from the bars in {row}"));
    }
    if (row["bar"] == "") != bars.is_empty() {
        faults.push(format!("bar does not say what bars says in {row}"));
    }
    let first = row["against"].as_str().and_then(|name| row["alternatives"][name].as_f64());
    let ratio = row["pinpool"].as_f64().zip(first).map(|(ours, theirs)| ours / theirs);
    let ratio = ratio.filter(|ratio| ratio.is_finite());
    if ratio.zip(row["ratio"].as_f64()).is_some_and(|(right, said)| (right - said).abs() > 1e-9 * right.abs())
        || ratio.is_some() != row["ratio"].is_number()
    {
        faults.push(format!("ratio is not pinpool over the first alternative in {row}"));
    }
    if row["classic"] != row["alternatives"].get("classic").cloned().unwrap_or_default() {
        faults.push(format!("classic is not the alternative of that name in {row}"));
    }
    faults
}

fn kind_of(value: &Value) -> Option<Kind> {
    Some(match value {
        Value::String(_) => Kind::Text,
        Value::Number(_) => Kind::Number,
        Value::Bool(_) => Kind::Flag,
        Value::Object(_) => Kind::Object,
        Value::Array(_) => Kind::List,
        Value::Null => return None,
    })
}

/// A made-up row whose pinpool takes 10 and whose alternatives take 20 and 40.
fn row(name: &str, bars: &[Bar]) -> Row {
    let column = |name, value: f64| Column { name, turns: vec![vec![value], vec![value * 2.0], vec![value]] };
    let columns = vec![column("pinpool", 10.0), column("vec", 20.0), column("classic", 40.0)];
    Row { name: name.into(), unit: Unit::Nanoseconds, columns, bars: bars.to_vec() }
}

fn suite(effort: Effort, rows: Vec<Row>) -> Suite {
    Suite { rows, effort, wanted: String::new(), notes: Vec::new() }
}

/// Every kind of bar, met, met to the last digit, and missed.
fn samples() -> Vec<(Row, bool)> {
    let of = |name: &str, bars: &[Bar], ok| (row(name, bars), ok);
    let mut alone = row("alone", &[]);
    alone.columns.truncate(1);
    let mut nothing = row("not measured", &[Bar::AtMost(10.0)]);
    nothing.columns[0].turns.clear();
    vec![
        of("no bar", &[], true),
        of("of, met", &[Bar::Of("classic", 0.3)], true),
        of("of, at the bar", &[Bar::Of("classic", 0.25)], true),
        of("of, missed", &[Bar::Of("classic", 0.2)], false),
        of("of the first, missed", &[Bar::Of("vec", 0.4)], false),
        of("at least of, met", &[Bar::AtLeastOf("vec", 0.4)], true),
        of("at least of, missed", &[Bar::AtLeastOf("vec", 0.6)], false),
        of("at most, met", &[Bar::AtMost(10.0)], true),
        of("at most, missed", &[Bar::AtMost(9.0)], false),
        of("at least, met", &[Bar::AtLeast(10.0)], true),
        of("at least, missed", &[Bar::AtLeast(11.0)], false),
        of("one of two missed", &[Bar::AtMost(11.0), Bar::Of("vec", 0.4)], false),
        of("of one that is not there", &[Bar::Of("nobody", 9.0)], false),
        (alone, true),
        (nothing, false),
    ]
}

/// Panics where a report would be wrong.
pub fn all() {
    let (rows, expected): (Vec<Row>, Vec<bool>) = samples().into_iter().unzip();
    let of_samples = suite(Effort::Full, rows);
    let json = report::as_json(&of_samples);
    assert_eq!(faults_of(&json), Vec::<String>::new());
    let value: Value = serde_json::from_str(&json).expect("it was read before");
    let said: Vec<bool> =
        value.as_array().expect("so was this").iter().map(|row| row["ok"] == true).collect();
    assert_eq!(said, expected, "{json}");
    let (table, missed) = (report::as_table(&of_samples), expected.iter().filter(|ok| !**ok).count());
    assert_eq!(
        (table.matches("| MISSED |").count(), table.lines().count()),
        (missed, 2 + expected.len()),
        "{table}"
    );

    assert!(of_samples.is_failed() && of_samples.missed().len() == missed);
    assert!(
        !suite(Effort::Quick, vec![row("missed", &[Bar::AtMost(1.0)])]).is_failed(),
        "few samples are not judged"
    );
    assert!(!suite(Effort::Full, vec![row("met", &[Bar::AtMost(10.0)]), row("no bar", &[])]).is_failed());

    a_wrong_report_is_found_out(&json);
    runs_are_put_together(&of_samples, &json);
    the_command_line();
}

fn a_wrong_report_is_found_out(json: &str) {
    let right: Value = serde_json::from_str(json).expect("it was read before");
    let row = right[1].as_object().expect("a row");
    let faults = |row: &serde_json::Map<String, Value>| {
        faults_of(&Value::from(vec![Value::from(row.clone())]).to_string())
    };
    assert_eq!(faults(row), Vec::<String>::new());
    for (field, ..) in FIELDS {
        let mut less = row.clone();
        less.remove(field);
        assert!(!faults(&less).is_empty(), "{field} was not missed");
    }
    let wrong = [
        ("ok", false.into()),
        ("bar", "".into()),
        ("ratio", 7.into()),
        ("classic", 1.into()),
        ("pinpool", "10".into()),
    ];
    for (field, value) in wrong {
        let mut wrong = row.clone();
        wrong.insert(field.into(), value);
        assert!(!faults(&wrong).is_empty(), "{field} is wrong, and nobody said so");
    }
    assert!(!faults_of("{}").is_empty() && !faults_of("[").is_empty());
}

fn runs_are_put_together(of_samples: &Suite, json: &str) {
    let read = turns::read(json).expect("what was written can be read");
    for (row, written) in read.iter().zip(&of_samples.rows) {
        assert_eq!((&row.name, row.unit, &row.bars), (&written.name, written.unit, &written.bars));
        let seen = |row: &Row| (row.is_ok(), row.ratio().filter(|ratio| ratio.is_finite()));
        assert_eq!(seen(row), seen(written), "{}", row.name);
    }
    assert_eq!(read.len(), of_samples.rows.len());
    // As builds printed it that did not say of what the ratio is, nor the bars in a form for machines.
    let mut older: Value = serde_json::from_str(json).expect("it was read before");
    for row in older.as_array_mut().expect("so was this") {
        let row = row.as_object_mut().expect("a row");
        row.remove("against");
        row.remove("bars");
    }
    let older = turns::read(&older.to_string()).expect("it can be compared with");
    let numbers = |row: &Row| (row.name.clone(), row.column("vec").map(Column::median));
    assert!(older.iter().map(numbers).eq(of_samples.rows.iter().map(numbers)));

    // A build twice as fast, on a machine that got slower by a tenth in between, and a row that only one build has.
    let there = |of: f64| vec![scaled("both", of), scaled("there alone", of)];
    let runs: Vec<_> =
        [1.0, 3.0, 2.0].map(|of| (there(of), vec![scaled("both", of * 1.1), scaled("new", 1.0)])).into();
    let both = turns::both(&runs);
    assert_eq!(both.iter().map(|row| row.row.as_str()).collect::<Vec<_>>(), ["both"]);
    assert_eq!((both[0].there, both[0].here), (20.0, 22.0));
    let noise = both[0].noise.expect("there are alternatives");
    assert!(both[0].ratio.iter().chain(&noise).all(|ratio| (ratio - 1.1).abs() < 1e-9));
}

fn scaled(name: &str, factor: f64) -> Row {
    let mut row = row(name, &[]);
    row.columns
        .iter_mut()
        .flat_map(|column| &mut column.turns)
        .flatten()
        .for_each(|sample| *sample *= factor);
    row
}

fn the_command_line() {
    let read = |line: &str| Arguments::read(line.split_whitespace().map(str::to_owned));
    let Ok(read_one) = read("--bench --json --repeat 3 drop") else { panic!("that is a right command line") };
    assert_eq!((read_one.repeat, read_one.wanted.as_str(), read_one.as_json), (3, "drop", true));
    let efforts =
        ["", "--bench", "--bench --quick", "--bench --test"].map(|line| read(line).map(|read| read.effort));
    assert!(efforts == [Effort::Once, Effort::Full, Effort::Quick, Effort::Once].map(Ok));
    for line in [
        "--bench --repeat",
        "--repeat 0",
        "--repeat many",
        "--against",
        "--against --quick",
        "--against nowhere",
        "--bench --nonsense",
        "--bench -q",
    ] {
        assert!(read(line).is_err(), "{line}");
    }
    assert!(read("--nocapture -q").is_ok(), "the test runner's own");
}
