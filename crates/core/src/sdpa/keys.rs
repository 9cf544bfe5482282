//! Attention from the queries of a layer to keys and values that were computed in the same call.

use candle_core::{Result, Tensor};

use super::call::{Call, Qkv};
use super::options::SdpaOptions;
use super::packed::PackedSequences;
use super::plan::Plan;
use super::request::{self, Request};
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
    pub fn attend<R: Request>(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        request: R,
    ) -> Result<R::Result> {
        let op = request.operation(self.sequences.is_some());
        request::run(self.call(op, q, mask, options)?, request)
    }

    /// Returns the path of attention for its output.
    pub fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        request::plan(&self.call("plan", q, mask, options)?)
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
    pub fn attend<R: Request>(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        request: R,
    ) -> Result<R::Result> {
        request.run_function(|| {
            let output = (self.function)(q, &self.k, &self.v, mask, options)?;
            let (b, h, t_q, _) = q.dims4()?;
            let found = Expect::one("attention_function", "the output", &output);
            found.sizes(&[b, h, t_q, self.v.dim(3)?])?.dtype(q.dtype(), "the queries'")?;
            Ok(output)
        })
    }
}
