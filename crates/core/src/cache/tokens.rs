//! The tokens of one call, and their positions after the tokens of earlier calls.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use crate::mask::{NewTokenCall, NewTokenMask, Placement};
use crate::position::Positions;
use candle_attention_modules::base::{check_entries, check_memory};

/// The padding of a batch (B, T): sequence b has its tokens at `starts[b]..valid_lens[b]`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Padding<'a> {
    /// The start of each sequence's tokens; 0 for all if not given.
    pub starts: Option<&'a [usize]>,
    /// The end of each sequence's tokens; T for all if not given.
    pub valid_lens: Option<&'a [usize]>,
}

/// The tokens of a call (B, T), checked against a cache.
///
/// For a call without a cache and without padding, `before` and `tokens` are empty: all T positions of a sequence are
/// tokens, and the first is at position 0.
#[derive(Debug, Clone, Default)]
pub struct NewTokens {
    /// T.
    pub t: usize,
    /// The length of each sequence before the call, which is the position of its first new token.
    pub before: Vec<usize>,
    /// For each sequence, which of the T positions are tokens; the others are padding.
    pub tokens: Vec<Range<usize>>,
    /// The positions that the caller gave.
    pub(crate) given_positions: Option<Positions>,
    /// Whether the mask of the call masks some of the tokens for all queries.
    pub(crate) some_are_masked: bool,
    /// Which new tokens each of them attends to, if the call says so.
    pub(crate) new_token_mask: Option<NewTokenMask>,
}

impl NewTokens {
    /// Returns the tokens of a call of `dims` (B, T) in a cache whose sequences have the lengths `before`, an empty
    /// list before the first call. `hint(name)` is the end of the error about an entry of `name` (`starts` or
    /// `valid_lens`) that exceeds T.
    ///
    /// # Errors
    /// For another number of sequences than the cache has, for padding that does not fit the call, and where memory is
    /// short.
    pub fn new(
        op: &str,
        before: Vec<usize>,
        dims: (usize, usize),
        padding: Padding,
        hint: fn(&str) -> String,
    ) -> Result<Self> {
        let (b, t) = dims;
        if !before.is_empty() && before.len() != b {
            bail!("[{op}] the call has {b} sequences, expected the {} that the cache holds", before.len())
        }
        // For lengths, starts, ends and ranges: a batch of empty sequences has them too.
        check_memory(op, format_args!("the lengths of {b} sequences"), &[b, 8, size_of::<usize>()])?;
        if let Some(valid_lens) = padding.valid_lens {
            check_padding(op, "valid_lens", valid_lens, dims, hint)?;
        }
        if let Some(starts) = padding.starts {
            check_padding(op, "starts", starts, dims, hint)?;
        }
        let mut tokens = Vec::with_capacity(b);
        for sequence in 0..b {
            let start = padding.starts.map_or(0, |starts| starts[sequence]);
            let end = padding.valid_lens.map_or(t, |valid_lens| valid_lens[sequence]);
            if start > end {
                bail!("[{op}] the tokens of sequence {sequence} start at {start}, after their end at {end}")
            }
            tokens.push(start..end);
        }
        let before = if before.is_empty() { vec![0; b] } else { before };
        Ok(Self { t, before, tokens, ..Self::default() })
    }

    /// Returns the length of each sequence after the call.
    pub fn ends(&self) -> impl Iterator<Item = usize> {
        self.before.iter().zip(&self.tokens).map(|(before, tokens)| before + tokens.len())
    }

    /// Returns the positions of the new tokens in each sequence.
    pub(crate) fn position_ranges(&self) -> Vec<Range<usize>> {
        self.before.iter().zip(self.ends()).map(|(&before, end)| before..end).collect()
    }

    /// Returns the length of the longest sequence after the call.
    pub fn longest(&self) -> usize {
        self.ends().max().unwrap_or(0)
    }

    /// Returns the stored positions of each sequence and the positions of its new tokens, as one range.
    pub(super) fn appended_to(&self, stored: &[Range<usize>]) -> Vec<Range<usize>> {
        stored.iter().zip(&self.tokens).map(|(stored, tokens)| stored.start..stored.end + tokens.len()).collect()
    }

    /// Returns the placement of the queries of each sequence among its keys. `keys` are the positions of the keys of
    /// each sequence.
    pub(super) fn placements(&self, keys: &[Range<usize>]) -> Vec<Placement> {
        let mut placements = Vec::with_capacity(keys.len());
        for ((&before, tokens), key_positions) in self.before.iter().zip(&self.tokens).zip(keys) {
            placements.push(Placement {
                first_position: before as i128 - tokens.start as i128,
                first_query: 0,
                tokens: tokens.clone(),
                keys: key_positions.clone(),
            });
        }
        placements
    }

    /// Returns the sequences of the call for a mask of its new tokens.
    pub(crate) fn of_mask(&self) -> NewTokenCall<'_> {
        NewTokenCall { before: &self.before, tokens: &self.tokens, t_q: self.t }
    }

    /// Returns whether the call has no padding.
    pub fn all_valid(&self) -> bool {
        self.tokens.iter().all(|tokens| *tokens == (0..self.t))
    }

    /// Returns a tensor (B, T, ..) with zeros at padding, whose entries may be NaN.
    pub fn without_padding(&self, xs: Tensor) -> Result<Tensor> {
        if self.all_valid() {
            return Ok(xs);
        }
        let is_token = self.tokens.iter().flat_map(|tokens| (0..self.t).map(|i| u8::from(tokens.contains(&i))));
        let dims = [&[self.tokens.len(), self.t][..], &vec![1; xs.rank() - 2]].concat();
        let is_token = Tensor::from_vec(is_token.collect(), dims, xs.device())?;
        is_token.broadcast_as(xs.shape())?.where_cond(&xs, &xs.zeros_like()?)
    }

    /// Returns the positions that the caller gave, or those that continue each sequence. Padding has the position of
    /// the nearest token, so that it makes no sequence longer.
    pub(crate) fn positions(&self) -> Result<Positions> {
        if let Some(given) = &self.given_positions {
            return Ok(given.clone());
        }
        let first = self.before.first().copied().unwrap_or(0);
        if self.all_valid() && self.before.iter().all(|&before| before == first) {
            return Positions::starting_at(&[first], self.t);
        }
        let b = self.tokens.len();
        let t = self.t;
        let bytes = [b, t, size_of::<u32>()];
        check_memory("rope", format_args!("the positions of {b} sequences of {t} tokens"), &bytes)?;
        let of_sequence = |sequence: usize| {
            let before = self.before[sequence];
            let start = self.tokens[sequence].start;
            let last = (before + self.tokens[sequence].len()).saturating_sub(1);
            (0..t).map(move |i| (before + i.saturating_sub(start)).min(last))
        };
        Positions::of_each((0..b).flat_map(of_sequence), t)
    }
}

/// Checks that the starts or ends of the tokens have an entry for each sequence of a call of `dims` (B, T), at most T.
fn check_padding(
    op: &str,
    name: &str,
    entries: &[usize],
    dims: (usize, usize),
    hint: fn(&str) -> String,
) -> Result<()> {
    let (b, t) = dims;
    check_entries(op, name, entries.len(), b, "sequences")?;
    if let Some((sequence, entry)) = entries.iter().enumerate().find(|&(_, &entry)| entry > t) {
        let hint = hint(name);
        bail!("[{op}] {name} has {entry} for sequence {sequence}, expected at most the call's {t}{hint}")
    }
    Ok(())
}
