//! The tokens of one call among those of earlier calls, and their positions.

use std::ops::Range;

use candle_core::{Result, bail};

use super::input::{AttentionInput, KeysFrom};
use super::warnings;
use crate::cache::{AttentionCache, EarlierPadding, NewTokens, Padding};
use crate::mask::AttentionMask;
use crate::pages::PagedTokens;
use crate::position::{Positions, RopeAxes};
use crate::sdpa::PackedSequences;

/// The positions of a call's tokens.
pub(super) struct CallPositions {
    pub queries: Positions,
    /// The positions of the keys of cross-attention; `None` if the keys are the queries' own.
    pub keys: Option<Positions>,
    /// The positions by which queries and keys are rotated, if rotary positions are on several axes.
    pub axes: Option<AxisPositions>,
    /// The positions of the queries after the first key of their sequences, if a mask moves that and the caller gave no
    /// positions: attention temperatures and the lengths by which rotary frequencies are scaled count from there.
    pub after_first_key: Option<Positions>,
    /// The positions of the queries among the tokens in a cache, if it keeps sink tokens and a query is past its
    /// window.
    pub in_cache: Option<Positions>,
}

/// The positions of a call's tokens on several axes.
pub(super) struct AxisPositions {
    /// (A, T) or (A, B, T), row by row.
    pub entries: Vec<f32>,
    /// A.
    count: usize,
}

impl CallPositions {
    /// Returns the length of the longest sequence of queries, without padding on the left.
    pub fn length_of_sequences(&self) -> usize {
        self.counted().length
    }

    /// Returns the positions of the queries that count the tokens of their sequences: without padding on the left, and
    /// without the tokens that a cache with sink tokens has dropped.
    pub fn counted(&self) -> &Positions {
        self.in_cache.as_ref().or(self.after_first_key.as_ref()).unwrap_or(&self.queries)
    }

    /// Returns the largest position + 1, or 0 without tokens.
    pub fn length(&self) -> usize {
        let queries = self.in_cache.as_ref().unwrap_or(&self.queries);
        queries.length.max(self.keys.as_ref().map_or(0, |keys| keys.length))
    }
}

