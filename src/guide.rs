//! Guides: documents that are read, with code that is tested. Only in the documentation.

#[doc = include_str!("../docs/pytorch.md")]
pub mod pytorch {}

#[doc = include_str!("../docs/candle-models.md")]
pub mod candle_models {}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub mod readme {}
