//! The memory for the gradients of a call.

use super::call::{AttentionGradients, GradientPointers, RequestedGradients};
use super::output::GradientOutput;
use crate::cpu::{Format, SharedPtr, Unwritten};
use crate::error::Error;
use crate::flash::dims::AttentionDims;
use crate::flash::memory::{unwritten, zeros};
use crate::flash::problem::AttentionProblem;
use crate::number::Number;

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

/// The memory for the gradients of a call.
pub(super) struct Results<E> {
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

impl<E: Number> Results<E> {
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
    pub unsafe fn written(self) -> AttentionGradients<E> {
        // SAFETY: as this method's contract.
        let written = |rows: Unwritten<E>| unsafe { rows.written() };
        let sums = |sums: Sums| sums.sums;
        AttentionGradients {
            q: self.q.map(written),
            k: self.k.map(written),
            v: self.v.map(written),
            bias: self.bias.map(sums),
            relative_bias: self.relative_bias.map(sums),
            slopes: self.slopes.map(sums),
            sinks: self.sinks.map(sums),
        }
    }
}
