//! A thread that captures copies into CUDA graphs, lets go of the buffers, replays the graphs and compares what the devices got.
#![allow(unsafe_code)] // Enqueueing a copy promises that the memory stays valid, which is what is tested.

use crate::options::Plant;
use crate::worker::tell;
use crate::world::{Device, Held, Random, Reserved, World};
use pinpool::sim::{CaptureMode, SimBuffer, SimGraph, SimStream};
use pinpool::{Error, GraphHold, PinnedPool};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The largest buffer that is captured: replays copy it again and again.
const MAX_BYTES: usize = 1 << 20;

const REPLAYS_MAX: usize = 6;

/// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`.
const BROKEN: u32 = 901;

pub struct Capturer {
    world: Arc<World>,
    pools: Vec<PinnedPool>,
    random: Random,
    number: u64,
}

/// One copy of a graph.
struct Node {
    memory: SimBuffer,
    number: u64,
    len: usize,
    /// Until the graph is gone: so long the buffer is out, or held.
    _reserved: Reserved,
}

struct Graph {
    nodes: Vec<Node>,
    /// Some of the buffers stay out.
    _kept: Vec<Held>,
    /// Where the pool could not see the capture; let go after the graph.
    holds: Vec<GraphHold>,
    device: usize,
    life: u64,
    stream: SimStream,
    launched: Vec<Arc<AtomicBool>>,
}

impl Capturer {
    pub fn new(world: Arc<World>, pools: Vec<PinnedPool>, thread: u64) -> Self {
        let random = Random(world.options.seed ^ (thread + 1).wrapping_mul(0xFEDC_BA98_7654_3211));
        Self { world, pools, random, number: (thread << 40) | (1 << 39) }
    }

    pub fn run(mut self) {
        while !self.world.is_over() {
            if let Some((graph, mut captured)) = self.capture() {
                for _ in 0..self.random.below(REPLAYS_MAX) {
                    self.replay(&graph, &mut captured);
                }
                self.let_go(graph, captured);
            }
        }
    }

