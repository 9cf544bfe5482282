//! The buffers of a cache: keys and values as floats, or in 8 bits with a scale for each row.

use std::ops::Range;

use candle_core::{D, DType, Result, Tensor, bail};

use crate::sdpa::QuantizedKv;
use candle_attention_modules::base::{fits_in_memory, part};

/// The integer that stands for 0 in 8 bits.
const ZERO_POINT: f64 = 128.0;

/// How numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KvFormat {
    Float(DType),
    Q8,
}

/// Keys (B, H_kv, capacity, D) and values (B, H_kv, capacity, D_v). Views made by [`rows`](Self::rows) share the
/// storage: what is written to one is written to all.
#[derive(Debug, Clone)]
pub(super) struct KvBuffers {
    keys: Rows,
    /// `None` where they are the first columns of the keys.
    values: Option<Rows>,
    d_v: usize,
}

/// Numbers (B, H_kv, T, width), and in 8 bits the scales (B, H_kv, T, 1) of their rows.
#[derive(Debug, Clone)]
struct Rows {
    numbers: Tensor,
    scales: Option<Tensor>,
}

impl Rows {
    fn encode(tensor: &Tensor, format: KvFormat) -> Result<Self> {
        let tensor = &tensor.detach();
        match format {
            KvFormat::Float(dtype) => Ok(Self { numbers: tensor.to_dtype(dtype)?.contiguous()?, scales: None }),
            KvFormat::Q8 => {
                let (numbers, scales) = quantize(tensor)?;
                Ok(Self { numbers, scales: Some(scales) })
            }
        }
    }

    fn try_map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self { numbers: f(&self.numbers)?, scales: self.scales.as_ref().map(f).transpose()? })
    }

    fn read(&self, rows: &Range<usize>, floats: DType) -> Result<Tensor> {
        let view = |tensor: &Tensor| tensor.narrow(2, rows.start, rows.len());
        match &self.scales {
            None => view(&self.numbers),
            Some(scales) => dequantize(&view(&self.numbers)?, &view(scales)?, floats),
        }
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.numbers).chain(&self.scales)
    }
}

impl KvBuffers {
    /// Keys and values of any strides, as a cache stores them; without values, these are the first `d_v` columns of the
    /// keys.
    pub fn encode(k: &Tensor, v: Option<&Tensor>, d_v: usize, format: KvFormat) -> Result<Self> {
        Ok(Self { keys: Rows::encode(k, format)?, values: v.map(|v| Rows::encode(v, format)).transpose()?, d_v })
    }

    /// Empty buffers like these, for `b` sequences of `capacity` positions.
    pub fn empty_like(&self, b: usize, capacity: usize) -> Result<Self> {
        self.try_map(|like| {
            let (_, h, _, width) = like.dims4()?;
            check_memory(&[b, h, capacity, width], like.dtype())?;
            Tensor::zeros((b, h, capacity, width), like.dtype(), like.device())
        })
    }

    /// The same in storage of its own.
    pub fn copy(&self) -> Result<Self> {
        self.try_map(|part| {
            check_memory(part.dims(), part.dtype())?;
            part.force_contiguous()
        })
    }

    /// The most positions of a sequence.
    pub fn capacity(&self) -> usize {
        self.keys.numbers.dims()[2]
    }

    pub fn format(&self) -> KvFormat {
        match self.keys.scales {
            None => KvFormat::Float(self.keys.numbers.dtype()),
            Some(_) => KvFormat::Q8,
        }
    }

    /// Whether the rows of other buffers may be written to these.
    pub fn accepts(&self, other: &Self) -> bool {
        let fits = |(own, other): (&Tensor, &Tensor)| {
            let ([b, h, _, d], [other_b, other_h, _, other_d]) = (own.dims(), other.dims()) else { return false };
            [b, h, d] == [other_b, other_h, other_d]
                && own.dtype() == other.dtype()
                && own.device().same_device(other.device())
        };
        (self.values.is_some(), self.d_v, self.format()) == (other.values.is_some(), other.d_v, other.format())
            && self.tensors().zip(other.tensors()).all(fits)
    }

    /// H_kv, D and D_v of keys and values; nothing for latents.
    pub fn sizes(&self) -> Option<[usize; 3]> {
        let (_, h, _, d) = self.keys.numbers.dims4().ok()?;
        self.values.is_some().then_some([h, d, self.d_v])
    }

