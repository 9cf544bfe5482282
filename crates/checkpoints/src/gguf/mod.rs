//! Attention from GGUF files, by llama.cpp's names and metadata.
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
//! The metadata become the fields of a `config.json`, which [`hf`] reads: a layer computes the same as the architecture
//! of that name in [`hf`]. [`architectures`] returns the known ones. Three things differ, since llama.cpp's converter
//! changes weights: where it reorders the rows of q and k, rotary pairs are neighbours ([`RopeStyle::Interleaved`]);
//! the weights of Gemma's norms include the 1 that the model adds; packed projections have their rows by part.
//!
//! Inputs and outputs are f32, as in llama.cpp. Weights are packed by [`PackedLinear::from_qtensor`]: f32, f16 and bf16
//! unchanged, Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 as codes of 4 or 8 bits, without loss. K-quants (Q2_K to Q6_K) are
//! multiplied by Candle's `QMatMul`, whose inputs are rounded to 8 bits.

mod architectures;
mod config;
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
use architectures::{ARCHITECTURES, metadata_of};
use candle_attention_core::internal::{ProjectionShape, projection_shape};
use candle_attention_core::{MultiHeadAttention, MultiHeadAttentionConfig, RopeConfig, RopeScaling, RopeStyle};
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::base::{HeadCounts, HeadShard, Heads};
use candle_attention_modules::linear::{Outputs, PackedLinear, PackedProjection, Projection, Projections};
use candle_attention_modules::norm::{QkNorm, QkNormKind};
use config::{ROPE_FACTORS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT, ROPE_FREQS};
use file::{File, Weight};
use metadata::Metadata;

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

/// Returns the config of the first layer's attention. Where layers differ, as in Gemma, a loaded layer has
/// [its own](MultiHeadAttention::config).
///
/// # Errors
/// As [`hf_config`] and [`hf::attention_config`], and where a part of the config is in tensors (the factors of rotary
/// frequencies of Llama 3.1 and Phi 3), which [`load_attention`] reads.
pub fn attention_config(content: &Content) -> Result<MultiHeadAttentionConfig> {
    let metadata = metadata_of(content)?;
    let cfg = layer_config(&metadata, 0)?;
    if let Some(name) = ROPE_FACTORS.iter().find(|name| content.tensor_infos.contains_key(**name)) {
        bail!("[gguf] {name} is a part of the config: expected a call of `load_attention`, whose layer has the config")
    }
    cfg.validate().map_err(|error| metadata.explain(&error))?;
    Ok(cfg)
}

/// Loads one layer's attention. Layers count from 0. Inputs are f32.
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
    load(&mut File { content, reader, device }, layer, shard)
}

fn load<R: Read + Seek>(file: &mut File<R>, layer: usize, shard: HeadShard) -> Result<MultiHeadAttention> {
    let device = file.device;
    let metadata = metadata_of(file.content)?;
    let cfg = file.with_rope_factors(&metadata, layer_config(&metadata, layer)?)?;
    cfg.validate().map_err(|error| metadata.explain(&error))?;
    // Refuses options that a shard cannot have.
    let _ = cfg.for_shard(shard)?;
    let mut weights = LayerWeights { file, cfg: &cfg, layer, shard };
    let mut columns = weights.queries_keys_values()?;
    columns.extend(weights.output()?.columns()?);
    let vb = VarBuilder::from_tensors(weights.parameters()?, DType::F32, device);
    MultiHeadAttention::of_gguf(&cfg, Projections::of_columns(columns, device), vb, shard)
}

/// The weights of one layer in a file, of which a shard is read.
struct LayerWeights<'a, 'f, R> {
    file: &'a mut File<'f, R>,
    /// The config of the whole layer.
    cfg: &'a MultiHeadAttentionConfig,
    layer: usize,
    shard: HeadShard,
}

/// A projection of queries, keys or values.
struct Input {
    /// llama.cpp's name.
    name: &'static str,
    /// The shape of the whole projection.
    shape: ProjectionShape,
    has_bias: bool,
    /// The rows of this rank's heads.
    rows: Range<usize>,
}

impl<R: Read + Seek> LayerWeights<'_, '_, R> {
    fn name(&self, part: &str) -> String {
        format!("blk.{}.{part}", self.layer)
    }

    /// Returns the entries of this rank's heads among `len`.
    fn own_range(&self, heads: Heads, len: usize) -> Range<usize> {
        let counts = HeadCounts { query: self.cfg.num_heads(), key: self.cfg.num_kv_heads() };
        self.shard.range(heads, counts, len)
    }

    fn inputs(&self) -> [Input; 3] {
        let input = |name, projection, heads, has_bias| {
            let shape = projection_shape(self.cfg, projection);
            Input { name, shape, has_bias, rows: self.own_range(heads, shape.outputs) }
        };
        [
            input("attn_q", Projection::Query, Heads::Query, self.cfg.q_bias()),
            input("attn_k", Projection::Key, Heads::Key, self.cfg.k_bias()),
            input("attn_v", Projection::Value, Heads::Key, self.cfg.v_bias()),
        ]
    }

