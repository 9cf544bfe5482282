//! The tensors of a call as fused kernels read them.

use candle_attention_call::{AttentionCall, Dropout, Input};
use candle_attention_modules::base::rowwise::with_contiguous_rows;
use candle_core::{DType, Result, Tensor};

use super::call::Call;

/// Returns a call for a fused kernel, with another description of the keys to attend to and with drawn dropout: rows of
/// q, k and v are contiguous, slopes, sinks and relative biases are f32, and no stride of a bias repeats its entries.
/// Gradients flow into these tensors.
pub(super) fn prepared<K>(call: &Call, keys: K, dropout: Option<Dropout<Tensor>>) -> Result<AttentionCall<Tensor, K>> {
    let mut prepared = call.attention.map(keys, |input, tensor| match input {
        Input::Q | Input::K | Input::V => with_contiguous_rows(tensor),
        Input::Bias => without_repeats(tensor),
        Input::RelativeBias => by_sequence(tensor),
        Input::AlibiSlopes | Input::Sinks => kept(tensor),
        Input::KeyScales | Input::ValueScales | Input::PageTable | Input::BooleanMask | Input::Dropout => {
            Ok(tensor.clone())
        }
        // Lists of the keys to attend to, which the call describes otherwise.
        Input::FirstPositions
        | Input::Starts
        | Input::Lengths
        | Input::Prefixes
        | Input::IntervalStarts
        | Input::IntervalEnds
        | Input::CumulativeQueries
        | Input::CumulativeKeys => Ok(tensor.clone()),
    })?;
    prepared.scores.dropout = dropout;
    Ok(prepared)
}

/// Returns a relative bias as (B or 1, H, T_q + T_kv - 1) in f32.
fn by_sequence(biases: &Tensor) -> Result<Tensor> {
    let floats = biases.to_dtype(DType::F32)?.contiguous()?;
    if floats.rank() == 2 { floats.unsqueeze(0) } else { Ok(floats) }
}

/// Returns a view of a bias in which no entry is repeated by a stride of 0. A repeated entry is one entry, whose
/// gradient is the sum.
fn without_repeats(bias: &Tensor) -> Result<Tensor> {
    let mut narrowed = bias.clone();
    for dim in 0..bias.rank() {
        if bias.dims()[dim] > 1 && bias.stride()[dim] == 0 {
            narrowed = narrowed.narrow(dim, 0, 1)?;
        }
    }
    Ok(narrowed)
}

/// Returns the numbers in f32: of a tracked tensor a copy, since an optimizer's step in place must not change the
/// numbers that the backward pass reads.
fn kept(tensor: &Tensor) -> Result<Tensor> {
    let floats = tensor.to_dtype(DType::F32)?;
    if tensor.track_op() { floats.force_contiguous() } else { floats.contiguous() }
}
