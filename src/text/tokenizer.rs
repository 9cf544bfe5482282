//! [`SimpleTokenizer`]: a learner's tokenizer, and a thin door to any Hugging Face `tokenizer.json`.

use std::collections::HashMap;
use std::fmt;

use tokenizers::models::{ModelWrapper, wordlevel::WordLevel};
use tokenizers::parallelism::MaybeParallelRefIterator;
use tokenizers::{Decoder, Model, PaddingDirection, PaddingParams, PaddingStrategy, Tokenizer};

use super::batch::{Batch, Encoding, Padding, PaddingSide};
use super::error::{TokenizerError, nearest_words};
use super::options::{SpecialTokens, Split};
use super::pipeline;

type Result<T> = std::result::Result<T, TokenizerError>;

/// Padding tokens that are recognised without being chosen, best first.
const USUAL_PADDING: [&str; 2] = ["<pad>", "[PAD]"];

/// Text to ids and back.
///
/// From a list of words it is the tokenizer of the PyTorch tutorials: `text.split()`, case sensitive, an id for each
/// word, and an error for an unknown word. From a `tokenizer.json` (word-level, BPE, WordPiece or Unigram) it does
/// what the file says, with three differences from the `tokenizers` crate, which stands below it:
///
/// - Nothing is dropped in silence. A character without a token is an error where the crate leaves it out.
/// - Padding is for batches: [`encode`](Self::encode) never pads, whatever the file says.
/// - A file's faults are errors; the crate panics on some.
///
/// It is `Send` and `Sync`. A batch is encoded on all cores, unless the environment variable
/// `TOKENIZERS_PARALLELISM` is `false`.
///
/// ```
/// # use candle_attention::text::{SimpleTokenizer, Split};
/// let tokenizer = SimpleTokenizer::from_words(["<pad>", "hello", "world", "how", "are", "you", "?"])?;
/// assert_eq!(tokenizer.encode("hello world how are you ?")?.ids, [1, 2, 3, 4, 5, 6]);
/// assert!(tokenizer.encode("hello world how are you?").is_err());
///
/// let tokenizer = tokenizer.with_split(Split::Punctuation);
/// assert_eq!(tokenizer.encode("hello world how are you?")?.ids, [1, 2, 3, 4, 5, 6]);
///
/// let batch = tokenizer.encode_batch(&["hello world", "you?", "hello"])?;
/// assert_eq!(batch.ids(), [[1, 2], [5, 6], [1, 0]]);
/// assert_eq!(batch.lens(), [2, 2, 1]);
/// # Ok::<(), candle_attention::text::TokenizerError>(())
/// ```
#[derive(Clone)]
pub struct SimpleTokenizer {
    /// Without padding parameters, which would make it pad single texts too.
    pub(super) inner: Tokenizer,
    /// As chosen, or as in the file.
    pub(super) padding: Option<PaddingParams>,
}

impl SimpleTokenizer {
    /// A tokenizer of the given words, whose ids are their positions: 0, 1, 2 and so on.
    ///
    /// A word with white space in it is kept, though no text splits into it.
    ///
    /// # Errors
    ///
    /// If there are no words, a word is empty, or a word stands there twice.
    pub fn from_words(words: impl IntoIterator<Item = impl Into<String>>) -> Result<Self> {
        let mut vocab = HashMap::new();
        for (position, word) in words.into_iter().enumerate() {
            let word = word.into();
            if word.is_empty() {
                return Err(TokenizerError::EmptyWord { position });
            }
            let id = u32::try_from(position).map_err(|_| TokenizerError::TooManyWords)?;
            if let Some(first) = vocab.get(&word) {
                let first = *first as usize;
                return Err(TokenizerError::DuplicateWord { word, first, second: position });
            }
            vocab.insert(word, id);
        }
        if vocab.is_empty() {
            return Err(TokenizerError::EmptyVocabulary);
        }
        // The model takes words that it does not know for its unknown token wherever the vocabulary has it, and its
        // default is "<unk>". The empty word is never in the vocabulary, also not after a round trip through a file.
        let model = WordLevel::builder()
            .vocab(vocab.into_iter().collect())
            .unk_token(String::new())
            .build()
            .map_err(|source| TokenizerError::Load { path: None, source })?;
        Ok(Self { inner: Tokenizer::new(model), padding: None }.with_split(Split::default()))
    }

