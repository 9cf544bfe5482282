//! The sizes of a call, and the checks that its tensors fit together.

use candle_core::{DType, Tensor};

use super::call::{AttentionCall, DropoutSeed, FirstPosition, Intervals, KeyRanges, KvScales, PackedSequences};
use crate::element::Element;
use crate::unsupported::Unsupported;

/// The largest head dimension of the kernels.
const MAX_HEAD_DIM: usize = 256;

/// The largest number of queries or keys, and the largest position of query 0: sums of three of them are an i32.
const MAX_POSITION: usize = 1 << 29;

/// The sizes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub element: Element,
    /// The batch size of the tensors: 1 for packed sequences.
    pub batch: usize,
    /// The sequences: the batch size, or the number of packed sequences.
    pub sequences: usize,
    pub heads: usize,
    pub key_heads: usize,
    /// T_q, or the queries of all packed sequences.
    pub queries: usize,
    /// T_kv, or the keys of all packed sequences.
    pub keys: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    /// T_q, or the most queries of a packed sequence.
    pub longest_queries: usize,
    /// T_kv, or the most keys of a packed sequence.
    pub longest_keys: usize,
}

impl Sizes {
    /// Returns the query heads that share a key head.
    pub fn group(&self) -> usize {
        self.heads / self.key_heads
    }

    /// Returns the number of rows of (B, H, T_q).
    pub fn rows(&self) -> usize {
        self.batch * self.heads * self.queries
    }

    /// Returns the entries of a relative bias for each head.
    pub fn distances(&self) -> usize {
        self.longest_queries + self.longest_keys - 1
    }
}

/// Checks a condition, and returns a reason if it is false.
fn expect(is_met: bool, reason: impl FnOnce() -> String) -> Result<(), Unsupported> {
    if is_met { Ok(()) } else { Err(Unsupported::new(reason())) }
}

/// Returns the four sizes of a tensor.
fn four_dims(name: &str, tensor: &Tensor) -> Result<[usize; 4], Unsupported> {
    let dims = tensor.dims();
    dims.try_into().map_err(|_| Unsupported::new(format!("{name} has shape {dims:?}, expected four dimensions")))
}

impl AttentionCall {
    /// Returns the sizes of the call after checking that all tensors fit them.
    pub(super) fn sizes(&self) -> Result<Sizes, Unsupported> {
        let sizes = self.sizes_of_tensors()?;
        let Sizes { batch, heads, key_heads, queries, keys, head_dim, value_dim, .. } = sizes;
        expect(![batch, heads, key_heads, queries, keys, head_dim, value_dim].contains(&0), || {
            format!("the call is empty: q {:?}, k {:?}, v {:?}", self.q.dims(), self.k.dims(), self.v.dims())
        })?;
        expect(head_dim <= MAX_HEAD_DIM && value_dim <= MAX_HEAD_DIM, || {
            format!("the head dimensions are {head_dim} and {value_dim}, expected at most {MAX_HEAD_DIM}")
        })?;
        expect(heads.is_multiple_of(key_heads), || {
            format!("k has {key_heads} heads, which does not divide the {heads} of q")
        })?;
        expect([queries, keys, sizes.sequences].iter().all(|&count| count <= MAX_POSITION), || {
            format!("the call has {queries} queries and {keys} keys, expected at most {MAX_POSITION}")
        })?;
        self.check_rows(&sizes)?;
        self.keys.check(&sizes)?;
        self.check_scores(&sizes)?;
        Ok(sizes)
    }

