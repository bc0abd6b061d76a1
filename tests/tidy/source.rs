//! A source file as the rules see it: its text, its text without comments and strings, its paths.

use std::fs;
use std::path::{Path, PathBuf};

/// One Rust file, read once.
pub struct Source {
    /// From the repository root, with forward slashes: `src/driver/cuda.rs`.
    pub name: String,
    pub text: String,
    /// The text with the inside of comments, strings and characters blanked; same lines, same columns.
    pub code: String,
}

/// A path named in code, a group import taken apart: `std::sync::{Arc, atomic::Ordering}` gives two.
#[derive(Debug, PartialEq, Eq)]
pub struct CodePath {
    pub line: usize,
    pub segments: Vec<String>,
    /// How many inline modules (`mod x { .. }`) the path stands in.
    pub inline_modules: usize,
    /// Stands in a `#[cfg(test)] mod x { .. }`.
    pub in_tests: bool,
}

impl Source {
    pub fn new(name: &str, text: &str) -> Self {
        Self { name: name.to_owned(), text: text.to_owned(), code: blank_comments_and_strings(text) }
    }

    /// The top-level module that the file belongs to; `None` for `src/lib.rs` and for what is not in `src/`.
    pub fn module(&self) -> Option<&str> {
        let inside = self.name.strip_prefix("src/")?;
        let first = inside.split('/').next()?;
        Some(first.strip_suffix(".rs").unwrap_or(first)).filter(|name| *name != "lib")
    }

    /// How far below the crate root the file's own module is: 1 for `src/a.rs`, 2 for `src/a/b.rs`.
    pub fn depth(&self) -> usize {
        let inside = self.name.strip_prefix("src/").unwrap_or(&self.name);
        inside.split('/').count() - usize::from(inside.ends_with("/mod.rs"))
    }

    /// Lines of `code` on which the word stands, counted from 1.
    pub fn lines_with_word(&self, word: &str) -> Vec<usize> {
        tokens(&self.code).into_iter().filter(|token| token.text == word).map(|token| token.line).collect()
    }

    pub fn paths(&self) -> Vec<CodePath> {
        paths(&tokens(&self.code))
    }
}

/// The repository root.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every committed-looking file below the root, sorted: build output and hidden tool folders are left out.
pub fn files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of the repository can be read") {
            let path = entry.expect("an entry can be read").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_output = matches!(name.as_str(), "target" | "shared" | ".git" | "mutants.out");
            match path.is_dir() {
                true if is_output => {}
                true => folders.push(path),
                false if is_output => {}
                false => found.push(path),
            }
        }
    }
    found.sort();
    found
}

/// The Rust files under the given top folders.
pub fn rust_files(tops: &[&str]) -> Vec<Source> {
    let in_tops = |name: &str| tops.iter().any(|top| name.starts_with(&format!("{top}/")));
    let rust = files().into_iter().filter(|path| path.extension().is_some_and(|e| e == "rs"));
    let named = rust.map(|path| (relative(&path), path)).filter(|(name, _)| in_tops(name));
    named.map(|(name, path)| Source::new(&name, &fs::read_to_string(path).expect("UTF-8"))).collect()
}

/// The path from the root, with forward slashes.
pub fn relative(path: &Path) -> String {
    path.strip_prefix(root()).expect("below the root").to_string_lossy().replace('\\', "/")
}

/// Blanks what is not code. Knows nested block comments, raw strings, and characters against lifetimes.
fn blank_comments_and_strings(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = not_code_end(&chars, at).unwrap_or(at);
        match end > at {
            true => out.extend(chars[at..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' })),
            false => out.push(chars[at]),
        }
        at = end.max(at + 1);
    }
    out
}

/// Where the comment, string or character that starts here ends; `None` when code stands here.
fn not_code_end(chars: &[char], at: usize) -> Option<usize> {
    let peek = |offset: usize| chars.get(at + offset).copied().unwrap_or('\0');
    let until = |from: usize, stop: &dyn Fn(usize) -> bool| (from..chars.len()).find(|i| stop(*i));
    let after_word = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
    match (peek(0), peek(1)) {
        ('/', '/') => Some(until(at, &|i| chars[i] == '\n').unwrap_or(chars.len())),
        ('/', '*') => Some(block_comment_end(chars, at)),
        ('"', _) => Some(string_end(chars, at + 1)),
        ('r', '"' | '#') if !after_word || matches!(chars[at - 1], 'b' | 'c') => {
            raw_string_end(chars, at + 1)
        }
        ('\'', '\\') => Some(until(at + 3, &|i| chars[i] == '\'').map_or(chars.len(), |i| i + 1)),
        ('\'', _) if peek(2) == '\'' => Some(at + 3),
        _ => None,
    }
}

fn block_comment_end(chars: &[char], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) if depth == 1 => return at + 2,
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at
}

fn string_end(chars: &[char], mut at: usize) -> usize {
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(chars.len())
}