    /// The shapes of keys and values, for errors.
    pub fn shapes(&self) -> (String, String) {
        let shape = |part: &Rows| match part.numbers.dims() {
            [b, h, _, width] => format!("({b}, {h}, T, {width}) on {:?}", part.numbers.device().location()),
            other => format!("{other:?}"),
        };
        let values = match &self.values {
            Some(values) => shape(values),
            None => format!("in their first {} columns", self.d_v),
        };
        (shape(&self.keys), values)
    }

    pub fn bytes(&self) -> usize {
        self.tensors().map(|part| part.elem_count() * part.dtype().size_in_bytes()).sum()
    }

    /// Keys (B, H_kv, len, D) and values (B, H_kv, len, D_v) of some positions: views, or of 8 bits as `floats`.
    pub fn read(&self, rows: &Range<usize>, floats: DType) -> Result<(Tensor, Tensor)> {
        let keys = self.keys.read(rows, floats)?;
        let values = match &self.values {
            Some(values) => values.read(rows, floats)?,
            None => part(&keys, 3, 0..self.d_v)?,
        };
        Ok((keys, values))
    }

    /// Views of some positions, if they are of 8 bits.
    pub fn quantized(&self, rows: &Range<usize>) -> Result<Option<QuantizedKv>> {
        let keys = self.keys.try_map(|tensor| tensor.narrow(2, rows.start, rows.len()))?;
        let values = match &self.values {
            Some(values) => values.try_map(|tensor| tensor.narrow(2, rows.start, rows.len()))?,
            None => Rows { numbers: part(&keys.numbers, 3, 0..self.d_v)?, ..keys.clone() },
        };
        let scales = keys.scales.zip(values.scales);
        Ok(scales.map(|(k, v)| QuantizedKv { k: keys.numbers, v: values.numbers, scales: [k, v] }))
    }

    /// A view of some positions of one sequence, as buffers of a batch of 1.
    pub fn rows(&self, sequence: usize, rows: Range<usize>) -> Result<Self> {
        self.try_map(|part| part.narrow(0, sequence, 1)?.narrow(2, rows.start, rows.len()))
    }

    /// Writes all positions of `from` at position `at` of every sequence.
    pub fn write(&self, at: usize, from: &Self) -> Result<()> {
        for (own, from) in self.tensors().zip(from.tensors()) {
            if from.elem_count() > 0 {
                own.slice_set(&from.contiguous()?, 2, at)?;
            }
        }
        Ok(())
    }

    /// Writes all positions of `from`, which holds one sequence, at position `at` of one sequence.
    pub fn write_sequence(&self, sequence: usize, at: usize, from: &Self) -> Result<()> {
        self.try_map(|part| part.narrow(0, sequence, 1))?.write(at, from)
    }

    fn try_map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let values = self.values.as_ref().map(|values| values.try_map(&f)).transpose()?;
        Ok(Self { keys: self.keys.try_map(&f)?, values, d_v: self.d_v })
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.keys.tensors().chain(self.values.iter().flat_map(Rows::tensors))
    }
}

fn check_memory(dims: &[usize], dtype: DType) -> Result<()> {
    if !fits_in_memory(&[dims, &[dtype.size_in_bytes()]].concat()) {
        bail!("[attention_cache] a buffer of {dims:?} does not fit in memory")
    }
    Ok(())
}

/// Rows (.., width) of floats as u8 (.., width) and f32 scales (.., 1): x is stored as `round(x / scale) + 128`, where
/// the scale is 1/127 of the row's largest magnitude.
///
/// A row with a number that is not finite in f32 has a scale of NaN; one whose scale would be subnormal is all zeros.
pub(super) fn quantize(rows: &Tensor) -> Result<(Tensor, Tensor)> {
    let rows = rows.to_dtype(DType::F32)?.contiguous()?;
    if rows.elem_count() == 0 {
        let mut dims = rows.dims().to_vec();
        dims.pop();
        dims.push(1);
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

/// The floats that [`quantize`] stored; views of any strides.
pub(super) fn dequantize(numbers: &Tensor, scales: &Tensor, dtype: DType) -> Result<Tensor> {
    if numbers.elem_count() == 0 {
        // Candle copies no empty views.
        return Tensor::zeros(numbers.shape(), dtype, numbers.device());
    }
    (numbers.to_dtype(dtype)? - ZERO_POINT)?.broadcast_mul(&scales.to_dtype(dtype)?)
}
