//! GGUF files that lack something, contradict themselves, or end too early.

use std::io::Cursor;

use candle_attention::gguf::{self, LinearPart};
use candle_core::Module;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;

use crate::common::gguf::File;
use crate::wrong::Shapes;
use crate::*;

/// The config of a file whose metadata are changed.
fn config(key: &str, value: Value) -> Result<Config> {
    configs(&[(key, value)])
}

fn configs(changes: &[(&str, Value)]) -> Result<Config> {
    let mut file = File::llama()?;
    changes.iter().for_each(|(key, value)| file.set(key, value.clone()));
    gguf::attention_config(&file.open()?.0)
}

fn text(text: &str) -> Value {
    Value::String(text.into())
}

#[test]
fn metadata() {
    let (architecture, heads, kv_heads) =
        ("general.architecture", "llama.attention.head_count", "llama.attention.head_count_kv");
    let values = [
        (architecture, text("mamba")),
        (architecture, Value::U32(3)),
        (architecture, text("qwen2")),
        (heads, Value::U32(0)),
        (heads, text("2")),
        (heads, Value::I32(-2)),
        (heads, Value::U64(u64::MAX)),
        (kv_heads, Value::Array(vec![Value::U32(1), Value::U32(2)])),
        (kv_heads, Value::U32(3)),
        ("general.alignment", Value::U32(0)),
        ("llama.attention.layer_norm_rms_epsilon", text("1e-5")),
        ("llama.rope.scaling.type", text("ntk")),
        ("llama.rope.scaling.type", text("yarn")),
        ("llama.attention.temperature_scale", Value::F32(0.1)),
        ("llama.attention.causal", Value::U32(0)),
        ("llama.rope.dimension_count", Value::U32(6)),
    ];
    let others = cases! {
        "no architecture" => {
            let mut file = File::llama()?;
            file.metadata.retain(|(key, _)| key != architecture);
            gguf::attention_config(&file.open()?.0)
        },
        "heads beyond memory" =>
            configs(&[(heads, Value::U32(u32::MAX)), ("llama.attention.key_length", Value::U32(u32::MAX))]),
        "a scaling of the scores" => configs(&[
            ("llama.rope.scaling.type", text("yarn")),
            ("llama.rope.scaling.factor", Value::F32(4.0)),
            ("llama.rope.scaling.attn_factor", Value::F32(1.2)),
        ]),
        "a window that is not supported" => configs(&[
            (architecture, text("olmo2")),
            ("olmo2.block_count", Value::U32(8)),
            ("olmo2.embedding_length", Value::U32(8)),
            ("olmo2.attention.head_count", Value::U32(8)),
            ("olmo2.attention.sliding_window", Value::U32(8)),
        ]),
        "another kind of file" => gguf::read(&mut Cursor::new(b"PK\x03\x04".as_slice())),
        "a header that ends early" => gguf::read(&mut Cursor::new(&File::llama()?.bytes()?[..100])),
        "rotary factors without their tensor" => {
            let mut file = File::llama()?;
            file.add("rope_freqs.weight", &zeros(2), GgmlDType::F32)?;
            gguf::attention_config(&file.open()?.0)
        },
    };
    assert_reviewed("gguf_metadata", &[each("", values, |(key, value)| config(key, value)), others]);
}

/// Layer 0 of a file of these tensors.
fn layer(shapes: &Shapes, change: impl FnOnce(&mut File)) -> Result<MultiHeadAttention> {
    let mut file = File { tensors: Vec::new(), ..File::llama()? };
    for (name, shape) in shapes {
        file.add(name, &zeros(shape.as_slice()), GgmlDType::F32)?;
    }
    change(&mut file);
    let (content, mut reader) = file.open()?;
    gguf::load_attention(&content, &mut reader, 0, &CPU)
}

/// A file that says of a weight that it has other dimensions than it was written with.
fn claimed(dims: [usize; 2], changes: &[(&str, u64)], name: Option<&str>) -> Result<()> {
    let mut file = File::llama()?;
    changes.iter().for_each(|(key, value)| file.set(&format!("llama.{key}"), Value::U64(*value)));
    let (mut content, mut reader) = file.open()?;
    for name in ["attn_q", "attn_k", "attn_v", "attn_output"] {
        let info = content.tensor_infos.get_mut(&format!("blk.0.{name}.weight")).expect("the file has it");
        info.shape = if name == "attn_output" { (dims[1], dims[0]).into() } else { dims.as_slice().into() };
    }
    match name {
        Some(name) => gguf::load_linear(&content, &mut reader, name, &CPU).map(drop),
        None => gguf::load_attention(&content, &mut reader, 0, &CPU).map(drop),
    }
}

