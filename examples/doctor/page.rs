//! The findings as a page to read, and as an object to parse.

use crate::Findings;
use crate::advice::advice;
use crate::device::{Copy, Trial, VmLines};
use pinpool::driver::LibraryReport;
use serde_json::{Value, json};
use std::fmt;
use std::time::Duration;

/// Titled groups of lines.
pub struct Page {
    verdict: String,
    sections: Vec<(&'static str, Vec<String>)>,
    advice: Vec<String>,
}

const WHAT_PROVES_IT: [&str; 4] = [
    "VmLck in /proc/self/status counts mlock and nothing else: a driver pins pages in another way, so it is 0 for \
     perfectly page-locked memory. VmPin is counted by some drivers and not by others.",
    "What proves it: the driver itself (`Driver::is_page_locked`, cuPointerGetAttributes).",
    "What shows it: a copy call that returns long before the bytes have arrived.",
    "What does not: your own notes that a register call was made.",
];

impl Page {
    pub fn of(findings: &Findings) -> Self {
        let verdict = match (&findings.trial, findings.pinning_works()) {
            (Ok(trial), true) if trial.is_simulated() => "page-locking works, on a simulated device".into(),
            (_, true) => "page-locking works".into(),
            (Ok(_), false) => "page-locking does not work: the driver refuses".into(),
            (Err(reason), false) => {
                format!("page-locking does not work: {}", reason.lines().next().unwrap_or_default())
            }
        };
        let mut sections = vec![("The machine", findings.machine.lines())];
        sections.extend(findings.libraries.iter().map(library));
        match &findings.trial {
            Ok(trial) => sections.extend(trial_sections(trial)),
            Err(reason) => sections.push(("The device", vec![format!("nothing was tried: {reason}")])),
        }
        sections.push(("How to tell", WHAT_PROVES_IT.map(str::to_owned).to_vec()));
        Self { verdict, sections, advice: advice(findings) }
    }

    pub fn json(&self, findings: &Findings) -> Value {
        let trial = findings.trial.as_ref();
        json!({
            "pinning_works": findings.pinning_works(),
            "verdict": self.verdict,
            "advice": self.advice,
            "simulated": trial.is_ok_and(Trial::is_simulated),
            "machine": findings.machine.json(),
            "libraries": findings.libraries.iter().map(library_json).collect::<Vec<_>>(),
            "not_tried": trial.err(),
            "devices": trial.map_or(json!([]), devices_json),
            "support": trial.map_or(json!([]), support_json),
            "backing": trial.ok().map(|trial| format!("{:?}", trial.backing)),
            "registration": trial.map_or(json!([]), registrations_json),
            "page_lock": trial.map_or(json!([]), page_locks_json),
            "copies": trial.map_or(json!([]), copies_json),
            "vm_locked_bytes": trial.ok().and_then(|trial| trial.vm_during.locked),
            "vm_pinned_bytes": trial.ok().and_then(|trial| trial.vm_during.pinned),
        })
    }
}

impl fmt::Display for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "pinpool doctor: {}", self.verdict)?;
        for (title, lines) in &self.sections {
            writeln!(f, "\n{title}")?;
            for line in lines {
                writeln!(f, "  {}", line.replace('\n', "\n  "))?;
            }
        }
        writeln!(f, "\nWhat to do")?;
        self.advice.iter().try_for_each(|line| writeln!(f, "  {line}"))
    }
}

fn library(report: &LibraryReport) -> (&'static str, Vec<String>) {
    let (title, what) = match report.library {
        "libcuda" => ("The driver library, libcuda", "the driver library"),
        _ => (
            "The runtime library, libcudart (not needed; CUDA's own programs bring it)",
            "the runtime library",
        ),
    };
    let mut lines: Vec<String> = report.probes.iter().map(ToString::to_string).collect();
    lines.push(match (&report.found, report.version) {
        (Some(file), Some(version)) => {
            format!("=> {}, CUDA {}.{}", file.display(), version / 1000, version % 1000 / 10)
        }
        _ => format!("=> {what} cannot be used"),
    });
    (title, lines)
}

fn trial_sections(trial: &Trial) -> Vec<(&'static str, Vec<String>)> {
    let simulated = trial.is_simulated();
    let devices = trial.devices.iter().map(|device| {
        let context =
            if device.context_was_active { "in use" } else { "not in use by this process until now" };
        let node = device.numa_node.map_or("NUMA node unknown".into(), |node| format!("at NUMA node {node}"));
        format!("device {}: {}, {context}, {node}", device.ordinal, device.name)
    });
    let mut devices: Vec<String> = devices.collect();
    devices.push("the trials below use device 0, in a context that the doctor makes".into());
    let registrations = trial.registrations.iter().map(|tried| {
        let what = match &tried.result {
            Ok(true) => format!("page-locked in {}, and the driver says so", time(tried.elapsed)),
            Ok(false) => "registered, but the driver says that it is not page-locked".into(),
            Err(error) => error.clone(),
        };
        format!("{}: {what}", bytes(tried.bytes as u64))
    });
    let mut sections = vec![("The devices", devices), ("Memory that they can be given", support(trial))];
    sections.push(("Page-locking", registrations.collect()));
    let locks = trial.page_locks.iter().map(|lock| {
        let pages = if lock.huge_pages { "huge pages advised" } else { "4 KiB pages" };
        match lock.result {
            Ok((on, off)) => {
                format!("64 MiB resident, {pages}: {} ({}), off {}", time(on), rate(on), time(off))
            }
            Err(code) => format!("64 MiB resident, {pages}: refused with {code}"),
        }
    });
    let mut locks: Vec<String> = locks.collect();
    if simulated {
        locks.push("simulated: a constant for each page, and no hardware".into());
    }
    sections.push(("What page-locking costs", locks));
    sections
        .push(("Copies of 64 MiB, and how long the call holds its thread", copies(&trial.copies, simulated)));
    let vm = |lines: VmLines| {
        let shown = |value: Option<u64>| value.map_or("unknown".into(), bytes);
        format!("VmLck {}, VmPin {}", shown(lines.locked), shown(lines.pinned))
    };
    let counters =
        format!("before: {}; while 64 MiB are page-locked: {}", vm(trial.vm_before), vm(trial.vm_during));
    sections.push(("What the kernel counts", vec![counters]));
    sections
}

