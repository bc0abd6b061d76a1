//! What to do, in plain words, from what was found.

use crate::Findings;
use pinpool::BackingInUse;

/// The most likely reason first.
pub fn advice(findings: &Findings) -> Vec<String> {
    let mut advice = Vec::new();
    let mut say = |text: &str| advice.push(text.to_owned());
    match &findings.trial {
        Ok(trial) if trial.pinning_works() => {
            say("Page-locking works: the driver was asked, and says that the memory is page-locked.");
            match trial.backing {
                BackingInUse::HostPinned if trial.support.first().is_some_and(|of| !of.host_register) => say(
                    "The device does not register host memory (attribute 99 is 0), so a pool takes page-locked \
                     memory of the driver's: a buffer moves when it is page-locked after its first return.",
                ),
                BackingInUse::HostPinned => {
                    say(meaning_of(801).expect("it is explained"));
                    say(
                        "So a pool takes page-locked memory of the driver's (cuMemHostAlloc), which works: a buffer \
                         moves when it is page-locked after its first return.",
                    );
                }
                _ if trial.support.first().is_some_and(|of| of.host_page_tables) => say(
                    "The device goes by the host's page tables (attribute 100), so ordinary memory is as good: a pool \
                     page-locks nothing by itself, and `is_pinned()` is false. `take_pinned` and `prewarm`, which were \
                     tried here, page-lock all the same.",
                ),
                _ => {}
            }
            say(
                "If your own program's copies do not engage, call `check_cudarc`, `PinnedBuffer::is_pinned` and \
                 `Driver::is_page_locked` there, and look at `registration_failures` in the pool's statistics.",
            );
        }
        Ok(trial) => {
            say("A device is there, but it refused to page-lock memory.");
            let refusals: Vec<&String> =
                trial.registrations.iter().filter_map(|tried| tried.result.as_ref().err()).collect();
            for code in [2, 801] {
                if refusals.iter().any(|text| text.contains(&format!("({code})"))) {
                    say(meaning_of(code).expect("both are explained"));
                }
            }
            if trial.registrations.iter().any(|tried| tried.result == Ok(false)) {
                say("Registering was answered with success, and yet the driver says that the memory is not \
                     page-locked: a library in between does not do what it says.");
            }
        }
        Err(reason) => without_device(findings, reason, &mut say),
    }
    if findings.machine.wsl {
        say(
            "On WSL the driver comes from Windows, in /usr/lib/wsl/lib; install none inside. How much memory can be \
             page-locked is limited there, 0.5 to 1 GiB have been seen: set `max_registered_bytes`.",
        );
    }
    advice
}

fn without_device(findings: &Findings, reason: &str, say: &mut impl FnMut(&str)) {
    let (driver, runtime) = (findings.library("libcuda"), findings.library("libcudart"));
    let machine = &findings.machine;
    let answers = driver.to_string();
    let answered: Vec<u32> = (0..1000).filter(|code| answers.contains(&format!(" ({code})"))).collect();
    if driver.found.is_some() {
        say(reason);
    } else if let Some(code) = answered.iter().find(|code| **code != 34 && meaning_of(**code).is_some()) {
        say(meaning_of(*code).unwrap_or_default());
    } else if answered.contains(&34) {
        say(
            "Only the toolkit's stub was found, a library to link against that answers 34 to everything. The real \
             libcuda.so.1 comes with the driver. Take the folder `stubs` off LD_LIBRARY_PATH.",
        );
    } else if machine.has_kernel_driver() {
        say("The kernel has an NVIDIA driver, but there is no libcuda.so.1 here.");
    } else {
        say(
            "There is no sign of an NVIDIA driver: no libcuda.so.1, no kernel module, no device node. Where there \
             is no NVIDIA GPU that is as it should be, and pinpool works with ordinary memory: `take` never fails \
             for it, `is_pinned()` is false.",
        );
        say("Where there is one, install the driver (not only the toolkit), and reboot or load the module.");
    }
    if driver.found.is_none() && machine.container.is_some() {
        say(
            "In a container the driver comes from the host: start it with `--gpus all` (docker, podman with the \
             NVIDIA container toolkit), `--nv` (singularity), or with a GPU in the pod's limits, and with the \
             driver capability `compute`.",
        );
    }
    if driver.found.is_none() && runtime.to_string().contains("(35)") {
        say("A CUDA runtime is installed, but it finds no driver, or one older than itself \
             (cudaErrorInsufficientDriver, 35). The runtime comes with packages; the driver does not.");
    }
}

/// What a driver's refusal usually means.
fn meaning_of(code: u32) -> Option<&'static str> {
    Some(match code {
        2 => {
            "CUDA_ERROR_OUT_OF_MEMORY (2) for page-locking: a limit of the platform (WSL, a container's memory \
             limit), or too much is page-locked already. Set `max_registered_bytes` below it."
        }
        100 => {
            "The driver is there and has no device (CUDA_ERROR_NO_DEVICE, 100): no GPU is passed into this machine or \
             container, or CUDA_VISIBLE_DEVICES hides it."
        }
        801 => {
            "CUDA_ERROR_NOT_SUPPORTED (801) for page-locking: in confidential-computing mode, and on old Tegra \
             systems, memory that exists cannot be page-locked at all."
        }
        802 => "The system is not ready (802): on machines with NVSwitch, is the fabric manager running?",
        803 => {
            "The kernel module and libcuda are of different versions (803): reboot after a driver update, and take \
             the folder `cuda/compat` off LD_LIBRARY_PATH."
        }
        804 => {
            "This libcuda is a forward-compatibility package, which this GPU does not support (804): take the folder \
             `cuda/compat` off LD_LIBRARY_PATH."
        }
        999 => "The driver failed at its start (999): look at the kernel's log, `dmesg`.",
        _ => return None,
    })
}
