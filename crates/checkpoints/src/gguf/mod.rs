//! The attention of a GGUF file, by llama.cpp's names and metadata.
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
//!
//! The metadata become the fields of a `config.json`, which [`hf`] reads: a layer computes what the
//! architecture of the same name computes there, and [`architectures`] names those that are known. Three things differ,
//! since llama.cpp's converter changes weights: where it reorders the rows of q and k, rotary pairs are neighbours
//! ([`RopeStyle::Interleaved`]); Gemma's norms have 1 added to their weights; packed projections have their rows by
//! part.
//!
//! Inputs and outputs are f32, as in llama.cpp. Weights are [`PackedLinear::from_qtensor`]: f32, f16 and bf16 are
//! packed as they are, Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 as codes of 4 or 8 bits, which loses nothing, and K-quants (Q2_K
//! to Q6_K) are multiplied by Candle's `QMatMul`, whose inputs are rounded to 8 bits.

mod file;
mod metadata;

pub use file::{LinearShard, read};

use std::collections::HashMap;
use std::io::{Read, Seek};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use serde_json::Value;

use crate::hf;
use candle_attention_core::internal::projection_shape;
use candle_attention_core::{MultiHeadAttention, MultiHeadAttentionConfig, RopeConfig, RopeScaling, RopeStyle};
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::base::{HeadShard, Heads};
use candle_attention_modules::linear::{Outputs, PackedLinear, PackedProjection, Projection, Projections};
use candle_attention_modules::norm::{QkNorm, QkNormKind};
use file::{File, Weight};
use metadata::{ARCHITECTURES, Metadata, ROPE_FACTORS};

/// The values of `general.architecture` that are known, in alphabetical order.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|architecture| architecture.name)
}

/// The `config.json` of a file's model, as far as its metadata tell it: what a model reads beside its attention.
///
/// # Errors
/// For an architecture that is not known, naming those that are, and for metadata that are missing, of the wrong type
/// or not supported.
pub fn hf_config(content: &Content) -> Result<Value> {
    Metadata::of(content)?.config()
}

/// The config of the first layer's attention. Where layers differ, as Gemma's do, each layer has
/// [its own](MultiHeadAttention::config).
///
/// # Errors
/// As [`hf_config`] and [`hf::attention_config`], and where tensors hold a part of the config (the factors of rotary
/// frequencies of Llama 3.1 and Phi 3), which [`load_attention`] reads.
pub fn attention_config(content: &Content) -> Result<MultiHeadAttentionConfig> {
    let metadata = Metadata::of(content)?;
    let cfg = layer_config(&metadata, 0)?;
    if let Some(name) = ROPE_FACTORS.iter().find(|name| content.tensor_infos.contains_key(**name)) {
        bail!("[gguf] {name} is a part of the config: expected a call of `load_attention`, whose layer has the config")
    }
    cfg.validate().map_err(|error| metadata.explain(&error))?;
    Ok(cfg)
}

/// One layer's attention; layers count from 0. Inputs are f32.
///
/// # Errors
/// As [`hf_config`] and [`hf::attention_config`], for a missing or misshapen tensor, named with both shapes, and if the
/// file cannot be read.
pub fn load_attention<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    layer: usize,
    device: &Device,
) -> Result<MultiHeadAttention> {
    load(&mut File { content, reader, device }, layer, HeadShard::WHOLE)
}

/// One process's heads of a layer's attention, as [`MultiHeadAttention::load_shard`] has them: parts of the quantised
/// weights as they are.
///
/// # Errors
/// As [`load_attention`] and [`MultiHeadAttention::load_shard`], and for heads whose inputs of the output projection
/// are no whole blocks of its type.
pub fn load_attention_shard<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    layer: usize,
    shard: HeadShard,
    device: &Device,
) -> Result<MultiHeadAttention> {
    load(&mut File { content, reader, device }, layer, shard)
}