    /// Splits texts at `split`, in place of what a loaded file does before its model.
    pub fn with_split(mut self, split: Split) -> Self {
        self.inner.with_pre_tokenizer(Some(split.pre_tokenizer()));
        self
    }

    /// Takes every unknown word for `token`, which must be in the vocabulary.
    ///
    /// # Errors
    ///
    /// If it is not, or if this is not a word-level vocabulary.
    pub fn with_unknown(mut self, token: &str) -> Result<Self> {
        let ModelWrapper::WordLevel(model) = self.inner.get_model() else {
            return Err(TokenizerError::NotWordLevel { model: self.model_kind() });
        };
        let mut model = model.clone();
        self.id_of("unknown", token)?;
        model.unk_token = token.to_owned();
        self.inner.with_model(model);
        Ok(self)
    }

    /// Pads batches with `token`, which must be in the vocabulary.
    ///
    /// By default that is what the file says, or else the vocabulary's `<pad>` or `[PAD]`.
    ///
    /// # Errors
    ///
    /// If it is not in the vocabulary.
    pub fn with_padding(mut self, token: &str) -> Result<Self> {
        let pad_id = self.id_of("padding", token)?;
        self.padding = Some(PaddingParams { pad_id, pad_token: token.to_owned(), ..self.padding.unwrap_or_default() });
        Ok(self)
    }

    /// Pads batches on this side. By default that is what the file says, or else the right.
    ///
    /// # Errors
    ///
    /// If there is no padding token.
    pub fn with_padding_side(mut self, side: PaddingSide) -> Result<Self> {
        let params = self.padding_params().ok_or(TokenizerError::NoPaddingToken)?;
        let direction = match side {
            PaddingSide::Left => PaddingDirection::Left,
            PaddingSide::Right => PaddingDirection::Right,
        };
        self.padding = Some(PaddingParams { direction, ..params });
        Ok(self)
    }

    /// The ids and tokens of `text`, with the special tokens of the file and truncated as the file says. The text "" has
    /// no ids but those.
    ///
    /// # Errors
    ///
    /// If a word is not in the vocabulary and there is no unknown token: the error names the word, its position and
    /// the nearest words.
    pub fn encode(&self, text: &str) -> Result<Encoding> {
        self.encode_with(text, SpecialTokens::With)
    }