    /// Returns the sizes of q, k and v after checking that they agree.
    fn sizes_of_tensors(&self) -> Result<Sizes, Unsupported> {
        let element = Element::of(self.q.dtype())
            .map_err(|_| Unsupported::new(format!("q is {:?}, expected f16, bf16 or f32", self.q.dtype())))?;
        let [batch, heads, queries, head_dim] = four_dims("q", &self.q)?;
        let [_, key_heads, keys, _] = four_dims("k", &self.k)?;
        let [_, _, _, value_dim] = four_dims("v", &self.v)?;
        expect(self.k.dims() == [batch, key_heads, keys, head_dim], || {
            format!("k has shape {:?}, expected {:?}", self.k.dims(), [batch, key_heads, keys, head_dim])
        })?;
        expect(self.v.dims() == [batch, key_heads, keys, value_dim], || {
            format!("v has shape {:?}, expected {:?}", self.v.dims(), [batch, key_heads, keys, value_dim])
        })?;
        let mut sizes = Sizes {
            element,
            batch,
            sequences: batch,
            heads,
            key_heads,
            queries,
            keys,
            head_dim,
            value_dim,
            longest_queries: queries,
            longest_keys: keys,
        };
        if let Some(PackedSequences { cu_seqlens_q, cu_seqlens_kv, longest_queries, longest_keys }) = &self.packed {
            expect(batch == 1, || format!("q has a batch of {batch}, expected 1 for packed sequences"))?;
            let entries = cu_seqlens_q.elem_count();
            expect(entries >= 2, || format!("cu_seqlens_q has {entries} entries, expected at least 2"))?;
            check_vector("cu_seqlens_q", cu_seqlens_q, DType::I32, entries)?;
            check_vector("cu_seqlens_kv", cu_seqlens_kv, DType::I32, entries)?;
            expect((1..=queries).contains(longest_queries), || {
                format!("the longest sequence has {longest_queries} of {queries} queries")
            })?;
            expect((1..=keys).contains(longest_keys), || {
                format!("the longest sequence has {longest_keys} of {keys} keys")
            })?;
            sizes.sequences = entries - 1;
            sizes.longest_queries = *longest_queries;
            sizes.longest_keys = *longest_keys;
        }
        Ok(sizes)
    }

    /// Checks the dtypes and the layouts of q, k and v, and the scales of codes.
    fn check_rows(&self, sizes: &Sizes) -> Result<(), Unsupported> {
        let dtype = if self.kv_scales.is_some() { DType::U8 } else { self.q.dtype() };
        for (name, tensor, expected) in [("q", &self.q, self.q.dtype()), ("k", &self.k, dtype), ("v", &self.v, dtype)] {
            expect(tensor.dtype() == expected, || format!("{name} is {:?}, expected {expected:?}", tensor.dtype()))?;
            expect(tensor.dims()[3] == 1 || tensor.stride()[3] == 1, || {
                format!("the last dimension of {name} is not contiguous")
            })?;
        }
        let Some(KvScales { k, v }) = &self.kv_scales else { return Ok(()) };
        for (name, tensor) in [("the scales of k", k), ("the scales of v", v)] {
            let expected = [sizes.batch, sizes.key_heads, sizes.keys, 1];
            expect(tensor.dtype() == DType::F32, || format!("{name} are {:?}, expected f32", tensor.dtype()))?;
            expect(tensor.dims() == expected, || {
                format!("{name} have shape {:?}, expected {expected:?}", tensor.dims())
            })?;
        }
        Ok(())
    }

