//! CUDA graphs in a script: captures that go on while other things happen, replays, and what they hold of the pool.
#![allow(unsafe_code)] // Enqueueing a copy, and holding a buffer for a graph, are promises, which the script keeps.

use crate::device::{Device, Mark};
use crate::ensure;
use crate::guards::part_of;
use crate::world::{Copied, Outcome, World};
use pinpool::sim::{CaptureMode, SimBuffer, SimGraph};
use pinpool::{Error, GraphHold};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

const GRAPHS_MAX: usize = 4;

/// Whether a graph may still use what was captured.
#[derive(Debug, Default)]
pub struct GraphState {
    is_gone: AtomicBool,
    launches: Mutex<Vec<Arc<Mark>>>,
}

impl GraphState {
    /// The graph is gone, and so are its launches.
    pub fn is_over(&self) -> bool {
        self.is_gone.load(Ordering::SeqCst) && self.launches().iter().all(|mark| mark.is_done())
    }

    fn launches(&self) -> Vec<Arc<Mark>> {
        self.launches.lock().expect("no panic holds it").clone()
    }
}

/// What was captured, also while it is.
#[derive(Default)]
pub struct Captured {
    state: Arc<GraphState>,
    copies: Vec<(Arc<SimBuffer>, Vec<u8>)>,
    /// Let go after the graph.
    holds: Vec<GraphHold>,
    /// The handle of the context.
    context: usize,
}

pub struct Graph {
    graph: SimGraph,
    captured: Captured,
}

impl Device {
    pub fn is_capturing(&self) -> bool {
        self.lines.iter().any(|line| line.capture.is_some())
    }

    /// Whether the pool can know by itself which waits would break a capture. Where there are several contexts the script
    /// forbids them all, or how far the device is would depend on which of them is waited for first.
    pub fn captures_are_known(&self) -> bool {
        !self.is_capturing()
            || self.contexts.len() == 1
                && self.lines.iter().all(|line| line.capture.is_none() || line.was_shown)
    }
}

impl World {
    pub fn begin_capture(&mut self, line: usize, mode: u8) -> Outcome {
        if self.device.can_capture(line) {
            let mode =
                [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed][usize::from(mode) % 3];
            let line = &mut self.device.lines[line];
            line.stream.begin_capture(mode);
            line.capture = Some(Captured { context: line.stream.context().handle(), ..Captured::default() });
        }
        Ok(())
    }

    /// A copy that every replay makes again.
    pub fn capture_copy(&mut self, index: usize, line: usize, part: u8, recorded: bool) -> Outcome {
        if !self.guards[index].buffer.is_pinned() {
            return Ok(());
        }
        let incoming = self.guards[index].incoming.clone();
        self.device.finish(incoming.iter());
        let guard = &mut self.guards[index];
        ensure!(guard.has_kept_its_bytes(), "the bytes of a guard changed");
        let len = part_of(guard.buffer.len(), part);
        let line = &mut self.device.lines[line];
        let device = Arc::new(line.stream.context().alloc(len));
        // SAFETY: the pool keeps the memory unchanged until the graph is gone; that is what is tested.
        unsafe { line.stream.copy_to_device(&guard.buffer[..len], &device) };
        let captured = line.capture.as_mut().expect("asked by the caller");
        captured.copies.push((device, guard.content[..len].to_vec()));
        guard.graphs.push(captured.state.clone());
        if recorded {
            return self.record_in_capture(index);
        }
        // SAFETY: it is let go after the graph and its launches.
        captured.holds.push(unsafe { guard.buffer.hold_for_graph() });
        Ok(())
    }

    /// On every line that captures, of which there is one at least.
    fn record_in_capture(&mut self, index: usize) -> Outcome {
        let guard = &mut self.guards[index];
        for line in self.device.lines.iter_mut() {
            let Some(captured) = &line.capture else { continue };
            line.was_shown = true;
            let recorded = guard.buffer.record_last_use(&line.stream);
            ensure!(recorded == Err(Error::Capturing), "recorded in a capture: {recorded:?}");
            self.model.record_failures += 1;
            guard.graphs.push(captured.state.clone());
        }
        Ok(())
    }

    pub fn record_on_capturing(&mut self, index: usize) -> Outcome {
        if self.guards[index].buffer.is_pinned() { self.record_in_capture(index) } else { Ok(()) }
    }

    pub fn end_capture(&mut self, line: usize) -> Outcome {
        let line = &mut self.device.lines[line];
        let Some(captured) = line.capture.take() else { return Ok(()) };
        match line.stream.end_capture() {
            Ok(graph) => self.graphs.push(Graph { graph, captured }),
            Err(code) => return Err(format!("a capture was broken: {code}")),
        }
        if self.graphs.len() > GRAPHS_MAX {
            self.drop_graph(0);
        }
        Ok(())
    }

    pub fn launch(&mut self, index: usize, line: usize) -> Outcome {
        if self.graphs.is_empty() || self.device.lines[line].capture.is_some() {
            return Ok(());
        }
        let index = index % self.graphs.len();
        let Graph { graph, captured } = &self.graphs[index];
        self.device.has_launched = true;
        let (mark, ()) = self.device.enqueue(line, |stream| graph.launch(stream));
        captured.state.launches.lock().expect("no panic holds it").push(mark.clone());
        for (device, expected) in &captured.copies {
            let (device, expected) = (device.clone(), expected.clone());
            self.copied.push(Copied {
                device,
                expected,
                mark: Some(mark.clone()),
                context: captured.context,
            });
        }
        Ok(())
    }

    pub fn drop_graph(&mut self, index: usize) {
        if self.graphs.is_empty() {
            return;
        }
        let Graph { graph, captured } = self.graphs.swap_remove(index % self.graphs.len());
        if !captured.holds.is_empty() {
            self.device.finish(captured.state.launches().iter());
        }
        drop(graph);
        captured.state.is_gone.store(true, Ordering::SeqCst);
        self.dropped_graphs.push(captured.state);
    }

    /// So that no graph ends while the cleaner works: whether it has looked before or after nobody could say.
    pub fn finish_dropped_graphs(&mut self) {
        self.dropped_graphs.retain(|state| !state.is_over());
        let launches: Vec<_> = self.dropped_graphs.iter().flat_map(|state| state.launches()).collect();
        self.device.finish(launches.iter());
    }

    pub fn end_all_graphs(&mut self) -> Outcome {
        for line in 0..self.device.lines.len() {
            self.end_capture(line)?;
        }
        while !self.graphs.is_empty() {
            self.drop_graph(0);
        }
        Ok(())
    }

    /// What a graph may read again nobody may write.
    pub fn refuses_writes(&mut self, index: usize) -> Outcome {
        let buffer = &mut self.guards[index].buffer;
        let written = catch_unwind(AssertUnwindSafe(|| drop(buffer.first_mut())));
        let panic = written.err().ok_or("a buffer could be written that a graph reads again")?;
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or(panic.downcast_ref::<&str>().map(|text| text.to_string()));
        ensure!(text.is_some_and(|text| text.contains("captured into a CUDA graph")), "another panic");
        Ok(())
    }
}
