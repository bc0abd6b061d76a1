//! The rules about code. Each takes a file and gives its offences, one sentence each.

use crate::source::Source;

/// The files of `src/` that may hold `unsafe`; each says at its top what it is trusted with.
const UNSAFE_FILES: &[&str] = &[
    "src/pages.rs",
    "src/pages/system/linux.rs",
    "src/pages/system/other.rs",
    "src/shelf.rs",
    "src/zero.rs",
    "src/driver_pages.rs",
    "src/os.rs",
    "src/driver/library.rs",
    "src/driver/cuda.rs",
    "src/driver/cuda_memory.rs",
    "src/driver/exit.rs",
    "src/driver/table.rs",
    "src/driver/entry_points.rs",
    "src/driver/graphs.rs",
    "src/driver/runtime.rs",
    "src/driver/runtime_memory.rs",
    "src/driver/runtime_table.rs",
    "src/interop/cudarc_library.rs",
    "src/buffer.rs",
    "src/buffer/captured.rs",
    "src/global.rs",
    "src/buffer/uses.rs",
    "src/interop/any_source.rs",
    "src/interop/copies.rs",
    "src/interop/host_slice.rs",
    "src/raw_stream.rs",
    "src/backend.rs",
    "src/backend/allocator.rs",
    "src/backend/kind.rs",
    "src/backend/shared.rs",
    "src/pin.rs",
    "src/pin/many.rs",
    "src/pin/owned.rs",
    "src/sim/cuda.rs",
    "src/sim/handles.rs",
    "src/sim/host_memory.rs",
    "src/sim/mappings.rs",
];

const LINES_MAX: usize = 450;

/// What only `src/sync.rs` names, so that loom can stand in for it.
const SYNC_PATHS: &[&str] = &[
    "parking_lot",
    "std::thread",
    "std::sync::atomic",
    "std::sync::Mutex",
    "std::sync::RwLock",
    "std::sync::Condvar",
    "std::sync::Barrier",
    "std::sync::mpsc",
];

/// The layer table of `src/lib.rs`: for each layer its modules, lowest first.
pub struct Layers(Vec<(usize, Vec<String>)>);

impl Layers {
    /// Reads the doc lines of the form `//! 0: code_name error sync`.
    pub fn parse(lib: &Source) -> Result<Self, String> {
        let docs = lib.text.lines().filter_map(|line| line.strip_prefix("//!"));
        let rows = docs.filter_map(|doc| doc.trim().split_once(':')).filter_map(|(number, modules)| {
            let layer: usize = number.parse().ok()?;
            Some((layer, modules.split_whitespace().map(str::to_owned).collect::<Vec<_>>()))
        });
        let layers = Self(rows.collect());
        let names: Vec<&String> = layers.0.iter().flat_map(|(_, modules)| modules).collect();
        let twice = names.iter().enumerate().find(|(i, name)| names[..*i].contains(name));
        match twice {
            _ if names.is_empty() => Err(format!("{} lists no layers", lib.name)),
            Some((_, name)) => Err(format!("{} lists {name} in two layers", lib.name)),
            None => Ok(layers),
        }
    }

    /// The module's layer, and its place from the left within it.
    pub fn place_of(&self, module: &str) -> Option<(usize, usize)> {
        let place_in = |modules: &[String]| modules.iter().position(|listed| listed == module);
        self.0.iter().find_map(|(layer, modules)| Some((*layer, place_in(modules)?)))
    }

    pub fn modules(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flat_map(|(_, modules)| modules).map(String::as_str)
    }
}

/// A module imports only from lower layers and from its left in its own layer, so that there is no cycle; and
/// it names the module, not `lib.rs`'s re-export.
pub fn layers(table: &Layers, file: &Source) -> Vec<String> {
    let Some(module) = file.module() else { return Vec::new() };
    let Some(own) = table.place_of(module) else {
        return vec![format!("{}: module {module} is missing from the layers in src/lib.rs", file.name)];
    };
    let is_test_file = file.name.ends_with("tests.rs");
    let imports = file.paths().into_iter().filter(|path| !path.in_tests && !is_test_file);
    let offences = imports.filter_map(|path| {
        let supers = path.segments.iter().take_while(|s| *s == "super").count();
        let from_root = match path.segments[0].as_str() {
            "crate" => &path.segments[1..],
            "super" if supers >= file.depth() + path.inline_modules => &path.segments[supers..],
            _ => return None,
        };
        let target = from_root.first()?;
        let why = match table.place_of(target) {
            Some(place) if place <= own => return None,
            Some((layer, _)) => format!("layer {} imports {target} of layer {layer}", own.0),
            None => format!("imports {target} from the crate root; name its module"),
        };
        Some(format!("{}:{}: {why}", file.name, path.line))
    });
    let mut offences: Vec<String> = offences.collect();
    offences.dedup();
    offences
}

