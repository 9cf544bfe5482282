//! How a cache keeps keys and values: what is said of it before its first call, and its buffers, of floats or of 8 bits
//! with a scale for each row.

use std::ops::Range;

use candle_core::{D, DType, Result, Tensor, bail};
use macro_rules_attribute::apply;

use super::OP;
use crate::config::MultiHeadAttentionConfig;
use candle_attention_modules::base::{self, FLOATS, Options, accumulation_dtype, number, options, part};

/// The capacity at first, in positions, unless said otherwise: less than what a prompt takes.
const FIRST_CAPACITY: usize = 256;

/// How an [`AttentionCache`](crate::AttentionCache) keeps keys and values, built with `with_*`.
///
/// ```
/// use candle_attention::{AttentionCache, AttentionCacheConfig};
/// use candle_core::DType;
/// # fn main() -> candle_core::Result<()> {
/// // 4,096 positions at once, in half of the memory of f32; an error beyond them.
/// let cfg = AttentionCacheConfig::new().with_capacity(4096).with_growth(false).with_dtype(DType::BF16);
/// let cache = AttentionCache::new(&cfg)?;
/// assert!(cache.is_empty());
/// # Ok(()) }
/// ```
#[apply(options)]
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub struct AttentionCacheConfig {
    /// The positions of each sequence that the buffers hold from the first call on.
    #[default(FIRST_CAPACITY)]
    #[methods(with)]
    capacity: usize,
    /// Whether the buffers double where the capacity is not enough, which is an error otherwise.
    #[default(true)]
    #[methods(with)]
    growth: bool,
    /// The window of a sliding cache, which keeps what a window of this many keys (see
    /// [`AttentionMask::with_window`](crate::AttentionMask::with_window)) needs and no more than twice that, or the
    /// capacity where it is larger. An older key that a mask leaves to a query is an error, not one that is passed
    /// over.
    #[check(number::size)]
    window: Option<usize>,
    /// The dtype in which keys and values are kept, F32, BF16, F16 or F64; that of the first keys unless given.
    /// Attention is computed in it, and its result converted back.
    dtype: Option<DType>,
    /// Whether keys and values are kept in 8 bits, see [`with_q8`](Self::with_q8).
    #[methods(get)]
    q8: bool,
    /// Whether gradients end at the cache: queries, keys and values are taken without theirs, for generation with a
    /// layer whose weights are variables. Otherwise a key that is tracked for gradients is an error, since a cache
    /// would lose its gradient.
    detached: bool,
    /// Whether later layers read the cache too ([`AttentionInput::with_shared_cache`]). A sliding cache holds all that
    /// the queries of its last call see then, however long that call was; without this, calls may have as many tokens
    /// as its window has.
    ///
    /// [`AttentionInput::with_shared_cache`]: crate::AttentionInput::with_shared_cache
    shared: bool,
}

impl Default for AttentionCacheConfig {
    fn default() -> Self {
        Self::unset()
    }
}

impl AttentionCacheConfig {
    /// A cache that begins with a capacity of 256 positions and grows by doubling, in the dtype of the keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// The default for a layer: sliding, if the layer has a window.
    pub fn for_layer(cfg: &MultiHeadAttentionConfig) -> Self {
        Self { window: cfg.window(), ..Self::default() }
    }

    /// Keeps keys and values in 8 bits a number and an f32 for each row of a head: a quarter of the memory of f32, and
    /// 4 bytes a row. A number errs by at most 1/254 of the largest in its row, f32's own rounding aside, where that is
    /// from 1.5e-36 to 3.4e38; a row of smaller ones becomes zeros, and one with a number that f32 does not hold as a
    /// finite one is NaN.
    ///
    /// The fused kernel of the CPU reads them as they are. Where another path runs (on a GPU, or on the reference path
    /// for f64, weights on request and what [`plan`](crate::MultiHeadAttention::plan) names), all that is attended to
    /// becomes floats first, f32 or f64.
    pub fn with_q8(self) -> Self {
        Self { q8: true, ..self }
    }

