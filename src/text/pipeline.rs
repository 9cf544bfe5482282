//! The steps of a `tokenizers` pipeline, taken one by one, so that nothing is lost on the way and no fault is a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokenizers::models::{ModelWrapper, bpe, unigram::UnigramError, wordlevel, wordpiece};
use tokenizers::{
    Model, NormalizedString, OffsetReferential, OffsetType, PaddingParams, PaddingStrategy, PostProcessor,
    PreTokenizedString, PreTokenizer, Token, Tokenizer, TruncationDirection, TruncationStrategy,
};

use super::batch::Encoding;
use super::error::{BoxError, TokenizerError, nearest_words};

/// Fixed padding beyond this many tokens is a mistake in the file, and would only exhaust the memory.
const LONGEST_ROW: usize = 1 << 24;

/// Stands for the error that the BPE model should give where it leaves characters out.
#[derive(Debug, thiserror::Error)]
#[error("characters without a token")]
struct Dropped;

/// Encodes as [`Tokenizer::encode`] does, but that characters which the model leaves out are an error.
pub(super) fn encode(tokenizer: &Tokenizer, text: &str, add_special_tokens: bool) -> Result<Encoding, TokenizerError> {
    let failed = |source| TokenizerError::Pipeline { action: "encode", source };
    let mut pieces = shielded(|| {
        let mut pieces = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        Ok(pieces)
    })
    .map_err(failed)?;
    shielded(|| tokenize(tokenizer, &mut pieces)).map_err(|source| explain(tokenizer, &pieces, source))?;
    let encoding = shielded(|| {
        let encoding = pieces.into_encoding(None, 0, OffsetType::Byte)?;
        tokenizer.post_process(encoding, None, add_special_tokens)
    })
    .map_err(failed)?;
    Ok(Encoding { ids: encoding.get_ids().to_vec(), tokens: encoding.get_tokens().to_vec() })
}

fn tokenize(tokenizer: &Tokenizer, pieces: &mut PreTokenizedString) -> Result<(), BoxError> {
    let model = tokenizer.get_model();
    let complete = |piece: &NormalizedString| -> Result<Vec<Token>, BoxError> {
        let tokens = model.tokenize(piece.get())?;
        // The spans of the tokens follow each other from 0, so that what is left out is missing at the end.
        let covered = tokens.iter().map(|token| token.offsets.1).max().unwrap_or(0);
        if covered < piece.get().len() { Err(Box::new(Dropped)) } else { Ok(tokens) }
    };
    match tokenizer.get_truncation() {
        // As the crate has it: what truncation would cut is not even looked up.
        Some(params) if params.strategy != TruncationStrategy::OnlySecond => {
            pieces.tokenize_with_limit(complete, params.max_length, params.direction)
        }
        _ => pieces.tokenize(complete),
    }
}

/// Names the piece at which the model stopped.
fn explain(tokenizer: &Tokenizer, pieces: &PreTokenizedString, source: BoxError) -> TokenizerError {
    let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
    let mut untouched = splits.iter().enumerate().filter(|(_, (_, _, tokens))| tokens.is_none());
    let from_the_end = tokenizer.get_truncation().is_some_and(|params| {
        params.strategy != TruncationStrategy::OnlySecond && params.direction == TruncationDirection::Left
    });
    let stopped_at = if from_the_end { untouched.next_back() } else { untouched.next() };
    match stopped_at {
        Some((position, (word, _, _))) if source.is::<Dropped>() => TokenizerError::DroppedCharacters {
            word: (*word).to_owned(),
            position,
            model: model_kind(tokenizer.get_model()),
        },
        Some((position, (word, _, _))) if is_unknown_word(&source) => TokenizerError::UnknownWord {
            word: (*word).to_owned(),
            position,
            nearest: nearest_words(word, &tokenizer.get_vocab(true)),
        },
        _ => TokenizerError::Pipeline { action: "encode", source },
    }
}

fn is_unknown_word(error: &BoxError) -> bool {
    matches!(error.downcast_ref(), Some(wordlevel::Error::MissingUnkToken))
        || matches!(error.downcast_ref(), Some(wordpiece::Error::MissingUnkToken))
        || matches!(error.downcast_ref(), Some(bpe::Error::UnkTokenOutOfVocabulary(_)))
        || matches!(error.downcast_ref(), Some(UnigramError::MissingUnkId))
}

/// Refuses a file whose settings the crate would panic on or, in a release build, silently misread.
pub(super) fn validate(tokenizer: &Tokenizer, padding: Option<&PaddingParams>) -> Result<(), BoxError> {
    if let Some(params) = tokenizer.get_truncation() {
        let added = tokenizer.get_post_processor().map_or(0, |processor| processor.added_tokens(false));
        let room = params
            .max_length
            .checked_sub(added)
            .ok_or_else(|| format!("it truncates to length {} and adds {added} special tokens", params.max_length))?;
        if [room, params.max_length].iter().any(|&room| room > 0 && params.stride >= room) {
            return Err(format!(
                "its truncation's stride {} is not below the length {room} that it leaves",
                params.stride
            )
            .into());
        }
    }
    if let Some(params) = padding {
        let fixed = match params.strategy {
            PaddingStrategy::Fixed(len) => len,
            PaddingStrategy::BatchLongest => 0,
        };
        let len = fixed.max(params.pad_to_multiple_of.unwrap_or(0));
        if len > LONGEST_ROW {
            return Err(format!("it pads to {len} tokens, beyond the limit of {LONGEST_ROW}").into());
        }
    }
    for add_special_tokens in [true, false] {
        shielded(|| tokenizer.post_process(tokenizers::Encoding::default(), None, add_special_tokens))
            .map_err(|error| format!("its post-processor cannot be applied: {error}"))?;
    }
    Ok(())
}

/// The model's kind, as tokenizer.json names it.
pub(super) fn model_kind(model: &ModelWrapper) -> &'static str {
    match model {
        ModelWrapper::BPE(_) => "BPE",
        ModelWrapper::WordPiece(_) => "WordPiece",
        ModelWrapper::WordLevel(_) => "WordLevel",
        ModelWrapper::Unigram(_) => "Unigram",
    }
}

/// Turns a panic into an error. The crate indexes with what a file says, in more places than can be checked from outside.
///
/// The steps run under it only read the tokenizer and write what is thrown away on an error; the crate's caches hold
/// complete entries only. Hence the assertion.
pub(super) fn shielded<T>(step: impl FnOnce() -> Result<T, BoxError>) -> Result<T, BoxError> {
    catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|panic| {
        let reason = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no reason given");
        Err(format!("the tokenizers crate panicked: {reason}").into())
    })
}
