//! The calls that `candle_nn::ops::sdpa` supports on Metal. Other calls run on the kernels of `candle-attention-metal`
//! ([`kernels`]) or on the reference path.
//!
//! The limits were read from the sources of Candle 0.11 (`candle-nn/src/ops.rs`,
//! `candle-metal-kernels/src/kernels/sdpa.rs` and its Metal source). For one query the operation ignores mask tensors;
//! for several, a bias is multiplied by log2 e, and fully masked rows are NaN (issues 3690 and 3388 of
//! huggingface/candle).

mod first_use;
mod kernels;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

use candle_attention_call::{AttentionCall, AttentionDims as Dims, RequestedResults};
use candle_core::{DType, Result, Tensor};

use super::call::{Call, Qkv};
use super::first_line;
use super::options::SdpaOptions;
use super::reference;
use crate::mask::AttentionMask;

pub use first_use::METAL_CASES;
pub(crate) use kernels::{MetalKernelCall, MetalPath};

/// The name of the operation, for plans and errors.
const NAME: &str = "candle_nn::ops::sdpa";

/// The dtypes that the operation computes in.
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The smallest and the largest scale. The queries are multiplied by scale · log2 e in their own dtype, in which they
/// have to remain finite and normal.
const LEAST_SCALE: f64 = 1e-4;
const MOST_SCALE: f64 = 1.0;

/// The queries and keys of the operation's largest blocks.
const BLOCK: usize = 32;

/// A value for a call that the operation supports, or the reason why it does not.
type Supported<T> = std::result::Result<T, String>;

/// A call that the operation supports.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MetalCall {
    /// The keys that the last query of each sequence attends to.
    keys: Range<usize>,
    /// Whether each query attends to one key more than the query before it; otherwise all attend to the same keys.
    is_causal: bool,
    /// The number of the last queries and keys that the reference path computes.
    rest: usize,
}

/// The inputs of the operation.
struct MetalInputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: f32,
}

impl fmt::Display for MetalCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rest {
            0 => write!(f, "{NAME}"),
            rest => write!(f, "{NAME}, the last {rest} queries on the reference path"),
        }
    }
}

impl MetalCall {
    /// Returns the call for the operation, or the reason why the operation does not support it.
    pub fn plan(call: &Call, wanted: RequestedResults) -> Supported<Self> {
        check(call, wanted).map_err(|reason| format!("{NAME} {reason}"))?;
        let rows = call.rows().map_err(|error| first_line(&error))?;
        if rows.keys.iter().all(Range::is_empty) {
            return Err("no query attends to a key".into());
        }
        Self::of_mask(&rows.keys, call.attention.dims.t_q).map_err(|reason| format!("{NAME} {reason}"))
    }

    /// Returns the call for the ranges of keys of all queries, `t_q` of each sequence.
    ///
    /// The causal mask of the operation is right if blocks of queries end with blocks of keys. Otherwise it checks one
    /// block too few for masked keys, or continues to keys that do not exist. It reads other masks as tensors as large
    /// as the scores, with the faults above.
    fn of_mask(rows: &[Range<usize>], t_q: usize) -> Supported<Self> {
        let of_first = &rows[..t_q];
        if rows.chunks(t_q).any(|of_sequence| of_sequence != of_first) {
            return Err("takes sequences that all attend to the same keys".into());
        }
        let keys = of_first[0].start..of_first[t_q - 1].end;
        if of_first.iter().all(|own| *own == keys) {
            return Ok(Self { keys, is_causal: false, rest: 0 });
        }
        let end_of = |i: usize| (keys.end + i + 1).checked_sub(t_q);
        let is_causal = |(i, own): (usize, &Range<usize>)| own.start == keys.start && Some(own.end) == end_of(i);
        if !of_first.iter().enumerate().all(is_causal) {
            return Err("takes no mask and causal masks".into());
        }
        if t_q < BLOCK || keys.len() < t_q || !(keys.len() - t_q).is_multiple_of(BLOCK) {
            return Err(format!("has causal masks of {BLOCK} queries or more after a multiple of {BLOCK} keys"));
        }
        Ok(Self { keys, is_causal: true, rest: t_q % BLOCK })
    }

    /// Returns the output (B, H, T_q, D) in the call's layout.
    pub fn output(&self, call: &Call) -> Result<Tensor> {
        self.output_by(call, sdpa)
    }

