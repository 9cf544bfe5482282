//! The score modifiers of a call, and the units of its scores.

use super::dropout::TileDropout;
use super::problem::{CpuCall, KeysOfQueries};
use super::relative_bias::TileRelativeBias;
use crate::error::{Error, check_len};
use crate::number::Strided;
use candle_attention_call::{AttentionCall, AttentionDims, ScoreFormat, ScoreModifiers};

/// ALiBi: `-slope · |position - key|` is added to a score.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileAlibi<'a> {
    /// A slope for each query head, (H,).
    pub slopes: &'a [f32],
    /// The key position of each query, (B, T_q).
    pub positions: &'a [f32],
}

/// The score modifiers of a checked call, in the types in which tiles read them.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileModifiers<'a> {
    pub scale: f64,
    pub softcap: Option<f32>,
    pub alibi: Option<TileAlibi<'a>>,
    pub relative_bias: Option<TileRelativeBias<'a>>,
    /// (B, H, T_q, T_kv).
    pub bias: Option<Strided<'a, f32, 4>>,
    /// (B, H, T_q, T_kv).
    pub boolean_mask: Option<Strided<'a, u8, 4>>,
    /// (H,).
    pub sinks: Option<&'a [f32]>,
    pub dropout: Option<TileDropout<'a>>,
}

/// The softmax statistics of a query, from which its weights can be computed again: the log-sum-exp in two parts, since
/// one f32 would lose the sum next to a large score.
#[derive(Debug, Clone, Copy, Default)]
pub struct SoftmaxStats {
    /// The largest exponent, a sink's included, in the unit of [`TileModifiers::exponent_unit`].
    pub(super) max: f32,
    /// The sum of all weights, a sink's included, relative to the largest.
    pub(super) sum: f32,
}

/// The factors by which the product of a query and a key becomes an exponent of 2, in the order in which they are
/// applied.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScoreUnits {
    /// The factor of the queries, which are multiplied by it when they are packed.
    pub query: f32,
    /// The factor of the products before softcap and biases.
    pub product: f32,
    /// The factor of the scores after softcap and biases; above 0, so that the largest score has the largest exponent.
    pub exponent: f32,
    /// The unit of exponents, by [`TileModifiers::exponent_unit`].
    pub exponent_unit: f32,
}

impl<'a> TileModifiers<'a> {
    /// Returns the modifiers of a call, after checking that every index of the call is within its slice.
    pub(super) fn new(call: &CpuCall<'a>) -> Result<Self, Error> {
        let AttentionCall { dims, keys, scores, .. } = call;
        let KeysOfQueries { ranges, positions, diagonals } = *keys;
        let ScoreModifiers { scale, softcap, alibi_slopes, relative_bias, bias, boolean_mask, sinks, dropout } = scores;
        let AttentionDims { b, h, t_q, t_kv, .. } = *dims;
        scores.check_numbers(ScoreFormat::F32).map_err(Error::Range)?;
        let mut modifiers = Self {
            scale: *scale,
            softcap: softcap.map(|softcap| softcap as f32),
            alibi: None,
            relative_bias: None,
            bias: None,
            boolean_mask: None,
            sinks: None,
            dropout: None,
        };
        if let Some(slopes) = alibi_slopes {
            let slopes = slopes.typed_list("slopes")?;
            check_len("slopes", slopes.len(), h)?;
            check_len("positions", positions.len(), b * t_q)?;
            modifiers.alibi = Some(TileAlibi { slopes, positions });
        }
        if let Some(biases) = relative_bias {
            let rows = biases.head_rows("relative bias")?;
            let of_tiles = TileRelativeBias { rows, len: diagonals.len, origins: diagonals.origins };
            of_tiles.check(dims, ranges)?;
            modifiers.relative_bias = Some(of_tiles);
        }
        if let Some(bias) = bias {
            let bias = bias.entries("bias")?;
            bias.check("bias", [b, h, t_q, t_kv], 1)?;
            modifiers.bias = Some(bias);
        }
        if let Some(mask) = boolean_mask {
            let mask = mask.entries("boolean_mask")?;
            mask.check("boolean_mask", [b, h, t_q, t_kv], 1)?;
            modifiers.boolean_mask = Some(mask);
        }
        if let Some(sinks) = sinks {
            let sinks = sinks.typed_list("sinks")?;
            check_len("sinks", sinks.len(), h)?;
            modifiers.sinks = Some(sinks);
        }
        if let Some(dropout) = dropout {
            modifiers.dropout = Some(TileDropout::new(dropout, dims)?);
        }
        Ok(modifiers)
    }
}

impl TileModifiers<'_> {
    /// Returns whether scores are modified by more than a factor between the product and the softmax.
    pub(super) fn modifies_scores(&self) -> bool {
        let Self { scale: _, softcap, alibi, relative_bias, bias, boolean_mask: _, sinks: _, dropout: _ } = self;
        softcap.is_some() || alibi.is_some() || relative_bias.is_some() || bias.is_some()
    }

    /// Returns whether the derivative of a score with respect to its product depends on the score, as with a softcap,
    /// instead of being the scale.
    pub(super) fn has_product_derivative(&self) -> bool {
        let Self { scale: _, softcap, alibi: _, relative_bias: _, bias: _, boolean_mask: _, sinks: _, dropout: _ } =
            self;
        softcap.is_some()
    }

    /// Returns whether a bias of any size is added to scores.
    fn has_bias(&self) -> bool {
        self.relative_bias.is_some() || self.bias.is_some()
    }

    /// Returns the unit of exponents and of running maxima: an exponent of x is a weight of 2^(x · unit). A bias
    /// may be as low as the least f32, which times log2 e would be -inf. With a bias the unit is therefore 4, in which
    /// the least f32 stays finite. A power of two changes no digit of an exponent.
    pub(super) fn exponent_unit(&self) -> f32 {
        if self.has_bias() { 4.0 } else { 1.0 }
    }

    /// Splits the scale into a power of two and the rest, between 1 and 2. The power changes no digit of a query, and
    /// the rest multiplies the products, so that its rounding is not added to them. With
    /// `queries_are_bf16`, queries stay in bf16 and take the sign alone: a power could make a small query lose digits.
    pub(super) fn units(&self, queries_are_bf16: bool) -> ScoreUnits {
        use std::f64::consts::LOG2_E;
        let magnitude = self.scale.abs();
        let sign = 1f64.copysign(self.scale);
        let query_factor: f64;
        let rest: f64;
        if magnitude == 0.0 {
            query_factor = 0.0;
            rest = 1.0;
        } else if queries_are_bf16 {
            query_factor = sign;
            rest = magnitude;
        } else {
            let power = magnitude.log2().floor().clamp(-126.0, 127.0).exp2();
            query_factor = sign * power;
            rest = magnitude / power;
        }
        let query = query_factor as f32;
        let exponent_unit = self.exponent_unit();
        // The rest and log2 e as one factor, if nothing happens between them.
        let rest_in_exponent = (rest * LOG2_E) as f32;
        if self.modifies_scores() || !rest_in_exponent.is_normal() {
            let exponent = LOG2_E as f32 / exponent_unit;
            return ScoreUnits { query, product: rest as f32, exponent, exponent_unit };
        }
        ScoreUnits { query, product: 1.0, exponent: rest_in_exponent, exponent_unit }
    }
}
