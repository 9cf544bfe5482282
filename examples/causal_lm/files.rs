//! The files of a checkpoint: a folder in the format of transformers, or a GGUF file.

use std::path::PathBuf;
use std::rc::Rc;

use candle_attention::gguf;
use candle_attention::text::{SimpleTokenizer, SpecialTokens};
use candle_attention::weights::Checkpoint;
use candle_core::{DType, Device, Result, bail};
use candle_nn::var_builder::ShardedSafeTensors;
use serde_json::Value;

use crate::args::Args;
use crate::common::{EXAMPLE, read_json, read_optional};
use crate::model::gguf::Gguf;
use crate::model::weights::{Ranks, Shards, Weights};

/// Returns the text that generated tokens add to a prompt. They are decoded after the prompt, since a decoder drops the
/// space before a first word.
pub fn continuation(tokenizer: &SimpleTokenizer, prompt: &[u32], made: &[u32]) -> Result<String> {
    let decode = |ids: &[u32]| tokenizer.decode_with(ids, SpecialTokens::Without);
    let before = decode(prompt)?;
    let whole = decode(&[prompt, made].concat())?;
    Ok(whole.strip_prefix(&before).unwrap_or(&whole).to_string())
}

pub enum Files {
    Folder(PathBuf),
    Gguf(Gguf),
}

impl Files {
    pub fn open(args: &Args, device: &Device) -> Result<Self> {
        match &args.model.model {
            Some(path) if path.is_file() && args.model.dtype != DType::F32 => {
                bail!(
                    "[{EXAMPLE}] a GGUF file has its own types of weights and computes in f32, expected no other \
                     --dtype"
                )
            }
            Some(path) if path.is_file() && args.quantize.is_some() => {
                bail!("[{EXAMPLE}] a GGUF file has its own types of weights, expected no --quantize")
            }
            Some(path) if path.is_file() => Ok(Self::Gguf(Gguf::open(path, device)?)),
            _ => args.model.folder(&["generation_config.json"]).map(Self::Folder),
        }
    }

    pub fn config(&self) -> Result<Value> {
        match self {
            Self::Folder(folder) => read_json(&folder.join("config.json")),
            Self::Gguf(gguf) => gguf::hf_config(&gguf.content),
        }
    }

    pub fn tokenizer(&self) -> Result<SimpleTokenizer> {
        let file = match self {
            Self::Folder(folder) => folder.join("tokenizer.json"),
            Self::Gguf(gguf) => return gguf::tokenizer(&gguf.content),
        };
        if !file.is_file() {
            bail!("[{EXAMPLE}] the checkpoint has no tokenizer.json; give token ids instead of text")
        }
        Ok(SimpleTokenizer::from_file(file)?)
    }

    /// Returns the tokens that end a text, as listed in generation_config.json, else in config.json, else in its text
    /// config.
    pub fn end_tokens(&self, config: &Value) -> Result<Vec<u32>> {
        let generation = match self {
            Self::Folder(folder) => read_optional(&folder.join("generation_config.json"))?,
            Self::Gguf(_) => Value::Null,
        };
        let places = [&generation, config, &config["text_config"]].map(|json| &json["eos_token_id"]);
        let end = places.into_iter().find(|end| !end.is_null()).unwrap_or(&Value::Null);
        let ids = end.as_array().map_or(std::slice::from_ref(end), Vec::as_slice);
        Ok(ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect())
    }

    /// Opens the weights; each of several `ranks` reads its shard.
    pub fn weights(&self, args: &Args, device: &Device, ranks: Option<Rc<dyn Ranks>>) -> Result<Weights<'_>> {
        let dtype = args.model.dtype;
        let ranks = ranks.filter(|ranks| ranks.shard().world_size() > 1);
        let mut vb = None;
        let weights: Weights = match self {
            Self::Folder(folder) => {
                let mut checkpoint = Checkpoint::open(folder)?;
                if let Some(format) = args.quantize {
                    checkpoint = checkpoint.with_quantization(format)?;
                }
                if ranks.is_some() {
                    let files = checkpoint.safetensors();
                    if files.is_empty() {
                        bail!("[{EXAMPLE}] the checkpoint has no safetensors, which ranks read shards of")
                    }
                    // SAFETY: like every program that maps a checkpoint, this one counts on nobody writing to it.
                    vb = Some(unsafe { ShardedSafeTensors::var_builder(files, dtype, device)? });
                }
                checkpoint.var_builder(dtype, device)?.into()
            }
            Self::Gguf(gguf) => gguf.weights(dtype)?,
        };
        Ok(Weights { shards: ranks.map(|ranks| Shards { vb, ranks }), ..weights })
    }
}
