//! Adapters for third-party GPU kernels and the calls that each supports. Every other call runs on the reference path.

mod operations;
#[cfg(test)]
mod tests;

pub(super) use operations::{FLASH_ATTN, METAL};

use std::fmt;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};

use super::bands::{BandWindow, Bands};
use super::call::{Call, Dims, Qkv};
use super::reference;
use super::result::ResultKind;
use crate::mask::AttentionMask;

/// A GPU kernel of another library, and the calls that it supports.
#[derive(Debug)]
pub(super) struct Operation {
    name: &'static str,
    dtypes: &'static [DType],
    has_alibi: bool,
    has_softcap: bool,
    has_packed_sequences: bool,
    scales: ScaleRange,
    /// Checks widths, sizes, windows and softcaps, and returns how the sequences are passed to the kernel.
    sequences: fn(&Call, &Bands) -> Supported<Sequences>,
    /// Checks that the kernel runs on a device.
    runs_on: fn(&Device) -> Supported<()>,
    /// Whether its tensors are (B, T, H, D) in place of (B, H, T, D).
    is_sequence_first: bool,
    /// Returns whether the kernel reads a tensor of a call with `t_q` queries, in its own order, without a copy.
    reads: fn(&Tensor, t_q: usize) -> bool,
    run: fn(&Inputs) -> Result<Tensor>,
}

/// The smallest and the largest scale that a kernel supports.
#[derive(Debug, Clone, Copy)]
struct ScaleRange {
    least: f64,
    most: f64,
}

/// A value for a call that a kernel supports, or the reason why it does not.
type Supported<T> = std::result::Result<T, String>;

/// The inputs of a kernel.
#[cfg_attr(
    not(any(feature = "flash-attn", test)),
    expect(dead_code, reason = "read by candle-flash-attn and by the tests")
)]
pub(super) struct Inputs {
    /// Queries, without B if there are cumulative lengths; keys and values likewise.
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Option<Lengths>,
    /// (H,) in f32.
    alibi_slopes: Option<Tensor>,
    scale: f32,
    /// 0 for no softcap.
    softcap: f32,
    window: BandWindow,
}

/// The lengths of sequences of different lengths.
#[cfg_attr(
    not(any(feature = "flash-attn", test)),
    expect(dead_code, reason = "read by candle-flash-attn and by the tests")
)]
struct Lengths {
    /// (n + 1,) in u32.
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    most_queries: usize,
    most_keys: usize,
}

/// A call that a kernel supports.
#[derive(Debug)]
pub(crate) struct GpuCall {
    operation: &'static Operation,
    sequences: Sequences,
    window: BandWindow,
}

/// The way in which the sequences of a call are passed to a kernel.
#[derive(Debug, PartialEq, Eq)]
enum Sequences {
    /// All queries of all sequences attend to the same keys, up to the window. The last `rest` queries and keys are
    /// computed on the reference path.
    Alike { keys: Range<usize>, rest: usize },
    /// Sequences of different lengths.
    Varlen(CumulativeLengths),
}

/// The cumulative lengths of the queries and of the keys of sequences.
#[derive(Debug, PartialEq, Eq)]
struct CumulativeLengths {
    queries: Vec<u32>,
    keys: Vec<u32>,
}

impl fmt::Display for GpuCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operation.name)?;
        match self.sequences {
            Sequences::Alike { rest: 0, .. } => Ok(()),
            Sequences::Alike { rest, .. } => write!(f, ", the last {rest} queries on the reference path"),
            Sequences::Varlen(_) => write!(f, " on sequences of different lengths"),
        }
    }
}

impl Operation {
    /// Returns the call for the kernel, or the reason why the kernel does not support it.
    pub fn plan(&'static self, call: &Call, kind: ResultKind) -> Supported<GpuCall> {
        let named = |reason: String| format!("{} {reason}", self.name);
        self.check(call, kind).map_err(named)?;
        let Some(bands) = Bands::new(call).map_err(|error| first_line(&error))? else {
            return Err(named(
                "takes masks that are one local window, aligned with the last query and key, and ALiBi from there"
                    .into(),
            ));
        };
        if bands.spans.is_empty() {
            return Err("no query attends to a key".into());
        }
        let sequences = (self.sequences)(call, &bands).map_err(named)?;
        (self.runs_on)(call.q.device())?;
        Ok(GpuCall { operation: self, sequences, window: bands.window })
    }

