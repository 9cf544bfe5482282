//! The gradients of a call: the requested ones, their memory, and the results.

use super::output::GradientOutput;
use crate::cpu::{Format, SharedPtr, Unwritten};
use crate::error::Error;
use crate::flash::inputs::CheckedCall;
use crate::flash::memory::{unwritten, zeros};

use crate::number::{Number, Strided};
use candle_attention_call::{AttentionDims, PerInput, RequestedGradients, ScoreModifiers};

/// The requested gradients, contiguous.
///
/// - `q`: (B, H, T_q, D), or (B, T_q, H, D) if that is the requested layout.
/// - `k`: (B, H_kv, T_kv, D), or (B, T_kv, H_kv, D), summed over the queries of the heads that share a key head.
/// - `v`: (B, H_kv, T_kv, D_v), or (B, T_kv, H_kv, D_v).
/// - `bias`: (B, H, T_q, T_kv), where each dimension whose stride is 0 is 1: the gradients of scores that share an
///   entry are summed.
/// - `relative_bias`: (B, H) rows of a number for each entry, or (1, H) where sequences share them.
/// - `alibi_slopes` and `sinks`: (H,).
pub type AttentionGradients<E> = PerInput<Option<Vec<E>>, Option<Vec<f32>>>;

/// Checks that a call has the tensors whose gradients are requested.
pub(super) fn check_requested<T>(requested: &RequestedGradients, scores: &ScoreModifiers<T>) -> Result<(), Error> {
    let PerInput { q: _, k: _, v: _, bias, relative_bias, alibi_slopes, sinks } = requested.of;
    let missing = |name: &str| Err(Error::Shape(format!("expected {name}, whose gradient is requested, found none")));
    if bias && scores.bias.is_none() {
        return missing("a bias");
    }
    if relative_bias && scores.relative_bias.is_none() {
        return missing("a relative bias");
    }
    if alibi_slopes && scores.alibi_slopes.is_none() {
        return missing("slopes");
    }
    if sinks && scores.sinks.is_none() {
        return missing("sinks");
    }
    Ok(())
}

/// Returns the shape of the gradient of a bias: that of the scores, with 1 for a dimension along which the bias repeats
/// its entries.
fn bias_shape(bias: &Strided<f32, 4>, dims: &AttentionDims) -> [usize; 4] {
    let AttentionDims { b, h, t_q, t_kv, .. } = *dims;
    let full = [b, h, t_q, t_kv];
    std::array::from_fn(|n| if bias.strides[n] == 0 { full[n].min(1) } else { full[n] })
}

/// A gradient that tiles add to.
struct GradientSums {
    shape: [usize; 4],
    sums: Vec<f32>,
}

impl GradientSums {
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
    /// The row terms of the softmax, (B, H, T_q), computed by [`BackwardCall::prepare_rows`](super::call::BackwardCall::prepare_rows).
    pub deltas: SharedPtr<f32>,
    /// The gradients of the queries in f32, to which tasks add, in the requested layout. If E is f32, they are the
    /// result.
    pub q_sums: SharedPtr<f32>,
    /// The gradients of the queries, rounded to E, if E is not f32.
    pub q: Option<SharedPtr<E>>,
    pub k: Option<SharedPtr<E>>,
    pub v: Option<SharedPtr<E>>,
    pub bias: Option<GradientOutput>,
    pub relative_bias: Option<GradientOutput>,
    /// (H,).
    pub alibi_slopes: Option<SharedPtr<f32>>,
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
    bias: Option<GradientSums>,
    relative_bias: Option<GradientSums>,
    alibi_slopes: Option<GradientSums>,
    sinks: Option<GradientSums>,
}

impl<E: Number> GradientMemory<E> {
    /// Allocates memory for the requested gradients.
    pub fn new(inputs: &CheckedCall, requested: RequestedGradients) -> Result<Self, Error> {
        let AttentionDims { b, h, h_kv, t_q, t_kv, d, d_v } = inputs.dims;
        let rows = |is_requested: bool, shape: [usize; 4]| -> Result<_, Error> {
            if is_requested { Ok(Some(unwritten("a gradient", &shape)?)) } else { Ok(None) }
        };
        let sums = |shape: Option<[usize; 4]>| -> Result<_, Error> {
            if let Some(shape) = shape { Ok(Some(GradientSums::new(shape)?)) } else { Ok(None) }
        };
        let PerInput { q, k, v, bias, relative_bias, alibi_slopes, sinks } = requested.of;
        let bias_dims = match &inputs.options.bias {
            Some(given) if bias => Some(bias_shape(given, &inputs.dims)),
            _ => None,
        };
        let relative_bias_dims = match inputs.options.relative_bias {
            Some(given) if relative_bias => Some([given.sequences(&inputs.dims), h, 1, given.len]),
            _ => None,
        };
        let has_wide_sums = q && E::FORMAT != Format::F32;
        Ok(Self {
            q: rows(q, [b, h, t_q, d])?,
            k: rows(k, [b, h_kv, t_kv, d])?,
            v: rows(v, [b, h_kv, t_kv, d_v])?,
            wide: unwritten("a gradient", &if has_wide_sums { [b, h, t_q, d] } else { [0; 4] })?,
            deltas: unwritten("the row terms of a gradient", &[b, h, t_q])?,
            bias: sums(bias_dims)?,
            relative_bias: sums(relative_bias_dims)?,
            alibi_slopes: sums(alibi_slopes.then_some([h, 1, 1, 1]))?,
            sinks: sums(sinks.then_some([h, 1, 1, 1]))?,
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
            bias: self.bias.as_mut().map(GradientSums::output),
            relative_bias: self.relative_bias.as_mut().map(GradientSums::output),
            alibi_slopes: self.alibi_slopes.as_mut().map(GradientSums::pointer),
            sinks: self.sinks.as_mut().map(GradientSums::pointer),
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
        let into_sums = |tensor: GradientSums| tensor.sums;
        AttentionGradients {
            q: self.q.map(into_vec),
            k: self.k.map(into_vec),
            v: self.v.map(into_vec),
            bias: self.bias.map(into_sums),
            relative_bias: self.relative_bias.map(into_sums),
            alibi_slopes: self.alibi_slopes.map(into_sums),
            sinks: self.sinks.map(into_sums),
        }
    }
}
