//! Encoded texts: one, and a padded batch of them.

use candle_core::{Device, Result, Tensor};

use super::error::TokenizerError;
use crate::mask::ValidLens;

/// One text as ids and tokens; both have the same length T.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoding {
    /// The ids, (T,).
    pub ids: Vec<u32>,
    /// The word, or the part of a word, that each id stands for.
    pub tokens: Vec<String>,
}

/// The side of a row on which padding stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PaddingSide {
    /// Before the text, so that all texts end together (generation by decoder-only models).
    Left,
    /// After the text.
    Right,
}

/// How to make rows of one length.
pub(super) struct Padding {
    pub id: u32,
    pub token: String,
    pub side: PaddingSide,
    /// Rows are at least this long.
    pub at_least: usize,
    /// Row lengths are a multiple of this.
    pub multiple_of: usize,
}

/// A batch of B texts, padded to one length T.
///
/// Without texts of different lengths there is no padding: T is then the length of each. If all texts
/// are empty, T is 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    ids: Vec<Vec<u32>>,
    tokens: Vec<Vec<String>>,
    lens: Vec<usize>,
    seq_len: usize,
    side: PaddingSide,
}

impl Batch {
    pub(super) fn new(mut rows: Vec<Encoding>, padding: Option<Padding>) -> std::result::Result<Self, TokenizerError> {
        let lens: Vec<usize> = rows.iter().map(|row| row.ids.len()).collect();
        let (Some(&shortest), Some(&longest)) = (lens.iter().min(), lens.iter().max()) else {
            return Err(TokenizerError::EmptyBatch);
        };
        let (seq_len, side) = match padding {
            Some(padding) => {
                let seq_len = longest.max(padding.at_least).next_multiple_of(padding.multiple_of.max(1));
                rows.iter_mut().for_each(|row| pad(row, seq_len, &padding));
                (seq_len, padding.side)
            }
            None if shortest == longest => (longest, PaddingSide::Right),
            None => return Err(TokenizerError::NoPadding { shortest, longest }),
        };
        let (ids, tokens) = rows.into_iter().map(|row| (row.ids, row.tokens)).unzip();
        Ok(Self { ids, tokens, lens, seq_len, side })
    }

    /// The ids with padding, (B, T).
    pub fn ids(&self) -> &[Vec<u32>] {
        &self.ids
    }

    /// The tokens with padding, (B, T).
    pub fn tokens(&self) -> &[Vec<String>] {
        &self.tokens
    }

    /// The number of tokens in each text, without padding, (B,).
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// B, the number of texts; at least 1.
    pub fn batch_size(&self) -> usize {
        self.ids.len()
    }

    /// T, the length of each row with its padding.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// The side on which the rows are padded.
    pub fn padding_side(&self) -> PaddingSide {
        self.side
    }

    /// The ids with padding as a u32 tensor (B, T).
    ///
    /// # Errors
    ///
    /// What the device gives.
    pub fn ids_tensor(&self, device: &Device) -> Result<Tensor> {
        Tensor::from_vec(self.ids.concat(), (self.batch_size(), self.seq_len), device)
    }

    /// The number of tokens in each text, (B,), for `AttentionMask::with_valid_lens`: keys at and past the length
    /// are padding.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::PaddedOnTheLeft`] if the tokenizer pads on the left, whether or not this batch has padding:
    /// there the first keys are padding, and [`starts`](Self::starts) describes them.
    pub fn valid_lens(&self) -> std::result::Result<ValidLens, TokenizerError> {
        match self.side {
            PaddingSide::Right => Ok(ValidLens::from(self.lens.clone())),
            PaddingSide::Left => Err(TokenizerError::PaddedOnTheLeft),
        }
    }

    /// The position of each text's first token, (B,), for `AttentionMask::with_starts`: keys before it are padding.
    /// All zero if the padding is on the right.
    pub fn starts(&self) -> ValidLens {
        ValidLens::from(match self.side {
            PaddingSide::Right => vec![0; self.lens.len()],
            PaddingSide::Left => self.lens.iter().map(|len| self.seq_len - len).collect(),
        })
    }
}

fn pad(row: &mut Encoding, seq_len: usize, padding: &Padding) {
    let missing = seq_len - row.ids.len();
    let at = match padding.side {
        PaddingSide::Left => 0,
        PaddingSide::Right => row.ids.len(),
    };
    row.ids.splice(at..at, std::iter::repeat_n(padding.id, missing));
    row.tokens.splice(at..at, std::iter::repeat_n(padding.token.clone(), missing));
}
