//! What the benches share: the simulated device, the two pools behind one face, and the rows that are measured.
#![allow(unsafe_code)] // vouches for buffers that were never used
#![allow(dead_code)] // every bench is a crate of its own and uses a part of this

pub mod rows;

use crate::classic::{self, ClassicBuffer, ClassicPool};
use pinpool::sim::{Sim, SimBuffer, SimBuilder, SimContext, SimStream};
use pinpool::{PinnedBuffer, PinnedPool};
use std::time::{Duration, Instant};

/// A burst, and the number of buffers that stay in use: what the classic cleaner takes at once, so that it
/// never has to wait out its silence between bursts.
pub const BURST: usize = classic::BATCH;

/// One simulated device, on which everything is free: what is measured is the pool.
pub struct Rig {
    pub sim: Sim,
    pub context: SimContext,
    pub stream: SimStream,
    pub device: SimBuffer,
}

impl Rig {
    pub fn new() -> Self {
        Self::with(Sim::builder().zero_cost())
    }

    pub fn with(device: SimBuilder) -> Self {
        let sim = device.build();
        let context = sim.context(0);
        let (stream, device) = (context.stream(), context.alloc(1 << 20));
        Self { sim, context, stream, device }
    }
}

/// A pool under test.
pub trait Subject: Sync {
    type Buffer: Guard;
    const NAME: &'static str;

    fn new(rig: &Rig) -> Self;
    fn take(&self, min_size: usize) -> Self::Buffer;
    /// How many buffers of this size lie ready.
    fn ready(&self, min_size: usize) -> usize;
}

/// A buffer of a pool under test.
pub trait Guard {
    fn is_pinned(&self) -> bool;
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
    fn set_dirty_len(&mut self, len: usize);
    fn record(&mut self, stream: &SimStream);
    /// Says that no device work touches the buffer, which is so wherever a bench calls it.
    fn vouch_for_quiescence(&mut self);
}

pub struct Pinpool(PinnedPool);

impl Subject for Pinpool {
    type Buffer = PinnedBuffer;
    const NAME: &'static str = "pinpool";

    fn new(rig: &Rig) -> Self {
        Self(PinnedPool::builder().driver(rig.sim.driver()).build().expect("the settings are right"))
    }

    fn take(&self, min_size: usize) -> PinnedBuffer {
        self.0.take(min_size)
    }

    fn ready(&self, min_size: usize) -> usize {
        let stats = self.0.stats();
        let bytes = min_size.next_power_of_two().max(4096);
        let class = stats.classes.iter().find(|class| class.class_bytes == bytes);
        class.map_or(0, |class| class.pooled_pinned_buffers)
    }
}

impl Drop for Pinpool {
    fn drop(&mut self) {
        let report = self.0.shutdown();
        assert_eq!(report.quarantined_bytes, 0, "{report:?}");
    }
}

impl Guard for PinnedBuffer {
    fn is_pinned(&self) -> bool {
        self.is_pinned()
    }

    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }

    fn set_dirty_len(&mut self, len: usize) {
        self.set_dirty_len(len);
    }

    fn record(&mut self, stream: &SimStream) {
        self.record_last_use(stream).expect("the simulated device does not fail here");
    }

    fn vouch_for_quiescence(&mut self) {
        // SAFETY: the benches copy only from buffers that they record.
        unsafe { self.assume_quiescent() }
    }
}

impl Subject for ClassicPool {
    type Buffer = ClassicBuffer;
    const NAME: &'static str = "classic";

    fn new(rig: &Rig) -> Self {
        Self::new(&rig.sim, rig.context.handle())
    }

    fn take(&self, min_size: usize) -> ClassicBuffer {
        self.take(min_size)
    }

    fn ready(&self, min_size: usize) -> usize {
        self.ready(min_size)
    }
}

impl Guard for ClassicBuffer {
    fn is_pinned(&self) -> bool {
        self.is_pinned()
    }

    fn bytes(&self) -> &[u8] {
        self.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes_mut()
    }

    fn set_dirty_len(&mut self, len: usize) {
        self.set_dirty_len(len);
    }

    fn record(&mut self, stream: &SimStream) {
        self.record_last_use(stream).expect("the simulated device does not fail here");
    }

    fn vouch_for_quiescence(&mut self) {} // it takes a buffer without a record for unused anyway
}

/// Puts `count` page-locked buffers of this size on the shelves, and takes them once to see that they are right.
pub fn warm<S: Subject>(subject: &S, bytes: usize, count: usize) {
    drop((0..count).map(|_| subject.take(bytes)).collect::<Vec<_>>());
    wait_until_ready(subject, bytes, count);
    let taken: Vec<_> = (0..count).map(|_| subject.take(bytes)).collect();
    for buffer in &taken {
        assert!(buffer.is_pinned(), "{}: a buffer that was ready is not page-locked", S::NAME);
        assert!(is_zero(buffer.bytes()), "{}: a buffer that was ready is not zero", S::NAME);
    }
    drop(taken);
    wait_until_ready(subject, bytes, count);
}

pub fn wait_until_ready<S: Subject>(subject: &S, bytes: usize, count: usize) {
    let start = Instant::now();
    while subject.ready(bytes) < count {
        let waited = start.elapsed();
        assert!(waited < Duration::from_secs(20), "{}: {count} buffers not ready in {waited:?}", S::NAME);
        std::thread::yield_now();
    }
}

pub fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// The constants of the baseline, printed wherever a ratio is, so that nobody has to guess what it was.
pub fn classic_constants() -> String {
    format!(
        "classic: coalesces until {} returns or {} ms of silence, waits in order and blocking, event flags {}",
        classic::BATCH,
        classic::SILENCE.as_millis(),
        classic::EVENT_FLAGS
    )
}
