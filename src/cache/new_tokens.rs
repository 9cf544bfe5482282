//! The tokens of one call, and their positions in the sequences of a cache.

use std::ops::Range;

use candle_core::{Result, bail};

use crate::position::Positions;

/// The padding of a batch (B, T): sequence b has its tokens at `starts[b]..valid_lens[b]`.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Padding<'a> {
    pub valid_lens: Option<&'a [usize]>,
    pub starts: Option<&'a [usize]>,
}

/// The tokens of a call (B, T), checked against what the cache holds.
#[derive(Debug, Clone)]
pub(crate) struct NewTokens {
    pub t: usize,
    /// Of each sequence, its length before the call: the position of its first new token.
    pub before: Vec<usize>,
    /// Of each sequence, which of the T are tokens; the others are padding.
    pub tokens: Vec<Range<usize>>,
}

impl NewTokens {
    /// `before` are the lengths of the sequences of the cache, empty before the first call; `dims` are (B, T).
    pub fn new(before: Vec<usize>, dims: (usize, usize), padding: Padding) -> Result<Self> {
        let (b, t) = dims;
        if !before.is_empty() && before.len() != b {
            bail!("[attention_cache] the call has {b} sequences, expected the {} that the cache holds", before.len())
        }
        let entries = |name, given: Option<&[usize]>, default| match given {
            None => Ok(vec![default; b]),
            Some(entries) if entries.len() != b => {
                bail!("[attention_cache] {name} has {} entries, expected one for each of {b} sequences", entries.len())
            }
            Some(entries) => match entries.iter().position(|&entry| entry > t) {
                Some(sequence) => bail!(
                    "[attention_cache] {name} has {} for sequence {sequence}, expected at most the call's {t}",
                    entries[sequence]
                ),
                None => Ok(entries.to_vec()),
            },
        };
        let ends = entries("valid_lens", padding.valid_lens, t)?;
        let starts = entries("starts", padding.starts, 0)?;
        let tokens: Vec<_> = starts.into_iter().zip(ends).map(|(start, end)| start..end).collect();
        if let Some(sequence) = tokens.iter().position(|tokens| tokens.start > tokens.end) {
            let Range { start, end } = tokens[sequence];
            bail!("[attention_cache] the tokens of sequence {sequence} start at {start}, after their end at {end}")
        }
        Ok(Self { t, before: if before.is_empty() { vec![0; b] } else { before }, tokens })
    }

    /// The length of each sequence with this call.
    pub fn ends(&self) -> impl Iterator<Item = usize> {
        self.before.iter().zip(&self.tokens).map(|(before, tokens)| before + tokens.len())
    }

    /// The length of the longest sequence with this call.
    pub fn longest(&self) -> usize {
        self.ends().max().unwrap_or(0)
    }

    /// Whether nothing is padding.
    pub fn all_valid(&self) -> bool {
        self.tokens.iter().all(|tokens| *tokens == (0..self.t))
    }

    /// The position of each of the T in its sequence. Padding gets that of the nearest token, so that it makes no sequence
    /// longer.
    pub fn positions(&self) -> Result<Positions> {
        if self.all_valid() {
            let first = self.before.first().copied().unwrap_or(0);
            return match self.before.iter().all(|&before| before == first) {
                true => Positions::starting_at(&[first], self.t),
                false => Positions::starting_at(&self.before, self.t),
            };
        }
        let of_sequence = |(&before, tokens): (&usize, &Range<usize>)| {
            let (start, last) = (tokens.start, (before + tokens.len()).saturating_sub(1));
            (0..self.t).map(move |i| (before + i.saturating_sub(start)).min(last))
        };
        Positions::of_each(self.before.iter().zip(&self.tokens).flat_map(of_sequence).collect(), self.t)
    }
}
