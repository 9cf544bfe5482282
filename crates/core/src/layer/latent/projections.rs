//! The projections of a call: to queries, to the rows that a cache stores, and of the attention output.

use candle_core::{Module, Result, Tensor};

use super::additions::gated;
use super::{MultiHeadLatentAttention, QueryCompression};
use crate::position::Rotation;
use candle_attention_modules::base::{part, reshape_linked, transpose_linked};

/// The inputs of the projection to queries.
pub(super) struct CompressedQueries {
    /// (B, T, q_lora_rank) after the norm; the input of the layer, if queries are not compressed.
    pub latents: Tensor,
    /// These latents, followed by the compressed queries before the norm if a gate is fused with the queries.
    pub with_gate: Tensor,
}

/// The queries of a call.
pub(super) struct ProjectedQueries {
    /// (B, H, T, nope + rope), or (B, H, T, rank + rope) if queries absorb the matrix of keys.
    pub q: Tensor,
    /// The projection of a gate that is fused with the queries, (B, T, H · D_v).
    pub fused_gate: Option<Tensor>,
}

/// The rotation and the logarithms of positions of the queries of a call.
#[derive(Clone, Copy)]
pub(super) struct PositionsOfQueries<'a> {
    pub rotation: Option<&'a Rotation>,
    /// The logarithms of the positions.
    pub logs: Option<&'a Tensor>,
}

impl MultiHeadLatentAttention {
    /// Returns the normalised latent and the rotated shared key of each token, (B, 1, T, rank + rope): the rows that a
    /// cache stores.
    pub(super) fn latent_rows(&self, xs: &Tensor, rotation: Option<&Rotation>) -> Result<Tensor> {
        let rank = self.config.kv_lora_rank();
        let rope = self.config.rope_head_dim();
        let compressed = self.down.forward(xs)?;
        let mut latents = self.norm.forward(&part(&compressed, 2, 0..rank)?)?;
        if let Some(scales) = self.config.latent_scales() {
            latents = (latents * scales.keys_and_values)?;
        }
        if rope == 0 {
            return latents.unsqueeze(1);
        }
        let shared_keys = self.additions.normalised(part(&compressed, 2, rank..rank + rope)?.unsqueeze(2)?)?;
        Tensor::cat(&[&latents, &rotated(shared_keys, rotation)?.squeeze(2)?], 2)?.unsqueeze(1)
    }

    /// Compresses the inputs (B, T, E) of queries, if the layer does that.
    pub(super) fn compress_queries(&self, xs: &Tensor) -> Result<CompressedQueries> {
        let Some(QueryCompression { down, norm }) = &self.compression else {
            return Ok(CompressedQueries { latents: xs.clone(), with_gate: xs.clone() });
        };
        let narrow = down.forward(xs)?;
        let mut latents = norm.forward(&narrow)?;
        if let Some(scales) = self.config.latent_scales() {
            latents = (latents * scales.queries)?;
        }
        let with_gate =
            if self.config.has_fused_gate() { Tensor::cat(&[&latents, &narrow], 2)? } else { latents.clone() };
        Ok(CompressedQueries { latents, with_gate })
    }

    /// Returns the queries of compressed queries, or of inputs if these are not compressed, and the projection of a
    /// gate that is fused with them.
    pub(super) fn project_queries(
        &self,
        inputs: &Tensor,
        positions: PositionsOfQueries,
        absorbs: bool,
    ) -> Result<ProjectedQueries> {
        let cfg = &self.config;
        let (b, t, _) = inputs.dims3()?;
        let (h, width) = (cfg.num_heads(), cfg.head_dim());
        let q = self.queries.forward(inputs)?.reshape((b, t, h, cfg.query_row_width()))?;
        let mut fused_gate = None;
        if cfg.has_fused_gate() {
            let gate = part(&q, 3, width..width + cfg.value_head_dim())?;
            fused_gate = Some(gate.contiguous()?.reshape((b, t, h * cfg.value_head_dim()))?);
        }
        let nope = part(&q, 3, 0..cfg.nope_head_dim())?;
        let mut heads = if absorbs { self.absorb(&nope)? } else { nope.contiguous()? };
        if cfg.rope_head_dim() > 0 {
            let rope = rotated(part(&q, 3, cfg.nope_head_dim()..width)?, positions.rotation)?;
            heads = Tensor::cat(&[heads, rope], 3)?;
        }
        if let (Some(temperature), Some(logs)) = (&self.additions.temperature, positions.logs) {
            heads = temperature.scaled(&heads, logs)?;
        }
        Ok(ProjectedQueries { q: heads.transpose(1, 2)?, fused_gate })
    }

    /// Returns queries (B, T, H, nope + rope) as (B, T, H, rank + rope), which absorb the matrix of keys.
    pub(super) fn absorbing_queries(&self, queries: &Tensor) -> Result<Tensor> {
        let cfg = &self.config;
        let nope = self.absorb(&part(queries, 3, 0..cfg.nope_head_dim())?)?;
        if cfg.rope_head_dim() == 0 {
            return Ok(nope);
        }
        Tensor::cat(&[nope, part(queries, 3, cfg.nope_head_dim()..cfg.head_dim())?.contiguous()?], 3)
    }

    /// Projects the attention output of a call to the layer's output (B, T, E), with the layer's gate, whose projection
    /// is (B, T, H · D_v) or (B, T, H).
    pub(super) fn project_output(
        &self,
        output: &Tensor,
        absorbs: bool,
        gate: Option<&Tensor>,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let heads = transpose_linked(output, 1, 2)?;
        let mut values = if absorbs { self.values_of(&heads)? } else { heads };
        if let (Some(gate), Some(projected)) = (self.config.output_gate(), gate) {
            values = gated(&values, gate, projected)?;
        }
        let (b, t, h, d_v) = values.dims4()?;
        self.out.product(&reshape_linked(&values, (b, t, h * d_v))?, 0..self.out.out_dim(), residual)
    }
}

/// Returns heads (B, T, heads, rope) after their rotation, if the layer rotates, as a contiguous tensor.
fn rotated(xs: Tensor, rotation: Option<&Rotation>) -> Result<Tensor> {
    match rotation {
        Some(rotation) => rotation.apply(&xs),
        None => xs.contiguous(),
    }
}
