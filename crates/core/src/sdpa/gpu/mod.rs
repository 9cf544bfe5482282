//! The fused operations of GPUs, which are other libraries': what each computes rightly, and how a call goes to it. All
//! else takes the reference path.

mod operations;
#[cfg(test)]
mod tests;

pub(super) use operations::{FLASH_ATTN, METAL};

use std::fmt;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};

use super::bands::{Bands, Window};
use super::plan::Outputs;
use super::validate::{Call, Dims};
use super::{first_line, reference};
use crate::mask::AttentionMask;

/// A fused operation, and what it computes rightly.
#[derive(Debug)]
pub(super) struct Operation {
    name: &'static str,
    dtypes: &'static [DType],
    alibi: bool,
    softcap: bool,
    packed: bool,
    /// The least and the largest scale.
    scales: [f64; 2],
    /// How a call with such bands goes to it, or what else keeps it away: widths, sizes, windows, and what the
    /// operation makes of softcaps.
    sequences: fn(&Call, &Bands) -> Decided<Sequences>,
    /// Whether it runs on a device.
    runs_on: fn(&Device) -> Decided<()>,
    /// (B, T, H, D) is the order of its tensors, and not (B, H, T, D).
    sequence_first: bool,
    /// Whether it reads a tensor of a call with `t_q` queries, in that order, where it lies.
    reads: fn(&Tensor, t_q: usize) -> bool,
    run: fn(&Inputs) -> Result<Tensor>,
}

/// What an operation does for a call, or why it does not take it.
type Decided<T> = std::result::Result<T, String>;

/// What an operation reads.
#[cfg_attr(
    not(any(feature = "flash-attn", test)),
    expect(dead_code, reason = "read by candle-flash-attn and by the tests")
)]
pub(super) struct Inputs {
    /// Queries, keys and values, without B where there are cumulative lengths.
    qkv: [Tensor; 3],
    /// Of queries and of keys: cumulative lengths (n + 1,) in u32, and the longest sequence.
    lengths: Option<[(Tensor, usize); 2]>,
    /// (H,) in f32.
    alibi_slopes: Option<Tensor>,
    scale: f32,
    /// 0 is none.
    softcap: f32,
    window: Window,
}

/// A call that an operation takes.
#[derive(Debug)]
pub(crate) struct Plan {
    operation: &'static Operation,
    sequences: Sequences,
    window: Window,
}

#[derive(Debug, PartialEq, Eq)]
enum Sequences {
    /// All queries of all sequences see the same keys, up to the window; the last `rest` queries and keys are for the
    /// reference path.
    Alike { keys: Range<usize>, rest: usize },
    /// Sequences of different lengths, by the cumulative lengths of queries, and of keys.
    Varlen { cu_seqlens: [Vec<u32>; 2] },
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operation.name)?;
        match self.sequences {
            Sequences::Alike { rest: 0, .. } => Ok(()),
            Sequences::Alike { rest, .. } => write!(f, ", the last {rest} queries on the reference path"),
            Sequences::Varlen { .. } => write!(f, " on sequences of different lengths"),
        }
    }
}

impl Operation {
    /// How a call goes to the operation, or why it does not.
    pub fn plan(&'static self, call: &Call, outputs: Outputs) -> Decided<Plan> {
        let named = |reason: String| format!("{} {reason}", self.name);
        self.check(call, outputs).map_err(named)?;
        let bands = Bands::new(call).map_err(|error| first_line(&error))?.ok_or_else(|| {
            named(
                "takes masks that are one band of keys, aligned with the last query and key, and ALiBi from there"
                    .into(),
            )
        })?;
        if bands.spans.is_empty() {
            return Err("no query sees a key".into());
        }
        let sequences = (self.sequences)(call, &bands).map_err(named)?;
        (self.runs_on)(call.q.device())?;
        Ok(Plan { operation: self, sequences, window: bands.window })
    }

