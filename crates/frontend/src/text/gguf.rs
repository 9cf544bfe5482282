//! The tokenizer that the metadata of a GGUF file describe.

use std::collections::{BTreeSet, HashMap};

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Result, bail};
use serde_json::{Map, json};

use super::SimpleTokenizer;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How `tokenizer.ggml.pre` divides a text before bytes are merged: the expression, whether each digit stands alone,
/// whether whole words are looked up first and a text begins with its token (Llama 3), and whether texts are composed
/// (NFC).
const SPLITS: &[(&[&str], &str, [bool; 3])] = &[
    (&["gpt-2", "mpt", "olmo", "phi-2"], GPT2, [false, false, false]),
    (&["command-r", "refact", "smollm", "starcoder"], GPT2, [true, false, false]),
    (&["falcon3", "llama-bpe", "llama-v3", "llama3"], LLAMA3, [false, true, false]),
    (&["chatglm-bpe", "dbrx", "glm4", "smaug-bpe"], LLAMA3, [false, false, false]),
    (&["stablelm2"], QWEN2, [false, false, false]),
    (&["deepseek-r1-qwen", "qwen2"], QWEN2, [false, false, true]),
];

/// Kinds of tokens (`tokenizer.ggml.token_type`).
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// What is expected of a flag.
const FLAG: &str = "true or false";

/// Bytes of the tokens of SentencePiece, each counted for every length at which it may divide into two: several times
/// those of the largest vocabularies.
const MAX_DIVIDED: usize = 1 << 27;

/// The tokenizer of a GGUF file: byte-level BPE (`gpt2`), or SentencePiece's BPE (`llama`).
///
/// # Errors
/// For a model or a division of texts that is not known, naming those that are, and for lists that are missing, of the
/// wrong type or of different lengths.
pub fn gguf_tokenizer(content: &Content) -> Result<SimpleTokenizer> {
    let metadata = Metadata(content);
    let tokens = metadata.texts("tokens")?;
    let types = metadata.list("token_type", "integers", integer)?.unwrap_or_else(|| vec![1; tokens.len()]);
    if types.len() != tokens.len() {
        return metadata.fail("token_type", types.len(), &format!("{} entries", tokens.len()));
    }
    let (mut tokenizer, adds_bos) = match metadata.text("model")? {
        "gpt2" => byte_level(&metadata)?,
        "llama" => sentence_piece(&metadata, &tokens, &types)?,
        other => bail!("[gguf] tokenizer.ggml.model is {other:?}, expected \"gpt2\" or \"llama\""),
    };
    let vocab: Map<_, _> = tokens.iter().enumerate().map(|(id, token)| (token.to_string(), json!(id))).collect();
    tokenizer["model"]["vocab"] = vocab.into();
    let is_added = |kind: i64| matches!(kind, UNKNOWN | CONTROL | USER_DEFINED);
    let added =
        tokens.iter().zip(&types).enumerate().filter(|(_, (token, kind))| is_added(**kind) && !token.is_empty());
    tokenizer["added_tokens"] = added
        .map(|(id, (token, &kind))| {
            json!({
                "id": id, "content": token, "special": kind != USER_DEFINED, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            })
        })
        .collect();
    let mut ends = [Vec::new(), Vec::new()];
    let mut special_tokens = Map::new();
    for (end, name, default) in [(0, "bos", adds_bos), (1, "eos", false)] {
        if !metadata.one(&format!("add_{name}_token"), FLAG, Value::to_bool)?.unwrap_or(default) {
            continue;
        }
        let id = metadata.one(&format!("{name}_token_id"), "an integer", integer)?;
        let Some(token) = id.and_then(|id| tokens.get(usize::try_from(id).ok()?)) else {
            bail!("[gguf] tokenizer.ggml.{name}_token_id names no token, expected one below {}", tokens.len())
        };
        ends[end].push(json!({"SpecialToken": {"id": token, "type_id": 0}}));
        special_tokens.insert(token.to_string(), json!({"id": token, "ids": [id], "tokens": [token]}));
    }
    let sequences = ["A", "B"].map(|id| json!({"Sequence": {"id": id, "type_id": 0}}));
    let template = |sequences: &[serde_json::Value]| [ends[0].as_slice(), sequences, &ends[1]].concat();
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing", "single": template(&sequences[..1]), "pair": template(&sequences),
        "special_tokens": special_tokens,
    });
    Ok(SimpleTokenizer::from_bytes(tokenizer.to_string())?)
}

/// A model's tokenizer.json without its tokens, and whether a text begins with one unless the file says otherwise.
type Parts = (serde_json::Value, bool);

