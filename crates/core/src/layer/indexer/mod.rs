//! Indexers: modules that choose the keys of each query by scores that cost less than attention.

mod deepseek;
mod top_k;

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::{Result, Tensor};

pub use deepseek::IndexerConfig;
pub(super) use deepseek::{DeepSeekIndexer, IndexerShape};

use crate::mask::{AttentionMask, KeyLists};
use crate::position::Rotation;

/// The tokens of a call, as an indexer reads them.
pub(super) struct IndexedTokens<'a> {
    /// The input of the layer, (B, T, E).
    pub xs: &'a Tensor,
    /// The compressed queries, (B, T, q_lora_rank).
    pub compressed: &'a Tensor,
    /// The rotation of the indexer at the positions of the tokens, if the layer rotates.
    pub rotation: Option<&'a Rotation>,
}

/// The queries of an indexer, without gradients.
pub(super) struct IndexQueries {
    /// (B, T, heads, width) in f32.
    pub q: Tensor,
    /// The factor of each head's scores, (B, T, heads) in f32.
    pub weights: Tensor,
}

/// A module that chooses the keys of each query. Its choice has no gradient.
///
/// A cache stores a key of the indexer for each token too.
pub(super) trait KeyIndexer: Debug + Send + Sync {
    /// Returns the width of a key.
    fn key_width(&self) -> usize;

    /// Returns the keys of the tokens, (B, T, width).
    fn keys(&self, tokens: &IndexedTokens) -> Result<Tensor>;

    /// Returns the queries of the tokens.
    fn queries(&self, tokens: &IndexedTokens) -> Result<IndexQueries>;

    /// Returns the best keys of each query among those (B, T_kv, width) that a mask allows; `None` if all are chosen.
    fn choose(&self, queries: &IndexQueries, keys: &Tensor, mask: &AttentionMask) -> Result<Option<KeyLists>>;

    /// Returns a copy for inference.
    fn freeze(&self) -> Result<Arc<dyn KeyIndexer>>;
}
