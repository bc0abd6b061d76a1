//! Reads the sources and holds them to the house plan. Each rule has a planted offence that it must catch.

mod planted;
mod rules;
mod source;

use rules::Layers;
use source::{Source, files, relative, root, rust_files};
use std::fs;

const ALL: &[&str] = &["src", "tests", "benches", "examples"];

fn assert_none(offences: Vec<String>) {
    assert!(offences.is_empty(), "\n{}\n", offences.join("\n"));
}

fn each(tops: &[&str], rule: impl Fn(&Source) -> Vec<String>) {
    let sources = rust_files(tops);
    assert!(!sources.is_empty(), "no sources below {tops:?}: the test looks in the wrong place");
    assert_none(sources.iter().flat_map(rule).collect());
}

fn layer_table() -> Layers {
    let lib = fs::read_to_string(root().join("src/lib.rs")).expect("src/lib.rs can be read");
    Layers::parse(&Source::new("src/lib.rs", &lib)).unwrap_or_else(|why| panic!("{why}"))
}

#[test]
fn a_module_imports_only_from_below_and_from_its_left() {
    let table = layer_table();
    each(&["src"], |file| rules::layers(&table, file));
}

#[test]
fn every_module_in_the_layers_exists() {
    let exists = |name: &str| {
        let src = root().join("src");
        src.join(format!("{name}.rs")).exists() || src.join(name).join("mod.rs").exists()
    };
    let table = layer_table();
    assert_none(
        table.modules().filter(|name| !exists(name)).map(|name| format!("no module {name}")).collect(),
    );
}

#[test]
fn unsafe_stands_only_in_the_files_that_may_hold_it() {
    each(ALL, rules::unsafe_files);
}

#[test]
fn every_unsafe_block_says_why_it_is_sound() {
    each(ALL, rules::safety_comments);
}

#[test]
fn no_file_is_long() {
    each(ALL, rules::length);
}

#[test]
fn only_the_inbox_names_the_channel() {
    each(&["src"], rules::channel);
}

#[test]
fn only_sync_names_locks_atomics_and_threads() {
    each(&["src"], rules::sync);
}

/// Offences of one text file against "no path of a person's machine, no source but the public registry".
fn foreign_places(name: &str, text: &str) -> Vec<String> {
    // Put together at build time, so that this file does not hold them.
    let places =
        [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/Us", "ers/")];
    let lines = text.lines().enumerate();
    let of_line = |(index, line): (usize, &str)| {
        let place = places.iter().find(|place| line.contains(**place)).map(|place| (*place).to_owned());
        let is_source =
            name == "Cargo.lock" && line.starts_with("source = ") && !line.contains("crates.io-index");
        let source = is_source.then(|| line.to_owned());
        place.or(source).map(|what| format!("{name}:{}: {what}", index + 1))
    };
    lines.filter_map(of_line).collect()
}

#[test]
fn no_path_of_a_machine_is_committed() {
    let texts =
        files().into_iter().filter_map(|path| Some((relative(&path), fs::read_to_string(path).ok()?)));
    assert_none(texts.flat_map(|(name, text)| foreign_places(&name, &text)).collect());
}

/// Pages that no source includes into rustdoc, where their snippets are compiled and run.
fn pages_outside_rustdoc(pages: &[String], sources: &[Source]) -> Vec<String> {
    let is_included = |page: &String| {
        let include = format!("/{page}\")");
        sources.iter().any(|file| file.text.contains("include_str!(\"") && file.text.contains(&include))
    };
    let missing = pages.iter().filter(|page| !is_included(page));
    missing.map(|page| format!("{page} is not included in rustdoc")).collect()
}

#[test]
fn every_page_is_in_rustdoc() {
    let names = files().into_iter().map(|path| relative(&path));
    let pages =
        names.filter(|name| (name.starts_with("docs/") && name.ends_with(".md")) || name == "README.md");
    assert_none(pages_outside_rustdoc(&pages.collect::<Vec<_>>(), &rust_files(&["src"])));
}
