//! GGUF files that lack something, contradict themselves, or end too early.

use std::io::Cursor;

use candle_attention::gguf::{self, LinearPart};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use candle_core::{Result, Shape, Tensor};

use crate::common::gguf::File;
use crate::{CPU, Case, zeros};

/// The config of a file whose metadata are changed.
fn config(changes: &[(&str, Value)]) -> Result<()> {
    let mut file = File::llama()?;
    changes.iter().for_each(|(key, value)| file.set(key, value.clone()));
    gguf::attention_config(&file.open()?.0).map(drop)
}

/// Layer `i` of a file that is changed.
fn layer(i: usize, change: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let mut file = File::llama()?;
    change(&mut file)?;
    let (content, mut reader) = file.open()?;
    gguf::load_attention(&content, &mut reader, i, &CPU).map(drop)
}

fn without(file: &mut File, name: &str) -> Result<()> {
    file.tensors.retain(|(known, _)| known != name);
    file.metadata.retain(|(known, _)| known != name);
    Ok(())
}

/// A tensor in the place of another one.
fn put(file: &mut File, name: &str, shape: impl Into<Shape>) -> Result<()> {
    file.add(name, &zeros(shape), GgmlDType::F32)
}

/// A layer whose file says that a weight has other dimensions than it was written with.
fn claimed(dims: &[usize]) -> Result<()> {
    let mut file = File::llama()?;
    file.set("llama.attention.key_length", Value::U64(dims[0] as u64));
    file.set("llama.attention.value_length", Value::U64(dims[0] as u64));
    file.set("llama.attention.head_count", Value::U32(1));
    file.set("llama.embedding_length", Value::U64(dims[1] as u64));
    let (mut content, mut reader) = file.open()?;
    for name in ["attn_q", "attn_k", "attn_v", "attn_output"] {
        let info = content.tensor_infos.get_mut(&format!("blk.0.{name}.weight")).expect("the file has it");
        info.shape = if name == "attn_output" { (dims[1], dims[0]).into() } else { dims.into() };
    }
    gguf::load_attention(&content, &mut reader, 0, &CPU).map(drop)
}

/// A linear layer whose file says that it has no elements.
fn empty(dims: [usize; 2]) -> Result<()> {
    let (mut content, mut reader) = File::llama()?.open()?;
    content.tensor_infos.get_mut("blk.0.attn_q.weight").expect("the file has it").shape = dims.as_slice().into();
    gguf::load_linear(&content, &mut reader, "blk.0.attn_q", &CPU).map(drop)
}

/// The tokenizer of a file with these keys.
fn tokenizer(keys: &[(&str, Value)]) -> Result<()> {
    let mut file = File::llama()?;
    keys.iter().for_each(|(key, value)| file.set(&format!("tokenizer.ggml.{key}"), value.clone()));
    gguf::tokenizer(&file.open()?.0).map(drop)
}

fn texts(list: &[&str]) -> Value {
    Value::Array(list.iter().map(|entry| text(entry)).collect())
}

fn text(text: &str) -> Value {
    Value::String(text.into())
}

pub const METADATA: &[Case] = cases! {
    "no architecture" => {
        let mut file = File::llama()?;
        without(&mut file, "general.architecture")?;
        gguf::attention_config(&file.open()?.0)
    },
    "an architecture that is not known" => config(&[("general.architecture", text("mamba"))]),
    "an architecture as a number" => config(&[("general.architecture", Value::U32(3))]),
    "the metadata of another architecture" => config(&[("general.architecture", text("qwen2"))]),
    "no heads" => config(&[("llama.attention.head_count", Value::U32(0))]),
    "heads as text" => config(&[("llama.attention.head_count", text("2"))]),
    "fewer heads than none" => config(&[("llama.attention.head_count", Value::I32(-2))]),
    "heads that differ between layers" =>
        config(&[("llama.attention.head_count_kv", Value::Array(vec![Value::U32(1), Value::U32(2)]))]),
    "heads that key heads do not divide" => config(&[("llama.attention.head_count_kv", Value::U32(3))]),
    "heads beyond counting" => config(&[("llama.attention.head_count", Value::U64(u64::MAX))]),
    "heads beyond memory" => {
        config(&[
            ("llama.attention.head_count", Value::U32(u32::MAX)),
            ("llama.attention.key_length", Value::U32(u32::MAX)),
        ])
    },
    "an alignment of nothing" => config(&[("general.alignment", Value::U32(0))]),
    "another kind of file" => gguf::read(&mut Cursor::new(b"PK\x03\x04".as_slice())),
    "a header that ends early" => gguf::read(&mut Cursor::new(&File::llama()?.bytes()?[..100])),
    "an eps as text" => config(&[("llama.attention.layer_norm_rms_epsilon", text("1e-5"))]),
    "a scaling that is not known" => config(&[("llama.rope.scaling.type", text("ntk"))]),
    "a scaling without its factor" => config(&[("llama.rope.scaling.type", text("yarn"))]),
    "a scaling of the scores" => {
        config(&[
            ("llama.rope.scaling.type", text("yarn")),
            ("llama.rope.scaling.factor", Value::F32(4.0)),
            ("llama.rope.scaling.attn_factor", Value::F32(1.2)),
        ])
    },
    "a temperature" => config(&[("llama.attention.temperature_scale", Value::F32(0.1))]),
    "a causal mask as a number" => config(&[("llama.attention.causal", Value::U32(0))]),
    "more rotated than a head has" => config(&[("llama.rope.dimension_count", Value::U32(6))]),
    "a window that is not supported" => {
        let olmo = ["block_count", "embedding_length", "attention.head_count", "attention.sliding_window"];
        let olmo = olmo.map(|key| (format!("olmo2.{key}"), Value::U32(8)));
        let mut changes = vec![("general.architecture", text("olmo2"))];
        changes.extend(olmo.iter().map(|(key, value)| (key.as_str(), value.clone())));
        config(&changes)
    },
    "rotary factors without their tensor" => {
        let mut file = File::llama()?;
        put(&mut file, "rope_freqs.weight", 2)?;
        gguf::attention_config(&file.open()?.0)
    },
};

