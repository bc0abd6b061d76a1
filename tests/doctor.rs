//! `cargo run --example doctor` as a person runs it: without CUDA, with a stub in the way, with the fake library.
#![cfg(all(feature = "cudarc", target_os = "linux"))]

mod child;

use serde_json::Value;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;

/// The example, built now: `cargo test --test doctor` alone does not build it.
static DOCTOR: LazyLock<PathBuf> = LazyLock::new(|| {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--locked", "--example", "doctor"]);
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    if profile == "release" {
        cargo.arg("--release");
    }
    let built = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status();
    assert!(built.is_ok_and(|status| status.success()), "the example could not be built");
    // target/debug/deps/doctor-.. is this test.
    let folder = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_owned();
    folder.join("examples/doctor")
});

/// What it prints, and its exit code, in this environment only.
fn doctor(arguments: &[&str], environment: &[(&str, &OsStr)]) -> (String, Option<i32>) {
    let mut doctor = Command::new(&*DOCTOR);
    doctor.args(arguments).env_clear().envs(environment.iter().copied()).envs(child::coverage());
    let output = doctor.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!errors.contains("panicked"), "{errors}");
    (String::from_utf8(output.stdout).unwrap(), output.status.code())
}

fn this_machine_has_cuda() -> bool {
    let has = pinpool::Driver::cuda().is_ok();
    if has {
        println!("this machine has CUDA: nothing to show here");
    }
    has
}

#[test]
fn without_cuda_it_says_so_in_plain_words_and_exits_with_1() {
    if this_machine_has_cuda() {
        return;
    }
    let (page, code) = doctor(&[], &[]);
    assert_eq!(code, Some(1), "{page}");
    assert!(
        page.starts_with("pinpool doctor: page-locking does not work: no CUDA driver can be used\n"),
        "{page}"
    );
    for line in [
        "  by name: libcuda.so.1: cannot open shared object file: No such file or directory\n",
        "  well-known folders: /usr/lib/wsl/lib/libcuda.so.1: No such file or directory (os error 2)\n",
        "  vendor packages: (none)\n",
        "  => the driver library cannot be used\n",
        "  => the runtime library cannot be used\n",
    ] {
        assert!(page.contains(line), "{line} is missing:\n{page}");
    }
    assert!(page.contains("transparent huge pages: ") && page.contains("RLIMIT_MEMLOCK"), "{page}");
    assert!(page.contains("VmLck in /proc/self/status counts mlock and nothing else"), "{page}");
    assert!(page.contains("\nWhat to do\n"), "{page}");
}

#[test]
fn its_json_says_the_same() {
    if this_machine_has_cuda() {
        return;
    }
    let (text, code) = doctor(&["--json"], &[]);
    let json: Value = serde_json::from_str(&text).expect("one object");
    assert_eq!((code, &json["pinning_works"]), (Some(1), &Value::Bool(false)));
    assert_eq!(json["not_tried"], "no CUDA driver can be used");
    let libraries = json["libraries"].as_array().unwrap();
    assert_eq!(
        (&libraries[0]["library"], &libraries[1]["library"]),
        (&"libcuda".into(), &"libcudart".into())
    );
    assert_eq!(libraries[0]["probes"][0]["answer"], "(none)");
    assert!(json["advice"].as_array().is_some_and(|advice| !advice.is_empty()));
}

#[test]
fn with_the_fake_library_it_tries_everything_and_exits_with_0() {
    let library = child::built("libfake_cuda.so").canonicalize().unwrap();
    for (arguments, environment) in
        [(&["--json", "--simulated"][..], None), (&["--json"][..], Some(library.as_os_str()))]
    {
        let environment: Vec<_> =
            environment.map(|library| ("PINPOOL_CUDA_LIBRARY", library)).into_iter().collect();
        let (text, code) = doctor(arguments, &environment);
        let json: Value = serde_json::from_str(&text).expect("one object");
        assert_eq!(code, Some(0), "{text}");
        assert_eq!((&json["pinning_works"], &json["simulated"]), (&Value::Bool(true), &Value::Bool(true)));
        assert_eq!(json["libraries"][0]["found"], library.to_str().unwrap());
        assert_eq!(json["libraries"][0]["version"], 13_000);
        assert_eq!(json["devices"][0]["name"], "pinpool simulated device 0");
        assert_eq!(json["devices"][0]["context_was_active"], false, "looking makes no context");
        let sizes: Vec<_> = json["registration"].as_array().unwrap().iter().collect();
        assert_eq!(
            sizes.iter().map(|size| size["bytes"].as_u64().unwrap()).collect::<Vec<_>>(),
            [4 << 10, 1 << 20, 64 << 20]
        );
        assert!(sizes.iter().all(|size| size["page_locked"] == true), "{text}");
        let locks = json["page_lock"].as_array().unwrap();
        assert!(
            locks.len() == 2 && locks.iter().all(|lock| lock["register_us"].as_f64() > Some(0.0)),
            "{text}"
        );
        for direction in ["host to device", "device to host"] {
            let call = |memory: &str| {
                let copies = json["copies"].as_array().unwrap();
                let copy =
                    copies.iter().find(|c| c["direction"] == direction && c["memory"] == memory).unwrap();
                copy["call_us"].as_f64().unwrap() / copy["total_us"].as_f64().unwrap()
            };
            assert!(call("page-locked") < 0.5 && call("pageable") > 0.5, "{direction}: {text}");
        }
    }
}

