//! A mask in the form that third-party GPU kernels accept: one local window for all queries.

use std::ops::Range;

use candle_core::Result;

use super::call::{Call, Dims};

/// A mask that is a local window around the diagonal of each sequence. The diagonal ends with the last query and the
/// last key of the sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bands {
    /// The sequences in which a query attends to a key.
    pub spans: Vec<Span>,
    pub window: BandWindow,
}

/// The queries of a sequence from the first to the last that attend to a key, and the keys that they attend to: rows of
/// (B · T_q) and (B · T_kv), or of (total_q) and (total_kv).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    pub queries: Range<usize>,
    pub keys: Range<usize>,
}

/// The keys before and after a query's own that it attends to. Query i of a span of n queries and m keys has the
/// position `i + m - n` among the keys. `left: None, right: Some(0)` is the causal mask.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct BandWindow {
    pub left: Option<usize>,
    pub right: Option<usize>,
}

/// The queries of one sequence, with its keys counted within the sequence.
struct SequenceSpan {
    queries: Range<usize>,
    keys: Range<usize>,
    /// The number of the sequence's first key among all keys.
    first_key: usize,
}

/// A query and the keys that it attends to.
struct QueryRow {
    /// The query's position among the keys of its span.
    position: i64,
    keys: Range<i64>,
    keys_of_span: Range<i64>,
}

impl QueryRow {
    fn new(row: usize, keys: &Range<usize>, span: &SequenceSpan) -> Self {
        Self {
            position: span.keys.end as i64 - (span.queries.end - row) as i64,
            keys: keys.start as i64..keys.end as i64,
            keys_of_span: span.keys.start as i64..span.keys.end as i64,
        }
    }

    /// Returns whether the query attends to the keys of a window around its position.
    fn is_window(&self, left: Option<i64>, right: Option<i64>) -> bool {
        // In a mask of more queries than keys, the first queries have positions before all keys.
        if (left.is_some() || right.is_some()) && self.position < self.keys_of_span.start {
            return false;
        }
        let start = left.map_or(self.keys_of_span.start, |left| self.keys_of_span.start.max(self.position - left));
        let end = right.map_or(self.keys_of_span.end, |right| self.keys_of_span.end.min(self.position + right + 1));
        self.keys == (start..end)
    }
}

impl Bands {
    /// Returns the local window of a call's mask, or `None` if the mask is no such window.
    ///
    /// # Errors
    /// For joined masks by which ALiBi could count from several positions.
    pub fn new(call: &Call) -> Result<Option<Self>> {
        let Some(spans) = sequence_spans(call)? else { return Ok(None) };
        let mut rows = Vec::new();
        for span in &spans {
            rows.extend(span.queries.clone().map(|row| QueryRow::new(row, &call.rows.keys[row], span)));
        }
        let starts_late = rows.iter().filter(|row| row.keys.start > row.keys_of_span.start);
        let left = starts_late.map(|row| row.position - row.keys.start).min();
        let ends_early = rows.iter().filter(|row| row.keys.end < row.keys_of_span.end);
        let right = ends_early.map(|row| row.keys.end - 1 - row.position).min();
        if !rows.iter().all(|row| row.is_window(left, right)) {
            return Ok(None);
        }
        let (Ok(left), Ok(right)) = (left.map(usize::try_from).transpose(), right.map(usize::try_from).transpose())
        else {
            return Ok(None);
        };
        let spans = spans.into_iter().map(|SequenceSpan { queries, keys, first_key }| Span {
            queries,
            keys: first_key + keys.start..first_key + keys.end,
        });
        Ok(Some(Self { spans: spans.collect(), window: BandWindow { left, right } }))
    }

    /// Returns the keys of each sequence that the queries of a batch attend to, if these are the same for all sequences
    /// and every query attends to a key.
    pub fn common_keys(&self, call: &Call) -> Option<Range<usize>> {
        let Dims { b, t_q, t_kv, .. } = call.dims;
        let first = self.spans.first()?.keys.clone();
        let is_alike = |(sequence, span): (usize, &Span)| {
            let start = sequence * t_kv;
            span.queries == (sequence * t_q..(sequence + 1) * t_q)
                && span.keys == (start + first.start..start + first.end)
        };
        (self.spans.len() == b && self.spans.iter().enumerate().all(is_alike)).then_some(first)
    }
}

