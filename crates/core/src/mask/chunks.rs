//! Chunks that count from the positions of a caller, instead of from the first key of a sequence.

use std::ops::Range;

use candle_core::{Result, bail};

use super::constraint::{Constraint, QueryAlignment, Reach};
use super::placement::Placement;
use super::{AttentionMask, OP};

/// The positions of the keys of one sequence of a call.
pub(crate) struct KeyPositions<'a> {
    /// The location of the call's queries among the keys of the whole sequence.
    pub placement: Placement,
    /// The number of the call's queries.
    pub t_q: usize,
    /// Returns the position of a key.
    pub position: Box<dyn Fn(usize) -> usize + 'a>,
}

impl KeyPositions<'_> {
    /// Returns the keys in the chunk of `size` positions of each query; none for padding. These are the keys around the
    /// query's own whose positions are in the same chunk and do not decrease: another sequence begins where they do.
    fn chunks(&self, size: usize) -> Vec<Range<usize>> {
        let Placement { first_position, tokens, keys, .. } = &self.placement;
        let continues = |key: usize| {
            let position = (self.position)(key);
            let before = (self.position)(key - 1);
            before <= position && before / size == position / size
        };
        let mut chunks: Vec<Range<usize>> = Vec::with_capacity(self.t_q);
        for i in 0..self.t_q {
            if !tokens.contains(&i) {
                chunks.push(0..0);
                continue;
            }
            let own = (first_position + i as i128) as usize;
            if let Some(of_last) = chunks.last()
                && of_last.contains(&own)
            {
                chunks.push(of_last.clone());
                continue;
            }
            let mut start = own;
            while start > 0 && continues(start) {
                start -= 1;
            }
            let mut end = own + 1;
            while end < keys.end && continues(end) {
                end += 1;
            }
            chunks.push(start..end);
        }
        chunks
    }

    /// Returns whether chunks by the positions are chunks that count from key 0.
    fn counts_from_zero(&self, size: usize, chunks: &[Range<usize>]) -> bool {
        let Placement { first_position, tokens, keys, .. } = &self.placement;
        tokens.clone().zip(&chunks[tokens.clone()]).all(|(i, chunk)| {
            let start = (first_position + i as i128) as usize / size * size;
            *chunk == (start..(start.saturating_add(size)).min(keys.end))
        })
    }
}

impl AttentionMask {
    /// Returns the mask with chunks by the positions of the keys of each sequence, as ranges of keys for each query.
    ///
    /// # Errors
    /// For chunks of a mask that places the queries elsewhere than at their own keys.
    pub(crate) fn with_chunks_by_positions(&self, sequences: &[KeyPositions]) -> Result<Self> {
        let mut mask = self.clone();
        mask.constraints.clear();
        for constraint in &self.constraints {
            let Constraint::Aligned(alignment, Reach::Chunk(size)) = constraint else {
                mask.constraints.push(constraint.clone());
                continue;
            };
            check_own_keys(alignment, sequences)?;
            let each: Vec<_> = sequences.iter().map(|sequence| sequence.chunks(*size)).collect();
            let counts_from_zero =
                |(sequence, chunks): (&KeyPositions, &Vec<_>)| sequence.counts_from_zero(*size, chunks);
            if !self.can_move_first_key() && sequences.iter().zip(&each).all(counts_from_zero) {
                mask.constraints.push(constraint.clone());
                continue;
            }
            let bounds = |bound: fn(&Range<usize>) -> usize| -> Vec<Vec<usize>> {
                each.iter().map(|chunks| chunks.iter().map(bound).collect()).collect()
            };
            mask.constraints.push(Constraint::FirstKeys(bounds(|chunk| chunk.start).into()));
            mask.constraints.push(Constraint::ValidLens(bounds(|chunk| chunk.end).into()));
        }
        Ok(mask)
    }
}

/// Checks that an alignment places the queries at their own keys.
fn check_own_keys(alignment: &QueryAlignment, sequences: &[KeyPositions]) -> Result<()> {
    for (b, KeyPositions { placement, .. }) in sequences.iter().enumerate() {
        let found = alignment.position(b, placement, 0);
        if found != placement.first_position {
            bail!(
                "[{OP}] positions were given, and chunks of a mask count from key {found} for query 0 of sequence {b}, \
                 expected its own key {}",
                placement.first_position
            )
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(positions: &[usize], size: usize) -> Vec<Range<usize>> {
        let t = positions.len();
        let position = Box::new(|key: usize| positions[key]);
        KeyPositions { placement: Placement::whole(t, t), t_q: t, position }.chunks(size)
    }

    #[test]
    fn chunks_by_positions_are_runs_of_keys() {
        assert_eq!(chunks(&[0, 1, 2, 3, 4], 3), [0..3, 0..3, 0..3, 3..5, 3..5]);
        assert_eq!(chunks(&[5, 6, 7, 8], 3), [0..1, 1..4, 1..4, 1..4]);
        // Padding on the left, with the positions of transformers.
        assert_eq!(chunks(&[1, 1, 0, 1, 2, 3], 2), [0..2, 0..2, 2..4, 2..4, 4..6, 4..6]);
        // Two documents, and positions with a gap.
        assert_eq!(chunks(&[0, 1, 0, 1, 5, 6], 4), [0..2, 0..2, 2..4, 2..4, 4..6, 4..6]);
        assert!(chunks(&[], 4).is_empty());
    }
}
