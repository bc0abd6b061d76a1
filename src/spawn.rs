//! Threads of the pool: the one place where they are asked of the system.

use crate::driver::{Driver, Resource};
use crate::sync::thread;
use std::io;

/// Starts a named thread. The system may refuse (too many threads), and so may a test; whoever asks does without.
pub(crate) fn spawn(
    driver: &Driver,
    name: String,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<thread::JoinHandle<()>> {
    match driver.api().may_have(Resource::Thread) {
        true => thread::Builder::new().name(name).spawn(body),
        false => Err(io::Error::from(io::ErrorKind::WouldBlock)),
    }
}
