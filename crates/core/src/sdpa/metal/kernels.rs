//! The way of a call to Metal: Candle's operation where it is right, and a kernel of this crate otherwise.

use std::fmt;

use candle_attention_call::{AttentionDims as Dims, RequestedResults};
use candle_attention_metal::{MetalAttention, MetalKernel, is_available};
use candle_core::Result;

use super::MetalCall;
use crate::sdpa::bounded_keys::bounded_keys;
use crate::sdpa::call::{Call, swapped_for};
use crate::sdpa::dropout::{KernelDropout, draw_seed};
use crate::sdpa::first_line;
use crate::sdpa::kernel_graph::{self, requested_gradients, tracks_gradients};
use crate::sdpa::page_table::page_table;
use crate::sdpa::prepared::prepared;
use crate::sdpa::results::Attended;

/// A call on Metal with what runs it.
pub(crate) enum MetalPath {
    /// Candle's operation.
    Operation(MetalCall),
    /// A kernel of this crate.
    Kernel(Box<MetalKernelCall>),
}

impl fmt::Display for MetalPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operation(call) => write!(f, "{call}"),
            Self::Kernel(call) => write!(f, "{call}"),
        }
    }
}

impl MetalPath {
    /// Checks the kernel of the call at its first use on the device. Candle's operation needs no check.
    ///
    /// # Errors
    /// If the check failed, now or earlier: the sentence says why. It has been logged.
    pub fn check_first_use(&self) -> std::result::Result<(), String> {
        match self {
            Self::Operation(_) => Ok(()),
            Self::Kernel(kernel) => kernel.check_first_use(),
        }
    }

    /// Returns what runs a call, or the reasons why nothing but the reference path does.
    pub fn plan(call: &Call, wanted: RequestedResults) -> std::result::Result<Self, String> {
        let of_operation = match MetalCall::plan(call, wanted) {
            Ok(operation) => return Ok(Self::Operation(operation)),
            Err(reason) => reason,
        };
        match MetalKernelCall::plan(call, wanted) {
            Ok(kernel) => Ok(Self::Kernel(Box::new(kernel))),
            Err(reason) => Err(format!("{of_operation}, and {reason}")),
        }
    }

    /// Returns whether a kernel runs the call, which reads codes of keys and values. Candle's operation reads none.
    pub fn reads_codes(&self) -> bool {
        matches!(self, Self::Kernel(_))
    }

    /// Returns the requested results.
    pub fn attend(self, call: &Call, wanted: RequestedResults) -> Result<Attended> {
        match self {
            Self::Operation(operation) => operation.output(call).map(Attended::from),
            Self::Kernel(kernel) => kernel.attend(wanted),
        }
    }
}

/// A call that a kernel of this crate supports, in the form that it reads.
pub(crate) struct MetalKernelCall {
    pub(super) attention: MetalAttention,
    pub(super) kernel: MetalKernel,
    /// Whether an input is tracked for gradients.
    pub(super) is_trained: bool,
    /// Whether a seed of dropout is still to be drawn.
    draws_seed: bool,
}

impl fmt::Display for MetalKernelCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kernel)?;
        if self.is_trained { f.write_str(", and the Metal backward kernels") } else { Ok(()) }
    }
}

impl MetalKernelCall {
    /// Returns the call for the kernels, whether or not they have failed a check, or the reason why they do not support
    /// it.
    pub fn unchecked(call: &Call, wanted: RequestedResults) -> std::result::Result<Self, String> {
        if wanted.weights {
            return Err("the Metal kernels do not return attention weights".into());
        }
        if wanted.statistics.is_some() {
            return Err("the Metal kernels do not compute statistics of weights".into());
        }
        let Dims { b, t_q, t_kv, d_v, .. } = call.attention.dims;
        if [b, t_q, t_kv, d_v].contains(&0) {
            return Err("there are no scores, for which the Metal kernels do not run".into());
        }
        is_available(call.attention.q.device()).map_err(|reason| reason.to_string())?;
        let keys = bounded_keys(call).map_err(|error| first_line(&error))?;
        let KernelDropout { dropout, draws_seed } = KernelDropout::of(call.dropout.as_ref())?;
        let mut metal_call = prepared(call, keys, dropout).map_err(|error| first_line(&error))?;
        if let Some(sequences) = &call.attention.keys.pages {
            metal_call.pages = Some(page_table(sequences, &call.attention.k).map_err(|error| first_line(&error))?);
        }
        let attention = MetalAttention::new(metal_call).map_err(|reason| reason.to_string())?;
        let kernel = attention.plan().map_err(|reason| reason.to_string())?;
        let is_trained = tracks_gradients(attention.call());
        if is_trained {
            let wanted_gradients = requested_gradients(attention.call());
            attention.plan_backward(wanted_gradients).map_err(|reason| reason.to_string())?;
        }
        Ok(Self { attention, kernel, is_trained, draws_seed })
    }

    /// Returns the requested results.
    pub fn attend(mut self, wanted: RequestedResults) -> Result<Attended> {
        if self.draws_seed {
            let seed = draw_seed(self.attention.call().q.device())?;
            self.attention.set_dropout_seed(seed);
        }
        let layout = self.attention.call().output_layout;
        let attended = kernel_graph::attend(self.attention, wanted)?;
        Ok(Attended { output: swapped_for(layout, attended.output)?, ..attended })
    }
}
