//! GGUF files in memory.

use std::collections::HashMap;
use std::io::Cursor;

use candle_attention::gguf;
use candle_core::quantized::gguf_file::{self, Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Result, Tensor};
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use super::{recorded, recorded_tensors};

/// A file that is being put together.
#[derive(Default)]
pub struct File {
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<(String, QTensor)>,
}

impl File {
    /// Builds a file with the metadata of an architecture.
    pub fn of(architecture: &str, metadata: &Json) -> Self {
        let mut file = Self::default();
        file.set("general.architecture", Value::String(architecture.into()));
        for (key, json) in metadata.as_object().expect("keys and values") {
            file.set(&format!("{architecture}.{key}"), value(json));
        }
        file
    }

    /// Builds a layer of 2 query heads and 1 key head of width 4, with llama.cpp's metadata and names.
    pub fn llama() -> Result<Self> {
        let metadata = json!({
            "block_count": 1, "embedding_length": 8, "context_length": 64, "attention.head_count": 2,
            "attention.head_count_kv": 1,
        });
        let mut file = Self::of("llama", &metadata);
        for (name, rows) in [("attn_q", 8), ("attn_k", 4), ("attn_v", 4), ("attn_output", 8)] {
            let weight = Tensor::arange(0f32, (rows * 8) as f32, &Device::Cpu)?.reshape((rows, 8))?;
            file.add(&format!("blk.0.{name}.weight"), &(weight.affine(0.37, 0.1)?.sin()? * 0.4)?, GgmlDType::F32)?;
        }
        Ok(file)
    }

    /// Sets a key, or replaces its value.
    pub fn set(&mut self, key: &str, value: Value) {
        self.metadata.retain(|(known, _)| known != key);
        self.metadata.push((key.into(), value));
    }

    /// Adds a tensor, or replaces it.
    pub fn add(&mut self, name: &str, tensor: &Tensor, dtype: GgmlDType) -> Result<()> {
        self.tensors.retain(|(known, _)| known != name);
        // Candle quantises the whole buffer of a view.
        self.tensors.push((name.into(), QTensor::quantize(&tensor.force_contiguous()?, dtype)?));
        Ok(())
    }

    pub fn bytes(&self) -> Result<Vec<u8>> {
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<_> = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut bytes = Cursor::new(Vec::new());
        gguf_file::write(&mut bytes, &metadata, &tensors)?;
        Ok(bytes.into_inner())
    }

    /// Reads the file.
    pub fn open(&self) -> Result<(Content, Cursor<Vec<u8>>)> {
        let mut reader = Cursor::new(self.bytes()?);
        Ok((gguf::read(&mut reader)?, reader))
    }
}

/// Returns a value. Numbers have 32 bits.
fn value(json: &Json) -> Value {
    match json {
        Json::Bool(flag) => Value::Bool(*flag),
        Json::String(text) => Value::String(text.clone()),
        Json::Array(list) => Value::Array(list.iter().map(value).collect()),
        number => match number.as_u64() {
            Some(size) => Value::U32(size as u32),
            None => Value::F32(number.as_f64().expect("a number") as f32),
        },
    }
}

/// llama.cpp's names of Llama's parts; the first that occurs counts.
const NAMES: &[(&str, &str)] = &[
    ("model.embed_tokens.", "token_embd."),
    ("model.norm.", "output_norm."),
    ("lm_head.", "output."),
    ("model.layers.", "blk."),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.sinks", "attn_sinks.weight"),
    ("input_layernorm", "attn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// The order in which the converter writes the rows of queries, keys and values.
#[derive(Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rows {
    Kept,
    Packed,
    Permuted,
}

/// A model as llama.cpp's converter writes it in F32: a line of `tests/hf/gguf.jsonl` or `tests/causal_lm/gguf.jsonl`.
#[derive(Deserialize)]
pub struct Converted {
    pub architecture: String,
    pub model: String,
    pub rows: Rows,
    /// Fields of the model's config that are others, where a file cannot say what the model does.
    #[serde(default)]
    pub config: Map<String, Json>,
    metadata: Json,
    /// The factors that divide the frequencies of positions.
    #[serde(default)]
    tensors: HashMap<String, Vec<f32>>,
}

impl Converted {
    /// Reads the entries of a file below `tests/`.
    pub fn all(file: &str) -> Vec<Self> {
        let text = std::fs::read_to_string(recorded(file)).expect("the file is there");
        text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }

    /// Builds a file with tensors under Llama's names.
    pub fn file(&self, tensors: impl IntoIterator<Item = (String, Tensor)>) -> Result<File> {
        let mut file = File::of(&self.architecture, &self.metadata);
        let is_gemma = self.architecture.starts_with("gemma");
        for (name, list) in &self.tensors {
            file.add(name, &Tensor::new(&list[..], &Device::Cpu)?, GgmlDType::F32)?;
        }
        for (name, tensor) in tensors {
            let after_attention = if is_gemma { "post_attention_norm" } else { "ffn_norm" };
            let name = name.replace("post_attention_layernorm", after_attention);
            let name = NAMES.iter().fold(name, |name, (own, other)| name.replace(own, other));
            let tensor = if is_gemma && name.ends_with("norm.weight") {
                (tensor + 1.0)?
            } else if self.rows == Rows::Permuted && (name.contains("attn_q.") || name.contains("attn_k.")) {
                // (H, 2, D/2, ..) to (H, D/2, 2, ..).
                let head_dim = self.metadata["attention.key_length"].as_u64().expect("a width") as usize;
                let pairs = tensor.reshape((tensor.dim(0)? / head_dim, 2, head_dim / 2, ()))?.transpose(1, 2)?;
                pairs.contiguous()?.reshape(tensor.shape())?
            } else {
                tensor
            };
            file.add(&name, &tensor, GgmlDType::F32)?;
        }
        Ok(file)
    }
}

/// Converts one of the checkpoints of `tests/causal_lm`.
pub fn of_checkpoint(model: &str) -> Result<File> {
    let all = Converted::all("causal_lm/gguf.jsonl");
    let converted = all.iter().find(|converted| converted.model == model).expect("a line of the file");
    converted.file(recorded_tensors(&format!("causal_lm/models/{model}/model.safetensors"))?)
}