    /// The most positions of a sequence that are held at a time, if there is a bound. A shared cache holds its last
    /// call beyond it.
    pub fn most_held(&self) -> Option<usize> {
        match (self.window, self.growth) {
            (_, false) => Some(self.capacity),
            (Some(window), true) => Some(self.first_capacity().max(window.saturating_mul(2))),
            (None, true) => None,
        }
    }

    /// The capacity with which the first call begins, if it does not bring more.
    pub(super) fn first_capacity(&self) -> usize {
        match self.window {
            // The default is more than a short window needs.
            Some(window) if self.growth && self.capacity == FIRST_CAPACITY => {
                self.capacity.min(window.saturating_mul(2))
            }
            _ => self.capacity,
        }
    }

    /// # Errors
    /// Names the option, what was expected and what was found.
    pub(super) fn validate(&self) -> Result<()> {
        if self.capacity == 0 && !self.growth {
            bail!("[{OP}] capacity is 0 without growth, expected at least 1")
        }
        number::within(OP, "capacity", self.capacity, 0..=u32::MAX as usize)?;
        self.check(OP)?;
        if let Some(window) = self.window.filter(|&window| !self.growth && self.capacity < window) {
            bail!("[{OP}] capacity is {} without growth, expected at least the window {window}", self.capacity)
        }
        if let Some(dtype) = self.dtype.filter(|_| self.q8) {
            bail!("[{OP}] dtype is {dtype:?} beside q8, expected one of the two")
        }
        if let Some(dtype) = self.dtype.filter(|dtype| !FLOATS.contains(dtype)) {
            bail!("[{OP}] dtype is {dtype:?}, expected F32, F16, BF16 or F64")
        }
        Ok(())
    }
}

/// The integer that stands for 0 in 8 bits.
const ZERO_POINT: f64 = 128.0;

/// Keys (B, H_kv, capacity, D) and values (B, H_kv, capacity, D_v), as floats or as 8 bits. Views made by
/// [`rows`](Self::rows) share the storage: what is written to one is written to all.
#[derive(Debug, Clone)]
pub(super) struct KvBuffers {
    keys: Tensor,
    /// `None` where they are the first columns of the keys.
    values: Option<Tensor>,
    d_v: usize,
    /// Of the rows of keys of 8 bits, (B, H_kv, capacity, 1).
    key_scales: Option<Tensor>,
    /// Of the rows of values of 8 bits, unless these are columns of the keys.
    value_scales: Option<Tensor>,
}

impl KvBuffers {
    /// Keys and values of any strides, as a cache stores them; without values, these are the first `d_v` columns of the
    /// keys. As floats of a dtype, or as 8 bits.
    pub fn encode(k: &Tensor, v: Option<&Tensor>, d_v: usize, floats: Option<DType>) -> Result<Self> {
        let (k, v) = (k.detach(), v.map(Tensor::detach));
        if let Some(dtype) = floats {
            let stored = |tensor: &Tensor| tensor.to_dtype(dtype)?.contiguous();
            let values = v.as_ref().map(stored).transpose()?;
            return Ok(Self { keys: stored(&k)?, values, d_v, key_scales: None, value_scales: None });
        }
        let (keys, key_scales) = quantize(&k)?;
        let (values, value_scales) = v.as_ref().map(quantize).transpose()?.unzip();
        Ok(Self { keys, values, d_v, key_scales: Some(key_scales), value_scales })
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
        self.keys.dims()[2]
    }

    /// In which attention to the floats is computed, of keys that came in the dtype `came`.
    pub fn float_dtype(&self, came: DType) -> DType {
        if self.key_scales.is_some() { accumulation_dtype(came) } else { self.keys.dtype() }
    }

