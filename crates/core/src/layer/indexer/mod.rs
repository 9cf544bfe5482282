//! Indexers: modules that choose the keys of each query by scores that cost less than attention.

mod blocks;
mod chosen;
mod config;
mod deepseek;
mod load;
mod mean_blocks;
mod pooled;
mod pools;
mod scores;
mod sequence_keys;
mod top_k;

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::{Result, Tensor};

pub(super) use blocks::BlockIndexer;
pub(super) use chosen::ChoiceRecord;
pub use chosen::{ChosenKeys, OutputWithChoice};
pub(super) use config::IndexerShape;
pub use config::{IndexerConfig, IndexerQueries};
pub(super) use load::load_indexer;
pub(super) use mean_blocks::MeanBlockIndexer;
pub(super) use scores::PRODUCTS;
pub(super) use top_k::Scores;

use crate::mask::{AttentionMask, KeyLists};
use crate::position::Rotation;

/// The tokens of a call, as an indexer reads them.
pub(super) struct IndexedTokens<'a> {
    /// The input of the layer, (B, T, E).
    pub xs: &'a Tensor,
    /// The compressed queries, (B, T, q_lora_rank); the input, if queries are not compressed.
    pub compressed: &'a Tensor,
    /// The rotation of the indexer at the positions of the tokens, if the layer rotates.
    pub rotation: Option<&'a Rotation>,
    /// The logarithms of the positions, (1, T, 1, 1) or (B, T, 1, 1), if the layer has a learned temperature.
    pub log_positions: Option<&'a Tensor>,
}

/// The queries of an indexer, without gradients.
pub(super) struct IndexQueries {
    /// (B, T, heads, width) in f32.
    pub q: Tensor,
    /// The factor of each head's scores, (B, T, heads) in f32, if the scores of the heads are summed.
    pub weights: Option<Tensor>,
}

impl IndexQueries {
    /// Selects queries: `select` returns the entries of some sequences and tokens of a tensor (B, T, ..).
    pub fn select(&self, select: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self { q: select(&self.q)?, weights: self.weights.as_ref().map(&select).transpose()? })
    }
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