fn load<R: Read + Seek>(file: &mut File<R>, layer: usize, shard: HeadShard) -> Result<MultiHeadAttention> {
    let device = file.device;
    let metadata = Metadata::of(file.content)?;
    let cfg = file.with_rope_factors(&metadata, layer_config(&metadata, layer)?)?;
    cfg.validate().map_err(|error| metadata.explain(&error))?;

    let places = [Projection::Query, Projection::Key, Projection::Value, Projection::Output];
    let [q, k, v, o] = places.map(|place| projection_shape(&cfg, place));
    let at = |name: &str| format!("blk.{layer}.{name}");
    let biases = cfg.qkv_bias();
    // The rows of this process's heads, and its columns of the output projection.
    let _ = cfg.for_shard(shard)?;
    let is_part = shard != HeadShard::WHOLE;
    let own = |of, width| shard.range(of, [cfg.num_heads(), cfg.num_kv_heads()], width);
    let rows = [own(Heads::Query, q.0), own(Heads::Key, k.0), own(Heads::Key, v.0)];
    let parts = [0, 1, 2].map(|n| Outputs { count: rows[n].len(), has_bias: biases[n] });
    let qkv = if file.has(&at("attn_qkv.weight")) {
        let mut joint = file.weight(&at("attn_qkv"), (q.0 + k.0 + v.0, q.1), biases.contains(&true))?;
        if is_part {
            let firsts = [0, q.0, q.0 + k.0];
            let rows = rows.iter().zip(firsts).map(|(rows, first)| first + rows.start..first + rows.end).collect();
            joint = joint.part("attn_qkv", &LinearShard::Outputs(rows))?;
        }
        PackedProjection::split(joint.pack()?, parts)
    } else {
        let mut weight = |name, shape, bias, own: &Range<usize>| {
            let whole = file.weight(&at(name), shape, bias)?;
            if is_part { whole.part(name, &LinearShard::Outputs(vec![own.clone()])) } else { Ok(whole) }
        };
        let all = [
            weight("attn_q", q, biases[0], &rows[0])?,
            weight("attn_k", k, biases[1], &rows[1])?,
            weight("attn_v", v, biases[2], &rows[2])?,
        ];
        let kind = |own: &Weight| (own.weight.dtype(), own.weight.shape().dims()[1]);
        if all.iter().all(|own| kind(own) == kind(&all[0])) {
            PackedProjection::split(Weight::concat(&all)?.pack()?, parts)
        } else {
            all.into_iter().map(Weight::columns).collect::<Result<Vec<_>>>()?.concat()
        }
    };
    let mut output = file.weight(&at("attn_output"), o, cfg.out_bias())?;
    if is_part {
        let part = LinearShard::Inputs { range: own(Heads::Query, o.1), has_bias: shard.rank() == 0 };
        output = output.part(&at("attn_output"), &part)?;
    }
    let projections = Projections::of_columns([qkv, output.columns()?].concat(), device);

    let mut parameters = HashMap::new();
    for (own, name, wanted) in [
        ("q_norm.weight", "attn_q_norm.weight", cfg.qk_norm().is_some()),
        ("k_norm.weight", "attn_k_norm.weight", cfg.qk_norm().is_some()),
        ("q_norm.bias", "attn_q_norm.bias", false),
        ("k_norm.bias", "attn_k_norm.bias", false),
        ("sinks", "attn_sinks.weight", cfg.sinks()),
    ] {
        if wanted || file.has(&at(name)) {
            parameters.insert(own.to_string(), file.tensor(&at(name))?.dequantize(device)?);
        }
    }
    let vb = VarBuilder::from_tensors(parameters, DType::F32, device);
    MultiHeadAttention::of_gguf(&cfg, projections, vb, shard)
}

/// A linear layer of any type, `name.weight` (out, in) and `name.bias` if the file has it, as [`load_attention`] holds
/// its own: (.., in) gives (.., out), in f32.
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

/// A part of the layer that [`load_linear`] gives.
///
/// # Errors
/// As [`load_linear`], and for a part that the layer does not have.
pub fn load_linear_part<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    name: &str,
    part: &LinearShard,
    device: &Device,
) -> Result<PackedLinear> {
    File { content, reader, device }.linear(name)?.part(name, part)?.pack()
}

/// A builder of all tensors of a file, by llama.cpp's names, dequantised as they are read: for what a model has beside
/// its attention.
pub fn var_builder<R: Read + Seek + Send + 'static>(
    content: Arc<Content>,
    reader: R,
    dtype: DType,
    device: &Device,
) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(Tensors { content, reader: reader.into() }), dtype, device.clone())
}