#[test]
fn tensors() -> Result<()> {
    let file = File::llama()?;
    let shapes: Shapes =
        file.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shape().dims().to_vec())).collect();
    let load = |shapes: &Shapes| layer(shapes, |_| {});
    let more = wrong::shapes(&[
        ("blk.0.attn_qkv.weight", &[8, 8]),
        ("blk.0.attn_q.bias", &[4]),
        ("blk.0.attn_q_norm.weight", &[4]),
        ("blk.0.attn_sinks.weight", &[2]),
        ("rope_freqs.weight", &[3]),
        ("rope_factors_long.weight", &[2]),
    ]);
    let with = |more: &[(&str, &[usize])]| shapes.clone().into_iter().chain(wrong::shapes(more)).collect::<Shapes>();
    let claims = each("a weight that claims to be of", [[8, 64], [1 << 31, 1 << 31]], |dims| {
        let sizes =
            [("attention.key_length", dims[0]), ("attention.value_length", dims[0]), ("embedding_length", dims[1])];
        let one_head = ("attention.head_count", 1);
        claimed(dims, &[&sizes.map(|(key, size)| (key, size as u64))[..], &[one_head]].concat(), None)
    });
    let empty = each("a linear layer that claims to be of", [[0, 32], [32, 0]], |dims| {
        claimed(dims, &[], Some("blk.0.attn_q"))
    });
    let others = cases! {
        "no such layer" => {
            let (content, mut reader) = File::llama()?.open()?;
            gguf::load_attention(&content, &mut reader, 1, &CPU)
        },
        "factors twice" => load(&with(&[("rope_freqs.weight", &[2]), ("rope_factors_long.weight", &[2])])),
        "factors beside a scaling" => layer(&with(&[("rope_freqs.weight", &[2])]), |file| {
            file.set("llama.rope.scaling.factor", Value::F32(4.0));
        }),
        "a file that ends before its weights" => {
            let bytes = File::llama()?.bytes()?;
            let mut reader = Cursor::new(bytes[..bytes.len() - 600].to_vec());
            let content = gguf::read(&mut reader)?;
            gguf::load_attention(&content, &mut reader, 0, &CPU)
        },
        "a part without outputs" => {
            let (content, mut reader) = File::llama()?.open()?;
            let part = LinearPart::Outputs(vec![]);
            gguf::load_linear_part(&content, &mut reader, "blk.0.attn_q", &part, &CPU)?.forward(&zeros((1, 8)))
        },
        "a linear layer that is not there" => linear(File::llama()?, "blk.0.ffn_up"),
        "a linear layer of three dimensions" => {
            let mut file = File::llama()?;
            file.add("blk.0.ffn_up_exps.weight", &zeros((2, 4, 8)), GgmlDType::F32)?;
            linear(file, "blk.0.ffn_up_exps")
        },
    };
    assert_reviewed(
        "gguf_tensors",
        &[wrong::weights(&shapes, load), wrong::surplus(&shapes, &more, load), claims, empty, others],
    );
    Ok(())
}

fn linear(file: File, name: &str) -> Result<Tensor> {
    let (content, mut reader) = file.open()?;
    gguf::load_linear(&content, &mut reader, name, &CPU)?.forward(&zeros((1, 8)))
}

#[test]
fn tokenizers() {
    let texts = |list: &[&str]| Value::Array(list.iter().map(|entry| text(entry)).collect());
    let (tokens, gpt2, qwen2) = (("tokens", texts(&["a"])), ("model", text("gpt2")), ("pre", text("qwen2")));
    let merges = |list: &[&str]| ("merges", texts(list));
    let nested: Vec<_> = (1..=1000).map(|len| text(&"a".repeat(len))).collect();
    let scores = Value::Array(vec![Value::F32(0.0); nested.len()]);
    let types = ("token_type", Value::Array(vec![Value::I32(1)]));
    let files: [(&str, Vec<(&str, Value)>); 12] = [
        ("no tokens", vec![gpt2.clone()]),
        ("tokens that are no texts", vec![("tokens", Value::Array(vec![Value::U32(1)]))]),
        ("a model that is not known", vec![tokens.clone(), ("model", text("rwkv"))]),
        ("a model as a number", vec![tokens.clone(), ("model", Value::U32(1))]),
        ("kinds of fewer tokens", vec![("tokens", texts(&["a", "b"])), types, gpt2.clone()]),
        ("no scores", vec![tokens.clone(), ("model", text("llama"))]),
        ("no merges", vec![tokens.clone(), gpt2.clone(), qwen2.clone()]),
        ("a merge of one token", vec![tokens.clone(), gpt2.clone(), qwen2.clone(), merges(&["ab"])]),
        ("a division of texts that is not known", vec![tokens.clone(), gpt2.clone(), ("pre", text("tekken"))]),
        ("no first token", vec![tokens.clone(), gpt2.clone(), ("pre", text("llama-bpe")), merges(&[])]),
        (
            "more merges than any vocabulary has",
            vec![("tokens", Value::Array(nested)), ("model", text("llama")), ("scores", scores)],
        ),
        ("merges of tokens that are not there", vec![tokens, gpt2, qwen2, merges(&["a b"])]),
    ];
    let tokenizer = |keys: Vec<(&str, Value)>| -> Result<SimpleTokenizer> {
        let mut file = File::llama()?;
        keys.into_iter().for_each(|(key, value)| file.set(&format!("tokenizer.ggml.{key}"), value));
        gguf::tokenizer(&file.open()?.0)
    };
    assert_reviewed("gguf_tokenizers", &[files.map(|(what, keys)| case(what, || tokenizer(keys).map(drop))).into()]);
}
