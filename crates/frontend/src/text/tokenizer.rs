//! [`SimpleTokenizer`]: a learner's tokenizer, and a thin layer over any Hugging Face `tokenizer.json`.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

use tokenizers::models::ModelWrapper;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::parallelism::MaybeParallelRefIterator;
use tokenizers::pre_tokenizers::delimiter::CharDelimiterSplit;
use tokenizers::pre_tokenizers::punctuation::Punctuation;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::{
    Decoder, Model, PaddingDirection, PaddingParams, PaddingStrategy, PreTokenizerWrapper, Tokenizer, TruncationParams,
};

use super::{Batch, Encoding, PaddingSide, TokenizerError, failed, invalid, pipeline, quoted, suggestion};

type Result<T> = std::result::Result<T, TokenizerError>;

/// Padding tokens that are recognised without being chosen, best first.
const USUAL_PADDING: [&str; 2] = ["<pad>", "[PAD]"];

/// Where a text splits into words.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Split {
    /// At white space and nowhere else, as Python's `str.split()` does: "you?" is one word.
    #[default]
    Whitespace,
    /// At white space, and each punctuation character is a word of its own: "you?" is "you" and "?". Punctuation is
    /// what Unicode calls so and all of ASCII's, which also cuts a word like `<pad>` into three.
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

/// Whether tokens such as `[CLS]` and `<s>`, which belong to a model's input and not to its text, take part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Encoding adds what the file's post-processor adds; decoding writes them out.
    With,
    /// Encoding adds none; decoding leaves out the file's special tokens and the padding token.
    Without,
}

