//! Attention to listed keys as an operation of Candle's graph. Its backward pass copies the listed rows again.

use std::sync::Arc;

use candle_attention_call::{AttentionCall, RequestedResults};
use candle_core::{DType, Result, Tensor, Var};

use super::super::call::{Call, is_tracked, swapped_for};
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
    if !call.tracks_gradients() {
        return Ok(Attended { log_sum_exp: Some(log_sum_exp), ..output.into() });
    }
    let layout = call.attention.output_layout;
    let stored = swapped_for(layout, output)?;
    let shapes = [stored.shape().clone(), log_sum_exp.shape().clone()];
    let lse = to_vec::<f32>(&log_sum_exp)?;
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
    let mut of_keys = RowSums::of(k)?;
    let mut of_values = RowSums::of(v)?;
    let mut of_sinks: Option<Tensor> = None;
    let wanted = RequestedResults { log_sum_exp: of_lse.is_some(), ..RequestedResults::default() };
    for part in parts_of(call)? {
        let tensors = part.tensors(call)?;
        let (own_q, own_k, own_v) =
            (Var::from_tensor(&tensors.q)?, Var::from_tensor(&tensors.k)?, Var::from_tensor(&tensors.v)?);
        let own_sinks = tensors.sinks.as_ref().map(Var::from_tensor).transpose()?;
        let tracked = PartTensors {
            q: own_q.as_tensor().clone(),
            k: own_k.as_tensor().clone(),
            v: own_v.as_tensor().clone(),
            sinks: own_sinks.as_ref().map(|sinks| sinks.as_tensor().clone()),
            ..tensors
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
        let of_own_q = found.get(&own_q).cloned().unwrap_or(own_q.zeros_like()?);
        of_queries.push(part.in_order(&of_own_q)?);
        if let Some(gradient) = found.get(&own_k) {
            part.selected.add_to(&mut of_keys, gradient)?;
        }
        if let Some(gradient) = found.get(&own_v) {
            part.selected.add_to(&mut of_values, gradient)?;
        }
        if let Some(gradient) = own_sinks.as_ref().and_then(|sinks| found.get(sinks)) {
            of_sinks = Some(match of_sinks {
                Some(sum) => (sum + gradient)?,
                None => gradient.clone(),
            });
        }
    }
    let of_sinks = of_sinks.filter(|_| is_tracked(scores.sinks.as_ref()));
    let of_q = q.track_op().then(|| whole(call, &of_queries)).transpose()?;
    let of_k = k.track_op().then(|| of_keys.into_tensor(k)).transpose()?;
    let of_v = v.track_op().then(|| of_values.into_tensor(v)).transpose()?;
    Ok(vec![of_q, of_k, of_v, of_sinks])
}

/// Returns the sum of the products of two tensors in f32.
fn product(one: &Tensor, other: &Tensor) -> Result<Tensor> {
    one.to_dtype(DType::F32)?.mul(&other.to_dtype(DType::F32)?)?.sum_all()
}
