//! The real-time clock: one thread that executes operations when they are due.

use super::builder::SimBuilder;
use super::core::Core;
use super::host_memory::tighten_timer_slack;
use super::state::State;
use super::streams::Work;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// What an operation occupies beside its stream: one copy engine for each device and direction.
type CopyEngine = (i32, &'static str);

impl Core {
    /// Lets the engine thread look for work; starts it at the first need.
    pub(super) fn wake_engine(&self) {
        let mut engine = self.engine.lock();
        if engine.is_none()
            && let Some(core) = self.this.upgrade()
        {
            let thread = std::thread::Builder::new().name("pinpool-sim".into());
            let spawned = thread.spawn(move || core.run_engine());
            *engine = Some(spawned.expect("the simulated device needs a thread for its real-time clock"));
        }
        drop(engine);
        // Under the lock, so that the engine cannot fall asleep between its look and this call.
        let _state = self.state.lock();
        self.engine_wake.notify_all();
    }

    /// Ends the engine thread, so that nothing touches host memory any more when the device is gone.
    pub(super) fn stop_engine(&self) {
        self.state.lock().engine_stops = true;
        self.engine_wake.notify_all();
        let engine = self.engine.lock().take();
        if let Some(engine) = engine
            && engine.thread().id() != std::thread::current().id()
        {
            // A panic of a host function on that thread has been reported there.
            let _ = engine.join();
        }
    }

    fn run_engine(&self) {
        tighten_timer_slack();
        let mut engines_free_at = HashMap::new();
        let mut state = self.state.lock();
        while !state.engine_stops {
            match self.next_due(&mut state, &mut engines_free_at) {
                None => self.engine_wake.wait(&mut state),
                Some((slot, due)) if due <= Instant::now() => self.execute_head(&mut state, slot),
                Some((_, due)) => {
                    self.engine_wake.wait_until(&mut state, due);
                }
            }
        }
    }

    /// Starts every operation that can start, and gives the one that is done first.
    fn next_due(
        &self,
        state: &mut State,
        engines_free_at: &mut HashMap<CopyEngine, Instant>,
    ) -> Option<(usize, Instant)> {
        let mut first: Option<(usize, Instant)> = None;
        for slot in 0..state.streams.len() {
            if !state.can_run(slot) {
                continue;
            }
            let device = state.contexts[state.streams[slot].context.index].device;
            let Some(head) = state.streams[slot].queue.front_mut() else { continue };
            let due = *head.due.get_or_insert_with(|| {
                let (duration, engine) = cost(&head.work, device, &self.config);
                let now = Instant::now();
                let Some(engine) = engine else { return now + duration };
                let free_at = engines_free_at.get(&engine).copied().unwrap_or(now);
                let due = free_at.max(now) + duration;
                engines_free_at.insert(engine, due);
                due
            });
            if first.is_none_or(|(_, earliest)| due < earliest) {
                first = Some((slot, due));
            }
        }
        first
    }
}

fn cost(work: &Work, device: i32, config: &SimBuilder) -> (Duration, Option<CopyEngine>) {
    let (bytes, direction) = match work {
        Work::HostToDevice { dst, .. } => (dst.bytes, Some("to device")),
        Work::DeviceToHost { src, .. } => (src.bytes, Some("to host")),
        Work::DeviceToDevice { dst, .. } | Work::Fill { dst, .. } => (dst.bytes / 16, None),
        Work::Delay(duration) => return (*duration, None),
        _ => (0, None),
    };
    let transfer = match config.copy_bytes_per_second {
        Some(rate) => Duration::from_secs_f64(bytes as f64 / rate as f64),
        None => Duration::ZERO,
    };
    (config.operation_latency + transfer, direction.map(|direction| (device, direction)))
}
