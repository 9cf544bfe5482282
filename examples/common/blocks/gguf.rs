//! A GGUF file, whose weights keep their types.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_attention::gguf::{self, LinearShard};
use candle_attention::{HeadShard, MultiHeadAttention, PackedLinear};
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Error, Result};

use super::weights::{Divided, Weights, part_of};

pub struct Gguf {
    path: PathBuf,
    pub content: Arc<Content>,
    device: Device,
}

impl Gguf {
    pub fn open(path: &Path, device: &Device) -> Result<Self> {
        let failed = |error| Error::Msg(format!("[causal_lm] cannot read {}: {error}", path.display()));
        let content = File::open(path).map_err(Error::from).and_then(|mut file| gguf::read(&mut file));
        let content = content.map_err(failed)?.into();
        Ok(Self { path: path.into(), content, device: device.clone() })
    }

    fn reader(&self) -> Result<File> {
        Ok(File::open(&self.path)?)
    }

    pub fn weights(&self, dtype: DType) -> Result<Weights<'_>> {
        let vb = gguf::var_builder(self.content.clone(), self.reader()?, dtype, &self.device);
        Ok(Weights { vb, gguf: Some(self), share: None })
    }

    /// A layer's attention, or some heads of it.
    pub fn attention(&self, layer: usize, shard: Option<HeadShard>) -> Result<MultiHeadAttention> {
        let mut reader = self.reader()?;
        match shard {
            Some(shard) => gguf::load_attention_shard(&self.content, &mut reader, layer, shard, &self.device),
            None => gguf::load_attention(&self.content, &mut reader, layer, &self.device),
        }
    }

    /// How many tokens have an embedding.
    pub fn vocabulary(&self) -> Option<usize> {
        self.content.tensor_infos.get("token_embd.weight").and_then(|info| info.shape.dims().first().copied())
    }

    /// A linear layer, or a process's part of it.
    pub fn linear(&self, name: &str, shard: Option<HeadShard>, divided: Option<Divided>) -> Result<PackedLinear> {
        let mut reader = self.reader()?;
        let weight = self.content.tensor_infos.get(&format!("{name}.weight")).map(|info| info.shape.dims());
        let own = |len: usize| shard.map_or(0..len, |shard| part_of(shard, len, true));
        let part = match (divided, weight) {
            (Some(Divided { dim: 1, .. }), Some(&[_, inputs])) if shard.is_some() => {
                LinearShard::Inputs { range: own(inputs), has_bias: shard.is_some_and(|shard| shard.rank() == 0) }
            }
            (Some(Divided { dim: 0, part: [i, n], .. }), Some(&[outputs, _])) if shard.is_some() || n > 1 => {
                let (first, own) = (i * outputs / n, own(outputs / n));
                let rows = first + own.start..first + own.end;
                LinearShard::Outputs(vec![rows])
            }
            _ => return gguf::load_linear(&self.content, &mut reader, name, &self.device),
        };
        gguf::load_linear_part(&self.content, &mut reader, name, &part, &self.device)
    }
}
