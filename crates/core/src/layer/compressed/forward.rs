//! The computation of one call of a layer.

use candle_core::{Module, Result, Tensor, bail};

use super::input::{CheckedCompressedInput, CompressedKeyInput};
use super::{CompressedKeyAttention, LayerCompression, OP, rotated_last};
use crate::cache::NewTokens;
use crate::layer::indexer::IndexQueries;
use crate::position::Rotation;
use crate::sdpa::{OutputLayout, SdpaOptions};
use candle_attention_modules::base::{part, reshape_linked};

/// The projections of the tokens of a call.
pub(super) struct ProjectedTokens {
    /// (B, T, H, D).
    pub q: Tensor,
    /// (B, T, D).
    pub keys: Tensor,
    /// The projections for the compressor, (B, T, ..).
    pub compressed: Option<Tensor>,
    pub index: Option<ProjectedIndex>,
}

/// The projections of the tokens of a call for an indexer.
pub(super) struct ProjectedIndex {
    pub queries: IndexQueries,
    /// The projections for its compressor, (B, T, ..).
    pub compressed: Tensor,
}

impl ProjectedTokens {
    /// Returns the projections of the tokens of one sequence, (1, n, ..).
    fn of_sequence(&self, tokens: &NewTokens, sequence: usize) -> Result<Self> {
        let own = tokens.tokens[sequence].clone();
        let of_tokens = |xs: &Tensor| part(&part(xs, 0, sequence..sequence + 1)?, 1, own.clone());
        let mut index = None;
        if let Some(ProjectedIndex { queries, compressed }) = &self.index {
            index = Some(ProjectedIndex { queries: queries.select(of_tokens)?, compressed: of_tokens(compressed)? });
        }
        Ok(Self {
            q: of_tokens(&self.q)?,
            keys: of_tokens(&self.keys)?,
            compressed: self.compressed.as_ref().map(of_tokens).transpose()?,
            index,
        })
    }
}

impl CompressedKeyAttention {
    pub(super) fn run(&self, input: CompressedKeyInput) -> Result<Tensor> {
        let CheckedCompressedInput { xs, tokens } = input.check(&self.config, self.dtype, self.keys.device())?;
        if xs.elem_count() == 0 {
            return input.xs.zeros_like();
        }
        let rotation = self.rotary.at(&tokens.positions()?)?;
        let projected = self.project(&xs, &rotation)?;
        if input.cache.is_some() && projected.keys.track_op() {
            bail!(
                "[{OP}] keys are tracked for gradients, which a cache would lose; expected a layer after `freeze()` \
                 and an input `xs.detach()`"
            )
        }
        let options = SdpaOptions::default()
            .with_dropout(self.config.dropout, input.train)
            .with_backend(input.backend)
            .with_sinks(&self.sinks.tensor()?)
            .with_output_layout(OutputLayout::Bthd);
        let (b, t, h, d) = projected.q.dims4()?;
        let mut states = Vec::with_capacity(b);
        let mut outputs = Vec::with_capacity(b);
        for sequence in 0..b {
            let mut state = match &input.cache {
                Some(cache) => cache.sequences.get(sequence).cloned().unwrap_or_default(),
                None => Default::default(),
            };
            let own = &tokens.tokens[sequence];
            if own.is_empty() {
                outputs.push(Tensor::zeros((1, t, h, d), projected.q.dtype(), projected.q.device())?);
            } else {
                let call = projected.of_sequence(&tokens, sequence)?;
                let attended = self.attend(&call, &mut state, input.cache.is_some(), &options)?;
                outputs.push(attended.pad_with_zeros(1, own.start, t - own.end)?);
            }
            states.push(state);
        }
        let output = self.project_output(&Tensor::cat(&outputs, 0)?, &rotation)?;
        if let Some(cache) = input.cache {
            cache.sequences = states;
        }
        if input.xs.rank() == 2 { output.squeeze(0) } else { Ok(output) }
    }

    /// Projects inputs (B, T, E).
    fn project(&self, xs: &Tensor, rotation: &Rotation) -> Result<ProjectedTokens> {
        let cfg = &self.config;
        let (b, t, _) = xs.dims3()?;
        let narrow = self.query_norm.forward(&self.query_compression.forward(xs)?)?;
        let q = self.queries.forward(&narrow)?.reshape((b, t, cfg.num_heads, cfg.head_dim))?;
        let q = rotated_last(&self.head_norm.forward(&q)?, cfg.rope_head_dim, rotation)?;
        let keys = self.key_norm.forward(&self.keys.forward(xs)?)?.unsqueeze(2)?;
        let keys = rotated_last(&keys, cfg.rope_head_dim, rotation)?.squeeze(2)?;
        let mut projected = ProjectedTokens { q, keys, compressed: None, index: None };
        if let Some(LayerCompression { compressor, indexer, .. }) = &self.compression {
            projected.compressed = Some(compressor.project(xs)?);
            if let Some(indexer) = indexer {
                projected.index = Some(ProjectedIndex {
                    queries: indexer.queries(xs, &narrow, rotation)?,
                    compressed: indexer.compressor.project(&xs.detach())?.detach(),
                });
            }
        }
        Ok(projected)
    }

    /// Projects the attention output (B, T, H, D), whose rotated entries rotate back first, to (B, T, E).
    fn project_output(&self, heads: &Tensor, rotation: &Rotation) -> Result<Tensor> {
        let cfg = &self.config;
        let (b, t, h, d) = heads.dims4()?;
        let heads = rotated_last(heads, cfg.rope_head_dim, &rotation.inverse())?;
        let width = h * d / cfg.output_groups;
        let in_groups = reshape_linked(&heads, (b, t, h * d))?;
        let mut groups = Vec::with_capacity(cfg.output_groups);
        for group in 0..cfg.output_groups {
            let own = part(&in_groups, 2, group * width..(group + 1) * width)?.contiguous()?;
            let rows = group * cfg.output_rank..(group + 1) * cfg.output_rank;
            groups.push(self.groups.product(&own, rows, None)?);
        }
        self.out.forward(&Tensor::cat(&groups, 2)?)
    }
}
