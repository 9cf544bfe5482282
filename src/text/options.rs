//! The choices of [`SimpleTokenizer`](super::SimpleTokenizer): where a text splits, and what special tokens do.

use tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::delimiter::CharDelimiterSplit;
use tokenizers::pre_tokenizers::punctuation::Punctuation;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;

/// Where a text splits into words.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Split {
    /// At white space and nowhere else, as Python's `str.split()` does: "you?" is one word.
    #[default]
    Whitespace,
    /// At white space, and each punctuation character is a word of its own: "you?" is "you" and "?". Punctuation is
    /// what Unicode calls so and all of ASCII's, which also cuts a word like `<pad>` into three.
    Punctuation,
}

/// Whether tokens such as `[CLS]` and `<s>`, which belong to a model's input and not to its text, take part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Encoding adds what the file's post-processor adds; decoding writes them out.
    With,
    /// Encoding adds none; decoding leaves out the file's special tokens and the padding token.
    Without,
}

impl Split {
    pub(super) fn pre_tokenizer(self) -> Sequence {
        let mut steps: Vec<PreTokenizerWrapper> = vec![WhitespaceSplit.into()];
        // Python's white space is Unicode's and ASCII's four separators: FS, GS, RS, US.
        steps.extend(('\x1c'..='\x1f').map(|c| CharDelimiterSplit::new(c).into()));
        if self == Self::Punctuation {
            steps.push(Punctuation::default().into());
        }
        Sequence::new(steps)
    }
}
