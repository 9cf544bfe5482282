//! Which keys each query sees.
//!
//! An [`AttentionMask`] is pure description: constraints that hold together. It meets a shape in [`AttentionMask::resolve`],
//! which checks it once and answers, for every query, with the one interval of keys that the structural constraints
//! leave it: a kernel can loop over what is seen. Only `keep` and `bias` tensors are read from memory.

mod lens;
mod of_sequence;
mod placed;
mod ranges;

pub use lens::ValidLens;
pub(crate) use placed::{PlacedDims, Placement};
pub use ranges::KvRanges;
pub(crate) use ranges::Outline;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::sdpa::FLOATS;
use crate::size::{fits_in_memory, is_addressable};

/// What a query that sees no key receives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EmptyRows {
    /// Zero weights, and so a context of zeros.
    #[default]
    Zero,
    /// The same weight, 1/T_kv, for every key, hidden or not: what d2l's `masked_softmax` gives, which fills with -1e6
    /// instead of leaving keys out. For parity with it; see <https://d2l.ai>, "Attention Scoring Functions".
    Uniform,
}

/// At which key position a query stands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Alignment {
    /// The last query stands at the last key.
    #[default]
    End,
    /// Query i stands at key i.
    Start,
    /// Query i stands at key i + n.
    Offset(usize),
    /// Query i of sequence b stands at key i + n[b], which padding before the first token may make negative.
    Each(Vec<i128>),
}

/// Constraints that are relative to a query's own position, and so share one alignment.
#[derive(Debug, Clone, Default, PartialEq)]
struct Relative {
    alignment: Alignment,
    causal: bool,
    window: Option<usize>,
    band: Option<(usize, usize)>,
    prefix: Vec<ValidLens>,
}

/// Constraints on which keys a query sees; all of them hold together.
///
/// Position: query i stands at key position `i + T_kv - T_q`, so the last query stands at the last key, unless
/// [`causal_upper_left`](Self::causal_upper_left) or [`causal_with_offset`](Self::causal_with_offset) says otherwise.
/// Windows and bands count from that position.
///
/// ```
/// use candle_attention::AttentionMask;
/// # fn main() -> candle_core::Result<()> {
/// let mask = AttentionMask::causal().with_window(3);
/// let ranges = mask.resolve(1, 4, 5)?;
/// assert_eq!(ranges.to_string(), "\
/// 1 1 . . .
/// 1 1 1 . .
/// . 1 1 1 .
/// . . 1 1 1
/// ");
/// assert_eq!(ranges.kv_range(0, 2), 1..4);
/// # Ok(()) }
/// ```
///
/// Shapes are checked where the mask is used (or by [`resolve`](Self::resolve)), since only there B, T_q and T_kv are known.
#[derive(Debug, Clone, Default)]
pub struct AttentionMask {
    relative: Vec<Relative>,
    valid_lens: Vec<ValidLens>,
    starts: Vec<ValidLens>,
    /// T_kv of the attention masks that lengths were read from.
    widths: Vec<usize>,
    keep: Vec<Tensor>,
    bias: Vec<Tensor>,
    empty_rows: EmptyRows,
}

impl AttentionMask {
    /// Every query sees every key.
    pub fn none() -> Self {
        Self::default()
    }

    /// No query sees a key after its own, aligned to the end: the last query sees the last key, which is right for new
    /// queries against a longer cache. With T_q > T_kv the first queries see nothing.
    pub fn causal() -> Self {
        Self::aligned(Alignment::End)
    }

    /// Query i sees keys `0..=i` whatever T_kv is: `is_causal` of PyTorch's `scaled_dot_product_attention`.
    pub fn causal_upper_left() -> Self {
        Self::aligned(Alignment::Start)
    }

    /// Query i sees keys `0..=i + n`.
    pub fn causal_with_offset(n: usize) -> Self {
        Self::aligned(Alignment::Offset(n))
    }

    fn aligned(alignment: Alignment) -> Self {
        Self { relative: vec![Relative { alignment, causal: true, ..Default::default() }], ..Default::default() }
    }

