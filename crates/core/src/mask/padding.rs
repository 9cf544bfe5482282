//! The padding that a mask names, for checks of calls with a cache.

use std::ops::Range;

use candle_core::Tensor;

use super::AttentionMask;
use super::constraint::{Constraint, QueryAlignment, Reach};

/// A sequence whose first query is at another position by an offset of the mask than by the cache.
pub(crate) struct OtherOffset {
    pub sequence: usize,
    /// The position by the offset.
    pub position: i128,
}

impl AttentionMask {
    /// Returns whether a query may attend to keys after its own: no constraint masks them, and no tensor could.
    pub(crate) fn allows_later_keys(&self) -> bool {
        let masks_later_keys = |constraint: &Constraint| {
            matches!(constraint, Constraint::Aligned(_, Reach::Causal { .. } | Reach::Window { right: 0, .. }))
        };
        self.tensor_kind().is_none() && self.key_lists.is_empty() && !self.constraints.iter().any(masks_later_keys)
    }

    /// Returns whether the mask masks some of the new tokens of a call for all queries. `tokens` are their positions in
    /// each sequence.
    pub(crate) fn masks_tokens(&self, tokens: &[Range<usize>]) -> bool {
        self.constraints.iter().any(|constraint| {
            let mut sequences = tokens.iter().enumerate().filter(|(_, new)| !new.is_empty());
            match constraint {
                Constraint::Starts(starts) => {
                    sequences.any(|(b, new)| starts.of_sequence(b).is_some_and(|start| start > new.start))
                }
                Constraint::ValidLens(lens) => {
                    sequences.any(|(b, new)| lens.of_sequence(b).is_some_and(|len| len < new.end))
                }
                Constraint::Tokenized(tokenized) => tokenized.has_gaps,
                Constraint::FirstKeys(_) | Constraint::Padded(_) => false,
                Constraint::Aligned(..) | Constraint::Prefix(_) | Constraint::Wrong(_) => false,
            }
        })
    }

    /// Returns whether the mask has a constraint that can mask padding: starts, lengths or a tensor.
    pub(crate) fn can_name_padding(&self) -> bool {
        let is_length =
            |constraint: &Constraint| matches!(constraint, Constraint::Starts(_) | Constraint::ValidLens(_));
        self.tensor_kind().is_some() || self.constraints.iter().any(is_length)
    }

    /// Returns the largest of the lengths that the mask has, if it has lengths.
    pub(crate) fn largest_length(&self) -> Option<usize> {
        let length = |constraint: &Constraint| match constraint {
            Constraint::ValidLens(lens) => lens.largest(),
            _ => None,
        };
        self.constraints.iter().filter_map(length).max()
    }

    /// Returns whether the mask seems to count padding on the left: it has starts above 0, or a tensor with a row for
    /// each sequence.
    pub(crate) fn counts_left_padding(&self) -> bool {
        let is_start = |constraint: &Constraint| matches!(constraint, Constraint::Starts(lens) if lens.is_above_zero());
        let has_row_per_sequence = |tensor: &Tensor| matches!(*tensor.dims(), [b, _, _, _] if b > 1);
        self.constraints.iter().any(is_start) || self.bool_masks.iter().chain(&self.biases).any(has_row_per_sequence)
    }

    /// Returns whether a constraint counts from the positions of the queries: a causal mask, a window, chunks.
    pub(crate) fn counts_from_queries(&self) -> bool {
        self.constraints.iter().any(|constraint| constraint.alignment().is_some())
    }

    /// Returns a sequence in which an offset of the mask places the first query elsewhere than `first_queries` does.
    pub(crate) fn other_offset(&self, first_queries: &[i128]) -> Option<OtherOffset> {
        for alignment in self.constraints.iter().filter_map(Constraint::alignment) {
            for (b, &query) in first_queries.iter().enumerate() {
                let offset = match alignment {
                    QueryAlignment::End => continue,
                    QueryAlignment::Offset(n) => *n as i128,
                    QueryAlignment::Offsets(offsets) => match offsets.get(b) {
                        Some(&n) => n.into(),
                        None => continue,
                    },
                };
                if offset != query {
                    return Some(OtherOffset { sequence: b, position: offset });
                }
            }
        }
        None
    }
}
