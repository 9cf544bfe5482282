//! Attention from the queries of a layer to keys and values that were computed in the same call.

use candle_attention_call::RequestedResults;
use candle_core::{Result, Tensor, bail};

use super::call::{Call, Qkv};
use super::options::SdpaOptions;
use super::packed::PackedSequences;
use super::plan::Plan;
use super::results::{Attended, operation};
use super::run;
use crate::mask::AttentionMask;
use candle_attention_modules::base::Expect;

/// A function with the arguments and the result of [`scaled_dot_product_attention`](crate::scaled_dot_product_attention).
pub type AttentionFunction<'a> = dyn Fn(&Tensor, &Tensor, &Tensor, &AttentionMask, &SdpaOptions) -> Result<Tensor> + 'a;

/// Keys (B, H_kv, T_kv, D) and values (B, H_kv, T_kv, D_v) of a batch; or of packed sequences, (1, H_kv, total_kv, ..).
pub(crate) struct OwnKeys<'a> {
    pub k: Tensor,
    pub v: Tensor,
    pub sequences: Option<&'a PackedSequences>,
}

impl OwnKeys<'_> {
    /// Attends from queries (B, H, T_q, D).
    pub fn attend(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        wanted: RequestedResults,
    ) -> Result<Attended> {
        let op = operation(wanted, self.sequences.is_some());
        run::run(self.call(op, q, mask, options)?, wanted)
    }

    /// Returns the path of attention for its output.
    pub fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        run::plan(self.call("plan", q, mask, options)?)
    }

    fn call(&self, op: &'static str, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Call> {
        let qkv = Qkv { q, k: &self.k, v: &self.v };
        Call::with_all_dims(op, qkv, None, self.sequences, mask, options)
    }
}

/// Keys and values of a batch to which a caller's function attends.
pub(crate) struct FunctionKeys<'a> {
    /// (B, H_kv, T_kv, D).
    pub k: Tensor,
    /// (B, H_kv, T_kv, D_v).
    pub v: Tensor,
    pub function: &'a AttentionFunction<'a>,
}

impl FunctionKeys<'_> {
    /// Attends from queries (B, H, T_q, D), and checks the output.
    ///
    /// # Errors
    /// If more than the output is requested.
    pub fn attend(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        wanted: RequestedResults,
    ) -> Result<Attended> {
        if wanted.weights {
            bail!("[attention_function] weights were requested, which a caller's function does not return")
        }
        if wanted.log_sum_exp {
            bail!("[attention_function] the log-sum-exp was requested, which a caller's function does not return")
        }
        if wanted.statistics.is_some() {
            bail!("[attention_function] statistics were requested, which a caller's function does not return")
        }
        let output = (self.function)(q, &self.k, &self.v, mask, options)?;
        let (b, h, t_q, _) = q.dims4()?;
        let found = Expect::one("attention_function", "the output", &output);
        found.sizes(&[b, h, t_q, self.v.dim(3)?])?.dtype(q.dtype(), "the queries'")?;
        Ok(output.into())
    }
}