    /// Reads the projections of queries, keys and values, from one tensor or from three.
    fn queries_keys_values(&mut self) -> Result<Vec<PackedProjection>> {
        let inputs = self.inputs();
        let parts = inputs.each_ref().map(|input| Outputs { count: input.rows.len(), has_bias: input.has_bias });
        if self.file.has(&self.name("attn_qkv.weight")) {
            return Ok(PackedProjection::split(self.packed_inputs(&inputs)?.pack()?, parts));
        }
        let mut weights = Vec::new();
        for input in &inputs {
            let whole = self.file.weight(&self.name(input.name), input.shape, input.has_bias)?;
            weights.push(self.outputs(input.name, whole, vec![input.rows.clone()])?);
        }
        let kind = |weight: &Weight| (weight.weight.dtype(), weight.weight.shape().dims()[1]);
        if weights.iter().all(|weight| kind(weight) == kind(&weights[0])) {
            return Ok(PackedProjection::split(Weight::concat(&weights)?.pack()?, parts));
        }
        let mut columns = Vec::new();
        for weight in weights {
            columns.extend(weight.columns()?);
        }
        Ok(columns)
    }

    /// Reads the tensor that has the rows of queries, then keys, then values.
    fn packed_inputs(&mut self, inputs: &[Input; 3]) -> Result<Weight> {
        let mut rows = Vec::new();
        let mut first = 0;
        for input in inputs {
            rows.push(first + input.rows.start..first + input.rows.end);
            first += input.shape.outputs;
        }
        let has_bias = inputs.iter().any(|input| input.has_bias);
        let shape = ProjectionShape { outputs: first, inputs: inputs[0].shape.inputs };
        let whole = self.file.weight(&self.name("attn_qkv"), shape, has_bias)?;
        self.outputs("attn_qkv", whole, rows)
    }

    /// Returns this rank's outputs of a weight.
    fn outputs(&self, name: &str, whole: Weight, rows: Vec<Range<usize>>) -> Result<Weight> {
        if self.shard == HeadShard::WHOLE { Ok(whole) } else { whole.part(name, &LinearShard::Outputs(rows)) }
    }

    /// Reads this rank's inputs of the output projection.
    fn output(&mut self) -> Result<Weight> {
        let name = self.name("attn_output");
        let shape = projection_shape(self.cfg, Projection::Output);
        let whole = self.file.weight(&name, shape, self.cfg.out_bias())?;
        if self.shard == HeadShard::WHOLE {
            return Ok(whole);
        }
        let range = self.own_range(Heads::Query, shape.inputs);
        whole.part(&name, &LinearShard::Inputs { range, has_bias: self.shard.rank() == 0 })
    }

    /// Reads the norms of queries and keys and the sinks, by this crate's names. Norms with a bias, which the config
    /// does not have, are read too: the layer refuses them.
    fn parameters(&mut self) -> Result<HashMap<String, Tensor>> {
        let has_norms = self.cfg.qk_norm().is_some();
        let mut parameters = HashMap::new();
        for (parameter, name, is_expected) in [
            ("q_norm.weight", "attn_q_norm.weight", has_norms),
            ("k_norm.weight", "attn_k_norm.weight", has_norms),
            ("q_norm.bias", "attn_q_norm.bias", false),
            ("k_norm.bias", "attn_k_norm.bias", false),
            ("sinks", "attn_sinks.weight", self.cfg.sinks()),
        ] {
            let name = self.name(name);
            if is_expected || self.file.has(&name) {
                parameters.insert(parameter.to_string(), self.file.tensor(&name)?.dequantize(self.file.device)?);
            }
        }
        Ok(parameters)
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

/// Returns a builder of all tensors of a file, by llama.cpp's names, which dequantises them as they are read. It is for
/// the parts of a model that are not attention.
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

/// Returns the config of a layer that the metadata, the architecture and the names of tensors tell.
fn layer_config(metadata: &Metadata, layer: usize) -> Result<MultiHeadAttentionConfig> {
    let cfg = hf::attention_config(&metadata.config()?, layer).map_err(|error| metadata.explain(&error))?;
    let has = |name: &str| metadata.content.tensor_infos.contains_key(&format!("blk.{layer}.{name}.bias"));
    let has_packed_bias = has("attn_qkv");
    let q_bias = cfg.q_bias() || has_packed_bias || has("attn_q");
    let k_bias = cfg.k_bias() || has_packed_bias || has("attn_k");
    let v_bias = cfg.v_bias() || has_packed_bias || has("attn_v");
    let out_bias = cfg.out_bias() || has("attn_output");
    let mut cfg = cfg.with_q_bias(q_bias).with_k_bias(k_bias).with_v_bias(v_bias).with_out_bias(out_bias);
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
    /// Adds the factors of rotary frequencies that the file has to a config.
    fn with_rope_factors(
        &mut self,
        metadata: &Metadata,
        cfg: MultiHeadAttentionConfig,
    ) -> Result<MultiHeadAttentionConfig> {
        let Some(rope) = cfg.rope() else { return Ok(cfg) };
        let has_one_list = self.has(ROPE_FREQS);
        let has_two_lists = self.has(ROPE_FACTORS_SHORT) || self.has(ROPE_FACTORS_LONG);
        if has_one_list && has_two_lists {
            return metadata.fail(format!("{ROPE_FREQS} and {ROPE_FACTORS_LONG} are both in the file, expected one"));
        }
        if !has_one_list && !has_two_lists {
            return Ok(cfg);
        }
        let short = if has_one_list { ROPE_FREQS } else { ROPE_FACTORS_SHORT };
        let long = if has_one_list { ROPE_FREQS } else { ROPE_FACTORS_LONG };
        if *rope.scaling() != RopeScaling::None {
            return metadata.fail(format!("{short} is in the file, but the metadata scale frequencies too"));
        }
        let mut factors = |name| to_vec::<f64>(&self.tensor(name)?.dequantize(&Device::Cpu)?);
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
        let rope = rope.clone().with_scaling(scaling);
        Ok(cfg.with_rope(rope))
    }
}
