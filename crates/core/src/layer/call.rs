//! A call of a layer when its queries, keys and values are ready.

use candle_core::{Result, Tensor, bail};

use super::LayerOutput;
use crate::mask::AttentionMask;
use crate::sdpa::{Attended, AttentionStatistics, Beside, Keys, Plan, SdpaOptions, StatisticsOptions};

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
    /// where there is a cache. The output stands in the place of the context.
    fn finish_beside(self, beside: Beside, output: impl FnOnce(&Tensor, &Self) -> Result<Tensor>) -> Result<Attended> {
        let Attended { context, weights, statistics } = self.keys.attend(&self.q, &self.mask, &self.options, beside)?;
        let in_rank = |tensor| self.in_rank_of_input(tensor);
        let finished = Attended {
            context: in_rank(output(&context, &self)?)?,
            weights: weights.map(in_rank).transpose()?,
            statistics: statistics.map(|found| found.map(in_rank)).transpose()?,
        };
        self.keys.commit()?;
        Ok(finished)
    }

    /// The output (B, T_q, out_dim).
    pub fn finish(self, output: impl FnOnce(&Tensor, &Self) -> Result<Tensor>) -> Result<Tensor> {
        Ok(self.finish_beside(Beside::Nothing, output)?.context)
    }

    /// [`finish`](Self::finish), and the weights (B, H, T_q, T_kv).
    pub fn finish_with_weights(self, output: impl FnOnce(&Tensor, &Self) -> Result<Tensor>) -> Result<LayerOutput> {
        match self.finish_beside(Beside::Weights, output)? {
            Attended { context: output, weights: Some(weights), .. } => Ok(LayerOutput { output, weights }),
            _ => bail!("[multi_head_attention] attention gave no weights"),
        }
    }

    /// [`finish`](Self::finish), and statistics of the weights.
    pub fn finish_with_statistics(
        self,
        wanted: &StatisticsOptions,
        output: impl FnOnce(&Tensor, &Self) -> Result<Tensor>,
    ) -> Result<(Tensor, AttentionStatistics)> {
        match self.finish_beside(Beside::Statistics(wanted), output)? {
            Attended { context: output, statistics: Some(found), .. } => Ok((output, found)),
            _ => bail!("[multi_head_attention] attention gave no statistics"),
        }
    }

    /// The path that attention takes, and why.
    pub fn plan(&self) -> Result<Plan> {
        self.keys.plan(&self.q, &self.mask, &self.options)
    }

    fn in_rank_of_input(&self, ys: Tensor) -> Result<Tensor> {
        if self.batched { Ok(ys) } else { ys.squeeze(0) }
    }
}
