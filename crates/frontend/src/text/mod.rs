//! From text to the layer's input: [`SimpleTokenizer`] returns ids (B, T), [`EmbeddingLayer`] vectors (B, T, E).
//! [`TokenizerError`] is the error of the tokenizer.

mod embedding;
mod gguf;
mod pipeline;
mod tokenizer;

use std::ops::Range;

use candle_core::{Device, Result, Tensor};
use thiserror::Error;
use tokenizers::{PaddingDirection, PaddingParams};

use candle_attention_core::{AttentionMask, ValidLens};
use candle_attention_modules::base::copied_to;
pub use embedding::{EmbeddingConfig, EmbeddingLayer};
pub use gguf::gguf_tokenizer;
pub use tokenizer::{SimpleTokenizer, SpecialTokens, Split};

/// One text, or two texts together, as ids and tokens. All lists have the same length T.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Encoding {
    /// The ids, (T,).
    pub ids: Vec<u32>,
    /// The word, or the part of a word, of each id.
    pub tokens: Vec<String>,
    /// The text that each id belongs to if there are two (`token_type_ids`, as the file defines them); usually 0 for
    /// one text.
    pub type_ids: Vec<u32>,
    /// The number of tokens at the end of the text that truncation left out.
    pub num_truncated: usize,
}

/// The side of a row that has the padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PaddingSide {
    /// Before the text, so that all texts end together (generation by decoder-only models).
    Left,
    /// After the text.
    Right,
}

/// A batch of B texts, padded to T, the length of the longest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    ids: Vec<Vec<u32>>,
    tokens: Vec<Vec<String>>,
    lens: Vec<usize>,
    num_truncated: Vec<usize>,
    seq_len: usize,
    side: PaddingSide,
}

impl Batch {
    fn new(mut rows: Vec<Encoding>, padding: Option<PaddingParams>) -> std::result::Result<Self, TokenizerError> {
        let lens: Vec<usize> = rows.iter().map(|row| row.ids.len()).collect();
        if lens.is_empty() {
            return invalid("the batch is empty: give at least one text");
        }
        let shortest = lens.iter().min().copied().unwrap_or(0);
        let longest = lens.iter().max().copied().unwrap_or(0);
        let is_left = padding.as_ref().is_some_and(|padding| matches!(padding.direction, PaddingDirection::Left));
        let side = if is_left { PaddingSide::Left } else { PaddingSide::Right };
        if let Some(padding) = padding {
            for row in &mut rows {
                let at = if is_left { 0 } else { row.ids.len() };
                let missing = longest - row.ids.len();
                row.ids.splice(at..at, std::iter::repeat_n(padding.pad_id, missing));
                row.tokens.splice(at..at, std::iter::repeat_n(padding.pad_token.clone(), missing));
            }
        } else if shortest < longest {
            return invalid(format!(
                "the batch's texts have {shortest} to {longest} tokens, which takes a padding token: choose one with \
                 with_padding, or give texts of one length"
            ));
        }
        let num_truncated = rows.iter().map(|row| row.num_truncated).collect();
        let mut ids = Vec::with_capacity(rows.len());
        let mut tokens = Vec::with_capacity(rows.len());
        for row in rows {
            ids.push(row.ids);
            tokens.push(row.tokens);
        }
        Ok(Self { ids, tokens, lens, num_truncated, seq_len: longest, side })
    }

    /// Returns the ids with padding, (B, T).
    pub fn ids(&self) -> &[Vec<u32>] {
        &self.ids
    }

    /// Returns the tokens with padding, (B, T).
    pub fn tokens(&self) -> &[Vec<String>] {
        &self.tokens
    }

    /// Returns the number of tokens in each text, without padding, (B,).
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Returns the number of tokens that truncation left out of each text, (B,).
    pub fn num_truncated(&self) -> &[usize] {
        &self.num_truncated
    }

    /// Returns B, the number of texts, which is at least 1.
    pub fn batch_size(&self) -> usize {
        self.ids.len()
    }

    /// Returns T, the length of each row with its padding; 0 if all texts are empty.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Returns the side on which the rows are padded.
    pub fn padding_side(&self) -> PaddingSide {
        self.side
    }

    /// Returns the ids with padding as a u32 tensor (B, T).
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn ids_tensor(&self, device: &Device) -> Result<Tensor> {
        copied_to(device, self.ids.concat(), (self.batch_size(), self.seq_len))
    }

    /// Returns the mask of the padding, on either side, for a call over these texts alone. A layer accepts it by
    /// [`AttentionInput::with_mask`](candle_attention_core::AttentionInput::with_mask). In a call with a cache, padding
    /// is described by [`AttentionInput::with_valid_lens`](candle_attention_core::AttentionInput::with_valid_lens) and
    /// [`with_starts`](candle_attention_core::AttentionInput::with_starts) instead.
    ///
    /// ```
    /// use candle_attention::text::{PaddingSide, SimpleTokenizer};
    /// let words = SimpleTokenizer::from_words(["<pad>", "hello", "world"])?;
    /// let batch = words.encode_batch(&["hello world", "world"])?;
    /// assert_eq!(batch.mask().resolve(2, 1, 2)?.to_string(), "1 1\n\n1 .\n");
    /// let batch = words.with_padding_side(PaddingSide::Left)?.encode_batch(&["hello world", "world"])?;
    /// assert_eq!(batch.mask().resolve(2, 1, 2)?.to_string(), "1 1\n\n. 1\n");
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn mask(&self) -> AttentionMask {
        AttentionMask::of_runs(self.runs(), self.seq_len)
    }