    /// A tokenizer's attention mask `(B, T_kv)` of ones (a token) and zeros (padding), in any dtype.
    ///
    /// Rows that are one run of ones become starts and lengths, which leave intervals; otherwise the mask becomes a `keep`
    /// tensor. A row without a one hides every key.
    ///
    /// # Errors
    /// For another rank, and for a value other than 0 and 1; where the mask is used, for another T_kv.
    pub fn from_attention_mask(mask: &Tensor) -> Result<Self> {
        if mask.rank() != 2 {
            bail!("[from_attention_mask] expected shape (B, T_kv), found {:?}", mask.shape())
        }
        let mask = &readable(mask)?;
        let rows = mask.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        if let Some(other) = rows.iter().flatten().find(|&&value| value != 0.0 && value != 1.0) {
            bail!("[from_attention_mask] expected ones and zeros, found {other}")
        }
        let runs: Vec<_> = rows.iter().map(|row| single_run(row)).collect();
        if runs.iter().any(Option::is_none) {
            return Ok(Self::none().with_keep(&mask.ne(&mask.zeros_like()?)?.unsqueeze(1)?.unsqueeze(1)?));
        }
        let (starts, ends): (Vec<_>, Vec<_>) = runs.into_iter().flatten().unzip();
        let mut this = Self::none().with_valid_lens(ends);
        this.widths.push(mask.dim(1)?);
        Ok(if starts.iter().any(|&start| start > 0) { this.with_starts(starts) } else { this })
    }

    /// Hides the keys at and past a length: `(B,)`, or `(B, T_q)` for each query. d2l's `valid_lens`.
    pub fn with_valid_lens(mut self, lens: impl Into<ValidLens>) -> Self {
        self.valid_lens.push(lens.into());
        self
    }

    /// Hides the keys before a start: left padding, packed documents.
    pub fn with_starts(mut self, starts: impl Into<ValidLens>) -> Self {
        self.starts.push(starts.into());
        self
    }

    /// Hides the keys further back than `w - 1`: `w` keys with the query's own, Hugging Face's `sliding_window`.
    /// Keys after the query's own stay as they are. A window of 0 is an error where the mask is used.
    pub fn with_window(mut self, w: usize) -> Self {
        let relative = self.relative_mut();
        relative.window = Some(relative.window.map_or(w, |other| other.min(w)));
        self
    }

    /// Leaves a query the keys from `left` before its position to `right` after it: local attention in encoders.
    pub fn with_band(mut self, left: usize, right: usize) -> Self {
        let relative = self.relative_mut();
        relative.band = Some(relative.band.map_or((left, right), |(l, r)| (l.min(left), r.min(right))));
        self
    }

    /// Lifts the causal constraint for the keys before the prefix length, which all queries see then (prefix LM).
    /// Windows, bands, lengths and starts still hold; without a causal constraint there is nothing to lift.
    pub fn with_prefix(mut self, prefix: impl Into<ValidLens>) -> Self {
        self.relative_mut().prefix.push(prefix.into());
        self
    }

    /// Hides every key whose entry is 0: u8, broadcastable to (B, H, T_q, T_kv).
    pub fn with_keep(mut self, keep: &Tensor) -> Self {
        self.keep.push(keep.clone());
        self
    }

    /// Adds a float tensor to the scores, broadcastable to (B, H, T_q, T_kv). Gradients flow into it.
    pub fn with_bias(mut self, bias: &Tensor) -> Self {
        self.bias.push(bias.clone());
        self
    }

    /// What a query that sees no key receives; zeros unless said otherwise.
    pub fn with_empty_rows(mut self, empty_rows: EmptyRows) -> Self {
        self.empty_rows = empty_rows;
        self
    }

    /// Both masks at once: a key is seen where both leave it, biases add up, and each mask's windows and prefix stay with
    /// that mask's own causal constraint. Empty rows are uniform if either asks for it.
    pub fn and(&self, other: &Self) -> Self {
        let mut both = self.clone();
        for relative in &other.relative {
            if !both.relative.contains(relative) {
                both.relative.push(relative.clone());
            }
        }
        both.valid_lens.extend_from_slice(&other.valid_lens);
        both.starts.extend_from_slice(&other.starts);
        both.widths.extend_from_slice(&other.widths);
        both.keep.extend_from_slice(&other.keep);
        both.bias.extend_from_slice(&other.bias);
        if other.empty_rows == EmptyRows::Uniform {
            both.empty_rows = EmptyRows::Uniform;
        }
        both
    }

