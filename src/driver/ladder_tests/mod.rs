//! The order of the search, as lists, for machines that this one is not.

mod machine;

use super::ladder::{Environment, How, Kind, Request, Rung, Step, Surroundings, ladder};
use super::search::{Answer, climb, lines};
use machine::Machine;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

fn shown(rungs: &[Rung]) -> Vec<String> {
    let mut all = Vec::new();
    for rung in rungs {
        if rung.steps.is_empty() {
            all.push(format!("{}: (none)", rung.title));
        }
        for step in &rung.steps {
            all.push(match step {
                Step::Open(How::IfLoaded, file) => format!("{}: {} ?", rung.title, file.display()),
                Step::Open(How::Load, file) => format!("{}: {}", rung.title, file.display()),
                Step::Nothing(place, answer) => format!("{}: {}: {answer}", rung.title, place.display()),
            });
        }
    }
    all
}

fn set(pairs: &[(&'static str, &str)]) -> Environment {
    pairs.iter().map(|(name, value)| (*name, OsString::from(value))).collect()
}

const NOTHING_CHOSEN: [&str; 2] = ["DriverBuilder::library: (none)", "PINPOOL_CUDA_LIBRARY: (none)"];

/// What every ladder for libcuda ends with on x86-64.
const DRIVER_TAIL: [&str; 13] = [
    "loaded under this name: libcuda.so.1 ?",
    "by name: libcuda.so.1",
    "loaded under this name: libcuda.so ?",
    "by name: libcuda.so",
    "well-known folders: /usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "well-known folders: /usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1",
    "well-known folders: /usr/lib64/libcuda.so.1",
    "well-known folders: /usr/lib/libcuda.so.1",
    "well-known folders: /usr/local/nvidia/lib64/libcuda.so.1",
    "well-known folders: /.singularity.d/libs/libcuda.so.1",
    "well-known folders: /usr/lib/wsl/lib/libcuda.so.1",
    "well-known folders: /run/opengl-driver/lib/libcuda.so.1",
    "well-known folders: /usr/local/cuda/compat/libcuda.so.1",
];

#[test]
fn nothing_at_all() {
    let machine = Machine::default();
    let mut expected = NOTHING_CHOSEN.to_vec();
    expected.push("mapped into this process: (none)");
    expected.extend(DRIVER_TAIL);
    assert_eq!(shown(&machine.rungs(Kind::Driver)), expected);

    let mut expected = NOTHING_CHOSEN.to_vec();
    expected.extend([
        "mapped into this process: (none)",
        "vendor packages: (none)",
        "loaded under this name: libcudart.so.13 ?",
        "by name: libcudart.so.13",
        "loaded under this name: libcudart.so.12 ?",
        "by name: libcudart.so.12",
        "loaded under this name: libcudart.so.11.0 ?",
        "by name: libcudart.so.11.0",
        "loaded under this name: libcudart.so ?",
        "by name: libcudart.so",
        "well-known folders: /usr/local/cuda/lib64: no such folder",
        "well-known folders: /opt/cuda/lib64: no such folder",
        "well-known folders: /usr/lib/x86_64-linux-gnu: no such folder",
        "well-known folders: /usr/lib64: no such folder",
    ]);
    assert_eq!(shown(&machine.rungs(Kind::Runtime)), expected);
}

#[test]
fn a_library_chosen_by_name_is_the_only_one_tried() {
    let mut machine =
        Machine { environment: set(&[("PINPOOL_CUDA_LIBRARY", "/a/libcuda.so.1")]), ..Machine::default() };
    assert_eq!(shown(&machine.rungs(Kind::Driver)), ["PINPOOL_CUDA_LIBRARY: /a/libcuda.so.1"]);
    machine.request.library = Some("/b/mine.so".into());
    assert_eq!(shown(&machine.rungs(Kind::Driver)), ["DriverBuilder::library: /b/mine.so"]);
    // It chooses no runtime, whose own search goes on.
    assert_eq!(
        machine.before_names(Kind::Runtime),
        [
            "DriverBuilder::library: /b/mine.so: is no choice of a libcudart",
            "PINPOOL_CUDA_LIBRARY: /a/libcuda.so.1: is no choice of a libcudart",
            "mapped into this process: (none)",
            "vendor packages: (none)",
        ]
    );
    machine.request.library = Some("/b/libcudart.so.12".into());
    assert_eq!(shown(&machine.rungs(Kind::Runtime)), ["DriverBuilder::library: /b/libcudart.so.12"]);
}

#[test]
fn a_process_that_mapped_the_library_already() {
    let machine = Machine {
        maps: "\
55d0c0a00000-55d0c0a21000 r--p 00000000 fe:01 1234   /usr/bin/app
7f10a0000000-7f10a0100000 r--p 00000000 fe:01 7777                       /usr/lib/x86_64-linux-gnu/libcuda.so.535.261.03
7f10a0100000-7f10a0200000 r-xp 00100000 fe:01 7777                       /usr/lib/x86_64-linux-gnu/libcuda.so.535.261.03
7f10b0000000-7f10b0100000 r-xp 00000000 00:2f 8888   /var/lib/containers/storage/overlay/3fe0/diff/usr/lib64/libcuda.so.1 (deleted)
7f10c0000000-7f10c0100000 r-xp 00000000 fe:01 9999   /opt/my app/libcuda.so
7f10d0000000-7f10d0100000 r-xp 00000000 fe:01 9998   /site/torch/lib/libcudart-9335f6a2.so.12
7f10e0000000-7f10e0100000 r-xp 00000000 fe:01 9997   /site/nvidia/cuda_runtime/lib/libcudart.so.12.9.79
7f10f0000000-7f10f0100000 r-xp 00000000 fe:01 9996   /opt/libcuda.so.1.log
7f10f0200000-7f10f0300000 rw-p 00000000 00:00 0
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0      [stack]
",
        linked: vec!["/opt/my app/libcuda.so".into(), "/tmp/renamed.so".into()],
        ..Machine::default()
    };
    let mut expected = NOTHING_CHOSEN.to_vec();
    expected.extend([
        "mapped into this process: /usr/lib/x86_64-linux-gnu/libcuda.so.535.261.03 ?",
        "mapped into this process: /var/lib/containers/storage/overlay/3fe0/diff/usr/lib64/libcuda.so.1 ?",
        "mapped into this process: /opt/my app/libcuda.so ?",
        "mapped into this process: /tmp/renamed.so ?",
    ]);
    assert_eq!(machine.before_names(Kind::Driver), expected);
    assert_eq!(
        machine.before_names(Kind::Runtime)[2..4],
        [
            "mapped into this process: /site/torch/lib/libcudart-9335f6a2.so.12 ?",
            "mapped into this process: /site/nvidia/cuda_runtime/lib/libcudart.so.12.9.79 ?",
        ]
    );
}

#[test]
fn an_unreadable_proc_is_a_line_and_the_linker_is_asked_instead() {
    let linked = [PathBuf::from("/usr/lib64/libcuda.so.1")];
    let around = Surroundings {
        maps: Err("Permission denied (os error 13)".into()),
        linked: &linked,
        environment: &Environment::new(),
        architecture: "x86_64",
    };
    let rungs = ladder(Kind::Driver, &Request::default(), &around, &Machine::default());
    assert_eq!(
        shown(&rungs)[2..4],
        [
            "mapped into this process: /proc/self/maps: cannot be read: Permission denied (os error 13)",
            "mapped into this process: /usr/lib64/libcuda.so.1 ?",
        ]
    );
}

#[test]
fn a_pip_environment_of_cuda_12() {
    let machine = Machine {
        environment: set(&[("VIRTUAL_ENV", "/venv")]),
        files: vec![
            "/venv/lib/python3.12/site-packages/nvidia/cublas/lib/libcublas.so.12",
            "/venv/lib/python3.12/site-packages/nvidia/cuda_runtime/include/cuda.h",
            "/venv/lib/python3.12/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
            "/venv/lib/python3.12/site-packages/nvidia/cuda_runtime/lib/libcudart_static.a",
        ],
        ..Machine::default()
    };
    let mut expected = NOTHING_CHOSEN.to_vec();
    expected.extend([
        "mapped into this process: (none)",
        "vendor packages: /venv/lib/python3.12/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
    ]);
    assert_eq!(machine.before_names(Kind::Runtime), expected);
    // The driver never comes in a package.
    assert_eq!(machine.before_names(Kind::Driver)[2..], ["mapped into this process: (none)"]);
}

#[test]
fn a_pip_environment_of_cuda_13_and_of_whatever_comes_next() {
    let machine = Machine {
        request: Request {
            python_path: vec!["".into(), "/zip/python312.zip".into(), "/site".into()],
            ..Request::default()
        },
        files: vec![
            "/site/nvidia/cu13/lib/libcudart.so.13",
            "/site/nvidia/cu14/targets/x86_64-linux/lib/libcudart.so.14",
            "/site/nvidia/cuda_runtime/lib/libcudart.so.12",
        ],
        ..Machine::default()
    };
    assert_eq!(
        machine.before_names(Kind::Runtime)[3..],
        [
            "vendor packages: /zip/python312.zip/nvidia: no such folder",
            "vendor packages: /site/nvidia/cu14/targets/x86_64-linux/lib/libcudart.so.14",
            "vendor packages: /site/nvidia/cu13/lib/libcudart.so.13",
            "vendor packages: /site/nvidia/cuda_runtime/lib/libcudart.so.12",
        ]
    );
}

#[test]
fn roots_of_the_program_come_before_those_of_the_environment() {
    let machine = Machine {
        environment: set(&[("VIRTUAL_ENV", "/venv"), ("CONDA_PREFIX", "/conda")]),
        request: Request {
            vendor_roots: vec!["/mine/nvidia".into(), "/packages".into(), "/absent".into(), "/bare".into()],
            python_path: vec!["/site".into()],
            library: None,
        },
        files: vec![
            "/mine/nvidia/cu13/lib/libcudart.so.13",
            "/packages/nvidia/lib/",
            "/bare/readme",
            "/site/nvidia/cuda_runtime/lib/libcudart.so.12",
            "/venv/lib64/python3.9/dist-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
            "/conda/lib/libcudart.so.12.4.127",
            "/conda/lib/libcudart.so.12",
        ],
        ..Machine::default()
    };
    assert_eq!(
        machine.before_names(Kind::Runtime)[3..],
        [
            "vendor packages: /mine/nvidia/cu13/lib/libcudart.so.13",
            "vendor packages: /packages/nvidia: has no libcudart in it",
            "vendor packages: /absent: no such folder",
            "vendor packages: /bare: has no folder nvidia",
            "vendor packages: /site/nvidia/cuda_runtime/lib/libcudart.so.12",
            "vendor packages: /venv/lib64/python3.9/dist-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
            "vendor packages: /conda/lib/libcudart.so.12.4.127",
            "vendor packages: /conda/lib/libcudart.so.12",
        ]
    );
}

#[test]
fn a_link_loop_ends_and_an_unreadable_folder_is_a_line() {
    let machine = Machine {
        request: Request { vendor_roots: vec!["/site".into()], ..Request::default() },
        files: vec![
            "/site/nvidia/secret!",
            "/site/nvidia/a/lib/libcudart.so.12",
            "/elsewhere/lib/libcudart.so.13",
        ],
        links: BTreeMap::from([
            ("/site/nvidia/a/up", "/site/nvidia"),
            ("/site/nvidia/linked", "/elsewhere"),
            ("/site/nvidia/again", "/elsewhere"),
        ]),
        ..Machine::default()
    };
    assert_eq!(
        machine.before_names(Kind::Runtime)[3..],
        [
            "vendor packages: /site/nvidia/again/lib/libcudart.so.13",
            "vendor packages: /site/nvidia/a/lib/libcudart.so.12",
            "vendor packages: /site/nvidia/secret: cannot be read: permission denied",
        ]
    );
}

#[test]
fn toolkits_newest_first_and_a_jetson() {
    let machine = Machine {
        environment: set(&[("CUDA_HOME", "/opt/cuda-home")]),
        files: vec![
            "/opt/cuda-home/lib64/libcudart.so.12",
            "/usr/local/cuda-9.2/lib64/libcudart.so.9.2",
            "/usr/local/cuda-12.4/lib64/libcudart.so.12.4.99",
            "/usr/lib64/libcudart.so.11.0",
        ],
        arm: true,
        ..Machine::default()
    };
    let all = shown(&machine.rungs(Kind::Runtime));
    assert_eq!(
        all[all.len() - 7..],
        [
            "well-known folders: /opt/cuda-home/lib64/libcudart.so.12",
            "well-known folders: /usr/local/cuda/lib64: no such folder",
            "well-known folders: /usr/local/cuda-12.4/lib64/libcudart.so.12.4.99",
            "well-known folders: /usr/local/cuda-9.2/lib64/libcudart.so.9.2",
            "well-known folders: /opt/cuda/lib64: no such folder",
            "well-known folders: /usr/lib/aarch64-linux-gnu: no such folder",
            "well-known folders: /usr/lib64/libcudart.so.11.0",
        ]
    );
    let all = shown(&machine.rungs(Kind::Driver));
    assert_eq!(
        all[all.len() - 2..],
        [
            "well-known folders: /usr/lib/aarch64-linux-gnu/tegra/libcuda.so.1",
            "well-known folders: /usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1",
        ]
    );
}

/// Climbs with answers from a list: what is absent fails, what is a stub is passed over, what is there is used.
fn climb_on(machine: &Machine, kind: Kind, present: &[(&str, bool)]) -> (Vec<String>, Option<PathBuf>) {
    let find = |file: &Path| present.iter().find(|(name, _)| Path::new(name) == file);
    let open = |how: How, file: &std::ffi::OsStr| match (how, find(Path::new(file))) {
        (How::Load, Some((_, is_stub))) => Ok(*is_stub),
        _ => Err("absent".to_owned()),
    };
    let examine = |is_stub, file: &Path| match is_stub {
        true => Answer::PassOver("is the link-time stub".into()),
        false => Answer::Use(file.to_owned(), "used".into()),
    };
    let (probes, found) = climb(machine.rungs(kind), open, examine);
    (lines(&probes).lines().map(str::to_owned).collect(), found)
}

#[test]
fn a_stub_in_front_of_the_real_one_is_passed_over() {
    let machine = Machine::default();
    let present = [("libcuda.so.1", true), ("libcuda.so", true), ("/usr/lib64/libcuda.so.1", false)];
    let (lines, found) = climb_on(&machine, Kind::Driver, &present);
    assert_eq!(found, Some("/usr/lib64/libcuda.so.1".into()));
    assert_eq!(
        lines,
        [
            "DriverBuilder::library: (none)",
            "PINPOOL_CUDA_LIBRARY: (none)",
            "mapped into this process: (none)",
            "loaded under this name: libcuda.so.1: absent",
            "by name: libcuda.so.1: is the link-time stub",
            "loaded under this name: libcuda.so: absent",
            "by name: libcuda.so: is the link-time stub",
            "well-known folders: /usr/lib/x86_64-linux-gnu/libcuda.so.1: absent",
            "well-known folders: /usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1: absent",
            "well-known folders: /usr/lib64/libcuda.so.1: used",
        ]
    );
}

#[test]
fn wsl_is_found_by_its_folder() {
    // The linker's cache of WSL 2 has libcuda.so.1, unless somebody's image has another cache.
    let (lines, found) =
        climb_on(&Machine::default(), Kind::Driver, &[("/usr/lib/wsl/lib/libcuda.so.1", false)]);
    assert_eq!(found, Some("/usr/lib/wsl/lib/libcuda.so.1".into()));
    assert_eq!(lines.last().unwrap(), "well-known folders: /usr/lib/wsl/lib/libcuda.so.1: used");
    assert_eq!(lines.len(), 3 + 4 + 7);
}

#[test]
fn names_are_recognised_and_others_are_not() {
    let is = |kind: Kind, name: &str| kind.is_called(name.as_ref());
    for name in ["libcuda.so", "libcuda.so.1", "libcuda.so.535.261.03", "libcuda-0a1b.so.1"] {
        assert!(is(Kind::Driver, name) && !is(Kind::Runtime, name), "{name}");
    }
    for name in ["libcudart.so", "libcudart.so.13", "libcudart.so.12.9.79", "libcudart-9335f6a2.so.12"] {
        assert!(is(Kind::Runtime, name) && !is(Kind::Driver, name), "{name}");
    }
    for name in
        ["libcuda.so.1.log", "libcudadevrt.a", "libcudart_static.a", "libcuda", "xlibcuda.so", "libcuda.so1"]
    {
        assert!(!is(Kind::Driver, name) && !is(Kind::Runtime, name), "{name}");
    }
}

#[test]
#[cfg(unix)]
fn bytes_that_are_no_text_and_control_characters_make_one_line() {
    use std::os::unix::ffi::OsStrExt;
    let odd = Path::new(std::ffi::OsStr::from_bytes(b"/venv \xff\n/nvidia"));
    let machine = Machine {
        request: Request { vendor_roots: vec![odd.into()], ..Request::default() },
        ..Machine::default()
    };
    let (lines, _) = climb_on(&machine, Kind::Runtime, &[]);
    assert_eq!(lines[3], "vendor packages: /venv \u{fffd}\\n/nvidia: no such folder");
}
