//! The steps of a `tokenizers` pipeline, run one by one, so that no text is dropped and no fault of a file is a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokenizers::models::unigram::UnigramError;
use tokenizers::models::{ModelWrapper, bpe, wordlevel, wordpiece};
use tokenizers::{
    Encoding as Tokens, Model, NormalizedString, OffsetReferential, OffsetType, PaddingParams, PostProcessor,
    PreTokenizedString, PreTokenizer, Token, Tokenizer, TruncationParams, truncate_encodings,
};

use candle_attention_modules::base::nearest;

use super::{BoxError, Encoding, TokenizerError, failed, invalid};

/// The error for characters that the BPE model drops without an error.
#[derive(Debug, thiserror::Error)]
#[error("characters without a token")]
struct Dropped;

/// A tokenizer without truncation and padding, and the padding of its file.
pub(super) struct Loaded {
    pub(super) tokenizer: Tokenizer,
    pub(super) padding: Option<PaddingParams>,
}

/// Loads a tokenizer, and removes its truncation and padding.
///
/// # Errors
///
/// If the file's post-processor has tokens that the file does not define, on which the crate would panic later.
pub(super) fn load(bytes: &[u8]) -> Result<Loaded, BoxError> {
    let mut tokenizer = catch_panic(|| Tokenizer::from_bytes(bytes))?;
    let padding = tokenizer.get_padding().cloned();
    tokenizer.with_truncation(None)?.with_padding(None);
    for add_special_tokens in [true, false] {
        catch_panic(|| tokenizer.post_process(Tokens::default(), None, add_special_tokens))
            .map_err(|error| format!("its post-processor cannot be applied: {error}"))?;
    }
    Ok(Loaded { tokenizer, padding })
}

/// Returns the number of special tokens that are added to a text, or to a pair of texts.
pub(super) fn num_special_tokens(tokenizer: &Tokenizer, is_pair: bool) -> usize {
    tokenizer.get_post_processor().map_or(0, |processor| processor.added_tokens(is_pair))
}

/// Encodes one text, or two together, as [`Tokenizer::encode`] does, except that characters without a token are an
/// error. At most `max_tokens` tokens are kept, special ones included; of two texts the longer is cut first.
pub(super) fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    second: Option<&str>,
    add_special_tokens: bool,
    max_tokens: Option<usize>,
) -> Result<Encoding, TokenizerError> {
    let encoded = catch_panic(|| {
        let mut first = tokens(tokenizer, text, 0)?;
        let mut pair = None;
        if let Some(second) = second {
            pair = Some(tokens(tokenizer, second, 1)?);
        }
        let whole_len = first.len() + pair.as_ref().map_or(0, Tokens::len);
        if let Some(max_tokens) = max_tokens {
            let num_special = if add_special_tokens { num_special_tokens(tokenizer, pair.is_some()) } else { 0 };
            let max_length = max_text_tokens(max_tokens, num_special)?;
            (first, pair) =
                truncate_encodings(first, pair, &TruncationParams { max_length, ..TruncationParams::default() })?;
            // Otherwise the post-processor would combine all pairs of the remainders.
            first.take_overflowing();
            if let Some(pair) = &mut pair {
                pair.take_overflowing();
            }
        }
        let num_truncated = whole_len - first.len() - pair.as_ref().map_or(0, Tokens::len);
        let encoding = tokenizer.post_process(first, pair, add_special_tokens)?;
        Ok(Encoding {
            ids: encoding.get_ids().to_vec(),
            tokens: encoding.get_tokens().to_vec(),
            type_ids: encoding.get_type_ids().to_vec(),
            num_truncated,
        })
    });
    encoded.map_err(|error| match error.downcast() {
        Ok(explained) => *explained,
        Err(source) => failed("the file's tokenizer failed to encode")(source),
    })
}

/// Returns the number of tokens that a text may have besides the special ones.
pub(super) fn max_text_tokens(max_tokens: usize, num_special: usize) -> Result<usize, TokenizerError> {
    if max_tokens <= num_special {
        let expected = format!("expected more than the {num_special} that are added");
        return invalid(format!("texts are cut at {max_tokens} tokens, {expected}"));
    }
    Ok(max_tokens - num_special)
}

