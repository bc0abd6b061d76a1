//! Fault points: which call of which entry point fails, how, and with which code.

/// The codes that a driver call is made to fail with; `cuda-error-codes` has their names.
pub const CODES: [u32; 12] = [2, 1, 712, 801, 800, 4, 3, 201, 709, 700, 999, 600];

/// With these a whole driver ends: a lost device, a driver that is gone. (A driver that says of every context that it
/// is destroyed, though they live, cannot be told from one that says the truth; `contexts.rs` destroys them.)
pub const ENDING_CODES: [u32; 4] = [700, 4, 3, 999];

/// Entry points that a pool calls, and what it asks of the system. Calls of the application alone are no points.
pub const OF_THE_POOL: &[&str] = &[
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxGetState",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxGetDevice",
    "cuCtxGetId",
    "cuCtxSynchronize",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuPointerGetAttribute",
    "cuStreamIsCapturing",
    "cuStreamGetId",
    "cuStreamGetCaptureInfo_v2",
    "cuUserObjectCreate",
    "cuUserObjectRelease",
    "cuGraphRetainUserObject",
    "cuMemAllocManaged",
    "cuMemAdvise_v2",
    "cuMemFree_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventDestroy_v2",
    "cuThreadExchangeStreamCaptureMode",
    "mmap",
    "pthread_create",
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// This call alone.
    Once,
    /// This call and all later ones of the entry point.
    Forever,
    /// This call, and every call of every entry point from then on.
    Everything,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Point {
    pub entry: &'static str,
    /// Which call, from 1 on.
    pub nth: u64,
    pub code: u32,
    pub mode: Mode,
}

impl Point {
    /// Whether something may be pending for ever: an event that never completes, a thread that never starts.
    pub fn may_stick(&self) -> bool {
        let never_complete =
            self.code == 600 && (self.entry == "cuEventQuery" || self.mode == Mode::Everything);
        let no_thread = self.entry == "pthread_create";
        self.mode != Mode::Once && (never_complete || no_thread)
    }

    /// Whether it is the operating system that refuses.
    pub fn is_of_the_system(&self) -> bool {
        matches!(self.entry, "mmap" | "pthread_create")
    }

    /// Whether the code says that a context or the driver is gone, so that a retain went with it.
    pub fn says_gone(&self) -> bool {
        matches!(self.code, 3 | 4 | 201 | 709) && !self.is_of_the_system()
    }

    /// Whether a driver says of a context that is alive that it is destroyed: then there is nothing to go by.
    pub fn is_a_lie(&self) -> bool {
        matches!(self.code, 201 | 709) && matches!(self.entry, "cuCtxSetCurrent" | "cuCtxGetDevice")
    }

    /// Whether it says that there is no page-locked memory of the driver's, the last way there is.
    pub fn says_unsupported(&self) -> bool {
        self.code == 801 && self.entry == "cuMemHostAlloc"
    }

    /// Whether the code says that the device is lost.
    pub fn says_lost(&self) -> bool {
        self.code == 700 && !self.is_of_the_system()
    }
}

/// How many times which entry point of the pool's was called.
pub fn relevant(called: Vec<(&'static str, u64)>) -> Vec<(&'static str, u64)> {
    called.into_iter().filter(|(entry, _)| OF_THE_POOL.contains(entry)).collect()
}

/// Which of the ways to fail are run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// Every code at every call.
    All,
    /// The codes are spread over the calls, beginning with that number.
    Spread(u64),
}

impl Choice {
    /// What `PINPOOL_FAULTS` and `PINPOOL_FAULTS_SEED` say; another seed at each run otherwise.
    pub fn of_the_environment() -> Self {
        if std::env::var("PINPOOL_FAULTS").is_ok_and(|value| value == "all") {
            return Self::All;
        }
        let chance = || std::time::UNIX_EPOCH.elapsed().map_or(0, |since| u64::from(since.subsec_micros()));
        let seed = std::env::var("PINPOOL_FAULTS_SEED").ok();
        Self::Spread(seed.map_or_else(chance, |seed| seed.parse().expect("PINPOOL_FAULTS_SEED is a number")))
    }
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::All => f.write_str("every point with every code"),
            Self::Spread(seed) => {
                write!(f, "PINPOOL_FAULTS_SEED={seed}; PINPOOL_FAULTS=all runs every point with every code")
            }
        }
    }
}

/// The ways in which one call fails: all of them, or as many as go through all codes from call to call.
pub fn ways(entry: &'static str, nth: u64, number: usize, choice: Choice) -> Vec<Point> {
    let point = |mode, code| Point { entry, nth, code, mode };
    if point(Mode::Once, 2).is_of_the_system() {
        return vec![point(Mode::Once, 2), point(Mode::Forever, 2)];
    }
    // Pending is an answer of a query's only once: the next look asks again.
    let codes = |mode| CODES.into_iter().map(move |code| point(mode, code));
    let endings = ENDING_CODES.into_iter().map(|code| point(Mode::Everything, code));
    let Choice::Spread(seed) = choice else {
        return codes(Mode::Once).chain(codes(Mode::Forever)).chain(endings).collect();
    };
    // Not the same codes for the same call, although the numbers of the points hardly change from run to run.
    let number = number.wrapping_add(seed as usize);
    let pick = |offset: usize| CODES[number.wrapping_add(offset) % CODES.len()];
    vec![
        point(Mode::Once, pick(0)),
        point(Mode::Once, pick(5)),
        point(Mode::Forever, pick(9)),
        point(Mode::Everything, ENDING_CODES[number % ENDING_CODES.len()]),
    ]
}
