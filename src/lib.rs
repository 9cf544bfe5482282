//! An attention layer for [Candle](https://docs.rs/candle-core) models, with the numbers of PyTorch.
//!
//! ```
//! use candle_attention::{AttentionInput, AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig};
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! # fn main() -> candle_core::Result<()> {
//! let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
//! let cfg = MultiHeadAttentionConfig::new(64, 4).with_num_kv_heads(2).with_causal(true);
//! let mha = MultiHeadAttention::new(&cfg, vb.pp("self_attn"))?;
//!
//! let xs = Tensor::randn(0f32, 1., (2, 6, 64), &Device::Cpu)?;
//! let ys = mha.forward(&xs)?; // (2, 6, 64)
//! let padding = AttentionMask::none().with_valid_lens(vec![6, 4]);
//! let ys = mha.forward_with(AttentionInput::new(&xs).with_mask(&padding))?;
//! # assert_eq!(ys.dims(), [2, 6, 64]);
//! # Ok(()) }
//! ```
//!
//! | task | items |
//! | --- | --- |
//! | use attention in a model | [`MultiHeadAttention`], [`MultiHeadAttentionConfig`], [`AttentionInput`] |
//! | call the function without a layer | [`scaled_dot_product_attention`], [`SdpaOptions`]; [`plan()`] tells which implementation runs |
//! | use linear attention | [`GatedDeltaNet`], [`DeltaCache`], and the function [`gated_delta_rule`] |
//! | mask keys | [`AttentionMask`]: causal, lengths, windows, prefixes, key lists, tensors |
//! | decode token by token | [`AttentionCache`] |
//! | load weights exported from PyTorch | [`weights::open`], [`WeightLayout`], [`hf`], [`gguf`] |
//! | load, train, merge and save LoRA adapters of PEFT; several in one batch | [`peft`] |
//! | turn texts into inputs, and plot weights | [`text`], [`plot`] |
//! | draw the same random weights as PyTorch | [`TorchSeed`] |
//!
//! [`guide`] has guides for users of PyTorch, for users of JAX, flax, Keras and MLX, and for authors of Candle models.
//!
//! # Packages
//!
//! This package only re-exports the items of the packages below. Each of them depends only on packages before it in
//! this list. Without default features, this package is `candle-attention-core` and what that depends on.
//!
//! - `candle-attention-call`: the vocabulary of an attention call, which the others share.
//! - `candle-attention-kernels`: CPU kernels over slices.
//! - `candle-attention-cuda`: CUDA kernels, compiled at first use (feature `cuda`).
//! - `candle-attention-modules`: projections, norms, gates and seeded initialisation.
//! - `candle-attention-core`: the layer, the function, the mask, the cache and the weight layouts.
//! - `candle-attention-delta`: linear attention (feature `linear-attention`).
//! - `candle-attention-checkpoints`: files of weights (feature `checkpoints`).
//! - `candle-attention-frontend`: the tokenizer, and heat maps (features `text` and `plot`).
//!
//! # Dimensions
//!
//! Doc comments use these letters for dimensions: B batch, T_q queries, T_kv keys, H query heads, H_kv key and value
//! heads (H_kv divides H; query head h reads key head `h / (H / H_kv)`), D head dimension of queries and keys, D_v
//! head dimension of values, E embedding dimension (the input of a layer), V vocabulary. The tensors of
//! [`scaled_dot_product_attention`] have the shape (B, H, T, D), and the tensors of a layer (B, T, E).

#![cfg_attr(docsrs, feature(doc_cfg))]

