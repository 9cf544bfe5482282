//! The sizes of a call, and the checks that its tensors fit together.

use candle_attention_call::{
    AttentionDims, BoundedKeys, Dropout, DropoutMask, FirstPosition, Input, Intervals, KvPages, KvScales,
    PackedLengths, ScoreFormat,
};
use candle_core::{DType, Tensor};

use super::call::CudaCall;
use crate::element::ElementType;
use crate::unsupported::Unsupported;

/// The largest head dimension of the kernels.
const MAX_HEAD_DIM: usize = 256;

/// The largest number of queries or keys, and the largest position of query 0: sums of three of them are an i32.
const MAX_POSITION: usize = 1 << 29;

/// The sizes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallSizes {
    pub(super) element: ElementType,
    /// The batch size of the tensors: 1 for packed sequences.
    pub batch: usize,
    /// The number of sequences: the batch size, or the number of packed sequences.
    pub sequences: usize,
    /// H, the number of query heads.
    pub heads: usize,
    /// H_kv, the number of heads of keys and values.
    pub key_heads: usize,
    /// T_q, or the number of queries of all packed sequences.
    pub queries: usize,
    /// T_kv, or the number of keys of all packed sequences.
    pub keys: usize,
    /// D, the width of a query and of a key.
    pub head_dim: usize,
    /// D_v, the width of a value.
    pub value_dim: usize,
    /// T_q, or the most queries of a packed sequence.
    pub longest_queries: usize,
    /// T_kv, or the most keys of a packed sequence.
    pub longest_keys: usize,
}

impl CallSizes {
    /// Returns the query heads that share a key head.
    pub fn group(&self) -> usize {
        self.heads / self.key_heads
    }

    /// Returns B·H·T_q, the number of rows of the output: `AttentionDims::queries`, not its `rows`.
    pub fn rows(&self) -> usize {
        self.batch * self.heads * self.queries
    }

    /// Returns the number of entries of a relative bias for each head.
    pub fn distances(&self) -> usize {
        self.longest_queries + self.longest_keys - 1
    }

    /// Returns the number of pairs of a sequence and a key head.
    pub fn pairs(&self) -> usize {
        self.sequences * self.key_heads
    }

    /// Returns the numbers of a pair that are summed to the gradient of a relative bias, for some blocks of keys of the
    /// longest sequence.
    pub fn relative_bias_parts(&self, key_blocks: usize) -> usize {
        self.group() * key_blocks * self.distances()
    }

    /// Returns the number of pairs that one launch of the kernel of the gradients of keys works on for the gradient of
    /// a relative bias, of which each block has a sum for each distance: if the sums of all pairs would take more than
    /// `most_bytes`, several launches use the same memory, one after the other.
    pub fn pairs_of_launch(&self, key_blocks: usize, most_bytes: usize) -> usize {
        let most = (most_bytes / (self.relative_bias_parts(key_blocks) * size_of::<f32>())).max(1);
        self.pairs().div_ceil(self.pairs().div_ceil(most))
    }
}

/// Checks a condition, and returns a reason if it is false.
fn expect(is_met: bool, reason: impl FnOnce() -> String) -> Result<(), Unsupported> {
    if is_met { Ok(()) } else { Err(Unsupported::new(reason())) }
}

impl CallSizes {
    /// Returns the sizes of a call after checking that all tensors fit them.
    pub(super) fn of(call: &CudaCall) -> Result<Self, Unsupported> {
        let element = ElementType::of(call.q.dtype())
            .map_err(|_| Unsupported::new(format!("q is {:?}, expected f16, bf16 or f32", call.q.dtype())))?;
        let AttentionDims { b, h, h_kv, t_q, t_kv, d, d_v } = call.dims;
        check_shape("q", &call.q, [b, h, t_q, d])?;
        let KeyRowDims { count: batches, rows } = KeyRowDims::of(call)?;
        check_shape("k", &call.k, [batches, h_kv, rows, stored_width(call, d)?])?;
        check_shape("v", &call.v, [batches, h_kv, rows, stored_width(call, d_v)?])?;
        let mut sizes = Self {
            element,
            batch: b,
            sequences: b,
            heads: h,
            key_heads: h_kv,
            queries: t_q,
            keys: t_kv,
            head_dim: d,
            value_dim: d_v,
            longest_queries: t_q,
            longest_keys: t_kv,
        };
        if let Some(packed) = &call.keys.packed {
            sizes.set_packed(packed)?;
        }
        expect(![b, h, h_kv, t_q, t_kv, d, d_v].contains(&0), || {
            format!("the call is empty: q {:?}, k {:?}, v {:?}", call.q.dims(), call.k.dims(), call.v.dims())
        })?;
        expect(d <= MAX_HEAD_DIM && d_v <= MAX_HEAD_DIM, || {
            format!("the head dimensions are {d} and {d_v}, expected at most {MAX_HEAD_DIM}")
        })?;
        expect(h.is_multiple_of(h_kv), || format!("k has {h_kv} heads, which does not divide the {h} of q"))?;
        expect([t_q, t_kv, sizes.sequences].iter().all(|&count| count <= MAX_POSITION), || {
            format!("the call has {t_q} queries and {t_kv} keys, expected at most {MAX_POSITION}")
        })?;
        check_rows(call)?;
        check_pages(call, &sizes)?;
        check_keys(&call.keys, &sizes)?;
        check_scores(call, &sizes)?;
        Ok(sizes)
    }

