//! `candle_nn::ops::sdpa`: f32, f16 and bf16 on Metal. What it computes rightly was read from candle 0.11
//! (`candle-nn/src/ops.rs`, `candle-metal-kernels/src/kernels/sdpa.rs` and its Metal source); issues are
//! huggingface/candle's. Of one query it ignores mask tensors; of more, a bias is multiplied by log2 e, and rows
//! without a key are NaN (#3690, #3388).

use std::ops::Range;

use candle_core::{DType, Result, Tensor};

use super::{Inputs, Operation};
use crate::sdpa::rows::Window;
use crate::sdpa::validate::{Call, Dims};

pub(in crate::sdpa) static METAL: Operation = Operation {
    name: "candle_nn::ops::sdpa",
    dtypes: &[DType::F32, DType::F16, DType::BF16],
    alibi: false,
    // It has one for one query, and takes 1.0 for none.
    softcap: false,
    varlen: false,
    // The queries are multiplied by scale · log2 e in their own dtype, which has to leave them finite and normal.
    scales: [1e-4, 1.0],
    limit,
    rest,
    obstacle: |_| None,
    sequence_first: false,
    readable: contiguous,
    run: sdpa,
};

/// The queries and keys of the kernel's largest blocks.
pub(super) const BLOCK: usize = 32;

fn limit(call: &Call) -> Option<String> {
    let Dims { t_q, d, .. } = call.dims;
    // Of 72 and 80 there is a kernel for several queries only; 512 has none in F32.
    let is_there = matches!(d, 32 | 64 | 96 | 128 | 256) || matches!(d, 72 | 80) && t_q > 1;
    (!is_there).then(|| format!("has no kernel for D of {d} and {t_q} queries"))
}

/// Its causal mask is right where blocks of queries end with blocks of keys: elsewhere it looks at one block too few
/// for hidden keys, or walks on to keys that are not there. Other masks it takes as tensors as large as the scores,
/// with the faults above.
fn rest(call: &Call, keys: &Range<usize>, window: Window) -> std::result::Result<usize, String> {
    let t_q = call.dims.t_q;
    match window {
        Window { left: None, right: None } => Ok(0),
        Window { left: None, right: Some(0) } if t_q >= BLOCK && (keys.len() - t_q).is_multiple_of(BLOCK) => {
            Ok(t_q % BLOCK)
        }
        Window { left: None, right: Some(0) } => {
            Err(format!("has causal masks of {BLOCK} queries or more after a multiple of {BLOCK} keys"))
        }
        _ => Err("takes no mask and causal masks".into()),
    }
}

/// The operation itself: a contiguous (B, H, T_q, D).
fn sdpa(inputs: &Inputs) -> Result<Tensor> {
    let Inputs { qkv: [q, k, v], window, scale, .. } = inputs;
    candle_nn::ops::sdpa(q, k, v, None, window.right == Some(0), *scale, 1.0)
}

/// A copy unless the operation reads the tensor as it is. Of the keys and values of one query it reads the stride of
/// heads alone (#3703): rows that follow one another in heads at one distance, such as a view into a cache.
pub(super) fn contiguous(tensor: &Tensor, t_q: usize) -> Result<Tensor> {
    let rows_of_heads = t_q == 1;
    let (b, h, t, d) = tensor.dims4()?;
    let &[of_b, of_h, of_t, of_d] = tensor.stride() else { return tensor.force_contiguous() };
    let rows = of_d == 1 && (t == 1 || of_t == d);
    let heads = (b == 1 || of_b == h * of_h) && (rows_of_heads || b * h == 1 || of_h == t * d);
    // Not `contiguous`, which leaves the stride of a single head as it is, and the operation walks along it.
    if rows && heads { Ok(tensor.clone()) } else { tensor.force_contiguous() }
}
