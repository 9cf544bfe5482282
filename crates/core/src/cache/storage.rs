//! How a cache keeps keys and values: what is said of it before its first call, and its buffers, of floats or of 8 bits
//! with a scale for each row.

use std::ops::Range;

use candle_core::{D, DType, Result, Tensor, bail};
use macro_rules_attribute::apply;

use super::{NewTokens, OP};
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
    /// Keys, and values unless they are the first columns of the keys.
    numbers: Vec<Tensor>,
    /// Of the rows of each of them, where they are of 8 bits: (B, H_kv, capacity, 1).
    scales: Vec<Tensor>,
    d_v: usize,
}

impl KvBuffers {
    /// Keys and values of any strides, as a cache stores them; without values, these are the first `d_v` columns of the
    /// keys. As floats of a dtype, or as 8 bits.
    pub fn encode(k: &Tensor, v: Option<&Tensor>, d_v: usize, floats: Option<DType>) -> Result<Self> {
        let parts = [k].into_iter().chain(v).map(Tensor::detach);
        let Some(dtype) = floats else {
            let (numbers, scales) = parts.map(|part| quantize(&part)).collect::<Result<Vec<_>>>()?.into_iter().unzip();
            return Ok(Self { numbers, scales, d_v });
        };
        let numbers = parts.map(|part| part.to_dtype(dtype)?.contiguous()).collect::<Result<_>>()?;
        Ok(Self { numbers, scales: Vec::new(), d_v })
    }

    /// New buffers like these that hold rows of some sequences, the first of them in row 0.
    pub fn gather(&self, rows: &[(usize, Range<usize>)], capacity: usize) -> Result<Self> {
        let gathered = self.try_map(|like| {
            let (_, h, _, width) = like.dims4()?;
            let dims = [rows.len(), h, capacity, width];
            check_memory(&dims, like.dtype())?;
            Tensor::zeros(&dims, like.dtype(), like.device())
        })?;
        for (n, (sequence, rows)) in rows.iter().enumerate() {
            gathered.write_sequence(n, 0, &self.rows(*sequence, rows.clone())?)?;
        }
        Ok(gathered)
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
        self.numbers[0].dims()[2]
    }

    /// In which attention to the floats is computed, of keys that came in the dtype `came`.
    pub fn float_dtype(&self, came: DType) -> DType {
        if self.scales.is_empty() { self.numbers[0].dtype() } else { accumulation_dtype(came) }
    }

    /// Whether the rows of other buffers may be written to these.
    pub fn accepts(&self, other: &Self) -> bool {
        let fits = |(own, other): (&Tensor, &Tensor)| {
            let is_alike = own.dtype() == other.dtype() && own.device().same_device(other.device());
            is_alike && [0, 1, 3].iter().all(|&dim| own.dims()[dim] == other.dims()[dim])
        };
        (self.numbers.len(), self.d_v) == (other.numbers.len(), other.d_v)
            && self.tensors().zip(other.tensors()).all(fits)
    }

    /// H_kv, D and D_v of keys and values; nothing for latents.
    pub fn sizes(&self) -> Option<[usize; 3]> {
        let (_, h, _, d) = self.numbers[0].dims4().ok()?;
        (self.numbers.len() > 1).then_some([h, d, self.d_v])
    }

    /// The shapes of keys and values, for errors.
    pub fn shapes(&self) -> (String, String) {
        let shape = |part: &Tensor| {
            let dims = part.dims();
            format!("({}, {}, T, {}) on {:?}", dims[0], dims[1], dims[3], part.device().location())
        };
        let in_keys = || format!("in their first {} columns", self.d_v);
        (shape(&self.numbers[0]), self.numbers.get(1).map_or_else(in_keys, shape))
    }

    pub fn bytes(&self) -> usize {
        self.tensors().map(|part| part.elem_count() * part.dtype().size_in_bytes()).sum()
    }

    /// Keys (B, H_kv, capacity, D) and values (B, H_kv, capacity, D_v): codes of 8 bits in `dtype`, floats as they are,
    /// which share the buffers.
    pub fn floats(&self, dtype: DType) -> Result<[Tensor; 2]> {
        let read = |(n, numbers): (usize, &Tensor)| match self.scales.get(n) {
            Some(scales) => dequantize(numbers, scales, dtype),
            None => Ok(numbers.clone()),
        };
        self.keys_and_values(self.numbers.iter().enumerate().map(read).collect::<Result<_>>()?)
    }

    /// Codes of 8 bits of keys and values, and their scales (B, H_kv, capacity, 1), if they are that.
    pub fn codes(&self) -> Result<Option<[[Tensor; 2]; 2]>> {
        let Some((of_keys, of_values)) = self.scales.first().zip(self.scales.last()) else { return Ok(None) };
        Ok(Some([self.keys_and_values(self.numbers.clone())?, [of_keys.clone(), of_values.clone()]]))
    }

    fn keys_and_values(&self, parts: Vec<Tensor>) -> Result<[Tensor; 2]> {
        match <[Tensor; 2]>::try_from(parts) {
            Ok(both) => Ok(both),
            Err(keys) => Ok([keys[0].clone(), part(&keys[0], 3, 0..self.d_v)?]),
        }
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

    /// Writes the tokens of a call behind what is held of each sequence.
    pub fn append(&self, kv: &Self, held: &[Range<usize>], new: &NewTokens) -> Result<()> {
        let at = held.first().map_or(0, Range::len);
        if new.all_valid() && held.iter().all(|held| held.len() == at) {
            return self.write(at, kv);
        }
        let mut of_each = held.iter().zip(&new.tokens).enumerate();
        of_each.try_for_each(|(n, (held, tokens))| self.write_sequence(n, held.len(), &kv.rows(n, tokens.clone())?))
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

/// Rows (.., width) of floats as u8 (.., width) and f32 scales (.., 1): x is stored as `round(x / scale) + 128`, where
/// the scale is 1/127 of the row's largest magnitude.
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

/// The floats that [`quantize`] stored; views of any strides.
pub(super) fn dequantize(numbers: &Tensor, scales: &Tensor, dtype: DType) -> Result<Tensor> {
    if numbers.elem_count() == 0 {
        // Candle copies no empty views.
        return Tensor::zeros(numbers.shape(), dtype, numbers.device());
    }
    (numbers.to_dtype(dtype)? - ZERO_POINT)?.broadcast_mul(&scales.to_dtype(dtype)?)
}
