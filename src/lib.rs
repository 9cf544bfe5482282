// Of two definitions of a link the first holds: pictures of the README with their bytes.
#![cfg_attr(doc, doc = include_str!("../docs/pictures.md"))]
#![doc = include_str!("../README.md")]
//!
//! # Dimensions
//!
//! The letters of every doc comment: B batch, T_q queries, T_kv keys, H query heads, H_kv key and value heads
//! (H_kv divides H; query head h reads key head `h / (H / H_kv)`), D the head dimension of queries and keys, D_v that of
//! values, E the embedding dimension (a layer's input), V the vocabulary. Tensors are (B, H, T, D) in and out of
//! [`scaled_dot_product_attention`], and (B, T, E) in and out of a layer.

mod additive;
mod cache;
mod config;
pub mod cpu {
    //! The instruction sets of the CPU kernels.

    pub use candle_attention_kernels::{Tier, TierError};
}
mod executor;
mod gate;
pub mod gguf;
#[cfg(any(doc, doctest))]
pub mod guide;
pub mod hf;
#[cfg(feature = "hub")]
pub mod hub;
pub mod init;
mod layer;
mod linear;
mod mask;
mod norm;
pub mod plot;
mod position;
mod projection;
mod rowwise;
mod sdpa;
mod shard;
mod size;
pub mod text;
pub mod weights;
mod windows;

pub use additive::{AdditiveAttention, AdditiveAttentionConfig, AdditiveInput};
pub use cache::{AttentionCache, AttentionCacheConfig};
pub use config::{KvSource, MultiHeadAttentionConfig};
pub use gate::{GateActivation, GatePlace, GateScope, OutputGate};
pub use init::TorchSeed;
pub use layer::{
    AttentionFunction, AttentionInput, MultiHeadAttention, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig,
    ProjectedMemory, SumFunction,
};
pub use linear::{PackedGatedLinear, PackedLinear, packed_linear, packed_linear_b, packed_linear_no_bias};
pub use mask::{AttentionMask, EmptyRows, KvRanges, ValidLens};
pub use norm::{ContextNorm, QkNorm, QkNormKind, QkNormScope};
pub use position::{
    AlibiConfig, ContentPositions, DisentangledConfig, QueryScaling, RelativeBias, RelativeBiasConfig,
    RelativeEmbeddings, RopeAxes, RopeAxisLayout, RopeConfig, RopeScaling, RopeStyle, RotaryEmbedding, alibi_slopes,
};
pub use projection::{ProjectionModule, ProjectionModules, ProjectionPlace};
pub use sdpa::{
    AttentionOutput, Backend, OutputOrder, PackedSequences, Plan, SdpaOptions, masked_softmax, merge_attention, plan,
    scaled_dot_product_attention, scaled_dot_product_attention_varlen, scaled_dot_product_attention_varlen_with_lse,
    scaled_dot_product_attention_with_lse, scaled_dot_product_attention_with_weights,
};
pub use shard::HeadShard;
pub use text::{EmbeddingConfig, EmbeddingLayer, SimpleTokenizer};
pub use weights::WeightLayout;
pub use windows::Windows;