    /// Sets the number of packed sequences and the sizes of the longest.
    fn set_packed(&mut self, packed: &PackedLengths<Tensor>) -> Result<(), Unsupported> {
        let PackedLengths { cu_seqlens_q, cu_seqlens_kv, longest_queries, longest_keys } = packed;
        let Self { batch, queries, keys, .. } = *self;
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
        self.sequences = entries - 1;
        self.longest_queries = *longest_queries;
        self.longest_keys = *longest_keys;
        Ok(())
    }
}

/// The sizes of keys and values besides the heads and the width.
struct KeyRowDims {
    /// The batch size, or the number of pages.
    count: usize,
    /// T_kv, or the page size.
    rows: usize,
}

impl KeyRowDims {
    fn of(call: &CudaCall) -> Result<Self, Unsupported> {
        let Some(KvPages { page_size, .. }) = &call.pages else {
            return Ok(Self { count: call.dims.b, rows: call.dims.t_kv });
        };
        expect(page_size.is_power_of_two(), || format!("a page has {page_size} keys, expected a power of two"))?;
        Ok(Self { count: call.k.dims().first().copied().unwrap_or(0), rows: *page_size })
    }
}

/// Checks the table of pages, whose entries the kernels trust.
fn check_pages(call: &CudaCall, sizes: &CallSizes) -> Result<(), Unsupported> {
    let Some(KvPages { table, page_size }) = &call.pages else { return Ok(()) };
    let least = sizes.longest_keys.div_ceil(*page_size);
    let fits = matches!(*table.dims(), [sequences, pages] if sequences == sizes.sequences && pages >= least);
    expect(fits && table.dims()[1] <= MAX_POSITION, || {
        let dims = table.dims();
        format!("the table of pages has shape {dims:?}, expected ({}, {least} or more)", sizes.sequences)
    })?;
    check_vector("the table of pages", table, DType::I32, table.elem_count())?;
    expect(call.scores.dropout.is_none(), || "weights are dropped, which is for keys in one piece".into())
}

/// Returns the width of stored rows of `width` numbers: of their codes, if they are codes.
fn stored_width(call: &CudaCall, width: usize) -> Result<usize, Unsupported> {
    let Some(KvScales { format, .. }) = &call.kv_scales else { return Ok(width) };
    expect(width.is_multiple_of(format.block()), || {
        format!("a row has {width} numbers in codes of {format}, expected a multiple of {}", format.block())
    })?;
    Ok(format.bytes(width))
}

/// Checks the shape of queries, keys or values.
fn check_shape(name: &str, tensor: &Tensor, expected: [usize; 4]) -> Result<(), Unsupported> {
    expect(tensor.dims() == expected, || format!("{name} has shape {:?}, expected {expected:?}", tensor.dims()))
}

/// Checks the dtypes and the layouts of q, k and v, and the scales of codes.
fn check_rows(call: &CudaCall) -> Result<(), Unsupported> {
    let dtype = if call.kv_scales.is_some() { DType::U8 } else { call.q.dtype() };
    for (name, tensor, expected) in [("q", &call.q, call.q.dtype()), ("k", &call.k, dtype), ("v", &call.v, dtype)] {
        expect(tensor.dtype() == expected, || format!("{name} is {:?}, expected {expected:?}", tensor.dtype()))?;
        expect(tensor.dims()[3] == 1 || tensor.stride()[3] == 1, || {
            format!("the last dimension of {name} is not contiguous")
        })?;
    }
    let Some(KvScales { format, k, v }) = &call.kv_scales else { return Ok(()) };
    for (name, tensor, width) in [("the scales of k", k, call.dims.d), ("the scales of v", v, call.dims.d_v)] {
        let scales = format.scales(width);
        let expected = [call.k.dims()[0], call.k.dims()[1], call.k.dims()[2], scales];
        expect(tensor.dtype() == DType::F32, || format!("{name} are {:?}, expected f32", tensor.dtype()))?;
        expect(tensor.dims() == expected, || format!("{name} have shape {:?}, expected {expected:?}", tensor.dims()))?;
        expect(scales == 1 || tensor.stride()[3] == 1, || format!("the last dimension of {name} is not contiguous"))?;
    }
    Ok(())
}

