//! The buffers of a cache: keys and values as floats, or as 8 bits with a scale for each row.

use std::ops::Range;

use candle_core::{D, DType, Result, Tensor};

use super::OP;
use super::tokens::NewTokens;
use crate::sdpa::{KvScales, ZERO_POINT, decoded};
use candle_attention_modules::base::{self, accumulation_dtype, part};

/// Keys (B, H_kv, capacity, D) and values (B, H_kv, capacity, D_v), as floats or as 8 bits. Views made by
/// [`rows`](Self::rows) share the storage: what is written to one is written to all.
#[derive(Debug, Clone)]
pub(super) struct KvBuffers {
    /// Keys, and values unless they are the first columns of the keys.
    numbers: Vec<Tensor>,
    /// The scales (B, H_kv, capacity, 1) of each of them, if they are 8 bits; otherwise none.
    scales: Vec<Tensor>,
    d_v: usize,
}

/// Rows of one sequence of the buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StoredRows {
    pub sequence: usize,
    pub rows: Range<usize>,
}

/// The sizes of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvSizes {
    pub h_kv: usize,
    pub d: usize,
    pub d_v: usize,
}

/// The shapes of keys and values, for errors.
pub(super) struct KvShapes {
    pub keys: String,
    pub values: String,
}

/// The 8-bit codes of keys and values, and their scales.
pub(super) struct KvCodes {
    pub k: Tensor,
    pub v: Tensor,
    pub scales: KvScales,
}

impl KvBuffers {
    /// Returns keys and values of any strides as a cache stores them: as floats of a dtype, or as 8 bits. Without
    /// values, these are the first `d_v` columns of the keys.
    pub fn encode(k: &Tensor, v: Option<&Tensor>, d_v: usize, floats: Option<DType>) -> Result<Self> {
        let parts = [k].into_iter().chain(v).map(Tensor::detach);
        let Some(dtype) = floats else {
            let (numbers, scales) = parts.map(|part| quantize(&part)).collect::<Result<Vec<_>>>()?.into_iter().unzip();
            return Ok(Self { numbers, scales, d_v });
        };
        let numbers = parts.map(|part| part.to_dtype(dtype)?.contiguous()).collect::<Result<_>>()?;
        Ok(Self { numbers, scales: Vec::new(), d_v })
    }

    /// Returns buffers of zeros in the format of these, for `b` sequences.
    pub fn zeros(&self, b: usize, capacity: usize) -> Result<Self> {
        self.try_map(|like| {
            let (_, h, _, width) = like.dims4()?;
            let dims = [b, h, capacity, width];
            check_memory(&dims, like.dtype())?;
            Tensor::zeros(&dims, like.dtype(), like.device())
        })
    }

    /// Returns new buffers that store rows of some sequences, the first row of each in row 0.
    pub fn gather(&self, rows: &[StoredRows], capacity: usize) -> Result<Self> {
        let gathered = self.zeros(rows.len(), capacity)?;
        for (n, own) in rows.iter().enumerate() {
            gathered.write_sequence(n, 0, &self.rows(own)?)?;
        }
        Ok(gathered)
    }

    /// Returns a copy in new memory.
    pub fn copy(&self) -> Result<Self> {
        self.try_map(|part| {
            check_memory(part.dims(), part.dtype())?;
            part.force_contiguous()
        })
    }

    /// Returns the number of positions of a sequence that there is memory for.
    pub fn capacity(&self) -> usize {
        self.numbers[0].dims()[2]
    }

    /// Returns the dtype in which attention to the floats is computed, for keys that were projected in the dtype
    /// `came`.
    pub fn float_dtype(&self, came: DType) -> DType {
        if self.scales.is_empty() { self.numbers[0].dtype() } else { accumulation_dtype(came) }
    }

    /// Returns whether the rows of other buffers can be written to these.
    pub fn accepts(&self, other: &Self) -> bool {
        let fits = |(own, part): (&Tensor, &Tensor)| {
            let is_alike = own.dtype() == part.dtype() && own.device().same_device(part.device());
            is_alike && [0, 1, 3].iter().all(|&dim| own.dims()[dim] == part.dims()[dim])
        };
        (self.numbers.len(), self.d_v) == (other.numbers.len(), other.d_v)
            && self.tensors().zip(other.tensors()).all(fits)
    }

    /// Returns the sizes of keys and values; `None` for latents.
    pub fn sizes(&self) -> Option<KvSizes> {
        let (_, h_kv, _, d) = self.numbers[0].dims4().ok()?;
        (self.numbers.len() > 1).then_some(KvSizes { h_kv, d, d_v: self.d_v })
    }

    /// Returns the shapes of keys and values.
    pub fn shapes(&self) -> KvShapes {
        let shape = |part: &Tensor| {
            let dims = part.dims();
            format!("({}, {}, T, {}) on {:?}", dims[0], dims[1], dims[3], part.device().location())
        };
        let values = match self.numbers.get(1) {
            Some(values) => shape(values),
            None => format!("in their first {} columns", self.d_v),
        };
        KvShapes { keys: shape(&self.numbers[0]), values }
    }

    /// Returns the bytes of all buffers.
    pub fn bytes(&self) -> usize {
        self.tensors().map(|part| part.elem_count() * part.dtype().size_in_bytes()).sum()
    }

