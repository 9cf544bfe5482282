//! [`SimpleTokenizer`]: a learner's tokenizer, and a thin layer over any Hugging Face `tokenizer.json`.

mod encoding;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

use tokenizers::models::ModelWrapper;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::pre_tokenizers::delimiter::CharDelimiterSplit;
use tokenizers::pre_tokenizers::punctuation::Punctuation;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::{
    Model, PaddingDirection, PaddingParams, PaddingStrategy, PreTokenizerWrapper, Tokenizer, TruncationParams,
};

use super::{PaddingSide, TokenizerError, failed, invalid, pipeline, quoted, suggestion};

type Result<T> = std::result::Result<T, TokenizerError>;

/// The padding tokens that are recognised by name, the preferred one first.
const USUAL_PADDING: [&str; 2] = ["<pad>", "[PAD]"];

/// The places where a text splits into words.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Split {
    /// At white space and nowhere else, as in Python's `str.split()`: "you?" is one word.
    #[default]
    Whitespace,
    /// At white space, and around each punctuation character: "you?" is "you" and "?". Punctuation is Unicode's and all
    /// of ASCII's, which also splits a word like `<pad>` into three.
    Punctuation,
}

impl Split {
    fn pre_tokenizer(self) -> Sequence {
        let mut steps: Vec<PreTokenizerWrapper> = vec![WhitespaceSplit.into()];
        // Python's white space is Unicode's and ASCII's four separators: FS, GS, RS, US.
        steps.extend(('\x1c'..='\x1f').map(|c| CharDelimiterSplit::new(c).into()));
        if self == Self::Punctuation {
            steps.push(Punctuation::default().into());
        }
        Sequence::new(steps)
    }
}

/// Whether to include tokens such as `[CLS]` and `<s>`, which belong to a model's input and not to its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Encoding adds the tokens of the file's post-processor; decoding includes them.
    With,
    /// Encoding adds none; decoding omits the file's special tokens and the padding token.
    Without,
}

/// A tokenizer: text to ids and back.
///
/// Made of a list of words, it is the tokenizer of the PyTorch tutorials: `text.split()`, case sensitive, an id for
/// each word, and an error for an unknown word. Loaded from a `tokenizer.json` (word-level, BPE, WordPiece or Unigram),
/// it follows the file, with these differences from the `tokenizers` crate on which it is built:
///
/// - Nothing is dropped in silence. A character without a token is an error instead of being omitted, and texts are cut
///   only [`with_truncation`](Self::with_truncation), which counts the tokens that it cuts.
/// - Only batches are padded, to the longest text of each. The file's padding token and side are used; a padding length
///   in the file is ignored. (`AutoTokenizer` of transformers has the same defaults.)
/// - A fault of a file is an error; the crate panics on some.
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
    /// The tokenizer without truncation and padding, which it would apply to single texts too.
    inner: Tokenizer,
    /// The padding token and side, as chosen or as in the file.
    padding: Option<PaddingParams>,
    /// The most tokens of a text, special ones included.
    max_tokens: Option<usize>,
}

impl SimpleTokenizer {
    /// Makes a tokenizer of the given words, whose ids are their positions: 0, 1, 2 and so on.
    ///
    /// A word that contains white space is kept, although no text splits into it.
    ///
    /// # Errors
    ///
    /// If there are no words, a word is empty, or a word occurs twice.
    pub fn from_words(words: impl IntoIterator<Item = impl Into<String>>) -> Result<Self> {
        let mut vocab = HashMap::new();
        for (position, word) in words.into_iter().enumerate() {
            let word = word.into();
            let number = position + 1;
            if word.is_empty() {
                return invalid(format!(
                    "the vocabulary's word {number} is empty, and no text contains an empty word: remove it"
                ));
            }
            if let Some(first) = vocab.get(&word) {
                return invalid(format!(
                    "the word {} is in the vocabulary twice, as word {} and word {number}: remove one",
                    quoted(&word),
                    first + 1
                ));
            }
            vocab.insert(word, position as u32);
        }
        if vocab.is_empty() {
            return invalid("the vocabulary is empty: give at least one word");
        }
        // If the vocabulary has the model's unknown token, the model uses it for unknown words, and its default is
        // "<unk>". The empty word is never in the vocabulary, also not after saving and loading a file.
        let model = WordLevel::builder().vocab(vocab.into_iter().collect()).unk_token(String::new()).build();
        let model = model.map_err(failed("the words make no vocabulary"))?;
        Ok(Self { inner: Tokenizer::new(model), padding: None, max_tokens: None }.with_split(Split::default()))
    }

