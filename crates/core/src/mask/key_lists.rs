//! Lists of the keys that queries attend to, as a model chooses them.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::tensors::{all_of, check_memory};
use super::{AttentionMask, OP};
use candle_attention_kernels::{WorkSize, Workers, for_each_chunk};
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::base::{self, Dim, Expect, copied_to, number};

/// The keys that each query may attend to, as lists of their numbers: a model's own choice, such as the best keys by
/// the scores of an indexer. [`AttentionMask::with_key_lists`] adds them to a mask.
///
/// ```
/// use candle_attention::{AttentionMask, KeyLists, SdpaOptions, scaled_dot_product_attention};
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let q = Tensor::randn(0f32, 1., (1, 4, 3, 64), &Device::Cpu)?;
/// let kv = Tensor::randn(0f32, 1., (1, 2, 3, 64), &Device::Cpu)?;
/// // Three queries; the last one attends to the keys 0 and 2, by the lists and by the causal mask.
/// let lists = KeyLists::new(&Tensor::new(&[[0i64, -1], [0, 1], [2, 0]], &Device::Cpu)?)?;
/// let mask = AttentionMask::causal().with_key_lists(&lists);
/// let y = scaled_dot_product_attention(&q, &kv, &kv, &mask, &SdpaOptions::default())?;
/// assert_eq!(y.dims(), [1, 4, 3, 64]);
/// # Ok(()) }
/// ```
#[doc(alias("topk_indices", "sparse_attention", "block_sparse"))]
#[derive(Debug, Clone)]
pub struct KeyLists {
    pub(super) entries: Tensor,
    pub(super) key_block: usize,
    query_block: usize,
}

impl KeyLists {
    /// Makes lists of integers (B or 1, H_kv or 1, T_q, n): up to n numbers of keys for each query of each key head. An
    /// entry of -1 is no key, and a key that is listed twice counts once. The first dimensions may be missing:
    /// (T_q, n) is one list for each query, for all heads and sequences.
    ///
    /// # Errors
    /// For a dtype of floats, and for another number of dimensions.
    pub fn new(entries: &Tensor) -> Result<Self> {
        let found = Expect::many(OP, "key lists", entries);
        let all = ["B", "H_kv", "T_q", "n"].map(Dim::Any);
        let found = found.shape_of(&[&all, &all[1..], &all[2..]])?;
        found.dtype_of(&[DType::U8, DType::U32, DType::I16, DType::I32, DType::I64], "")?;
        let mut whole = entries.detach();
        for _ in whole.rank()..4 {
            whole = whole.unsqueeze(0)?;
        }
        Ok(Self { entries: whole, key_block: 1, query_block: 1 })
    }

    /// Lists blocks of `size` keys: entry n names the keys from `n · size` to `(n + 1) · size - 1`. The last block
    /// may be shorter.
    ///
    /// # Errors
    /// For a size of 0, or above `u32::MAX`.
    pub fn with_key_blocks(self, size: usize) -> Result<Self> {
        number::size(OP, "the block of keys", size)?;
        Ok(Self { key_block: size, ..self })
    }

    /// Sets the number of queries that share a list: list n is that of the queries from `n · size` to `(n + 1) · size -
    /// 1` of the call. The lists are then (.., blocks of queries, n), and the last block may be shorter. Packed
    /// sequences have a list for each query.
    ///
    /// # Errors
    /// For a size of 0, or above `u32::MAX`.
    pub fn with_query_blocks(self, size: usize) -> Result<Self> {
        number::size(OP, "the block of queries", size)?;
        Ok(Self { query_block: size, ..self })
    }

    /// Returns the most keys of a list.
    pub(crate) fn most_entries(&self) -> usize {
        self.entries.dims()[3].saturating_mul(self.key_block)
    }

    /// Returns the lists of some of `h` query heads, which share key heads.
    ///
    /// # Errors
    /// For heads that do not share key heads evenly.
    pub(super) fn of_heads(&self, heads: &Range<usize>, h: usize) -> Result<Self> {
        let list_heads = self.entries.dim(1)?;
        if list_heads <= 1 || !h.is_multiple_of(list_heads) {
            // Lists of another number of heads are an error where the mask is used.
            return Ok(self.clone());
        }
        let group = h / list_heads;
        let own = heads.start / group..heads.end.div_ceil(group);
        if own.len() > 1 && (!heads.start.is_multiple_of(group) || !heads.end.is_multiple_of(group)) {
            bail!("[{OP}] key lists are for groups of {group} heads, expected whole groups, found heads {heads:?}")
        }
        Ok(Self { entries: self.entries.narrow(1, own.start, own.len())?, ..self.clone() })
    }
}