fn byte_level(metadata: &Metadata) -> Result<Parts> {
    let pre = metadata.text("pre")?;
    let Some(&(_, regex, [digits, is_llama3, composes])) = SPLITS.iter().find(|(names, ..)| names.contains(&pre))
    else {
        let mut known: Vec<_> = SPLITS.iter().flat_map(|(names, ..)| *names).copied().collect();
        known.sort_unstable();
        bail!("[gguf] tokenizer.ggml.pre is {pre:?}, expected one of: {}", known.join(", "))
    };
    let mut merges = Vec::new();
    for merge in metadata.texts("merges")? {
        match merge.split_once(' ') {
            Some(pair) => merges.push(json!([pair.0, pair.1])),
            None => return metadata.fail("merges", format!("{merge:?}"), "two tokens with a space between"),
        }
    }
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let digits = digits.then(|| json!({"type": "Digits", "individual_digits": true}));
    let steps: Vec<_> = digits.into_iter().chain([split, bytes.clone()]).collect();
    let tokenizer = json!({
        "version": "1.0",
        "normalizer": composes.then(|| json!({"type": "NFC"})),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": bytes,
        "model": {"type": "BPE", "merges": merges, "ignore_merges": is_llama3},
    });
    Ok((tokenizer, is_llama3))
}

/// The merges of SentencePiece are those that make a token of two others, that of the highest score first.
fn sentence_piece(metadata: &Metadata, tokens: &[&str], types: &[i64]) -> Result<Parts> {
    let scores = metadata.list("scores", "numbers", Value::to_f32)?.unwrap_or_default();
    if scores.len() != tokens.len() {
        return metadata.fail("scores", scores.len(), &format!("{} entries", tokens.len()));
    }
    let ids: HashMap<_, _> = tokens.iter().enumerate().map(|(id, token)| (*token, id)).collect();
    // A token can be two others only where there are tokens of those lengths, however long it is.
    let lens: BTreeSet<_> = tokens.iter().map(|token| token.len()).filter(|&len| len > 0).collect();
    let (mut merges, mut divided) = (Vec::new(), 0);
    for ((token, score), kind) in tokens.iter().zip(scores).zip(types) {
        if matches!(*kind, UNKNOWN | CONTROL | BYTE) {
            continue;
        }
        for &at in lens.range(..token.len()).filter(|&&at| token.is_char_boundary(at)) {
            divided += token.len();
            if divided > MAX_DIVIDED {
                let expected = format!("at most {MAX_DIVIDED} bytes of them");
                return metadata.fail("tokens", "too many divisions of its texts", &expected);
            }
            let pair = token.split_at(at);
            if let (Some(first), Some(second)) = (ids.get(pair.0), ids.get(pair.1)) {
                merges.push((score, (first, second), pair));
            }
        }
    }
    merges.sort_by(|(a, ids_a, _), (b, ids_b, _)| b.total_cmp(a).then(ids_a.cmp(ids_b)));
    let merges: Vec<_> = merges.iter().map(|(_, _, pair)| json!([pair.0, pair.1])).collect();
    let unknown = types.iter().position(|&kind| kind == UNKNOWN).map(|id| tokens[id]);
    let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if metadata.one("add_space_prefix", FLAG, Value::to_bool)?.unwrap_or(true) {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let tokenizer = json!({
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "merges": merges, "unk_token": unknown, "fuse_unk": true, "byte_fallback": true},
    });
    Ok((tokenizer, true))
}

/// The keys of `tokenizer.ggml`.
struct Metadata<'a>(&'a Content);

impl<'a> Metadata<'a> {
    fn fail<T>(&self, key: &str, found: impl std::fmt::Display, expected: &str) -> Result<T> {
        bail!("[gguf] tokenizer.ggml.{key} has {found}, expected {expected}")
    }

    /// The value of a key, if the file has it, as `read` takes it.
    fn one<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Result<T>) -> Result<Option<T>> {
        let Some(value) = self.0.metadata.get(&format!("tokenizer.ggml.{key}")) else { return Ok(None) };
        match read(value) {
            Ok(value) => Ok(Some(value)),
            Err(_) => self.fail(key, format!("{value:?}"), expected),
        }
    }

    /// The list of a key, if the file has it, each entry as `read` takes it.
    fn list<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Result<T>) -> Result<Option<Vec<T>>> {
        let Some(list) = self.one(key, "a list", Value::to_vec)? else { return Ok(None) };
        let entry = |value| read(value).or_else(|_| self.fail(key, format!("{value:?}"), expected));
        list.iter().map(entry).collect::<Result<_>>().map(Some)
    }

    fn texts(&self, key: &str) -> Result<Vec<&'a str>> {
        self.required(key, self.list(key, "texts", |value| value.to_string().map(String::as_str))?)
    }

    fn text(&self, key: &str) -> Result<&'a str> {
        self.required(key, self.one(key, "a text", |value| value.to_string().map(String::as_str))?)
    }

    fn required<T>(&self, key: &str, found: Option<T>) -> Result<T> {
        found.map_or_else(|| bail!("[gguf] the metadata has no tokenizer.ggml.{key}"), Ok)
    }
}

fn integer(value: &Value) -> Result<i64> {
    match *value {
        Value::I8(number) => Ok(number.into()),
        Value::I16(number) => Ok(number.into()),
        Value::I32(number) => Ok(number.into()),
        Value::I64(number) => Ok(number),
        ref value => value.to_u64()?.try_into().map_err(candle_core::Error::wrap),
    }
}
