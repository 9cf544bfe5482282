//! What can go wrong between a text and its ids.

use std::path::PathBuf;

use thiserror::Error;
use tokenizers::Tokenizer;

use candle_attention_core::internal::nearest;

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
    /// A vocabulary needs at least one word.
    #[error("[tokenizer] the vocabulary is empty: give at least one word")]
    EmptyVocabulary,

    /// The empty string cannot be a word: no text splits into it.
    #[error(
        "[tokenizer] the vocabulary's word {} is empty, and no text contains an empty word: remove it", .position + 1
    )]
    EmptyWord {
        /// Where the empty word stands in the list.
        position: usize,
    },

    /// A word stands in the vocabulary twice, so it would have two ids.
    #[error("[tokenizer] the word {} is in the vocabulary twice, as word {} and word {}: remove one", quoted(.word), .first + 1, .second + 1)]
    DuplicateWord {
        /// The word.
        word: String,
        /// Its first position.
        first: usize,
        /// Its second position.
        second: usize,
    },

    /// A token that was to play a part (unknown token, padding token) is not in the vocabulary.
    #[error("[tokenizer] the {part} token {} is not in the vocabulary: {}", quoted(.token), suggestion(.nearest, .vocabulary, "add it"))]
    NotInVocabulary {
        /// The part: `unknown` or `padding`.
        part: &'static str,
        /// The token.
        token: String,
        /// The nearest words of the vocabulary, best first, at most three.
        nearest: Vec<String>,
        /// The first words of the vocabulary, at most ten.
        vocabulary: Vec<String>,
    },

    /// Only a word-level vocabulary lets its unknown token be chosen afterwards.
    #[error(
        "[tokenizer] with_unknown is for word-level vocabularies, and this is a {model} model, whose file names its own: leave it out"
    )]
    NotWordLevel {
        /// The model's kind, as tokenizer.json names it.
        model: &'static str,
    },

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

    /// An id to decode is not in the vocabulary.
    #[error(
        "[tokenizer] id {id}, number {} of the list, is not in the vocabulary of {vocab_size} words: give ids that this tokenizer made", .position + 1
    )]
    UnknownId {
        /// The id.
        id: u32,
        /// Its position in the slice to decode.
        position: usize,
        /// The number of words in the vocabulary.
        vocab_size: usize,
    },

    /// Truncation to so few tokens would leave no room for text.
    #[error("[tokenizer] texts are cut at {max_tokens} tokens, expected more than the {num_special} that are added")]
    NoRoomForText {
        /// The most tokens of a text.
        max_tokens: usize,
        /// How many special tokens the file adds to each.
        num_special: usize,
    },

    /// A batch needs at least one text.
    #[error("[tokenizer] the batch is empty: give at least one text")]
    EmptyBatch,

    /// The texts of a batch differ in length, and there is no padding token to even them out.
    #[error(
        "[tokenizer] the batch's texts have {shortest} to {longest} tokens, which takes a padding token: choose one with with_padding, or give texts of one length"
    )]
    NoPadding {
        /// The fewest tokens of a text.
        shortest: usize,
        /// The most tokens of a text.
        longest: usize,
    },

    /// A padding side was chosen, but the vocabulary has neither `<pad>` nor `[PAD]`, and no token was chosen.
    #[error("[tokenizer] there is no padding token to put on a side: choose one with with_padding first")]
    NoPaddingToken,

    /// The batch is padded on the left, where lengths alone would hide real tokens and show padding.
    #[error(
        "[tokenizer] the batch is padded on the left, so lengths would hide the wrong tokens: use mask(), or starts()"
    )]
    PaddedOnTheLeft,

    /// A text of a batch failed.
    #[error("{source} (text {} of the batch)", .index + 1)]
    InBatch {
        /// The index of the text.
        index: usize,
        /// What went wrong with it.
        source: Box<TokenizerError>,
    },

    /// A file could not be read or written.
    #[error("[tokenizer] cannot {action} {path:?}: {source}")]
    File {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },

    /// The bytes are not a tokenizer.json, or one whose settings cannot be followed.
    #[error("[tokenizer] {} is not a tokenizer.json that can be used: {}", .path.as_ref().map_or("the input".into(), |p| format!("{p:?}")), one_line(.source))]
    Load {
        /// The file, if there was one.
        path: Option<PathBuf>,
        /// The reason.
        source: BoxError,
    },

    /// A step of the file's pipeline failed.
    #[error("[tokenizer] the file's tokenizer failed to {action}: {}", one_line(.source))]
    Pipeline {
        /// What it was doing: `encode`, `decode` or `save`.
        action: &'static str,
        /// The reason.
        source: BoxError,
    },
}

impl From<TokenizerError> for candle_core::Error {
    fn from(error: TokenizerError) -> Self {
        Self::wrap(error)
    }
}

/// The word in quotes, with control characters escaped, cut so that the message stays readable.
fn quoted(word: &str) -> String {
    const SHOWN: usize = 60;
    match word.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}…", &word[..end]),
        None => format!("{word:?}"),
    }
}

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

/// What of a vocabulary helps somebody who gave a word that is not in it: the [`nearest`] words, at most three, and the
/// first by id, at most ten.
pub(super) fn nearest_and_first(word: &str, tokenizer: &Tokenizer) -> [Vec<String>; 2] {
    let mut words: Vec<_> = tokenizer.get_vocab(true).into_iter().map(|(word, id)| (id, word)).collect();
    words.sort_unstable();
    let nearest = nearest(word, words.iter().map(|(_, word)| word.as_str())).into_iter().map(str::to_owned).collect();
    [nearest, words.into_iter().take(10).map(|(_, word)| word).collect()]
}
