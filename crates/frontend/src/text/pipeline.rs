//! The steps of a `tokenizers` pipeline, taken one by one, so that nothing is lost on the way and no fault is a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokenizers::models::unigram::UnigramError;
use tokenizers::models::{ModelWrapper, bpe, wordlevel, wordpiece};
use tokenizers::{
    Model, NormalizedString, OffsetReferential, OffsetType, PaddingParams, PostProcessor, PreTokenizedString,
    PreTokenizer, Token, Tokenizer, TruncationDirection,
};

use super::Encoding;
use super::error::{BoxError, TokenizerError, nearest_and_first};

/// Stands for the error that the BPE model should give where it leaves characters out.
#[derive(Debug, thiserror::Error)]
#[error("characters without a token")]
struct Dropped;

/// A tokenizer without truncation and padding, which are the caller's, and the file's padding.
///
/// # Errors
///
/// For a file whose post-processor has tokens that it does not define, on which the crate would panic later.
pub(super) fn load(bytes: &[u8]) -> Result<(Tokenizer, Option<PaddingParams>), BoxError> {
    let mut tokenizer = catch_panic(|| Tokenizer::from_bytes(bytes))?;
    let padding = tokenizer.get_padding().cloned();
    tokenizer.with_truncation(None)?.with_padding(None);
    for add_special_tokens in [true, false] {
        catch_panic(|| tokenizer.post_process(tokenizers::Encoding::default(), None, add_special_tokens))
            .map_err(|error| format!("its post-processor cannot be applied: {error}"))?;
    }
    Ok((tokenizer, padding))
}

/// How many special tokens a text gets, or a pair of them.
pub(super) fn num_special_tokens(tokenizer: &Tokenizer, is_pair: bool) -> usize {
    tokenizer.get_post_processor().map_or(0, |processor| processor.added_tokens(is_pair))
}

/// Encodes as [`Tokenizer::encode`] does, but that characters which the model leaves out are an error. The text keeps
/// at most `max_tokens` tokens, special ones included.
pub(super) fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    add_special_tokens: bool,
    max_tokens: Option<usize>,
) -> Result<Encoding, TokenizerError> {
    let mut encoding = tokens(tokenizer, text, 0)?;
    let added = if add_special_tokens { num_special_tokens(tokenizer, false) } else { 0 };
    let room = max_tokens.map_or(usize::MAX, |most| most.saturating_sub(added));
    let num_truncated = encoding.len().saturating_sub(room);
    let whole = catch_panic(|| {
        encoding.truncate(room, 0, TruncationDirection::Right);
        encoding.take_overflowing();
        tokenizer.post_process(encoding, None, add_special_tokens)
    });
    Ok(read(&whole.map_err(failed)?, num_truncated))
}

/// Encodes two texts as one, of which the longer is cut first.
pub(super) fn encode_pair(
    tokenizer: &Tokenizer,
    texts: [&str; 2],
    max_tokens: Option<usize>,
) -> Result<Encoding, TokenizerError> {
    let mut pair = [tokens(tokenizer, texts[0], 0)?, tokens(tokenizer, texts[1], 1)?];
    let num_special = num_special_tokens(tokenizer, true);
    let mut num_truncated = 0;
    if let Some(max_tokens) = max_tokens {
        let Some(room) = max_tokens.checked_sub(num_special).filter(|&room| room > 0) else {
            return Err(TokenizerError::NoRoomForText { max_tokens, num_special });
        };
        let lens = pair.each_ref().map(tokenizers::Encoding::len);
        let shorter = lens[0].min(lens[1]).min(room / 2);
        let keeps = if lens[0] <= lens[1] { [shorter, room - shorter] } else { [room - shorter, shorter] };
        for ((encoding, len), keep) in pair.iter_mut().zip(lens).zip(keeps) {
            num_truncated += len.saturating_sub(keep);
            encoding.truncate(keep, 0, TruncationDirection::Right);
            encoding.take_overflowing();
        }
    }
    let [first, second] = pair;
    let whole = catch_panic(|| tokenizer.post_process(first, Some(second), true));
    Ok(read(&whole.map_err(failed)?, num_truncated))
}

