//! The gradients of a call: the requested ones, their memory, and the results.

use super::output::GradientOutput;
use crate::cpu::{Format, SharedPtr, Unwritten};
use crate::error::Error;
use crate::flash::dims::AttentionDims;
use crate::flash::memory::{unwritten, zeros};
use crate::flash::problem::{AttentionProblem, OutputLayout};
use crate::number::Number;

/// The gradients that [`attend_backward`](crate::flash::attend_backward) computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestedGradients {
    /// The order in memory of the gradients of queries, keys and values.
    pub layout: OutputLayout,
    /// The gradient of the queries.
    pub q: bool,
    /// The gradient of the keys.
    pub k: bool,
    /// The gradient of the values.
    pub v: bool,
    /// The shape of the gradient of the bias, each dimension that of (B, H, T_q, T_kv), or 1. The gradients of scores
    /// that share an entry are summed.
    pub bias: Option<[usize; 4]>,
    /// The gradient of the relative bias.
    pub relative_bias: bool,
    /// The gradient of ALiBi's slopes.
    pub slopes: bool,
    /// The gradient of the sinks.
    pub sinks: bool,
}

/// The requested gradients, contiguous.
#[derive(Debug, Clone, Default)]
pub struct AttentionGradients<E> {
    /// (B, H, T_q, D), or (B, T_q, H, D) if that is the requested layout.
    pub q: Option<Vec<E>>,
    /// (B, H_kv, T_kv, D), or (B, T_kv, H_kv, D), summed over the queries of the heads that share a key head.
    pub k: Option<Vec<E>>,
    /// (B, H_kv, T_kv, D_v), or (B, T_kv, H_kv, D_v).
    pub v: Option<Vec<E>>,
    /// In the requested shape.
    pub bias: Option<Vec<f32>>,
    /// (B, H) rows of a number for each entry, or (1, H) where sequences share them.
    pub relative_bias: Option<Vec<f32>>,
    /// (H,).
    pub slopes: Option<Vec<f32>>,
    /// (H,).
    pub sinks: Option<Vec<f32>>,
}

impl RequestedGradients {
    /// Checks that the call has the tensors whose gradients are requested.
    pub(super) fn check<E>(&self, forward: &AttentionProblem<E>) -> Result<(), Error> {
        let scores = &forward.scores;
        let missing =
            |name: &str| Err(Error::Shape(format!("expected {name}, whose gradient is requested, found none")));
        if self.bias.is_some() && scores.bias.is_none() {
            return missing("a bias");
        }
        if self.relative_bias && scores.relative_bias.is_none() {
            return missing("a relative bias");
        }
        if self.slopes && scores.alibi.is_none() {
            return missing("slopes");
        }
        if self.sinks && scores.sinks.is_none() {
            return missing("sinks");
        }
        let AttentionDims { b, h, t_q, t_kv, .. } = forward.dims;
        let full = [b, h, t_q, t_kv];
        if let Some(shape) = self.bias
            && shape.iter().zip(full).any(|(&dim, full)| dim != full && dim != 1)
        {
            return Err(Error::Shape(format!("expected a bias that broadcasts to {full:?}, found {shape:?}")));
        }
        Ok(())
    }
}

/// A gradient that tiles add to.
struct Sums {
    shape: [usize; 4],
    sums: Vec<f32>,
}

impl Sums {
    /// Allocates zeros.
    fn new(shape: [usize; 4]) -> Result<Self, Error> {
        Ok(Self { shape, sums: zeros("a gradient", &shape)? })
    }

    fn output(&mut self) -> GradientOutput {
        GradientOutput::new(self.pointer(), self.shape)
    }

    fn pointer(&mut self) -> SharedPtr<f32> {
        SharedPtr(self.sums.as_mut_ptr())
    }
}

/// Pointers to the gradients of a call.
pub(super) struct GradientPointers<E> {
    /// The row terms of the softmax, (B, H, T_q), computed by [`AttentionBackwardCall::prepare_rows`](super::call::AttentionBackwardCall::prepare_rows).
    pub deltas: SharedPtr<f32>,
    /// The sums of the queries' gradients in the requested layout: the gradients themselves in f32.
    pub q_sums: SharedPtr<f32>,
    /// The gradients of the queries where they are not f32.
    pub q: Option<SharedPtr<E>>,
    pub k: Option<SharedPtr<E>>,
    pub v: Option<SharedPtr<E>>,
    pub bias: Option<GradientOutput>,
    pub relative_bias: Option<GradientOutput>,
    /// (H,).
    pub slopes: Option<SharedPtr<f32>>,
    /// (H,).
    pub sinks: Option<SharedPtr<f32>>,
}

