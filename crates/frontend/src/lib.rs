//! Texts as the input of an attention layer, and pictures of its weights.
//!
//! - [`text`]: [`SimpleTokenizer`] turns texts into ids, [`EmbeddingLayer`] turns ids into vectors.
//! - [`plot`]: heat maps of attention weights in a terminal, as SVG and PNG files (feature `plot`), and pages that show
//!   all heads of a model in a browser.
//!
//! The layer itself is in `candle-attention-core`. Models depend on the package `candle-attention`, which re-exports
//! these names.

pub mod plot;
pub mod text;

pub use text::{EmbeddingConfig, EmbeddingLayer, SimpleTokenizer};
