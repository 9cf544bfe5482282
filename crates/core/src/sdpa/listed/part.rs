//! Some queries of a call, with copies of the keys that their lists name.

use std::ops::Range;

use candle_attention_call::{AttentionCall, AttentionDims as Dims, KvScales, ScoreModifiers};
use candle_core::{Result, Tensor};

use super::super::call::{Call, MaskedKeys, listed_sequences};
use super::super::options::{Backend, OutputLayout};
use super::rows::{SelectedRows, StoredRow};
use crate::mask::{CallRanges, FullyMaskedRows, ListPlace, ListedKeys, ListedSequence, RowRanges};

/// The number of elements of keys and values that are copied at a time, unless one block of queries has more.
const COPIED_NUMBERS: usize = 1 << 20;

/// Consecutive blocks of queries of one sequence, all of the same size.
pub(super) struct ListedPart {
    sequence: ListedSequence,
    /// The indices of the queries in the batch entry.
    queries: Range<usize>,
    /// The number of queries that share a list.
    query_block: usize,
    pub selected: SelectedRows,
    /// The keys of each query (blocks, queries of a block), counted in its list.
    ranges: Vec<Range<usize>>,
    /// (blocks, heads or 1, queries of a block, n), if ranges do not say which keys a query attends to.
    mask: Option<Vec<u8>>,
}

/// The tensors that a part of a call attends from and to.
pub(super) struct PartTensors {
    /// (blocks, H, queries of a block, D).
    pub q: Tensor,
    /// (blocks, H_kv, n, D).
    pub k: Tensor,
    /// (blocks, H_kv, n, D_v).
    pub v: Tensor,
    pub kv_scales: Option<KvScales<Tensor>>,
    pub sinks: Option<Tensor>,
}

/// Returns the parts of a call with one list of keys, in the order of the queries. A part is made when it is requested,
/// since the rows of all parts may not fit in memory.
pub(super) fn parts_of(call: &Call) -> Result<impl Iterator<Item = Result<ListedPart>>> {
    let Dims { h_kv, d, d_v, .. } = call.attention.dims;
    let listed = &call.attention.keys.lists[0];
    let mut places = Vec::new();
    let mut longest = 0;
    for (index, sequence) in listed_sequences(call.attention.dims, call.sequences())?.into_iter().enumerate() {
        let size = listed.query_block();
        let numbers = listed.most_keys(sequence.t_kv).max(1).saturating_mul(h_kv * (d + d_v));
        let blocks = (COPIED_NUMBERS / numbers).max(1);
        longest = longest.max(sequence.t_kv);
        let mut start = sequence.queries.start;
        while start < sequence.queries.end {
            let left = sequence.queries.end - start;
            // A last block with fewer queries is a separate part.
            let part = if left < size { left } else { size.saturating_mul(blocks).min(left / size * size) };
            places.push(PartPlace { index, sequence: sequence.clone(), queries: start..start + part });
            start += part;
        }
    }
    let mut seen = vec![false; longest];
    Ok(places.into_iter().map(move |place| ListedPart::new(call, listed, place, &mut seen)))
}

/// The queries of a part.
struct PartPlace {
    /// The index of the sequence in the call.
    index: usize,
    sequence: ListedSequence,
    /// The indices of the queries in the batch entry.
    queries: Range<usize>,
}

impl ListedPart {
    /// Selects the rows of some queries. `seen` has an entry for each key, all of them false before and after.
    fn new(call: &Call, listed: &ListedKeys, place: PartPlace, seen: &mut [bool]) -> Result<Self> {
        let PartPlace { index: s, sequence, queries } = place;
        let rows = call.rows()?;
        let first_row = sequence.b * call.attention.dims.t_q;
        let first_key = call.sequences().map_or(0, |packed| packed.keys(s).start);
        let query_block = listed.query_block().min(queries.len());
        let blocks = queries.len() / query_block;
        let heads = listed.heads();
        let of_query = |i: usize| {
            let keys = &rows.keys[first_row + i];
            keys.start - first_key..keys.end - first_key
        };
        let mut lists: Vec<Vec<usize>> = Vec::with_capacity(blocks * heads);
        for block in 0..blocks {
            let own = queries.start + block * query_block..queries.start + (block + 1) * query_block;
            let allowed = union_of(own.map(of_query));
            for head in 0..heads {
                let list = ListPlace { b: sequence.b, head, block: queries.start / listed.query_block() + block };
                let mut keys = Vec::with_capacity(listed.most_keys(sequence.t_kv));
                for key in listed.keys(list, sequence.t_kv).filter(|key| allowed.contains(key)) {
                    if !seen[key] {
                        seen[key] = true;
                        keys.push(key);
                    }
                }
                for &key in &keys {
                    seen[key] = false;
                }
                lists.push(keys);
            }
        }
        let n = lists.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let mut selected = Vec::with_capacity(lists.len() * n);
        for keys in &lists {
            selected.extend(keys.iter().map(|&key| Some(stored_row(call, s, sequence.b, key))));
            selected.resize(selected.len() + n - keys.len(), None);
        }
        let ranges_of_queries: Vec<_> = queries.clone().map(of_query).collect();
        let (ranges, mask) = masked(&lists, heads, n, query_block, &ranges_of_queries, call.attention.dims.h);
        Ok(Self {
            sequence,
            queries,
            query_block,
            selected: SelectedRows { rows: selected, blocks, heads, n },
            ranges,
            mask,
        })
    }