#[test]
fn a_stub_in_the_way_is_named() {
    if this_machine_has_cuda() {
        return;
    }
    let path = child::library_path("doctor-stub", "libfake_stub.so", &["libcuda.so"]);
    let (page, code) = doctor(&[], &[("LD_LIBRARY_PATH", &path)]);
    assert_eq!(code, Some(1));
    assert!(page.contains("by name: libcuda.so: is the link-time stub: "), "{page}");
    assert!(page.contains("Only the toolkit's stub was found"), "{page}");

    // With a driver beside it, cudarc would still take the stub.
    let ours = child::anonymous_copy(child::folder("doctor-driver").join("libcuda.so.535"));
    let (page, code) = doctor(&[], &[("LD_LIBRARY_PATH", &path), ("PINPOOL_CUDA_LIBRARY", ours.as_os_str())]);
    assert_eq!(code, Some(1));
    assert!(page.contains("doctor-driver/libcuda.so.535, but cudarc has "), "{page}");
}

#[test]
fn a_driver_that_refuses_to_page_lock_is_no_success() {
    let library = child::built("libfake_cuda.so");
    let refusing = [("PINPOOL_CUDA_LIBRARY", library.as_os_str()), ("FAKE_CUDA_REFUSE", OsStr::new("2"))];
    let (page, code) = doctor(&[], &refusing);
    assert_eq!(code, Some(1), "{page}");
    assert!(page.contains("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"), "{page}");
    assert!(page.contains("a limit of the platform"), "{page}");

    let lying = [("PINPOOL_CUDA_LIBRARY", library.as_os_str()), ("FAKE_CUDA_REFUSE", OsStr::new("0"))];
    let (page, code) = doctor(&[], &lying);
    assert_eq!(code, Some(1), "{page}");
    assert!(page.contains("registered, but the driver says that it is not page-locked"), "{page}");
}

#[test]
fn what_is_page_locked_on_a_machine_that_refuses_registration_is_told_and_why() {
    let library = child::built("libfake_cuda.so");
    let with = |name: &'static str, value: &'static str| {
        [("PINPOOL_CUDA_LIBRARY", library.as_os_str()), (name, OsStr::new(value))]
    };
    let (page, code) = doctor(&[], &with("FAKE_CUDA_CONFIDENTIAL", "1"));
    assert_eq!(code, Some(0), "{page}");
    assert!(page.contains("registers host memory (99): yes"), "{page}");
    assert!(page.contains("a pool page-locks memory of the driver's (cuMemHostAlloc)"), "{page}");
    assert!(page.contains("confidential-computing mode"), "{page}");

    let (page, code) = doctor(&[], &with("FAKE_CUDA_ATTRIBUTES", "99=0,89=0"));
    assert_eq!(code, Some(0), "{page}");
    assert!(page.contains("registers host memory (99): no"), "{page}");
    assert!(
        page.contains("attribute 99 is 0") && page.contains("the host may always touch (89): no"),
        "{page}"
    );

    let (page, code) = doctor(&["--json"], &with("FAKE_CUDA_ATTRIBUTES", "100=1"));
    assert_eq!(code, Some(0), "{page}");
    assert!(
        page.contains("\"host_page_tables\": true") && page.contains("goes by the host's page tables"),
        "{page}"
    );
}

#[test]
fn where_large_buffers_lie_and_the_device_is_told() {
    let library = child::built("libfake_cuda.so");
    let with = |value| [("PINPOOL_CUDA_LIBRARY", library.as_os_str()), ("FAKE_CUDA_ATTRIBUTES", value)];
    let (page, _) = doctor(&["--json"], &with(OsStr::new("134=1")));
    let json: Value = serde_json::from_str(&page).expect("one object");
    assert_eq!(json["devices"][0]["numa_node"], 1);
    let large = &json["machine"]["large_buffer"];
    assert_eq!(large["bytes"], 64 << 20);
    match large["huge_pages"].as_str() {
        Some("Advised") => assert!(large["huge_bytes"].as_u64() > Some(0), "{large}"),
        Some("Refused") => println!("this machine forbids huge pages: nothing to show here"),
        _ => panic!("{large}"),
    }
    let (page, _) = doctor(&[], &with(OsStr::new("134=-1,50=65535")));
    assert!(page.contains("NUMA node unknown") && page.contains("\n  NUMA nodes with memory: "), "{page}");
}

#[test]
fn a_process_that_may_have_no_huge_pages_is_told_so() {
    use std::os::unix::process::CommandExt;
    let mut doctor = Command::new(&*DOCTOR);
    let switch_off = || {
        // SAFETY: sets a flag of the calling process, which the program that it becomes inherits.
        #[allow(unsafe_code)]
        unsafe {
            libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0)
        };
        Ok(())
    };
    // SAFETY: one system call between fork and exec, and nothing else.
    #[allow(unsafe_code)]
    unsafe {
        doctor.pre_exec(switch_off)
    };
    let output = doctor.env_clear().output().unwrap();
    let page = String::from_utf8(output.stdout).unwrap();
    let line = "a buffer of 64 MiB: no huge pages, which this machine forbids; 0 B of it lie in huge pages\n";
    assert!(page.contains(line), "{page}");
}

#[test]
fn a_wrong_argument_is_told() {
    let (page, code) = doctor(&["--jsno"], &[]);
    assert_eq!((page.as_str(), code), ("", Some(2)));
    assert_eq!(doctor(&["--help"], &[]).1, Some(0));
}
