//! Attention for Candle: the layer, its function, its mask and its weights by name.
//!
//! Models use the package `candle-attention`, which gives these names beside those of the packages above. Below lies
//! `candle-attention-kernels`, which computes over slices and does not know Candle.
//!
//! The rooms of this package stand on each other in one order: what a tensor is expected to be (`base`), masks, seeded
//! draws (`init`), the function (`sdpa`), packed products (`linear`), norms and gates, positions, the config of a
//! layer, parameters by name (`params`), caches, layers, and linear attention (`delta`).

mod base;
mod cache;
mod config;
mod delta;
mod gate;
pub mod init;
mod layer;
mod linear;
mod mask;
mod norm;
mod params;
mod position;
mod sdpa;

pub mod cpu {
    //! The instruction sets of the CPU kernels.

    pub use candle_attention_kernels::{Tier, TierError};
}

pub mod weights {
    //! How checkpoints name, pack and transpose the weights of attention.

    pub use crate::params::{Naming, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
}

/// What the packages above take of this one's insides. It is no part of the interface that versions keep.
#[doc(hidden)]
pub mod internal {
    pub use crate::base::{
        Dim, Expect, SCALES, Source, did_you_mean, edits, filled, fits_in_memory, has, is_addressable, nearest, root,
        whole,
    };
    pub use crate::linear::{ProjectionColumns, Projections};
    pub use crate::params::{detect_with, infer_config, projection_shapes, query_weights};
}

pub use base::{HeadShard, untrained};
pub use cache::{AttentionCache, AttentionCacheConfig};
pub use config::{KvSource, MultiHeadAttentionConfig};
pub use delta::{
    DeltaCache, DeltaInput, DeltaLayout, DeltaOptions, GatedDeltaNet, GatedDeltaNetConfig, gated_delta_rule,
    gated_delta_rule_varlen,
};
pub use gate::{GateActivation, GatePlace, GateScope, OutputGate};
pub use init::TorchSeed;
pub use layer::{
    AdditiveAttention, AdditiveAttentionConfig, AdditiveInput, AttentionInput, LayerOutput, MultiHeadAttention,
    MultiHeadLatentAttention, MultiHeadLatentAttentionConfig, ProjectedMemory, SumFunction,
};
pub use linear::{
    PackedGatedLinear, PackedLinear, ProjectionModule, ProjectionModules, ProjectionPlace, packed_linear,
    packed_linear_b, packed_linear_no_bias,
};
pub use mask::{AttentionMask, EmptyRows, KvRanges, ValidLens, Windows};
pub use norm::{
    ContextNorm, LayerNorm, QkNorm, QkNormKind, QkNormScope, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm,
    rms_norm_plus_one,
};
pub use params::WeightLayout;
pub use position::{
    AlibiConfig, ContentPositions, DisentangledConfig, QueryScaling, RelativeBias, RelativeBiasConfig,
    RelativeEmbeddings, RopeAxes, RopeAxisLayout, RopeConfig, RopeScaling, RopeStyle, RotaryEmbedding, alibi_slopes,
};
pub use sdpa::{
    AttentionFunction, AttentionOutput, AttentionStatistics, Backend, OutputOrder, PackedSequences, Plan, SdpaOptions,
    StatisticsOptions, masked_softmax, merge_attention, plan, scaled_dot_product_attention,
    scaled_dot_product_attention_varlen, scaled_dot_product_attention_varlen_with_lse,
    scaled_dot_product_attention_varlen_with_statistics, scaled_dot_product_attention_with_lse,
    scaled_dot_product_attention_with_statistics, scaled_dot_product_attention_with_weights,
};