    /// Returns the range of each text in its row.
    fn runs(&self) -> impl Iterator<Item = Range<usize>> {
        self.lens.iter().map(|&len| match self.side {
            PaddingSide::Right => 0..len,
            PaddingSide::Left => self.seq_len - len..self.seq_len,
        })
    }

    /// Returns the number of tokens in each text, (B,), for `AttentionMask::with_valid_lens`: keys at and past the
    /// length are padding.
    ///
    /// # Errors
    ///
    /// If the tokenizer pads on the left, whether or not this batch has padding: the first keys are then padding, and
    /// [`starts`](Self::starts) describes them.
    pub fn valid_lens(&self) -> std::result::Result<ValidLens, TokenizerError> {
        match self.side {
            PaddingSide::Right => Ok(ValidLens::from(self.lens.clone())),
            PaddingSide::Left => invalid(
                "the batch is padded on the left, so lengths would hide the wrong tokens: use mask(), or starts()",
            ),
        }
    }

    /// Returns the position of each text's first token, (B,), for `AttentionMask::with_starts`: keys before it are
    /// padding. All are zero if the padding is on the right.
    pub fn starts(&self) -> ValidLens {
        ValidLens::from(self.runs().map(|run| run.start).collect::<Vec<_>>())
    }
}

/// The error type of the `tokenizers` crate.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An error of [`SimpleTokenizer`] or of a [`Batch`].
///
/// It converts into [`candle_core::Error`], so that `?` works in functions that return [`candle_core::Result`]. Fields
/// are indices, from 0; messages count words and texts from 1. In a message a long word is cut; the field has the
/// whole word.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A vocabulary, a setting, a batch or an id that cannot be used. The message says why, and what to do.
    #[error("[tokenizer] {0}")]
    Invalid(String),

    /// A word of the text is not in the vocabulary, and there is no unknown token.
    #[error(
        "[tokenizer] word {}, {}, is not in the vocabulary: {}",
        .position + 1,
        quoted(.word),
        suggestion(.nearest, .vocabulary, "add it, or choose a word for all unknown ones with with_unknown")
    )]
    UnknownWord {
        /// The word that was looked up in the vocabulary (after a loaded file's normalisation).
        word: String,
        /// The index of the word among the pieces that the text splits into.
        position: usize,
        /// The nearest words of the vocabulary, best first, at most three.
        nearest: Vec<String>,
        /// The first words of the vocabulary, at most ten.
        vocabulary: Vec<String>,
    },

    /// The model has no token for a part of a word and no unknown token. The `tokenizers` crate would omit that
    /// part without an error.
    #[error(
        "[tokenizer] word {}, {}, has characters that the file's {model} model has no token for: remove them, or use a \
         file with an unknown token or byte fallback",
        .position + 1,
        quoted(.word)
    )]
    DroppedCharacters {
        /// The word, after the file's normalisation.
        word: String,
        /// The index of the word among the pieces that the text splits into.
        position: usize,
        /// The model's kind, as tokenizer.json names it.
        model: &'static str,
    },

    /// A text of a batch failed.
    #[error("{source} (text {} of the batch)", .index + 1)]
    InBatch {
        /// The index of the text.
        index: usize,
        /// The error of the text.
        source: Box<TokenizerError>,
    },

    /// A file, or a step of its pipeline, failed for the reason in `source`.
    #[error("[tokenizer] {what}: {}", one_line(.source))]
    Failed {
        /// The operation that failed.
        what: String,
        /// The error of the operating system or of the `tokenizers` crate.
        source: BoxError,
    },
}

impl From<TokenizerError> for candle_core::Error {
    fn from(error: TokenizerError) -> Self {
        Self::wrap(error)
    }
}

/// Returns [`TokenizerError::Invalid`] with its message.
fn invalid<T>(message: impl Into<String>) -> std::result::Result<T, TokenizerError> {
    Err(TokenizerError::Invalid(message.into()))
}

/// Returns a function that makes [`TokenizerError::Failed`] from its source.
fn failed<E: Into<BoxError>>(what: impl Into<String>) -> impl FnOnce(E) -> TokenizerError {
    |source| TokenizerError::Failed { what: what.into(), source: source.into() }
}

/// Returns the word in quotes, with control characters escaped, cut so that the message stays readable.
fn quoted(word: &str) -> String {
    const SHOWN: usize = 60;
    match word.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}…", &word[..end]),
        None => format!("{word:?}"),
    }
}

/// Suggests what to do about a word that is not in the vocabulary.
fn suggestion(nearest: &[String], vocabulary: &[String], otherwise: &str) -> String {
    let list = |words: &[String], between| words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(between);
    if nearest.is_empty() {
        return format!("{otherwise}; its words begin with {}", list(vocabulary, ", "));
    }
    format!("did you mean {}? Otherwise {otherwise}", list(nearest, " or "))
}

fn one_line(error: &BoxError) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}
