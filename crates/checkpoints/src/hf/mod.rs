//! The attention of a Hugging Face checkpoint, from its own `config.json` and under its own names.
//!
//! ```no_run
//! use candle_attention::{hf, weights};
//! use candle_core::{DType, Device};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let json = serde_json::from_str(&std::fs::read_to_string("model/config.json")?)?;
//! let vb = weights::open("model/model.safetensors", DType::F32, &Device::Cpu)?;
//! let attention = hf::load_attention(&json, 0, vb)?;
//! # Ok(()) }
//! ```
//!
//! A layer computes what the model's own attention module computes, its output projection included, without the norm
//! before it and the residual after it. [`architectures`] returns the values of `model_type` that are known.
//! `docs/architectures.md` of the repository, which a census of transformers' models writes, lists the options of each
//! model, and why other models are refused.
//!
//! Missing fields have the defaults of the architecture's class in transformers, and the spellings of older versions
//! are read as transformers reads them. A model that transformers does not know by its `model_type` has no default
//! sizes: a missing number of heads is an error. For other models, a config that has a width and no number of heads is
//! logged once as a warning. Where versions of transformers compute different results, a layer computes what published
//! checkpoints were trained with; `docs/architectures.md` has the list. An option that changes the output and is not
//! supported is an error that names it.
//!
//! # Encoders
//!
//! The layers of BERT and similar models do not mask padding by themselves: pass the lengths of a batch to the call.
//!
//! ```
//! use candle_attention::{AttentionInput, AttentionMask, MultiHeadAttention, hf};
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use serde_json::json;
//! # fn main() -> candle_core::Result<()> {
//! let config = json!({"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4});
//! let layer = hf::load_attention(&config, 0, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
//! let xs = Tensor::zeros((2, 7, 64), DType::F32, &Device::Cpu)?;
//! let padding = AttentionMask::none().with_valid_lens(vec![7, 4]);
//! let ys = layer.forward_with(AttentionInput::new(&xs).with_mask(&padding))?;
//! # assert_eq!(ys.dims(), [2, 7, 64]);
//! # Ok(()) }
//! ```
//!
//! `attention.output.dense` is part of the layer, `attention.output.LayerNorm` and the residual are not.
//!
//! # Models of several parts
//!
//! CLIP, LLaVA and others have a config for each part. Pass the config of the part, with a builder at the checkpoint's
//! root:
//!
//! ```
//! use candle_attention::hf;
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use serde_json::json;
//! # fn main() -> candle_core::Result<()> {
//! let images = json!({"model_type": "clip_vision_model", "hidden_size": 64, "num_attention_heads": 4});
//! let config = json!({"model_type": "clip", "vision_config": images});
//! let layer = hf::load_attention(&config["vision_config"], 0, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
//! let ys = layer.forward(&Tensor::zeros((2, 50, 64), DType::F32, &Device::Cpu)?)?;
//! # assert_eq!(ys.dims(), [2, 50, 64]);
//! # Ok(()) }
//! ```
//!
//! # Images with rotary positions
//!
//! The layers of DINOv3, Pixtral and Qwen's images rotate patches by their rows and columns, which the caller passes
//! ([`AttentionInput::with_axis_positions`](candle_attention_core::AttentionInput::with_axis_positions)). The layers of
//! Qwen's texts rotate tokens by time, height and width. Several images in one row of tokens are [packed
//! sequences](candle_attention_core::AttentionInput::with_packed).
//!
//! ```
//! use candle_attention::{AttentionInput, hf};
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use serde_json::json;
//! # fn main() -> candle_core::Result<()> {
//! let config = json!({"model_type": "dinov3_vit", "hidden_size": 64, "num_attention_heads": 4, "num_register_tokens": 4});
//! let layer = hf::load_attention(&config, 0, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
//! // A class token and 4 registers are at 0, patches at 2π times their centres between -1 and 1.
//! let (rows, columns) = (2, 3);
//! let centre = |i: usize, n: usize| ((i as f64 + 0.5) / n as f64 * 2.0 - 1.0) * std::f64::consts::TAU;
//! let on = |axis: fn(usize) -> (usize, usize)| {
//!     (0..rows * columns).map(move |patch| axis(patch)).map(|(i, n)| centre(i, n))
//! };
//! let class = || std::iter::repeat_n(0.0, 5);
//! let positions = class().chain(on(|patch| (patch / 3, 2))).chain(class()).chain(on(|patch| (patch % 3, 3)));
//! let positions = Tensor::from_iter(positions, &Device::Cpu)?.reshape((2, 5 + rows * columns))?;
//! let xs = Tensor::zeros((1, 11, 64), DType::F32, &Device::Cpu)?;
//! let ys = layer.forward_with(AttentionInput::new(&xs).with_axis_positions(&positions))?;
//! # assert_eq!(ys.dims(), [1, 11, 64]);
//! # Ok(()) }
//! ```
//!
//! # Images in windows
//!
//! The layers of SAM and ViTDet attend to the patches of a window, which are rows of a batch
//! ([`Windows`](candle_attention_core::Windows)), and some layers attend to the whole image.
//!
//! ```
//! use candle_attention::{Windows, hf};
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use serde_json::json;
//! # fn main() -> candle_core::Result<()> {
//! let config = json!({
//!     "model_type": "sam_vision_model", "hidden_size": 64, "num_attention_heads": 4, "image_size": 320,
//!     "window_size": 14,
//! });
//! let layer = hf::load_attention(&config, 0, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
//! let windows = Windows::new([20, 20], 14)?;
//! let xs = Tensor::zeros((1, 20 * 20, 64), DType::F32, &Device::Cpu)?;
//! let ys = windows.join(&layer.forward(&windows.partition(&xs)?)?)?;
//! # assert_eq!(ys.dims(), [1, 400, 64]);
//! # Ok(()) }
//! ```
//!
//! # Encoders and decoders
//!
//! For a model that has both (BART, Whisper, T5), [`load_attention`] loads the encoder's layers. The decoder's layers
//! are loaded by [`load_decoder_attention`] and [`load_cross_attention`]. Cross-attention attends to the encoder's
//! outputs, which may be projected once for all tokens.
//!
//! ```
//! use candle_attention::{AttentionInput, hf};
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use serde_json::json;
//! # fn main() -> candle_core::Result<()> {
//! let config = json!({"model_type": "whisper", "d_model": 64, "decoder_attention_heads": 4});
//! let layer = hf::load_cross_attention(&config, 0, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
//! let encoded = Tensor::zeros((2, 50, 64), DType::F32, &Device::Cpu)?;
//! let memory = layer.project_memory(&encoded, &encoded)?;
//! let token = Tensor::zeros((2, 1, 64), DType::F32, &Device::Cpu)?;
//! let ys = layer.forward_with(AttentionInput::new(&token).with_memory(&memory))?;
//! # assert_eq!(ys.dims(), [2, 1, 64]);
//! # Ok(()) }
//! ```
//!
//! DETR and the Table Transformer add positions to the inputs of queries and keys, and not to the input of values:
//! `AttentionInput::new(&placed).with_key_value(&placed, &xs)`.
//!
//! # T5
//!
//! The layers of T5's encoder share one relative bias, which the checkpoint stores in the first layer. The layers of
//! the decoder share another ([`load_decoder_relative_bias`]). Each layer is loaded with its bias, so that it can be
//! called alone. A stack loads the bias once, so that it is computed once. MPNet stores its bias outside the layers,
//! and UMT5 has one in each layer.
//!
//! ```
//! use candle_attention::hf;
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use serde_json::json;
//! # fn main() -> candle_core::Result<()> {
//! let config = json!({"model_type": "t5", "d_model": 64, "num_heads": 4, "d_kv": 16, "num_layers": 3});
//! let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
//! let bias = hf::load_relative_bias(&config, vb.clone())?;
//! let layer = |i| hf::load_attention(&config, i, vb.clone())?.with_relative_bias(bias.clone());
//! let layers = (0..3).map(layer).collect::<candle_core::Result<Vec<_>>>()?;
//! let ys = layers[2].forward(&Tensor::zeros((2, 7, 64), DType::F32, &Device::Cpu)?)?;
//! # assert_eq!(ys.dims(), [2, 7, 64]);
//! # Ok(()) }
//! ```
//!
//! # Gemma 3n and Gemma 4
//!
//! The last layers of these models have no keys and values: [`kv_shared_layer`] returns the earlier layer whose keys
//! and values they reuse. In generation they read its
//! [cache](candle_attention_core::AttentionInput::with_shared_cache), and without a cache its [projected
//! memory](MultiHeadAttention::project_memory). Layers that attend to all keys may have wider heads, and use keys as
//! values ([`KvSharing`](candle_attention_core::KvSharing)).
//!
//! ```
//! use candle_attention::{AttentionCache, AttentionCacheConfig, AttentionInput, hf};
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use serde_json::json;
//! # fn main() -> candle_core::Result<()> {
//! let config = json!({
//!     "model_type": "gemma4_text", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "global_head_dim": 64,
//!     "num_hidden_layers": 4, "num_kv_shared_layers": 2, "attention_k_eq_v": true, "num_global_key_value_heads": 1,
//!     "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
//! });
//! let layer = |i| hf::load_attention(&config, i, VarBuilder::zeros(DType::F32, &Device::Cpu));
//! let layers = (0..4).map(layer).collect::<candle_core::Result<Vec<_>>>()?;
//! // Others read the caches of the first two, so these store all keys that a prompt's queries attend to.
//! let cache = |i: usize| AttentionCache::new(&AttentionCacheConfig::for_layer(layers[i].config()).with_shared(true));
//! let mut caches = (0..2).map(cache).collect::<candle_core::Result<Vec<_>>>()?;
//! for t in [7, 1, 1] {
//!     let mut xs = Tensor::randn(0f32, 1., (2, t, 64), &Device::Cpu)?;
//!     for (i, layer) in layers.iter().enumerate() {
//!         let input = AttentionInput::new(&xs).with_residual(&xs);
//!         xs = layer.forward_with(match hf::kv_shared_layer(&config, i)? {
//!             Some(earlier) => input.with_shared_cache(&caches[earlier]),
//!             None => input.with_cache(&mut caches[i]),
//!         })?;
//!     }
//! }
//! # Ok(()) }
//! ```
//!
//! # Swin
//!
//! Layers of Swin and Swin v2 are counted through all stages. The input of a layer is the windows that
//! [`Windows`](candle_attention_core::Windows) makes of an image. For every second layer the image is shifted, and the
//! mask of the shifted windows is passed to the call.
//!
//! # DeBERTa and conformers
//!
//! The layers of DeBERTa v2 and v3 share vectors of the distances between tokens, and each layer is loaded with them.
//! The layers of conformers (wav2vec 2.0's, Parakeet) use sines and cosines of distances instead
//! ([`ContentPositions`](candle_attention_core::ContentPositions)).
//!
//! ```
//! use candle_attention::hf;
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use serde_json::json;
//! # fn main() -> candle_core::Result<()> {
//! let config = json!({
//!     "model_type": "deberta-v2", "hidden_size": 64, "num_attention_heads": 4, "relative_attention": true,
//!     "pos_att_type": "p2c|c2p", "position_buckets": 256, "share_att_key": true, "norm_rel_ebd": "layer_norm"
//! });
//! let layer = hf::load_attention(&config, 0, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
//! let ys = layer.forward(&Tensor::zeros((2, 7, 64), DType::F32, &Device::Cpu)?)?;
//! # assert_eq!(ys.dims(), [2, 7, 64]);
//! # Ok(()) }
//! ```
//!
//! # DeepSeek
//!
//! DeepSeek V2 and V3, and models of other names with the same attention, have latent attention, which is another
//! layer: [`load_latent_attention`] and [`latent_attention_config`] replace [`load_attention`] and
//! [`attention_config`].
//!
//! ```
//! use candle_attention::hf;
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use serde_json::json;
//! # fn main() -> candle_core::Result<()> {
//! let config = json!({"model_type": "deepseek_v3", "hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 32});
//! let layer = hf::load_latent_attention(&config, 0, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
//! let ys = layer.forward(&Tensor::zeros((2, 7, 64), DType::F32, &Device::Cpu)?)?;
//! # assert_eq!(ys.dims(), [2, 7, 64]);
//! # Ok(()) }
//! ```
//!
//! # Linear attention
//!
//! Most layers of Qwen3-Next, Qwen3.5, Kimi Linear and OLMo Hybrid have linear attention by the gated delta rule, which
//! is another layer too: [`load_linear_attention`] and [`linear_attention_config`]. [`is_linear_attention`] tells which
//! layers have it. A call for a layer of the other kind is an error that names the right function.
//!
//! ```
//! use candle_attention::hf;
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use serde_json::json;
//! # fn main() -> candle_core::Result<()> {
//! let config = json!({"model_type": "qwen3_next", "hidden_size": 64, "num_attention_heads": 4});
//! let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
//! let layer = hf::load_linear_attention(&config, 0, vb.clone())?;
//! let ys = layer.forward(&Tensor::zeros((2, 7, 64), DType::F32, &Device::Cpu)?)?;
//! # assert_eq!(ys.dims(), [2, 7, 64]);
//! assert!(hf::load_attention(&config, 0, vb.clone()).is_err() && hf::load_attention(&config, 3, vb).is_ok());
//! # Ok(()) }
//! ```