/// Checks the score modifiers.
fn check_scores(call: &CudaCall, sizes: &CallSizes) -> Result<(), Unsupported> {
    call.scores.check_numbers(ScoreFormat::F32).map_err(Unsupported::new)?;
    if let Some(Dropout { mask: DropoutMask::KeptBits(_), .. }) = call.scores.dropout {
        return Err(Unsupported::new("a bit for each weight was given, expected a seed of dropout"));
    }
    call.scores.map(&mut |input, tensor| check_modifier(input, tensor, call, sizes))?;
    Ok(())
}

/// Checks a tensor of the score modifiers.
fn check_modifier(input: Input, tensor: &Tensor, call: &CudaCall, sizes: &CallSizes) -> Result<(), Unsupported> {
    let name = input.name();
    match input {
        Input::AlibiSlopes | Input::Sinks => check_vector(name, tensor, DType::F32, sizes.heads),
        Input::RelativeBias => check_relative_bias(tensor, sizes),
        Input::Bias => {
            let fits = [DType::F32, call.q.dtype()].contains(&tensor.dtype());
            expect(fits, || format!("{name} is {:?}, expected f32 or {:?}", tensor.dtype(), call.q.dtype()))?;
            check_broadcast(name, tensor, call, sizes)
        }
        Input::BooleanMask => {
            expect(tensor.dtype() == DType::U8, || format!("{name} is {:?}, expected u8", tensor.dtype()))?;
            check_broadcast(name, tensor, call, sizes)
        }
        Input::Dropout => check_vector(name, tensor, DType::U32, 2),
        // Not among the modifiers.
        Input::Q | Input::K | Input::V | Input::KeyScales | Input::ValueScales | Input::PageTable => Ok(()),
        Input::FirstPositions | Input::Starts | Input::Lengths | Input::Prefixes => Ok(()),
        Input::IntervalStarts | Input::IntervalEnds | Input::CumulativeQueries | Input::CumulativeKeys => Ok(()),
    }
}

/// Checks a relative bias.
fn check_relative_bias(biases: &Tensor, sizes: &CallSizes) -> Result<(), Unsupported> {
    let (dims, entries) = (biases.dims(), sizes.distances());
    let fits = [1, sizes.batch].iter().any(|&batch| dims == [batch, sizes.heads, entries]);
    expect(fits, || {
        format!("the relative bias has shape {dims:?}, expected ({} or 1, {}, {entries})", sizes.batch, sizes.heads)
    })?;
    let is_f32 = biases.dtype() == DType::F32;
    expect(is_f32, || format!("the relative bias is {:?}, expected f32", biases.dtype()))?;
    expect(entries == 1 || biases.stride()[2] == 1, || {
        "the last dimension of the relative bias is not contiguous".into()
    })
}

/// Checks a tensor that is broadcast to the scores (B, H, T_q, T_kv).
fn check_broadcast(name: &str, tensor: &Tensor, call: &CudaCall, sizes: &CallSizes) -> Result<(), Unsupported> {
    expect(call.keys.packed.is_none(), || format!("{name} is (B, H, T_q, T_kv), which packed sequences do not have"))?;
    let found = tensor.dims();
    expect(found.len() == 4, || format!("{name} has shape {found:?}, expected four dimensions"))?;
    let expected = [sizes.batch, sizes.heads, sizes.queries, sizes.keys];
    let fits = found.iter().zip(expected).all(|(&size, whole)| size == 1 || size == whole);
    expect(fits, || format!("{name} has shape {found:?}, expected sizes of 1 or of {expected:?}"))
}

/// Checks the lists of the ranges of keys, and the position of query 0.
fn check_keys(ranges: &BoundedKeys<Tensor>, sizes: &CallSizes) -> Result<(), Unsupported> {
    match &ranges.first_position {
        FirstPosition::AtEnd => {}
        FirstPosition::Same(position) => expect(position.unsigned_abs() as usize <= MAX_POSITION, || {
            format!("the position of query 0 is {position}, expected at most {MAX_POSITION} from 0")
        })?,
        FirstPosition::Each(positions) => {
            check_vector("the positions of query 0", positions, DType::I32, sizes.sequences)?;
        }
    }
    expect(ranges.chunk != Some(0), || "the chunk has 0 positions, expected at least 1".into())?;
    for (name, tensor) in [("starts", &ranges.starts), ("lengths", &ranges.lengths), ("prefixes", &ranges.prefixes)] {
        if let Some(tensor) = tensor {
            check_vector(name, tensor, DType::I32, sizes.sequences)?;
        }
    }
    if let Some(Intervals { starts, ends }) = &ranges.intervals {
        let rows = sizes.batch * sizes.queries;
        check_vector("the starts of intervals", starts, DType::I32, rows)?;
        check_vector("the ends of intervals", ends, DType::I32, rows)?;
    }
    Ok(())
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
