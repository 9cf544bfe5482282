//! A GGUF file, in one or more parts, whose weights keep their quantised types.

use std::path::Path;
use std::sync::Arc;

use candle_attention::gguf::{self, LinearShard, PartsReader};
use candle_attention::{HeadShard, PackedLinear, hf};
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Result, bail};
use serde_json::Value;

use super::attention::Attention;
use super::family::size;
use super::weights::{Sharding, Weights, shard_range};

pub struct Gguf {
    reader: PartsReader,
    pub content: Arc<Content>,
    device: Device,
}

impl Gguf {
    pub fn open(path: &Path, device: &Device) -> Result<Self> {
        let file = gguf::open(path)?;
        Ok(Self { reader: file.reader, content: file.content.into(), device: device.clone() })
    }

    fn reader(&self) -> Result<PartsReader> {
        self.reader.reopen()
    }

    pub fn weights(&self, dtype: DType) -> Result<Weights<'_>> {
        let vb = gguf::var_builder(self.content.clone(), self.reader()?, dtype, &self.device);
        Ok(Weights { vb, gguf: Some(self), shards: None })
    }

    /// Returns whether a layer has experts.
    pub fn has_experts(&self) -> bool {
        gguf::tensor_names(&self.content).any(|name| name.ends_with(".ffn_gate_inp.weight"))
    }

    /// Loads a layer's attention of the kind in the config, or the heads of one rank.
    pub fn attention(&self, json: &Value, layer: usize, shard: Option<HeadShard>) -> Result<Attention> {
        let mut reader = self.reader()?;
        let (content, device) = (&self.content, &self.device);
        let is_linear = hf::is_linear_attention(json, layer)?;
        let is_latent = size(json, "kv_lora_rank").is_some();
        Ok(match shard {
            Some(_) if is_linear || is_latent => bail!(
                "[causal_lm] latent and linear attention of GGUF files are loaded by one process, expected no ranks"
            ),
            Some(shard) => {
                Attention::MultiHead(gguf::load_attention_shard(content, &mut reader, layer, shard, device)?)
            }
            None if is_linear => Attention::Linear(gguf::load_linear_attention(content, &mut reader, layer, device)?),
            None if is_latent => {
                let latent = gguf::load_latent_attention(content, &mut reader, layer, device)?;
                Attention::Latent(latent, None)
            }
            None => Attention::MultiHead(gguf::load_attention(content, &mut reader, layer, device)?),
        })
    }

    /// Returns the number of tokens that have an embedding.
    pub fn vocabulary(&self) -> Option<usize> {
        gguf::tensor_info(&self.content, "token_embd.weight").and_then(|info| info.dims.first().copied())
    }

    /// Loads a linear layer, or the shard of one rank.
    pub fn linear(&self, name: &str, shard: Option<HeadShard>, sharding: Option<Sharding>) -> Result<PackedLinear> {
        let mut reader = self.reader()?;
        let Some(part) = self.part(name, shard, sharding) else {
            return gguf::load_linear(&self.content, &mut reader, name, &self.device);
        };
        gguf::load_linear_part(&self.content, &mut reader, name, &part, &self.device)
    }

    /// Loads the linear layer of one expert, or the shard of one rank.
    pub fn expert(
        &self,
        name: &str,
        expert: usize,
        shard: Option<HeadShard>,
        sharding: Sharding,
    ) -> Result<PackedLinear> {
        let mut reader = self.reader()?;
        let Some(part) = self.part(name, shard, Some(sharding)) else {
            return gguf::load_expert(&self.content, &mut reader, name, expert, &self.device);
        };
        gguf::load_expert_part(&self.content, &mut reader, name, expert, &part, &self.device)
    }

    /// Returns the part of a linear layer, or of each expert's, that one rank has; `None` for the whole layer.
    fn part(&self, name: &str, shard: Option<HeadShard>, sharding: Option<Sharding>) -> Option<LinearShard> {
        let info = gguf::tensor_info(&self.content, &format!("{name}.weight"))?;
        let &[.., outputs, inputs] = info.dims.as_slice() else { return None };
        let range = |len: usize| shard.map_or(0..len, |shard| shard_range(shard, len, true));
        match sharding? {
            Sharding { dim: 1, .. } => {
                let rank = shard?.rank();
                Some(LinearShard::Inputs { range: range(inputs), has_bias: rank == 0 })
            }
            Sharding { part, .. } if shard.is_some() || part.count > 1 => {
                let start = part.index * outputs / part.count;
                let rows = range(outputs / part.count);
                Some(LinearShard::Outputs(std::iter::once(start + rows.start..start + rows.end).collect()))
            }
            Sharding { .. } => None,
        }
    }
}
