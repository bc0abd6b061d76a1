//! Offences planted on purpose: a rule that does not catch its own is no rule.

use crate::rules::{self, Layers};
use crate::source::Source;
use crate::{foreign_places, pages_outside_rustdoc};

fn file(name: &str, text: &str) -> Source {
    Source::new(name, text)
}

fn table() -> Layers {
    Layers::parse(&file("src/lib.rs", "//! 0: error sync\n//! 1: driver\n//! 2: buffer pool\n"))
        .expect("a table")
}

fn layer_offences(name: &str, text: &str) -> usize {
    rules::layers(&table(), &file(name, text)).len()
}

#[test]
fn an_import_that_goes_up_or_sideways() {
    assert_eq!(layer_offences("src/error.rs", "use crate::driver::Driver;"), 1);
    assert_eq!(layer_offences("src/buffer.rs", "use super::{error::Error, pool::Pool};"), 1);
    assert_eq!(layer_offences("src/driver/cuda.rs", "fn f() { super::super::pool::take() }"), 1);
    assert_eq!(layer_offences("src/driver/mod.rs", "mod inner { use super::super::pool::Pool; }"), 1);
    assert_eq!(layer_offences("src/pool.rs", "use crate::Driver;"), 1, "through lib.rs's re-export");
}

#[test]
fn an_import_that_is_fine() {
    assert_eq!(layer_offences("src/pool.rs", "use crate::{error::Error, buffer::Guard, pool::X};"), 0);
    assert_eq!(layer_offences("src/driver/cuda.rs", "use super::host; use crate::error::Error;"), 0);
    assert_eq!(
        layer_offences("src/error.rs", "#[cfg(test)] mod tests { use super::*; use crate::pool::P; }"),
        0
    );
    assert_eq!(layer_offences("src/error.rs", "// use crate::pool::Pool;\nlet s = \"crate::pool\";"), 0);
}

#[test]
fn a_module_that_the_table_does_not_know() {
    assert_eq!(layer_offences("src/new.rs", ""), 1);
}

#[test]
fn a_table_that_is_missing_or_names_a_module_twice() {
    assert!(Layers::parse(&file("src/lib.rs", "//! no table here: none")).is_err());
    assert!(Layers::parse(&file("src/lib.rs", "//! 0: error\n//! 1: error")).is_err());
}

#[test]
fn unsafe_in_a_file_that_may_not_hold_it() {
    let allowed = "#![allow(unsafe_code)] // maps memory\nunsafe fn f() {}";
    assert_eq!(rules::unsafe_files(&file("src/pool.rs", allowed)).len(), 1);
    assert_eq!(rules::unsafe_files(&file("src/pages.rs", allowed)).len(), 0);
    assert_eq!(rules::unsafe_files(&file("tests/x.rs", "unsafe fn f() {}")).len(), 1, "no allow");
    assert_eq!(rules::unsafe_files(&file("tests/x.rs", "#![allow(unsafe_code)]\nunsafe fn f() {}")).len(), 1);
    assert_eq!(rules::unsafe_files(&file("tests/x.rs", "#[allow(unsafe_code)]\nunsafe fn f() {}")).len(), 0);
    assert_eq!(rules::unsafe_files(&file("src/os.rs", "#[allow(unsafe_code)]\nunsafe fn f() {}")).len(), 1);
    assert_eq!(rules::unsafe_files(&file("src/pool.rs", "#![deny(unsafe_code)] // unsafe")).len(), 0);
}

#[test]
fn an_unsafe_block_without_a_reason() {
    let offences = |text| rules::safety_comments(&file("src/pages.rs", text)).len();
    assert_eq!(offences("fn f() {\n    unsafe { g() }\n}"), 1);
    assert_eq!(offences("unsafe impl Send for A {}"), 1);
    assert_eq!(offences("let f = |g: unsafe fn()| unsafe { g() };"), 1);
    assert_eq!(offences("// SAFETY: of the first\nlet a = unsafe { g() };\nlet b = unsafe { g() };"), 1);
    assert_eq!(offences("// SAFETY: of another\n\nlet a = unsafe { g() };"), 1);
    assert_eq!(offences("// SAFETY: two lines\n// of it\nlet a = h(\n    unsafe { g() },\n);"), 0);
    assert_eq!(offences("pub unsafe fn f() {}\n#[unsafe(no_mangle)]\nfn g() {}"), 0);
}

#[test]
fn a_long_file() {
    assert_eq!(rules::length(&file("src/pool.rs", &"x\n".repeat(451))).len(), 1);
    assert_eq!(rules::length(&file("src/pool.rs", &"x\n".repeat(450))).len(), 0);
}

#[test]
fn the_channel_named_elsewhere() {
    let text = "use crossbeam_channel::Sender;";
    assert_eq!(rules::channel(&file("src/cleaner.rs", text)).len(), 1);
    assert_eq!(rules::channel(&file("src/inbox.rs", text)).len(), 0);
}

#[test]
fn a_lock_an_atomic_or_a_thread_named_elsewhere() {
    let offences = |name, text| rules::sync(&file(name, text)).len();
    assert_eq!(offences("src/shelf.rs", "use parking_lot::Mutex;"), 1);
    assert_eq!(offences("src/shelf.rs", "use std::sync::{Arc, atomic::{AtomicU64, Ordering}, Mutex};"), 3);
    assert_eq!(offences("src/cleaner.rs", "fn f() { std::thread::spawn(|| {}); }"), 1);
    assert_eq!(offences("src/shelf.rs", "use std::sync::{Arc, Weak, OnceLock};"), 0);
    assert_eq!(offences("src/sync.rs", "pub use parking_lot::Mutex;"), 0);
    assert_eq!(offences("src/sim/clock.rs", "use std::thread;"), 0);
}

#[test]
fn a_path_of_a_machine() {
    let text = concat!("ok\nsee /ho", "me/someone/notes.md");
    assert_eq!(foreign_places("docs/a.md", text).len(), 1);
    assert_eq!(foreign_places("Cargo.lock", "source = \"git+https://example.org/x\"").len(), 1);
    assert_eq!(foreign_places("docs/a.md", "/usr/lib/libcuda.so.1").len(), 0);
}

#[test]
fn a_page_that_rustdoc_does_not_compile() {
    let pages = ["docs/safety.md".to_owned()];
    let includes = file("src/lib.rs", "#[doc = include_str!(\"../docs/safety.md\")]");
    assert_eq!(pages_outside_rustdoc(&pages, &[includes]).len(), 0);
    assert_eq!(pages_outside_rustdoc(&pages, &[file("src/lib.rs", "// docs/safety.md")]).len(), 1);
}
