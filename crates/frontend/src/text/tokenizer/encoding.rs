//! From texts to ids, and back.

use tokenizers::parallelism::MaybeParallelRefIterator;
use tokenizers::{Decoder, DecoderWrapper};

use super::{Result, SimpleTokenizer, SpecialTokens, failed, invalid, pipeline};
use crate::text::{Batch, Encoding, TokenizerError};

impl SimpleTokenizer {
    /// Encodes `text`, with the special tokens of the file. The text "" has no other ids.
    ///
    /// # Errors
    ///
    /// If a word is not in the vocabulary and there is no unknown token: the error names the word, its position and
    /// the nearest words.
    pub fn encode(&self, text: &str) -> Result<Encoding> {
        self.encode_with(text, SpecialTokens::With)
    }

    /// Encodes a text with or without special tokens, like [`encode`](Self::encode).
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode).
    pub fn encode_with(&self, text: &str, special: SpecialTokens) -> Result<Encoding> {
        pipeline::encode(&self.inner, text, None, special == SpecialTokens::With, self.max_tokens)
    }

    /// Encodes two texts together, combined as the file says: a question and a passage for a cross-encoder. Truncation
    /// cuts the end of the longer text, until both have the same length.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode), and if the length of [`with_truncation`](Self::with_truncation) is not more than
    /// the number of special tokens of a pair.
    ///
    /// ```
    /// # use candle_attention::text::SimpleTokenizer;
    /// let tokenizer = SimpleTokenizer::from_words(["where", "is", "it", "here"])?;
    /// assert_eq!(tokenizer.encode_pair("where is it", "here")?.ids, [0, 1, 2, 3]);
    /// assert_eq!(tokenizer.encode_pair("where is it", "here")?.type_ids, [0, 0, 0, 1]);
    /// # Ok::<(), candle_attention::text::TokenizerError>(())
    /// ```
    pub fn encode_pair(&self, first: &str, second: &str) -> Result<Encoding> {
        pipeline::encode(&self.inner, first, Some(second), true, self.max_tokens)
    }

    /// Encodes texts as a batch (B, T), padded to the longest text.
    ///
    /// # Errors
    ///
    /// If there are no texts, a text cannot be encoded, or the texts differ in length and there is no padding token.
    pub fn encode_batch<S: AsRef<str> + Sync>(&self, texts: &[S]) -> Result<Batch> {
        self.encode_batch_with(texts, SpecialTokens::With)
    }

    /// Encodes a batch with or without special tokens, like [`encode_batch`](Self::encode_batch).
    ///
    /// # Errors
    ///
    /// As [`encode_batch`](Self::encode_batch).
    pub fn encode_batch_with<S: AsRef<str> + Sync>(&self, texts: &[S], special: SpecialTokens) -> Result<Batch> {
        let rows: Vec<_> = texts.maybe_par_iter().map(|text| self.encode_with(text.as_ref(), special)).collect();
        let in_batch = |(index, row): (usize, Result<_>)| {
            row.map_err(|error| TokenizerError::InBatch { index, source: Box::new(error) })
        };
        // Collected first, so that the reported error is always that of the first text that fails.
        Batch::new(rows.into_iter().enumerate().map(in_batch).collect::<Result<_>>()?, self.padding_params())
    }

    /// Returns the text of `ids`, special tokens and padding included: words joined by a space, or the result of the
    /// file's decoder.
    ///
    /// # Errors
    ///
    /// If an id is not in the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_with(ids, SpecialTokens::With)
    }

    /// Decodes ids with or without special tokens, like [`decode`](Self::decode).
    ///
    /// # Errors
    ///
    /// As [`decode`](Self::decode), also for ids that would be omitted.
    pub fn decode_with(&self, ids: &[u32], special: SpecialTokens) -> Result<String> {
        // Compared by text, since a file's padding id can be that of another word.
        let padding = self.padding_token();
        let is_special = |token: &String| {
            self.inner.get_added_vocabulary().is_special_token(token) || padding.as_ref() == Some(token)
        };
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        let decodes_bytes = self.inner.get_decoder().is_some_and(decodes_byte_letters);
        let mut tokens = Vec::with_capacity(ids.len());
        for (position, id) in ids.iter().enumerate() {
            let Some(token) = self.inner.id_to_token(*id) else {
                let number = position + 1;
                let words = self.vocab_size();
                return invalid(format!(
                    "id {id}, number {number} of the list, is not in the vocabulary of {words} words: give ids that \
                     this tokenizer made"
                ));
            };
            if special == SpecialTokens::Without && is_special(&token) {
                continue;
            }
            tokens.push(if decodes_bytes && added.contains_key(id) { byte_letters(&token) } else { token });
        }
        match self.inner.get_decoder() {
            // Some decoders count down from the number of tokens.
            Some(decoder) if !tokens.is_empty() => pipeline::catch_panic(|| decoder.decode(tokens))
                .map_err(failed("the file's tokenizer failed to decode")),
            _ => Ok(tokens.join(" ")),
        }
    }
}

/// Returns whether a decoder reads each letter of a token as one byte, as byte-level BPE spells them.
fn decodes_byte_letters(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteLevel(_) => true,
        DecoderWrapper::Sequence(steps) => steps.get_decoders().iter().any(decodes_byte_letters),
        _ => false,
    }
}

/// Spells a text in the letters of byte-level BPE, one for each byte.
///
/// An added token is text. The `ByteLevel` decoder would read a token such as `größe`, in which each letter is the
/// letter of a byte, as bytes.
fn byte_letters(text: &str) -> String {
    text.bytes().map(byte_letter).collect()
}

/// Returns the letter of a byte in byte-level BPE: printable characters of Latin-1 for themselves, and the
/// letters from U+0100 on for the others in order.
fn byte_letter(byte: u8) -> char {
    let place = u32::from(byte);
    let code = match byte {
        0..=0x20 => 0x100 + place,
        0x7f..=0xa0 => 0x121 + place - 0x7f,
        0xad => 0x143,
        _ => place,
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}
