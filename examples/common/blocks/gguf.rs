//! A GGUF file, in one or more parts, whose weights keep their quantised types.

use std::path::Path;
use std::sync::Arc;

use candle_attention::gguf::{self, LinearShard, PartsReader};
use candle_attention::{HeadShard, MultiHeadAttention, PackedLinear};
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Result};

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

    /// Loads a layer's attention, or the heads of one rank.
    pub fn attention(&self, layer: usize, shard: Option<HeadShard>) -> Result<MultiHeadAttention> {
        let mut reader = self.reader()?;
        match shard {
            Some(shard) => gguf::load_attention_shard(&self.content, &mut reader, layer, shard, &self.device),
            None => gguf::load_attention(&self.content, &mut reader, layer, &self.device),
        }
    }

    /// Returns the number of tokens that have an embedding.
    pub fn vocabulary(&self) -> Option<usize> {
        gguf::tensor_info(&self.content, "token_embd.weight").and_then(|info| info.dims.first().copied())
    }

    /// Loads a linear layer, or the shard of one rank.
    pub fn linear(&self, name: &str, shard: Option<HeadShard>, sharding: Option<Sharding>) -> Result<PackedLinear> {
        let mut reader = self.reader()?;
        let weight = gguf::tensor_info(&self.content, &format!("{name}.weight")).map(|info| info.dims);
        let range = |len: usize| shard.map_or(0..len, |shard| shard_range(shard, len, true));
        let part = match (sharding, weight.as_deref()) {
            (Some(Sharding { dim: 1, .. }), Some(&[_, inputs])) if shard.is_some() => {
                LinearShard::Inputs { range: range(inputs), has_bias: shard.is_some_and(|shard| shard.rank() == 0) }
            }
            (Some(Sharding { dim: 0, part, .. }), Some(&[outputs, _])) if shard.is_some() || part.count > 1 => {
                let start = part.index * outputs / part.count;
                let rows = range(outputs / part.count);
                LinearShard::Outputs(std::iter::once(start + rows.start..start + rows.end).collect())
            }
            _ => return gguf::load_linear(&self.content, &mut reader, name, &self.device),
        };
        gguf::load_linear_part(&self.content, &mut reader, name, &part, &self.device)
    }
}
