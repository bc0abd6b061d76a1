//! Kinds of devices.

/// What the devices are like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Ordinary,
    /// A device that reads pageable memory itself.
    ReadsPageable,
    /// A device without support for registering, as some small ones are, or under confidential computing.
    RefusesToRegister,
}

impl Kind {
    /// The attribute (`CUdevice_attribute`) that says so, and its value.
    pub fn attribute(self) -> Option<(i32, i32)> {
        match self {
            Kind::Ordinary => None,
            Kind::ReadsPageable => Some((88, 1)),
            Kind::RefusesToRegister => Some((99, 0)),
        }
    }
}
