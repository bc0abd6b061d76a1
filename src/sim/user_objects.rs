//! User objects: what lives as long as the graphs that hold it, and tells by a function that they are gone.

use super::calls::Call;
use super::codes::{INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED};
use super::core::Core;
use super::cuda::Cuda;
use super::state::Kind;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, the only kind there is.
const NO_DESTRUCTOR_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`: the caller's references become the graph's.
const MOVE: u32 = 1;

/// A function that is run when nothing holds the object any more.
pub(super) type Destructor = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(super) struct UserObjects {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    objects: BTreeMap<usize, UserObject>,
    /// Not run yet: the driver runs them when it likes, outside all of its locks.
    due: Vec<Destructor>,
    are_held: bool,
}

struct UserObject {
    references: u32,
    destructor: Destructor,
}

impl UserObjects {
    fn add(&self, references: u32, destructor: Destructor) -> usize {
        let mut inner = self.inner.lock();
        let index = (0..).find(|index| !inner.objects.contains_key(index)).unwrap_or_default();
        inner.objects.insert(index, UserObject { references, destructor });
        index
    }

    fn retain(&self, index: usize, count: u32) -> Result<(), u32> {
        let mut inner = self.inner.lock();
        let object = inner.objects.get_mut(&index).ok_or(INVALID_HANDLE)?;
        object.references = object.references.checked_add(count).ok_or(INVALID_VALUE)?;
        Ok(())
    }

    fn release(&self, index: usize, count: u32) -> Result<(), u32> {
        let mut inner = self.inner.lock();
        let object = inner.objects.get_mut(&index).ok_or(INVALID_HANDLE)?;
        object.references = object.references.checked_sub(count).ok_or(INVALID_VALUE)?;
        if object.references == 0 {
            let destructor = inner.objects.remove(&index).map(|object| object.destructor);
            inner.due.extend(destructor);
        }
        Ok(())
    }

    fn knows(&self, index: usize, references: u32) -> bool {
        self.inner.lock().objects.get(&index).is_some_and(|object| object.references >= references)
    }

    pub(super) fn living(&self) -> usize {
        self.inner.lock().objects.len()
    }
}

/// References of a graph to an object; shared with what is made of the graph: executables and launches.
pub(super) struct Kept {
    index: usize,
    count: u32,
    objects: Arc<UserObjects>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        // It fails only where a test has released references that were not its own.
        let _ = self.objects.release(self.index, self.count);
    }
}

impl Core {
    /// Runs what is due; called with no lock held.
    pub(super) fn run_destructors(&self) {
        let due = {
            let mut inner = self.user_objects.inner.lock();
            if inner.are_held { Vec::new() } else { std::mem::take(&mut inner.due) }
        };
        if due.is_empty() {
            return;
        }
        let thread = self.threads.current();
        let was_inside = thread.in_host_function.swap(true, Ordering::Relaxed);
        due.into_iter().for_each(|destructor| destructor());
        thread.in_host_function.store(was_inside, Ordering::Relaxed);
    }

    pub(super) fn hold_destructors(&self, are_held: bool) {
        self.user_objects.inner.lock().are_held = are_held;
        self.run_destructors();
    }
}

/// User objects.
impl Cuda {
    /// `cuUserObjectCreate`: the function runs some time after the last reference is gone; a driver call inside it
    /// answers 800. `flags` must be 1 (`CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`).
    pub fn cu_user_object_create(
        &self,
        destructor: impl FnOnce() + Send + 'static,
        references: u32,
        flags: u32,
    ) -> Result<usize, u32> {
        let core = self.core();
        core.enter(Call::UserObjectCreate, 0)?;
        if !core.config.user_objects {
            return Err(NOT_SUPPORTED);
        }
        if references == 0 || flags != NO_DESTRUCTOR_SYNC {
            return Err(INVALID_VALUE);
        }
        let index = core.user_objects.add(references, Box::new(destructor));
        Ok(core.state.lock().handle(Kind::UserObject, index))
    }

    /// `cuUserObjectRetain`.
    pub fn cu_user_object_retain(&self, object: usize, count: u32) -> Result<(), u32> {
        let core = self.core();
        core.enter(Call::UserObjectRetain, 0)?;
        core.user_objects.retain(self.object_index(object)?, count)
    }

    /// `cuUserObjectRelease`.
    pub fn cu_user_object_release(&self, object: usize, count: u32) -> Result<(), u32> {
        let core = self.core();
        core.enter(Call::UserObjectRelease, 0)?;
        core.user_objects.release(self.object_index(object)?, count)?;
        core.run_destructors();
        Ok(())
    }

    /// `cuGraphRetainUserObject`: also while the graph is being captured. With flag 1 (`CU_GRAPH_USER_OBJECT_MOVE`)
    /// the caller's references become the graph's. What is made of the graph afterwards keeps the object too.
    pub fn cu_graph_retain_user_object(
        &self,
        graph: usize,
        object: usize,
        count: u32,
        flags: u32,
    ) -> Result<(), u32> {
        let core = self.core();
        core.enter(Call::GraphRetainUserObject, 0)?;
        let index = self.object_index(object)?;
        let mut state = core.state.lock();
        let graph = state.graph_mut(graph)?;
        if count == 0 || flags & !MOVE != 0 || !core.user_objects.knows(index, count) {
            return Err(INVALID_VALUE);
        }
        if flags & MOVE == 0 {
            core.user_objects.retain(index, count)?;
        }
        graph.kept.push(Arc::new(Kept { index, count, objects: core.user_objects.clone() }));
        Ok(())
    }

    /// `cuGraphReleaseUserObject`: gives back references that the graph was given in one piece.
    pub fn cu_graph_release_user_object(&self, graph: usize, object: usize, count: u32) -> Result<(), u32> {
        let core = self.core();
        core.enter(Call::GraphReleaseUserObject, 0)?;
        let index = self.object_index(object)?;
        let mut state = core.state.lock();
        let kept = &mut state.graph_mut(graph)?.kept;
        let place = kept.iter().position(|one| one.index == index && one.count == count);
        drop(kept.remove(place.ok_or(INVALID_VALUE)?));
        drop(state);
        core.run_destructors();
        Ok(())
    }

    fn object_index(&self, object: usize) -> Result<usize, u32> {
        self.core().state.lock().index(Kind::UserObject, object).ok_or(INVALID_HANDLE)
    }
}