    /// This mask with its causal constraints lifted for the prefixes of another: what a layer does with its own causal
    /// constraint when the caller's mask has a prefix.
    pub(crate) fn lifted_by(&self, other: &Self) -> Self {
        let prefixes: Vec<_> = other.relative.iter().flat_map(|relative| relative.prefix.iter().cloned()).collect();
        let mut lifted = self.clone();
        for relative in &mut lifted.relative {
            relative.prefix.extend_from_slice(&prefixes);
        }
        lifted
    }

    /// The structural constraints for `b` sequences, `t_q` queries and `t_kv` keys, as an interval for each query.
    ///
    /// # Errors
    /// For lengths whose shape is neither (B,) nor (B, T_q), and for a window of 0.
    pub fn resolve(&self, b: usize, t_q: usize, t_kv: usize) -> Result<KvRanges> {
        KvRanges::new(self, b, t_q, t_kv)
    }

    /// Whether nothing is hidden and nothing added, whatever the shape.
    pub fn is_none(&self) -> bool {
        self.relative.is_empty()
            && self.valid_lens.is_empty()
            && self.starts.is_empty()
            && self.keep.is_empty()
            && self.bias.is_empty()
    }

    /// Whether a tensor hides keys.
    pub(crate) fn has_keep(&self) -> bool {
        !self.keep.is_empty()
    }

    /// Whether a tensor is added to the scores.
    pub(crate) fn has_bias(&self) -> bool {
        !self.bias.is_empty()
    }

    /// What a query that sees no key receives.
    pub fn empty_rows(&self) -> EmptyRows {
        self.empty_rows
    }

