//! Attention from GGUF files, by llama.cpp's names and metadata.
//!
//! ```no_run
//! use candle_attention::gguf;
//! use candle_core::Device;
//! # fn main() -> candle_core::Result<()> {
//! let mut file = gguf::open("model.gguf")?;
//! let attention = gguf::load_attention(&file.content, &mut file.reader, 0, &Device::Cpu)?;
//! # Ok(()) }
//! ```
//!
//! [`open`] reads all parts of a file that has several. [`read`] reads the header of any reader, such as a file in
//! memory.
//!
//! The metadata become the fields of a `config.json`, which [`hf`] reads: a layer computes the same as the architecture
//! of that name in [`hf`]. [`architectures`] returns the known ones. Three things differ, since llama.cpp's converter
//! changes weights: where it reorders the rows of q and k, rotary pairs are neighbours ([`RopeStyle::Interleaved`]);
//! the weights of Gemma's norms include the 1 that the model adds; packed projections have their rows by part.
//!
//! Inputs and outputs are f32, as in llama.cpp. Weights are packed by [`PackedLinear::from_qtensor`]: f32, f16 and bf16
//! unchanged, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and K-quants (Q2_K to Q6_K) as codes of 4 or 8 bits, without loss. On CUDA,
//! codes are stored in their own bits; on Metal, K-quants are multiplied by Candle's `QMatMul`. The types that Candle
//! does not have (IQ1 to IQ4, TQ1_0, TQ2_0, MXFP4, NVFP4, Q1_0) are packed as codes of 4 bits on a CPU and on CUDA, and
//! dequantised on Metal. A tensor of a type that is not known is an error when it is loaded.

mod architectures;
mod builder;
mod config;
mod decoders;
mod file;
mod header;
mod hybrid;
mod latent;
mod layer;
mod linear;
mod metadata;
mod parts;
mod refused;
mod stored;
mod t5;

pub use builder::var_builder;
pub use file::LinearShard;
pub use header::{TensorInfo, read, tensor_info, tensor_names};
pub use parts::{GgufFile, PartsReader, open};

use std::io::{Read, Seek};

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Result, bail};
use serde_json::Value;

use crate::hf;
use architectures::{ARCHITECTURES, metadata_of};
use candle_attention_core::{
    MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig, RopeConfig,
    RopeScaling, RopeStyle,
};
use candle_attention_delta::{GatedDeltaNet, GatedDeltaNetConfig};
use candle_attention_modules::base::HeadShard;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::linear::PackedLinear;
use candle_attention_modules::norm::{QkNorm, QkNormKind};
use config::{ROPE_FACTORS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT, ROPE_FREQS};
use file::File;
use header::has_tensor;
use latent::{LatentWeights, latent_config};
use layer::{LayerNames, LayerWeights, Place};
use linear::{DeltaNetWeights, linear_config};
use metadata::Metadata;
use t5::load_relative_bias;

/// Returns the values of `general.architecture` that are known, in alphabetical order.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|architecture| architecture.name)
}

/// Returns the `config.json` of a file's model, with the fields that the metadata tell, for attention and for the rest
/// of the model.
///
/// # Errors
/// For an architecture that is not known, naming those that are, and for metadata that are missing, of the wrong type
/// or not supported.
pub fn hf_config(content: &Content) -> Result<Value> {
    metadata_of(content)?.config()
}

/// Returns the config of the attention of the first layer with softmax attention; in a model with an encoder and a
/// decoder, of the encoder. Where layers differ, as in Gemma, a loaded layer has
/// [its own](MultiHeadAttention::config).
///
/// # Errors
/// As [`hf_config`] and [`hf::attention_config`], and where a part of the config is in tensors (the factors of rotary
/// frequencies of Llama 3.1 and Phi 3), which [`load_attention`] reads.
pub fn attention_config(content: &Content) -> Result<MultiHeadAttentionConfig> {
    let metadata = metadata_of(content)?;
    let place = encoder_or_alone(content);
    let cfg = first_config(&metadata, |config, layer| layer_config(&metadata, config, place, layer))?;
    refuse_rope_factors(content, "load_attention")?;
    cfg.validate().map_err(|error| metadata.explain(&error))?;
    Ok(cfg)
}

