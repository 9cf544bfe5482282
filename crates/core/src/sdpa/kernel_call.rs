//! A call in the form that the kernels of a GPU read.

use candle_attention_call::{AttentionCall, AttentionDims as Dims, BoundedKeys, RequestedResults};
use candle_core::Tensor;

use super::bounded_keys::bounded_keys;
use super::call::Call;
use super::dropout::KernelDropout;
use super::first_line;
use super::page_table::page_table;
use super::prepared::prepared;

/// The tensors of a call as kernels read them.
pub(super) type KernelTensors = AttentionCall<Tensor, BoundedKeys<Tensor>>;

/// A call for the kernels of a GPU.
pub(super) struct KernelCall {
    pub tensors: KernelTensors,
    /// Whether a seed of dropout is still to be drawn, when the call runs.
    pub draws_seed: bool,
}

impl KernelCall {
    /// Returns a call for kernels, or the reason why these do not support it.
    pub fn new(call: &Call) -> Result<Self, String> {
        let KernelDropout { dropout, draws_seed } = KernelDropout::of(call.dropout.as_ref())?;
        let keys = bounded_keys(call).map_err(|error| first_line(&error))?;
        let mut tensors = prepared(call, keys, dropout).map_err(|error| first_line(&error))?;
        if let Some(sequences) = &call.attention.keys.pages {
            tensors.pages = Some(page_table(sequences, &call.attention.k).map_err(|error| first_line(&error))?);
        }
        Ok(Self { tensors, draws_seed })
    }
}

/// Checks that the kernels of a GPU, by the name that `kernels` has in a reason, compute the requested results of a
/// call, and that it has scores.
pub(super) fn check_results(call: &Call, wanted: RequestedResults, kernels: &str) -> Result<(), String> {
    if wanted.weights {
        return Err(format!("{kernels} do not return attention weights"));
    }
    if wanted.statistics.is_some() {
        return Err(format!("{kernels} do not compute statistics of weights"));
    }
    let Dims { b, t_q, t_kv, d_v, .. } = call.attention.dims;
    if [b, t_q, t_kv, d_v].contains(&0) {
        return Err(format!("there are no scores, for which {kernels} do not run"));
    }
    Ok(())
}
