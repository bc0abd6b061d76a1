//! What to run when page-locking does not engage: `cargo run --example doctor`.
//!
//! Looks at the machine, the libraries and the devices, tries page-locking and copying, and says in plain words
//! what is the matter. Exit code 0 when page-locking works, 1 when not. `--json` prints one object, `--simulated`
//! uses the simulated device behind the fake libcuda.

mod advice;
mod device;
mod machine;
mod memory;
mod page;

use device::Trial;
use machine::Machine;
use page::Page;
use pinpool::Driver;
use pinpool::driver::LibraryReport;
use std::process::ExitCode;

const USAGE: &str = "\
doctor: why does page-locking not engage?

  --json        print one JSON object
  --simulated   use the simulated device behind the fake libcuda
  --help        this text

Exit code: 0 when page-locking works, 1 when not, 2 for a wrong argument.
PINPOOL_CUDA_LIBRARY names the one library to use.";

/// Everything that was found out.
struct Findings {
    machine: Machine,
    libraries: Vec<LibraryReport>,
    /// What was tried on a device, or why nothing was.
    trial: Result<Trial, String>,
}

impl Findings {
    fn library(&self, name: &str) -> &LibraryReport {
        self.libraries.iter().find(|report| report.library == name).expect("both are reported")
    }

    fn pinning_works(&self) -> bool {
        self.trial.as_ref().is_ok_and(Trial::pinning_works)
    }
}

fn main() -> ExitCode {
    let (mut json, mut simulated) = (false, false);
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--json" => json = true,
            "--simulated" => simulated = true,
            "--help" => {
                println!("{USAGE}");
                return ExitCode::SUCCESS;
            }
            other => {
                eprintln!("{other} is no option\n\n{USAGE}");
                return ExitCode::from(2);
            }
        }
    }
    let mut builder = Driver::builder();
    if simulated {
        match fake_cuda::control::Control::find() {
            Ok(library) => builder = builder.library(library.canonicalize().unwrap_or(library)),
            Err(reason) => {
                eprintln!("--simulated: {reason}");
                return ExitCode::FAILURE;
            }
        }
    }
    let findings = examine(&builder.build());
    let page = Page::of(&findings);
    // Whoever closes the pipe early has read enough.
    use std::io::Write;
    let _ = match json {
        true => writeln!(std::io::stdout(), "{:#}", page.json(&findings)),
        false => write!(std::io::stdout(), "{page}"),
    };
    if findings.pinning_works() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn examine(driver: &Driver) -> Findings {
    let machine = Machine::look();
    let libraries = driver.libraries();
    // cudarc panics where it finds no library, so it is asked for nothing before this check.
    let trial = match pinpool::check_cudarc(driver) {
        Ok(_) => Trial::run(driver),
        Err(pinpool::Error::NoCuda { report }) if report.starts_with("cudarc") => Err(report),
        Err(pinpool::Error::NoCuda { .. }) => Err("no CUDA driver can be used".into()),
        Err(error) => Err(error.to_string()),
    };
    Findings { machine, libraries, trial }
}
