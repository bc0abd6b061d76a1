//! The classic design of a background pool of page-locked buffers: the baseline of every bench here.
//!
//! It is what one would write first, written with care and without handicaps: ready buffers wait in an ordered
//! map behind one mutex, returns go through a `std::sync::mpsc` channel to one cleaner thread, which coalesces
//! them (until [`BATCH`] have come, or none for [`SILENCE`]) so that a wake-up and a lock are paid once
//! for many, waits for their events in order, blocking, page-locks a block once, zeroes its dirty prefix and
//! puts it back. Every record makes an event with the default flags; a miss is `vec![0; n]`.
//!
//! The map is ordered so that the largest class is evicted first, over a byte cap. No statistics: they would only
//! make it slower. A buffer without a record is taken for unused.

use pinpool::sim::{Sim, SimStream};
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// So many returns are dealt with at once.
pub const BATCH: usize = 64;
/// With fewer, the cleaner begins when none has come for so long.
pub const SILENCE: Duration = Duration::from_millis(100);
/// `CU_EVENT_DEFAULT`: with timing, and a spinning `cuEventSynchronize`.
pub const EVENT_FLAGS: u32 = 0;
/// Bytes that may lie ready.
const READY_BYTES_MAX: usize = 4 << 30;
/// `CU_MEMHOSTREGISTER_PORTABLE`
const PORTABLE: u32 = 1;

pub struct ClassicPool {
    shared: Arc<Shared>,
    cleaner: Option<JoinHandle<()>>,
}

/// What `take` returns; its drop sends the block to the cleaner.
pub struct ClassicBuffer {
    block: Option<Block>,
    shared: Arc<Shared>,
}

struct Shared {
    sim: Sim,
    ready: Mutex<Ready>,
    /// `None` once the pool is gone: what drops then is freed where it drops.
    returns: Mutex<Option<Sender<Block>>>,
}

#[derive(Default)]
struct Ready {
    classes: BTreeMap<usize, Vec<Block>>,
    bytes: usize,
}

struct Block {
    bytes: Vec<u8>,
    dirty: usize,
    is_registered: bool,
    events: Vec<usize>,
}

impl ClassicPool {
    /// A pool that page-locks in the given context.
    pub fn new(sim: &Sim, context: usize) -> Self {
        let (sender, receiver) = channel();
        let shared =
            Arc::new(Shared { sim: sim.clone(), ready: Mutex::default(), returns: Mutex::new(Some(sender)) });
        let for_cleaner = shared.clone();
        let cleaner = std::thread::Builder::new().name("classic-cleaner".into()).spawn(move || {
            for_cleaner
                .sim
                .cuda()
                .cu_ctx_set_current(context)
                .expect("the context lives as long as the pool");
            for_cleaner.clean(&receiver);
        });
        Self { shared, cleaner: Some(cleaner.expect("a thread can be spawned")) }
    }

    pub fn take(&self, min_size: usize) -> ClassicBuffer {
        let class = min_size.next_power_of_two();
        let block = self.shared.pop(class).unwrap_or_else(|| Block::pageable(class));
        ClassicBuffer { block: Some(block), shared: self.shared.clone() }
    }

    /// How many buffers of this size are ready.
    pub fn ready(&self, min_size: usize) -> usize {
        let ready = self.shared.ready.lock().expect("not poisoned");
        ready.classes.get(&min_size.next_power_of_two()).map_or(0, Vec::len)
    }
}

impl Drop for ClassicPool {
    fn drop(&mut self) {
        self.shared.returns.lock().expect("not poisoned").take();
        if let Some(cleaner) = self.cleaner.take() {
            cleaner.join().expect("the cleaner does not panic");
        }
        let ready = std::mem::take(&mut *self.shared.ready.lock().expect("not poisoned"));
        ready.classes.into_values().flatten().for_each(|block| self.shared.free(block));
    }
}

impl ClassicBuffer {
    pub fn is_pinned(&self) -> bool {
        self.block().is_registered
    }

