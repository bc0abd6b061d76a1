//! pinpool
mod code_name;
pub mod driver;
mod error;
mod interop;
#[cfg(feature = "sim")]
pub mod sim;
mod stream;

pub use driver::Driver;
pub use error::{CallError, Error};
pub use stream::AsStream;
