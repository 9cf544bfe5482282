#![doc = include_str!("guide.md")]

mod columns;
mod compressed;
mod entry;
mod entry_options;
mod families;
mod fields;
mod latent;
mod layer_kinds;
mod linear;
mod load;
mod mlx;
mod names;
mod positions;
mod refused;
mod rope;
mod rules;
mod shapes;
#[cfg(test)]
mod tests;
mod windows;

pub(crate) use columns::columns;

use candle_core::Result;
use candle_nn::VarBuilder;
use serde_json::Value;

use candle_attention_core::{
    CompressedKeyAttention, CompressedKeyAttentionConfig, MultiHeadAttention, MultiHeadAttentionConfig,
    MultiHeadLatentAttention, MultiHeadLatentAttentionConfig, RelativeBias, WeightLayout,
};
use candle_attention_delta::{GatedDeltaNet, GatedDeltaNetConfig};
use candle_attention_modules::base::{HeadShard, WholeTensors};
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
#[doc(alias = "from_pretrained")]
pub fn load_attention(json: &Value, layer: usize, vb: VarBuilder) -> Result<MultiHeadAttention> {
    Entry::of(json)?.load(layer, vb)
}

/// Returns layouts and names of the modules that may have a layer's attention. Modules that the builder has come
/// first.
pub(crate) fn attention_modules(json: &Value, layer: usize, vb: &VarBuilder) -> Result<Vec<(WeightLayout, String)>> {
    let modules = Entry::of(json)?.attention_modules(layer, vb)?;
    Ok(modules.into_iter().map(|candidate| (candidate.layout, candidate.module)).collect())
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

/// Loads one rank's heads of a layer's attention, from a `config.json` and a builder at the model's root: Candle's
/// sharded builder, or one of whole tensors. Layers count from 0. [`MultiHeadAttention::load_shard`] describes the
/// result.
///
/// # Errors
/// As [`load_attention`] and [`MultiHeadAttention::load_shard`].
pub fn load_attention_shard(
    json: &Value,
    layer: usize,
    shard: HeadShard,
    vb: &impl WholeTensors,
) -> Result<MultiHeadAttention> {
    let entry = Entry::of(json)?;
    let whole = vb.whole();
    entry.refuse_conversion_of_mlx(&whole)?;
    let whole = entry.with_own_names(entry.with_norms_as_in_pytorch(whole));
    let load = |cfg: &_, layout, module: &str| MultiHeadAttention::load_shard(cfg, layout, shard, &whole.pp(module));
    entry.load_with(layer, &whole, load, |bias| bias.shard(shard))
}

/// Returns the names of a model's attention besides the self-attention of its layers, in the order of a forward pass:
/// of other stacks of layers, or from one input to another. Most models have none. The decoder of a model with an
/// encoder has other functions ([`load_decoder_attention`], [`load_cross_attention`]).
///
/// # Errors
/// For an architecture that is not known.
pub fn attention_names(json: &Value) -> Result<Vec<&'static str>> {
    Ok(Entry::of(json)?.attention_names())
}

/// Returns the config of a layer's attention of one of the [`attention_names`]. If the model has the module once, its
/// layer is 0.
///
/// # Errors
/// As [`attention_config`], and for another name.
pub fn named_attention_config(json: &Value, name: &str, layer: usize) -> Result<MultiHeadAttentionConfig> {
    Entry::of(json)?.named(name)?.attention(layer)
}

/// Loads a layer's attention of one of the [`attention_names`].
///
/// # Errors
/// As [`load_attention`], and for another name.
pub fn load_named_attention(json: &Value, name: &str, layer: usize, vb: VarBuilder) -> Result<MultiHeadAttention> {
    Entry::of(json)?.named(name)?.load(layer, vb)
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
    vb: &impl WholeTensors,
) -> Result<MultiHeadLatentAttention> {
    let whole = vb.whole();
    let load = |cfg: &_, module: &str| MultiHeadLatentAttention::load_shard(cfg, shard, &whole.pp(module));
    Entry::of(json)?.load_latent_with(layer, &whole, load)
}

/// Returns the config of one layer's attention to compressed keys: DeepSeek V4.
///
/// # Errors
/// As [`attention_config`], and for an architecture with another kind of attention.
pub fn compressed_key_attention_config(json: &Value, layer: usize) -> Result<CompressedKeyAttentionConfig> {
    Entry::of(json)?.compressed_key_attention(layer)
}

/// Loads one layer's attention to compressed keys: DeepSeek V4, by the names of transformers or as it is published.
///
/// # Errors
/// As [`load_attention`], and for an architecture with another kind of attention.
pub fn load_compressed_key_attention(json: &Value, layer: usize, vb: VarBuilder) -> Result<CompressedKeyAttention> {
    Entry::of(json)?.load_compressed_key(layer, &vb)
}

/// Returns the names that some model types have for the sinks of a layer.
pub(crate) fn other_names_of_sinks() -> impl Iterator<Item = &'static str> {
    families::families().filter_map(|family| family.sinks_name)
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
    let entry = Entry::of(json)?;
    let vb = entry.with_norms_as_in_pytorch(vb);
    let load = |cfg: &_, layout, module: &str| GatedDeltaNet::load(cfg, layout, vb.pp(module));
    entry.load_linear_with(layer, &vb, load)
}

/// Loads one rank's heads of a layer of linear attention. [`GatedDeltaNet::load_shard`] describes the result.
///
/// # Errors
/// As [`load_linear_attention`] and [`GatedDeltaNet::load_shard`].
pub fn load_linear_attention_shard(
    json: &Value,
    layer: usize,
    shard: HeadShard,
    vb: &impl WholeTensors,
) -> Result<GatedDeltaNet> {
    let entry = Entry::of(json)?;
    let whole = vb.whole();
    entry.refuse_conversion_of_mlx(&whole)?;
    let whole = entry.with_norms_as_in_pytorch(whole);
    let load = |cfg: &_, layout, module: &str| GatedDeltaNet::load_shard(cfg, layout, shard, &whole.pp(module));
    entry.load_linear_with(layer, &whole, load)
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
