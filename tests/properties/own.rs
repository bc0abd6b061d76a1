//! Memory of the application's own, page-locked beside the pool: never touched, and kept until the device is done with it.
#![allow(unsafe_code)] // Enqueueing a copy promises that the memory stays valid until it is done.

use crate::device::Mark;
use crate::ensure;
use crate::guards::pattern;
use crate::world::{Copied, Outcome, World, patience};
use pinpool::pin::Pinned;
use std::sync::Arc;
use std::time::Instant;

/// By this length its registrations are told from the pool's, which are powers of two.
pub const OWN_BYTES: usize = 5001;

const OWN_MAX: usize = 3;

pub struct Own {
    pinned: Pinned<Vec<u8>>,
    content: Vec<u8>,
    uses: Vec<Arc<Mark>>,
}

impl World {
    pub fn pin_own(&mut self) -> Outcome {
        if self.own.len() >= OWN_MAX || self.device.lines.is_empty() {
            return Ok(());
        }
        let content = pattern(self.turn, OWN_BYTES).to_vec();
        match Pinned::new(&self.driver, content.clone()) {
            Ok(pinned) => self.own.push(Own { pinned, content, uses: Vec::new() }),
            Err((error, back)) => {
                ensure!(self.model.loose(), "own memory was refused: {error}");
                ensure!(back == content, "own memory came back changed");
            }
        }
        Ok(())
    }

    pub fn copy_own(&mut self, index: usize, line: usize) -> Outcome {
        if self.own.is_empty() || self.device.is_broken(line) || self.device.lines[line].capture.is_some() {
            return Ok(());
        }
        let index = index % self.own.len();
        let context = self.device.lines[line].stream.context();
        let (device, context) = (Arc::new(context.alloc(OWN_BYTES)), context.handle());
        let own = &mut self.own[index];
        ensure!(own.pinned[..] == own.content[..], "the bytes of own memory changed");
        let (mark, recorded) = self.device.enqueue(line, |stream| {
            // SAFETY: whoever page-locked the memory keeps it until the copy is done; that is what is tested.
            unsafe { stream.copy_to_device(&own.pinned, &device) };
            own.pinned.record_last_use(stream)
        });
        ensure!(recorded.is_ok() || self.model.loose(), "own memory: {recorded:?}");
        self.device.lines[line].was_shown = true;
        own.uses.push(mark.clone());
        let expected = own.content.clone();
        self.copied.push(Copied { device, expected, mark: Some(mark), context });
        Ok(())
    }

    /// Dropped in flight; once the device is done with it, it is given back or freed.
    pub fn drop_own(&mut self, index: usize) -> Outcome {
        if self.own.is_empty() {
            return Ok(());
        }
        let Own { mut pinned, content, uses } = self.own.remove(index % self.own.len());
        if uses.is_empty() {
            // Without a record it would wait for whole contexts, which scripts do not let anybody do unasked.
            // SAFETY: nothing was ever copied from it.
            unsafe { pinned.assume_quiescent() };
        } else if uses.iter().any(|mark| !mark.is_done()) {
            return Ok(());
        }
        match pinned.unpin() {
            Ok(back) => ensure!(back == content, "own memory came back changed"),
            Err(error) => ensure!(self.model.loose(), "own memory: {error}"),
        }
        Ok(())
    }

    /// At the end of a script, when everything is done.
    pub fn until_own_is_let_go(&self) -> Outcome {
        let deadline = Instant::now() + patience();
        let is_own = |(_, bytes): &(usize, usize)| *bytes == OWN_BYTES;
        while self.device.sim.live_registrations().iter().any(is_own) {
            ensure!(Instant::now() < deadline, "own memory is page-locked for ever");
            std::thread::yield_now();
        }
        Ok(())
    }
}