    /// Checks the score modifiers.
    fn check_scores(&self, sizes: &Sizes) -> Result<(), Unsupported> {
        let scores = &self.scores;
        expect((scores.scale as f32).is_finite(), || {
            format!("the scale is {}, expected a finite number", scores.scale)
        })?;
        if let Some(softcap) = scores.softcap {
            let is_normal = (softcap as f32).is_normal() && softcap > 0.0;
            expect(is_normal, || format!("the softcap is {softcap}, expected a finite number above 0"))?;
        }
        for (name, tensor) in [("alibi_slopes", &scores.alibi_slopes), ("sinks", &scores.sinks)] {
            if let Some(tensor) = tensor {
                check_vector(name, tensor, DType::F32, sizes.heads)?;
            }
        }
        if let Some(biases) = &scores.relative_bias {
            let (dims, entries) = (biases.dims(), sizes.distances());
            let fits = [1, sizes.batch].iter().any(|&batch| dims == [batch, sizes.heads, entries]);
            expect(fits, || {
                format!(
                    "the relative bias has shape {dims:?}, expected ({} or 1, {}, {entries})",
                    sizes.batch, sizes.heads
                )
            })?;
            let is_f32 = biases.dtype() == DType::F32;
            expect(is_f32, || format!("the relative bias is {:?}, expected f32", biases.dtype()))?;
            expect(entries == 1 || biases.stride()[2] == 1, || {
                "the last dimension of the relative bias is not contiguous".into()
            })?;
        }
        if let Some(bias) = &scores.bias {
            let fits = [DType::F32, self.q.dtype()].contains(&bias.dtype());
            expect(fits, || format!("the bias is {:?}, expected f32 or {:?}", bias.dtype(), self.q.dtype()))?;
            self.check_broadcast("the bias", bias, sizes)?;
        }
        if let Some(mask) = &scores.boolean_mask {
            expect(mask.dtype() == DType::U8, || format!("the boolean mask is {:?}, expected u8", mask.dtype()))?;
            self.check_broadcast("the boolean mask", mask, sizes)?;
        }
        if let Some(dropout) = &scores.dropout {
            let p = dropout.p;
            expect((0.0..=1.0).contains(&p), || format!("the dropout probability is {p}, expected 0 to 1"))?;
            if let DropoutSeed::OnDevice(seed) = &dropout.seed {
                check_vector("the seed of dropout", seed, DType::U32, 2)?;
            }
        }
        Ok(())
    }

    /// Checks a tensor that is broadcast to the scores (B, H, T_q, T_kv).
    fn check_broadcast(&self, name: &str, tensor: &Tensor, sizes: &Sizes) -> Result<(), Unsupported> {
        expect(self.packed.is_none(), || format!("{name} is (B, H, T_q, T_kv), which packed sequences do not have"))?;
        let found = four_dims(name, tensor)?;
        let expected = [sizes.batch, sizes.heads, sizes.queries, sizes.keys];
        let fits = found.iter().zip(expected).all(|(&size, whole)| size == 1 || size == whole);
        expect(fits, || format!("{name} has shape {found:?}, expected sizes of 1 or of {expected:?}"))
    }
}

impl KeyRanges {
    /// Checks the tensors and the position.
    fn check(&self, sizes: &Sizes) -> Result<(), Unsupported> {
        match &self.first_position {
            FirstPosition::AtEnd => {}
            FirstPosition::Same(position) => expect(position.unsigned_abs() as usize <= MAX_POSITION, || {
                format!("the position of query 0 is {position}, expected at most {MAX_POSITION} from 0")
            })?,
            FirstPosition::Each(positions) => {
                check_vector("the positions of query 0", positions, DType::I32, sizes.sequences)?;
            }
        }
        expect(self.chunk != Some(0), || "the chunk has 0 positions, expected at least 1".into())?;
        for (name, tensor) in [("starts", &self.starts), ("lengths", &self.lengths), ("prefixes", &self.prefixes)] {
            if let Some(tensor) = tensor {
                check_vector(name, tensor, DType::I32, sizes.sequences)?;
            }
        }
        if let Some(Intervals { starts, ends }) = &self.intervals {
            let rows = sizes.batch * sizes.queries;
            check_vector("the starts of intervals", starts, DType::I32, rows)?;
            check_vector("the ends of intervals", ends, DType::I32, rows)?;
        }
        Ok(())
    }
}

/// Checks a contiguous tensor of some entries.
fn check_vector(name: &str, tensor: &Tensor, dtype: DType, entries: usize) -> Result<(), Unsupported> {
    expect(tensor.elem_count() == entries, || {
        format!("{name} has shape {:?}, expected {entries} entries", tensor.dims())
    })?;
    expect(tensor.dtype() == dtype, || format!("{name} is {:?}, expected {dtype:?}", tensor.dtype()))?;
    expect(tensor.is_contiguous(), || format!("{name} is not contiguous"))
}

/// Returns a bound of distances for the kernels: -1 for one that masks nothing.
pub(super) fn distance_bound(bound: Option<usize>) -> i32 {
    match bound {
        Some(distance) if distance <= 2 * MAX_POSITION => distance as i32,
        _ => -1,
    }
}
