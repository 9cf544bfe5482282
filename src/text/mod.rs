//! From text to the layer's input: [`SimpleTokenizer`] gives ids (B, T), [`EmbeddingLayer`] gives vectors (B, T, E).

mod batch;
mod embedding;
mod error;
mod pipeline;
mod tokenizer;

pub use batch::{Batch, Encoding, PaddingSide};
pub use embedding::{EmbeddingConfig, EmbeddingLayer};
pub use error::TokenizerError;
pub use tokenizer::{SimpleTokenizer, SpecialTokens, Split};
