//! WordPiece, the tokenizer of BERT.

use candle_core::Result;
use serde_json::{Map, Value, json};

use super::metadata::TokenizerMetadata;
use super::{Base, Pieces, unknown_token};

/// Builds WordPiece. In a file, a token that begins a word begins with U+2581, and others have no "##".
pub(super) fn word_piece(metadata: &TokenizerMetadata, pieces: &Pieces) -> Result<Base> {
    let mut vocabulary = Map::new();
    for (id, token) in pieces.tokens.iter().enumerate() {
        let text = match token.strip_prefix('▁') {
            _ if pieces.is_added(id) => (*token).to_string(),
            Some(beginning) => beginning.to_string(),
            None => format!("##{token}"),
        };
        vocabulary.insert(text, json!(id));
    }
    let lowercase = metadata.flag("normalizer.lowercase", true)?;
    let strip_accents = metadata.flag("normalizer.strip_accents", lowercase)?;
    let unknown = match unknown_token(pieces) {
        Value::Null => json!("[UNK]"),
        token => token,
    };
    let tokenizer = json!({
        "version": "1.0",
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": strip_accents,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {
            "type": "WordPiece", "vocab": vocabulary, "unk_token": unknown, "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
    });
    Ok(Base { is_bert: true, adds_bos: true, adds_eos: true, separates_pairs: true, ..Base::new(tokenizer) })
}
