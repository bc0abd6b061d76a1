//! The journey of a buffer, in pieces: each makes the pool call the driver at other places.
//!
//! A scenario goes on after an error as a careful caller would; what must hold then is checked in `checks.rs`.

use crate::device::NOTHING;
use crate::kind::Kind;
use crate::stage::{LEN, Settings, Stage};
use pinpool::{Backing, PoolBuilder};

#[path = "backends.rs"]
mod backends;
#[path = "callers_memory.rs"]
mod callers_memory;
#[path = "captures.rs"]
mod captures;
#[path = "governing.rs"]
mod governing;
#[path = "unrecorded.rs"]
mod unrecorded;
#[path = "waiting.rs"]
mod waiting;

use backends::{device_preferred, host_pinned, registered};
use callers_memory::*;
use captures::*;
use governing::*;
use unrecorded::*;
use waiting::*;

pub struct Scenario {
    pub name: &'static str,
    pub settings: Settings,
    pub play: fn(&Stage),
}

const fn plain(name: &'static str, play: fn(&Stage)) -> Scenario {
    with(name, Kind::Ordinary, |pool| pool, play)
}

const fn with(
    name: &'static str,
    device: Kind,
    pool: fn(PoolBuilder) -> PoolBuilder,
    play: fn(&Stage),
) -> Scenario {
    Scenario { name, settings: Settings { device, pool, own: NOTHING, two_devices: false }, play }
}

const fn two_devices(name: &'static str, play: fn(&Stage)) -> Scenario {
    let settings = Settings { device: Kind::Ordinary, pool: as_it_is, own: NOTHING, two_devices: true };
    Scenario { name, settings, play }
}

fn as_it_is(settings: PoolBuilder) -> PoolBuilder {
    settings
}

pub const SCENARIOS: &[Scenario] = &[
    plain("a miss and its first return", first_return),
    plain("a hit that is recorded on one stream", recorded_hit),
    plain("a hit that is recorded on two streams", two_streams),
    two_devices("a hit that is recorded in two contexts", two_contexts),
    plain("many records on one buffer", many_records),
    two_devices("a record on the default stream, elsewhere", default_stream),
    plain("a drop without a record", unrecorded),
    two_devices("a drop without a record, with a second context at work", unrecorded_two_contexts),
    plain("a drop without a record in a context of its own", unrecorded_own_context),
    plain("a drop on a thread without a context", unrecorded_bare_thread),
    with("a pageable drop, read by the device", Kind::ReadsPageable, as_it_is, pageable_drop),
    with("pageable copies that are recorded", Kind::ReadsPageable, as_it_is, pageable_recorded),
    plain("a harvest", harvest),
    plain("a harvest of one of several", harvest_of_several),
    plain("a copy to the host", download),
    plain("waiting, asking, and writing again", waits),
    plain("writing after an unwaited record", write_after_record),
    plain("awaiting", awaits),
    plain("quiescence by promise", assumed),
    plain("prewarm", prewarm),
    plain("take_pinned", take_pinned),
    plain("take_pinned of what was returned", take_pinned_returned),
    with("the ceiling makes room", Kind::Ordinary, |pool| pool.max_registered_bytes(4 * LEN), ceiling),
    with("eviction by the cap", Kind::Ordinary, |pool| pool.max_pooled_bytes(4 * LEN), evictions),
    plain("a lower cap, a trim, a clear", lower_cap),
    with("nothing is kept", Kind::Ordinary, |pool| pool.max_pooled_bytes(0), keeps_nothing),
    with("memory of the driver's", Kind::RefusesToRegister, as_it_is, recorded_hit),
    with(
        "memory of the driver's, and little of it",
        Kind::RefusesToRegister,
        |pool| pool.max_pooled_bytes(4 * LEN),
        evictions,
    ),
    with(
        "memory of the driver's, by choice",
        Kind::Ordinary,
        |pool| pool.backing(Backing::HostPinned),
        recorded_hit,
    ),
    with("memory of the driver's, by name", Kind::RefusesToRegister, as_it_is, take_pinned),
    plain("shutdown and restart", restart),
    plain("shutdown with work in flight", shutdown_in_flight),
    plain("the last handle goes", last_handle),
    plain("two pools on one device", two_pools),
    plain("memory of the caller's, region by region", regions),
    plain("memory of the caller's, all or nothing", pin_all_regions),
    plain("memory of the caller's, owned", pinned_vec),
    plain("memory of the caller's, given back", unpinned_vec),
    plain("held context waits", held_waits),
    plain("several classes at once", classes),
    plain("a buffer that a graph reads", captured),
    plain("a context that ends", ended_context),
    plain("a backend: page-locked memory of the driver's", host_pinned),
    plain("a backend: managed memory", device_preferred),
    plain("a backend: registered memory", registered),
];

fn first_return(stage: &Stage) {
    let stream = stage.context.stream();
    if let Some(mut buffer) = stage.take(LEN) {
        stage.upload(&mut buffer, &stream, 1);
    }
    stage.settle();
    drop(stage.take(LEN));
    stage.settle();
}

fn recorded_hit(stage: &Stage) {
    let stream = stage.context.stream();
    for seed in 1..4 {
        let Some(mut buffer) = stage.warm(LEN) else { continue };
        stage.upload(&mut buffer, &stream, seed);
        stage.record(&mut buffer, &stream);
        let cleaner = stage.pool.hold_cleaner();
        drop(buffer);
        // Work in flight, a taker, and then the end of the work.
        drop(stage.take(LEN));
        stage.device.run_until_idle();
        drop(cleaner);
        stage.settle();
    }
}

fn two_streams(stage: &Stage) {
    let streams = [stage.context.stream(), stage.context.stream()];
    let Some(mut buffer) = stage.warm(LEN) else { return };
    stage.upload(&mut buffer, &streams[0], 1);
    stage.upload_as_it_is(&buffer, &streams[1]);
    for stream in &streams {
        stage.record(&mut buffer, stream);
    }
    streams[0].hold();
    let cleaner = stage.pool.hold_cleaner();
    drop(buffer);
    stage.device.run_until_idle();
    streams[0].release();
    stage.device.run_until_idle();
    drop(cleaner);
    stage.settle();
}

fn two_contexts(stage: &Stage) {
    let other = stage.other();
    let streams = [stage.context.stream(), other.stream()];
    for _ in 0..2 {
        let Some(mut buffer) = stage.warm(LEN) else { continue };
        stage.upload(&mut buffer, &streams[0], 1);
        other.bind();
        stage.upload_as_it_is(&buffer, &streams[1]);
        stage.context.bind();
        for stream in &streams {
            stage.record(&mut buffer, stream);
        }
        let cleaner = stage.pool.hold_cleaner();
        drop(buffer);
        stage.device.run_until_idle();
        drop(cleaner);
        stage.settle();
    }
}

fn many_records(stage: &Stage) {
    let stream = stage.context.stream();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    for seed in 0..12 {
        stage.upload_as_it_is(&buffer, &stream);
        stage.record(&mut buffer, &stream);
        if seed == 6 {
            stage.device.run_until_idle();
        }
    }
    stage.device.run_until_idle();
    drop(buffer);
    stage.settle();
}

fn default_stream(stage: &Stage) {
    let other = stage.other();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    buffer.fill(9);
    let stream = other.default_stream();
    other.bind();
    stage.upload_as_it_is(&buffer, &stream);
    stage.context.bind();
    // The caller's context is another one, which it must have again afterwards.
    stage.record(&mut buffer, &stream);
    stage.device.run_until_idle();
    drop(buffer);
    stage.settle();
}
