//! Attention to listed keys as an operation of Candle's graph. Its backward pass copies the listed rows again.

use std::sync::Arc;

use candle_attention_call::{AttentionCall, RequestedResults};
use candle_core::{DType, Result, Tensor, Var};

use super::super::call::{Call, swapped_for};
use super::super::cpu;
use super::super::results::Attended;
use super::part::{PartTensors, parts_of};
use super::rows::RowSums;
use super::{ListedResults, whole};
use candle_attention_kernels::InstructionSet;
use candle_attention_modules::base::record_two;
use candle_attention_modules::base::rowwise::{to_vec, with_float};

/// Returns the results with gradients for the inputs that are tracked.
pub(super) fn record_results(call: Call, instruction_set: InstructionSet, found: ListedResults) -> Result<Attended> {
    let ListedResults { output, log_sum_exp } = found;
    let (true, Some(lse)) = (call.tracks_gradients(), &log_sum_exp) else {
        return Ok(Attended { log_sum_exp, ..output.into() });
    };
    let layout = call.attention.output_layout;
    let stored = swapped_for(layout, output)?;
    let shapes = [stored.shape().clone(), lse.shape().clone()];
    let lse = to_vec::<f32>(lse)?;
    let call = Arc::new(call);
    let forward = call.clone();
    let backward = move |_: &Tensor, gradient: &Tensor, lse_gradient: Option<Tensor>| {
        gradients(&forward, instruction_set, &swapped_for(layout, gradient.clone())?, lse_gradient)
    };
    let AttentionCall { q, k, v, scores, .. } = &call.attention;
    let operands = [Some(q), Some(k), Some(v), scores.sinks.as_ref()];
    let [recorded, recorded_lse] = with_float!(call.op, q.dtype(), |E| {
        record_two("listed-attention", &operands, shapes, to_vec::<E>(&stored)?, lse, backward)?
    });
    Ok(Attended { log_sum_exp: Some(recorded_lse), ..swapped_for(layout, recorded)?.into() })
}

/// Computes the gradients of q, k, v and the sinks, as far as these are tracked, from the gradients of the output (B,
/// H, T_q, D_v) and of the log-sum-exp (B, H, T_q).
fn gradients(
    call: &Call,
    instruction_set: InstructionSet,
    of_output: &Tensor,
    of_lse: Option<Tensor>,
) -> Result<Vec<Option<Tensor>>> {
    let AttentionCall { q, k, v, scores, .. } = &call.attention;
    let mut of_queries = Vec::new();
    let mut of_keys = k.track_op().then(|| RowSums::of(k)).transpose()?;
    let mut of_values = v.track_op().then(|| RowSums::of(v)).transpose()?;
    let mut of_sinks: Option<Tensor> = None;
    let wanted = RequestedResults { log_sum_exp: of_lse.is_some(), ..RequestedResults::default() };
    for part in parts_of(call)? {
        let part = part?;
        let tensors = part.tensors(call)?;
        let tracked = PartTensors {
            q: as_tracked(tensors.q, q)?,
            k: as_tracked(tensors.k, k)?,
            v: as_tracked(tensors.v, v)?,
            sinks: match (tensors.sinks, &scores.sinks) {
                (Some(own), Some(sinks)) => Some(as_tracked(own, sinks)?),
                _ => None,
            },
            kv_scales: tensors.kv_scales,
        };
        let attended = cpu::attend(part.call(call, &tracked)?, instruction_set, wanted)?;
        let mut objective = product(&attended.output, &part.in_blocks(of_output)?)?;
        if let (Some(lse), Some(gradient)) = (&attended.log_sum_exp, &of_lse) {
            let own = part.in_blocks(&gradient.unsqueeze(3)?)?.squeeze(3)?;
            // A fully masked query has -inf, whose product with a gradient of 0 is NaN.
            let finite = lse.eq(f64::NEG_INFINITY)?.where_cond(&lse.zeros_like()?, lse)?;
            objective = (objective + product(&finite, &own)?)?;
        }
        let found = objective.backward()?;
        if q.track_op() {
            let of_own_q = match found.get(&tracked.q) {
                Some(gradient) => gradient.clone(),
                None => tracked.q.zeros_like()?,
            };
            of_queries.push(part.in_order(&of_own_q)?);
        }
        if let (Some(sums), Some(gradient)) = (&mut of_keys, found.get(&tracked.k)) {
            part.selected.add_to(sums, gradient)?;
        }
        if let (Some(sums), Some(gradient)) = (&mut of_values, found.get(&tracked.v)) {
            part.selected.add_to(sums, gradient)?;
        }
        if let Some(gradient) = tracked.sinks.as_ref().and_then(|sinks| found.get(sinks)) {
            of_sinks = Some(match of_sinks {
                Some(sum) => (sum + gradient)?,
                None => gradient.clone(),
            });
        }
    }
    let of_q = q.track_op().then(|| whole(call, &of_queries)).transpose()?;
    let of_k = of_keys.map(|sums| sums.into_tensor(k)).transpose()?;
    let of_v = of_values.map(|sums| sums.into_tensor(v)).transpose()?;
    Ok(vec![of_q, of_k, of_v, of_sinks])
}

/// Returns a tensor of a part as a variable, if the tensor of the call is tracked for gradients.
fn as_tracked(own: Tensor, of_call: &Tensor) -> Result<Tensor> {
    if of_call.track_op() { Ok(Var::from_tensor(&own)?.into_inner()) } else { Ok(own) }
}

/// Returns the sum of the products of two tensors in f32.
fn product(one: &Tensor, other: &Tensor) -> Result<Tensor> {
    one.to_dtype(DType::F32)?.mul(&other.to_dtype(DType::F32)?)?.sum_all()
}
