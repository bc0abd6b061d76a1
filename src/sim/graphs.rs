//! Graphs: what was captured, what is made executable of it, and launches. A replay reads host memory again.

use super::calls::Call;
use super::checks::Access;
use super::codes::{INVALID_HANDLE, INVALID_VALUE};
use super::core::Core;
use super::cuda::Cuda;
use super::state::{Kind, Position, State};
use super::streams::Work;
use super::user_objects::Kept;
use std::sync::Arc;

const AUTO_FREE_ON_LAUNCH: u64 = 1;
const DEVICE_LAUNCH: u64 = 4;
/// The flags that there are.
const INSTANTIATE_FLAGS: u64 = 0xF;

/// One captured operation.
#[derive(Clone)]
pub(super) struct Node {
    work: Work,
    /// The host bytes that every replay of it reads or writes.
    host: Option<(usize, usize)>,
    /// What the pool has done to these bytes since: a replay would be a mistake.
    stale: Option<Access>,
}

#[derive(Default)]
pub(super) struct Graph {
    pub(super) nodes: Vec<Node>,
    pub(super) kept: Vec<Arc<Kept>>,
    /// A capture still adds to it.
    pub(super) is_being_captured: bool,
}

pub(super) struct Executable {
    nodes: Vec<Node>,
    kept: Vec<Arc<Kept>>,
    /// Launches of one executable are ordered after each other, on whatever streams.
    last_launch: Option<Position>,
}

impl Node {
    pub(super) fn new(work: Work, host: Option<(usize, usize)>) -> Self {
        Self { work, host, stale: None }
    }

    fn uses(&self, base: usize, bytes: usize) -> bool {
        self.host.is_some_and(|(from, of)| from < base.saturating_add(bytes) && base < from + of)
    }
}

impl State {
    pub(super) fn graph_mut(&mut self, handle: usize) -> Result<&mut Graph, u32> {
        let index = self.index(Kind::Graph, handle).ok_or(INVALID_VALUE)?;
        self.graphs.get_mut(&index).ok_or(INVALID_VALUE)
    }

    fn executable_mut(&mut self, handle: usize) -> Result<&mut Executable, u32> {
        let index = self.index(Kind::Executable, handle).ok_or(INVALID_HANDLE)?;
        self.executables.get_mut(&index).ok_or(INVALID_HANDLE)
    }

    /// A new graph that a capture adds to; gives its index. Indices, and so handles, are used again.
    pub(super) fn add_graph(&mut self) -> usize {
        let index = (0..).find(|index| !self.graphs.contains_key(index)).unwrap_or_default();
        self.graphs.insert(index, Graph { is_being_captured: true, ..Graph::default() });
        index
    }

    /// Graphs go on naming memory that the pool has taken back. That is a mistake only once they are launched.
    pub(super) fn make_nodes_stale(&mut self, access: Access, base: usize, bytes: usize) {
        let graphs = self.graphs.values_mut().flat_map(|graph| &mut graph.nodes);
        let executables = self.executables.values_mut().flat_map(|executable| &mut executable.nodes);
        for node in graphs.chain(executables).filter(|node| node.uses(base, bytes)) {
            node.stale = Some(access);
            if matches!(access, Access::Unmap | Access::FreeHost | Access::FreeManaged) {
                // So that a launch ends with the report of it and not with a segmentation fault.
                node.work = Work::Nothing;
            }
        }
    }
}

impl Core {
    fn launch(&self, executable: usize, stream: usize) -> Result<(), u32> {
        let thread = self.enter(Call::GraphLaunch, 0)?;
        let mut state = self.state.lock();
        let slot = self.stream_slot(&mut state, thread, stream)?;
        self.need_context(&state, thread)?;
        let found = state.executable_mut(executable)?;
        let (nodes, kept, last) = (found.nodes.clone(), found.kept.clone(), found.last_launch);
        for node in &nodes {
            if let (Some(access), Some((from, of))) = (node.stale, node.host) {
                self.checks.violation(format_args!(
                    "cuGraphLaunch: a graph that uses {of} bytes at {from:#x} is replayed after the {access} them"
                ));
            }
        }
        if let Some(capture) = self.use_stream(&mut state, slot)? {
            return state.capture_graph(capture, slot, nodes, kept);
        }
        if let Some(last) = last.filter(|last| !state.is_complete(*last)) {
            let position = state.next_position(slot);
            self.enqueue_at(state, position, Work::WaitFor(last), None);
            state = self.state.lock();
        }
        for node in nodes {
            let position = state.next_position(slot);
            self.enqueue_at(state, position, node.work, node.host);
            state = self.state.lock();
        }
        let position = state.next_position(slot);
        if let Ok(executable) = state.executable_mut(executable) {
            executable.last_launch = Some(position);
        }
        self.enqueue_at(state, position, Work::EndLaunch(kept), None);
        Ok(())
    }

