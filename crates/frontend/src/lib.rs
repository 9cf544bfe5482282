//! The two ends of an attention layer that people look at: texts that go in, and pictures of the weights that come out.
//!
//! - [`text`]: [`SimpleTokenizer`] gives ids, [`EmbeddingLayer`] gives vectors.
//! - [`plot`]: heat maps of attention weights in a terminal, with the feature `plot` as SVG and PNG files, and pages
//!   that show all heads of a model in a browser.
//!
//! Below lies `candle-attention-core`, the layer itself. Models use the package `candle-attention`, which gives these
//! names.

pub mod plot;
pub mod text;

pub use text::{EmbeddingConfig, EmbeddingLayer, SimpleTokenizer};