/// The memory for the gradients of a call.
pub(super) struct GradientMemory<E> {
    q: Option<Unwritten<E>>,
    k: Option<Unwritten<E>>,
    v: Option<Unwritten<E>>,
    /// The gradients of the queries in f32, where these are not f32.
    wide: Unwritten<f32>,
    deltas: Unwritten<f32>,
    bias: Option<Sums>,
    relative_bias: Option<Sums>,
    slopes: Option<Sums>,
    sinks: Option<Sums>,
}

impl<E: Number> GradientMemory<E> {
    /// Allocates memory for the requested gradients.
    pub fn new(forward: &AttentionProblem<E>, requested: RequestedGradients) -> Result<Self, Error> {
        let AttentionDims { b, h, h_kv, t_q, t_kv, d, d_v } = forward.dims;
        let rows = |is_requested: bool, shape: [usize; 4]| -> Result<_, Error> {
            if is_requested { Ok(Some(unwritten("a gradient", &shape)?)) } else { Ok(None) }
        };
        let sums = |shape: Option<[usize; 4]>| -> Result<_, Error> {
            if let Some(shape) = shape { Ok(Some(Sums::new(shape)?)) } else { Ok(None) }
        };
        let relative_bias_shape = match forward.scores.relative_bias {
            Some(bias) if requested.relative_bias => Some([bias.sequences(&forward.dims), h, 1, bias.len]),
            _ => None,
        };
        let has_wide_sums = requested.q && E::FORMAT != Format::F32;
        Ok(Self {
            q: rows(requested.q, [b, h, t_q, d])?,
            k: rows(requested.k, [b, h_kv, t_kv, d])?,
            v: rows(requested.v, [b, h_kv, t_kv, d_v])?,
            wide: unwritten("a gradient", &if has_wide_sums { [b, h, t_q, d] } else { [0; 4] })?,
            deltas: unwritten("the row terms of a gradient", &[b, h, t_q])?,
            bias: sums(requested.bias)?,
            relative_bias: sums(relative_bias_shape)?,
            slopes: sums(requested.slopes.then_some([h, 1, 1, 1]))?,
            sinks: sums(requested.sinks.then_some([h, 1, 1, 1]))?,
        })
    }

    /// Returns pointers to the gradients.
    pub fn pointers(&mut self) -> GradientPointers<E> {
        let pointer = |rows: &mut Unwritten<E>| SharedPtr(rows.as_mut_ptr());
        let q = self.q.as_mut().map(pointer);
        let wide = SharedPtr(self.wide.as_mut_ptr());
        let is_f32 = E::FORMAT == Format::F32;
        GradientPointers {
            deltas: SharedPtr(self.deltas.as_mut_ptr()),
            q_sums: match q {
                Some(q) if is_f32 => SharedPtr(q.0.cast()),
                _ => wide,
            },
            q: if is_f32 { None } else { q },
            k: self.k.as_mut().map(pointer),
            v: self.v.as_mut().map(pointer),
            bias: self.bias.as_mut().map(Sums::output),
            relative_bias: self.relative_bias.as_mut().map(Sums::output),
            slopes: self.slopes.as_mut().map(Sums::pointer),
            sinks: self.sinks.as_mut().map(Sums::pointer),
        }
    }

    /// Writes zeros to the gradients of keys and values.
    pub fn clear_keys_values(&mut self) {
        if let Some(k) = &mut self.k {
            k.clear();
        }
        if let Some(v) = &mut self.v {
            v.clear();
        }
    }

    /// Returns the gradients.
    ///
    /// # Safety
    /// Every element was written.
    pub unsafe fn into_gradients(self) -> AttentionGradients<E> {
        // SAFETY: as this method's contract.
        let into_vec = |rows: Unwritten<E>| unsafe { rows.into_vec() };
        let sums = |sums: Sums| sums.sums;
        AttentionGradients {
            q: self.q.map(into_vec),
            k: self.k.map(into_vec),
            v: self.v.map(into_vec),
            bias: self.bias.map(sums),
            relative_bias: self.relative_bias.map(sums),
            slopes: self.slopes.map(sums),
            sinks: self.sinks.map(sums),
        }
    }
}
