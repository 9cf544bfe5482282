#![doc = include_str!("../README.md")]

mod attempts;
#[cfg(any(feature = "files", test))]
mod disk_cache;
mod failure;
#[cfg(any(feature = "files", test))]
mod file_lock;
mod first_use;
mod hash;
#[cfg(any(feature = "files", test))]
mod private_files;
pub mod switches;
mod warnings;

pub use attempts::Attempts;
#[cfg(any(feature = "files", test))]
pub use disk_cache::DiskCache;
pub use failure::{Attempt, Failure};
pub use first_use::{CaseFailure, FirstUse, KernelKind};
pub use hash::Fnv;
pub use warnings::warn_of_each_text;