    pub fn bytes(&self) -> &[u8] {
        &self.block().bytes
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let block = self.block_mut();
        block.dirty = block.bytes.len();
        &mut block.bytes
    }

    pub fn set_dirty_len(&mut self, len: usize) {
        let block = self.block_mut();
        block.dirty = len.min(block.bytes.len());
    }

    /// Records a new event, in the stream's context, which has to be current.
    pub fn record_last_use(&mut self, stream: &SimStream) -> Result<(), u32> {
        let cuda = self.shared.sim.cuda();
        let event = cuda.cu_event_create(EVENT_FLAGS)?;
        cuda.cu_event_record(event, stream.handle())?;
        self.block_mut().events.push(event);
        Ok(())
    }

    fn block(&self) -> &Block {
        self.block.as_ref().expect("there until the drop")
    }

    fn block_mut(&mut self) -> &mut Block {
        self.block.as_mut().expect("there until the drop")
    }
}

impl Drop for ClassicBuffer {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        let returns = self.shared.returns.lock().expect("not poisoned");
        let refused = match returns.as_ref() {
            Some(sender) => sender.send(block).err().map(|refused| refused.0),
            None => Some(block),
        };
        drop(returns);
        if let Some(block) = refused {
            self.shared.wait(&block);
            self.shared.free(block);
        }
    }
}

impl Shared {
    fn pop(&self, class: usize) -> Option<Block> {
        let mut ready = self.ready.lock().expect("not poisoned");
        let block = ready.classes.get_mut(&class)?.pop()?;
        ready.bytes -= class;
        Some(block)
    }

    fn clean(&self, returns: &Receiver<Block>) {
        while let Ok(first) = returns.recv() {
            let mut batch = vec![first];
            let is_over = loop {
                if batch.len() == BATCH {
                    break false;
                }
                match returns.recv_timeout(SILENCE) {
                    Ok(block) => batch.push(block),
                    Err(RecvTimeoutError::Timeout) => break false,
                    Err(RecvTimeoutError::Disconnected) => break true,
                }
            };
            for block in batch {
                self.recycle(block);
            }
            if is_over {
                return;
            }
        }
    }

    fn recycle(&self, mut block: Block) {
        self.wait(&block);
        block.events.clear();
        if !block.is_registered {
            let (base, bytes) = (block.bytes.as_mut_ptr(), block.bytes.len());
            block.is_registered = self.sim.cuda().cu_mem_host_register(base, bytes, PORTABLE).is_ok();
        }
        let dirty = block.dirty;
        block.bytes[..dirty].fill(0);
        block.dirty = 0;
        let evicted = self.ready.lock().expect("not poisoned").push(block);
        evicted.into_iter().for_each(|block| self.free(block));
    }

    /// Waits for the block's events in the order in which they were recorded, and destroys them.
    fn wait(&self, block: &Block) {
        for event in &block.events {
            self.sim.cuda().cu_event_synchronize(*event).expect("the simulated device does not fail here");
            self.sim.cuda().cu_event_destroy(*event).expect("the event was created once");
        }
    }

    fn free(&self, mut block: Block) {
        if block.is_registered {
            self.sim.cuda().cu_mem_host_unregister(block.bytes.as_mut_ptr()).expect("it was registered once");
        }
    }
}

impl Ready {
    /// Gives back what had to go for it, largest first.
    fn push(&mut self, block: Block) -> Vec<Block> {
        self.bytes += block.bytes.len();
        self.classes.entry(block.bytes.len()).or_default().push(block);
        let mut evicted = Vec::new();
        while self.bytes > READY_BYTES_MAX {
            let largest =
                self.classes.values_mut().rev().find_map(Vec::pop).expect("there are bytes, so blocks");
            self.bytes -= largest.bytes.len();
            evicted.push(largest);
        }
        evicted
    }
}

impl Block {
    fn pageable(class: usize) -> Self {
        Self { bytes: vec![0; class], dirty: 0, is_registered: false, events: Vec::new() }
    }
}