mod columns;
mod entry;
mod families;
mod fields;
mod latent;
mod layer_kinds;
mod linear;
mod load;
mod names;
mod positions;
mod rope;
mod rules;
#[cfg(test)]
mod tests;
mod windows;

use candle_core::Result;
use candle_nn::VarBuilder;
use candle_nn::var_builder::ShardedVarBuilder;
use serde_json::Value;

use candle_attention_core::{
    MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig,
    RelativeBias,
};
use candle_attention_delta::{GatedDeltaNet, GatedDeltaNetConfig};
use candle_attention_modules::base::HeadShard;
use candle_attention_modules::base::whole;
use entry::Entry;

/// Returns the values of `model_type` that are known, in alphabetical order.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    entry::model_types()
}

/// Returns the config of one layer's attention, from a `config.json`. Layers count from 0. For a model with an encoder
/// and a decoder it is a layer of the encoder.
///
/// # Errors
/// For an architecture that is not known ([`architectures`] returns those that are), or of which only parts are known,
/// which the error names; for a layer that is not there; and for a field that is of the wrong type, contradicts others,
/// or is not supported, named with its value. Latent attention is for [`latent_attention_config`].
pub fn attention_config(json: &Value, layer: usize) -> Result<MultiHeadAttentionConfig> {
    Entry::of(json)?.attention(layer)
}