    /// [`encode`](Self::encode) with or without special tokens.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn encode_with(&self, text: &str, special: SpecialTokens) -> Result<Encoding> {
        pipeline::encode(&self.inner, text, special == SpecialTokens::With)
    }

    /// The texts' ids (B, T), padded to the longest text, or to what the file says if that is longer.
    ///
    /// # Errors
    ///
    /// If there are no texts, a text cannot be encoded, or the texts differ in length and there is no padding token.
    pub fn encode_batch<S: AsRef<str> + Sync>(&self, texts: &[S]) -> Result<Batch> {
        self.encode_batch_with(texts, SpecialTokens::With)
    }

    /// [`encode_batch`](Self::encode_batch) with or without special tokens.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn encode_batch_with<S: AsRef<str> + Sync>(&self, texts: &[S], special: SpecialTokens) -> Result<Batch> {
        let rows: Vec<_> = texts.maybe_par_iter().map(|text| self.encode_with(text.as_ref(), special)).collect();
        // Collected first, so that the error is always that of the first text that fails.
        let rows = rows
            .into_iter()
            .enumerate()
            .map(|(index, row)| row.map_err(|error| TokenizerError::InBatch { index, source: Box::new(error) }))
            .collect::<Result<Vec<_>>>()?;
        let padding = self.padding_params().map(|params| Padding {
            id: params.pad_id,
            token: params.pad_token,
            side: match params.direction {
                PaddingDirection::Left => PaddingSide::Left,
                PaddingDirection::Right => PaddingSide::Right,
            },
            at_least: match params.strategy {
                PaddingStrategy::BatchLongest => 0,
                PaddingStrategy::Fixed(len) => len,
            },
            multiple_of: params.pad_to_multiple_of.unwrap_or(1),
        });
        Batch::new(rows, padding)
    }

    /// The text of `ids`, special tokens and padding included: words joined by a space, or what the file's decoder does.
    ///
    /// # Errors
    ///
    /// If an id is not in the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_with(ids, SpecialTokens::With)
    }

    /// [`decode`](Self::decode) with or without special tokens.
    ///
    /// # Errors
    ///
    /// As there; ids that are left out count too.
    pub fn decode_with(&self, ids: &[u32], special: SpecialTokens) -> Result<String> {
        let added = self.inner.get_added_vocabulary();
        // By its text, since a file's padding id can be that of another word.
        let padding = self.padding_token();
        let mut tokens = Vec::with_capacity(ids.len());
        for (position, &id) in ids.iter().enumerate() {
            let token = self.inner.id_to_token(id).ok_or_else(|| TokenizerError::UnknownId {
                id,
                position,
                vocab_size: self.vocab_size(),
            })?;
            if special == SpecialTokens::With
                || !(added.is_special_token(&token) || padding.as_deref() == Some(token.as_str()))
            {
                tokens.push(token);
            }
        }
        match self.inner.get_decoder() {
            // Some decoders count down from the number of tokens.
            Some(decoder) if !tokens.is_empty() => pipeline::shielded(|| decoder.decode(tokens))
                .map_err(|source| TokenizerError::Pipeline { action: "decode", source }),
            _ => Ok(tokens.join(" ")),
        }
    }

    /// The number of words, added tokens included.
    ///
    /// Ids run from 0 to one less, unless a file leaves gaps between them.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The id of a word, if it is in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The word of an id, if there is one.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// All words, added tokens included, in the order of their ids.
    pub fn words(&self) -> Vec<String> {
        let mut words: Vec<_> = self.inner.get_vocab(true).into_iter().collect();
        words.sort_by(|(a, a_id), (b, b_id)| (a_id, a).cmp(&(b_id, b)));
        words.into_iter().map(|(word, _)| word).collect()
    }

    /// The token that batches are padded with, if there is one.
    pub fn padding_token(&self) -> Option<String> {
        self.padding_params().map(|params| params.pad_token)
    }

    /// The word that all unknown words of a word-level vocabulary are taken for. `None` if they are errors, and for models
    /// of other kinds, which have their own ways.
    pub fn unknown_token(&self) -> Option<&str> {
        match self.inner.get_model() {
            ModelWrapper::WordLevel(model) => {
                let token = model.unk_token.as_str();
                model.token_to_id(token).map(|_| token)
            }
            _ => None,
        }
    }

    fn model_kind(&self) -> &'static str {
        pipeline::model_kind(self.inner.get_model())
    }

    fn padding_params(&self) -> Option<PaddingParams> {
        self.padding.clone().or_else(|| {
            USUAL_PADDING.iter().find_map(|&token| {
                Some(PaddingParams {
                    pad_id: self.token_to_id(token)?,
                    pad_token: token.to_owned(),
                    ..PaddingParams::default()
                })
            })
        })
    }

    fn id_of(&self, part: &'static str, token: &str) -> Result<u32> {
        self.token_to_id(token).ok_or_else(|| TokenizerError::NotInVocabulary {
            part,
            token: token.to_owned(),
            nearest: nearest_words(token, &self.inner.get_vocab(true)),
        })
    }
}

impl fmt::Display for SimpleTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimpleTokenizer ({}, vocabulary of {}", self.model_kind(), self.vocab_size())?;
        if let ModelWrapper::WordLevel(_) = self.inner.get_model() {
            match self.unknown_token() {
                Some(token) => write!(f, ", unknown words are {token:?}")?,
                None => write!(f, ", unknown words are errors")?,
            }
        }
        match self.padding_params() {
            Some(params) => write!(f, ", padding {:?} on the {})", params.pad_token, params.direction.as_ref()),
            None => write!(f, ", no padding)"),
        }
    }
}

impl fmt::Debug for SimpleTokenizer {
    /// Without the vocabulary, which can have a quarter of a million words.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimpleTokenizer")
            .field("model", &self.model_kind())
            .field("vocab_size", &self.vocab_size())
            .field("unknown_token", &self.unknown_token())
            .field("padding", &self.padding_params())
            .field("truncation", &self.inner.get_truncation())
            .finish_non_exhaustive()
    }
}
