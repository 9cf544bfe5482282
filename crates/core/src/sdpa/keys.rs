//! What queries attend to: keys and values of their own, those of packed sequences, codes of 8 bits as a cache keeps
//! them, or others that stand elsewhere.

use candle_core::{Result, Tensor, bail};

use super::plan::{Choice, Outputs, choose};
use super::validate::Call;
use super::{Attended, PackedSequences, Plan, SdpaOptions, cpu, run};
use crate::mask::AttentionMask;
use candle_attention_kernels::Tier;

/// A function of the arguments and with the result of
/// [`scaled_dot_product_attention`](crate::scaled_dot_product_attention).
pub type AttentionFunction<'a> = dyn Fn(&Tensor, &Tensor, &Tensor, &AttentionMask, &SdpaOptions) -> Result<Tensor> + 'a;

/// The keys and values of one call, to which queries (B, H, T_q, D) attend.
pub(crate) trait Keys {
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, outputs: Outputs) -> Result<Attended>;

    /// The path that [`attend`](Self::attend) takes, and why.
    fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan>;

    /// Keeps the keys and values of the call, where there is a cache: the last thing that is done.
    fn commit(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// The keys and values of a call alone, or of packed sequences, for a function of the caller's if there is one.
pub(crate) fn uncached<'a>(own: OwnKeys<'a>, function: Option<&'a AttentionFunction<'a>>) -> Box<dyn Keys + 'a> {
    match function.filter(|_| own.sequences.is_none()) {
        Some(function) => Box::new(FunctionKeys { own, function }),
        None => Box::new(own),
    }
}

/// Keys (B, H_kv, T_kv, D) and values (B, H_kv, T_kv, D_v), or those (1, H_kv, total_kv, ..) of packed sequences.
pub(crate) struct OwnKeys<'a> {
    pub k: Tensor,
    pub v: Tensor,
    pub sequences: Option<&'a PackedSequences>,
}

impl Keys for OwnKeys<'_> {
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, outputs: Outputs) -> Result<Attended> {
        let (op, qkv) = (outputs.op(self.sequences.is_some()), [q, &self.k, &self.v]);
        run(&Call::of(op, qkv, self.sequences, mask, options)?, outputs)
    }

    fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        let call = Call::of("plan", [q, &self.k, &self.v], self.sequences, mask, options)?;
        Ok(choose(&call, Outputs::Context)?.plan())
    }
}

/// The same, attended to by a function of the caller's.
struct FunctionKeys<'a> {
    own: OwnKeys<'a>,
    function: &'a AttentionFunction<'a>,
}

impl Keys for FunctionKeys<'_> {
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, outputs: Outputs) -> Result<Attended> {
        let missing = match outputs {
            Outputs::Context | Outputs::LogSumExp => None,
            Outputs::Weights => Some("weights"),
            Outputs::Statistics(_) => Some("statistics"),
        };
        if let Some(missing) = missing {
            bail!("[attention_function] {missing} are asked for, which a function of the caller's does not give")
        }
        let OwnKeys { k, v, .. } = &self.own;
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

/// Keys and values whose numbers are `(code - 128) · scale`.
pub(crate) struct QuantizedKv {
    /// u8 codes of keys (B, H_kv, T_kv, D).
    pub k: Tensor,
    /// u8 codes of values (B, H_kv, T_kv, D_v).
    pub v: Tensor,
    /// The f32 scales of keys and of values, (B, H_kv, T_kv, 1).
    pub scales: [Tensor; 2],
}

impl QuantizedKv {
    /// What a kernel gives that reads the codes as they are; `None` where no kernel does, and they have to become
    /// floats. There are no weights.
    ///
    /// # Errors
    /// As [`scaled_dot_product_attention`](super::scaled_dot_product_attention).
    pub fn attend(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        outputs: Outputs,
    ) -> Result<Option<Attended>> {
        let Some((call, tier)) = self.call(q, mask, options)? else { return Ok(None) };
        outputs.check(&call)?;
        cpu::attend(&call, tier, outputs).map(Some)
    }

    /// The path that [`attend`](Self::attend) takes.
    pub fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Option<Plan>> {
        Ok(self.call(q, mask, options)?.map(|(_, tier)| Choice::Cpu(tier).plan()))
    }

    fn call<'a>(
        &'a self,
        q: &Tensor,
        mask: &'a AttentionMask,
        options: &'a SdpaOptions,
    ) -> Result<Option<(Call<'a>, Tier)>> {
        if !q.device().is_cpu() {
            return Ok(None);
        }
        let call = Call::quantized("scaled_dot_product_attention", q, self, mask, options)?;
        Ok(match choose(&call, Outputs::Context)? {
            Choice::Cpu(tier) => Some((call, tier)),
            _ => None,
        })
    }
}
