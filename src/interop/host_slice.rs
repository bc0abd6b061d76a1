//! cudarc's own copies take a buffer or a view, and note the use: `stream.memcpy_htod(&buf, ..)`.
//!
//! cudarc asks for the slice *before* it enqueues the copy, and what it would do afterwards
//! (`SyncOnDrop::Record`) is no proof: it records nothing with the default stream alone, with event tracking
//! off, or when an older error is stored in the context. So a context is noted here, and nothing is asked of
//! cudarc: the block waits for its context, unless a later `record_last_use` on the same stream is exact.
#![allow(unsafe_code)] // The methods of cudarc's trait are unsafe to call.

use crate::buffer::PinnedBuffer;
use crate::pin::{Pinnable, Pinned};
use crate::views::{View, ViewMut};
use bytemuck::Pod;
use cudarc::driver::{CudaStream, HostSlice, SyncOnDrop};

/// The caller's thread waits: a copy into the guard is synchronous, as into ordinary memory. Should cudarc not get to
/// it, the next access waits for the note. What is captured is not executed, and a wait would break the capture.
fn after_copy(is_captured: bool, stream: &CudaStream) -> SyncOnDrop<'_> {
    SyncOnDrop::Sync((!is_captured).then_some(stream))
}

impl HostSlice<u8> for PinnedBuffer {
    fn len(&self) -> usize {
        PinnedBuffer::len(self)
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [u8], SyncOnDrop<'a>) {
        // Waits for the device's writes before the read is noted.
        let bytes: &[u8] = self;
        self.note_device_read(stream);
        (bytes, SyncOnDrop::Sync(None))
    }

    unsafe fn stream_synced_mut_slice<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (&'a mut [u8], SyncOnDrop<'a>) {
        let after = after_copy(self.note_device_write(stream), stream);
        (self.destination(), after)
    }
}

impl<T: Pod> HostSlice<T> for View<'_, T> {
    fn len(&self) -> usize {
        <[T]>::len(self)
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [T], SyncOnDrop<'a>) {
        let elements: &[T] = self;
        if !elements.is_empty() {
            self.buffer().note_device_read(stream);
        }
        (elements, SyncOnDrop::Sync(None))
    }

    /// # Panics
    ///
    /// Always: a view is a source.
    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, _: &'a CudaStream) -> (&'a mut [T], SyncOnDrop<'a>) {
        panic!("a View cannot be the destination of a copy; take `view_mut` for that");
    }
}

impl<T: Pod> HostSlice<T> for ViewMut<'_, T> {
    fn len(&self) -> usize {
        <[T]>::len(self)
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [T], SyncOnDrop<'a>) {
        let elements: &[T] = self;
        if !elements.is_empty() {
            self.buffer().note_device_read(stream);
        }
        (elements, SyncOnDrop::Sync(None))
    }

    unsafe fn stream_synced_mut_slice<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (&'a mut [T], SyncOnDrop<'a>) {
        if <[T]>::is_empty(self) {
            return (&mut [], SyncOnDrop::Sync(None));
        }
        let after = after_copy(self.buffer_mut().note_device_write(stream), stream);
        (self.destination(), after)
    }
}

impl<C: Pinnable> HostSlice<C::Element> for Pinned<C> {
    fn len(&self) -> usize {
        <[C::Element]>::len(self)
    }

    unsafe fn stream_synced_slice<'a>(
        &'a self,
        stream: &'a CudaStream,
    ) -> (&'a [C::Element], SyncOnDrop<'a>) {
        let elements: &[C::Element] = self;
        self.buffer().note_device_read(stream);
        (elements, SyncOnDrop::Sync(None))
    }

    unsafe fn stream_synced_mut_slice<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (&'a mut [C::Element], SyncOnDrop<'a>) {
        let after = after_copy(self.buffer_mut().note_device_write(stream), stream);
        let bytes = self.buffer_mut().destination();
        (bytemuck::cast_slice_mut(bytes), after)
    }
}
