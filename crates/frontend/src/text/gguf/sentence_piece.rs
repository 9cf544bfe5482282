//! SentencePiece's tokenizers: BPE by the scores of tokens (`llama`), and unigrams (`t5`).

use std::collections::{BTreeSet, HashMap};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use candle_core::{Result, bail};
use serde_json::json;

use super::charsmap::is_sound;
use super::metadata::{TokenizerMetadata, integer};
use super::{BYTE, Base, CONTROL, Pieces, UNKNOWN, USER_DEFINED, unknown_token};

/// The most bytes of SentencePiece tokens to divide, each token counted for every length at which it may divide into
/// two. The largest vocabularies stay several times below it.
const MAX_DIVIDED: usize = 1 << 27;

/// Builds SentencePiece's BPE. Its merges are the pairs of tokens that make a token, with the highest score first.
pub(super) fn sentence_piece(metadata: &TokenizerMetadata, pieces: &Pieces) -> Result<Base> {
    let Pieces { tokens, types } = pieces;
    let scores = metadata.scores(tokens.len())?;
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
    let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if metadata.flag("add_space_prefix", true)? {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let mut model = json!({
        "type": "BPE", "merges": merges, "unk_token": unknown_token(pieces), "fuse_unk": true, "byte_fallback": true,
    });
    model["vocab"] = pieces.vocabulary();
    let tokenizer = json!({
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    });
    Ok(Base { adds_bos: true, ..Base::new(tokenizer) })
}

/// Two tokens of SentencePiece that make another one.
struct Merge<'a> {
    /// The score of the token that they make.
    score: f32,
    ids: (&'a usize, &'a usize),
    texts: (&'a str, &'a str),
}

/// Builds SentencePiece's unigrams: the division of a text into tokens with the highest sum of scores.
pub(super) fn unigram(metadata: &TokenizerMetadata, pieces: &Pieces) -> Result<Base> {
    /// The token for unknown characters, unless the file says otherwise.
    const UNKNOWN_ID: i64 = 2;
    let Pieces { tokens, types } = pieces;
    let scores = metadata.scores(tokens.len())?;
    let unknown = metadata.one("unknown_token_id", "an integer", integer)?.unwrap_or(UNKNOWN_ID);
    if usize::try_from(unknown).ok().and_then(|id| tokens.get(id)).is_none() {
        bail!("[gguf] tokenizer.ggml.unknown_token_id names no token, expected one below {}", tokens.len())
    }
    let mut vocabulary = Vec::with_capacity(tokens.len());
    for ((token, score), &kind) in tokens.iter().zip(scores).zip(types) {
        if !score.is_finite() {
            return metadata.fail("scores", score, "finite numbers");
        }
        // A token of the user has the score of a certain one.
        vocabulary.push(json!([token, if kind == USER_DEFINED { 0.0 } else { score }]));
    }
    let mut normalizers = Vec::new();
    if let Some(map) = metadata.list("precompiled_charsmap", "bytes", integer)? {
        // Bytes may have signs.
        let bytes: Vec<_> = map.iter().map(|&byte| byte as u8).collect();
        if !bytes.is_empty() {
            if !is_sound(&bytes) {
                return metadata.fail("precompiled_charsmap", "another table", "one of SentencePiece");
            }
            normalizers.push(json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(bytes)}));
        }
    }
    if metadata.flag("remove_extra_whitespaces", false)? {
        for (blanks, content) in [("^ +| +$", ""), (" {2,}", " ")] {
            normalizers.push(json!({"type": "Replace", "pattern": {"Regex": blanks}, "content": content}));
        }
    }
    let scheme = if metadata.flag("add_space_prefix", false)? { "always" } else { "never" };
    let blanks = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let tokenizer = json!({
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": blanks,
        "decoder": blanks,
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": false},
    });
    Ok(Base { adds_eos: true, separates_pairs: true, ..Base::new(tokenizer) })
}