    /// Whether the rows of other buffers may be written to these.
    pub fn accepts(&self, other: &Self) -> bool {
        let fits = |(own, other): (&Tensor, &Tensor)| {
            let ([b, h, _, d], [other_b, other_h, _, other_d]) = (own.dims(), other.dims()) else { return false };
            [b, h, d] == [other_b, other_h, other_d]
                && own.dtype() == other.dtype()
                && own.device().same_device(other.device())
        };
        (self.values.is_some(), self.d_v) == (other.values.is_some(), other.d_v)
            && self.tensors().zip(other.tensors()).all(fits)
    }

    /// H_kv, D and D_v of keys and values; nothing for latents.
    pub fn sizes(&self) -> Option<[usize; 3]> {
        let (_, h, _, d) = self.keys.dims4().ok()?;
        self.values.is_some().then_some([h, d, self.d_v])
    }

    /// The shapes of keys and values, for errors.
    pub fn shapes(&self) -> (String, String) {
        let shape = |part: &Tensor| match part.dims() {
            [b, h, _, width] => format!("({b}, {h}, T, {width}) on {:?}", part.device().location()),
            other => format!("{other:?}"),
        };
        let in_keys = || format!("in their first {} columns", self.d_v);
        (shape(&self.keys), self.values.as_ref().map_or_else(in_keys, shape))
    }

    pub fn bytes(&self) -> usize {
        self.tensors().map(|part| part.elem_count() * part.dtype().size_in_bytes()).sum()
    }

    /// Keys (B, H_kv, capacity, D) and values (B, H_kv, capacity, D_v): codes of 8 bits in `dtype`, floats as they are,
    /// which share the buffers.
    pub fn floats(&self, dtype: DType) -> Result<(Tensor, Tensor)> {
        let read = |numbers: &Tensor, scales: &Option<Tensor>| match scales {
            Some(scales) => dequantize(numbers, scales, dtype),
            None => Ok(numbers.clone()),
        };
        let keys = read(&self.keys, &self.key_scales)?;
        let values = match &self.values {
            Some(values) => read(values, &self.value_scales)?,
            None => part(&keys, 3, 0..self.d_v)?,
        };
        Ok((keys, values))
    }

    /// Keys and values as they are.
    pub fn stored(&self) -> Result<[Tensor; 2]> {
        let values = self.values.clone().map_or_else(|| part(&self.keys, 3, 0..self.d_v), Ok)?;
        Ok([self.keys.clone(), values])
    }

    /// Their scales (B, H_kv, capacity, 1), if they are codes of 8 bits.
    pub fn scales(&self) -> Option<[Tensor; 2]> {
        let of_keys = self.key_scales.clone()?;
        Some([of_keys.clone(), self.value_scales.clone().unwrap_or(of_keys)])
    }

    /// A view of some positions.
    pub fn positions(&self, rows: &Range<usize>) -> Result<Self> {
        self.try_map(|part| part.narrow(2, rows.start, rows.len()))
    }

    /// A view of some positions of one sequence, as buffers of a batch of 1.
    pub fn rows(&self, sequence: usize, rows: Range<usize>) -> Result<Self> {
        self.positions(&rows)?.try_map(|part| part.narrow(0, sequence, 1))
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
        let mapped = |part: &Option<Tensor>| part.as_ref().map(&f).transpose();
        Ok(Self {
            keys: f(&self.keys)?,
            values: mapped(&self.values)?,
            d_v: self.d_v,
            key_scales: mapped(&self.key_scales)?,
            value_scales: mapped(&self.value_scales)?,
        })
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let others = [&self.values, &self.key_scales, &self.value_scales];
        std::iter::once(&self.keys).chain(others.into_iter().flatten())
    }
}

fn check_memory(dims: &[usize], dtype: DType) -> Result<()> {
    base::check_memory(OP, format_args!("a buffer of {dims:?}"), &[dims, &[dtype.size_in_bytes()]].concat())
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