impl AttentionInput<'_> {
    /// Returns the tokens of a call of `b` sequences and `t` positions, after those in its cache.
    ///
    /// # Errors
    /// For padding that does not fit, and for a mask that contradicts the cache.
    pub(super) fn tokens(&self, op: &str, b: usize, t: usize, layer_mask: &AttentionMask) -> Result<NewTokens> {
        if self.function.is_some() && (self.any_cache().is_some() || self.packed.is_some()) {
            bail!("[{op}] an attention function was given with a cache or packed sequences, expected one of them")
        }
        self.check_pages_alone(op)?;
        let padding = Padding { starts: self.starts, valid_lens: self.valid_lens };
        let mut tokens = match self.keys_from(op)? {
            KeysFrom::Cache(cache) => cache.new_tokens((b, t), padding)?,
            KeysFrom::EarlierLayer(cache) => cache.latest_tokens((b, t), padding)?,
            KeysFrom::Own | KeysFrom::Cross { .. } | KeysFrom::Memory(_) | KeysFrom::Pages | KeysFrom::EarlierPages => {
                self.refuse_padding(op)?;
                // All T are tokens, in any number of sequences.
                NewTokens { t, ..NewTokens::default() }
            }
        };
        if let Some(cache) = self.any_cache() {
            warnings::check_mask(op, self.mask(), layer_mask, &tokens, cache.earlier_padding())?;
            tokens.some_are_masked = self.mask().is_some_and(|mask| mask.masks_tokens(&tokens.position_ranges()));
        }
        if let Some(step) = self.any_pages() {
            let own = tokens_of_step(step);
            warnings::check_mask(op, self.mask(), layer_mask, &own, EarlierPadding::default())?;
        }
        tokens.new_token_mask = self.new_token_mask(op, &tokens, b)?;
        if let Some(positions) = self.positions {
            tokens.given_positions = Some(Positions::from_tensor("positions", positions, b, t)?);
        } else if let Some(new) = &tokens.new_token_mask
            && self.has_tree()
        {
            let each = (0..b).flat_map(|sequence| new.positions(sequence, tokens.of_mask()));
            tokens.given_positions = Some(Positions::of_each(each, t)?);
        }
        Ok(tokens)
    }

    /// Checks that a call with pages has neither padding nor an attention function.
    pub(super) fn check_pages_alone(&self, op: &str) -> Result<()> {
        if self.any_pages().is_none() {
            return Ok(());
        }
        if self.function.is_some() {
            bail!("[{op}] an attention function was given with pages, expected one of the two")
        }
        self.refuse_padding(op)
    }

    /// Checks that a call without a cache has no padding besides that of its mask.
    fn refuse_padding(&self, op: &str) -> Result<()> {
        if self.starts.is_some() || self.valid_lens.is_some() {
            bail!(
                "[{op}] valid_lens or starts of an `AttentionInput` were given to a call without a cache, expected \
                 those of an `AttentionMask`"
            )
        }
        Ok(())
    }

    /// Checks the positions of a call with `t_kv` keys, in a layer with rotary positions on `axes`, and returns them if
    /// the layer uses positions.
    ///
    /// # Errors
    /// For positions that do not fit the call or the layer.
    pub(super) fn call_positions(
        &self,
        op: &str,
        tokens: &NewTokens,
        t_kv: usize,
        axes: Option<&RopeAxes>,
        is_used: bool,
    ) -> Result<Option<CallPositions>> {
        let b = if self.queries.rank() == 3 { self.queries.dim(0)? } else { 1 };
        let given_key_positions = match self.key_positions {
            Some(positions) => Some(Positions::from_tensor("key positions", positions, b, t_kv)?),
            None => None,
        };
        if given_key_positions.is_some() && !self.is_cross() {
            bail!("[{op}] key positions are given, but the keys are the queries")
        }
        let axis_positions = self.checked_axis_positions(op, axes, b, tokens.t)?;
        if !is_used {
            return Ok(None);
        }
        let queries = match self.any_pages() {
            Some(step) if tokens.given_positions.is_none() => {
                Positions::of_each(step.positions().into_iter().map(|position| position as usize), tokens.t)?
            }
            None if self.packed.is_some() && tokens.given_positions.is_none() => {
                self.default_positions(PackedSequences::queries, tokens.t)?
            }
            _ => tokens.positions()?,
        };
        let keys = match given_key_positions {
            Some(positions) => Some(positions),
            None if self.is_cross() => Some(self.default_positions(PackedSequences::keys, t_kv)?),
            None => None,
        };
        let in_cache = self.positions_in_cache(&queries)?;
        let positions = CallPositions { queries, keys, axes: axis_positions, after_first_key: None, in_cache };
        if let Some(cache) = self.any_cache() {
            positions.warn_of_going_back(op, cache, tokens);
        }
        Ok(Some(positions))
    }

    /// Checks the positions on the axes of a layer's rotary positions.
    fn checked_axis_positions(
        &self,
        op: &str,
        axes: Option<&RopeAxes>,
        b: usize,
        t: usize,
    ) -> Result<Option<AxisPositions>> {
        let Some(axes) = axes else {
            if self.axis_positions.is_some() {
                bail!("[{op}] axis positions were given, but the config's rope has no axes")
            }
            return Ok(None);
        };
        let count = axes.sections().len();
        let Some(positions) = self.axis_positions else {
            if axes.is_axial() {
                bail!("[{op}] rotary positions are on {count} axes, expected a call `with_axis_positions`")
            }
            return Ok(None);
        };
        if self.is_cross() {
            bail!("[{op}] axis positions were given beside keys, expected self-attention")
        }
        Ok(Some(AxisPositions { entries: axes.positions(positions, b, t)?, count }))
    }

    /// Returns positions that count from 0, in each packed sequence if there are such. `ranges` returns the rows of a
    /// sequence.
    fn default_positions(&self, ranges: fn(&PackedSequences, usize) -> Range<usize>, t: usize) -> Result<Positions> {
        let Some(sequences) = self.packed else { return Positions::starting_at(&[0], t) };
        Positions::of_each((0..sequences.len()).flat_map(|s| 0..ranges(sequences, s).len()), t)
    }
}

/// Returns the new tokens of a step as a batch, padded on the right.
fn tokens_of_step(step: &PagedTokens) -> NewTokens {
    let tokens: Vec<_> = (0..step.before().len()).map(|s| 0..step.packed().queries(s).len()).collect();
    let t = tokens.iter().map(Range::len).max().unwrap_or(0);
    NewTokens { t, before: step.before().to_vec(), tokens, ..NewTokens::default() }
}

impl CallPositions {
    /// Warns if the first position of a sequence does not come after the last one in the cache.
    fn warn_of_going_back(&self, op: &str, cache: &AttentionCache, tokens: &NewTokens) {
        for (sequence, (&before, new)) in tokens.before.iter().zip(&tokens.tokens).enumerate() {
            if before == 0 || new.is_empty() {
                continue;
            }
            if let Some(axes) = &self.axes
                && axes.is_at_origin(self.queries.t, sequence, new.start)
            {
                warnings::about_axis_positions(op, sequence, before);
                continue;
            }
            let first = self.queries.of_sequence(sequence)[new.start] as usize;
            let last = cache.position(sequence, before - 1);
            if first <= last {
                warnings::about_positions(op, sequence, first, last);
            }
        }
    }
}

impl AxisPositions {
    /// Returns whether a token of a sequence is at 0 on all axes, for sequences of T positions.
    fn is_at_origin(&self, t: usize, sequence: usize, token: usize) -> bool {
        let per_axis = self.entries.len() / self.count;
        // One row for all sequences, or a row for each.
        let row = if per_axis == t { 0 } else { sequence };
        (0..self.count).all(|axis| self.entries[axis * per_axis + row * t + token] == 0.0)
    }
}
