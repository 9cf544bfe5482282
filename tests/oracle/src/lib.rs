//! The oracle of the tests: attention in plain f64 loops over plain arrays, written from the design and not from the
//! code of the crate. It is a separate package, so that it is optimised while the tests are not.
#![allow(missing_docs, reason = "the tests are its only users")]

pub mod array;
pub mod attention;
pub mod delta;