    /// Returns the tensors of the part, without gradients.
    pub fn tensors(&self, call: &Call) -> Result<PartTensors> {
        let AttentionCall { q, k, v, kv_scales, scores, .. } = &call.attention;
        Ok(PartTensors {
            q: self.in_blocks(&q.detach())?,
            k: self.selected.copied(call.op, k)?,
            v: self.selected.copied(call.op, v)?,
            kv_scales: match kv_scales {
                Some(scales) => Some(KvScales {
                    k: self.selected.copied(call.op, &scales.k)?,
                    v: self.selected.copied(call.op, &scales.v)?,
                }),
                None => None,
            },
            sinks: scores.sinks.as_ref().map(Tensor::detach),
        })
    }

    /// Returns the call of the part: a batch of blocks of queries.
    pub fn call(&self, whole: &Call, tensors: &PartTensors) -> Result<Call> {
        let SelectedRows { blocks, n, .. } = self.selected;
        let boolean_mask = match &self.mask {
            Some(mask) => {
                let shape = (blocks, (), self.query_block, n);
                Some(Tensor::from_slice(mask, mask.len(), tensors.q.device())?.reshape(shape)?)
            }
            None => None,
        };
        let ranges = CallRanges::known(RowRanges::of_batch(self.ranges.clone(), self.query_block));
        Ok(Call {
            op: whole.op,
            attention: AttentionCall {
                dims: Dims { b: blocks, t_q: self.query_block, t_kv: n, ..whole.attention.dims },
                q: tensors.q.clone(),
                k: tensors.k.clone(),
                v: tensors.v.clone(),
                kv_scales: tensors.kv_scales.clone(),
                pages: None,
                keys: MaskedKeys { ranges, sequences: None, pages: None, lists: Vec::new() },
                // No modifier of the whole call depends on keys.
                scores: ScoreModifiers { sinks: tensors.sinks.clone(), boolean_mask, ..whole.attention.scores.clone() },
                output_layout: OutputLayout::Bhtd,
            },
            fully_masked_rows: FullyMaskedRows::Zero,
            dropout: None,
            backend: Backend::Auto,
            instruction_set: whole.instruction_set,
            lists_obstacle: None,
        })
    }

    /// Returns the part's rows of a tensor (B, H, T_q, X) as (blocks, H, queries of a block, X).
    pub fn in_blocks(&self, xs: &Tensor) -> Result<Tensor> {
        let rows = xs.narrow(0, self.sequence.b, 1)?.narrow(2, self.queries.start, self.queries.len())?;
        let (_, h, _, width) = rows.dims4()?;
        rows.reshape((h, self.selected.blocks, self.query_block, width))?.transpose(0, 1)
    }

    /// Returns the part's rows (blocks, H, queries of a block, X) as (1, H, queries, X).
    pub fn in_order(&self, blocks: &Tensor) -> Result<Tensor> {
        let (_, h, _, width) = blocks.dims4()?;
        blocks.transpose(0, 1)?.reshape((1, h, self.queries.len(), width))
    }
}

/// Returns the smallest range with all keys of some ranges.
fn union_of(ranges: impl Iterator<Item = Range<usize>>) -> Range<usize> {
    let mut union = 0..0;
    for range in ranges.filter(|range| !range.is_empty()) {
        if union.is_empty() {
            union = range;
        } else {
            union = union.start.min(range.start)..union.end.max(range.end);
        }
    }
    union
}

/// Returns the row at which a key of the sequence with index `s` is stored.
fn stored_row(call: &Call, s: usize, b: usize, key: usize) -> StoredRow {
    let MaskedKeys { sequences, pages, .. } = &call.attention.keys;
    if let Some(pages) = pages {
        let page_size = call.attention.k.dims()[2];
        return StoredRow { entry: pages.pages(s)[key / page_size] as usize, row: key % page_size };
    }
    match sequences {
        Some(packed) => StoredRow { entry: 0, row: packed.keys(s).start + key },
        None => StoredRow { entry: b, row: key },
    }
}

/// Returns the keys of each query (blocks, queries of a block) in its list of at most `n` keys: a range, and a mask
/// (blocks, h or 1, queries of a block, n) if the queries or the heads of a block attend to different keys.
fn masked(
    lists: &[Vec<usize>],
    heads: usize,
    n: usize,
    query_block: usize,
    ranges: &[Range<usize>],
    h: usize,
) -> (Vec<Range<usize>>, Option<Vec<u8>>) {
    let mut counts = Vec::with_capacity(ranges.len());
    let mut is_masked = false;
    for (block, own_ranges) in ranges.chunks(query_block).enumerate() {
        let own = &lists[block * heads..(block + 1) * heads];
        let longest = own.iter().map(Vec::len).max().unwrap_or(0);
        is_masked |= own.iter().any(|keys| keys.len() != longest);
        for range in own_ranges {
            is_masked |= own.iter().flatten().any(|key| !range.contains(key));
            counts.push(0..longest);
        }
    }
    if !is_masked {
        return (counts, None);
    }
    let mask_heads = if heads == 1 { 1 } else { h };
    let mut mask = Vec::with_capacity(lists.len() / heads * mask_heads * query_block * n);
    for (block, own_ranges) in ranges.chunks(query_block).enumerate() {
        for head in 0..mask_heads {
            let keys = &lists[block * heads + head * heads / mask_heads];
            for range in own_ranges {
                mask.extend(keys.iter().map(|key| u8::from(range.contains(key))));
                mask.resize(mask.len() + n - keys.len(), 0);
            }
        }
    }
    (counts, Some(mask))
}
