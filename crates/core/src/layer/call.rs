//! A call of a layer when its queries, keys and values are ready.

use candle_core::{Result, Tensor};

use super::LayerOutput;
use crate::mask::AttentionMask;
use crate::sdpa::{AttentionOutput, AttentionStatistics, Keys, Plan, SdpaOptions, StatisticsOptions};

/// The arguments of attention that a layer makes of an input.
pub(super) struct AttentionCall<'a> {
    /// (B, H, T_q, D), a view of (B, T_q, ..).
    pub q: Tensor,
    pub keys: Box<dyn Keys + 'a>,
    pub mask: AttentionMask,
    pub options: SdpaOptions,
    /// Whether the input had a batch dimension.
    pub batched: bool,
    /// What is added to the output, (B, T_q, out_dim).
    pub residual: Option<Tensor>,
    /// The projection of the gate of the context, (B, T_q, H·D_v) or (B, T_q, H).
    pub gate: Option<Tensor>,
}

impl AttentionCall<'_> {
    /// Attends, projects the context (B, H, T_q, D_v) by `output` to (B, T_q, out_dim), and keeps the keys and values
    /// where there is a cache.
    pub fn finish(self, output: impl FnOnce(&Tensor, &Self) -> Result<Tensor>) -> Result<Tensor> {
        let context = self.keys.attend(&self.q, &self.mask, &self.options)?;
        let ys = self.in_rank_of_input(output(&context, &self)?)?;
        self.keys.commit()?;
        Ok(ys)
    }

    /// [`finish`](Self::finish), and the weights (B, H, T_q, T_kv).
    pub fn finish_with_weights(self, output: impl FnOnce(&Tensor, &Self) -> Result<Tensor>) -> Result<LayerOutput> {
        let attended = self.keys.attend_with_weights(&self.q, &self.mask, &self.options)?;
        let AttentionOutput { context, weights } = attended;
        let output = self.in_rank_of_input(output(&context, &self)?)?;
        let weights = self.in_rank_of_input(weights)?;
        self.keys.commit()?;
        Ok(LayerOutput { output, weights })
    }

    /// [`finish`](Self::finish), and statistics of the weights.
    pub fn finish_with_statistics(
        self,
        wanted: &StatisticsOptions,
        output: impl FnOnce(&Tensor, &Self) -> Result<Tensor>,
    ) -> Result<(Tensor, AttentionStatistics)> {
        let (context, found) = self.keys.attend_with_statistics(&self.q, &self.mask, &self.options, wanted)?;
        let output = self.in_rank_of_input(output(&context, &self)?)?;
        let found = found.map(|found| self.in_rank_of_input(found))?;
        self.keys.commit()?;
        Ok((output, found))
    }

    /// The path that attention takes, and why.
    pub fn plan(&self) -> Result<Plan> {
        self.keys.plan(&self.q, &self.mask, &self.options)
    }

    fn in_rank_of_input(&self, ys: Tensor) -> Result<Tensor> {
        if self.batched { Ok(ys) } else { ys.squeeze(0) }
    }
}
