//! The tokenizer in the metadata of a GGUF file.

mod byte_level;
mod charsmap;
mod divisions;
mod metadata;
mod sentence_piece;
mod word_piece;

use candle_core::quantized::gguf_file::Content;
use candle_core::{Result, bail};
use serde_json::{Map, Value, json};

use super::SimpleTokenizer;
use metadata::{TokenizerMetadata, integer};

/// The kinds of tokens (`tokenizer.ggml.token_type`).
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// Builds the tokenizer of a GGUF file: BPE over bytes (`gpt2`) or characters (`gemma4`), SentencePiece's BPE (`llama`)
/// and unigrams (`t5`), or BERT's WordPiece (`bert`).
///
/// # Errors
/// If the model or the kind of division is not known (the error lists the known ones), or if a list is missing, of the
/// wrong type or of another length.
pub fn gguf_tokenizer(content: &Content) -> Result<SimpleTokenizer> {
    let metadata = TokenizerMetadata(content);
    let tokens = metadata.texts("tokens")?;
    let types = metadata.list("token_type", "integers", integer)?.unwrap_or_else(|| vec![1; tokens.len()]);
    if types.len() != tokens.len() {
        return metadata.fail("token_type", types.len(), &format!("{} entries", tokens.len()));
    }
    let pieces = Pieces { tokens, types };
    let base = match metadata.text("model")? {
        "gpt2" => byte_level::byte_level(&metadata, &pieces)?,
        "gemma4" => byte_level::gemma4(&metadata, &pieces)?,
        "llama" => sentence_piece::sentence_piece(&metadata, &pieces)?,
        "t5" => sentence_piece::unigram(&metadata, &pieces)?,
        "bert" => word_piece::word_piece(&metadata, &pieces)?,
        other => bail!(
            "[gguf] tokenizer.ggml.model is {other:?}, expected \"gpt2\", \"gemma4\", \"llama\", \"t5\" or \"bert\""
        ),
    };
    let frame = Frame::read(&metadata, &pieces, &base)?;
    let mut tokenizer = base.tokenizer;
    tokenizer["added_tokens"] = pieces.added();
    tokenizer["post_processor"] = frame.template(base.separates_pairs, base.is_bert);
    Ok(SimpleTokenizer::from_bytes(tokenizer.to_string())?)
}

/// The tokens of a file and their kinds.
struct Pieces<'a> {
    tokens: Vec<&'a str>,
    types: Vec<i64>,
}

impl Pieces<'_> {
    /// Returns the ids by token.
    fn vocabulary(&self) -> Value {
        let ids: Map<_, _> = self.tokens.iter().enumerate().map(|(id, token)| (token.to_string(), json!(id))).collect();
        ids.into()
    }

    /// Returns whether a token is found in texts before they are divided.
    fn is_added(&self, id: usize) -> bool {
        matches!(self.types[id], UNKNOWN | CONTROL | USER_DEFINED)
    }

    /// Returns the tokens that are found in texts before they are divided.
    fn added(&self) -> Value {
        let mut added = Vec::new();
        for (id, token) in self.tokens.iter().enumerate() {
            if self.is_added(id) && !token.is_empty() {
                added.push(json!({
                    "id": id, "content": token, "special": self.types[id] != USER_DEFINED, "normalized": false,
                    "single_word": false, "lstrip": false, "rstrip": false,
                }));
            }
        }
        added.into()
    }
}

/// Returns the token for unknown characters; null if no token is of this kind.
fn unknown_token(pieces: &Pieces) -> Value {
    let unknown = pieces.types.iter().position(|&kind| kind == UNKNOWN);
    unknown.map_or(Value::Null, |id| json!(pieces.tokens[id]))
}

