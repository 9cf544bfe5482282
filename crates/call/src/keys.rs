//! The keys that each query attends to, as numbers and a few lists.

use crate::inputs::Input;
use crate::modifiers::map_one;

/// The keys that each query attends to: those that every bound allows. The default allows all.
///
/// Lists have an entry for each sequence: (B,), or (n,) for packed sequences. Entries outside of the keys are allowed.
#[derive(Debug, Clone)]
pub struct BoundedKeys<T> {
    /// The lengths of packed sequences; `None` for a batch.
    pub packed: Option<PackedLengths<T>>,
    /// The position of query 0 among the keys, from which `causal`, `left`, `right`, `chunk` and ALiBi count.
    pub first_position: FirstPosition<T>,
    /// Whether the keys after the query's position are masked.
    pub causal: bool,
    /// The number of keys before the query's position that are not masked; `None` for all.
    pub left: Option<usize>,
    /// The number of keys after the query's position that are not masked; `None` for all.
    pub right: Option<usize>,
    /// The number of positions of a chunk. Keys in other chunks than the query's are masked.
    pub chunk: Option<usize>,
    /// The first key of each sequence. Keys before it are masked.
    pub starts: Option<T>,
    /// The number of keys of each sequence. Keys from this position on are masked.
    pub lengths: Option<T>,
    /// The end of each sequence's prefix. With `causal`, every query attends to the keys before it.
    pub prefixes: Option<T>,
    /// Bounds of each query.
    pub intervals: Option<Intervals<T>>,
}

/// The position of query 0 of a sequence among its keys.
#[derive(Debug, Clone, Default)]
pub enum FirstPosition<T> {
    /// T_kv - T_q of the sequence: the last query is at the last key.
    #[default]
    AtEnd,
    /// One position for all sequences, which may be negative.
    Same(i32),
    /// A position for each sequence.
    Each(T),
}

/// Bounds of each query: (B, T_q), or (total_q,) of packed sequences, counted in the query's own sequence.
#[derive(Debug, Clone)]
pub struct Intervals<T> {
    /// The first key that a query attends to.
    pub starts: T,
    /// The key after the last one.
    pub ends: T,
}

/// The lengths of packed sequences.
#[derive(Debug, Clone)]
pub struct PackedLengths<T> {
    /// (n + 1,): 0, and the end of each sequence's queries.
    pub cu_seqlens_q: T,
    /// (n + 1,): 0, and the end of each sequence's keys.
    pub cu_seqlens_kv: T,
    /// The largest number of queries of a sequence.
    pub longest_queries: usize,
    /// The largest number of keys of a sequence.
    pub longest_keys: usize,
}

impl<T> Default for BoundedKeys<T> {
    /// Returns bounds that allow all keys.
    fn default() -> Self {
        Self {
            packed: None,
            first_position: FirstPosition::AtEnd,
            causal: false,
            left: None,
            right: None,
            chunk: None,
            starts: None,
            lengths: None,
            prefixes: None,
            intervals: None,
        }
    }
}

impl<T> BoundedKeys<T> {
    /// Returns the bounds with the result of `change` in place of each list.
    ///
    /// # Errors
    /// If `change` fails.
    pub fn map<'a, U, E>(&'a self, mut change: impl FnMut(Input, &'a T) -> Result<U, E>) -> Result<BoundedKeys<U>, E> {
        let Self { packed, first_position, causal, left, right, chunk, starts, lengths, prefixes, intervals } = self;
        let packed = match packed {
            Some(PackedLengths { cu_seqlens_q, cu_seqlens_kv, longest_queries, longest_keys }) => Some(PackedLengths {
                cu_seqlens_q: change(Input::CumulativeQueries, cu_seqlens_q)?,
                cu_seqlens_kv: change(Input::CumulativeKeys, cu_seqlens_kv)?,
                longest_queries: *longest_queries,
                longest_keys: *longest_keys,
            }),
            None => None,
        };
        let first_position = match first_position {
            FirstPosition::AtEnd => FirstPosition::AtEnd,
            FirstPosition::Same(position) => FirstPosition::Same(*position),
            FirstPosition::Each(positions) => FirstPosition::Each(change(Input::FirstPositions, positions)?),
        };
        let intervals = match intervals {
            Some(bounds) => Some(Intervals {
                starts: change(Input::IntervalStarts, &bounds.starts)?,
                ends: change(Input::IntervalEnds, &bounds.ends)?,
            }),
            None => None,
        };
        Ok(BoundedKeys {
            packed,
            first_position,
            causal: *causal,
            left: *left,
            right: *right,
            chunk: *chunk,
            starts: map_one(Input::Starts, starts, &mut change)?,
            lengths: map_one(Input::Lengths, lengths, &mut change)?,
            prefixes: map_one(Input::Prefixes, prefixes, &mut change)?,
            intervals,
        })
    }
}
