//! One page with every row: its numbers, and a plot of what was measured.

use crate::report::verdict;
use crate::table::{Column, Row, Suite, shown, shown_ratio};
use std::path::PathBuf;

const WIDTH: f64 = 620.0;
const LABEL: f64 = 150.0;
const LINE: f64 = 20.0;

const STYLE: &str = "body{font:14px/1.4 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}\
h2{font-size:1em;margin:1.6em 0 .2em}svg{display:block}.ok{color:#176b2c}.MISSED{color:#b3261e;font-weight:600}\
p{margin:.2em 0}text{font:12px system-ui,sans-serif;fill:#222}";

/// Writes the page under `target/verdict/`, and says where.
pub fn write(suite: &Suite) -> std::io::Result<PathBuf> {
    let folder = target_folder().join("verdict");
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("index.html");
    std::fs::write(&path, as_html(suite))?;
    Ok(path)
}

/// The binary lies in `target/<profile>/deps`.
fn target_folder() -> PathBuf {
    let binary = std::env::current_exe().unwrap_or_default();
    binary.ancestors().nth(3).map_or_else(|| PathBuf::from("target"), PathBuf::from)
}

fn as_html(suite: &Suite) -> String {
    let missed = suite.rows.iter().filter(|row| !row.is_ok()).count();
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>pinpool: the verdict</title>\
<style>{STYLE}</style><h1>pinpool: the verdict</h1><p>{} rows, {missed} bars missed. Each line of a plot is one way of \
doing it, on a logarithmic scale: the band is where the middle eight tenths of the samples lie, the tick their median. \
The dashed line is the bar, where there is one.</p>",
        suite.rows.len()
    );
    suite.notes.iter().for_each(|note| html += &format!("<p>{}</p>", escaped(note)));
    for row in &suite.rows {
        let verdict = verdict(row);
        let ratio = row.ratio().filter(|ratio| ratio.is_finite());
        let ratio = ratio.map_or(String::new(), |ratio| format!("ratio {}; ", shown_ratio(ratio)));
        html += &format!(
            "<h2>{}</h2><p>{}{} <span class=\"{verdict}\">{verdict}</span></p>{}",
            escaped(&row.name),
            ratio,
            escaped(&row.bar_text()),
            plot(row)
        );
    }
    html + "</html>\n"
}

fn plot(row: &Row) -> String {
    let sorted: Vec<Vec<f64>> = row.columns.iter().map(Column::sorted).collect();
    let bars: Vec<f64> = row.bars.iter().filter_map(|bar| row.limit(*bar)).collect();
    let all = || sorted.iter().flatten().chain(&bars).copied().filter(|value| *value > 0.0);
    let (Some(least), Some(most)) = (all().min_by(f64::total_cmp), all().max_by(f64::total_cmp)) else {
        return String::new(); // nothing but zeros
    };
    let (low, high) = ((least * 0.8).ln(), (most * 1.25).ln());
    let x = |value: f64| LABEL + (value.max(least).ln() - low) / (high - low) * (WIDTH - LABEL - 90.0);
    let height = LINE * row.columns.len() as f64 + 4.0;
    let mut svg = format!("<svg width=\"{WIDTH}\" height=\"{height}\" role=\"img\">");
    for (index, (column, sorted)) in row.columns.iter().zip(&sorted).enumerate() {
        let Some(last) = sorted.len().checked_sub(1) else { continue };
        let at = |share: f64| x(sorted[(last as f64 * share).round() as usize]);
        let (y, colour) = (LINE * index as f64 + 2.0, if index == 0 { "#1f6feb" } else { "#8b949e" });
        let (left, right, middle) = (at(0.1), at(0.9), x(column.median()));
        svg += &format!(
            "<text x=\"0\" y=\"{0}\">{1}</text>\
<rect x=\"{left:.1}\" y=\"{2}\" width=\"{3:.1}\" height=\"10\" fill=\"{colour}\" opacity=\".45\"/>\
<rect x=\"{4:.1}\" y=\"{y}\" width=\"3\" height=\"16\" fill=\"{colour}\"/>\
<text x=\"{5:.1}\" y=\"{0}\">{6}</text>",
            y + 13.0,
            escaped(column.name),
            y + 3.0,
            (right - left).max(1.0),
            middle - 1.5,
            right.max(middle) + 6.0,
            shown(column.median(), row.unit)
        );
    }
    for bar in bars {
        let x = x(bar);
        svg += &format!(
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"0\" y2=\"{height}\" stroke=\"#b3261e\" stroke-dasharray=\"4 3\"/>"
        );
    }
    svg + "</svg>"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