/// The parts of a tokenizer that depend on the kind of its model.
struct Base {
    /// The tokenizer.json without added tokens and without tokens at the ends of a text.
    tokenizer: Value,
    /// Whether a text begins with a special token unless the file says otherwise.
    adds_bos: bool,
    /// Whether a text begins with a special token in spite of the file.
    always_adds_bos: bool,
    /// Whether a text ends with a special token unless the file says otherwise.
    adds_eos: bool,
    /// Whether the first text of a pair ends with the special token too.
    separates_pairs: bool,
    /// Whether the special tokens are BERT's, `[CLS]` and `[SEP]`.
    is_bert: bool,
}

impl Base {
    fn new(tokenizer: Value) -> Self {
        Self {
            tokenizer,
            adds_bos: false,
            always_adds_bos: false,
            adds_eos: false,
            separates_pairs: false,
            is_bert: false,
        }
    }
}

/// The special tokens at the ends of a text.
struct Frame<'a> {
    begin: Option<Special<'a>>,
    end: Option<Special<'a>>,
}

#[derive(Clone, Copy)]
struct Special<'a> {
    id: i64,
    token: &'a str,
}

impl<'a> Frame<'a> {
    fn read(metadata: &TokenizerMetadata, pieces: &Pieces<'a>, base: &Base) -> Result<Self> {
        // The ids of BERT's tokens in its own vocabulary.
        let (end, begin_id, end_id) =
            if base.is_bert { ("seperator", Some(101), Some(102)) } else { ("eos", None, None) };
        let end_flag = if base.is_bert { "add_sep_token" } else { "add_eos_token" };
        let mut frame = Self { begin: None, end: None };
        if metadata.flag("add_bos_token", base.adds_bos)? || base.always_adds_bos {
            frame.begin = Some(Special::read(metadata, pieces, "bos_token_id", begin_id)?);
        }
        if metadata.flag(end_flag, base.adds_eos)? {
            frame.end = Some(Special::read(metadata, pieces, &format!("{end}_token_id"), end_id)?);
        }
        Ok(frame)
    }

    /// Returns the post-processor that adds the tokens to a text, and to a pair of texts.
    fn template(&self, separates_pairs: bool, is_bert: bool) -> Value {
        let special =
            |of: Option<Special>, kind: u8| of.map(|of| json!({"SpecialToken": {"id": of.token, "type_id": kind}}));
        let text = |name: &str, kind: u8| Some(json!({"Sequence": {"id": name, "type_id": kind}}));
        let second_kind = u8::from(is_bert);
        let single = [special(self.begin, 0), text("A", 0), special(self.end, 0)];
        let mut pair = vec![special(self.begin, 0), text("A", 0)];
        if separates_pairs {
            pair.push(special(self.end, 0));
            // RoBERTa's pairs, whose texts also begin with a token, have the token between them twice.
            if self.begin.is_some() && !is_bert {
                pair.push(special(self.end, 0));
            }
        }
        pair.extend([text("B", second_kind), special(self.end, second_kind)]);
        let mut tokens = Map::new();
        for of in [self.begin, self.end].into_iter().flatten() {
            tokens.insert(of.token.to_string(), json!({"id": of.token, "ids": [of.id], "tokens": [of.token]}));
        }
        json!({
            "type": "TemplateProcessing",
            "single": single.into_iter().flatten().collect::<Vec<_>>(),
            "pair": pair.into_iter().flatten().collect::<Vec<_>>(),
            "special_tokens": tokens,
        })
    }
}

impl<'a> Special<'a> {
    /// Reads the token that a key names.
    fn read(metadata: &TokenizerMetadata, pieces: &Pieces<'a>, key: &str, default: Option<i64>) -> Result<Self> {
        let id = metadata.one(key, "an integer", integer)?.or(default);
        let found = id.and_then(|id| Some(Self { id, token: pieces.tokens.get(usize::try_from(id).ok()?)? }));
        match found {
            Some(special) => Ok(special),
            None => bail!("[gguf] tokenizer.ggml.{key} names no token, expected one below {}", pieces.tokens.len()),
        }
    }
}
