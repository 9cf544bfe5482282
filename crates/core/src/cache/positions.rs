//! Where the keys of a cache stand: at the positions that their calls were given, or one behind the other.

use candle_core::Result;

use super::{AttentionCache, NewTokens};
use crate::position::Positions;

impl AttentionCache {
    /// The positions of all keys with those that a call adds, if it adds any: (T_kv,) or (B, T_kv) for the T_kv of the
    /// longest sequence.
    ///
    /// # Errors
    /// For positions of 2^24 and more.
    pub(crate) fn key_positions(&self, added: Option<&NewTokens>) -> Result<Positions> {
        let longest = added.map_or(self.len(), NewTokens::longest);
        let Some(mut rows) = self.positions_with(added)? else { return Positions::starting_at(&[0], longest) };
        if rows.iter().all(|row| *row == rows[0]) {
            rows.truncate(1);
        }
        // No query sees a key behind the end of its sequence.
        rows.iter_mut().for_each(|row| row.resize(longest, 0));
        Positions::of_each(rows.concat().into_iter().map(|position| position as usize).collect(), longest)
    }

    /// The position of each token of each sequence with those of a call, if any were given.
    pub(super) fn positions_with(&self, added: Option<&NewTokens>) -> Result<Option<Vec<Vec<u32>>>> {
        let mut rows = match (&self.positions, added) {
            (Some(rows), _) => rows.clone(),
            (None, Some(NewTokens { before, given: Some(_), .. })) => {
                let places = Positions::starting_at(&[0], self.len())?;
                before.iter().map(|&before| places.of_sequence(0)[..before].to_vec()).collect()
            }
            _ => return Ok(None),
        };
        if let Some(added) = added {
            let positions = added.positions()?;
            for (b, (row, tokens)) in rows.iter_mut().zip(&added.tokens).enumerate() {
                row.extend(&positions.of_sequence(b)[tokens.clone()]);
            }
        }
        Ok(Some(rows))
    }
}
