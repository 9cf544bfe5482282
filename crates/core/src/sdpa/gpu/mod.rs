//! The fused operations of GPUs, which are other libraries': what each computes rightly, and how a call goes to it. All
//! else takes the reference path.

mod operations;
#[cfg(test)]
mod tests;

use operations::GRID;
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
    /// Whether sequences may be of different lengths.
    varlen: bool,
    /// The least and the largest scale.
    scales: [f64; 2],
    /// What else keeps a call from it: widths, sizes, and what it makes of softcaps.
    limit: fn(&Call) -> Option<String>,
    /// The last queries and keys of a call with such keys and window that go to the reference path, or why all do.
    rest: fn(&Call, &Range<usize>, Window) -> Decided<usize>,
    /// What keeps it from a device.
    obstacle: fn(&Device) -> Option<String>,
    /// (B, T, H, D) is the order of its tensors, and not (B, H, T, D).
    sequence_first: bool,
    /// A tensor (B, H, T, D) of a call with `t_q` queries, in that order and as the operation reads it.
    readable: fn(&Tensor, t_q: usize) -> Result<Tensor>,
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
        let plan = self.decide(call, outputs)?;
        (self.obstacle)(call.q.device()).map_or(Ok(plan), Err)
    }

    /// [`plan`](Self::plan) on a device on which the operation runs.
    fn decide(&'static self, call: &Call, outputs: Outputs) -> Decided<Plan> {
        let named = |reason: String| format!("{} {reason}", self.name);
        if let Some(reason) = self.refusal(call, outputs).or_else(|| (self.limit)(call)) {
            return Err(named(reason));
        }
        let bands = Bands::new(call).map_err(|error| first_line(&error))?.ok_or_else(|| {
            named(
                "takes masks that are one band of keys, aligned with the last query and key, and ALiBi from there"
                    .into(),
            )
        })?;
        if bands.spans.is_empty() {
            return Err("no query sees a key".into());
        }
        let sequences = self.sequences(call, &bands).map_err(named)?;
        Ok(Plan { operation: self, sequences, window: bands.window })
    }

    fn sequences(&self, call: &Call, bands: &Bands) -> Decided<Sequences> {
        if let Some(keys) = bands.common_keys(call).filter(|_| call.sequences.is_none()) {
            return Ok(Sequences::Alike { rest: (self.rest)(call, &keys, bands.window)?, keys });
        }
        if !self.varlen {
            return Err("takes sequences that all see the same keys".into());
        }
        let Dims { b, t_q, t_kv, .. } = call.dims;
        let cu_seqlens = cumulative(bands, b * t_q, b * t_kv);
        match cu_seqlens[0].len() - 1 {
            0..=GRID => Ok(Sequences::Varlen { cu_seqlens }),
            sequences => Err(format!("launches {GRID} sequences at most, and there are {sequences}")),
        }
    }

    /// What it has not.
    fn refusal(&self, call: &Call, outputs: Outputs) -> Option<String> {
        let (Dims { d, d_v, .. }, options, dtype, scale) = (call.dims, &call.options, call.q.dtype(), call.scale());
        let lacks = [
            (call.tracks_gradients(), "has no gradients, and an input is tracked for them"),
            (outputs == Outputs::LogSumExp, "has no log-sum-exp"),
            (matches!(outputs, Outputs::Statistics(_)), "has no statistics of weights"),
            (options.sinks.is_some(), "has no sinks"),
            (options.distance_bias.is_some(), "takes no bias by distance"),
            (options.alibi_slopes.is_some() && !self.alibi, "has no ALiBi"),
            (options.softcap.is_some() && !self.softcap, "has no softcap for several queries"),
            (call.sequences.is_some() && !self.varlen, "has no packed sequences"),
            (call.keep.is_some(), "takes no keep tensor"),
            (call.bias.is_some(), "takes no bias tensor"),
        ];
        if !self.dtypes.contains(&dtype) {
            return Some(format!("computes in {:?}, and the inputs are {dtype:?}", self.dtypes));
        }
        if let Some((_, reason)) = lacks.into_iter().find(|&(is_wanted, _)| is_wanted) {
            return Some(reason.into());
        }
        if d_v != d {
            return Some(format!("takes values as wide as keys, and D_v is {d_v} where D is {d}"));
        }
        let [least, most] = self.scales;
        (!(least..=most).contains(&scale))
            .then(|| format!("takes scales from {least:e} to {most:e}, and this one is {scale:?}"))
    }
}

/// The cumulative lengths of all spans, and of what lies between them: queries without keys, which get zeros, and keys
/// without queries.
fn cumulative(bands: &Bands, total_q: usize, total_kv: usize) -> [Vec<u32>; 2] {
    let (mut ends, mut before) = (vec![[0, 0]], 0);
    for [queries, keys] in &bands.spans {
        ends.extend([[queries.start, before], [queries.start, keys.start], [queries.end, keys.end]]);
        before = keys.end;
    }
    ends.extend([[total_q, before], [total_q, total_kv]]);
    ends.dedup();
    [0, 1].map(|of| ends.iter().map(|end| end[of] as u32).collect())
}

impl Plan {
    /// Context (B, H, T_q, D) in the order asked for.
    pub fn attend(&self, call: &Call) -> Result<Tensor> {
        self.attend_by(call, self.operation.run)
    }

    /// [`attend`](Self::attend) by another function in the operation's place.
    fn attend_by(&self, call: &Call, run: impl Fn(&Inputs) -> Result<Tensor>) -> Result<Tensor> {
        let operation = self.operation;
        let in_order = |tensor: &Tensor| (operation.readable)(tensor, call.dims.t_q);
        let mut last = None;
        let (qkv, lengths) = match &self.sequences {
            Sequences::Alike { keys, rest } => {
                let [t_q, t_kv] = [call.dims.t_q - rest, keys.len() - rest];
                let [k, v] = [&call.k, &call.v].map(|xs| xs.narrow(2, keys.start, keys.len()));
                let (k, v) = (k?, v?);
                if *rest > 0 {
                    let (q, causal) = (call.q.narrow(2, t_q, *rest)?, AttentionMask::causal());
                    let own = Call::new(call.op, [&q, &k, &v], None, &causal, &call.options)?;
                    last = Some(reference::attend(&own, Outputs::Context)?.context);
                }
                let first = |xs: &Tensor, t: usize| in_order(&xs.narrow(2, 0, t)?);
                ([first(&call.q, t_q)?, first(&k, t_kv)?, first(&v, t_kv)?], None)
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
        let context = run(&Inputs { qkv, lengths, alibi_slopes, scale, softcap, window: self.window })?;
        let Dims { b, h, d_v, .. } = call.dims;
        let context = match operation.sequence_first {
            true => context.reshape((b, (), h, d_v))?.transpose(1, 2)?,
            false => context,
        };
        let context = match last {
            Some(last) => Tensor::cat(&[context, last], 2)?,
            None => context,
        };
        call.in_output_order(context)
    }
}
