//! The command line.

use crate::table::Effort;
use std::path::PathBuf;

/// What `--help` prints.
pub const USAGE: &str = "\
cargo bench --bench verdict [-- OPTIONS] [a part of the rows' names]
  --quick          few samples, about a minute; fails on a wrong answer only
  --json           a list of objects instead of the table
  --repeat N       so many runs, each a process of its own, and their medians
  --against PATH   pinpool's numbers with another build of this bench and with this one, by turns
  --help           this text
Exits with 0 when every bar is met, 1 when one is missed (never with --quick or --against), 2 for a command line
that makes no sense.";

/// What was asked for.
pub struct Arguments {
    pub effort: Effort,
    /// Rows whose name has this in it.
    pub wanted: String,
    pub as_json: bool,
    /// How many runs, each a process of its own; 0 for one here.
    pub repeat: usize,
    /// Another build of this bench, to run by turns with this one.
    pub against: Option<PathBuf>,
}

impl Arguments {
    /// Under `cargo test` an option that is not known is the test runner's; under `cargo bench` it is a mistake, and a run
    /// of minutes is no answer to it.
    pub fn read(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut read =
            Self { effort: Effort::Once, wanted: String::new(), as_json: false, repeat: 0, against: None };
        let (mut is_bench, mut is_quick, mut is_test) = (false, false, false);
        let mut unknown = None;
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--bench" => is_bench = true,
                "--quick" => is_quick = true,
                "--test" => is_test = true,
                "--json" => read.as_json = true,
                "--repeat" => {
                    let count = arguments.next().unwrap_or_default();
                    let count = count.parse().ok().filter(|count| *count > 0);
                    read.repeat = count.ok_or("--repeat wants to know how often, as in --repeat 5")?;
                }
                "--against" => {
                    let path = arguments.next().filter(|path| !path.starts_with("--")).map(PathBuf::from);
                    let path = path.filter(|path| path.is_file());
                    read.against =
                        Some(path.ok_or("--against wants the path of another build of this bench")?);
                }
                option if option.starts_with('-') => unknown = Some(argument),
                _ => read.wanted = argument,
            }
        }
        if let Some(unknown) = unknown.filter(|_| is_bench) {
            return Err(format!("there is no option {unknown}\n\n{USAGE}"));
        }
        read.effort = match () {
            () if is_test || !is_bench => Effort::Once,
            () if is_quick => Effort::Quick,
            () => Effort::Full,
        };
        Ok(read)
    }
}
