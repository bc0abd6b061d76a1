//! The NUMA node that a device is at.

use super::Driver;
use super::memory::Attribute;
use crate::error::{CallError, Error};
use crate::machine;

impl Driver {
    /// The NUMA node of the host that a device is nearest to, for
    /// [`PoolBuilder::numa_node`](crate::PoolBuilder::numa_node); `None` where neither the driver (attribute 134, since
    /// CUDA 12.2) nor the machine (`/sys/bus/pci`) knows one, as on most machines with one node.
    ///
    /// ```
    /// # fn main() -> Result<(), pinpool::Error> {
    /// let driver = pinpool::Driver::auto();
    /// let node = driver.numa_node(0).unwrap_or(None); // without CUDA: any node
    /// let pool = pinpool::PinnedPool::builder().driver(driver).numa_node(node).build()?;
    /// # drop(pool);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Loads the library and calls `cuInit`; makes no context.
    ///
    /// # Errors
    ///
    /// [`Error::NoCuda`], and [`Error::Driver`] for a device that there is not.
    pub fn numa_node(&self, device: i32) -> Result<Option<u32>, Error> {
        self.api().prepare()?;
        let ask = |attribute| self.api().attribute(attribute, device);
        Ok(nearest(ask, machine::node_of_pci)?)
    }
}

fn nearest(
    ask: impl Fn(Attribute) -> Result<i32, CallError>,
    of_pci: impl Fn(u32, u32, u32) -> Option<u32>,
) -> Result<Option<u32>, CallError> {
    if let Ok(node) = u32::try_from(ask(Attribute::HostNumaNode)?) {
        return Ok(Some(node));
    }
    let place = [Attribute::PciDomain, Attribute::PciBus, Attribute::PciDevice].map(ask);
    let [domain, bus, device] = place.map(|number| number.map(|number| u32::try_from(number).ok()));
    let (Some(domain), Some(bus), Some(device)) = (domain?, bus?, device?) else { return Ok(None) };
    Ok(of_pci(domain, bus, device))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(node: i32) -> impl Fn(Attribute) -> Result<i32, CallError> {
        move |attribute| {
            Ok(match attribute {
                Attribute::HostNumaNode => node,
                Attribute::PciDomain => 1,
                Attribute::PciBus => 0x3b,
                _ => 2,
            })
        }
    }

    #[test]
    fn the_driver_is_believed_and_the_machine_where_the_driver_does_not_know() {
        let machine = |domain, bus, device| ((domain, bus, device) == (1, 0x3b, 2)).then_some(5);
        assert_eq!(nearest(device(0), machine), Ok(Some(0)));
        assert_eq!(nearest(device(-1), machine), Ok(Some(5)));
        assert_eq!(nearest(device(-1), |_, _, _| None), Ok(None));
        let error = CallError::new("cuDeviceGetAttribute", 101);
        assert_eq!(nearest(|_| Err(error), machine), Err(error));
    }

    #[test]
    fn a_driver_from_before_the_attribute_does_not_mean_node_0() {
        assert_eq!(nearest(|attribute| Ok(attribute.when_unknown()), |_, _, _| None), Ok(None));
    }
}
