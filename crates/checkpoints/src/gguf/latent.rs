//! Latent attention of one layer in a file: its config and its weights.

use std::collections::HashMap;
use std::io::{Read, Seek};

use candle_core::{DType, Result, Tensor, bail};
use candle_nn::VarBuilder;
use serde_json::Value;

use super::file::{File, FileWeight};
use super::layer::{LayerNames, Place};
use super::metadata::Metadata;
use crate::hf;
use candle_attention_core::internal::{LatentProjections, ProjectionShape};
use candle_attention_core::{MultiHeadLatentAttention, MultiHeadLatentAttentionConfig};
use candle_attention_modules::linear::PackedLinear;

/// Returns the config of a layer, without the factors of rotary frequencies that are tensors. `config` is that of the
/// metadata.
pub(super) fn latent_config(
    metadata: &Metadata,
    config: &Value,
    layer: usize,
) -> Result<MultiHeadLatentAttentionConfig> {
    let cfg = hf::latent_attention_config(config, layer).map_err(|error| metadata.explain(&error))?;
    match metadata.scale()? {
        Some(scale) => Ok(cfg.with_scale(scale)),
        None => Ok(cfg),
    }
}

/// The weights of one layer in a file.
pub(super) struct LatentWeights<'a, 'f, R> {
    file: &'a mut File<'f, R>,
    cfg: &'a MultiHeadLatentAttentionConfig,
    names: LayerNames,
}

impl<'a, 'f, R: Read + Seek> LatentWeights<'a, 'f, R> {
    pub fn new(file: &'a mut File<'f, R>, cfg: &'a MultiHeadLatentAttentionConfig, layer: usize) -> Self {
        Self { file, cfg, names: LayerNames::new(Place::Alone, layer) }
    }

    /// Loads the layer.
    ///
    /// # Errors
    /// For a missing or misshapen tensor.
    pub fn load(mut self) -> Result<MultiHeadLatentAttention> {
        let cfg = self.cfg;
        let h = cfg.num_heads();
        let embed_dim = cfg.embed_dim();
        let rank = cfg.kv_lora_rank();
        let query_width = h * cfg.head_dim();
        let mut norms = HashMap::new();
        let (compression, queries) = match cfg.q_lora_rank() {
            Some(q_rank) => {
                norms.insert("q_a_layernorm.weight".to_string(), self.norm("q_a_norm.weight", q_rank)?);
                (Some(self.linear("q_a", q_rank, embed_dim)?), self.linear("q_b", query_width, q_rank)?)
            }
            None => (None, self.linear("q", query_width, embed_dim)?),
        };
        norms.insert("kv_a_layernorm.weight".to_string(), self.norm("kv_a_norm.weight", rank)?);
        let projections = LatentProjections {
            compression,
            queries,
            down: self.linear("kv_a_mqa", rank + cfg.rope_head_dim(), embed_dim)?,
            up: self.keys_and_values()?,
            out: self.linear("output", embed_dim, h * cfg.value_head_dim())?,
        };
        let vb = VarBuilder::from_tensors(norms, DType::F32, self.file.device);
        MultiHeadLatentAttention::of_gguf(cfg, projections, vb)
    }

    /// Reads a projection, which stays quantised.
    fn linear(&mut self, part: &str, outputs: usize, inputs: usize) -> Result<PackedLinear> {
        self.weight(part, outputs, inputs)?.pack()
    }

    /// Reads a weight. Latent attention has no biases in llama.cpp.
    fn weight(&mut self, part: &str, outputs: usize, inputs: usize) -> Result<FileWeight> {
        let name = self.names.name(part);
        if self.file.has(&format!("{name}.bias")) {
            bail!("[gguf] {name}.bias is in the file, expected latent attention without biases")
        }
        self.file.weight(&name, ProjectionShape { outputs, inputs }, false)
    }

    fn norm(&mut self, part: &str, width: usize) -> Result<Tensor> {
        self.file.numbers(&self.names.name(part), &[width])
    }

    /// Reads the projection from latents to the keys and values of all heads, in f32: as one tensor, as older files
    /// have it, or as the transposed rows of keys and the rows of values. Queries absorb the rows of keys, of which the
    /// layer needs both directions.
    fn keys_and_values(&mut self) -> Result<PackedLinear> {
        let cfg = self.cfg;
        let h = cfg.num_heads();
        let rank = cfg.kv_lora_rank();
        let nope = cfg.nope_head_dim();
        let value = cfg.value_head_dim();
        let outputs = h * (nope + value);
        if !self.file.has(&self.names.name("k_b.weight")) {
            let together = self.weight("kv_b", outputs, rank)?.weight;
            return PackedLinear::new(&together.dequantize(self.file.device)?, None);
        }
        let keys = self.file.numbers(&self.names.name("k_b.weight"), &[h, rank, nope])?;
        let values = self.file.numbers(&self.names.name("v_b.weight"), &[h, value, rank])?;
        let rows = Tensor::cat(&[keys.transpose(1, 2)?.contiguous()?, values], 1)?;
        PackedLinear::new(&rows.reshape((outputs, rank))?, None)
    }
}