    /// Returns the output by a function that takes the inputs of the operation.
    fn output_by(&self, call: &Call, run: impl Fn(&MetalInputs) -> Result<Tensor>) -> Result<Tensor> {
        let Self { keys, is_causal, rest } = self;
        let t_q = call.attention.dims.t_q;
        let of_keys = |xs: &Tensor| readable(&xs.narrow(2, keys.start, keys.len() - rest)?, t_q == 1);
        let output = run(&MetalInputs {
            q: readable(&call.attention.q.narrow(2, 0, t_q - rest)?, false)?,
            k: of_keys(&call.attention.k)?,
            v: of_keys(&call.attention.v)?,
            is_causal: *is_causal,
            scale: call.attention.scores.scale as f32,
        })?;
        if *rest == 0 {
            return call.in_output_layout(output);
        }
        let narrowed = |xs: &Tensor| xs.narrow(2, keys.start, keys.len());
        let q = call.attention.q.narrow(2, t_q - rest, *rest)?;
        let k = narrowed(&call.attention.k)?;
        let v = narrowed(&call.attention.v)?;
        let qkv = Qkv { q: &q, k: &k, v: &v };
        // The operation supports no other option.
        let options = SdpaOptions::default().with_scale(call.attention.scores.scale);
        let last = Call::new(call.op, qkv, None, &AttentionMask::causal(), &options)?;
        call.in_output_layout(Tensor::cat(&[output, reference::attend(&last, RequestedResults::default())?.output], 2)?)
    }
}

/// Checks everything but the mask.
fn check(call: &Call, wanted: RequestedResults) -> Supported<()> {
    let AttentionCall { dims, q, scores, .. } = &call.attention;
    let Dims { t_q, d, d_v, .. } = *dims;
    if !DTYPES.contains(&q.dtype()) {
        return Err(format!("computes in {DTYPES:?}, and the inputs are {:?}", q.dtype()));
    }
    if call.tracks_gradients() {
        return Err("has no gradients, and an input is tracked for them".into());
    }
    if wanted.weights {
        return Err("has no weights".into());
    }
    if wanted.log_sum_exp {
        return Err("has no log-sum-exp".into());
    }
    if wanted.statistics.is_some() {
        return Err("has no statistics of weights".into());
    }
    // It has a softcap for one query alone, and reads 1.0 as no softcap.
    if let Some(name) = scores.names().first() {
        return Err(format!("has no {name}"));
    }
    if call.dropout.is_some() {
        return Err("has no dropout".into());
    }
    if call.sequences().is_some() {
        return Err("has no packed sequences".into());
    }
    if call.attention.kv_scales.is_some() {
        return Err("reads no codes of keys and values".into());
    }
    if d_v != d {
        return Err(format!("takes values as wide as keys, and D_v is {d_v} where D is {d}"));
    }
    let scale = scores.scale;
    if !(LEAST_SCALE..=MOST_SCALE).contains(&scale) {
        return Err(format!("takes scales from {LEAST_SCALE:e} to {MOST_SCALE:e}, and this one is {scale:?}"));
    }
    // There are kernels of 72 and 80 for several queries only, and none of 512 in F32.
    let has_kernel = matches!(d, 32 | 64 | 96 | 128 | 256) || matches!(d, 72 | 80) && t_q > 1;
    if !has_kernel {
        return Err(format!("has no kernel for D of {d} and {t_q} queries"));
    }
    Ok(())
}

/// Runs the operation. The output is contiguous, (B, H, T_q, D).
fn sdpa(inputs: &MetalInputs) -> Result<Tensor> {
    let MetalInputs { q, k, v, is_causal, scale } = inputs;
    candle_nn::ops::sdpa(q, k, v, None, *is_causal, *scale, 1.0)
}

/// Returns a tensor (B, H, T, D), copied only if the operation cannot read it. `heads_are_apart` is whether it reads
/// heads at any one distance from each other, as it does with the keys and values of one query.
fn readable(tensor: &Tensor, heads_are_apart: bool) -> Result<Tensor> {
    // Not `contiguous`, which does not copy a view that begins at an odd element or has a stride for a single head.
    if is_readable(tensor, heads_are_apart) { Ok(tensor.clone()) } else { tensor.force_contiguous() }
}

/// Returns whether the operation reads a tensor (B, H, T, D) without a copy: each head has contiguous rows, and heads
/// follow each other without a gap, or have one distance from each other, as in a view into a cache. For one query the
/// operation uses the stride of the heads of keys and values and no other (issue 3703 of huggingface/candle), and no
/// stride of the query.
fn is_readable(tensor: &Tensor, heads_are_apart: bool) -> bool {
    let (&[b, h, t, d], &[b_stride, h_stride, t_stride, d_stride]) = (tensor.dims(), tensor.stride()) else {
        return false;
    };
    let has_contiguous_rows = d_stride == 1 && (t == 1 || t_stride == d);
    has_contiguous_rows && (b == 1 || b_stride == h * h_stride) && (heads_are_apart || b * h == 1 || h_stride == t * d)
}