fn failed(source: BoxError) -> TokenizerError {
    TokenizerError::Pipeline { action: "encode", source }
}

fn read(encoding: &tokenizers::Encoding, num_truncated: usize) -> Encoding {
    Encoding {
        ids: encoding.get_ids().to_vec(),
        tokens: encoding.get_tokens().to_vec(),
        type_ids: encoding.get_type_ids().to_vec(),
        num_truncated,
    }
}

/// A text's tokens without special ones.
fn tokens(tokenizer: &Tokenizer, text: &str, type_id: u32) -> Result<tokenizers::Encoding, TokenizerError> {
    let mut pieces = catch_panic(|| {
        let mut pieces = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        Ok(pieces)
    })
    .map_err(failed)?;
    let model = tokenizer.get_model();
    let complete = |piece: &NormalizedString| -> Result<Vec<Token>, BoxError> {
        let tokens = model.tokenize(piece.get())?;
        // The spans of the tokens follow each other from 0, so that what is left out is missing at the end.
        let covered = tokens.iter().map(|token| token.offsets.1).max().unwrap_or(0);
        if covered < piece.get().len() { Err(Box::new(Dropped)) } else { Ok(tokens) }
    };
    catch_panic(|| pieces.tokenize(complete)).map_err(|source| explain(tokenizer, &pieces, source))?;
    catch_panic(|| pieces.into_encoding(None, type_id, OffsetType::Byte)).map_err(failed)
}

/// The pieces into which `pre_tokenizer` splits a text.
pub(super) fn split(pre_tokenizer: &impl PreTokenizer, text: &str) -> Result<Vec<String>, BoxError> {
    let mut pieces = PreTokenizedString::from(text);
    pre_tokenizer.pre_tokenize(&mut pieces)?;
    let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
    Ok(splits.into_iter().map(|(word, ..)| word.to_owned()).collect())
}

/// Names the piece at which the model stopped.
fn explain(tokenizer: &Tokenizer, pieces: &PreTokenizedString, source: BoxError) -> TokenizerError {
    let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
    let stopped_at = splits.iter().enumerate().find(|(_, (_, _, tokens))| tokens.is_none());
    let Some((position, (word, ..))) = stopped_at else {
        return TokenizerError::Pipeline { action: "encode", source };
    };
    let (word, model) = ((*word).to_owned(), model_kind(tokenizer.get_model()));
    if source.is::<Dropped>() {
        TokenizerError::DroppedCharacters { word, position, model }
    } else if is_unknown_word(&source) {
        let [nearest, vocabulary] = nearest_and_first(&word, tokenizer);
        TokenizerError::UnknownWord { word, position, nearest, vocabulary }
    } else {
        TokenizerError::Pipeline { action: "encode", source }
    }
}

fn is_unknown_word(error: &BoxError) -> bool {
    matches!(error.downcast_ref(), Some(wordlevel::Error::MissingUnkToken))
        || matches!(error.downcast_ref(), Some(wordpiece::Error::MissingUnkToken))
        || matches!(error.downcast_ref(), Some(bpe::Error::UnkTokenOutOfVocabulary(_)))
        || matches!(error.downcast_ref(), Some(UnigramError::MissingUnkId))
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

/// Turns a panic into an error. The crate indexes with what a file says, in more places than can be checked from
/// outside.
///
/// The steps run under it only read the tokenizer and write what is thrown away on an error; the crate's caches hold
/// complete entries only. Hence the assertion.
pub(super) fn catch_panic<T>(step: impl FnOnce() -> Result<T, BoxError>) -> Result<T, BoxError> {
    catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref().copied());
        Err(format!("the tokenizers crate panicked: {}", text.unwrap_or("no reason given")).into())
    })
}