    /// Checks everything but the mask.
    fn check(&self, call: &Call, kind: ResultKind) -> Supported<()> {
        let (Dims { d, d_v, .. }, options, scale) = (call.dims, &call.options, call.scale());
        if !self.dtypes.contains(&call.q.dtype()) {
            return Err(format!("computes in {:?}, and the inputs are {:?}", self.dtypes, call.q.dtype()));
        }
        if call.tracks_gradients() {
            return Err("has no gradients, and an input is tracked for them".into());
        }
        match kind {
            ResultKind::Output => {}
            ResultKind::Weights => return Err("has no weights".into()),
            ResultKind::LogSumExp => return Err("has no log-sum-exp".into()),
            ResultKind::Statistics => return Err("has no statistics of weights".into()),
        }
        if options.sinks.is_some() {
            return Err("has no sinks".into());
        }
        if options.relative_bias.is_some() {
            return Err("has no relative bias".into());
        }
        if options.alibi_slopes.is_some() && !self.has_alibi {
            return Err("has no ALiBi".into());
        }
        if options.softcap.is_some() && !self.has_softcap {
            return Err("has no softcap for several queries".into());
        }
        if call.sequences.is_some() && !self.has_packed_sequences {
            return Err("has no packed sequences".into());
        }
        if call.keep.is_some() {
            return Err("has no boolean mask".into());
        }
        if call.bias.is_some() {
            return Err("has no bias tensor".into());
        }
        if d_v != d {
            return Err(format!("takes values as wide as keys, and D_v is {d_v} where D is {d}"));
        }
        let ScaleRange { least, most } = self.scales;
        if !(least..=most).contains(&scale) {
            return Err(format!("takes scales from {least:e} to {most:e}, and this one is {scale:?}"));
        }
        Ok(())
    }
}

impl GpuCall {
    /// Returns the output (B, H, T_q, D) in the call's layout.
    pub fn output(&self, call: &Call) -> Result<Tensor> {
        let (operation, Dims { b, h, t_q, d_v, .. }) = (self.operation, call.dims);
        let output = (operation.run)(&self.inputs(call)?)?;
        let output =
            if operation.is_sequence_first { output.reshape((b, (), h, d_v))?.transpose(1, 2)? } else { output };
        let output = match &self.sequences {
            Sequences::Alike { keys, rest: rest @ 1.. } => {
                let narrowed = |xs: &Tensor| xs.narrow(2, keys.start, keys.len());
                let (q, k, v) = (call.q.narrow(2, t_q - rest, *rest)?, narrowed(&call.k)?, narrowed(&call.v)?);
                let qkv = Qkv { q: &q, k: &k, v: &v };
                let last = Call::new(call.op, qkv, None, &AttentionMask::causal(), &call.options)?;
                Tensor::cat(&[output, reference::output(&last)?], 2)?
            }
            _ => output,
        };
        call.in_output_layout(output)
    }

    /// Returns the kernel's inputs.
    fn inputs(&self, call: &Call) -> Result<Inputs> {
        let slopes = match &call.options.alibi_slopes {
            Some(slopes) => Some(slopes.to_dtype(DType::F32)?.contiguous()?),
            None => None,
        };
        let (scale, softcap) = (call.scale() as f32, call.options.softcap.unwrap_or(0.0) as f32);
        let (q, k, v, lengths) = match &self.sequences {
            Sequences::Alike { keys, rest } => {
                let first = |xs: &Tensor, start: usize, end: usize| {
                    self.in_kernel_order(&xs.narrow(2, start, end - rest - start)?, call.dims.t_q)
                };
                let (k, v) = (first(&call.k, keys.start, keys.end)?, first(&call.v, keys.start, keys.end)?);
                (first(&call.q, 0, call.dims.t_q)?, k, v, None)
            }
            Sequences::Varlen(cu_seqlens) => {
                let joined = |xs: &Tensor| self.in_kernel_order(xs, call.dims.t_q)?.flatten(0, 1);
                let longest =
                    |lens: &[u32]| lens.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0);
                let lengths = Lengths {
                    cu_seqlens_q: Tensor::new(cu_seqlens.queries.as_slice(), call.q.device())?,
                    cu_seqlens_kv: Tensor::new(cu_seqlens.keys.as_slice(), call.q.device())?,
                    most_queries: longest(&cu_seqlens.queries),
                    most_keys: longest(&cu_seqlens.keys),
                };
                (joined(&call.q)?, joined(&call.k)?, joined(&call.v)?, Some(lengths))
            }
        };
        Ok(Inputs { q, k, v, lengths, alibi_slopes: slopes, scale, softcap, window: self.window })
    }

    /// Returns a tensor (B, H, T, D) in the order of the kernel, copied only if the kernel cannot read it.
    fn in_kernel_order(&self, xs: &Tensor, t_q: usize) -> Result<Tensor> {
        let xs = if self.operation.is_sequence_first { xs.transpose(1, 2)? } else { xs.clone() };
        // Not `contiguous`, which does not copy a view that begins at an odd element or has a stride for a single head.
        if (self.operation.reads)(&xs, t_q) { Ok(xs) } else { xs.force_contiguous() }
    }
}

/// Returns an error without the backtrace that Candle may append.
pub(super) fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().trim().to_string()
}
