//! The compression of tokens to fewer keys.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, ops};

use super::{CompressedKeyAttentionConfig, KeyCompression, rotated_last};
use crate::position::{Positions, RotaryEmbedding};
use candle_attention_modules::base::{Parameter, ParameterReader, accumulation_dtype, part};
use candle_attention_modules::linear::PackedLinear;
use candle_attention_modules::norm::{Norm, QkNormKind};

/// A module that compresses windows of consecutive tokens to one key each: the mean of projections of the tokens, each
/// entry weighted by a softmax over the window of other projections plus a learned number for each place.
///
/// If windows overlap, projections have two halves. A key is the mean of the second halves of its window and the first
/// halves of the window before.
#[derive(Debug, Clone)]
pub(super) struct Compressor {
    rate: usize,
    overlaps: bool,
    /// The width of a key.
    width: usize,
    rope_head_dim: usize,
    /// The projection of the tokens, (halves · width, E).
    values: PackedLinear,
    /// The projection to logits of the weights, (halves · width, E).
    logits: PackedLinear,
    /// The logits by place in a window, (rate, halves · width).
    by_place: Parameter,
    norm: Norm,
}

/// Tokens of a sequence whose projections a compressor has, up to the last one, and the windows that they are in.
#[derive(Debug, Clone, Copy)]
pub(super) struct CompressedTokens {
    /// The number of tokens before a call.
    pub before: usize,
    /// The number of tokens after it.
    pub after: usize,
}

/// The new keys of a call, and the projections of the tokens that later keys are of.
pub(super) struct Compressed {
    /// (new windows, width); `None` if no window ended.
    pub keys: Option<Tensor>,
    /// (tokens, 2 · halves · width); `None` without tokens.
    pub pending: Option<Tensor>,
}

impl Compressor {
    /// Reads `kv_proj`, `gate_proj`, `position_bias` and `kv_norm`, or `wkv`, `wgate`, `ape` and `norm`.
    pub fn load(
        cfg: &CompressedKeyAttentionConfig,
        compression: KeyCompression,
        width: usize,
        source: &ParameterReader,
    ) -> Result<Self> {
        let KeyCompression { rate, overlaps, .. } = compression;
        let columns = if overlaps { 2 * width } else { width };
        let linear = |names: &[&str]| -> Result<PackedLinear> {
            source.linear(source.stored_module(names), (columns, cfg.embed_dim), false, None)?.try_into()
        };
        let place_name = if source.has("ape") { "ape" } else { "position_bias" };
        let norm_name = source.stored_module(&["kv_norm", "norm"]);
        Ok(Self {
            rate,
            overlaps,
            width,
            rope_head_dim: cfg.rope_head_dim,
            values: linear(&["kv_proj", "wkv"])?,
            logits: linear(&["gate_proj", "wgate"])?,
            by_place: source.get((rate, columns), place_name, Init::Const(0.0))?.into(),
            norm: Norm::load(QkNormKind::Rms, cfg.norm_eps, width, false, &source.pp(norm_name))?,
        })
    }

    /// Returns the projections of inputs (B, T, E): (B, T, 2 · halves · width), values and logits.
    pub fn project(&self, xs: &Tensor) -> Result<Tensor> {
        Tensor::cat(&[self.values.forward(xs)?, self.logits.forward(xs)?], 2)
    }

    /// Returns the keys of the windows that end in a call. `projected` has the projections (T, ..) of its tokens,
    /// `pending` the projections of tokens before it that are still needed.
    pub fn compress(
        &self,
        pending: Option<&Tensor>,
        projected: &Tensor,
        tokens: CompressedTokens,
        rotary: &RotaryEmbedding,
    ) -> Result<Compressed> {
        let rows = match pending {
            Some(pending) => Tensor::cat(&[pending, projected], 0)?,
            None => projected.clone(),
        };
        let first = tokens.before / self.rate;
        let end = tokens.after / self.rate;
        // The rows begin with the window before the first new one, if that is needed.
        let kept_before = self.kept_windows(first);
        let first_row = (first - kept_before) * self.rate;
        let next_row = (end - self.kept_windows(end)) * self.rate - first_row;
        let count = tokens.after - first_row;
        let later = if next_row < count { Some(part(&rows, 0, next_row..count)?) } else { None };
        if end == first {
            return Ok(Compressed { keys: None, pending: later });
        }
        let whole = rows.narrow(0, 0, end * self.rate - first_row)?;
        let keys = self.norm.forward(&self.means(&whole, kept_before > 0)?)?;
        let positions = Positions::of_each((first..end).map(|window| window * self.rate), end - first)?;
        let keys = rotated_last(&keys.unsqueeze(0)?.unsqueeze(2)?, self.rope_head_dim, &rotary.at(&positions)?)?;
        Ok(Compressed { keys: Some(keys.squeeze(2)?.squeeze(0)?), pending: later })
    }

    /// Returns the number of windows before number `first` whose tokens it needs.
    fn kept_windows(&self, first: usize) -> usize {
        usize::from(self.overlaps && first > 0)
    }

    /// Returns the weighted means of whole windows (tokens, ..): (windows, width). The first window has no mean of its
    /// own if it is `before` the others.
    fn means(&self, rows: &Tensor, before: bool) -> Result<Tensor> {
        let columns = rows.dim(1)? / 2;
        let windows = rows.dim(0)? / self.rate;
        let rows = rows.contiguous()?.reshape((windows, self.rate, 2 * columns))?;
        let mut values = part(&rows, 2, 0..columns)?;
        let dtype = accumulation_dtype(values.dtype());
        let by_place = self.by_place.tensor()?.to_dtype(dtype)?;
        let mut logits = part(&rows, 2, columns..2 * columns)?.to_dtype(dtype)?.broadcast_add(&by_place)?;
        if self.overlaps {
            values = self.joined_halves(&values, before, 0.0)?;
            logits = self.joined_halves(&logits, before, f64::NEG_INFINITY)?;
        }
        let weights = ops::softmax(&logits, 1)?.to_dtype(values.dtype())?;
        (weights * values)?.sum(1)
    }

    /// Joins the first halves of the window before each window, and its own second halves: from (windows, rate, 2 ·
    /// width) to (windows, 2 · rate, width). The window before the first one of a sequence has a constant.
    fn joined_halves(&self, rows: &Tensor, before: bool, constant: f64) -> Result<Tensor> {
        let windows = rows.dim(0)?;
        let first_halves = part(rows, 2, 0..self.width)?;
        let second_halves = part(rows, 2, self.width..2 * self.width)?;
        let previous = part(&first_halves, 0, 0..windows - 1)?;
        if before {
            return Tensor::cat(&[previous, part(&second_halves, 0, 1..windows)?], 1);
        }
        let none = Tensor::full(constant as f32, (1, self.rate, self.width), rows.device())?.to_dtype(rows.dtype())?;
        let previous = if windows > 1 { Tensor::cat(&[none, previous], 0)? } else { none };
        Tensor::cat(&[previous, second_halves], 1)
    }

    /// Returns a copy for inference.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self {
            values: self.values.freeze()?,
            logits: self.logits.freeze()?,
            by_place: self.by_place.freeze()?,
            norm: self.norm.freeze()?,
            ..self.clone()
        })
    }
}
