//! The steps of a `tokenizers` pipeline, taken one by one, so that nothing is lost on the way and no fault is a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokenizers::models::unigram::UnigramError;
use tokenizers::models::{ModelWrapper, bpe, wordlevel, wordpiece};
use tokenizers::{
    Encoding as Tokens, Model, NormalizedString, OffsetReferential, OffsetType, PaddingParams, PostProcessor,
    PreTokenizedString, PreTokenizer, Token, Tokenizer, TruncationParams, truncate_encodings,
};

use candle_attention_modules::base::nearest;

use super::{BoxError, Encoding, TokenizerError, failed, invalid};

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
        catch_panic(|| tokenizer.post_process(Tokens::default(), None, add_special_tokens))
            .map_err(|error| format!("its post-processor cannot be applied: {error}"))?;
    }
    Ok((tokenizer, padding))
}

/// How many special tokens a text gets, or a pair of them.
pub(super) fn num_special_tokens(tokenizer: &Tokenizer, is_pair: bool) -> usize {
    tokenizer.get_post_processor().map_or(0, |processor| processor.added_tokens(is_pair))
}

/// Encodes one text, or two as one, as [`Tokenizer::encode`] does, but that characters which the model leaves out are
/// an error. At most `max_tokens` tokens are kept, special ones included; of two texts the longer is cut first.
pub(super) fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    second: Option<&str>,
    add_special_tokens: bool,
    max_tokens: Option<usize>,
) -> Result<Encoding, TokenizerError> {
    let encoded = catch_panic(|| {
        let mut first = tokens(tokenizer, text, 0)?;
        let mut second = second.map(|text| tokens(tokenizer, text, 1)).transpose()?;
        let len = |first: &Tokens, second: &Option<Tokens>| first.len() + second.as_ref().map_or(0, Tokens::len);
        let whole_len = len(&first, &second);
        if let Some(max_tokens) = max_tokens {
            let num_special = if add_special_tokens { num_special_tokens(tokenizer, second.is_some()) } else { 0 };
            let params = TruncationParams { max_length: room(max_tokens, num_special)?, ..TruncationParams::default() };
            (first, second) = truncate_encodings(first, second, &params)?;
            // The post-processor would take all pairs of what is left over.
            for encoding in [Some(&mut first), second.as_mut()].into_iter().flatten() {
                encoding.take_overflowing();
            }
        }
        let num_truncated = whole_len - len(&first, &second);
        let encoding = tokenizer.post_process(first, second, add_special_tokens)?;
        let (ids, tokens) = (encoding.get_ids().to_vec(), encoding.get_tokens().to_vec());
        Ok(Encoding { ids, tokens, type_ids: encoding.get_type_ids().to_vec(), num_truncated })
    });
    encoded.map_err(|error| match error.downcast() {
        Ok(explained) => *explained,
        Err(source) => failed("the file's tokenizer failed to encode")(source),
    })
}

/// How many tokens of the text there may be beside the special ones.
pub(super) fn room(max_tokens: usize, num_special: usize) -> Result<usize, TokenizerError> {
    if max_tokens <= num_special {
        let expected = format!("expected more than the {num_special} that are added");
        return invalid(format!("texts are cut at {max_tokens} tokens, {expected}"));
    }
    Ok(max_tokens - num_special)
}

/// A text's tokens without special ones.
fn tokens(tokenizer: &Tokenizer, text: &str, type_id: u32) -> Result<Tokens, BoxError> {
    let mut pieces = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
    if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut pieces)?;
    }
    let model = tokenizer.get_model();
    let complete = |piece: &NormalizedString| -> Result<Vec<Token>, BoxError> {
        let tokens = model.tokenize(piece.get())?;
        // The spans of the tokens follow each other from 0, so that what is left out is missing at the end.
        let covered = tokens.iter().map(|token| token.offsets.1).max().unwrap_or(0);
        if covered < piece.get().len() { Err(Box::new(Dropped)) } else { Ok(tokens) }
    };
    pieces.tokenize(complete).map_err(|source| explain(tokenizer, &pieces, source))?;
    pieces.into_encoding(None, type_id, OffsetType::Byte)
}

/// The pieces into which `pre_tokenizer` splits a text.
pub(super) fn split(pre_tokenizer: &impl PreTokenizer, text: &str) -> Result<Vec<String>, BoxError> {
    let mut pieces = PreTokenizedString::from(text);
    pre_tokenizer.pre_tokenize(&mut pieces)?;
    let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
    Ok(splits.into_iter().map(|(word, ..)| word.to_owned()).collect())
}

/// Names the piece at which the model stopped.
fn explain(tokenizer: &Tokenizer, pieces: &PreTokenizedString, source: BoxError) -> BoxError {
    let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
    let Some(position) = splits.iter().position(|(_, _, tokens)| tokens.is_none()) else { return source };
    let word = splits[position].0.to_owned();
    if source.is::<Dropped>() {
        TokenizerError::DroppedCharacters { word, position, model: model_kind(tokenizer.get_model()) }.into()
    } else if is_unknown_word(&source) {
        let [nearest, vocabulary] = nearest_and_first(&word, tokenizer);
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

/// All words, added tokens included, in the order of their ids.
pub(super) fn words(tokenizer: &Tokenizer) -> Vec<String> {
    let mut words: Vec<_> = tokenizer.get_vocab(true).into_iter().map(|(word, id)| (id, word)).collect();
    words.sort_unstable();
    words.into_iter().map(|(_, word)| word).collect()
}

/// What of a vocabulary helps somebody who gave a word that is not in it: the [`nearest`] words, at most three, and the
/// first by id, at most ten.
pub(super) fn nearest_and_first(word: &str, tokenizer: &Tokenizer) -> [Vec<String>; 2] {
    let mut words = words(tokenizer);
    let nearest = nearest(word, words.iter().map(String::as_str)).into_iter().map(str::to_owned).collect();
    words.truncate(10);
    [nearest, words]
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