struct Tensors<R> {
    content: Arc<Content>,
    reader: Mutex<R>,
}

impl<R: Read + Seek + Send> SimpleBackend for Tensors<R> {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.content.tensor_infos.get(name) {
            Some(info) if info.shape != shape => bail!("[gguf] {name} has shape {:?}, expected {shape:?}", info.shape),
            _ => self.get_unchecked(name, dtype, device),
        }
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let Ok(mut reader) = self.reader.lock() else { bail!("[gguf] {name}: another thread failed to read the file") };
        let mut file = File { content: &self.content, reader: &mut *reader, device };
        file.tensor(name)?.dequantize(device)?.to_dtype(dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }
}

/// What the metadata, the architecture and the presence of tensors tell of a layer.
fn layer_config(metadata: &Metadata, layer: usize) -> Result<MultiHeadAttentionConfig> {
    let cfg = hf::attention_config(&metadata.config()?, layer).map_err(|error| metadata.explain(&error))?;
    let has = |name: &str| metadata.content.tensor_infos.contains_key(&format!("blk.{layer}.{name}.bias"));
    let [q, k, v] = cfg.qkv_bias();
    let (packed, out) = (has("attn_qkv"), cfg.out_bias() || has("attn_output"));
    let mut cfg = cfg
        .with_q_bias(q || packed || has("attn_q"))
        .with_k_bias(k || packed || has("attn_k"))
        .with_v_bias(v || packed || has("attn_v"))
        .with_out_bias(out);
    if let Some(norm @ QkNorm { kind: QkNormKind::RmsPlusOne, .. }) = cfg.qk_norm() {
        cfg = cfg.with_qk_norm(QkNorm { kind: QkNormKind::Rms, ..norm });
    }
    if let Some(rope) = cfg.rope() {
        let style = if metadata.architecture.reorders_rotary { RopeStyle::Interleaved } else { rope.style() };
        let mut rope = RopeConfig::new(rope.base()).with_style(style).with_scaling(rope.scaling().clone());
        if let Some(r) = metadata.size("rope.dimension_count")?.filter(|&r| r != cfg.head_dim()) {
            rope = rope.with_rotary_dim(r);
        }
        cfg = cfg.with_rope(rope);
    }
    if let Some(scale) = metadata.scale()? {
        cfg = cfg.with_scale(scale);
    }
    match metadata.size("attention.value_length")? {
        Some(width) if width != cfg.head_dim() => Ok(cfg.with_value_head_dim(width)),
        _ => Ok(cfg),
    }
}

impl<R: Read + Seek> File<'_, R> {
    /// The config with the factors of rotary frequencies that the file has.
    fn with_rope_factors(
        &mut self,
        metadata: &Metadata,
        cfg: MultiHeadAttentionConfig,
    ) -> Result<MultiHeadAttentionConfig> {
        let Some(rope) = cfg.rope() else { return Ok(cfg) };
        let [of_all, short, long] = ROPE_FACTORS;
        let names = match (self.has(of_all), self.has(short) || self.has(long)) {
            (true, false) => [of_all, of_all],
            (false, true) => [short, long],
            (true, true) => return metadata.fail(format!("{of_all} and {long} are both in the file, expected one")),
            (false, false) => return Ok(cfg),
        };
        if *rope.scaling() != RopeScaling::None {
            return metadata.fail(format!("{} is in the file, but the metadata scale frequencies too", names[0]));
        }
        let mut factors = |name| to_vec::<f64>(&self.tensor(name)?.dequantize(&Device::Cpu)?);
        let context = match metadata.size("rope.scaling.original_context_length")? {
            None => metadata.size("context_length")?,
            original => original,
        };
        let scaling = RopeScaling::LongRope {
            short_factor: factors(names[0])?,
            long_factor: factors(names[1])?,
            original_context: context.unwrap_or(u32::MAX as usize),
            factor: None,
            attention_factor: Some(metadata.attention_factor()?),
        };
        let rope = rope.clone().with_scaling(scaling);
        Ok(cfg.with_rope(rope))
    }
}
