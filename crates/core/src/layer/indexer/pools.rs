//! The choice of pools of consecutive keys, and of the keys after the last whole pool.

use candle_core::Result;

use super::scores::PRODUCTS;
use super::sequence_keys::SequenceKeys;
use super::top_k::Scores;

/// The pools of the keys of one sequence. Each query attends to the best whole pools among its keys, and to its keys
/// after the last whole pool.
pub(super) struct Pools<'a> {
    /// The number of keys in a pool.
    pub pool: usize,
    /// The number of whole pools that a query attends to.
    pub chosen: usize,
    pub keys: SequenceKeys<'a>,
}

/// Some of the queries of a sequence.
#[derive(Clone, Copy)]
pub(super) struct QueryPart {
    pub start: usize,
    pub count: usize,
}

impl Pools<'_> {
    /// Returns the most keys that a query attends to.
    pub fn entries(&self) -> usize {
        self.chosen * self.pool + self.pool - 1
    }

    /// Returns the keys of each of `t_q` queries, (T_q, entries), with -1 for none. `scores` returns the scores (count,
    /// pools) of some of the queries for the whole pools of the sequence, and computes a product for each of `heads`.
    pub fn choose(&self, t_q: usize, heads: usize, scores: impl Fn(QueryPart) -> Result<Vec<f32>>) -> Result<Vec<i64>> {
        let Self { pool, chosen, keys } = self;
        let pools = keys.count / pool;
        let entries = self.entries();
        let mut all = vec![-1; t_q * entries];
        if pools > 0 {
            let step = (PRODUCTS / (heads * pools)).clamp(1, t_q.max(1));
            for start in (0..t_q).step_by(step) {
                let count = step.min(t_q - start);
                let of_queries = scores(QueryPart { start, count })?;
                let whole_pools = |query: usize| {
                    let visible = keys.visible(query);
                    let before = visible.start.div_ceil(*pool);
                    before..(visible.end / pool).max(before)
                };
                let ranges: Vec<_> = (start..start + count).map(whole_pools).collect();
                let rows = Scores { scores: &of_queries, keys: 0..pools, ranges: &ranges, allowed: None };
                for (row, best) in rows.largest(*chosen).chunks_exact(*chosen).enumerate() {
                    let to = &mut all[(start + row) * entries..][..entries];
                    for (place, &number) in to.chunks_exact_mut(*pool).zip(best) {
                        let Ok(number) = usize::try_from(number) else { continue };
                        for (i, entry) in place.iter_mut().enumerate() {
                            *entry = (keys.first + number * pool + i) as i64;
                        }
                    }
                }
            }
        }
        for (query, to) in all.chunks_exact_mut(entries).enumerate() {
            let visible = keys.visible(query);
            let tail = (visible.end / pool * pool).max(visible.start)..visible.end;
            for (entry, key) in to[chosen * pool..].iter_mut().zip(tail) {
                *entry = (keys.first + key) as i64;
            }
        }
        Ok(all)
    }
}
