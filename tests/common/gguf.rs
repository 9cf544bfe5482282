//! GGUF files in memory.

use std::io::Cursor;
use std::path::Path;

use candle_attention::gguf;
use candle_core::quantized::gguf_file::{self, Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Result, Tensor};
use serde_json::Value as Json;

/// A file that is being put together.
#[derive(Default)]
pub struct File {
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<(String, QTensor)>,
}

impl File {
    /// A layer of 2 heads over 1 that are 4 wide, by llama.cpp's metadata and names.
    pub fn llama() -> Result<Self> {
        let mut file = Self::default();
        file.set("general.architecture", Value::String("llama".into()));
        let sizes = [
            ("block_count", 1),
            ("embedding_length", 8),
            ("context_length", 64),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
        ];
        sizes.into_iter().for_each(|(key, size)| file.set(&format!("llama.{key}"), Value::U32(size)));
        for (name, rows) in [("attn_q", 8), ("attn_k", 4), ("attn_v", 4), ("attn_output", 8)] {
            let weight = Tensor::arange(0f32, (rows * 8) as f32, &Device::Cpu)?.reshape((rows, 8))?;
            file.add(&format!("blk.0.{name}.weight"), &(weight.affine(0.37, 0.1)?.sin()? * 0.4)?, GgmlDType::F32)?;
        }
        Ok(file)
    }

    /// A key, anew or in the place of the one that is there.
    pub fn set(&mut self, key: &str, value: Value) {
        self.metadata.retain(|(known, _)| known != key);
        self.metadata.push((key.into(), value));
    }

    /// The same for a tensor.
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

    /// As a reader finds it.
    pub fn open(&self) -> Result<(Content, Cursor<Vec<u8>>)> {
        let mut reader = Cursor::new(self.bytes()?);
        Ok((gguf::read(&mut reader)?, reader))
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
    ("input_layernorm", "attn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// A checkpoint of a folder as llama.cpp's converter writes it, in F32.
pub fn of_checkpoint(folder: &Path, architecture: &str) -> Result<File> {
    let config = std::fs::read_to_string(folder.join("config.json")).expect("the folder has a config");
    let config: Json = serde_json::from_str(&config).expect("the config is JSON");
    let mut file = File::default();
    file.set("general.architecture", Value::String(architecture.into()));
    let size = |name: &str| config[name].as_u64().map(|size| size as usize);
    let heads = size("num_attention_heads").expect("a number of heads");
    let head_dim = size("head_dim").unwrap_or(size("hidden_size").expect("a width") / heads);
    let sizes = [
        ("block_count", size("num_hidden_layers")),
        ("embedding_length", size("hidden_size")),
        ("feed_forward_length", size("intermediate_size")),
        ("attention.head_count", Some(heads)),
        ("attention.head_count_kv", size("num_key_value_heads")),
        ("attention.key_length", Some(head_dim)),
        ("attention.sliding_window", size("sliding_window")),
        ("context_length", size("max_position_embeddings")),
    ];
    for (key, size) in sizes {
        if let Some(size) = size {
            file.set(&format!("{architecture}.{key}"), Value::U32(size as u32));
        }
    }
    let mut number = |key: &str, number: f64| file.set(&format!("{architecture}.{key}"), Value::F32(number as f32));
    number("attention.layer_norm_rms_epsilon", config["rms_norm_eps"].as_f64().expect("an epsilon"));
    let is_gemma = architecture == "gemma3";
    let rope = if is_gemma { &config["rope_parameters"]["full_attention"] } else { &config["rope_parameters"] };
    number("rope.freq_base", rope["rope_theta"].as_f64().expect("a base"));
    if let Some(width) = config["query_pre_attn_scalar"].as_f64() {
        number("attention.scale", width.powf(-0.5));
    }
    if is_gemma {
        let pattern = vec![Value::Bool(true), Value::Bool(false)];
        file.set("gemma3.attention.sliding_window_pattern", Value::Array(pattern));
    }
    for (name, tensor) in candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)? {
        let after_attention = if is_gemma { "post_attention_norm" } else { "ffn_norm" };
        let named = name.replace("post_attention_layernorm", after_attention);
        let named = NAMES.iter().fold(named, |name, (own, other)| name.replace(own, other));
        let reordered = architecture == "llama" && (named.contains("attn_q.") || named.contains("attn_k."));
        let tensor = match tensor.rank() {
            1 if is_gemma => (tensor + 1.0)?,
            2 if reordered => {
                let shape = (tensor.dim(0)? / head_dim, 2, head_dim / 2, ());
                tensor.reshape(shape)?.transpose(1, 2)?.contiguous()?.reshape(tensor.shape())?
            }
            _ => tensor,
        };
        file.add(&named, &tensor, GgmlDType::F32)?;
    }
    Ok(file)
}