    /// Whether the operation has what a call asks for, whatever its mask leaves.
    fn check(&self, call: &Call, outputs: Outputs) -> Decided<()> {
        let (Dims { d, d_v, .. }, options, dtype, scale) = (call.dims, &call.options, call.q.dtype(), call.scale());
        let (dtypes, [least, most]) = (self.dtypes, self.scales);
        none_of(&[
            (!dtypes.contains(&dtype), format_args!("computes in {dtypes:?}, and the inputs are {dtype:?}")),
            (call.tracks_gradients(), format_args!("has no gradients, and an input is tracked for them")),
            (outputs == Outputs::LogSumExp, format_args!("has no log-sum-exp")),
            (matches!(outputs, Outputs::Statistics(_)), format_args!("has no statistics of weights")),
            (options.sinks.is_some(), format_args!("has no sinks")),
            (options.relative_bias.is_some(), format_args!("takes no bias by distance")),
            (options.alibi_slopes.is_some() && !self.alibi, format_args!("has no ALiBi")),
            (options.softcap.is_some() && !self.softcap, format_args!("has no softcap for several queries")),
            (call.sequences.is_some() && !self.packed, format_args!("has no packed sequences")),
            (call.keep.is_some(), format_args!("takes no keep tensor")),
            (call.bias.is_some(), format_args!("takes no bias tensor")),
            (d_v != d, format_args!("takes values as wide as keys, and D_v is {d_v} where D is {d}")),
            (
                !(least..=most).contains(&scale),
                format_args!("takes scales from {least:e} to {most:e}, and this one is {scale:?}"),
            ),
        ])
    }
}

/// The first of some obstacles that is there is why not.
fn none_of(obstacles: &[(bool, fmt::Arguments)]) -> Decided<()> {
    match obstacles.iter().find(|(is_there, _)| *is_there) {
        Some((_, reason)) => Err(reason.to_string()),
        None => Ok(()),
    }
}

impl Plan {
    /// Context (B, H, T_q, D) in the order asked for.
    pub fn attend(&self, call: &Call) -> Result<Tensor> {
        let (operation, Dims { b, h, t_q, d_v, .. }) = (self.operation, call.dims);
        let in_order = |xs: &Tensor| {
            let xs = if operation.sequence_first { xs.transpose(1, 2)? } else { xs.clone() };
            // Not `contiguous`, which leaves a view that begins at an odd element, and the stride of a single head, as
            // they are.
            if (operation.reads)(&xs, t_q) { Ok(xs) } else { xs.force_contiguous() }
        };
        let (qkv, lengths) = match &self.sequences {
            Sequences::Alike { keys, rest } => {
                let first = |xs: &Tensor, start, end: usize| in_order(&xs.narrow(2, start, end - rest - start)?);
                let of_keys = |xs| first(xs, keys.start, keys.end);
                ([first(&call.q, 0, t_q)?, of_keys(&call.k)?, of_keys(&call.v)?], None)
            }
            Sequences::Varlen { cu_seqlens } => {
                let joined = |tensor: &Tensor| in_order(tensor)?.flatten(0, 1);
                let with_longest = |lens: &Vec<u32>| -> Result<(Tensor, usize)> {
                    let longest = lens.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0);
                    Ok((Tensor::new(lens.as_slice(), call.q.device())?, longest))
                };
                let [of_q, of_kv] = cu_seqlens.each_ref().map(with_longest);
                ([joined(&call.q)?, joined(&call.k)?, joined(&call.v)?], Some([of_q?, of_kv?]))
            }
        };
        let slopes = |slopes: &Tensor| slopes.to_dtype(DType::F32)?.contiguous();
        let alibi_slopes = call.options.alibi_slopes.as_ref().map(slopes).transpose()?;
        let (scale, softcap) = (call.scale() as f32, call.options.softcap.unwrap_or(0.0) as f32);
        let mut context = (operation.run)(&Inputs { qkv, lengths, alibi_slopes, scale, softcap, window: self.window })?;
        if operation.sequence_first {
            context = context.reshape((b, (), h, d_v))?.transpose(1, 2)?;
        }
        if let Sequences::Alike { keys, rest: rest @ 1.. } = &self.sequences {
            let of_keys = |xs: &Tensor| xs.narrow(2, keys.start, keys.len());
            let (q, k, v) = (call.q.narrow(2, t_q - rest, *rest)?, of_keys(&call.k)?, of_keys(&call.v)?);
            let causal = AttentionMask::causal();
            let last =
                reference::attend(&Call::new(call.op, [&q, &k, &v], None, &causal, &call.options)?, Outputs::Context)?;
            context = Tensor::cat(&[context, last.context], 2)?;
        }
        call.in_output_layout(context)
    }
}