/// The queries of one sequence of a call, and the number of its keys.
#[derive(Debug, Clone)]
pub(crate) struct ListedSequence {
    /// The index of the entry of the batch that contains the queries.
    pub b: usize,
    /// The range of the queries in that entry.
    pub queries: Range<usize>,
    /// The number of keys of the sequence.
    pub t_kv: usize,
}

/// Lists that fit a call, on the CPU.
#[derive(Debug, Clone)]
pub(crate) struct ListedKeys {
    /// (B or 1, heads, blocks of queries, n).
    entries: Arc<Vec<i64>>,
    b: usize,
    heads: usize,
    blocks: usize,
    n: usize,
    key_block: usize,
    query_block: usize,
}

/// The place of a list: a sequence of the batch, a head that has lists, and a block of queries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ListPlace {
    pub b: usize,
    pub head: usize,
    pub block: usize,
}

impl ListedKeys {
    /// Returns the number of heads that have different lists; 1 if all share them.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Returns the number of queries that share a list.
    pub fn query_block(&self) -> usize {
        self.query_block
    }

    /// Returns the largest number of keys of a list among `t_kv` keys.
    pub fn most_keys(&self, t_kv: usize) -> usize {
        self.n.saturating_mul(self.key_block).min(t_kv)
    }

    /// Returns the entries of a list.
    fn list(&self, place: ListPlace) -> &[i64] {
        let b = if self.b == 1 { 0 } else { place.b };
        let head = if self.heads == 1 { 0 } else { place.head };
        &self.entries[((b * self.heads + head) * self.blocks + place.block) * self.n..][..self.n]
    }

    /// Returns the keys of a list among `t_kv` keys in the order of its entries, some of them perhaps twice.
    pub fn keys(&self, place: ListPlace, t_kv: usize) -> impl Iterator<Item = usize> {
        let size = self.key_block;
        let listed = self.list(place).iter().filter_map(|&entry| usize::try_from(entry).ok());
        listed.flat_map(move |block| block * size..t_kv.min((block + 1).saturating_mul(size)))
    }

    /// Returns the lists of some of the queries of a batch of one, each of which has a list.
    pub fn of_queries(&self, queries: &Range<usize>) -> Self {
        if self.query_block != 1 {
            // Only a single sequence has lists for blocks of queries.
            return self.clone();
        }
        let mut entries = Vec::with_capacity(self.heads * queries.len() * self.n);
        for head in 0..self.heads {
            for block in queries.clone() {
                entries.extend_from_slice(self.list(ListPlace { b: 0, head, block }));
            }
        }
        Self { entries: entries.into(), blocks: queries.len(), ..self.clone() }
    }

    /// Returns the lists as a boolean mask (B or 1, H or 1, T_q, T_kv), in which 1 allows to attend.
    ///
    /// # Errors
    /// If it does not fit in memory.
    pub fn to_bool_mask(&self, h: usize, t_q: usize, t_kv: usize, device: &Device) -> Result<Tensor> {
        let heads = if self.heads == 1 { 1 } else { h };
        let dims = [self.b, heads, t_q, t_kv];
        check_memory(&dims, DType::U8)?;
        let mut allowed = vec![0u8; dims.iter().product()];
        let workers = Workers::for_call(WorkSize { multiply_adds: 0, bytes: allowed.len() });
        for_each_chunk(&mut allowed, t_kv.max(1), workers, &|index, row| {
            let head = index / t_q % heads * self.heads / heads;
            let place = ListPlace { b: index / t_q / heads, head, block: index % t_q / self.query_block };
            for key in self.keys(place, t_kv) {
                row[key] = 1;
            }
        });
        copied_to(device, allowed, (self.b, heads, t_q, t_kv))
    }
}

impl AttentionMask {
    /// Masks the keys that the [lists](KeyLists) do not name. Lists count keys from the first key of a call's tensor; in
    /// a layer with a cache, from the first position of each sequence, and in packed sequences from each sequence's
    /// first key. Lists of several masks that are joined mask what any of them does not name.
    ///
    /// On a CPU, a call without bias, boolean mask and dropout reads the listed keys alone, where they are stored, and
    /// takes the time and memory of these; on GPUs a call does that has few queries, lists that all heads share, and no
    /// gradients. Where reading all keys is estimated to be faster, and in other calls, the lists become a boolean
    /// mask. [`plan`](crate::plan) says which.
    ///
    /// Errors where the mask is used: another number of sequences, heads or queries, and a key that is not there.
    #[must_use]
    pub fn with_key_lists(mut self, lists: &KeyLists) -> Self {
        self.key_lists.push(lists.clone());
        self
    }

    /// Returns whether the mask has lists of keys.
    pub(crate) fn has_key_lists(&self) -> bool {
        !self.key_lists.is_empty()
    }

    /// Returns the mask without lists of keys that differ from head to head.
    pub(super) fn without_lists_by_head(mut self) -> Self {
        self.key_lists.retain(|lists| lists.entries.dims()[1] == 1);
        self
    }

