//! What one would do instead of a background pool; the classic design is in `classic/mod.rs`.

use crate::common::{Guard, Rig, Subject};
use pinpool::sim::{Sim, SimStream};
use std::sync::{Arc, Mutex};

/// `CU_MEMHOSTREGISTER_PORTABLE`
const PORTABLE: u32 = 1;

/// A mutexed list of page-locked buffers whose drop waits for the stream, zeroes, and puts the buffer back.
pub struct SyncPool {
    shared: Arc<SyncShared>,
}

struct SyncShared {
    sim: Sim,
    ready: Mutex<Vec<Vec<u8>>>,
}

pub struct SyncBuffer {
    bytes: Vec<u8>,
    dirty: usize,
    is_registered: bool,
    /// The stream to wait for, as a number.
    used_on: Option<usize>,
    shared: Arc<SyncShared>,
}

impl Subject for SyncPool {
    type Buffer = SyncBuffer;
    const NAME: &'static str = "plain sync pool";

    fn new(rig: &Rig) -> Self {
        Self { shared: Arc::new(SyncShared { sim: rig.sim.clone(), ready: Mutex::default() }) }
    }

    fn take(&self, min_size: usize) -> SyncBuffer {
        let size = min_size.next_power_of_two();
        let ready = {
            let mut ready = self.shared.ready.lock().expect("not poisoned");
            let place = ready.iter().rposition(|bytes| bytes.len() == size);
            place.map(|place| ready.swap_remove(place))
        };
        let is_registered = ready.is_some();
        let bytes = ready.unwrap_or_else(|| vec![0; size]);
        SyncBuffer { bytes, dirty: 0, is_registered, used_on: None, shared: self.shared.clone() }
    }

    fn ready(&self, min_size: usize) -> usize {
        let size = min_size.next_power_of_two();
        self.shared.ready.lock().expect("not poisoned").iter().filter(|bytes| bytes.len() == size).count()
    }
}

impl Drop for SyncShared {
    fn drop(&mut self) {
        for bytes in self.ready.get_mut().expect("not poisoned") {
            self.sim.cuda().cu_mem_host_unregister(bytes.as_mut_ptr()).expect("it was registered once");
        }
    }
}

impl Drop for SyncBuffer {
    fn drop(&mut self) {
        let cuda = self.shared.sim.cuda();
        if let Some(stream) = self.used_on {
            cuda.cu_stream_synchronize(stream).expect("the simulated device does not fail here");
        }
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes[..self.dirty].fill(0);
        if !self.is_registered {
            let registered = cuda.cu_mem_host_register(bytes.as_mut_ptr(), bytes.len(), PORTABLE);
            registered.expect("the simulated device does not fail here");
        }
        self.shared.ready.lock().expect("not poisoned").push(bytes);
    }
}

impl Guard for SyncBuffer {
    fn is_pinned(&self) -> bool {
        self.is_registered
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.dirty = self.bytes.len();
        &mut self.bytes
    }

    fn set_dirty_len(&mut self, len: usize) {
        self.dirty = len.min(self.bytes.len());
    }

    fn record(&mut self, stream: &SimStream) {
        self.used_on = Some(stream.handle());
    }

    fn vouch_for_quiescence(&mut self) {} // without a record it waits for nothing anyway
}

/// Fresh memory for every use, page-locked or not.
pub struct PerUse<const PAGE_LOCKED: bool> {
    sim: Sim,
}

pub struct PerUseBuffer<const PAGE_LOCKED: bool> {
    bytes: Vec<u8>,
    used_on: Option<usize>,
    sim: Sim,
}

/// `vec![0; n]` for every use.
pub type FreshVec = PerUse<false>;
/// Mapping and page-locking for every use.
pub type RegisterPerUse = PerUse<true>;

impl<const PAGE_LOCKED: bool> Subject for PerUse<PAGE_LOCKED> {
    type Buffer = PerUseBuffer<PAGE_LOCKED>;
    const NAME: &'static str = if PAGE_LOCKED { "register per use" } else { "vec![0; n]" };

    fn new(rig: &Rig) -> Self {
        Self { sim: rig.sim.clone() }
    }

    fn take(&self, min_size: usize) -> Self::Buffer {
        let mut bytes = vec![0u8; min_size.next_power_of_two()];
        if PAGE_LOCKED {
            let registered = self.sim.cuda().cu_mem_host_register(bytes.as_mut_ptr(), bytes.len(), PORTABLE);
            registered.expect("the simulated device does not fail here");
        }
        PerUseBuffer { bytes, used_on: None, sim: self.sim.clone() }
    }

    fn ready(&self, _: usize) -> usize {
        usize::MAX // memory is always there
    }
}

impl<const PAGE_LOCKED: bool> Drop for PerUseBuffer<PAGE_LOCKED> {
    fn drop(&mut self) {
        if let Some(stream) = self.used_on {
            self.sim.cuda().cu_stream_synchronize(stream).expect("the simulated device does not fail here");
        }
        if PAGE_LOCKED {
            self.sim.cuda().cu_mem_host_unregister(self.bytes.as_mut_ptr()).expect("it was registered once");
        }
    }
}

impl<const PAGE_LOCKED: bool> Guard for PerUseBuffer<PAGE_LOCKED> {
    fn is_pinned(&self) -> bool {
        PAGE_LOCKED
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn set_dirty_len(&mut self, _: usize) {} // fresh memory is always zero

    fn record(&mut self, stream: &SimStream) {
        self.used_on = PAGE_LOCKED.then(|| stream.handle());
    }

    fn vouch_for_quiescence(&mut self) {}
}