/// Text to ids and back.
///
/// From a list of words it is the tokenizer of the PyTorch tutorials: `text.split()`, case sensitive, an id for each
/// word, and an error for an unknown word. From a `tokenizer.json` (word-level, BPE, WordPiece or Unigram) it does
/// what the file says, with these differences from the `tokenizers` crate below it:
///
/// - Nothing is dropped in silence. A character without a token is an error where the crate leaves it out, and texts
///   are cut only [`with_truncation`](Self::with_truncation), which counts what it cuts.
/// - Padding is for batches, to the longest text of each. Of the file's padding it takes the token and the side; a
///   length in the file pads nothing. (`AutoTokenizer` of transformers has the same defaults.)
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
    /// Without truncation and padding, which it would apply to single texts too.
    inner: Tokenizer,
    /// The token and the side, as chosen or as in the file.
    padding: Option<PaddingParams>,
    /// The most tokens of a text, special ones included.
    max_tokens: Option<usize>,
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
        // The model takes words that it does not know for its unknown token wherever the vocabulary has it, and its
        // default is "<unk>". The empty word is never in the vocabulary, also not after a round trip through a file.
        let model = WordLevel::builder().vocab(vocab.into_iter().collect()).unk_token(String::new()).build();
        let model = model.map_err(failed("the words make no vocabulary"))?;
        Ok(Self { inner: Tokenizer::new(model), padding: None, max_tokens: None }.with_split(Split::default()))
    }

    /// A tokenizer of the words of some texts, as tutorials build theirs: `<pad>` has id 0, and each word the next id
    /// where it first appears.
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

    /// Reads a Hugging Face `tokenizer.json`, or what [`save`](Self::save) has written.
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

    /// [`from_file`](Self::from_file) with the file's bytes.
    ///
    /// # Errors
    ///
    /// As there, but for the reading.
    pub fn from_bytes(bytes: impl AsRef<[u8]>) -> Result<Self> {
        Self::load(bytes.as_ref(), "the input")
    }

    fn load(bytes: &[u8], name: &str) -> Result<Self> {
        let unusable = failed(format!("{name} is not a tokenizer.json that can be used"));
        let (inner, padding) = pipeline::load(bytes).map_err(unusable)?;
        let padding = padding.map(|params| PaddingParams {
            strategy: PaddingStrategy::BatchLongest,
            pad_to_multiple_of: None,
            ..params
        });
        Ok(Self { inner, padding, max_tokens: None })
    }

    /// Writes a `tokenizer.json` with everything chosen here. Read again it behaves the same, but for truncation, which
    /// a reader asks for anew.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut whole = self.inner.clone();
        let truncation = self.max_tokens.map(|max_length| TruncationParams { max_length, ..Default::default() });
        let saved = whole.with_padding(self.padding.clone()).with_truncation(truncation);
        saved.and_then(|whole| whole.save(path, true)).map_err(failed(format!("cannot write {path:?}")))
    }

    /// Splits texts at `split`, in place of what a loaded file does before its model.
    #[must_use]
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

    /// Cuts the end of texts that have more than `max_tokens` tokens, special ones included;
    /// [`Encoding::num_truncated`] and [`Batch::num_truncated`] say by how much. Without it nothing is cut, whatever
    /// the file says.
    ///
    /// # Errors
    ///
    /// If so many tokens leave no room beside the special ones.
    pub fn with_truncation(self, max_tokens: usize) -> Result<Self> {
        pipeline::room(max_tokens, pipeline::num_special_tokens(&self.inner, false))?;
        Ok(Self { max_tokens: Some(max_tokens), ..self })
    }

    /// The ids and tokens of `text`, with the special tokens of the file. The text "" has no ids but those.
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
        pipeline::encode(&self.inner, text, None, special == SpecialTokens::With, self.max_tokens)
    }

    /// Two texts as one, as the file puts them together: a question and a passage for a cross-encoder. What is too long
    /// loses tokens from the end of the longer text, until both are as long.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode), and where [`with_truncation`](Self::with_truncation) leaves no room beside the
    /// special tokens of a pair.
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

    /// The texts' ids (B, T), padded to the longest text.
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
        let in_batch = |(index, row): (usize, Result<_>)| {
            row.map_err(|error| TokenizerError::InBatch { index, source: Box::new(error) })
        };
        // Collected first, so that the error is always that of the first text that fails.
        Batch::new(rows.into_iter().enumerate().map(in_batch).collect::<Result<_>>()?, self.padding_params())
    }

    /// The text of `ids`, special tokens and padding included: words joined by a space, or what the file's decoder
    /// does.
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
        // By its text, since a file's padding id can be that of another word.
        let padding = self.padding_token();
        let is_special = |token: &String| {
            self.inner.get_added_vocabulary().is_special_token(token) || padding.as_ref() == Some(token)
        };
        let mut tokens: Vec<_> = ids.iter().map_while(|&id| self.inner.id_to_token(id)).collect();
        if let Some(id) = ids.get(tokens.len()) {
            let (number, words) = (tokens.len() + 1, self.vocab_size());
            return invalid(format!(
                "id {id}, number {number} of the list, is not in the vocabulary of {words} words: give ids that this \
                 tokenizer made"
            ));
        }
        tokens.retain(|token| special == SpecialTokens::With || !is_special(token));
        match self.inner.get_decoder() {
            // Some decoders count down from the number of tokens.
            Some(decoder) if !tokens.is_empty() => pipeline::catch_panic(|| decoder.decode(tokens))
                .map_err(failed("the file's tokenizer failed to decode")),
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
        pipeline::words(&self.inner)
    }

    /// The token that batches are padded with, if there is one.
    pub fn padding_token(&self) -> Option<String> {
        self.padding_params().map(|params| params.pad_token)
    }

    /// The word that all unknown words of a word-level vocabulary are taken for. `None` if they are errors, and for
    /// models of other kinds, which have their own ways.
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
            let [nearest, vocabulary] = pipeline::nearest_and_first(token, &self.inner);
            let advice = suggestion(&nearest, &vocabulary, "add it");
            TokenizerError::Invalid(format!("the {part} token {} is not in the vocabulary: {advice}", quoted(token)))
        })
    }
}

impl fmt::Debug for SimpleTokenizer {
    /// Without the vocabulary, which can have a quarter of a million words.
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
