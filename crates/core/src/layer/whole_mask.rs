//! The mask of the layer and of the call together, with chunks and temperatures that count within each sequence.

use candle_core::{Device, Result, bail};

use super::input::AttentionInput;
use super::positions::CallPositions;
use crate::cache::{AttentionCache, NewTokens};
use crate::mask::{AttentionMask, KeyPositions, Placement};
use crate::position::Positions;

/// The shape of a call, for its mask.
#[derive(Clone, Copy)]
pub(super) struct MaskedCall<'a> {
    pub op: &'static str,
    pub tokens: &'a NewTokens,
    /// The number of sequences; 1 for packed ones.
    pub b: usize,
    /// The number of keys without those in a cache.
    pub t_kv: usize,
    pub device: &'a Device,
    /// Whether the layer reads positions that count from the first key of a sequence.
    pub counts_positions: bool,
}

impl AttentionInput<'_> {
    /// Returns the mask of the layer and of the call together. If the layer counts positions from the first key of each
    /// sequence, these are added to `positions`.
    ///
    /// # Errors
    /// For a mask or positions that do not fit in memory, and for chunks whose positions are not known.
    pub(super) fn mask_and_positions(
        &self,
        layer_mask: &AttentionMask,
        positions: &mut Option<CallPositions>,
        call: MaskedCall,
    ) -> Result<AttentionMask> {
        let mask = self.whole_mask(layer_mask, call)?;
        if call.counts_positions
            && let Some(positions) = positions
        {
            positions.after_first_key = self.after_first_key(&positions.queries, &mask, call.b)?;
        }
        Ok(mask)
    }

    fn whole_mask(&self, layer_mask: &AttentionMask, call: MaskedCall) -> Result<AttentionMask> {
        let MaskedCall { tokens, b, device, .. } = call;
        let mut mask = self.mask_with(layer_mask);
        if mask.has_chunks() || call.counts_positions {
            let t_kv = if self.any_cache().is_some() { tokens.longest() } else { call.t_kv };
            mask = mask.with_padded_columns(b, tokens.t, t_kv)?;
        }
        match &tokens.new_token_mask {
            Some(new) => mask.with_new_tokens(new, b, tokens.of_mask(), device),
            None => self.with_chunks_by_positions(mask, call),
        }
    }

    /// Returns a mask whose chunks count from the positions that the caller gave to this call, or to earlier ones with
    /// its cache.
    fn with_chunks_by_positions(&self, mask: AttentionMask, call: MaskedCall) -> Result<AttentionMask> {
        // A caller's function may attend to other keys, by other positions.
        if !mask.has_chunks() || self.function.is_some() {
            return Ok(mask);
        }
        let given = call.tokens.given_positions.as_ref();
        if self.is_cross() {
            if given.is_some() || self.key_positions.is_some() {
                bail!(
                    "[{}] positions were given with keys of other inputs and a mask that has chunks, expected a mask \
                     without chunks",
                    call.op
                )
            }
            return Ok(mask);
        }
        if self.any_pages().is_some() && given.is_some() {
            bail!(
                "[{}] positions were given with pages and a mask that has chunks, expected no positions or a mask \
                 without chunks",
                call.op
            )
        }
        let sequences = match (self.any_cache(), given) {
            (Some(cache), given) if given.is_some() || cache.has_given_positions() => {
                let of_sequence = |sequence| cached_positions(cache, given, call.tokens, sequence);
                (0..call.b).map(of_sequence).collect()
            }
            (None, Some(given)) => self.own_positions(given, call.b),
            (Some(_) | None, _) => return Ok(mask),
        };
        mask.with_chunks_by_positions(&sequences)
    }

    /// Returns the positions of the keys of each sequence of a call without a cache.
    fn own_positions<'p>(&self, given: &'p Positions, b: usize) -> Vec<KeyPositions<'p>> {
        let rows: Vec<&[u32]> = match self.packed {
            Some(packed) => (0..packed.len()).map(|s| &given.entries[packed.queries(s)]).collect(),
            None => (0..b).map(|sequence| given.of_sequence(sequence)).collect(),
        };
        let of_row = |row: &'p [u32]| KeyPositions {
            placement: Placement::whole(row.len(), row.len()),
            t_q: row.len(),
            position: Box::new(move |key| row[key] as usize),
        };
        rows.into_iter().map(of_row).collect()
    }

    /// Returns the positions of the queries after the first key of their sequences; `None` if every sequence begins at
    /// its first key, or the caller gave positions. `queries` are their positions otherwise.
    ///
    /// # Errors
    /// For positions that do not fit in memory.
    fn after_first_key(&self, queries: &Positions, mask: &AttentionMask, b: usize) -> Result<Option<Positions>> {
        if self.positions.is_some() || self.is_cross() || !mask.can_move_first_key() {
            return Ok(None);
        }
        let mut positions = Vec::new();
        let mut is_moved = false;
        let mut add = |sequence: usize, row: &[u32]| {
            for (i, &position) in row.iter().enumerate() {
                let first = mask.first_key(sequence, i);
                is_moved |= first > 0;
                positions.push((position as usize).saturating_sub(first));
            }
        };
        match self.packed_queries() {
            Some(packed) => (0..packed.len()).for_each(|s| add(s, &queries.entries[packed.queries(s)])),
            None => (0..b).for_each(|sequence| add(sequence, queries.of_sequence(sequence))),
        }
        if is_moved { Positions::of_each(positions, queries.t).map(Some) } else { Ok(None) }
    }
}

/// Returns the positions of the keys of one sequence of a call with a cache: of earlier tokens and of the new ones.
fn cached_positions<'p>(
    cache: &'p AttentionCache,
    given: Option<&'p Positions>,
    tokens: &'p NewTokens,
    sequence: usize,
) -> KeyPositions<'p> {
    let before = tokens.before[sequence];
    let own = tokens.tokens[sequence].clone();
    let placement = Placement {
        first_position: before as i128 - own.start as i128,
        first_query: 0,
        tokens: own.clone(),
        keys: 0..before + own.len(),
    };
    let position = Box::new(move |key: usize| match given {
        Some(given) if key >= before => given.of_sequence(sequence)[own.start + key - before] as usize,
        _ => cache.position(sequence, key),
    });
    KeyPositions { placement, t_q: tokens.t, position }
}
