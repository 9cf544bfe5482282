//! The files of a checkpoint: a folder as transformers has it, or a GGUF file.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_attention::gguf::LinearPart;
use candle_attention::weights::Checkpoint;
use candle_attention::{HeadShard, MultiHeadAttention, PackedLinear, SimpleTokenizer, gguf};
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Error, Result, bail};
use candle_nn::VarBuilder;
use candle_nn::var_builder::{ShardedSafeTensors, ShardedVarBuilder};
use serde_json::Value;

use crate::args::Args;
use crate::common::read_json;
use crate::model::weights::{Divided, part_of};
use crate::model::{GgufPart, GgufWeights};

pub enum Files {
    Folder(PathBuf),
    Gguf(Gguf),
}

impl Files {
    pub fn open(args: &Args, device: &Device) -> Result<Self> {
        match &args.model.model {
            Some(path) if path.is_file() && args.model.dtype != DType::F32 => {
                bail!(
                    "[causal_lm] a GGUF file has its own types of weights and computes in f32, expected no other --dtype"
                )
            }
            Some(path) if path.is_file() => Ok(Self::Gguf(Gguf::open(path, device)?)),
            _ => args.model.folder("causal_lm", &["generation_config.json"]).map(Self::Folder),
        }
    }

    pub fn config(&self) -> Result<Value> {
        match self {
            Self::Folder(folder) => read_json("causal_lm", &folder.join("config.json")),
            Self::Gguf(gguf) => gguf::hf_config(&gguf.content),
        }
    }

    pub fn tokenizer(&self) -> Result<SimpleTokenizer> {
        let file = match self {
            Self::Folder(folder) => folder.join("tokenizer.json"),
            Self::Gguf(gguf) => return gguf::tokenizer(&gguf.content),
        };
        if !file.is_file() {
            bail!("[causal_lm] the checkpoint has no tokenizer.json; give --ids instead of --prompt")
        }
        Ok(SimpleTokenizer::from_file(file)?)
    }

    /// The tokens that end a text: those of generation_config.json, else of config.json.
    pub fn end_tokens(&self, config: &Value) -> Result<Vec<u32>> {
        let generation = match self {
            Self::Folder(folder) => Some(folder.join("generation_config.json")).filter(|file| file.is_file()),
            Self::Gguf(_) => None,
        };
        let generation = generation.map_or(Ok(Value::Null), |file| read_json("causal_lm", &file))?;
        let end = [&generation["eos_token_id"], &config["eos_token_id"]].into_iter().find(|end| !end.is_null());
        let ids = match end {
            Some(Value::Array(ids)) => ids.clone(),
            Some(id) => vec![id.clone()],
            None => Vec::new(),
        };
        Ok(ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect())
    }

    pub fn gguf(&self) -> Option<&dyn GgufWeights> {
        match self {
            Self::Folder(_) => None,
            Self::Gguf(gguf) => Some(gguf),
        }
    }

    pub fn var_builder(&self, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
        match self {
            Self::Folder(folder) => Checkpoint::open(folder)?.var_builder(dtype, device),
            Self::Gguf(gguf) => Ok(gguf::var_builder(gguf.content.clone(), gguf.reader()?, dtype, device)),
        }
    }

    /// A builder that reads parts of tensors, for one of several processes.
    /// None of a GGUF file.
    pub fn sharded_var_builder(&self, dtype: DType, device: &Device) -> Result<Option<ShardedVarBuilder<'static>>> {
        let Self::Folder(folder) = self else { return Ok(None) };
        // SAFETY: like every program that maps a checkpoint, this one counts on nobody writing to it.
        unsafe { ShardedSafeTensors::var_builder(&safetensors(folder)?, dtype, device) }.map(Some)
    }
}

/// The files of a checkpoint's weights in a folder.
fn safetensors(folder: &Path) -> Result<Vec<PathBuf>> {
    let (whole, index) = (folder.join("model.safetensors"), folder.join("model.safetensors.index.json"));
    if whole.is_file() {
        return Ok(vec![whole]);
    }
    if !index.is_file() {
        bail!("[causal_lm] {} has no safetensors, which processes read parts of", folder.display())
    }
    let index = read_json("causal_lm", &index)?;
    let files = index["weight_map"].as_object().into_iter().flat_map(|map| map.values()).filter_map(Value::as_str);
    Ok(files.collect::<BTreeSet<_>>().into_iter().map(|file| folder.join(file)).collect())
}

pub struct Gguf {
    path: PathBuf,
    pub content: Arc<Content>,
    device: Device,
}

impl Gguf {
    fn open(path: &Path, device: &Device) -> Result<Self> {
        let failed = |error| Error::Msg(format!("[causal_lm] cannot read {}: {error}", path.display()));
        let content = File::open(path).map_err(Error::from).and_then(|mut file| gguf::read(&mut file));
        let content = content.map_err(failed)?.into();
        Ok(Self { path: path.into(), content, device: device.clone() })
    }

    fn reader(&self) -> Result<File> {
        Ok(File::open(&self.path)?)
    }
}

impl GgufWeights for Gguf {
    fn attention(&self, layer: usize, shard: Option<HeadShard>) -> Result<MultiHeadAttention> {
        let mut reader = self.reader()?;
        match shard.filter(|shard| shard.world_size() > 1) {
            Some(shard) => gguf::load_attention_shard(&self.content, &mut reader, layer, shard, &self.device),
            None => gguf::load_attention(&self.content, &mut reader, layer, &self.device),
        }
    }

    fn vocabulary(&self) -> Option<usize> {
        self.content.tensor_infos.get("token_embd.weight").and_then(|info| info.shape.dims().first().copied())
    }

    fn linear(&self, name: &str, part: Option<GgufPart>) -> Result<PackedLinear> {
        let mut reader = self.reader()?;
        let weight = self.content.tensor_infos.get(&format!("{name}.weight")).map(|info| info.shape.dims());
        let (Some(GgufPart { shard, divided }), Some(&[outputs, inputs])) =
            (part.filter(|part| part.shard.world_size() > 1 && part.divided != Divided::Not), weight)
        else {
            return gguf::load_linear(&self.content, &mut reader, name, &self.device);
        };
        let part = match divided {
            Divided::Not | Divided::Outputs => LinearPart::Outputs(vec![part_of(shard, outputs, true)]),
            Divided::JointOutputs => {
                let own = part_of(shard, outputs / 2, true);
                LinearPart::Outputs(vec![own.clone(), outputs / 2 + own.start..outputs / 2 + own.end])
            }
            Divided::Inputs => LinearPart::Inputs { range: part_of(shard, inputs, true), has_bias: shard.rank() == 0 },
        };
        gguf::load_linear_part(&self.content, &mut reader, name, &part, &self.device)
    }
}
