//! What the kernel is asked for: mappings, where they lie, and what a fork does with them.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(not(target_os = "linux"))]
mod other;

#[cfg(target_os = "linux")]
pub(super) use linux::{hide_from_children, map, populate, show_to_children, unmap};
#[cfg(not(target_os = "linux"))]
pub(super) use other::{hide_from_children, map, populate, show_to_children, unmap};
