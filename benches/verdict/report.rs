//! The table and the JSON.

use crate::table::{Bar, Column, Row, Suite, Unit, shown, shown_ratio};
use serde_json::{Value, json};

/// The table of `benches/README.md`.
pub fn as_table(suite: &Suite) -> String {
    let mut text =
        String::from("| | pinpool | against | ratio (of turns) | bar | |\n|---|---|---|---|---|---|\n");
    for row in &suite.rows {
        text += &format!(
            "| {} | {} | {} | {} | {} | {} |\n",
            row.name,
            shown(row.pinpool(), row.unit),
            against(row),
            ratio(row),
            row.bar_text(),
            verdict(row)
        );
    }
    text
}

fn against(row: &Row) -> String {
    let other = |column: &Column| format!("{} {}", column.name, shown(column.median(), row.unit));
    row.columns[1..].iter().map(other).collect::<Vec<_>>().join(", ")
}

fn ratio(row: &Row) -> String {
    match (row.ratio(), row.spread()) {
        (Some(ratio), Some((least, most))) if row.columns[0].turns.len() > 1 => {
            format!("{} ({} to {})", shown_ratio(ratio), shown_ratio(least), shown_ratio(most))
        }
        (Some(ratio), _) if ratio.is_finite() => shown_ratio(ratio),
        _ => String::new(),
    }
}

pub fn verdict(row: &Row) -> &'static str {
    match (row.bars.is_empty(), row.is_ok()) {
        (true, _) => "",
        (_, true) => "ok",
        (_, false) => "MISSED",
    }
}

/// One object a row. Numbers are in the row's unit and medians, `ratio` is pinpool's over that of `against`, which is the
/// first of the alternatives, and `bars` is what `bar` says in words.
pub fn as_json(suite: &Suite) -> String {
    let of_row = |row: &Row| {
        let others = row.columns[1..].iter().map(|column| (column.name.to_owned(), json!(column.median())));
        let of_bar = |bar: &Bar| {
            let (value, of) = match *bar {
                Bar::Of(name, share) | Bar::AtLeastOf(name, share) => (share, Some(name)),
                Bar::AtMost(limit) | Bar::AtLeast(limit) => (limit, None),
            };
            let is = if Row::is_at_most(*bar) { AT_MOST } else { AT_LEAST };
            json!({ "is": is, "value": value, "of": of, "limit": row.limit(*bar) })
        };
        json!({
            "row": row.name,
            "unit": unit_name(row.unit),
            "pinpool": row.pinpool(),
            "classic": row.column("classic").map(Column::median),
            "against": row.columns.get(1).map(|column| column.name),
            "alternatives": others.collect::<serde_json::Map<String, Value>>(),
            "ratio": row.ratio(),
            "ratio_of_turns": row.spread().map(|(least, most)| [least, most]),
            "bar": row.bar_text(),
            "bars": row.bars.iter().map(of_bar).collect::<Vec<_>>(),
            "ok": row.is_ok(),
        })
    };
    let rows: Vec<Value> = suite.rows.iter().map(of_row).collect();
    serde_json::to_string_pretty(&rows).expect("numbers and strings")
}

/// What a bar `is`, in the JSON.
pub const AT_MOST: &str = "at most";
pub const AT_LEAST: &str = "at least";

pub fn unit_name(unit: Unit) -> &'static str {
    match unit {
        Unit::Nanoseconds => "ns",
        Unit::Percent => "%",
        Unit::GigabytesPerSecond => "GB/s",
        Unit::Count => "",
    }
}