    /// Returns the lists of a call with `h` heads that may have lists, for a batch of `b` entries of `t_q` queries.
    /// `sequences` are all of its sequences, which are the entries of the batch, or packed in one entry.
    pub(crate) fn listed_keys(
        &self,
        b: usize,
        h: usize,
        t_q: usize,
        sequences: &[ListedSequence],
    ) -> Result<Vec<ListedKeys>> {
        let is_packed = b == 1 && !matches!(sequences, [only] if only.queries == (0..t_q));
        let mut all = Vec::with_capacity(self.key_lists.len());
        for KeyLists { entries, key_block, query_block } in &self.key_lists {
            let (list_b, heads, blocks, n) = entries.dims4()?;
            if is_packed && *query_block != 1 {
                bail!(
                    "[{OP}] key lists are for blocks of {query_block} queries, expected packed sequences with one each"
                )
            }
            let expected = t_q.div_ceil(*query_block);
            if (list_b != 1 && list_b != b) || blocks != expected {
                bail!(
                    "[{OP}] key lists have shape {:?}, expected {b} or 1 sequences and {expected} blocks of queries",
                    entries.dims()
                )
            }
            if heads == 0 || !h.is_multiple_of(heads) {
                bail!("[{OP}] key lists have {heads} heads, expected 1 or one for each of {h} key heads")
            }
            check_memory(entries.dims(), DType::I64)?;
            let listed = ListedKeys {
                entries: to_vec::<i64>(entries)?.into(),
                b: list_b,
                heads,
                blocks,
                n,
                key_block: *key_block,
                query_block: *query_block,
            };
            // Lists that the entries of a batch share are checked once.
            let checked = if is_packed { sequences.len() } else { list_b };
            for sequence in sequences.iter().take(checked) {
                listed.check(sequence)?;
            }
            all.push(listed);
        }
        Ok(all)
    }

    /// Returns a boolean mask, if there is one, that also masks the keys that the lists do not name. It broadcasts to
    /// (B, H, T_q, T_kv).
    pub(super) fn with_own_key_lists(
        &self,
        bool_mask: Option<Tensor>,
        dims: [usize; 4],
        device: &Device,
    ) -> Result<Option<Tensor>> {
        if !self.has_key_lists() {
            return Ok(bool_mask);
        }
        let [b, h, t_q, t_kv] = dims;
        with_listed_keys(bool_mask, &self.listed_keys(b, h, t_q, &sequences_of_batch(b, t_q, t_kv)?)?, dims, device)
    }
}

/// Returns the sequences of a batch. A batch without queries may have any size.
pub(crate) fn sequences_of_batch(b: usize, t_q: usize, t_kv: usize) -> Result<Vec<ListedSequence>> {
    base::check_memory(OP, format_args!("a list of {b} sequences"), &[b, size_of::<ListedSequence>()])?;
    Ok((0..b).map(|sequence| ListedSequence { b: sequence, queries: 0..t_q, t_kv }).collect())
}

/// Returns a boolean mask, if there is one, that also masks the keys that some of the lists do not name.
pub(crate) fn with_listed_keys(
    bool_mask: Option<Tensor>,
    lists: &[ListedKeys],
    dims: [usize; 4],
    device: &Device,
) -> Result<Option<Tensor>> {
    let [_, h, t_q, t_kv] = dims;
    let mut combined = bool_mask;
    for listed in lists {
        let mask = listed.to_bool_mask(h, t_q, t_kv, device)?;
        combined = Some(match combined {
            Some(combined) => all_of(&combined, &mask)?,
            None => mask,
        });
    }
    Ok(combined)
}

impl ListedKeys {
    /// Checks that the lists of a sequence name keys of the sequence.
    fn check(&self, sequence: &ListedSequence) -> Result<()> {
        let count = sequence.t_kv.div_ceil(self.key_block) as i64;
        let blocks = sequence.queries.start / self.query_block..sequence.queries.end.div_ceil(self.query_block);
        for head in 0..self.heads {
            for block in blocks.clone() {
                let list = self.list(ListPlace { b: sequence.b, head, block });
                let is_wrong = |entry: &&i64| !(-1..count).contains(*entry);
                // Unlike a search, a count is a pass that does not end early, which the compiler turns into vectors.
                if list.iter().filter(is_wrong).count() == 0 {
                    continue;
                }
                if let Some(entry) = list.iter().find(is_wrong) {
                    let named = if self.key_block == 1 { "key" } else { "block of keys" };
                    bail!(
                        "[{OP}] list {block} of head {head} of sequence {} has {named} {entry}, expected -1 (none) to \
                         {}",
                        sequence.b,
                        count - 1
                    )
                }
            }
        }
        Ok(())
    }
}
