//! The table and the JSON.

use crate::table::{Row, Suite, shown, shown_ratio};
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
    let other =
        |column: &crate::table::Column| format!("{} {}", column.name, shown(column.median(), row.unit));
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

/// One object a row. Numbers are in the row's unit, `ratio` is pinpool's over that of the first alternative.
pub fn as_json(suite: &Suite) -> String {
    let of_row = |row: &Row| {
        let others = row.columns[1..].iter().map(|column| (column.name.to_owned(), json!(column.median())));
        json!({
            "row": row.name,
            "unit": shown(0.0, row.unit).trim_start_matches(['0', '.', ' ']),
            "pinpool": row.pinpool(),
            "classic": row.column("classic").map(crate::table::Column::median),
            "alternatives": others.collect::<serde_json::Map<String, Value>>(),
            "ratio": row.ratio(),
            "ratio_of_turns": row.spread().map(|(least, most)| [least, most]),
            "bar": row.bar_text(),
            "ok": row.is_ok(),
        })
    };
    let rows: Vec<Value> = suite.rows.iter().map(of_row).collect();
    serde_json::to_string_pretty(&rows).expect("numbers and strings")
}