    /// Makes a tokenizer of the words of some texts, as in tutorials: `<pad>` has id 0, and each new word the next id.
    ///
    /// ```
    /// # use candle_attention::text::{SimpleTokenizer, Split};
    /// let tokenizer = SimpleTokenizer::from_texts(&["the cat sat on the mat"], Split::Whitespace)?;
    /// assert_eq!(tokenizer.encode("the cat sat on the mat")?.ids, [1, 2, 3, 4, 1, 5]);
    /// # Ok::<(), candle_attention::text::TokenizerError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If a text cannot be split.
    pub fn from_texts<S: AsRef<str>>(texts: &[S], split: Split) -> Result<Self> {
        let mut words = vec![USUAL_PADDING[0].to_owned()];
        for text in texts {
            let pieces = pipeline::split(&split.pre_tokenizer(), text.as_ref());
            words.extend(pieces.map_err(failed("the text cannot be split"))?);
        }
        let mut seen = HashSet::new();
        words.retain(|word| seen.insert(word.clone()));
        Ok(Self::from_words(words)?.with_split(split))
    }

    /// Reads a Hugging Face `tokenizer.json`, or a file written by [`save`](Self::save).
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is not a `tokenizer.json`, or has a post-processor with tokens that it does not
    /// define.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(failed(format!("cannot read {path:?}")))?;
        Self::load(&bytes, &format!("{path:?}"))
    }

    /// Reads the bytes of such a file, like [`from_file`](Self::from_file).
    ///
    /// # Errors
    ///
    /// If the bytes are not a `tokenizer.json`, or have a post-processor with tokens that they do not define.
    pub fn from_bytes(bytes: impl AsRef<[u8]>) -> Result<Self> {
        Self::load(bytes.as_ref(), "the input")
    }

    fn load(bytes: &[u8], name: &str) -> Result<Self> {
        let unusable = failed(format!("{name} is not a tokenizer.json that can be used"));
        let loaded = pipeline::load(bytes).map_err(unusable)?;
        let padding = loaded.padding.map(|params| PaddingParams {
            strategy: PaddingStrategy::BatchLongest,
            pad_to_multiple_of: None,
            ..params
        });
        Ok(Self { inner: loaded.tokenizer, padding, max_tokens: None })
    }

    /// Writes a `tokenizer.json` with all settings. Read again it behaves the same, except that truncation has to be
    /// set again.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut tokenizer = self.inner.clone();
        let truncation = self.max_tokens.map(|max_length| TruncationParams { max_length, ..Default::default() });
        let result = match tokenizer.with_padding(self.padding.clone()).with_truncation(truncation) {
            Ok(whole) => whole.save(path, true),
            Err(error) => Err(error),
        };
        result.map_err(failed(format!("cannot write {path:?}")))
    }

    /// Splits texts at `split`, instead of the pre-tokenizer of a loaded file.
    #[must_use]
    pub fn with_split(mut self, split: Split) -> Self {
        self.inner.with_pre_tokenizer(Some(split.pre_tokenizer()));
        self
    }

    /// Encodes every unknown word as `token`, which must be in the vocabulary.
    ///
    /// # Errors
    ///
    /// If the token is not in the vocabulary, or if the vocabulary is not word-level.
    pub fn with_unknown(mut self, token: &str) -> Result<Self> {
        let ModelWrapper::WordLevel(model) = self.inner.get_model() else {
            return invalid(format!(
                "with_unknown is for word-level vocabularies, and this is a {} model, whose file names its own: leave it \
                 out",
                pipeline::model_kind(self.inner.get_model())
            ));
        };
        let mut model = model.clone();
        self.id_of("unknown", token)?;
        model.unk_token = token.to_owned();
        self.inner.with_model(model);
        Ok(self)
    }

    /// Pads batches with `token`, which must be in the vocabulary.
    ///
    /// The default is the padding token of the file, or else the vocabulary's `<pad>` or `[PAD]`.
    ///
    /// # Errors
    ///
    /// If it is not in the vocabulary.
    pub fn with_padding(mut self, token: &str) -> Result<Self> {
        let pad_id = self.id_of("padding", token)?;
        self.padding = Some(PaddingParams { pad_id, pad_token: token.to_owned(), ..self.padding.unwrap_or_default() });
        Ok(self)
    }

    /// Pads batches on this side. The default is the side of the file, or else the right.
    ///
    /// # Errors
    ///
    /// If there is no padding token.
    pub fn with_padding_side(self, side: PaddingSide) -> Result<Self> {
        let Some(params) = self.padding_params() else {
            return invalid("there is no padding token to put on a side: choose one with with_padding first");
        };
        let direction = match side {
            PaddingSide::Left => PaddingDirection::Left,
            PaddingSide::Right => PaddingDirection::Right,
        };
        Ok(Self { padding: Some(PaddingParams { direction, ..params }), ..self })
    }

    /// Cuts the end of texts that have more than `max_tokens` tokens, special ones included.
    /// [`Encoding::num_truncated`](super::Encoding::num_truncated) and
    /// [`Batch::num_truncated`](super::Batch::num_truncated) count the tokens that were cut. By default nothing is
    /// cut, also if the file has a truncation.
    ///
    /// # Errors
    ///
    /// If `max_tokens` is not more than the number of special tokens.
    pub fn with_truncation(self, max_tokens: usize) -> Result<Self> {
        pipeline::max_text_tokens(max_tokens, pipeline::num_special_tokens(&self.inner, false))?;
        Ok(Self { max_tokens: Some(max_tokens), ..self })
    }

    /// Returns the number of words, added tokens included.
    ///
    /// Ids run from 0 to one less, unless a file has gaps between them.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Returns the id of a word, if it is in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the word of an id, if there is one.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns all words, added tokens included, in the order of their ids.
    pub fn words(&self) -> Vec<String> {
        pipeline::words(&self.inner)
    }

    /// Returns the token that batches are padded with, if there is one.
    pub fn padding_token(&self) -> Option<String> {
        self.padding_params().map(|params| params.pad_token)
    }

    /// Returns the word that unknown words of a word-level vocabulary are encoded as. `None` if they are errors, and
    /// for models of other kinds, which treat unknown words in other ways.
    pub fn unknown_token(&self) -> Option<&str> {
        let ModelWrapper::WordLevel(model) = self.inner.get_model() else { return None };
        model.token_to_id(&model.unk_token).map(|_| model.unk_token.as_str())
    }

    fn padding_params(&self) -> Option<PaddingParams> {
        let usual = |token: &&str| {
            let pad_id = self.token_to_id(token)?;
            Some(PaddingParams { pad_id, pad_token: (*token).to_owned(), ..PaddingParams::default() })
        };
        self.padding.clone().or_else(|| USUAL_PADDING.iter().find_map(usual))
    }

    fn id_of(&self, part: &'static str, token: &str) -> Result<u32> {
        self.token_to_id(token).ok_or_else(|| {
            let words = pipeline::Suggestions::new(token, &self.inner);
            let advice = suggestion(&words.nearest, &words.first, "add it");
            TokenizerError::Invalid(format!("the {part} token {} is not in the vocabulary: {advice}", quoted(token)))
        })
    }
}

impl fmt::Debug for SimpleTokenizer {
    /// Omits the vocabulary, which can have a quarter of a million words.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimpleTokenizer")
            .field("model", &pipeline::model_kind(self.inner.get_model()))
            .field("vocab_size", &self.vocab_size())
            .field("unknown_token", &self.unknown_token())
            .field("padding", &self.padding_params())
            .field("max_tokens", &self.max_tokens)
            .finish_non_exhaustive()
    }
}
