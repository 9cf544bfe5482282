//! Linear attention of one layer in a file: its config, its weights, and llama.cpp's order of value heads.

use std::collections::HashMap;
use std::io::{Read, Seek};
use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};
use candle_nn::VarBuilder;
use serde_json::Value;

use super::file::{File, FileWeight, FusedWeight, LinearShard};
use super::metadata::Metadata;
use crate::hf;
use candle_attention_core::internal::ProjectionShape;
use candle_attention_delta::internal::DeltaWeights;
use candle_attention_delta::{GatedDeltaNet, GatedDeltaNetConfig};
use candle_attention_modules::base::QueryHeadOrder;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::linear::{Outputs, PackedLinear, PackedProjection};

/// Returns the config of a layer. `config` is that of the metadata.
pub(super) fn linear_config(metadata: &Metadata, config: &Value, layer: usize) -> Result<GatedDeltaNetConfig> {
    hf::linear_attention_config(config, layer).map_err(|error| metadata.explain(&error))
}

/// The weights of one layer in a file.
pub(super) struct DeltaNetWeights<'a, 'f, R> {
    file: &'a mut File<'f, R>,
    cfg: &'a GatedDeltaNetConfig,
    layer: usize,
    /// The order of value heads in the file.
    order: QueryHeadOrder,
}

impl<'a, 'f, R: Read + Seek> DeltaNetWeights<'a, 'f, R> {
    pub fn new(file: &'a mut File<'f, R>, cfg: &'a GatedDeltaNetConfig, layer: usize) -> Self {
        let num_heads = cfg.num_value_heads();
        let num_kv_heads = cfg.num_key_heads();
        // llama.cpp's converter reorders the heads of the models whose betas have a separate tensor.
        let order = if file.has(&format!("blk.{layer}.ssm_beta.weight")) && num_heads > num_kv_heads {
            QueryHeadOrder::Cyclic { num_heads, num_kv_heads }
        } else {
            QueryHeadOrder::Grouped
        };
        Self { file, cfg, layer, order }
    }

    /// Loads the layer.
    ///
    /// # Errors
    /// For a missing or misshapen tensor.
    pub fn load(mut self) -> Result<GatedDeltaNet> {
        let cfg = self.cfg;
        let width = cfg.num_value_heads() * cfg.value_head_dim();
        let has_ranks = cfg.gate_rank().is_some();
        let projections = if has_ranks { self.separate_projections()? } else { self.fused_projections()? };
        let weights = DeltaWeights {
            projections,
            gate_up: self.up("ssm_g_b", width, cfg.gate_rank())?,
            decay_up: self.up("ssm_f_b", cfg.num_decays(), cfg.decay_rank())?,
            out: self.weight(if has_ranks { "attn_output" } else { "ssm_out" }, cfg.embed_dim(), width)?.pack()?,
            out_order: self.order,
        };
        let mut parameters = self.convolutions()?;
        let norm = self.tensor("ssm_norm.weight", &[cfg.value_head_dim()])?;
        for name in ["norm.weight", "o_norm.weight"] {
            parameters.insert(name.to_string(), norm.clone());
        }
        parameters.insert("A_log".to_string(), self.log_rates()?);
        let biases = self.tensor("ssm_dt.bias", &[cfg.num_decays()])?;
        parameters.insert("dt_bias".to_string(), self.order.reorder_to_grouped(&biases, 0)?);
        GatedDeltaNet::of_gguf(cfg, weights, VarBuilder::from_tensors(parameters, DType::F32, self.file.device))
    }

    fn name(&self, part: &str) -> String {
        format!("blk.{}.{part}", self.layer)
    }

    fn weight(&mut self, part: &str, outputs: usize, inputs: usize) -> Result<FileWeight> {
        self.file.weight(&self.name(part), ProjectionShape { outputs, inputs }, false)
    }

    fn tensor(&mut self, part: &str, shape: &[usize]) -> Result<Tensor> {
        self.file.numbers(&self.name(part), shape)
    }

    /// Reads the projection from a compressed input of width `rank`, if there is a rank.
    fn up(&mut self, part: &str, outputs: usize, rank: Option<usize>) -> Result<Option<PackedLinear>> {
        rank.map(|rank| self.weight(part, outputs, rank)?.pack()).transpose()
    }

    /// Reads projections with a tensor each: Kimi Linear's.
    fn separate_projections(&mut self) -> Result<Vec<PackedProjection>> {
        let cfg = self.cfg;
        let key_rows = cfg.num_key_heads() * cfg.key_head_dim();
        let value_rows = cfg.num_value_heads() * cfg.value_head_dim();
        let mut all = Vec::new();
        for (part, count) in [
            ("attn_q", key_rows),
            ("attn_k", key_rows),
            ("attn_v", value_rows),
            ("ssm_g_a", cfg.gate_rank().unwrap_or(value_rows)),
            ("ssm_beta", cfg.num_value_heads()),
            ("ssm_f_a", cfg.decay_rank().unwrap_or(cfg.num_decays())),
        ] {
            all.push(fused(self.weight(part, count, cfg.embed_dim())?, &[count]));
        }
        FusedWeight::pack_joined(all)
    }