    fn capture(&mut self) -> Option<(SimGraph, Graph)> {
        let world = self.world.clone();
        let index = self.random.below(world.devices.len());
        let device = world.devices[index].read().expect("no panic holds it");
        if device.lost {
            std::thread::sleep(Duration::from_millis(1));
            return None;
        }
        device.context.bind();
        let pool = self.pools[self.random.below(self.pools.len())].clone();
        let stream = device.context.stream();
        // So that the pools know the stream before it captures; whether the record succeeds is of no interest.
        let _ = pool.take(1).record_last_use(&stream);
        let held: Vec<_> = (0..1 + self.random.below(3)).filter_map(|_| self.filled(&pool)).collect();
        let waits = pool.hold_context_waits();
        stream.begin_capture([CaptureMode::ThreadLocal, CaptureMode::Relaxed][self.random.below(2)]);
        let mut graph = Graph {
            nodes: Vec::new(),
            _kept: Vec::new(),
            holds: Vec::new(),
            device: index,
            life: device.life,
            stream,
            launched: Vec::new(),
        };
        for (held, number) in held {
            if !self.add(&mut graph, &device, held, number) {
                break;
            }
        }
        let ended = graph.stream.end_capture();
        drop(waits);
        world.captures.fetch_add(1, Ordering::Relaxed);
        match ended {
            Ok(executable) => Some((executable, graph)),
            Err(_) => {
                // A wait that had begun before the hold broke it.
                world.broken_captures.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// A page-locked buffer with a pattern in it; what is pageable cannot be captured.
    fn filled(&mut self, pool: &PinnedPool) -> Option<(Held, u64)> {
        let size = 1 + self.random.below(MAX_BYTES.min(self.world.options.max_bytes));
        let reserved = World::reserve(&self.world, size)?;
        let mut buffer = pool.take_pinned(size).ok()?;
        if !self.world.is_zero(&buffer) {
            self.world.found(format!("old bytes in {buffer:?}"));
        }
        self.number += 1;
        let extent = buffer.len();
        buffer.copy_from_slice(self.world.pattern(self.number, extent));
        Some((Held { buffer, extent, _reserved: reserved }, self.number))
    }

    /// False when the capture was broken meanwhile.
    fn add(&mut self, graph: &mut Graph, device: &Device, held: Held, number: u64) -> bool {
        let Held { mut buffer, extent: len, _reserved } = held;
        let memory = device.context.alloc(len);
        let (cuda, stream) = (self.world.sim.cuda(), graph.stream.handle());
        // SAFETY: the pool keeps the memory unchanged until the graph is gone; that is what is tested.
        let copied = unsafe { cuda.cu_memcpy_htod_async(memory.address(), buffer.as_ptr(), len, stream) };
        if let Err(code) = copied {
            if code != BROKEN {
                self.world.found(format!("a copy that is captured: {code}"));
            }
            return false;
        }
        let is_told = self.world.options.plant != Plant::Capture;
        if is_told && buffer.record_last_use(&graph.stream) != Err(Error::Capturing) {
            // The driver would not say that the stream captures, so the pool cannot know it.
            // SAFETY: it is let go after the graph and its launches.
            graph.holds.push(unsafe { buffer.hold_for_graph() });
        }
        graph.nodes.push(Node { memory, number, len, _reserved });
        if self.random.one_in(4)
            && let Some(_reserved) = World::reserve(&self.world, len)
        {
            graph._kept.push(Held { buffer, extent: len, _reserved });
        }
        true
    }

    /// On its own stream or on another one of the device.
    fn replay(&mut self, executable: &SimGraph, graph: &mut Graph) {
        let world = self.world.clone();
        let device = world.devices[graph.device].read().expect("no panic holds it");
        if device.lost || device.life != graph.life {
            return;
        }
        device.context.bind();
        let other = &device.streams[self.random.below(device.streams.len())];
        let stream = if self.random.one_in(2) { other } else { &graph.stream };
        for Node { memory, len, .. } in &graph.nodes {
            // So that a replay which copies nothing is seen as well.
            if let Err(code) =
                world.sim.cuda().cu_memset_d8_async(memory.address(), 0xEE, *len, stream.handle())
            {
                world.found(format!("cuMemsetD8Async: {code}"));
            }
        }
        executable.launch(stream);
        let done = tell(&world, stream);
        drop(device);
        graph.launched.push(done.clone());
        if self.wait(graph, &done) {
            self.compare(graph);
            world.replays.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// False when the device is lost or another one by now.
    fn wait(&self, graph: &Graph, done: &AtomicBool) -> bool {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let device = self.world.devices[graph.device].read().expect("no panic holds it");
            if device.lost || device.life != graph.life {
                return false;
            }
            drop(device);
            if done.load(Ordering::SeqCst) {
                return true;
            }
            if Instant::now() > deadline {
                self.world.found("a replay is not done after a minute".into());
                return false;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn compare(&self, graph: &Graph) {
        let world = &self.world;
        let device = world.devices[graph.device].read().expect("no panic holds it");
        if device.lost || device.life != graph.life {
            return;
        }
        for Node { memory, number, len, .. } in &graph.nodes {
            if !memory.starts_with(world.pattern(*number, *len)) {
                world.found(format!(
                    "a replay put wrong bytes on device {}: {number:#x} of {len}",
                    graph.device
                ));
            }
            world.checked_bytes.fetch_add(*len as u64, Ordering::Relaxed);
        }
    }

    /// Now and then with a launch in flight, which the graph's end waits for.
    fn let_go(&mut self, executable: SimGraph, mut graph: Graph) {
        let world = self.world.clone();
        let is_there = {
            let device = world.devices[graph.device].read().expect("no panic holds it");
            let is_there = !device.lost && device.life == graph.life;
            if is_there && self.random.one_in(3) {
                device.context.bind();
                executable.launch(&graph.stream);
                graph.launched.push(tell(&world, &graph.stream));
            }
            is_there
        };
        if is_there && !graph.holds.is_empty() {
            let launched = std::mem::take(&mut graph.launched);
            launched.iter().for_each(|done| _ = self.wait(&graph, done));
        }
        drop(executable);
        drop(graph);
    }
}