/// What each device says, and what a pool makes of it.
fn support(trial: &Trial) -> Vec<String> {
    let each = trial.support.iter().map(|of| {
        let said = [
            ("registers host memory (99)", of.host_register),
            ("goes by the host's page tables (100)", of.host_page_tables),
            ("reads pageable memory itself (88)", of.pageable_access),
            ("same address for registered memory (91)", of.host_pointer_serves),
            ("registers read-only memory (113)", of.read_only_register),
            ("managed memory (83)", of.managed_memory),
            ("which the host may always touch (89)", of.concurrent_managed_access),
        ];
        let shown = said.map(|(what, is_so)| format!("{what}: {}", if is_so { "yes" } else { "no" }));
        format!("device {}: {}", of.device, shown.join("; "))
    });
    each.chain([format!("a pool page-locks {}", trial.backing)]).collect()
}

fn support_json(trial: &Trial) -> Value {
    let each = trial.support.iter().map(|of| {
        json!({
            "device": of.device,
            "host_register": of.host_register,
            "host_page_tables": of.host_page_tables,
            "pageable_access": of.pageable_access,
            "host_pointer_serves": of.host_pointer_serves,
            "read_only_register": of.read_only_register,
            "managed_memory": of.managed_memory,
            "concurrent_managed_access": of.concurrent_managed_access,
        })
    });
    each.collect()
}

fn copies(copies: &[Copy], simulated: bool) -> Vec<String> {
    let each = copies.iter().map(|copy| {
        let share = 100.0 * copy.call.as_secs_f64() / copy.total.as_secs_f64().max(1e-9);
        format!(
            "{} {:<12} {:>11}; the call returned after {}, {share:.0} % of {}",
            copy.direction,
            copy.memory,
            rate(copy.total),
            time(copy.call),
            time(copy.total)
        )
    });
    let mut lines: Vec<String> = each.collect();
    match lines.is_empty() {
        true => lines.push("not tried, since nothing could be page-locked".into()),
        false => lines.push(
            "Until the call returns, its thread does nothing else: that, more often than the rate, is why memory is \
             page-locked."
                .into(),
        ),
    }
    if simulated {
        lines.push("simulated: the rates are constants, and prove nothing about hardware".into());
    }
    lines
}

fn library_json(report: &LibraryReport) -> Value {
    let probes = report.probes.iter().map(|probe| {
        let place = probe.place.as_ref().map(|place| place.to_string_lossy());
        json!({ "rung": probe.rung, "place": place, "answer": probe.answer })
    });
    json!({
        "library": report.library,
        "found": report.found.as_ref().map(|file| file.to_string_lossy()),
        "version": report.version,
        "probes": probes.collect::<Vec<_>>(),
    })
}

fn devices_json(trial: &Trial) -> Value {
    let each = trial.devices.iter().map(|device| {
        json!({
            "ordinal": device.ordinal,
            "name": device.name,
            "context_was_active": device.context_was_active,
            "numa_node": device.numa_node,
        })
    });
    each.collect()
}

fn registrations_json(trial: &Trial) -> Value {
    let each = trial.registrations.iter().map(|tried| {
        json!({
            "bytes": tried.bytes,
            "page_locked": tried.result == Ok(true),
            "error": tried.result.as_ref().err(),
            "us": micros(tried.elapsed),
        })
    });
    each.collect()
}

fn page_locks_json(trial: &Trial) -> Value {
    let each = trial.page_locks.iter().map(|lock| {
        json!({
            "huge_pages": lock.huge_pages,
            "register_us": lock.result.ok().map(|(on, _)| micros(on)),
            "unregister_us": lock.result.ok().map(|(_, off)| micros(off)),
            "code": lock.result.err(),
        })
    });
    each.collect()
}

fn copies_json(trial: &Trial) -> Value {
    let each = trial.copies.iter().map(|copy| {
        json!({
            "direction": copy.direction,
            "memory": copy.memory,
            "call_us": micros(copy.call),
            "total_us": micros(copy.total),
        })
    });
    each.collect()
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

fn time(duration: Duration) -> String {
    match duration.as_secs_f64() {
        seconds if seconds < 1e-3 => format!("{:.0} us", seconds * 1e6),
        seconds => format!("{:.2} ms", seconds * 1e3),
    }
}

/// The rate at which 64 MiB took this long.
fn rate(duration: Duration) -> String {
    format!("{:.1} GB/s", (64 << 20) as f64 / duration.as_secs_f64().max(1e-9) / 1e9)
}

/// With the largest unit that leaves no fraction, or one digit of it.
pub fn bytes(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 => format!("{:.1} GiB", b as f64 / f64::from(1 << 30)),
        b if b >= 1 << 20 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}