/// Returns the config of the first layer with latent attention, in the files of DeepSeek V2 and V3 and of models with
/// the same attention.
///
/// # Errors
/// As [`attention_config`], and for an architecture with another kind of attention.
pub fn latent_attention_config(content: &Content) -> Result<MultiHeadLatentAttentionConfig> {
    let metadata = metadata_of(content)?;
    let cfg = first_config(&metadata, |config, layer| latent_config(&metadata, config, layer))?;
    refuse_rope_factors(content, "load_latent_attention")?;
    Ok(cfg)
}

/// Returns the config of the first layer with linear attention by the gated delta rule.
///
/// # Errors
/// As [`attention_config`], and for an architecture without linear attention.
pub fn linear_attention_config(content: &Content) -> Result<GatedDeltaNetConfig> {
    let metadata = metadata_of(content)?;
    first_config(&metadata, |config, layer| linear_config(&metadata, config, layer))
}

/// Returns whether a layer has linear attention by the gated delta rule, and is loaded by [`load_linear_attention`].
///
/// # Errors
/// As [`hf_config`], and for a layer that the model does not have.
pub fn is_linear_attention(content: &Content, layer: usize) -> Result<bool> {
    let metadata = metadata_of(content)?;
    hf::is_linear_attention(&metadata.config()?, layer).map_err(|error| metadata.explain(&error))
}

/// Loads one layer's attention; in a model with an encoder and a decoder, of the encoder. Layers count from 0. Inputs
/// are f32.
///
/// # Errors
/// As [`hf_config`] and [`hf::attention_config`], for a missing or misshapen tensor, named with both shapes, and if the
/// file cannot be read. Latent attention is for [`load_latent_attention`], linear attention for
/// [`load_linear_attention`].
pub fn load_attention<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    layer: usize,
    device: &Device,
) -> Result<MultiHeadAttention> {
    load(&mut File { content, reader, device }, encoder_or_alone(content), layer, HeadShard::WHOLE)
}

/// Loads one rank's heads of a layer's attention, as [`MultiHeadAttention::load_shard`] does. Weights stay quantised.
///
/// # Errors
/// As [`load_attention`] and [`MultiHeadAttention::load_shard`], and for heads whose inputs of the output projection
/// are not whole blocks of its type.
pub fn load_attention_shard<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    layer: usize,
    shard: HeadShard,
    device: &Device,
) -> Result<MultiHeadAttention> {
    load(&mut File { content, reader, device }, encoder_or_alone(content), layer, shard)
}

/// Loads a layer's self-attention in the decoder of a model with an encoder.
///
/// # Errors
/// As [`load_attention`], and for an architecture without an encoder and a decoder.
pub fn load_decoder_attention<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    layer: usize,
    device: &Device,
) -> Result<MultiHeadAttention> {
    load(&mut File { content, reader, device }, Place::Decoder, layer, HeadShard::WHOLE)
}

/// Loads the cross-attention of a decoder's layer to an encoder's outputs.
///
/// # Errors
/// As [`load_attention`], and for an architecture without an encoder and a decoder.
pub fn load_cross_attention<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    layer: usize,
    device: &Device,
) -> Result<MultiHeadAttention> {
    load(&mut File { content, reader, device }, Place::Cross, layer, HeadShard::WHOLE)
}

/// Loads one layer's latent attention. Layers count from 0. Inputs are f32. All weights but those from latents to keys
/// and values stay quantised.
///
/// # Errors
/// As [`load_attention`], and for an architecture with another kind of attention.
pub fn load_latent_attention<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    layer: usize,
    device: &Device,
) -> Result<MultiHeadLatentAttention> {
    let mut file = File { content, reader, device };
    let metadata = metadata_of(content)?;
    let cfg = latent_config(&metadata, &metadata.config()?, layer)?;
    let rope = rope_with_factors(&mut file, &metadata, cfg.rope())?;
    let cfg = cfg.with_rope(rope);
    cfg.validate().map_err(|error| metadata.explain(&error))?;
    LatentWeights::new(&mut file, &cfg, layer).load()
}

