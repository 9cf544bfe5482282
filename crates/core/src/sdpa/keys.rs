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

/// What is wanted beside the context.
#[derive(Clone, Copy)]
pub(crate) enum Beside<'a> {
    Nothing,
    Weights,
    Statistics(&'a StatisticsOptions),
}

/// The context (B, H, T_q, D_v), in the order of the options, and what was wanted beside it.
pub(crate) struct Attended {
    pub context: Tensor,
    /// (B, H, T_q, T_kv).
    pub weights: Option<Tensor>,
    /// (B, H, ..).
    pub statistics: Option<AttentionStatistics>,
}

impl Attended {
    pub fn context(context: Tensor) -> Self {
        Self { context, weights: None, statistics: None }
    }

    pub fn with_statistics((context, statistics): (Tensor, AttentionStatistics)) -> Self {
        Self { statistics: Some(statistics), ..Self::context(context) }
    }
}

/// Attention to keys (B, H_kv, T_kv, D) and values (B, H_kv, T_kv, D_v).
pub(crate) fn attend(
    [q, k, v]: [&Tensor; 3],
    mask: &AttentionMask,
    options: &SdpaOptions,
    beside: Beside,
) -> Result<Attended> {
    Ok(match beside {
        Beside::Nothing => Attended::context(scaled_dot_product_attention(q, k, v, mask, options)?),
        Beside::Weights => {
            let AttentionOutput { context, weights } =
                scaled_dot_product_attention_with_weights(q, k, v, mask, options)?;
            Attended { weights: Some(weights), ..Attended::context(context) }
        }
        Beside::Statistics(wanted) => {
            Attended::with_statistics(scaled_dot_product_attention_with_statistics(q, k, v, mask, options, wanted)?)
        }
    })
}

/// The keys and values of one call, to which queries (B, H, T_q, D) attend.
pub(crate) trait Keys {
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, beside: Beside) -> Result<Attended>;

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
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, beside: Beside) -> Result<Attended> {
        attend([q, &self.k, &self.v], mask, options, beside)
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
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, beside: Beside) -> Result<Attended> {
        let missing = match beside {
            Beside::Nothing => None,
            Beside::Weights => Some("weights"),
            Beside::Statistics(_) => Some("statistics"),
        };
        if let Some(missing) = missing {
            bail!("[attention_function] {missing} are asked for, which a function of the caller's does not give")
        }
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
        Ok(Attended::context(context))
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
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, beside: Beside) -> Result<Attended> {
        let [q, k, v] = &self.packed(q)?;
        let attended = match beside {
            Beside::Nothing => {
                Attended::context(scaled_dot_product_attention_varlen(q, k, v, self.sequences, mask, options)?)
            }
            Beside::Weights => bail!(
                "[multi_head_attention] weights (B, H, T_q, T_kv) are asked for, which packed sequences do not have"
            ),
            Beside::Statistics(wanted) => Attended::with_statistics(
                scaled_dot_product_attention_varlen_with_statistics(q, k, v, self.sequences, mask, options, wanted)?,
            ),
        };
        Ok(Attended {
            context: attended.context.unsqueeze(0)?.transpose(1, 2)?,
            statistics: attended.statistics.map(|found| found.map(|found| found.unsqueeze(0))).transpose()?,
            ..attended
        })
    }

    fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        let [q, k, v] = self.packed(q)?;
        plan_varlen(&q, &k, &v, self.sequences, mask, options)
    }
}
