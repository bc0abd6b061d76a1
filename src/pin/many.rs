//! Page-locking several regions, all or none.
#![allow(unsafe_code)] // As `register_region`, whose promise it asks for.

use super::caretaker::{Caretaker, PINNED_IN, Registered};
use super::{PinError, Region};
use crate::driver::{Driver, exit};
use crate::report::say;

/// Page-locks every region, or none: when the n-th is refused, those before it are unregistered in reverse
/// order, and the error names the n-th by index, base and length, with the driver's code.
///
/// No regions is nothing to do, and no driver is touched for it. An empty region, one that overlaps another,
/// the same one twice, or memory that cannot be written is the driver's to refuse (1, 712, 712, 1), and is
/// rolled back like any other failure. See [`register_region`](super::register_region) for the context.
///
/// # Errors
///
/// A [`PinError`]; [`still_registered`](PinError::still_registered) lists what the rollback could not undo.
///
/// # Safety
///
/// The memory of every region stays as [`register_region`](super::register_region) demands until the result
/// has been dropped or [`unpin_all`](PinnedRegions::unpin_all) has returned, and no device work that uses the
/// memory is outstanding at that moment. (Leaking the result leaves the memory registered: then it
/// must stay for good.)
pub unsafe fn pin_all(driver: &Driver, regions: &[Region]) -> Result<PinnedRegions, PinError> {
    // From here on its drop owns the rollback, after a panic too.
    let mut pinned = PinnedRegions { registered: Vec::with_capacity(regions.len()) };
    for (index, region) in regions.iter().enumerate() {
        match Caretaker::of(driver).and_then(|caretaker| caretaker.register(*region)) {
            Ok(registered) => pinned.registered.push(registered),
            Err(cause) => {
                return Err(PinError::of_nth(index, *region, cause).leaving(pinned.release()));
            }
        }
    }
    Ok(pinned)
}

/// Regions that are page-locked; dropping it unregisters them, in reverse order.
///
/// It does not own the memory. What could not be unregistered at its drop is logged and counted
/// ([`stats`](super::stats)), and has to be taken for page-locked for good; [`unpin_all`](Self::unpin_all)
/// reports it.
#[derive(Debug)]
#[must_use = "the regions are unregistered when this is dropped"]
pub struct PinnedRegions {
    registered: Vec<Registered>,
}

impl PinnedRegions {
    /// How many regions.
    pub fn len(&self) -> usize {
        self.registered.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.registered.is_empty()
    }

    /// The regions, in the order in which they were page-locked.
    pub fn regions(&self) -> impl Iterator<Item = Region> {
        self.registered.iter().map(Registered::region)
    }

    /// Unregisters all regions, in reverse order, and goes on after a failure.
    ///
    /// # Errors
    ///
    /// What could not be unregistered, each with its index: that memory has to be taken for page-locked, and
    /// must never be freed, unless its code is 713.
    pub fn unpin_all(mut self) -> Result<(), Vec<PinError>> {
        let failures = self.release();
        if failures.is_empty() { Ok(()) } else { Err(failures) }
    }

    fn release(&mut self) -> Vec<PinError> {
        let mut failures = Vec::new();
        while let Some(registered) = self.registered.pop() {
            let index = self.registered.len();
            if let Err((registered, call)) = registered.unregister() {
                failures.push(PinError::of_nth(index, registered.region(), call.into()));
                if registered.is_still_registered(&call) {
                    // With its retain on the context, and its place in the record of regions.
                    std::mem::forget(registered);
                }
            }
        }
        failures
    }
}

impl Drop for PinnedRegions {
    fn drop(&mut self) {
        if PINNED_IN.is_inherited() || exit::is_shut() {
            // They are the parent's, and so are the contexts; or the process exits, which unpins everything.
            std::mem::take(&mut self.registered).into_iter().for_each(std::mem::forget);
            return;
        }
        for error in self.release() {
            say!(WARN, "still_page_locked", %error, "memory stays page-locked: it could not be unregistered");
        }
    }
}