/// Loads a layer of linear attention by the gated delta rule. Layers count from 0. Inputs are f32. The projections stay
/// quantised.
///
/// # Errors
/// As [`load_attention`], and for a layer of softmax attention.
pub fn load_linear_attention<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    layer: usize,
    device: &Device,
) -> Result<GatedDeltaNet> {
    let metadata = metadata_of(content)?;
    let cfg = linear_config(&metadata, &metadata.config()?, layer)?;
    DeltaNetWeights::new(&mut File { content, reader, device }, &cfg, layer).load()
}

fn load<R: Read + Seek>(
    file: &mut File<R>,
    place: Place,
    layer: usize,
    shard: HeadShard,
) -> Result<MultiHeadAttention> {
    let metadata = metadata_of(file.content)?;
    let mut cfg = layer_config(&metadata, &metadata.config()?, place, layer)?;
    let has_factors = cfg.window().is_none() || !metadata.architecture.factors_without_window;
    if let Some(rope) = cfg.rope().filter(|_| has_factors) {
        let rope = rope_with_factors(file, &metadata, rope)?;
        cfg = cfg.with_rope(rope);
    }
    cfg.validate().map_err(|error| metadata.explain(&error))?;
    let attention = LayerWeights { file, cfg: &cfg, names: LayerNames::new(place, layer), shard }.load()?;
    match load_relative_bias(file, &cfg, place, layer, shard)? {
        Some(bias) => attention.with_relative_bias(bias),
        None => Ok(attention),
    }
}

/// Returns the place of the layers that [`load_attention`] loads.
fn encoder_or_alone(content: &Content) -> Place {
    let has_encoder = tensor_names(content).any(|name| name.starts_with("enc.blk."));
    if has_encoder { Place::Encoder } else { Place::Alone }
}

/// Returns the config of the first layer that has one.
fn first_config<T>(metadata: &Metadata, layer_config: impl Fn(&Value, usize) -> Result<T>) -> Result<T> {
    let config = metadata.config()?;
    let first = layer_config(&config, 0);
    if first.is_ok() || !metadata.architecture.is_hybrid {
        return first;
    }
    (1..metadata.num_hidden_layers()?).find_map(|layer| layer_config(&config, layer).ok()).map_or(first, Ok)
}

fn refuse_rope_factors(content: &Content, call: &str) -> Result<()> {
    match ROPE_FACTORS.iter().find(|name| has_tensor(content, name)) {
        Some(name) => {
            bail!("[gguf] {name} is a part of the config: expected a call of `{call}`, whose layer has the config")
        }
        None => Ok(()),
    }
}

/// Loads a linear layer of any type, `name.weight` (out, in) and `name.bias` if the file has it. Inputs (.., in) and
/// outputs (.., out) are f32.
///
/// # Errors
/// For a missing or misshapen tensor, and if the file cannot be read.
pub fn load_linear<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    name: &str,
    device: &Device,
) -> Result<PackedLinear> {
    File { content, reader, device }.linear(name)?.pack()
}

/// Loads the shard of a linear layer that one rank of several has.
///
/// # Errors
/// As [`load_linear`], and for a shard that the layer does not have.
pub fn load_linear_part<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    name: &str,
    part: &LinearShard,
    device: &Device,
) -> Result<PackedLinear> {
    File { content, reader, device }.linear(name)?.part(name, part)?.pack()
}

/// Loads the linear layer of one expert, from a tensor `name.weight` (experts, out, in) of any type, and its bias from
/// `name.bias` (experts, out) if the file has it. Inputs (.., in) and outputs (.., out) are f32.
///
/// # Errors
/// For a missing or misshapen tensor, for an expert that the tensor does not have, and if the file cannot be read.
pub fn load_expert<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    name: &str,
    expert: usize,
    device: &Device,
) -> Result<PackedLinear> {
    File { content, reader, device }.expert(name, expert)?.pack()
}

/// Loads the shard of an expert's linear layer that one rank of several has.
///
/// # Errors
/// As [`load_expert`], and for a shard that the layer does not have.
pub fn load_expert_part<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    name: &str,
    expert: usize,
    part: &LinearShard,
    device: &Device,
) -> Result<PackedLinear> {
    File { content, reader, device }.expert(name, expert)?.part(name, part)?.pack()
}