    /// Returns keys (B, H_kv, capacity, D) and values (B, H_kv, capacity, D_v) as floats: views of the buffers, or the
    /// numbers of 8 bits in `dtype`.
    pub fn floats(&self, dtype: DType) -> Result<[Tensor; 2]> {
        let read = |(n, numbers): (usize, &Tensor)| match self.scales.get(n) {
            Some(scales) => decoded(numbers, scales, dtype),
            None => Ok(numbers.clone()),
        };
        self.keys_and_values(self.numbers.iter().enumerate().map(read).collect::<Result<_>>()?)
    }

    /// Returns the 8-bit codes of keys and values, if these are stored so.
    pub fn codes(&self) -> Result<Option<KvCodes>> {
        let (Some(of_keys), Some(of_values)) = (self.scales.first(), self.scales.last()) else { return Ok(None) };
        let [k, v] = self.keys_and_values(self.numbers.clone())?;
        Ok(Some(KvCodes { k, v, scales: KvScales { k: of_keys.clone(), v: of_values.clone() } }))
    }

    /// Returns keys and values from one part, of which values are the first columns, or from two.
    fn keys_and_values(&self, parts: Vec<Tensor>) -> Result<[Tensor; 2]> {
        match <[Tensor; 2]>::try_from(parts) {
            Ok(both) => Ok(both),
            Err(keys) => Ok([keys[0].clone(), part(&keys[0], 3, 0..self.d_v)?]),
        }
    }

    /// Returns a view of some positions.
    pub fn positions(&self, rows: &Range<usize>) -> Result<Self> {
        self.try_map(|part| part.narrow(2, rows.start, rows.len()))
    }

    /// Returns a view of some positions of one sequence, as buffers of a batch of 1.
    pub fn rows(&self, own: &StoredRows) -> Result<Self> {
        self.positions(&own.rows)?.try_map(|part| part.narrow(0, own.sequence, 1))
    }

    /// Writes all positions of `from` at position `at` of every sequence.
    pub fn write(&self, at: usize, from: &Self) -> Result<()> {
        for (own, part) in self.tensors().zip(from.tensors()) {
            if part.elem_count() > 0 {
                own.slice_set(&part.contiguous()?, 2, at)?;
            }
        }
        Ok(())
    }

    /// Writes all positions of `from`, buffers of one sequence, at position `at` of one sequence.
    pub fn write_sequence(&self, sequence: usize, at: usize, from: &Self) -> Result<()> {
        self.try_map(|part| part.narrow(0, sequence, 1))?.write(at, from)
    }

    /// Writes the tokens of a call behind the stored positions `held` of each sequence.
    pub fn append(&self, kv: &Self, held: &[Range<usize>], new: &NewTokens) -> Result<()> {
        let at = held.first().map_or(0, Range::len);
        if new.all_valid() && held.iter().all(|held| held.len() == at) {
            return self.write(at, kv);
        }
        for (sequence, (stored, tokens)) in held.iter().zip(&new.tokens).enumerate() {
            let own = kv.rows(&StoredRows { sequence, rows: tokens.clone() })?;
            self.write_sequence(sequence, stored.len(), &own)?;
        }
        Ok(())
    }

    fn try_map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let mapped = |parts: &[Tensor]| parts.iter().map(&f).collect::<Result<_>>();
        Ok(Self { numbers: mapped(&self.numbers)?, scales: mapped(&self.scales)?, d_v: self.d_v })
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.numbers.iter().chain(&self.scales)
    }
}

fn check_memory(dims: &[usize], dtype: DType) -> Result<()> {
    base::check_memory(OP, format_args!("a buffer of {dims:?}"), &[dims, &[dtype.size_in_bytes()]].concat())
}

/// Returns rows (.., width) of floats as u8 (.., width) and f32 scales (.., 1): x is stored as `round(x / scale) +
/// 128`, where the scale is 1/127 of the row's largest magnitude.
///
/// A row with a number that is not finite in f32 has a scale of NaN; one whose scale would be subnormal is all zeros.
pub(super) fn quantize(rows: &Tensor) -> Result<(Tensor, Tensor)> {
    let rows = rows.to_dtype(DType::F32)?.contiguous()?;
    if rows.elem_count() == 0 {
        let dims = [&rows.dims()[..rows.rank() - 1], &[1]].concat();
        return Ok((rows.to_dtype(DType::U8)?, Tensor::zeros(dims, DType::F32, rows.device())?));
    }
    // x - x is 0 for finite x and NaN otherwise, which a maximum may pass over.
    let residue = rows.sub(&rows)?.sum_keepdim(D::Minus1)?;
    let scales = ((rows.abs()?.max_keepdim(D::Minus1)? / 127.0)? + residue)?;
    let normal = scales.ge(f32::MIN_POSITIVE)?.to_dtype(DType::F32)?;
    let scales = scales.mul(&normal)?;
    let divisors = (&scales + scales.eq(0f32)?.to_dtype(DType::F32)?)?;
    let multiples = rows.broadcast_mul(&scales.ne(0f32)?.to_dtype(DType::F32)?)?.broadcast_div(&divisors)?;
    // The conversion rounds towards zero.
    Ok(((multiples + (ZERO_POINT + 0.5))?.to_dtype(DType::U8)?, scales))
}