/// Returns a text's tokens without special ones.
fn tokens(tokenizer: &Tokenizer, text: &str, type_id: u32) -> Result<Tokens, BoxError> {
    let mut pieces = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
    if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut pieces)?;
    }
    let model = tokenizer.get_model();
    let complete = |piece: &NormalizedString| -> Result<Vec<Token>, BoxError> {
        let tokens = model.tokenize(piece.get())?;
        // The spans of the tokens follow each other from 0, so dropped characters are missing at the end.
        let covered = tokens.iter().map(|token| token.offsets.1).max().unwrap_or(0);
        if covered < piece.get().len() { Err(Box::new(Dropped)) } else { Ok(tokens) }
    };
    pieces.tokenize(complete).map_err(|source| explain(tokenizer, &pieces, source))?;
    pieces.into_encoding(None, type_id, OffsetType::Byte)
}

/// Returns the pieces into which `pre_tokenizer` splits a text.
pub(super) fn split(pre_tokenizer: &impl PreTokenizer, text: &str) -> Result<Vec<String>, BoxError> {
    let mut pieces = PreTokenizedString::from(text);
    pre_tokenizer.pre_tokenize(&mut pieces)?;
    let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
    Ok(splits.into_iter().map(|(word, ..)| word.to_owned()).collect())
}

/// Explains an error by the piece at which the model stopped.
fn explain(tokenizer: &Tokenizer, pieces: &PreTokenizedString, source: BoxError) -> BoxError {
    let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
    let Some(position) = splits.iter().position(|(_, _, tokens)| tokens.is_none()) else { return source };
    let word = splits[position].0.to_owned();
    if source.is::<Dropped>() {
        TokenizerError::DroppedCharacters { word, position, model: model_kind(tokenizer.get_model()) }.into()
    } else if is_unknown_word(&source) {
        let Suggestions { nearest, first: vocabulary } = Suggestions::new(&word, tokenizer);
        TokenizerError::UnknownWord { word, position, nearest, vocabulary }.into()
    } else {
        source
    }
}

fn is_unknown_word(error: &BoxError) -> bool {
    matches!(error.downcast_ref(), Some(wordlevel::Error::MissingUnkToken))
        || matches!(error.downcast_ref(), Some(wordpiece::Error::MissingUnkToken))
        || matches!(error.downcast_ref(), Some(bpe::Error::UnkTokenOutOfVocabulary(_)))
        || matches!(error.downcast_ref(), Some(UnigramError::MissingUnkId))
}

/// Returns all words, added tokens included, in the order of their ids.
pub(super) fn words(tokenizer: &Tokenizer) -> Vec<String> {
    let mut words: Vec<_> = tokenizer.get_vocab(true).into_iter().map(|(word, id)| (id, word)).collect();
    words.sort_unstable();
    words.into_iter().map(|(_, word)| word).collect()
}

/// The words of a vocabulary that an error names for a word that is not in it.
pub(super) struct Suggestions {
    /// The [`nearest`] words, at most three.
    pub(super) nearest: Vec<String>,
    /// The first words by id, at most ten.
    pub(super) first: Vec<String>,
}

impl Suggestions {
    /// Finds the words for a word that is not in the vocabulary.
    pub(super) fn new(word: &str, tokenizer: &Tokenizer) -> Self {
        let mut first = words(tokenizer);
        let nearest = nearest(word, first.iter().map(String::as_str)).into_iter().map(str::to_owned).collect();
        first.truncate(10);
        Self { nearest, first }
    }
}

/// Returns the model's kind, as tokenizer.json names it.
pub(super) fn model_kind(model: &ModelWrapper) -> &'static str {
    match model {
        ModelWrapper::BPE(_) => "BPE",
        ModelWrapper::WordPiece(_) => "WordPiece",
        ModelWrapper::WordLevel(_) => "WordLevel",
        ModelWrapper::Unigram(_) => "Unigram",
    }
}

/// Turns a panic into an error. The crate indexes with numbers from the file, in more places than can be checked from
/// outside.
///
/// The steps that run here only read the tokenizer, and discard what they wrote on an error; the crate's caches have
/// complete entries only. Hence the assertion.
pub(super) fn catch_panic<T>(step: impl FnOnce() -> Result<T, BoxError>) -> Result<T, BoxError> {
    catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref().copied());
        Err(format!("the tokenizers crate panicked: {}", text.unwrap_or("no reason given")).into())
    })
}