pub use candle_attention_core::{
    AdditiveAttention, AdditiveAttentionConfig, AdditiveInput, AlibiConfig, AttentionCache, AttentionCacheConfig,
    AttentionFunction, AttentionInput, AttentionMask, AttentionOutput, AttentionStatistics, AttentionTemperature,
    Backend, BlockIndexerConfig, BlockScores, ChosenKeys, CompressedKeyAttention, CompressedKeyAttentionConfig,
    CompressedKeyCache, CompressedKeyIndexerConfig, CompressedKeyInput, ContentPositions, DisentangledConfig,
    FullyMaskedRows, IndexerConfig, IndexerQueries, KeyCompression, KeyLists, KeyRanges, KvCodeFormat, KvPool,
    KvPoolConfig, KvSharing, LatentScales, LayerOutput, LocalWindow, MultiHeadAttention, MultiHeadAttentionConfig,
    MultiHeadLatentAttention, MultiHeadLatentAttentionConfig, OutputLayout, OutputWithChoice, PackedSequences,
    PageCopy, PageTable, PagedSequences, PagedStep, PagedTokens, Plan, ProjectedMemory, RelativeBias,
    RelativeBiasConfig, RelativeEmbeddings, RopeAxes, RopeAxisLayout, RopeConfig, RopeScaling, RopeStyle,
    RotaryEmbedding, RowMoves, SdpaOptions, SequenceId, SharedPrefix, StateAfter, StatisticsOptions, StepStates,
    StepTokens, TokenTree, ValidLens, WeightLayout, Windows, alibi_slopes, cpu, masked_softmax, merge_attention, plan,
    plan_paged, scaled_dot_product_attention, scaled_dot_product_attention_paged,
    scaled_dot_product_attention_paged_with_lse, scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_with_lse, scaled_dot_product_attention_varlen_with_statistics,
    scaled_dot_product_attention_with_lse, scaled_dot_product_attention_with_statistics,
    scaled_dot_product_attention_with_weights,
};
#[cfg(feature = "linear-attention")]
pub use candle_attention_delta::{
    DeltaCache, DeltaInput, DeltaLayout, DeltaOptions, DeltaPool, GatedDeltaNet, GatedDeltaNetConfig, gated_delta_rule,
    gated_delta_rule_varlen,
};
pub use candle_attention_modules::{
    base::{HeadShard, OptionalRef, QuantizationFormat, QuantizedWeight, variables_without_gradient},
    gate::{GateActivation, GateLayout, GateScope, OutputGate},
    init::{self, TorchSeed},
    linear::{
        AdaptedLinear, PackedGatedLinear, PackedLinear, Projection, ProjectionModule, ProjectionModules, packed_linear,
        packed_linear_b, packed_linear_no_bias,
    },
    norm::{
        AllReduce, LayerNorm, OutputNorm, QkNorm, QkNormKind, QkNormScope, RmsNorm, layer_norm, layer_norm_no_bias,
        rms_norm, rms_norm_plus_one,
    },
};

#[cfg(feature = "hub")]
pub use candle_attention_checkpoints::hub;
#[cfg(feature = "checkpoints")]
pub use candle_attention_checkpoints::{hf, peft};
#[cfg(feature = "text")]
pub use candle_attention_frontend::{EmbeddingConfig, EmbeddingLayer, SimpleTokenizer, plot, text};

#[cfg(feature = "checkpoints")]
pub mod gguf {
    //! Attention layers and tokenizers of GGUF files, by llama.cpp's names and metadata.
    //!
    //! ```no_run
    //! use candle_attention::gguf;
    //! use candle_core::Device;
    //! # fn main() -> candle_core::Result<()> {
    //! let mut file = std::fs::File::open("model.gguf")?;
    //! let content = gguf::read(&mut file)?;
    //! let attention = gguf::load_attention(&content, &mut file, 0, &Device::Cpu)?;
    //! # Ok(()) }
    //! ```

    pub use candle_attention_checkpoints::gguf::*;
    #[cfg(feature = "text")]
    pub use candle_attention_frontend::text::gguf_tokenizer as tokenizer;
}

pub mod weights {
    //! Files of weights, and the names of attention weights in other libraries.
    //!
    //! A [`WeightLayout`] describes how a checkpoint names, packs and transposes the four projections. The loader
    //! turns every layout into the same four linear layers, so that a model has one kind of layer for all files:
    //!
    //! ```no_run
    //! use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout, weights};
    //! use candle_core::{DType, Device};
    //! # fn main() -> candle_core::Result<()> {
    //! let vb = weights::open("model.safetensors", DType::F32, &Device::Cpu)?.pp("encoder.attn");
    //! let layout = WeightLayout::detect(&vb)?;
    //! let cfg = MultiHeadAttentionConfig::new(768, 12).with_bias(true);
    //! let mha = MultiHeadAttention::load(&cfg, layout, vb)?;
    //! # Ok(()) }
    //! ```

    #[cfg(feature = "checkpoints")]
    pub use candle_attention_checkpoints::files::{Checkpoint, open, open_mmaped};
    pub use candle_attention_core::weights::{
        DenseNaming, Naming, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout,
    };
    pub use candle_attention_modules::base::{CodeValues, Float8, GroupNumbers, WholeTensors};
}

#[cfg(any(doc, doctest))]
pub mod guide {
    //! Guides whose code is tested. They exist in the documentation only.

    // The first definition of a link counts: rustdoc's is before the document's own.
    #[doc = "[jax]: crate::guide::jax"]
    #[doc = include_str!("../docs/pytorch.md")]
    pub mod pytorch {}

    #[doc = "[pytorch]: crate::guide::pytorch"]
    #[doc = include_str!("../docs/jax.md")]
    pub mod jax {}

    #[doc = include_str!("../docs/candle-models.md")]
    pub mod candle_models {}

    #[cfg(doctest)]
    #[doc = include_str!("../README.md")]
    pub mod readme {}
}
