//! From inputs to heads: projected, normalised and rotated.

use candle_core::{Result, Tensor};

use super::checks::Inputs;
use super::input::{Given, KeysFrom};
use super::positions::CallPositions;
use super::{AttentionInput, MultiHeadAttention};
use crate::linear::Queries;
use crate::norm::{Norm, SumFunction};
use crate::position::{Positions, Rotation};

/// Projected inputs as heads.
pub(super) struct Projected {
    /// (B, H, T_q, D).
    pub q: Tensor,
    /// (B, H_kv, T_kv, D) and (B, H_kv, T_kv, D_v), if the call does not take them from an earlier layer's cache.
    pub kv: Option<[Tensor; 2]>,
    /// (B, T_q, H·D_v) or (B, T_q, H).
    pub gate: Option<Tensor>,
}

impl MultiHeadAttention {
    /// Queries, keys and values, normalised and rotated.
    pub(super) fn project(
        &self,
        input: &AttentionInput,
        inputs: &Inputs,
        positions: Option<&CallPositions>,
    ) -> Result<Projected> {
        let at = |positions: Option<&Positions>| {
            positions.zip(self.rotary.as_ref()).map(|(positions, rotary)| rotary.at(positions)).transpose()
        };
        let on_axes = positions.and_then(|positions| positions.axes.as_ref()).zip(self.rotary.as_ref());
        let at_queries = match on_axes {
            Some((axes, rotary)) => Some(rotary.on_axes(axes)),
            None => at(positions.map(|positions| &positions.queries))?,
        };
        let at_keys = at(positions.and_then(|positions| positions.keys.as_ref()))?;
        let sum = input.sum;
        let (Queries { q, gate }, kv) = match (&inputs.key_value, &input.keys) {
            (Some([keys, values]), _) => {
                let (own, kv) = self.projections.query_key_value(&inputs.queries, keys, values)?;
                let rotation = at_keys.as_ref().or(at_queries.as_ref());
                (own, kv.map(|kv| self.key_value_heads(kv, rotation, sum)).transpose()?)
            }
            (None, KeysFrom::Memory(memory)) => {
                (self.projections.query(&inputs.queries)?, Some([memory.k.clone(), memory.v.clone()]))
            }
            (None, _) => (self.projections.query(&inputs.queries)?, None),
        };
        let norm = self.qk_norm.as_ref().map(|norms| &norms.q);
        let q =
            self.heads(self.normed_projection(q, norm, sum)?, self.config.num_heads(), norm, at_queries.as_ref())?;
        let factors = match (self.config.query_scaling(), positions) {
            (Some(scaling), Some(at)) => scaling.factors(&at.queries, q.dtype(), q.device())?,
            _ => None,
        };
        let q = match factors {
            // In the order of q's memory, (B, T, H, D).
            Some(factors) => q.transpose(1, 2)?.broadcast_mul(&factors.transpose(1, 2)?)?.transpose(1, 2)?,
            None => q,
        };
        Ok(Projected { q, kv, gate })
    }

    /// Projected keys (B, T_kv, H_kv·D) and values (B, T_kv, H_kv·D_v), followed by those that the layer
    /// appends, as heads.
    pub(super) fn key_value_heads(
        &self,
        kv: [Tensor; 2],
        rotation: Option<&Rotation>,
        sum: Option<Given<SumFunction>>,
    ) -> Result<[Tensor; 2]> {
        let [k, v] = kv;
        let norm = self.qk_norm.as_ref().and_then(|norms| norms.k.as_ref());
        let (mut k, mut v) = (self.normed_projection(k, norm, sum)?, self.normed_projection(v, None, None)?);
        if self.config.appended_keys() > 0 {
            let (learned_k, learned_v) = self.bias_kv.as_ref().map_or((None, None), |(k, v)| (Some(k), Some(v)));
            (k, v) = (self.append_rows(k, learned_k)?, self.append_rows(v, learned_v)?);
        }
        let h_kv = self.config.num_kv_heads();
        let v = split_heads(&v, h_kv)?;
        let v = self.value_norm.as_ref().map_or_else(|| Ok(v.clone()), |norm| norm.forward(&v))?;
        Ok([self.heads(k, h_kv, norm, rotation)?, v.transpose(1, 2)?])
    }

    /// (B, T, width) and the rows that the layer appends to each sequence: the learned one, then that of zeros.
    fn append_rows(&self, xs: Tensor, learned: Option<&Tensor>) -> Result<Tensor> {
        let (b, _, width) = xs.dims3()?;
        let zeros = match self.config.add_zero_attn() {
            true => Some(Tensor::zeros((b, 1, width), xs.dtype(), xs.device())?),
            false => None,
        };
        let learned = learned.map(|row| row.broadcast_as((b, 1, width))?.contiguous()).transpose()?;
        Tensor::cat(&[Some(xs), learned, zeros].into_iter().flatten().collect::<Vec<_>>(), 1)
    }

    /// What happens to a projection before it is split into heads.
    fn normed_projection(
        &self,
        mut xs: Tensor,
        norm: Option<&Norm>,
        sum: Option<Given<SumFunction>>,
    ) -> Result<Tensor> {
        if let Some(norm) = norm.filter(|_| self.qk_norm.as_ref().is_some_and(|norms| norms.of_projections())) {
            xs = norm.forward_over(&xs, sum.map(|Given(sum)| sum))?;
        }
        match self.config.clip_qkv() {
            Some(clip) => xs.clamp(-clip, clip),
            None => Ok(xs),
        }
    }

    /// (B, T, heads · width) as heads (B, heads, T, width), a view of (B, T, ..), normalised and rotated.
    fn heads(&self, xs: Tensor, heads: usize, norm: Option<&Norm>, rotation: Option<&Rotation>) -> Result<Tensor> {
        let mut xs = split_heads(&xs, heads)?;
        let norm = norm.filter(|_| self.qk_norm.as_ref().is_some_and(|norms| !norms.of_projections()));
        if let Some(norm) = norm.filter(|_| !self.config.norm_after_rope()) {
            xs = norm.forward(&xs)?;
        }
        if let Some(rotation) = rotation {
            xs = rotation.apply(&xs)?;
        }
        if let Some(norm) = norm.filter(|_| self.config.norm_after_rope()) {
            xs = norm.forward(&xs)?;
        }
        xs.transpose(1, 2)
    }
}

/// (B, T, heads · width) to (B, T, heads, width): a view, also of columns of a wider product.
pub(super) fn split_heads(xs: &Tensor, heads: usize) -> Result<Tensor> {
    let (b, t, columns) = xs.dims3()?;
    let split = [b, t, heads, columns / heads];
    if !xs.is_contiguous() {
        let view = xs.unfold(2, split[3], split[3])?;
        // Candle counts the heads in f32, which holds no more than 2^24 columns.
        if view.dims() == split {
            return Ok(view);
        }
    }
    xs.reshape(&split)
}
