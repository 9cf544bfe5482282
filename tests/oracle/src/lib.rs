//! The oracle of the tests: attention in plain f64 loops over slices, written from the design and not from the code of
//! the crate. It is a separate package, so that it is optimised while the tests are not, and so that the tests of the
//! kernels, which know neither Candle nor the core, compare with it too.
#![allow(missing_docs, reason = "the tests are its only users")]

#[cfg(feature = "arrays")]
pub mod array;
#[cfg(feature = "arrays")]
pub mod attention;
#[cfg(feature = "arrays")]
pub mod delta;
pub mod problem;