fn raw_string_end(chars: &[char], hashes_at: usize) -> Option<usize> {
    let hashes = chars[hashes_at..].iter().take_while(|c| **c == '#').count();
    let open = hashes_at + hashes;
    if chars.get(open) != Some(&'"') {
        return None; // `r#type`, a raw identifier
    }
    let closes = |i: usize| {
        chars[i] == '"' && chars[i + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes
    };
    Some((open + 1..chars.len()).find(|i| closes(*i)).map_or(chars.len(), |i| i + 1 + hashes))
}

struct Token {
    line: usize,
    text: String,
}

impl Token {
    fn is_word(&self) -> bool {
        self.text.starts_with(|c: char| c.is_alphabetic() || c == '_')
    }
}

/// Words, `::`, and every other character that is not white space by itself.
fn tokens(code: &str) -> Vec<Token> {
    let mut all: Vec<Token> = Vec::new();
    for (index, line) in code.lines().enumerate() {
        let mut rest = line.trim_start();
        while let Some(first) = rest.chars().next() {
            let word = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
            let length =
                if word > 0 { word } else { if rest.starts_with("::") { 2 } else { first.len_utf8() } };
            all.push(Token { line: index + 1, text: rest[..length].to_owned() });
            rest = rest[length..].trim_start();
        }
    }
    all
}

fn paths(tokens: &[Token]) -> Vec<CodePath> {
    let mut found = Vec::new();
    let mut braces = 0;
    let mut modules: Vec<(usize, bool)> = Vec::new(); // (depth of its braces, is a test module)
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at].text.as_str() {
            "{" => braces += 1,
            "}" => {
                braces -= 1;
                modules.retain(|(depth, _)| *depth < braces + 1);
            }
            "mod" if tokens.get(at + 2).is_some_and(|t| t.text == "{") => {
                let is_test = tokens[..at].iter().rev().take(9).any(|t| t.text == "cfg")
                    && tokens[..at].iter().rev().take(9).any(|t| t.text == "test");
                modules.push((braces + 1, is_test));
            }
            _ if tokens[at].is_word() && tokens.get(at + 1).is_some_and(|t| t.text == "::") => {
                let mut leaves = Vec::new();
                let end = walk(tokens, at, &mut Vec::new(), &mut leaves);
                found.extend(leaves.into_iter().map(|segments| CodePath {
                    line: tokens[at].line,
                    segments,
                    inline_modules: modules.len(),
                    in_tests: modules.iter().any(|(_, is_test)| *is_test),
                }));
                at = end;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    found
}

/// Follows one path from a word, into its group if it has one; gives the index after it.
fn walk(tokens: &[Token], mut at: usize, prefix: &mut Vec<String>, leaves: &mut Vec<Vec<String>>) -> usize {
    let length = prefix.len();
    loop {
        prefix.push(tokens[at].text.clone());
        let Some(after) = tokens.get(at + 2).filter(|_| tokens[at + 1].text == "::") else { break };
        match after.text.as_str() {
            "{" => {
                at += 3;
                while tokens.get(at).is_some_and(|t| t.text != "}") {
                    at = match tokens[at].text.as_str() {
                        "as" => at + 2,
                        "*" => walk(tokens, at, prefix, leaves),
                        _ if tokens[at].is_word() => walk(tokens, at, prefix, leaves),
                        _ => at + 1,
                    };
                }
                prefix.truncate(length);
                return at + 1;
            }
            _ if after.is_word() || after.text == "*" => at += 2,
            _ => break,
        }
    }
    leaves.push(prefix.clone());
    prefix.truncate(length);
    at + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(text: &str) -> Vec<String> {
        Source::new("src/x.rs", text).paths().into_iter().map(|path| path.segments.join("::")).collect()
    }

    #[test]
    fn comments_strings_and_characters_are_not_code() {
        let text = "a /* unsafe /* nested */ */ b // unsafe\n\"unsafe \\\" unsafe\" r#\"unsafe\"# '\"' 'a c";
        let words = |word| Source::new("src/x.rs", text).lines_with_word(word);
        assert_eq!(words("unsafe"), Vec::<usize>::new());
        assert_eq!((words("a"), words("b"), words("c")), (vec![1, 2], vec![1], vec![2]));
    }

    #[test]
    fn groups_are_taken_apart() {
        let uses = "use std::{fmt, sync::{Arc, atomic::{AtomicU64 as A, Ordering}}, io::*};";
        let expected = [
            "std::fmt",
            "std::sync::Arc",
            "std::sync::atomic::AtomicU64",
            "std::sync::atomic::Ordering",
            "std::io::*",
        ];
        assert_eq!(flat(uses), expected);
        assert_eq!(flat("let x = crate::a::b::<u8>(c);"), ["crate::a::b"]);
    }

    #[test]
    fn inline_test_modules_are_known() {
        let text = "use crate::a::B;\n#[cfg(test)]\nmod tests {\n    use super::b::C;\n}\nuse crate::c::D;";
        let source = Source::new("src/x.rs", text);
        let seen: Vec<_> = source.paths().iter().map(|p| (p.in_tests, p.inline_modules)).collect();
        assert_eq!(seen, [(false, 0), (true, 1), (false, 0)]);
    }
}