/// Loads one layer's attention, from a `config.json` and a builder at the model's root. Layers count from 0. For a
/// model with an encoder and a decoder it is a layer of the encoder.
///
/// The weights are found by the architecture's own names, in a checkpoint of the model alone or of the model below a
/// head (`layers.0.self_attn` or `model.layers.0.self_attn`).
///
/// # Errors
/// As [`attention_config`], for a quantised checkpoint (except float8, which [`weights::open`](crate::files::open)
/// reads with its scales), and for a missing or misshapen tensor, named with both shapes. Latent attention is for
/// [`load_latent_attention`].
pub fn load_attention(json: &Value, layer: usize, vb: VarBuilder) -> Result<MultiHeadAttention> {
    Entry::of(json)?.load(layer, vb)
}

/// Returns the earlier layer whose keys and values a layer reuses; `None` if the layer projects them itself
/// ([`KvSharing::EarlierLayer`](candle_attention_core::KvSharing)).
///
/// # Errors
/// As [`attention_config`].
pub fn kv_shared_layer(json: &Value, layer: usize) -> Result<Option<usize>> {
    Entry::of(json)?.kv_shared_layer(layer)
}

/// Returns the config of a layer's self-attention in the decoder of a model with an encoder.
///
/// # Errors
/// As [`attention_config`], and for an architecture without an encoder and a decoder.
pub fn decoder_attention_config(json: &Value, layer: usize) -> Result<MultiHeadAttentionConfig> {
    Entry::of(json)?.decoder()?.attention(layer)
}

