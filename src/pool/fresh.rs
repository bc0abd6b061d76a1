//! Fresh memory, for a take that found none.

use crate::block::Out;
use crate::buffer::PinnedBuffer;
use crate::driver::{HostAccess, Resource};
use crate::error::Error;
use crate::home::Home;
use crate::size_class::SizeClass;
use crate::sync::Arc;

pub(super) fn fresh(home: &Home, class: SizeClass) -> Result<Out, Error> {
    let (api, bytes) = (home.driver.api(), class.bytes());
    let pages = if api.may_have(Resource::Memory(bytes)) { home.mapper.map(bytes) } else { None };
    let pages = pages.ok_or(Error::OutOfMemory { bytes })?;
    api.before_host_access(HostAccess::Mapped, pages.base(), pages.bytes());
    Ok(Out::fresh(pages, class))
}

/// As [`fresh`], for a caller who is to write it.
pub(super) fn missed(home: &Home, class: SizeClass) -> Result<Out, Error> {
    let mut block = fresh(home, class)?;
    if home.settings.prefault_misses {
        block.populate();
    }
    Ok(block)
}

#[cold]
pub(super) fn fresh_in_child(home: &Arc<Home>, class: SizeClass, len: usize) -> Result<PinnedBuffer, Error> {
    // Nothing of the driver is touched here, and nobody is told.
    let pages = home.mapper.map_in_child(class.bytes()).ok_or(Error::OutOfMemory { bytes: class.bytes() })?;
    let mut block = Out::fresh(pages, class);
    if home.settings.prefault_misses {
        block.populate();
    }
    Ok(PinnedBuffer::new(home.clone(), block, len))
}
