//! The command line.

pub const HELP: &str = "\
Uses pools as hard as they go, on simulated devices in real time, and checks every byte: many threads, streams and
devices, sizes from 1 byte up, CUDA graphs that are replayed, contexts that come and go, faults by a seed, caps, trims,
shutdowns. One line a second; the accounts at the end.
Exits with 0 when all was right, with 1 and the discrepancies when not.

usage: soak [options]
  --seconds N        how long (default 60)
  --threads N        threads that take and drop (default 4)
  --capturers N      threads that capture graphs and replay them (default 1)
  --streams N        streams of each device (default 3)
  --devices N        (default 2)
  --seed N           of every choice and every fault (default: the process id); threads interleave as they like
  --faults MODE      none; mild: refusals that cost nothing but time; hard: and what makes the pool leak on purpose;
                     lost: as mild, and a device is lost at half-time; reset: as mild, and now and then a device is reset,
                     with all contexts, streams and memory of it (default mild)
  --backing NAME     what is page-locked: registered, allocated, or both: two pools (default both)
  --max-bytes N      the largest buffer (default 67108864)
  --memory-bytes N   bytes of buffers that are out at a time, at most (default 536870912)
  --cap-bytes N      idle bytes kept (default 268435456)
  --plant WHAT       a discrepancy, to see it found: byte (a wrong byte on a device), leak (a buffer that nobody drops),
                     capture (buffers whose capture the pool is not told of)
  --help             this text";

use pinpool::Backing;

const BOTH: &[Backing] = &[Backing::Registered, Backing::HostPinned];

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Faults {
    None,
    Mild,
    Hard,
    Lost,
    Reset,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Plant {
    Nothing,
    Byte,
    Leak,
    Capture,
}

#[derive(Clone, Debug)]
pub struct Options {
    pub seconds: u64,
    pub threads: usize,
    pub capturers: usize,
    pub streams: usize,
    pub devices: usize,
    pub seed: u64,
    pub faults: Faults,
    /// Of each pool.
    pub backings: &'static [Backing],
    pub max_bytes: usize,
    pub memory_bytes: usize,
    pub cap_bytes: usize,
    pub plant: Plant,
}

/// `Ok(None)` when help was asked for.
pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
    let mut options = Options {
        seconds: 60,
        threads: 4,
        capturers: 1,
        streams: 3,
        devices: 2,
        seed: std::process::id().into(),
        faults: Faults::Mild,
        backings: BOTH,
        max_bytes: 64 << 20,
        memory_bytes: 512 << 20,
        cap_bytes: 256 << 20,
        plant: Plant::Nothing,
    };
    while let Some(flag) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{flag} needs a value"));
        match flag.as_str() {
            "--help" | "-h" => return Ok(None),
            "--seconds" => options.seconds = number(&flag, &value()?, 1, 1_000_000)? as u64,
            "--threads" => options.threads = number(&flag, &value()?, 1, 256)?,
            "--capturers" => options.capturers = number(&flag, &value()?, 0, 64)?,
            "--streams" => options.streams = number(&flag, &value()?, 1, 64)?,
            "--devices" => options.devices = number(&flag, &value()?, 1, 8)?,
            "--seed" => options.seed = number(&flag, &value()?, 0, usize::MAX)? as u64,
            "--max-bytes" => options.max_bytes = number(&flag, &value()?, 1, 1 << 30)?,
            "--memory-bytes" => options.memory_bytes = number(&flag, &value()?, 1 << 20, 1 << 40)?,
            "--cap-bytes" => options.cap_bytes = number(&flag, &value()?, 0, 1 << 40)?,
            "--backing" => {
                options.backings = match value()?.as_str() {
                    "registered" => &BOTH[..1],
                    "allocated" => &BOTH[1..],
                    "both" => BOTH,
                    other => {
                        return Err(format!("--backing takes registered, allocated or both, not {other:?}"));
                    }
                }
            }
            "--faults" => {
                options.faults = match value()?.as_str() {
                    "none" => Faults::None,
                    "mild" => Faults::Mild,
                    "hard" => Faults::Hard,
                    "lost" => Faults::Lost,
                    "reset" => Faults::Reset,
                    other => {
                        return Err(format!("--faults takes none, mild, hard, lost or reset, not {other:?}"));
                    }
                }
            }
            "--plant" => {
                options.plant = match value()?.as_str() {
                    "byte" => Plant::Byte,
                    "leak" => Plant::Leak,
                    "capture" => Plant::Capture,
                    other => return Err(format!("--plant takes byte, leak or capture, not {other:?}")),
                }
            }
            _ => return Err(format!("unknown argument {flag:?}; --help lists what there is")),
        }
    }
    options.max_bytes = options.max_bytes.next_power_of_two();
    if options.memory_bytes < options.max_bytes {
        return Err(format!("--memory-bytes is less than one buffer of {}", options.max_bytes));
    }
    Ok(Some(options))
}

fn number(flag: &str, text: &str, least: usize, most: usize) -> Result<usize, String> {
    let parsed = text.parse().ok().filter(|number| (least..=most).contains(number));
    parsed.ok_or_else(|| format!("{flag} takes a whole number from {least} to {most}, not {text:?}"))
}
