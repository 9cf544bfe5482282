//! Attention for Candle: the layer, its function, its mask and its weights by name.
//!
//! Models use the package `candle-attention`, which re-exports these names together with those of the other packages.
//! This package builds on `candle-attention-modules`, the projections, norms and parameters of layers, and on
//! `candle-attention-kernels`, the CPU kernels over slices, which do not depend on Candle.
//!
//! Modules are layered; each imports only from those before it: `mask`, `sdpa` (the function), `position`, `config`,
//! `params` (parameters by name), `cache`, `pages` and `layer`.

mod cache;
mod config;
mod layer;
mod mask;
mod pages;
mod params;
mod position;
mod sdpa;

pub mod cpu {
    //! The instruction sets of the CPU kernels.

    pub use candle_attention_kernels::{InstructionSet, UnsupportedInstructionSet};
}

pub mod weights {
    //! The layouts of checkpoints: how they name, pack and transpose the weights of attention.

    pub use crate::params::{DenseNaming, Naming, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
}

/// Internals that other packages of the workspace use. They are not covered by semantic versioning.
#[doc(hidden)]
pub mod internal {
    pub use crate::cache::{NewTokens, Padding, QUANTIZE_CASE, check_kept};
    pub use crate::layer::LatentProjections;
    pub use crate::mask::{check_trees, rows_of_ones, tree_of};
    pub use crate::pages::StoredSteps;
    pub use crate::params::{
        AdaptableModule, AdapterMatrices, GATE_NAME, LayoutTensor, MaskBuffer, OTHER_GATE_NAME, ParameterName,
        ProjectionShape, TensorSource, detect_with, nearest_layout, projection_shape, query_weights, wrapper_prefixes,
    };
    pub use crate::position::{METAL_ROTATION_CASE, ROTATION_CASE};
    pub use crate::sdpa::{ATTENTION_CASES, METAL_CASES, has_relative_bias, take_alibi_slopes, without_sinks};
}

pub use cache::{AttentionCache, AttentionCacheConfig};
pub use candle_attention_call::KvCodeFormat;
pub use config::{BlockIndexerConfig, BlockScores, KvSharing, LocalWindow, MultiHeadAttentionConfig};
pub use layer::{
    AdditiveAttention, AdditiveAttentionConfig, AdditiveInput, AttentionInput, ChosenKeys, CompressedKeyAttention,
    CompressedKeyAttentionConfig, CompressedKeyCache, CompressedKeyIndexerConfig, CompressedKeyInput, IndexerConfig,
    IndexerQueries, KeyCompression, LatentScales, LayerOutput, MultiHeadAttention, MultiHeadLatentAttention,
    MultiHeadLatentAttentionConfig, OutputWithChoice, ProjectedMemory,
};
pub use mask::{AttentionMask, FullyMaskedRows, KeyLists, KeyRanges, TokenTree, ValidLens, Windows};
pub use pages::{
    KvPool, KvPoolConfig, PageCopy, PageTable, PagedStep, PagedTokens, RowMoves, SequenceId, SharedPrefix, StateAfter,
    StepStates, StepTokens,
};
pub use params::WeightLayout;
pub use position::{
    AlibiConfig, AttentionTemperature, ContentPositions, DisentangledConfig, RelativeBias, RelativeBiasConfig,
    RelativeEmbeddings, RopeAxes, RopeAxisLayout, RopeConfig, RopeScaling, RopeStyle, RotaryEmbedding, alibi_slopes,
};
pub use sdpa::{
    AttentionFunction, AttentionOutput, AttentionStatistics, Backend, OutputLayout, PackedSequences, PagedSequences,
    Plan, SdpaOptions, StatisticsOptions, masked_softmax, merge_attention, plan, plan_paged,
    scaled_dot_product_attention, scaled_dot_product_attention_paged, scaled_dot_product_attention_paged_with_lse,
    scaled_dot_product_attention_varlen, scaled_dot_product_attention_varlen_with_lse,
    scaled_dot_product_attention_varlen_with_statistics, scaled_dot_product_attention_with_lse,
    scaled_dot_product_attention_with_statistics, scaled_dot_product_attention_with_weights,
};
