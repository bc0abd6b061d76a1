//! The end of a block: unregistered, unmapped, gone.

use super::{Body, Retiring, Source};
use crate::contexts::Context;
use crate::driver::{Driver, HostAccess};
use crate::driver_pages;
use crate::error::CallError;
use crate::quarantine;
use crate::regions;
use crate::sync::Arc;
use std::mem::ManuallyDrop;

/// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`.
const NOT_REGISTERED: u32 = 713;

/// What became of a block that was let go.
#[derive(Debug)]
pub(crate) enum Released {
    /// It was pageable and is unmapped.
    Pageable,
    /// It is unregistered and unmapped.
    Unregistered,
    /// The registration vanished with its context. What that left of the pages nobody says, so they are leaked.
    Vanished(CallError),
    /// The driver refused to unregister it, so its memory is leaked.
    Quarantined(CallError),
}

impl Retiring {
    /// Leaks the block; the caller counts it.
    pub(crate) fn quarantine(mut self) {
        if let Some(spare) = self.0.spare.take() {
            spare.give_back();
        }
        self.0.pages.leak();
        quarantine::keep(self.0);
    }

    /// The context that it is page-locked in.
    pub(crate) fn registered_in(&self) -> Option<&Arc<Context>> {
        self.0.registered_in.as_ref()
    }

    /// Unregisters and unmaps. May block in the driver.
    pub(crate) fn release(self, driver: &Driver) -> Released {
        let Body { mut pages, registered_in, region, source, spare, .. } = *self.0;
        if let Some(spare) = spare {
            spare.give_back();
        }
        let (base, bytes) = (pages.base(), pages.bytes());
        let unlocked = match &registered_in {
            None => Ok(()),
            // Freeing needs a context, unregistering does not.
            Some(context) if source == Source::Driver => driver_pages::free(driver, context, &pages),
            Some(_) => driver.api().unregister(base),
        };
        if let Err(error) = unlocked {
            // The pages are leaked, because a device may still reach them.
            let stranded = registered_in.as_ref().is_some_and(|context| context.is_gone());
            match error.code() {
                // The driver itself says that it is not registered, and the work has ended: an ordinary mapping.
                NOT_REGISTERED if stranded => {}
                _ => {
                    pages.leak();
                    quarantine::keep(Box::new(pages));
                    return if stranded { Released::Vanished(error) } else { Released::Quarantined(error) };
                }
            }
        }
        if let Some(region) = region {
            regions::forget(region);
        }
        if source != Source::Driver {
            driver.api().before_host_access(HostAccess::Unmap, base, bytes);
        }
        drop(ManuallyDrop::into_inner(pages));
        if registered_in.is_some() { Released::Unregistered } else { Released::Pageable }
    }
}
