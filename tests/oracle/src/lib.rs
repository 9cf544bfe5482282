//! What the tests compare with: attention in plain f64 loops over plain arrays, written from the design and not from
//! the crate. A package of its own, so that it is optimised where the tests are not.
#![allow(missing_docs, reason = "the tests are its only users")]

pub mod array;
pub mod attention;
pub mod delta;
