//! The tokenizer in the metadata of a GGUF file.

use std::collections::{BTreeSet, HashMap};

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Result, bail};
use serde_json::{Map, json};

use super::SimpleTokenizer;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The division of a text before its bytes are merged.
struct Division {
    /// The values of `tokenizer.ggml.pre` that name it.
    names: &'static [&'static str],
    /// The expression of a word.
    regex: &'static str,
    /// Whether each digit is a word by itself.
    splits_digits: bool,
    /// Whether words are looked up whole before they are merged, and a text begins with its first token (Llama 3).
    is_llama3: bool,
    /// Whether texts are composed (NFC).
    composes: bool,
}

impl Division {
    const fn new(names: &'static [&'static str], regex: &'static str) -> Self {
        Self { names, regex, splits_digits: false, is_llama3: false, composes: false }
    }
}

const DIVISIONS: &[Division] = &[
    Division::new(&["gpt-2", "mpt", "olmo", "phi-2"], GPT2),
    Division { splits_digits: true, ..Division::new(&["command-r", "refact", "smollm", "starcoder"], GPT2) },
    Division { is_llama3: true, ..Division::new(&["falcon3", "llama-bpe", "llama-v3", "llama3"], LLAMA3) },
    Division::new(&["chatglm-bpe", "dbrx", "glm4", "smaug-bpe"], LLAMA3),
    Division::new(&["stablelm2"], QWEN2),
    Division { composes: true, ..Division::new(&["deepseek-r1-qwen", "qwen2"], QWEN2) },
];

/// The kinds of tokens (`tokenizer.ggml.token_type`).
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// The expected value of a flag.
const FLAG: &str = "true or false";

/// The most bytes of SentencePiece tokens to divide, each token counted for every length at which it may divide into
/// two. The largest vocabularies stay several times below it.
const MAX_DIVIDED: usize = 1 << 27;

/// Builds the tokenizer of a GGUF file: byte-level BPE (`gpt2`), or SentencePiece's BPE (`llama`).
///
/// # Errors
/// If the model or the kind of division is not known (the error lists the known ones), or if a list is missing, of the
/// wrong type or of another length.
pub fn gguf_tokenizer(content: &Content) -> Result<SimpleTokenizer> {
    let metadata = Metadata(content);
    let tokens = metadata.texts("tokens")?;
    let types = metadata.list("token_type", "integers", integer)?.unwrap_or_else(|| vec![1; tokens.len()]);
    if types.len() != tokens.len() {
        return metadata.fail("token_type", types.len(), &format!("{} entries", tokens.len()));
    }
    let Base { mut tokenizer, adds_bos } = match metadata.text("model")? {
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
    let mut special_tokens = Map::new();
    let mut special_token = |name: &str, default: bool| -> Result<Option<serde_json::Value>> {
        if !metadata.one(&format!("add_{name}_token"), FLAG, Value::to_bool)?.unwrap_or(default) {
            return Ok(None);
        }
        let id = metadata.one(&format!("{name}_token_id"), "an integer", integer)?;
        let Some(token) = id.and_then(|id| tokens.get(usize::try_from(id).ok()?)) else {
            bail!("[gguf] tokenizer.ggml.{name}_token_id names no token, expected one below {}", tokens.len())
        };
        special_tokens.insert(token.to_string(), json!({"id": token, "ids": [id], "tokens": [token]}));
        Ok(Some(json!({"SpecialToken": {"id": token, "type_id": 0}})))
    };
    let begin = special_token("bos", adds_bos)?;
    let end = special_token("eos", false)?;
    let template = |sequences: &[&str]| -> Vec<serde_json::Value> {
        let sequences = sequences.iter().map(|id| json!({"Sequence": {"id": id, "type_id": 0}}));
        begin.iter().cloned().chain(sequences).chain(end.clone()).collect()
    };
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing", "single": template(&["A"]), "pair": template(&["A", "B"]),
        "special_tokens": special_tokens,
    });
    Ok(SimpleTokenizer::from_bytes(tokenizer.to_string())?)
}

/// The parts of a tokenizer that depend on the kind of its model.
struct Base {
    /// The tokenizer.json without tokens.
    tokenizer: serde_json::Value,
    /// Whether a text begins with a special token unless the file says otherwise.
    adds_bos: bool,
}

/// Builds byte-level BPE.
fn byte_level(metadata: &Metadata) -> Result<Base> {
    let pre = metadata.text("pre")?;
    let Some(division) = DIVISIONS.iter().find(|division| division.names.contains(&pre)) else {
        let mut known: Vec<_> = DIVISIONS.iter().flat_map(|division| division.names).copied().collect();
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
    let split = json!({"type": "Split", "pattern": {"Regex": division.regex}, "behavior": "Isolated", "invert": false});
    let mut steps = vec![split, bytes.clone()];
    if division.splits_digits {
        steps.insert(0, json!({"type": "Digits", "individual_digits": true}));
    }
    let tokenizer = json!({
        "version": "1.0",
        "normalizer": if division.composes { json!({"type": "NFC"}) } else { serde_json::Value::Null },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": bytes,
        "model": {"type": "BPE", "merges": merges, "ignore_merges": division.is_llama3},
    });
    Ok(Base { tokenizer, adds_bos: division.is_llama3 })
}

/// Builds SentencePiece's BPE. Its merges are the pairs of tokens that make a token, with the highest score first.
fn sentence_piece(metadata: &Metadata, tokens: &[&str], types: &[i64]) -> Result<Base> {
    let scores = metadata.list("scores", "numbers", Value::to_f32)?.unwrap_or_default();
    if scores.len() != tokens.len() {
        return metadata.fail("scores", scores.len(), &format!("{} entries", tokens.len()));
    }
    let ids: HashMap<_, _> = tokens.iter().enumerate().map(|(id, token)| (*token, id)).collect();
    // A long token has few divisions if few lengths of tokens occur, so only those lengths are tried.
    let lens: BTreeSet<_> = tokens.iter().map(|token| token.len()).filter(|&len| len > 0).collect();
    let mut merges = Vec::new();
    let mut divided = 0;
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
            if let Some(first) = ids.get(pair.0)
                && let Some(second) = ids.get(pair.1)
            {
                merges.push(Merge { score, ids: (first, second), texts: pair });
            }
        }
    }
    merges.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.ids.cmp(&b.ids)));
    let merges: Vec<_> = merges.iter().map(|merge| json!([merge.texts.0, merge.texts.1])).collect();
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
    Ok(Base { tokenizer, adds_bos: true })
}

/// Two tokens of SentencePiece that make another one.
struct Merge<'a> {
    /// The score of the token that they make.
    score: f32,
    ids: (&'a usize, &'a usize),
    texts: (&'a str, &'a str),
}

/// The keys of `tokenizer.ggml`.
struct Metadata<'a>(&'a Content);

impl<'a> Metadata<'a> {
    fn fail<T>(&self, key: &str, found: impl std::fmt::Display, expected: &str) -> Result<T> {
        bail!("[gguf] tokenizer.ggml.{key} has {found}, expected {expected}")
    }

    /// Returns the value of a key read by `read`, if the file has the key.
    fn one<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Result<T>) -> Result<Option<T>> {
        let Some(value) = self.0.metadata.get(&format!("tokenizer.ggml.{key}")) else { return Ok(None) };
        match read(value) {
            Ok(value) => Ok(Some(value)),
            Err(_) => self.fail(key, format!("{value:?}"), expected),
        }
    }

    /// Returns the list of a key with each entry read by `read`, if the file has the key.
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