/// Loads a layer's self-attention in the decoder of a model with an encoder.
///
/// # Errors
/// As [`load_attention`], and for an architecture without an encoder and a decoder.
pub fn load_decoder_attention(json: &Value, layer: usize, vb: VarBuilder) -> Result<MultiHeadAttention> {
    Entry::of(json)?.decoder()?.load(layer, vb)
}

/// Returns the config of the cross-attention of a decoder's layer to an encoder's outputs.
///
/// # Errors
/// As [`attention_config`], and for an architecture without cross-attention.
pub fn cross_attention_config(json: &Value, layer: usize) -> Result<MultiHeadAttentionConfig> {
    Entry::of(json)?.cross()?.attention(layer)
}

/// Loads the cross-attention of a decoder's layer to an encoder's outputs, which
/// [`project_memory`](MultiHeadAttention::project_memory) projects once.
///
/// # Errors
/// As [`load_attention`], and for an architecture without cross-attention.
pub fn load_cross_attention(json: &Value, layer: usize, vb: VarBuilder) -> Result<MultiHeadAttention> {
    Entry::of(json)?.cross()?.load(layer, vb)
}

/// Loads one rank's heads of a layer's attention, from a `config.json` and Candle's sharded builder at the model's
/// root. Layers count from 0. [`MultiHeadAttention::load_shard`] describes the result.
///
/// # Errors
/// As [`load_attention`] and [`MultiHeadAttention::load_shard`].
pub fn load_attention_shard(
    json: &Value,
    layer: usize,
    shard: HeadShard,
    vb: &ShardedVarBuilder<'static>,
) -> Result<MultiHeadAttention> {
    let load = |cfg: &_, layout, module: &str| MultiHeadAttention::load_shard(cfg, layout, shard, &vb.pp(module));
    Entry::of(json)?.load_with(layer, &whole(vb), load, |bias| bias.shard(shard))
}

