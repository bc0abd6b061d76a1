//! Asking for page-locked memory by name, and governing the pool: caps, ceilings, trims, ends.

use crate::stage::{LEN, Stage, all_zero};
use pinpool::{Error, PinnedBuffer, PinnedPool};

pub fn prewarm(stage: &Stage) {
    match stage.pool.prewarm(LEN, 3) {
        Ok(count) => assert!(count <= 3),
        Err(error) => stage.explain(&error),
    }
    let buffers: Vec<_> = (0..3).filter_map(|_| stage.take(LEN)).collect();
    drop(buffers);
    stage.settle();
}

pub fn take_pinned(stage: &Stage) {
    for _ in 0..2 {
        if let Some(mut buffer) = pinned(stage) {
            let stream = stage.context.stream();
            stage.upload(&mut buffer, &stream, 3);
            stage.record(&mut buffer, &stream);
            stage.device.run_until_idle();
        }
        stage.settle();
    }
}

pub fn take_pinned_returned(stage: &Stage) {
    let stream = stage.context.stream();
    let Some(mut buffer) = pinned(stage) else { return };
    stage.upload(&mut buffer, &stream, 3);
    stage.record(&mut buffer, &stream);
    let cleaner = stage.pool.hold_cleaner();
    drop(buffer);
    stage.device.run_until_idle();
    let again = pinned(stage);
    drop(cleaner);
    drop(again);
    stage.settle();
}

fn pinned(stage: &Stage) -> Option<PinnedBuffer> {
    match stage.pool.take_pinned(LEN) {
        Ok(buffer) => {
            assert!(buffer.is_pinned() && all_zero(&buffer));
            Some(buffer)
        }
        Err(error) => {
            stage.explain(&error);
            None
        }
    }
}

/// Idle blocks of one class make room for another's under the ceiling.
pub fn ceiling(stage: &Stage) {
    let buffers: Vec<_> = (0..4).filter_map(|_| stage.take(LEN)).collect();
    drop(buffers);
    stage.settle();
    drop(stage.take(2 * LEN));
    stage.settle();
    match stage.pool.take_pinned(2 * LEN) {
        Ok(buffer) => drop(buffer),
        Err(Error::NotPinned { reason, .. }) if reason.contains("max_registered_bytes") => {}
        Err(error) => stage.explain(&error),
    }
    stage.settle();
    assert!(stage.pool.stats().peak_registered_bytes <= 4 * LEN, "above the ceiling");
}

pub fn evictions(stage: &Stage) {
    for len in [LEN, 2 * LEN, LEN] {
        let buffers: Vec<_> = (0..3).filter_map(|_| stage.take(len)).collect();
        drop(buffers);
        stage.settle();
    }
}

pub fn lower_cap(stage: &Stage) {
    let fill = || {
        let buffers: Vec<_> = (0..3).filter_map(|_| stage.take(LEN)).collect();
        drop(buffers);
        stage.settle();
    };
    fill();
    stage.pool.set_max_pooled_bytes(2 * LEN);
    stage.settle();
    stage.pool.set_max_pooled_bytes(1 << 30);
    fill();
    stage.pool.trim_to(LEN);
    stage.settle();
    fill();
    if !stage.may_stick() {
        stage.pool.clear();
        assert_eq!(stage.pool.stats().pooled_buffers, 0);
    }
    stage.settle();
}

pub fn keeps_nothing(stage: &Stage) {
    let stream = stage.context.stream();
    for seed in 1..3 {
        let Some(mut buffer) = stage.take(LEN) else { continue };
        stage.upload(&mut buffer, &stream, seed);
        stage.record(&mut buffer, &stream);
        stage.device.run_until_idle();
        drop(buffer);
        stage.settle();
    }
    // The round afterwards wants to find what it leaves.
    stage.pool.set_max_pooled_bytes(1 << 30);
}

pub fn restart(stage: &Stage) {
    let stream = stage.context.stream();
    for seed in 1..3 {
        if let Some(mut buffer) = stage.warm(LEN) {
            stage.upload(&mut buffer, &stream, seed);
            stage.record(&mut buffer, &stream);
            stage.device.run_until_idle();
        }
        stage.shutdown();
    }
}

/// A buffer is out, one is queued, and one has no record.
pub fn shutdown_in_flight(stage: &Stage) {
    let stream = stage.context.stream();
    let buffers: Vec<_> = (0..3).filter_map(|_| stage.take(LEN)).collect();
    drop(buffers);
    stage.settle();
    let mut buffers: Vec<_> = (0..3).filter_map(|_| stage.take(LEN)).collect();
    for (seed, buffer) in buffers.iter_mut().enumerate() {
        stage.upload(buffer, &stream, seed as u8);
        if seed < 2 {
            stage.record(buffer, &stream);
        }
    }
    let out = buffers.pop();
    let cleaner = stage.pool.hold_cleaner();
    drop(buffers);
    stage.device.run_until_idle();
    drop(cleaner);
    stage.shutdown();
    drop(out);
    stage.settle();
}

/// The pool of the stage stays; another one loses its last handle, with a buffer out.
pub fn last_handle(stage: &Stage) {
    let stream = stage.context.stream();
    let pool = second_pool(stage);
    drop(pool.try_take(LEN));
    pool.drain(stage.patience());
    let (first, second) = (pool.try_take(LEN), pool.try_take(LEN));
    if let Ok(mut buffer) = first {
        stage.upload(&mut buffer, &stream, 1);
        stage.record(&mut buffer, &stream);
        stage.device.run_until_idle();
    }
    drop(pool);
    drop(second);
    stage.device.run_until_idle();
    stage.settle();
    stage.a_pool_has_gone();
}

pub fn two_pools(stage: &Stage) {
    let stream = stage.context.stream();
    let pool = second_pool(stage);
    for pool in [&pool, &stage.pool] {
        drop(pool.try_take(LEN));
        pool.drain(stage.patience());
        if let Ok(mut buffer) = pool.try_take(LEN) {
            stage.upload(&mut buffer, &stream, 1);
            stage.record(&mut buffer, &stream);
            stage.device.run_until_idle();
        }
    }
    stage.settle();
    pool.drain(stage.patience());
    pool.shutdown();
    stage.keep(pool);
}

fn second_pool(stage: &Stage) -> PinnedPool {
    let builder =
        PinnedPool::builder().driver(stage.device.driver()).harvest_wait_limit(crate::stage::PATIENCE);
    builder.thread_name(stage.name()).shutdown_timeout(stage.patience()).build().unwrap()
}

pub fn held_waits(stage: &Stage) {
    let stream = stage.context.stream();
    let Some(mut buffer) = stage.warm(LEN) else { return };
    stage.upload(&mut buffer, &stream, 1);
    let hold = stage.pool.hold_context_waits();
    drop(buffer);
    drop(stage.take(LEN));
    drop(hold);
    stage.settle();
}

pub fn classes(stage: &Stage) {
    let stream = stage.context.stream();
    let lens = [LEN, 2 * LEN, 4 * LEN];
    let buffers: Vec<_> = lens.iter().filter_map(|len| stage.take(*len)).collect();
    drop(buffers);
    stage.settle();
    let mut buffers: Vec<_> = lens.iter().filter_map(|len| stage.take(*len)).collect();
    for (seed, buffer) in buffers.iter_mut().enumerate() {
        stage.upload(buffer, &stream, seed as u8);
        stage.record(buffer, &stream);
    }
    let cleaner = stage.pool.hold_cleaner();
    drop(buffers);
    stage.device.run_until_idle();
    drop(cleaner);
    stage.settle();
}
