//! GGUF files that lack something, contradict themselves, or end too early.

use std::io::Cursor;

use candle_attention::gguf::{self, LinearShard};
use candle_attention::text::SpecialTokens;
use candle_core::Module;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value as Entry};

use crate::common::gguf::File;
use crate::words::{self, Fields};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("gguf metadata", |_, call| gguf::attention_config(&described(call)?).map(accepted)),
    ("gguf config", |_, call| gguf::hf_config(&described(call)?).map(|config| config.to_string())),
    ("gguf tokenizer", |_, call| {
        let mut file = File::llama()?;
        set(&mut file, "tokenizer.ggml.", call)?;
        let tokenizer = gguf::tokenizer(&file.open()?.0)?;
        let Some(text) = call.get::<String>("text")? else { return Ok(accepted(tokenizer)) };
        let encoding = tokenizer.encode(&text)?;
        let decoded = tokenizer.decode_with(&encoding.ids, SpecialTokens::Without)?;
        Ok(format!("{:?}, again {decoded:?}", encoding.tokens))
    }),
    ("gguf layer", loaded),
    ("gguf calls", |line, _| named(CALLS, line)),
];

/// Returns a file with these metadata and no others.
fn described(metadata: &Fields) -> Result<Content> {
    let mut file = File { metadata: Vec::new(), ..File::llama()? };
    set(&mut file, "", metadata)?;
    Ok(file.open()?.0)
}

fn entry(json: &Value) -> Entry {
    match json {
        Value::Bool(flag) => Entry::Bool(*flag),
        Value::String(text) => Entry::String(text.clone()),
        Value::Array(list) => Entry::Array(list.iter().map(entry).collect()),
        Value::Object(of) => match of.iter().next().map(|(kind, n)| (kind.as_str(), n.as_u64().expect("a number"))) {
            Some(("u8", n)) => Entry::U8(n as u8),
            Some(("i8", n)) => Entry::I8(n as i8),
            Some(("u16", n)) => Entry::U16(n as u16),
            Some(("i16", n)) => Entry::I16(n as i16),
            other => panic!("{other:?} is no entry"),
        },
        _ => match (json.as_u64(), json.as_i64()) {
            (Some(number), _) => u32::try_from(number).map_or(Entry::U64(number), Entry::U32),
            (None, Some(number)) => Entry::I32(number as i32),
            (None, None) => Entry::F32(json.as_f64().expect("a number") as f32),
        },
    }
}

fn set(file: &mut File, prefix: &str, metadata: &Fields) -> Result<()> {
    metadata.each().for_each(|(key, value)| file.set(&format!("{prefix}{key}"), entry(value)));
    Ok(())
}

/// Loads a layer of a file, or a linear layer.
fn loaded(_: &str, call: &Fields) -> Result<String> {
    let mut file = File { tensors: Vec::new(), ..File::llama()? };
    for (name, tensor) in call.read("weights", words::named::<Vec<_>>)?.expect("names and tensors") {
        file.add(&name, &tensor, GgmlDType::F32)?;
    }
    call.part("metadata", |metadata| set(&mut file, "llama.", metadata))?;
    let (mut content, mut reader) = file.open()?;
    // The dimensions that the file states for its weights may differ from the written ones.
    if let Some([rows, columns]) = call.get::<[usize; 2]>("claimed")? {
        for (name, info) in content.tensor_infos.iter_mut() {
            info.shape = if name.contains("output") { (columns, rows).into() } else { (rows, columns).into() };
        }
    }
    let layer = call.get("layer")?.unwrap_or(0);
    match call.get::<String>("linear")? {
        Some(name) => gguf::load_linear(&content, &mut reader, &name, &CPU)?.forward(&zeros((1, 8))).map(accepted),
        None => gguf::load_attention(&content, &mut reader, layer, &CPU).map(accepted),
    }
}

const CALLS: &[Named] = calls! {
    "another kind of file" => gguf::read(&mut Cursor::new(b"PK\x03\x04".as_slice())),
    "a header that ends early" => gguf::read(&mut Cursor::new(&File::llama()?.bytes()?[..100])),
    "an empty file" => gguf::read(&mut Cursor::new([].as_slice())),
    "rotary factors without their tensor" => {
        let mut file = File::llama()?;
        file.add("rope_freqs.weight", &zeros(2), GgmlDType::F32)?;
        gguf::attention_config(&file.open()?.0)
    },
    "a file that ends before its weights" => {
        let bytes = File::llama()?.bytes()?;
        let mut reader = Cursor::new(bytes[..bytes.len() - 600].to_vec());
        let content = gguf::read(&mut reader)?;
        gguf::load_attention(&content, &mut reader, 0, &CPU)
    },
    "a part without outputs" => {
        let (content, mut reader) = File::llama()?.open()?;
        let part = LinearShard::Outputs(vec![]);
        gguf::load_linear_part(&content, &mut reader, "blk.0.attn_q", &part, &CPU)?.forward(&zeros((1, 8)))
    },
    "more merges than any vocabulary has" => {
        let nested: Vec<_> = (1..=1000).map(|len| Entry::String("a".repeat(len))).collect();
        let mut file = File::llama()?;
        file.set("tokenizer.ggml.scores", Entry::Array(vec![Entry::F32(0.0); nested.len()]));
        file.set("tokenizer.ggml.tokens", Entry::Array(nested));
        file.set("tokenizer.ggml.model", Entry::String("llama".into()));
        gguf::tokenizer(&file.open()?.0)
    },
    "a token of some megabytes beside short ones" => {
        let long = "ab".repeat(1 << 21);
        let tokens = ["<unk>", "<s>", "</s>", "a", "b", "▁", "ab", &long, &long[1..], "abc", "c"];
        let mut file = File::llama()?;
        file.set("tokenizer.ggml.scores", Entry::Array((0..tokens.len()).map(|i| Entry::F32(-(i as f32))).collect()));
        file.set("tokenizer.ggml.tokens", Entry::Array(tokens.map(|token| Entry::String(token.into())).into()));
        file.set("tokenizer.ggml.model", Entry::String("llama".into()));
        file.set("tokenizer.ggml.bos_token_id", Entry::U32(1));
        file.set("tokenizer.ggml.eos_token_id", Entry::U32(2));
        assert!(gguf::tokenizer(&file.open()?.0)?.encode("abc")?.tokens.contains(&"abc".into()));
        Ok::<_, Error>(())
    },
};