/// Returns the config of one layer's latent attention: DeepSeek V2 and V3, and models with the same attention.
///
/// # Errors
/// As [`attention_config`], and for an architecture with another kind of attention.
pub fn latent_attention_config(json: &Value, layer: usize) -> Result<MultiHeadLatentAttentionConfig> {
    Entry::of(json)?.latent_attention(layer)
}

/// Loads one layer's latent attention: DeepSeek V2 and V3, and models with the same attention.
///
/// # Errors
/// As [`load_attention`], and for an architecture with another kind of attention.
pub fn load_latent_attention(json: &Value, layer: usize, vb: VarBuilder) -> Result<MultiHeadLatentAttention> {
    let load = |cfg: &_, module: &str| MultiHeadLatentAttention::new(cfg, vb.pp(module));
    Entry::of(json)?.load_latent_with(layer, &vb, load)
}

/// Loads one rank's heads of a layer's latent attention. [`MultiHeadLatentAttention::load_shard`] describes the result.
///
/// # Errors
/// As [`load_latent_attention`] and [`MultiHeadLatentAttention::load_shard`].
pub fn load_latent_attention_shard(
    json: &Value,
    layer: usize,
    shard: HeadShard,
    vb: &ShardedVarBuilder<'static>,
) -> Result<MultiHeadLatentAttention> {
    let load = |cfg: &_, module: &str| MultiHeadLatentAttention::load_shard(cfg, shard, &vb.pp(module));
    Entry::of(json)?.load_latent_with(layer, &whole(vb), load)
}

/// Returns whether a layer has linear attention by the gated delta rule, and is loaded by [`load_linear_attention`].
/// Otherwise it has softmax attention.
///
/// # Errors
/// For an unknown architecture, a layer that the model does not have, and a field that does not tell the kind of layer.
pub fn is_linear_attention(json: &Value, layer: usize) -> Result<bool> {
    Entry::of(json)?.is_linear(layer)
}

/// Returns the config of one layer's linear attention by the gated delta rule: most layers of Qwen3-Next, Qwen3.5, Kimi
/// Linear, OLMo Hybrid and others. `layer_types`, or another field of the model, names these layers.
///
/// # Errors
/// As [`attention_config`], and for a layer of softmax attention.
pub fn linear_attention_config(json: &Value, layer: usize) -> Result<GatedDeltaNetConfig> {
    Entry::of(json)?.linear_attention(layer)
}

/// Loads a layer of linear attention by the gated delta rule.
///
/// # Errors
/// As [`load_attention`], and for a layer of softmax attention.
pub fn load_linear_attention(json: &Value, layer: usize, vb: VarBuilder) -> Result<GatedDeltaNet> {
    let load = |cfg: &_, layout, module: &str| GatedDeltaNet::load(cfg, layout, vb.pp(module));
    Entry::of(json)?.load_linear_with(layer, &vb, load)
}

/// Loads one rank's heads of a layer of linear attention. [`GatedDeltaNet::load_shard`] describes the result.
///
/// # Errors
/// As [`load_linear_attention`] and [`GatedDeltaNet::load_shard`].
pub fn load_linear_attention_shard(
    json: &Value,
    layer: usize,
    shard: HeadShard,
    vb: &ShardedVarBuilder<'static>,
) -> Result<GatedDeltaNet> {
    let load = |cfg: &_, layout, module: &str| GatedDeltaNet::load_shard(cfg, layout, shard, &vb.pp(module));
    Entry::of(json)?.load_linear_with(layer, &whole(vb), load)
}

/// Loads the relative bias that all layers of a stack share, from a `config.json` and a builder at the model's root.
/// For a model with an encoder and a decoder it is that of the encoder.
///
/// [`load_attention`] loads a bias with every layer. Pass [clones of this one](MultiHeadAttention::with_relative_bias)
/// to all layers instead, and its biases are computed once in each pass.
///
/// # Errors
/// As [`load_attention`], and for an architecture without one.
pub fn load_relative_bias(json: &Value, vb: VarBuilder) -> Result<RelativeBias> {
    Entry::of(json)?.load_relative_bias(&vb)
}

/// Loads the relative bias of the decoder of a model with an encoder.
///
/// # Errors
/// As [`load_relative_bias`], and for an architecture without an encoder and a decoder.
pub fn load_decoder_relative_bias(json: &Value, vb: VarBuilder) -> Result<RelativeBias> {
    Entry::of(json)?.decoder()?.load_relative_bias(&vb)
}