/// In `src/`, `unsafe` stands only in the listed files; everywhere it is allowed file by file, with a reason.
pub fn unsafe_files(file: &Source) -> Vec<String> {
    let Some(line) = file.lines_with_word("unsafe").first().copied() else { return Vec::new() };
    let at = |why: &str| vec![format!("{}:{line}: {why}", file.name)];
    if file.name.starts_with("tests/fake_libcuda/") {
        return Vec::new(); // a package of its own, all of it a C interface
    }
    let is_listed = UNSAFE_FILES.contains(&file.name.as_str()) || file.name.ends_with("_tests.rs");
    if file.name.starts_with("src/") && !is_listed {
        return at("unsafe in a file that may not hold any");
    }
    let lines: Vec<&str> = file.text.lines().map(str::trim).collect();
    if !file.name.starts_with("src/") && lines.iter().any(|line| line.starts_with("#[allow(unsafe_code)]")) {
        return Vec::new(); // one item of a test; its `// SAFETY:` is the reason
    }
    let Some(allow) = lines.iter().position(|line| line.starts_with("#![allow(unsafe_code")) else {
        return at("unsafe without `#![allow(unsafe_code)]` at the top of the file");
    };
    let above = allow.checked_sub(1).map_or("", |i| lines[i]);
    let has_reason = lines[allow].contains("// ")
        || lines[allow..].iter().take(4).any(|line| line.contains("reason = "))
        || (above.starts_with("// ") && above.len() > 10)
        || lines.iter().any(|line| line.starts_with("//!") && line.contains("`unsafe`"));
    if has_reason { Vec::new() } else { at("`#![allow(unsafe_code)]` without a reason beside it") }
}

/// Above every `unsafe` block and impl stands a `// SAFETY:`, in the comment that leads to its statement.
pub fn safety_comments(file: &Source) -> Vec<String> {
    let text: Vec<&str> = file.text.lines().map(str::trim).collect();
    let code: Vec<&str> = file.code.lines().map(str::trim).collect();
    // On one line `unsafe extern "C" fn()` may stand before the block that counts.
    let needs_reason = |line: &usize| {
        code[*line - 1].split("unsafe").skip(1).any(|after| {
            let next = if after.trim().is_empty() { code.get(*line).unwrap_or(&"") } else { after.trim() };
            next.starts_with('{') || next.starts_with("impl")
        })
    };
    let has_reason = |line: usize| {
        for above in (0..line - 1).rev() {
            if text[above].starts_with("// SAFETY:") {
                return true;
            }
            // A blank line or the end of another statement: what stands above argues for something else.
            let is_comment = text[above].starts_with("//");
            let ends_statement = code[above].ends_with([';', '{', '}']) || text[above].is_empty();
            if !is_comment && ends_statement {
                return false;
            }
        }
        false
    };
    let mut lines = file.lines_with_word("unsafe");
    lines.dedup();
    let bare = lines.into_iter().filter(|line| needs_reason(line) && !has_reason(*line));
    bare.map(|line| format!("{}:{line}: unsafe without a `// SAFETY:` above it", file.name)).collect()
}

pub fn length(file: &Source) -> Vec<String> {
    let lines = file.text.lines().count();
    let offence = format!("{}: {lines} lines, more than {LINES_MAX}; perhaps two ideas in one", file.name);
    if lines > LINES_MAX { vec![offence] } else { Vec::new() }
}

/// Only `src/inbox.rs` names crossbeam-channel, so that loom's shim has one place to stand in.
pub fn channel(file: &Source) -> Vec<String> {
    if !file.name.starts_with("src/") || file.name == "src/inbox.rs" {
        return Vec::new();
    }
    let lines = file.lines_with_word("crossbeam_channel");
    lines.iter().map(|line| format!("{}:{line}: crossbeam_channel outside src/inbox.rs", file.name)).collect()
}

/// Only `src/sync.rs` names locks, atomics and threads; the simulated device and the drivers may.
pub fn sync(file: &Source) -> Vec<String> {
    let is_free =
        ["src/sync.rs", "src/sync/", "src/sim/", "src/driver/"].iter().any(|top| file.name.starts_with(top));
    if is_free || !file.name.starts_with("src/") || file.name.ends_with("tests.rs") {
        return Vec::new();
    }
    let is_ours =
        |path: &str| SYNC_PATHS.iter().any(|ours| path == *ours || path.starts_with(&format!("{ours}::")));
    let named = file.paths().into_iter().filter(|path| !path.in_tests);
    let wrong = named.map(|path| (path.line, path.segments.join("::"))).filter(|(_, path)| is_ours(path));
    wrong.map(|(line, path)| format!("{}:{line}: {path} outside src/sync.rs", file.name)).collect()
}
