//! What queries attend to: keys and values of their own, those of packed sequences, or others that stand elsewhere.

use candle_core::{Result, Tensor, bail};

use super::{
    AttentionOutput, AttentionStatistics, PackedSequences, Plan, SdpaOptions, StatisticsOptions, plan, plan_varlen,
    scaled_dot_product_attention, scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_with_statistics, scaled_dot_product_attention_with_statistics,
    scaled_dot_product_attention_with_weights,
};
use crate::mask::AttentionMask;

/// A function of the arguments and with the result of
/// [`scaled_dot_product_attention`](crate::scaled_dot_product_attention).
pub type AttentionFunction<'a> = dyn Fn(&Tensor, &Tensor, &Tensor, &AttentionMask, &SdpaOptions) -> Result<Tensor> + 'a;

/// The keys and values of one call, to which queries (B, H, T_q, D) attend.
pub(crate) trait Keys {
    /// The context (B, H, T_q, D_v), in the order of the options.
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Tensor>;

    /// [`attend`](Self::attend), and the weights (B, H, T_q, T_kv).
    fn attend_with_weights(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<AttentionOutput>;

    /// [`attend`](Self::attend), and statistics (B, H, ..) of the weights.
    fn attend_with_statistics(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        wanted: &StatisticsOptions,
    ) -> Result<(Tensor, AttentionStatistics)>;

    /// The path that [`attend`](Self::attend) takes, and why.
    fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan>;

    /// Keeps the keys and values of the call, where there is a cache: the last thing that is done.
    fn commit(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// The keys and values of a call alone, or of packed sequences, for a function of the caller's if there is one.
pub(crate) fn uncached<'a>(
    own: OwnKeys,
    packed: Option<&'a PackedSequences>,
    function: Option<&'a AttentionFunction<'a>>,
) -> Box<dyn Keys + 'a> {
    match (packed, function) {
        (Some(sequences), _) => Box::new(PackedKeys { own, sequences }),
        (None, Some(function)) => Box::new(FunctionKeys { own, function }),
        (None, None) => Box::new(own),
    }
}

/// Keys (B, H_kv, T_kv, D) and values (B, H_kv, T_kv, D_v).
pub(crate) struct OwnKeys {
    pub k: Tensor,
    pub v: Tensor,
}

impl Keys for OwnKeys {
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Tensor> {
        scaled_dot_product_attention(q, &self.k, &self.v, mask, options)
    }

    fn attend_with_weights(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<AttentionOutput> {
        scaled_dot_product_attention_with_weights(q, &self.k, &self.v, mask, options)
    }

    fn attend_with_statistics(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        wanted: &StatisticsOptions,
    ) -> Result<(Tensor, AttentionStatistics)> {
        scaled_dot_product_attention_with_statistics(q, &self.k, &self.v, mask, options, wanted)
    }

    fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        plan(q, &self.k, &self.v, mask, options)
    }
}

/// The same, attended to by a function of the caller's.
struct FunctionKeys<'a> {
    own: OwnKeys,
    function: &'a AttentionFunction<'a>,
}

impl Keys for FunctionKeys<'_> {
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Tensor> {
        let OwnKeys { k, v } = &self.own;
        let context = (self.function)(q, k, v, mask, options)?;
        let (b, h, t_q, _) = q.dims4()?;
        let shape = (b, h, t_q, v.dim(3)?);
        if context.shape() != &shape.into() || context.dtype() != q.dtype() {
            bail!(
                "[attention_function] the context is {:?} {:?}, expected {:?} {shape:?}",
                context.dtype(),
                context.dims(),
                q.dtype()
            )
        }
        Ok(context)
    }

    fn attend_with_weights(&self, _: &Tensor, _: &AttentionMask, _: &SdpaOptions) -> Result<AttentionOutput> {
        bail!("[attention_function] weights are asked for, which a function of the caller's does not give")
    }

    fn attend_with_statistics(
        &self,
        _: &Tensor,
        _: &AttentionMask,
        _: &SdpaOptions,
        _: &StatisticsOptions,
    ) -> Result<(Tensor, AttentionStatistics)> {
        bail!("[attention_function] statistics are asked for, which a function of the caller's does not give")
    }

    fn plan(&self, _: &Tensor, _: &AttentionMask, _: &SdpaOptions) -> Result<Plan> {
        bail!("[attention_function] plans are asked for, which a function of the caller's does not give")
    }
}

/// Keys (1, H_kv, total_kv, D) and values (1, H_kv, total_kv, D_v) of packed sequences.
struct PackedKeys<'a> {
    own: OwnKeys,
    sequences: &'a PackedSequences,
}

impl PackedKeys<'_> {
    /// Queries, keys and values as (total, H, D).
    fn packed(&self, q: &Tensor) -> Result<[Tensor; 3]> {
        let [q, k, v] = [q, &self.own.k, &self.own.v].map(|tensor| tensor.squeeze(0)?.transpose(0, 1));
        Ok([q?, k?, v?])
    }
}

impl Keys for PackedKeys<'_> {
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Tensor> {
        let [q, k, v] = self.packed(q)?;
        scaled_dot_product_attention_varlen(&q, &k, &v, self.sequences, mask, options)?.unsqueeze(0)?.transpose(1, 2)
    }

    fn attend_with_weights(&self, _: &Tensor, _: &AttentionMask, _: &SdpaOptions) -> Result<AttentionOutput> {
        bail!("[multi_head_attention] weights (B, H, T_q, T_kv) are asked for, which packed sequences do not have")
    }

    fn attend_with_statistics(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        wanted: &StatisticsOptions,
    ) -> Result<(Tensor, AttentionStatistics)> {
        let [q, k, v] = self.packed(q)?;
        let (context, found) =
            scaled_dot_product_attention_varlen_with_statistics(&q, &k, &v, self.sequences, mask, options, wanted)?;
        Ok((context.unsqueeze(0)?.transpose(1, 2)?, found.map(|found| found.unsqueeze(0))?))
    }

    fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        let [q, k, v] = self.packed(q)?;
        plan_varlen(&q, &k, &v, self.sequences, mask, options)
    }
}