    /// The mask as one tensor to add to scores: the biases, and -inf where a key is hidden. Shape broadcastable to
    /// `dims` = (B, H, T_q, T_kv), in `dtype` on `device`.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve), for `keep` and `bias` tensors that do not fit, for a dtype without -inf, and for
    /// dimensions that are too large to address.
    pub fn to_additive(&self, dims: (usize, usize, usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
        if !FLOATS.contains(&dtype) {
            bail!("[attention_mask] an additive mask in {dtype:?} has no -inf, expected F32, F16, BF16 or F64")
        }
        check_addressable(dims)?;
        if !fits_in_memory(&[dims.2, dims.3]) {
            bail!("[attention_mask] a mask of {} × {} entries does not fit in memory", dims.2, dims.3)
        }
        let bias = match self.bias_tensor(dims, dtype, device)? {
            Some(bias) => bias,
            None => Tensor::zeros((1, 1, dims.2, dims.3), dtype, device)?,
        };
        let Some(keep) = self.keep_tensor(dims, device)? else { return Ok(bias) };
        let shape = keep.shape().broadcast_shape_binary_op(bias.shape(), "to_additive")?;
        let hidden = Tensor::new(f32::NEG_INFINITY, device)?.to_dtype(dtype)?.broadcast_as(&shape)?;
        keep.broadcast_as(&shape)?.where_cond(&bias.broadcast_as(&shape)?, &hidden)
    }

    /// All that hides, as u8 broadcastable to (B, H, T_q, T_kv), 1 = seen; `None` when nothing hides.
    pub(crate) fn keep_tensor(&self, dims: (usize, usize, usize, usize), device: &Device) -> Result<Option<Tensor>> {
        check_addressable(dims)?;
        let (b, _, t_q, t_kv) = dims;
        let structural = self.resolve(b, t_q, t_kv)?.to_keep(device)?;
        Ok(match (structural, self.keep_beside_ranges(dims, device)?) {
            (Some(structural), Some(keep)) => Some(structural.broadcast_mul(&keep.ne(0u8)?)?),
            (structural, keep) => structural.or(keep),
        })
    }

    /// The `keep` tensors alone, without the intervals of [`resolve`](Self::resolve); their views stay views.
    pub(crate) fn keep_beside_ranges(
        &self,
        dims: (usize, usize, usize, usize),
        device: &Device,
    ) -> Result<Option<Tensor>> {
        let mut all: Option<Tensor> = None;
        for keep in &self.keep {
            if keep.dtype() != DType::U8 {
                bail!("[attention_mask] keep has dtype {:?}, expected U8 with 1 = attend", keep.dtype())
            }
            let keep = fit("keep", keep, dims, device)?;
            all = Some(match all {
                None => keep,
                Some(all) => all.broadcast_mul(&keep.ne(0u8)?)?,
            });
        }
        Ok(all)
    }

    /// The sum of all biases in `dtype`, broadcastable to (B, H, T_q, T_kv); `None` when there is none.
    pub(crate) fn bias_tensor(
        &self,
        dims: (usize, usize, usize, usize),
        dtype: DType,
        device: &Device,
    ) -> Result<Option<Tensor>> {
        let mut sum: Option<Tensor> = None;
        for bias in &self.bias {
            if !FLOATS.contains(&bias.dtype()) {
                bail!(
                    "[attention_mask] bias has dtype {:?}, expected a float; a mask of ones and zeros is a keep",
                    bias.dtype()
                )
            }
            let bias = fit("bias", bias, dims, device)?.to_dtype(dtype)?;
            sum = Some(match sum {
                None => bias,
                Some(sum) => sum.broadcast_add(&bias)?,
            });
        }
        Ok(sum)
    }

    /// The same mask for keys after which `n` more were appended that every query sees, its biases in `dtype`.
    ///
    /// The interval of a query cannot say "these, and the last one", so the mask is written out as tensors.
    pub(crate) fn with_appended_keys(
        &self,
        n: usize,
        dims: (usize, usize, usize, usize),
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let appended = |tensor: Tensor, fill: f64| -> Result<Tensor> {
            let (b, h, t_q, _) = tensor.dims4()?;
            let tensor = tensor.broadcast_as((b, h, t_q, dims.3))?;
            let fill = (Tensor::zeros((b, h, t_q, n), tensor.dtype(), device)? + fill)?;
            Tensor::cat(&[&tensor.contiguous()?, &fill], 3)
        };
        let mut all = Self::none().with_empty_rows(self.empty_rows);
        if let Some(keep) = self.keep_tensor(dims, device)? {
            all = all.with_keep(&appended(keep, 1.0)?);
        }
        if let Some(bias) = self.bias_tensor(dims, dtype, device)? {
            all = all.with_bias(&appended(bias, 0.0)?);
        }
        Ok(all)
    }

    pub(crate) fn tracks_gradients(&self) -> bool {
        self.bias.iter().any(Tensor::track_op)
    }

    fn relative_mut(&mut self) -> &mut Relative {
        if self.relative.is_empty() {
            self.relative.push(Relative::default());
        }
        let last = self.relative.len() - 1;
        &mut self.relative[last]
    }
}

fn check_addressable(dims: (usize, usize, usize, usize)) -> Result<()> {
    let dims = [dims.0, dims.1, dims.2, dims.3];
    if !is_addressable(&dims) {
        bail!("[attention_mask] (B, H, T_q, T_kv) = {dims:?} is too large to address")
    }
    Ok(())
}

/// The start and end of the one run of ones in a row, (0, 0) for a row of zeros, `None` for several runs.
fn single_run(row: &[f32]) -> Option<(usize, usize)> {
    let Some(start) = row.iter().position(|&value| value == 1.0) else { return Some((0, 0)) };
    let end = row.iter().rposition(|&value| value == 1.0)? + 1;
    row[start..end].iter().all(|&value| value == 1.0).then_some((start, end))
}

/// A mask tensor as rank 4 with every dimension 1 or that of `dims`, on the device of the call.
fn fit(what: &str, tensor: &Tensor, dims: (usize, usize, usize, usize), device: &Device) -> Result<Tensor> {
    let full = [dims.0, dims.1, dims.2, dims.3];
    let shape = tensor.dims();
    let fits =
        shape.len() <= 4 && shape.iter().rev().zip(full.iter().rev()).all(|(&have, &want)| have == want || have == 1);
    if !fits {
        bail!("[attention_mask] {what} has shape {shape:?}, which does not broadcast to (B, H, T_q, T_kv) = {full:?}")
    }
    if !tensor.device().same_device(device) {
        bail!(
            "[attention_mask] {what} is on {:?}, expected it beside the queries on {:?}",
            tensor.device().location(),
            device.location()
        )
    }
    // Not a reshape, which would write out a view that is expanded.
    let mut padded = readable(tensor)?;
    while padded.rank() < 4 {
        padded = padded.unsqueeze(0)?;
    }
    Ok(padded)
}

/// A view of an empty buffer may begin past its end, where Candle's copies panic; what is empty is made anew.
fn readable(tensor: &Tensor) -> Result<Tensor> {
    if tensor.elem_count() > 0 {
        return Ok(tensor.clone());
    }
    Tensor::zeros(tensor.shape(), tensor.dtype(), tensor.device())
}