/// Returns the config of a layer that the metadata, the architecture and the names of tensors tell. `config` is that of
/// the metadata.
fn layer_config(metadata: &Metadata, config: &Value, place: Place, layer: usize) -> Result<MultiHeadAttentionConfig> {
    let cfg = match place {
        Place::Alone | Place::Encoder => hf::attention_config(config, layer),
        Place::Decoder => hf::decoder_attention_config(config, layer),
        Place::Cross => hf::cross_attention_config(config, layer),
    };
    let cfg = cfg.map_err(|error| metadata.explain(&error))?;
    let names = LayerNames::new(place, layer);
    let has_bias = |name: String| has_tensor(metadata.content, &format!("{name}.bias"));
    let has_packed_bias = has_bias(names.name("qkv"));
    let q_bias = cfg.q_bias() || has_packed_bias || has_bias(names.name("q"));
    let k_bias = cfg.k_bias() || has_packed_bias || has_bias(names.name("k"));
    let v_bias = cfg.v_bias() || has_packed_bias || has_bias(names.name("v"));
    let out_bias = cfg.out_bias() || has_bias(names.output());
    let mut cfg = cfg.with_q_bias(q_bias).with_k_bias(k_bias).with_v_bias(v_bias).with_out_bias(out_bias);
    if let Some(norm @ QkNorm { kind: QkNormKind::RmsPlusOne, .. }) = cfg.qk_norm() {
        cfg = cfg.with_qk_norm(QkNorm { kind: QkNormKind::Rms, ..norm });
    }
    if let Some(rope) = cfg.rope() {
        let style = if metadata.architecture.reorders_rotary { RopeStyle::Interleaved } else { rope.style() };
        let mut own_rope = RopeConfig::new(rope.base()).with_style(style).with_scaling(rope.scaling().clone());
        if let Some(axes) = rope.axes() {
            own_rope = own_rope.with_axes(axes.clone());
        }
        let width = metadata.of_windows("rope.dimension_count", cfg.window().is_some())?;
        if let Some(rotated) = width.filter(|&rotated| rotated != cfg.head_dim()) {
            own_rope = own_rope.with_rotary_dim(rotated);
        }
        cfg = cfg.with_rope(own_rope);
    }
    if let Some(scale) = metadata.scale()? {
        cfg = cfg.with_scale(scale);
    }
    match metadata.of_windows("attention.value_length", cfg.window().is_some())? {
        Some(width) if width != cfg.head_dim() => Ok(cfg.with_value_head_dim(width)),
        _ => Ok(cfg),
    }
}

/// Returns rotary positions with the factors of frequencies that the file has.
fn rope_with_factors<R: Read + Seek>(file: &mut File<R>, metadata: &Metadata, rope: &RopeConfig) -> Result<RopeConfig> {
    let has_one_list = file.has(ROPE_FREQS);
    let has_two_lists = file.has(ROPE_FACTORS_SHORT) || file.has(ROPE_FACTORS_LONG);
    if has_one_list && has_two_lists {
        return metadata.fail(format!("{ROPE_FREQS} and {ROPE_FACTORS_LONG} are both in the file, expected one"));
    }
    if !has_one_list && !has_two_lists {
        return Ok(rope.clone());
    }
    let short = if has_one_list { ROPE_FREQS } else { ROPE_FACTORS_SHORT };
    let long = if has_one_list { ROPE_FREQS } else { ROPE_FACTORS_LONG };
    if *rope.scaling() != RopeScaling::None {
        return metadata.fail(format!("{short} is in the file, but the metadata scale frequencies too"));
    }
    let mut factors = |name| to_vec::<f64>(&file.tensor(name)?.dequantize(&Device::Cpu)?);
    let context = match metadata.size("rope.scaling.original_context_length")? {
        None => metadata.size("context_length")?,
        original => original,
    };
    let scaling = RopeScaling::LongRope {
        short_factor: factors(short)?,
        long_factor: factors(long)?,
        original_context: context.unwrap_or(u32::MAX as usize),
        factor: None,
        attention_factor: Some(metadata.attention_factor()?),
    };
    Ok(rope.clone().with_scaling(scaling))
}