    /// Reads projections that share tensors, as in Qwen3-Next and Qwen3.5.
    fn fused_projections(&mut self) -> Result<Vec<PackedProjection>> {
        let cfg = self.cfg;
        let embed_dim = cfg.embed_dim();
        let h = cfg.num_value_heads();
        let key_rows = cfg.num_key_heads() * cfg.key_head_dim();
        let value_rows = h * cfg.value_head_dim();
        let mut all = Vec::new();
        if self.file.has(&self.name("ssm_in.weight")) {
            // Older files have the rows of a key head, of its values and of its gates one after the other.
            let whole = self.weight("ssm_in", 2 * key_rows + 2 * value_rows, embed_dim)?;
            let sizes = [key_rows, key_rows, value_rows, value_rows];
            all.push(fused(self.by_key_head("ssm_in", &whole, &sizes)?, &sizes));
        } else {
            let whole = self.weight("attn_qkv", 2 * key_rows + value_rows, embed_dim)?;
            let value_ranges = self.value_rows(2 * key_rows, cfg.value_head_dim());
            let ranges = std::iter::once(0..2 * key_rows).chain(value_ranges).collect();
            all.push(fused(self.rows("attn_qkv", &whole, ranges)?, &[key_rows, key_rows, value_rows]));
            let gate = self.weight("attn_gate", value_rows, embed_dim)?;
            let gate_ranges = self.value_rows(0, cfg.value_head_dim());
            all.push(fused(self.rows("attn_gate", &gate, gate_ranges)?, &[value_rows]));
        }
        if self.file.has(&self.name("ssm_ba.weight")) {
            let whole = self.weight("ssm_ba", 2 * h, embed_dim)?;
            all.push(fused(self.by_key_head("ssm_ba", &whole, &[h, h])?, &[h, h]));
        } else {
            for part in ["ssm_beta", "ssm_alpha"] {
                let whole = self.weight(part, h, embed_dim)?;
                let ranges = self.value_rows(0, 1);
                all.push(fused(self.rows(part, &whole, ranges)?, &[h]));
            }
        }
        FusedWeight::pack_joined(all)
    }

    /// Returns the rows of all value heads, of this width and from row `first` on, in this crate's order.
    fn value_rows(&self, first: usize, width: usize) -> Vec<Range<usize>> {
        let h = self.cfg.num_value_heads();
        let QueryHeadOrder::Cyclic { num_kv_heads, .. } = self.order else {
            return std::iter::once(first..first + h * width).collect();
        };
        let heads = (0..num_kv_heads).flat_map(|key_head| (key_head..h).step_by(num_kv_heads));
        heads.map(|head| first + head * width..first + (head + 1) * width).collect()
    }

    /// Returns rows of a weight in this order.
    fn rows(&self, part: &str, whole: &FileWeight, rows: Vec<Range<usize>>) -> Result<FileWeight> {
        whole.part(&self.name(part), &LinearShard::Outputs(rows))
    }

    /// Returns the rows of projections one after the other. The weight has, for each key head, its rows of the first
    /// projection, then its rows of the next.
    fn by_key_head(&self, part: &str, whole: &FileWeight, sizes: &[usize]) -> Result<FileWeight> {
        let key_heads = self.cfg.num_key_heads();
        let group = sizes.iter().sum::<usize>() / key_heads;
        let mut rows = Vec::new();
        let mut first = 0;
        for size in sizes {
            let own = size / key_heads;
            rows.extend((0..key_heads).map(|head| head * group + first..head * group + first + own));
            first += own;
        }
        self.rows(part, whole, rows)
    }

    /// Reads the weights (C, 1, K) of the convolutions.
    fn convolutions(&mut self) -> Result<HashMap<String, Tensor>> {
        let cfg = self.cfg;
        let taps = cfg.conv_kernel_dim();
        let key_rows = cfg.num_key_heads() * cfg.key_head_dim();
        let value_rows = cfg.num_value_heads() * cfg.value_head_dim();
        let mut all = HashMap::new();
        if self.file.has(&self.name("ssm_conv1d.weight")) {
            let weights = self.tensor("ssm_conv1d.weight", &[2 * key_rows + value_rows, taps])?;
            let values = self.order.reorder_to_grouped(&weights.narrow(0, 2 * key_rows, value_rows)?, 0)?;
            let weights = Tensor::cat(&[weights.narrow(0, 0, 2 * key_rows)?, values], 0)?;
            all.insert("conv1d.weight".to_string(), weights.unsqueeze(1)?);
            return Ok(all);
        }
        for (letter, rows) in [("q", key_rows), ("k", key_rows), ("v", value_rows)] {
            let part = format!("ssm_conv1d_{letter}.weight");
            let weights = self.tensor(&part, &[1, rows, 1, taps])?;
            all.insert(format!("{letter}_conv1d.weight"), weights.reshape((rows, 1, taps))?);
        }
        Ok(all)
    }

    /// Reads `A_log` (H,). The file has -e^A_log.
    fn log_rates(&mut self) -> Result<Tensor> {
        let name = self.name("ssm_a");
        let h = self.cfg.num_value_heads();
        let stored = self.file.tensor(&name)?.dequantize(self.file.device)?;
        if stored.elem_count() != h {
            bail!("[gguf] {name} has shape {:?}, expected one number for each of {h} heads", stored.shape())
        }
        let rates = stored.flatten_all()?;
        if let Some(rate) = to_vec::<f32>(&rates)?.into_iter().find(|rate| *rate >= 0.0 || rate.is_nan()) {
            bail!("[gguf] {name} has {rate}, expected numbers below 0")
        }
        self.order.reorder_to_grouped(&rates.neg()?.log()?, 0)
    }
}

/// Returns a weight with the rows of projections of these sizes.
fn fused(weight: FileWeight, sizes: &[usize]) -> FusedWeight {
    FusedWeight { weight, outputs: sizes.iter().map(|&count| Outputs { count, has_bias: false }).collect() }
}
