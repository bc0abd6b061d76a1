//! Captures and graphs as an application holds them. Making and dropping a graph is counted and can fail, other
//! than that of streams, since captures are about calls.

use super::handles::{SimContext, SimStream};

/// What a capture forbids to whom (`CUstreamCaptureMode`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CaptureMode {
    /// Unsafe calls of every thread are refused, unless the thread has another mode itself.
    Global = 0,
    /// Unsafe calls of the capturing thread are refused.
    ThreadLocal = 1,
    /// None are.
    Relaxed = 2,
}

/// A captured graph, made executable; destroyed at drop. Launches in flight go on.
#[derive(Debug)]
pub struct SimGraph {
    context: SimContext,
    graph: usize,
    executable: usize,
}

impl SimStream {
    /// `cuStreamBeginCapture`: until [`end_capture`](Self::end_capture) the stream executes nothing.
    ///
    /// # Panics
    /// When the call fails.
    pub fn begin_capture(&self, mode: CaptureMode) {
        let begun = self.with_context(|cuda| cuda.cu_stream_begin_capture(self.handle(), mode as u32));
        begun.unwrap_or_else(|code| panic!("cuStreamBeginCapture failed: {code}"));
    }

    /// `cuStreamEndCapture` and `cuGraphInstantiate`.
    ///
    /// # Errors
    /// The driver's code: 901 when the capture was broken.
    pub fn end_capture(&self) -> Result<SimGraph, u32> {
        self.with_context(|cuda| {
            let graph = cuda.cu_stream_end_capture(self.handle())?;
            let executable = cuda.cu_graph_instantiate_with_flags(graph, 0);
            if executable.is_err() {
                // The graph is this call's, and nobody else would destroy it.
                let _ = cuda.core().destroy_graph(graph);
            }
            Ok(SimGraph { context: self.context().clone(), graph, executable: executable? })
        })
    }

    /// `cuStreamIsCapturing`, also true for a capture that was broken.
    ///
    /// # Panics
    /// When the call fails.
    pub fn is_capturing(&self) -> bool {
        let status = self.with_context(|cuda| cuda.cu_stream_is_capturing(self.handle()));
        status.unwrap_or_else(|code| panic!("cuStreamIsCapturing failed: {code}")) != 0
    }
}

impl SimGraph {
    /// `cuGraphLaunch`.
    ///
    /// # Panics
    /// When the call fails.
    pub fn launch(&self, stream: &SimStream) {
        let launched = stream.with_context(|cuda| cuda.cu_graph_launch(self.executable, stream.handle()));
        launched.unwrap_or_else(|code| panic!("cuGraphLaunch failed: {code}"));
    }

    /// The `CUgraph` as a number.
    pub fn graph(&self) -> usize {
        self.graph
    }

    /// The `CUgraphExec` as a number.
    pub fn executable(&self) -> usize {
        self.executable
    }
}

impl Drop for SimGraph {
    fn drop(&mut self) {
        let core = self.context.cuda().core();
        // They fail only after a test destroyed them itself.
        let _ = core.destroy_executable(self.executable);
        let _ = core.destroy_graph(self.graph);
    }
}
