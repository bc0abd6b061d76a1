//! What the sweep plays on: here the simulated device itself. `tests/faults_cuda` gives the same names to the real path.

use crate::kind::Kind;
use crate::points::{Mode, Point};
use pinpool::pin::Pinned;
use pinpool::sim::{Fault, Sim};
use pinpool::{Error, PinnedBuffer};

pub use pinpool::sim::{Sim as Device, SimBuffer as Memory, SimContext as Context, SimStream as Stream};

/// What a scenario has beside streams and memory: nothing here.
pub type Own = Nothing;

#[derive(Clone, Copy, Debug)]
pub struct Nothing;

pub const NOTHING: Own = Nothing;

/// Two devices that move only when they are stepped.
pub fn make(kind: Kind, _: Own) -> Device {
    let builder = Sim::builder().devices(2).mapping_check(false);
    match kind.attribute() {
        Some((attribute, value)) => builder.attribute(attribute, value).build(),
        None => builder.build(),
    }
}

pub fn fail(device: &Device, Point { entry, nth, code, mode }: Point) {
    device.fail(
        entry,
        match mode {
            Mode::Once => Fault::nth(nth, code),
            Mode::Forever => Fault::from_nth(nth, code),
            Mode::Everything => Fault::ends_everything(nth, code),
        },
    );
}

pub fn hang(device: &Device, entry: &str) {
    device.fail(entry, Fault::hang());
}

pub fn record(buffer: &mut PinnedBuffer, stream: &Stream) -> Result<(), Error> {
    buffer.record_last_use(stream)
}

pub fn record_pinned(pinned: &mut Pinned<Vec<u8>>, stream: &Stream) -> Result<(), Error> {
    pinned.record_last_use(stream)
}

/// Device memory, and what it holds.
pub fn fresh(context: &Context, len: usize) -> (Memory, Vec<u8>) {
    let memory = context.alloc(len);
    let bytes = memory.read();
    (memory, bytes)
}

/// Memory of the caller's is about to be page-locked; on this device every run has its own who does it.
pub fn has_caretaker() {}

/// The application forgets errors, and lets go of what is its own.
pub fn forgive(_: &Context) {}

pub fn let_go(_: &Context) {}

/// The application's own threads are no points.
pub fn of_the_application<R>(action: impl FnOnce() -> R) -> R {
    action()
}