    pub(super) fn destroy_graph(&self, graph: usize) -> Result<(), u32> {
        let mut state = self.state.lock();
        if state.graph_mut(graph)?.is_being_captured {
            return Err(INVALID_VALUE);
        }
        let index = state.index(Kind::Graph, graph).ok_or(INVALID_VALUE)?;
        drop(state.graphs.remove(&index));
        drop(state);
        self.run_destructors();
        Ok(())
    }

    pub(super) fn destroy_executable(&self, executable: usize) -> Result<(), u32> {
        let mut state = self.state.lock();
        let index = state.index(Kind::Executable, executable).ok_or(INVALID_HANDLE)?;
        let removed = state.executables.remove(&index);
        drop(state);
        let found = removed.is_some();
        drop(removed);
        self.run_destructors();
        if found { Ok(()) } else { Err(INVALID_HANDLE) }
    }

    pub(super) fn instantiate(&self, graph: usize) -> Result<usize, u32> {
        let mut state = self.state.lock();
        let graph = state.graph_mut(graph)?;
        if graph.is_being_captured {
            return Err(INVALID_VALUE);
        }
        let executable =
            Executable { nodes: graph.nodes.clone(), kept: graph.kept.clone(), last_launch: None };
        let index = (0..).find(|index| !state.executables.contains_key(index)).unwrap_or_default();
        state.executables.insert(index, executable);
        Ok(state.handle(Kind::Executable, index))
    }
}

/// Graphs.
impl Cuda {
    /// `cuGraphGetNodes`, of which only the number is given.
    pub fn cu_graph_get_nodes(&self, graph: usize) -> Result<usize, u32> {
        let core = self.core();
        core.enter(Call::GraphGetNodes, 0)?;
        let mut state = core.state.lock();
        Ok(state.graph_mut(graph)?.nodes.len())
    }

    /// `cuGraphInstantiateWithFlags`: an executable copy of the graph, which keeps the graph's user objects too.
    pub fn cu_graph_instantiate_with_flags(&self, graph: usize, flags: u64) -> Result<usize, u32> {
        let core = self.core();
        core.enter(Call::GraphInstantiate, 0)?;
        let contradicts = flags & AUTO_FREE_ON_LAUNCH != 0 && flags & DEVICE_LAUNCH != 0;
        if flags & !INSTANTIATE_FLAGS != 0 || contradicts {
            return Err(INVALID_VALUE);
        }
        core.instantiate(graph)
    }

    /// `cuGraphLaunch`: enqueues what was captured, one operation after the other. Host memory is read and written
    /// when the stream executes them, at every launch again. On a stream that captures, it is captured.
    pub fn cu_graph_launch(&self, executable: usize, stream: usize) -> Result<(), u32> {
        self.core().launch(executable, stream)
    }

    /// `cuGraphUpload`: changes nothing.
    pub fn cu_graph_upload(&self, executable: usize, stream: usize) -> Result<(), u32> {
        let core = self.core();
        let thread = core.enter(Call::GraphUpload, 0)?;
        let mut state = core.state.lock();
        let slot = core.stream_slot(&mut state, thread, stream)?;
        state.executable_mut(executable)?;
        core.refuse_while_capturing(&mut state, slot)
    }

    /// `cuGraphDestroy`; executables and launches of it go on. 1 while a capture still adds to it.
    pub fn cu_graph_destroy(&self, graph: usize) -> Result<(), u32> {
        let core = self.core();
        core.enter(Call::GraphDestroy, 0)?;
        core.destroy_graph(graph)
    }

    /// `cuGraphExecDestroy`; launches in flight go on.
    pub fn cu_graph_exec_destroy(&self, executable: usize) -> Result<(), u32> {
        let core = self.core();
        core.enter(Call::GraphExecDestroy, 0)?;
        core.destroy_executable(executable)
    }
}