/// Returns the span of each sequence in which a query attends to a key; `None` if ALiBi counts from other positions
/// than those of the spans.
fn sequence_spans(call: &Call) -> Result<Option<Vec<SequenceSpan>>> {
    let rows = &call.rows.keys;
    let alibi_positions = match &call.options.alibi_slopes {
        Some(_) => Some(call.rows.positions()?),
        None => None,
    };
    let mut spans = Vec::new();
    for (s, sequence) in call.rows.sequences.iter().enumerate() {
        // The ranges of packed sequences count the keys of all sequences.
        let first_key = if call.sequences.is_some() { 0 } else { s * call.dims.t_kv };
        let mut attending = sequence.queries.clone().filter(|&row| !rows[row].is_empty());
        let Some(first) = attending.next() else { continue };
        let last = attending.next_back().unwrap_or(first);
        let position = rows[last].end as i64 - (last + 1 - sequence.queries.start) as i64;
        if alibi_positions.as_ref().is_some_and(|positions| positions[sequence.queries.start] != position) {
            return Ok(None);
        }
        spans.push(SequenceSpan { queries: first..last + 1, keys: rows[first].start..rows[last].end, first_key });
    }
    Ok(Some(spans))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::{AttentionMask, RowRanges, ValidLens};
    use crate::sdpa::call::Qkv;
    use crate::sdpa::options::SdpaOptions;
    use candle_core::{DType, Device, Tensor};

    fn zeros(shape: &[usize]) -> Result<Tensor> {
        Tensor::zeros(shape, DType::F32, &Device::Cpu)
    }

    #[test]
    fn bands_of_a_batch_of_any_size_without_queries_are_empty() -> Result<()> {
        let (q, kv) = (zeros(&[1 << 50, 1, 0, 8])?, zeros(&[1, 1, 1, 8])?);
        let (mask, options) = (AttentionMask::causal(), SdpaOptions::default());
        let ys = crate::sdpa::scaled_dot_product_attention(&q, &kv, &kv, &mask, &options)?;
        assert_eq!(ys.dims(), q.dims());
        let call = Call::with_all_dims("test", Qkv { q: &q, k: &kv, v: &kv }, None, None, &mask, &options)?;
        assert_eq!(call.rows, RowRanges::default());
        assert!(Bands::new(&call)?.expect("a mask without rows").spans.is_empty());
        Ok(())
    }

    /// Compares every mask of ranges, alone and with each other mask.
    #[test]
    fn bands_have_the_ranges_of_keys_that_the_mask_has() -> Result<()> {
        let none = AttentionMask::none;
        let masks = [
            none(),
            AttentionMask::causal(),
            AttentionMask::causal_upper_left(),
            AttentionMask::causal_with_offset(2),
            AttentionMask::causal().with_window(1),
            AttentionMask::causal().with_window(3),
            none().with_window(2),
            none().with_local_window(1, 2),
            none().with_valid_lens(vec![3, 0]),
            none().with_valid_lens(vec![2, 9]),
            none().with_starts(vec![0, 2]),
            none().with_starts(vec![4, 9]),
            none().with_valid_lens(ValidLens::from(vec![vec![1, 4, 4], vec![0, 3, 3]])),
            AttentionMask::causal().with_prefix(vec![2, 0]),
        ];
        let (mut bands, mut others) = (0, 0);
        for mask in masks.iter().flat_map(|a| masks.iter().map(|b| a.and(b))) {
            for (t_q, t_kv) in [(1, 1), (1, 6), (3, 3), (3, 6), (3, 2), (3, 0), (0, 2)] {
                let (q, kv, options) = (zeros(&[2, 1, t_q, 8])?, zeros(&[2, 1, t_kv, 8])?, SdpaOptions::default());
                let Ok(call) = Call::new("test", Qkv { q: &q, k: &kv, v: &kv }, None, &mask, &options) else {
                    continue;
                };
                let Ok(ranges) = mask.resolve(2, t_q, t_kv) else { continue };
                let Some(Bands { spans, window }) = Bands::new(&call)? else {
                    others += 1;
                    continue;
                };
                bands += 1;
                let mut attended = vec![0..0; 2 * t_q];
                for Span { queries, keys } in spans {
                    for (i, row) in queries.clone().enumerate() {
                        let position = (keys.end + i).saturating_sub(queries.len());
                        let start =
                            window.left.map_or(keys.start, |left| keys.start.max(position.saturating_sub(left)));
                        let end = window.right.map_or(keys.end, |right| keys.end.min(position + right + 1));
                        let first = row / t_q * t_kv;
                        attended[row] = start - first..end - first;
                    }
                }
                let expected: Vec<_> = (0..2 * t_q).map(|row| ranges.kv_range(row / t_q, row % t_q)).collect();
                assert_eq!(attended, expected, "{mask:?}, {t_q} queries, {t_kv} keys");
            }
        }
        assert!(bands > 300 && others > 100, "{bands} {others}");
        Ok(())
    }
}
