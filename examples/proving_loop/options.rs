//! The command line.

use std::path::PathBuf;

pub const HELP: &str = "\
Stages segments like a prover: fill an arena, copy it to the device, record, drop; several in flight.
Reads every segment back and compares checksums. Then the same with `vec![0; n]` and with page-locking per use.

usage: proving_loop [options]
  --input FILE...   what the rows are made from (default: the files of this repository)
  --segments N      segments to stage in each of the three ways (default 1000)
  --in-flight K     segments on the device at a time, one stream each (default 3)
  --period-ms P     a segment comes every P milliseconds; 0: as fast as they go (default 0)
  --bytes B         bytes of an arena; rounded up to a power of two (default 4194304)
  --json            print one JSON object instead of the table
  --help            this text";

pub struct Options {
    pub inputs: Vec<PathBuf>,
    pub segments: usize,
    pub in_flight: usize,
    pub period_ms: f64,
    pub bytes: usize,
    pub json: bool,
}

/// `Ok(None)` when help was asked for.
pub fn parse(arguments: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
    let mut options = Options {
        inputs: Vec::new(),
        segments: 1000,
        in_flight: 3,
        period_ms: 0.0,
        bytes: 4 << 20,
        json: false,
    };
    let mut arguments = arguments.peekable();
    while let Some(flag) = arguments.next() {
        let mut value =
            || arguments.next_if(|next| !next.starts_with("--")).ok_or(format!("{flag} needs a value"));
        match flag.as_str() {
            "--help" | "-h" => return Ok(None),
            "--json" => options.json = true,
            "--segments" => options.segments = number(&flag, &value()?, 1, 100_000_000)?,
            "--in-flight" => options.in_flight = number(&flag, &value()?, 1, 256)?,
            "--bytes" => options.bytes = number(&flag, &value()?, 64, 1 << 36)?,
            "--period-ms" => options.period_ms = milliseconds(&flag, &value()?)?,
            "--input" => {
                options.inputs.push(value()?.into());
                while let Some(file) = arguments.next_if(|next| !next.starts_with("--")) {
                    options.inputs.push(file.into());
                }
            }
            _ => return Err(format!("unknown argument {flag:?}; --help lists what there is")),
        }
    }
    options.bytes = options.bytes.next_power_of_two();
    Ok(Some(options))
}

fn number(flag: &str, text: &str, least: usize, most: usize) -> Result<usize, String> {
    let parsed = text.parse().ok().filter(|number| (least..=most).contains(number));
    parsed.ok_or_else(|| format!("{flag} takes a whole number from {least} to {most}, not {text:?}"))
}

fn milliseconds(flag: &str, text: &str) -> Result<f64, String> {
    let parsed = text.parse().ok().filter(|number: &f64| (0.0..=60_000.0).contains(number));
    parsed.ok_or_else(|| format!("{flag} takes milliseconds from 0 to 60000, not {text:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Result<Option<Options>, String> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn every_option_is_read() {
        let line = "--input a b --segments 7 --in-flight 2 --period-ms 0.5 --bytes 1000 --json";
        let options = parse_line(line).expect("it is right").expect("no help was asked for");
        assert_eq!(options.inputs, [PathBuf::from("a"), PathBuf::from("b")]);
        assert_eq!((options.segments, options.in_flight, options.bytes), (7, 2, 1024));
        assert_eq!((options.period_ms, options.json), (0.5, true));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for line in [
            "--segment 7",
            "--segments 0",
            "--segments x",
            "--bytes",
            "--input --json",
            "--period-ms -1",
            "x",
        ] {
            let why = parse_line(line).err().unwrap_or_else(|| panic!("{line:?} was accepted"));
            let flag = line.split_whitespace().next().expect("not empty");
            assert!(why.contains(flag), "{why:?} does not name {flag}");
        }
    }
}
