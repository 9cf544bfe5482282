//! What can go wrong between a text and its ids.

use thiserror::Error;

/// The error type of the `tokenizers` crate.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An error of [`SimpleTokenizer`](super::SimpleTokenizer) or of a [`Batch`](super::Batch).
///
/// It converts into [`candle_core::Error`], so that `?` works in functions that return [`candle_core::Result`]. Fields
/// are indices, from 0; messages count words and texts from 1. In a message a long word is cut; the field holds all of
/// it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A vocabulary, a setting, a batch or an id that cannot be used. The message says why, and what to do.
    #[error("[tokenizer] {0}")]
    Invalid(String),

    /// A word of the text is not in the vocabulary, and there is no unknown token to stand for it.
    #[error("[tokenizer] word {}, {}, is not in the vocabulary: {}", .position + 1, quoted(.word), suggestion(.nearest, .vocabulary, "add it, or choose a word for all unknown ones with with_unknown"))]
    UnknownWord {
        /// The word, as the vocabulary was asked for it (after a loaded file's normalisation).
        word: String,
        /// The index of the word among the pieces that the text splits into.
        position: usize,
        /// The nearest words of the vocabulary, best first, at most three.
        nearest: Vec<String>,
        /// The first words of the vocabulary, at most ten.
        vocabulary: Vec<String>,
    },

    /// The model has no token for a part of a word and no unknown token. The `tokenizers` crate would leave that
    /// part out and say nothing.
    #[error("[tokenizer] word {}, {}, has characters that the file's {model} model has no token for: remove them, or use a file with an unknown token or byte fallback", .position + 1, quoted(.word))]
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
        /// What went wrong with it.
        source: Box<TokenizerError>,
    },

    /// A file, or a step of its pipeline, failed for the reason that `source` gives.
    #[error("[tokenizer] {what}: {}", one_line(.source))]
    Failed {
        /// What failed.
        what: String,
        /// The reason, of the operating system or of the `tokenizers` crate.
        source: BoxError,
    },
}

impl From<TokenizerError> for candle_core::Error {
    fn from(error: TokenizerError) -> Self {
        Self::wrap(error)
    }
}

/// [`TokenizerError::Invalid`] with its message.
pub(super) fn invalid<T>(message: impl Into<String>) -> Result<T, TokenizerError> {
    Err(TokenizerError::Invalid(message.into()))
}

/// [`TokenizerError::Failed`] from its reason.
pub(super) fn failed<E: Into<BoxError>>(what: impl Into<String>) -> impl FnOnce(E) -> TokenizerError {
    |source| TokenizerError::Failed { what: what.into(), source: source.into() }
}

/// The word in quotes, with control characters escaped, cut so that the message stays readable.
pub(super) fn quoted(word: &str) -> String {
    const SHOWN: usize = 60;
    match word.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}…", &word[..end]),
        None => format!("{word:?}"),
    }
}

/// What to do about a word that is not in the vocabulary.
pub(super) fn suggestion(nearest: &[String], vocabulary: &[String], otherwise: &str) -> String {
    let list = |words: &[String], between| words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(between);
    if nearest.is_empty() {
        return format!("{otherwise}; its words begin with {}", list(vocabulary, ", "));
    }
    format!("did you mean {}? Otherwise {otherwise}", list(nearest, " or "))
}

fn one_line(error: &BoxError) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}