pub const TENSORS: &[Case] = cases! {
    "no such layer" => layer(1, |_| Ok(())),
    "no query weight" => layer(0, |file| without(file, "blk.0.attn_q.weight")),
    "no output weight" => layer(0, |file| without(file, "blk.0.attn_output.weight")),
    "a key weight of another shape" => layer(0, |file| put(file, "blk.0.attn_k.weight", (8, 8))),
    "a packed weight of another shape" => layer(0, |file| put(file, "blk.0.attn_qkv.weight", (8, 8))),
    "a bias of another width" => layer(0, |file| put(file, "blk.0.attn_q.bias", 4)),
    "a norm that the architecture does not have" => layer(0, |file| put(file, "blk.0.attn_q_norm.weight", 4)),
    "sinks that the architecture does not have" => layer(0, |file| put(file, "blk.0.attn_sinks.weight", 2)),
    "factors of another width" => layer(0, |file| put(file, "rope_freqs.weight", 3)),
    "factors twice" => {
        layer(0, |file| {
            put(file, "rope_freqs.weight", 2)?;
            put(file, "rope_factors_long.weight", 2)
        })
    },
    "factors of long calls alone" => layer(0, |file| put(file, "rope_factors_long.weight", 2)),
    "factors beside a scaling" => {
        layer(0, |file| {
            file.set("llama.rope.scaling.factor", Value::F32(4.0));
            put(file, "rope_freqs.weight", 2)
        })
    },
    "a weight beyond the end of the file" => claimed(&[8, 64]),
    "a weight beyond memory" => claimed(&[1 << 31, 1 << 31]),
    "a file that ends before its weights" => {
        let bytes = File::llama()?.bytes()?;
        let mut reader = Cursor::new(bytes[..bytes.len() - 600].to_vec());
        let content = gguf::read(&mut reader)?;
        gguf::load_attention(&content, &mut reader, 0, &CPU)
    },
    "a linear layer without outputs" => empty([0, 32]),
    "a linear layer without inputs" => empty([32, 0]),
    "a part without outputs" => {
        let (content, mut reader) = File::llama()?.open()?;
        gguf::load_linear_part(&content, &mut reader, "blk.0.attn_q", &LinearPart::Outputs(vec![]), &CPU).map(drop)
    },
    "a linear layer that is not there" => {
        let (content, mut reader) = File::llama()?.open()?;
        gguf::load_linear(&content, &mut reader, "blk.0.ffn_up", &CPU).map(drop)
    },
    "a linear layer of three dimensions" => {
        let mut file = File::llama()?;
        file.add("blk.0.ffn_up_exps.weight", &Tensor::zeros((2, 4, 8), candle_core::DType::F32, &CPU)?, GgmlDType::F32)?;
        let (content, mut reader) = file.open()?;
        gguf::load_linear(&content, &mut reader, "blk.0.ffn_up_exps", &CPU).map(drop)
    },
};

pub const TOKENIZERS: &[Case] = cases! {
    "no tokens" => tokenizer(&[("model", text("gpt2"))]),
    "tokens that are no texts" => tokenizer(&[("tokens", Value::Array(vec![Value::U32(1)]))]),
    "a model that is not known" => tokenizer(&[("tokens", texts(&["a"])), ("model", text("rwkv"))]),
    "a model as a number" => tokenizer(&[("tokens", texts(&["a"])), ("model", Value::U32(1))]),
    "kinds of fewer tokens" => {
        let types = Value::Array(vec![Value::I32(1)]);
        tokenizer(&[("tokens", texts(&["a", "b"])), ("token_type", types), ("model", text("gpt2"))])
    },
    "no scores" => tokenizer(&[("tokens", texts(&["a"])), ("model", text("llama"))]),
    "no merges" => tokenizer(&[("tokens", texts(&["a"])), ("model", text("gpt2")), ("pre", text("qwen2"))]),
    "a merge of one token" => {
        let merges = ("merges", texts(&["ab"]));
        tokenizer(&[("tokens", texts(&["a"])), ("model", text("gpt2")), ("pre", text("qwen2")), merges])
    },
    "a division of texts that is not known" =>
        tokenizer(&[("tokens", texts(&["a"])), ("model", text("gpt2")), ("pre", text("tekken"))]),
    "a first token that is not there" => {
        let merges = ("merges", texts(&[]));
        let keys = [("tokens", texts(&["a"])), ("model", text("gpt2")), ("pre", text("llama-bpe")), merges];
        tokenizer(&keys)
    },
    "more merges than any vocabulary has" => {
        let nested: Vec<_> = (1..=1000).map(|len| text(&"a".repeat(len))).collect();
        let scores = Value::Array(vec![Value::F32(0.0); nested.len()]);
        tokenizer(&[("tokens", Value::Array(nested)), ("model", text("llama")), ("scores", scores)])
    },
    "merges of tokens that are not there" => {
        let merges = ("merges", texts(&["a b"]));
        tokenizer(&[("tokens", texts(&["a"])), ("model", text("gpt2")), ("pre", text("qwen2")), merges])
    },
};
