//! The score modifiers of a call, and the units of its scores.

use super::dropout::Dropout;
use super::relative_bias::RelativeBias;
use crate::number::Strided;

/// ALiBi: `-slope · |position - key|` is added to a score.
#[derive(Debug, Clone, Copy)]
pub struct Alibi<'a> {
    /// A slope for each query head, (H,).
    pub slopes: &'a [f32],
    /// The key position of each query, (B, T_q).
    pub positions: &'a [f32],
}

/// The score modifiers before the softmax, applied in the order of the fields, with the sinks and the dropout.
#[derive(Debug, Clone, Copy)]
pub struct ScoreOptions<'a> {
    /// The factor of the product of a query and a key, usually 1 / √D.
    pub scale: f64,
    /// `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// ALiBi, added to the scores.
    pub alibi: Option<Alibi<'a>>,
    /// A bias for each distance between a query and a key, added to the scores.
    pub relative_bias: Option<RelativeBias<'a>>,
    /// A bias for each score, added to it: (B, H, T_q, T_kv).
    pub bias: Option<Strided<'a, f32, 4>>,
    /// A boolean mask: 0 masks a key for a query, (B, H, T_q, T_kv).
    pub keep: Option<Strided<'a, u8, 4>>,
    /// Attention sinks: a logit for each query head that is added to the softmax's sum and has no value, (H,).
    pub sinks: Option<&'a [f32]>,
    /// Dropout of the weights after the softmax.
    pub dropout: Option<Dropout<'a>>,
}

impl Default for ScoreOptions<'_> {
    /// Returns options that do not change scores.
    fn default() -> Self {
        Self {
            scale: 1.0,
            softcap: None,
            alibi: None,
            relative_bias: None,
            bias: None,
            keep: None,
            sinks: None,
            dropout: None,
        }
    }
}

/// The softmax statistics of a query, from which its weights can be computed again: the log-sum-exp in two parts, since
/// one f32 would lose the sum next to a large score.
#[derive(Debug, Clone, Copy, Default)]
pub struct SoftmaxStats {
    /// The largest exponent, a sink's included, as a power of two; of 16 where the call has a bias.
    pub(super) max: f32,
    /// The sum of all weights, a sink's included, relative to the largest.
    pub(super) sum: f32,
}

/// The factors from the product of queries and keys to the exponential, which takes powers of two.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScoreUnits {
    /// The factor of the queries.
    pub query: f32,
    /// The factor of the products before softcap and biases.
    pub product: f32,
    /// The factor from there to exponents; above 0, so that the largest stays the largest.
    pub exponent: f32,
    /// The unit of exponents, by [`ScoreOptions::exponent_unit`].
    pub exponent_unit: f32,
}

impl ScoreOptions<'_> {
    /// Returns whether scores are modified by more than a factor between the product and the softmax.
    pub(super) fn modify_scores(&self) -> bool {
        self.softcap.is_some() || self.alibi.is_some() || self.has_bias()
    }

    /// Returns whether a bias of any size is added to scores.
    fn has_bias(&self) -> bool {
        self.relative_bias.is_some() || self.bias.is_some()
    }

    /// Returns the unit of exponents and of running maxima, in powers of two. Masks contain biases down to the least
    /// f32, which times log2 e is -inf. With a bias the unit is 4, of which no score has too many; a power of two
    /// changes no other digit.
    pub(super) fn exponent_unit(&self) -> f32 {
        if self.has_bias() { 4.0 } else { 1.0 }
    }

    /// Splits the scale into a power of two and the rest, between 1 and 2. The power changes no digit of a query, and
    /// the rest multiplies the products, so that its rounding is not added to them. `keeps_bf16` says that queries stay
    /// bf16, where a small one would lose digits to a power too.
    pub(super) fn units(&self, keeps_bf16: bool) -> ScoreUnits {
        use std::f64::consts::LOG2_E;
        let magnitude = self.scale.abs();
        let sign = 1f64.copysign(self.scale);
        let query: f64;
        let rest: f64;
        if magnitude == 0.0 {
            query = 0.0;
            rest = 1.0;
        } else if keeps_bf16 {
            query = sign;
            rest = magnitude;
        } else {
            let power = magnitude.log2().floor().clamp(-126.0, 127.0).exp2();
            query = sign * power;
            rest = magnitude / power;
        }
        let query = query as f32;
        let whole = (rest * LOG2_E) as f32;
        let exponent_unit = self.exponent_unit();
        if self.modify_scores() || !whole.is_normal() {
            let exponent = LOG2_E as f32 / exponent_unit;
            return ScoreUnits { query, product: rest as f32, exponent, exponent_unit };
        }
        ScoreUnits { query, product: 1.0, exponent: whole, exponent_unit }
    }
}
