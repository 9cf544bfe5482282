//! A call of a layer when its queries, keys and values are ready.

use candle_core::{Result, Tensor, bail};

use super::by_heads::ByHeads;
use super::input::GivenFunction;
use super::packed_bias::PackedBias;
use crate::cache::CachedCall;
use crate::mask::AttentionMask;
use crate::sdpa::{
    AttentionOutput, PackedSequences, Plan, SdpaOptions, plan, plan_varlen, scaled_dot_product_attention,
    scaled_dot_product_attention_varlen, scaled_dot_product_attention_with_weights,
};

/// The arguments of [`scaled_dot_product_attention`] that a layer makes of an input.
pub(super) struct AttentionCall<'a> {
    /// (B, H, T_q, D); like k and v a view of (B, T, ..).
    pub q: Tensor,
    pub keys: CallKeys<'a>,
    pub mask: AttentionMask,
    pub options: SdpaOptions,
    /// Whether the input had a batch dimension.
    pub batched: bool,
    /// What is added to the output, (B, T_q, out_dim).
    pub residual: Option<Tensor>,
    /// The projection of the gate of the context, (B, T_q, H·D_v) or (B, T_q, H).
    pub gate: Option<Tensor>,
    /// What attends in the place of [`scaled_dot_product_attention`].
    pub function: Option<GivenFunction<'a>>,
}

/// The keys and values of a call.
pub(super) enum CallKeys<'a> {
    /// Keys (B, H_kv, T_kv, D) and values (B, H_kv, T_kv, D_v).
    Own { k: Tensor, v: Tensor },
    /// Those of scores that get terms by distance.
    ByHeads(ByHeads),
    /// Those of packed sequences, with a batch of one.
    Packed { k: Tensor, v: Tensor, sequences: &'a PackedSequences },
    /// Those of packed sequences whose scores get a bias by distance.
    PackedBias(PackedBias<'a>),
    /// Those of the call after those of the calls before, or what an earlier layer's cache holds.
    Cached(Box<CachedCall<'a>>),
}

impl AttentionCall<'_> {
    /// The context (B, H, T_q, D_v), in the order of the options.
    pub fn attend(&self) -> Result<Tensor> {
        match &self.keys {
            CallKeys::Own { k, v } => match self.function {
                Some(GivenFunction(function)) => self.checked(v, function(&self.q, k, v, &self.mask, &self.options)?),
                None => scaled_dot_product_attention(&self.q, k, v, &self.mask, &self.options),
            },
            CallKeys::ByHeads(keys) => keys.attend(&self.q, &self.mask, &self.options),
            CallKeys::PackedBias(keys) => keys.attend(&self.q, &self.mask, &self.options),
            CallKeys::Packed { k, v, sequences } => {
                let [q, k, v] = packed([&self.q, k, v])?;
                let context = scaled_dot_product_attention_varlen(&q, &k, &v, sequences, &self.mask, &self.options)?;
                context.unsqueeze(0)?.transpose(1, 2)
            }
            CallKeys::Cached(staged) => staged.attend(&self.q, &self.mask, &self.options),
        }
    }

    /// What the caller's function gave.
    fn checked(&self, v: &Tensor, context: Tensor) -> Result<Tensor> {
        let (b, h, t_q, _) = self.q.dims4()?;
        let shape = (b, h, t_q, v.dim(3)?);
        if context.shape() != &shape.into() || context.dtype() != self.q.dtype() {
            bail!(
                "[attention_function] the context is {:?} {:?}, expected {:?} {shape:?}",
                context.dtype(),
                context.dims(),
                self.q.dtype()
            )
        }
        Ok(context)
    }

    fn refuse_function(&self, what: &str) -> Result<()> {
        match self.function {
            Some(_) => {
                bail!("[attention_function] {what} are asked for, which a function of the caller's does not give")
            }
            None => Ok(()),
        }
    }

    /// [`attend`](Self::attend), and the weights (B, H, T_q, T_kv), or (H, T_q, T_kv) for one sequence.
    pub fn attend_with_weights(&self) -> Result<AttentionOutput> {
        self.refuse_function("weights")?;
        let AttentionOutput { context, weights } = match &self.keys {
            CallKeys::Own { k, v } => {
                scaled_dot_product_attention_with_weights(&self.q, k, v, &self.mask, &self.options)?
            }
            CallKeys::ByHeads(keys) => keys.attend_with_weights(&self.q, &self.mask, &self.options)?,
            CallKeys::Packed { .. } | CallKeys::PackedBias(_) => {
                bail!(
                    "[multi_head_attention] weights (B, H, T_q, T_kv) are asked for, which packed sequences do not have"
                )
            }
            CallKeys::Cached(staged) => staged.attend_with_weights(&self.q, &self.mask, &self.options)?,
        };
        Ok(AttentionOutput { context, weights: if self.batched { weights } else { weights.squeeze(0)? } })
    }

    /// The path that [`attend`](Self::attend) takes, and why.
    pub fn plan(&self) -> Result<Plan> {
        self.refuse_function("plans")?;
        match &self.keys {
            CallKeys::Own { k, v } => plan(&self.q, k, v, &self.mask, &self.options),
            CallKeys::ByHeads(keys) => keys.plan(&self.q, &self.mask, &self.options),
            CallKeys::PackedBias(keys) => keys.plan(&self.q, &self.mask, &self.options),
            CallKeys::Packed { k, v, sequences } => {
                let [q, k, v] = packed([&self.q, k, v])?;
                plan_varlen(&q, &k, &v, sequences, &self.mask, &self.options)
            }
            CallKeys::Cached(staged) => staged.plan(&self.q, &self.mask, &self.options),
        }
    }

    /// Keeps the call's keys and values, if there is a cache: the last thing that is done.
    ///
    /// # Errors
    /// As [`CachedCall::commit`].
    pub fn commit(self) -> Result<()> {
        match self.keys {
            CallKeys::Own { .. } | CallKeys::ByHeads(_) | CallKeys::PackedBias(_) | CallKeys::Packed { .. } => Ok(()),
            CallKeys::Cached(staged) => staged.commit(),
        }
    }
}

/// (1, H, total, D) each to (total, H, D).
fn packed(qkv: [&Tensor; 3]) -> Result<[Tensor; 3]> {
    let [q, k, v] = qkv.map(|tensor| tensor.squeeze(0)?.transpose(0, 1));
    Ok([q?, k?, v?])
}
