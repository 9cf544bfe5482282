//! Some queries of a call, with the rows of the keys that their lists name.

use std::ops::Range;

use candle_attention_call::{AttentionCall, AttentionDims as Dims, KvPages, ScoreModifiers};
use candle_core::{Result, Tensor};

use super::super::call::{Call, MaskedKeys, listed_sequences};
use super::super::options::{Backend, OutputLayout};
use super::ListedKernel;
use super::rows::{ListableRows, OneKeyPages, SelectedRows};
use crate::mask::{CallRanges, FullyMaskedRows, ListPlace, ListedKeys, ListedSequence, RowRanges, union_of};
use candle_attention_modules::base::uploaded;

/// The most bytes of the rows and the mask of a part, unless one block of queries has more.
const PART_BYTES: usize = 1 << 22;

/// The most numbers of the gradients of a part's keys and values, unless one block of queries has more.
const PART_GRADIENTS: usize = 1 << 20;

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

/// Returns the parts of a call with one list of keys, in the order of the queries. A part is made when it is requested,
/// since the rows of all parts may not fit in memory.
pub(super) fn parts_of(call: &Call) -> Result<impl Iterator<Item = Result<ListedPart>>> {
    let listed = &call.attention.keys.lists[0];
    let mut places = Vec::new();
    let mut longest = 0;
    for (index, sequence) in listed_sequences(call.attention.dims, call.sequences())?.into_iter().enumerate() {
        let size = listed.query_block();
        let blocks = blocks_of_part(call, listed, sequence.t_kv);
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

/// Returns the number of blocks of queries of a part, for sequences of `t_kv` keys.
fn blocks_of_part(call: &Call, listed: &ListedKeys, t_kv: usize) -> usize {
    let Dims { h, h_kv, d, d_v, .. } = call.attention.dims;
    let keys = listed.most_keys(t_kv).max(1);
    let mask_heads = if listed.heads() == 1 { 1 } else { h };
    let bytes_of_key =
        (listed.heads() * size_of::<u32>()).saturating_add(listed.query_block().saturating_mul(mask_heads));
    let mut blocks = PART_BYTES / keys.saturating_mul(bytes_of_key);
    if call.tracks_gradients() {
        blocks = blocks.min(PART_GRADIENTS / keys.saturating_mul(h_kv * (d + d_v)));
    }
    blocks.max(1)
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
        let ranges_of_call = call.rows()?;
        let first_row = sequence.b * call.attention.dims.t_q;
        let first_key = call.sequences().map_or(0, |packed| packed.keys(s).start);
        let query_block = listed.query_block().min(queries.len());
        let blocks = queries.len() / query_block;
        let heads = listed.heads();
        let of_query = |i: usize| {
            let keys = &ranges_of_call.keys[first_row + i];
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
        let mut rows = Vec::with_capacity(lists.len() * n);
        for of_block in lists.chunks(heads) {
            let filler = of_block.iter().flatten().next().map_or(0, |&key| stored_row(call, s, key));
            for keys in of_block {
                rows.extend(keys.iter().map(|&key| stored_row(call, s, key)));
                rows.resize(rows.len() + n - keys.len(), filler);
            }
        }
        let ranges_of_queries: Vec<_> = queries.clone().map(of_query).collect();
        let (ranges, mask) = masked(&lists, heads, n, query_block, &ranges_of_queries, call.attention.dims.h);
        let lens = lists.iter().map(Vec::len).collect();
        let selected = SelectedRows { rows, lens, blocks, heads, n };
        Ok(Self { sequence, queries, query_block, selected, ranges, mask })
    }

    /// Returns the entry of [`ListableRows`] that has the rows.
    pub fn entry(&self) -> usize {
        // Packed sequences are one entry.
        self.sequence.b
    }

    /// Returns the call of the part, without gradients: a batch of blocks of queries, whose keys are in pages of one.
    pub fn call(&self, whole: &Call, stored: &ListableRows, kernel: ListedKernel) -> Result<Call> {
        let SelectedRows { rows, blocks, heads, n, .. } = &self.selected;
        let AttentionCall { dims, q, scores, .. } = &whole.attention;
        let own_q = self.in_blocks(&q.detach())?;
        let boolean_mask = match &self.mask {
            Some(mask) => {
                let shape = (*blocks, (), self.query_block, *n);
                Some(Tensor::from_slice(mask, mask.len(), q.device())?.reshape(shape)?)
            }
            None => None,
        };
        let ranges = CallRanges::known(RowRanges::of_batch(self.ranges.clone(), self.query_block));
        let OneKeyPages { k, v, kv_scales } = stored.pages(self.entry())?;
        let table = match kernel {
            ListedKernel::Cpu(_) => Tensor::from_slice(rows, (*blocks, *heads, 1, *n), q.device())?,
            // All heads share a list.
            ListedKernel::Cuda | ListedKernel::Metal => {
                uploaded(rows.iter().map(|&row| row as i32).collect(), &[*blocks, *n], q.device())?
            }
        };
        Ok(Call {
            op: whole.op,
            attention: AttentionCall {
                dims: Dims { b: *blocks, t_q: self.query_block, t_kv: *n, ..*dims },
                q: own_q,
                k,
                v,
                kv_scales,
                pages: Some(KvPages { table, page_size: 1 }),
                keys: MaskedKeys { ranges, sequences: None, pages: None, lists: Vec::new() },
                // No modifier of the whole call depends on keys.
                scores: ScoreModifiers {
                    scale: scores.scale,
                    softcap: scores.softcap,
                    alibi_slopes: None,
                    relative_bias: None,
                    bias: None,
                    boolean_mask,
                    sinks: scores.sinks.as_ref().map(Tensor::detach),
                    dropout: None,
                },
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

/// Returns the row at which a key of the sequence with index `s` is stored. Rows are few enough for a u32, by the
/// choice of the path.
fn stored_row(call: &Call, s: usize, key: usize) -> u32 {
    let MaskedKeys { sequences, pages, .. } = &call.attention.keys;
    if let Some(pages) = pages {
        let page_size = call.attention.k.dims()[2];
        return pages.pages(s)[key / page_size] * page_size as u32 + (key % page_size) as u32;
    }
    let first = sequences.as_ref().map_or(0, |packed| packed.keys(s).start);
    (first + key) as u32
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
