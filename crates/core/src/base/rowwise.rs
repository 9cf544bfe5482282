//! One pass over queries or keys on a CPU, head by head, whatever their strides: what norms and rotary positions have
//! in common.

use candle_core::{Layout, Result, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

/// The fewest elements that are worth a task of their own.
const TASK_ELEMENTS: usize = 1 << 14;

/// The types that tensors hold.
pub(crate) trait Element: Copy + Default + Send + Sync {
    /// What they are computed with in.
    type Wide: Copy + Default;

    /// Writes a row to `ys` after `change` was applied to it in the wide type. `scratch` belongs to the task.
    fn map(xs: &[Self], ys: &mut [Self], change: impl FnOnce(&mut [Self::Wide]), scratch: &mut Vec<Self::Wide>);
}

macro_rules! computed_in_own_type {
    ($($float:ty),+) => {$(
        impl Element for $float {
            type Wide = Self;

            fn map(xs: &[Self], ys: &mut [Self], change: impl FnOnce(&mut [Self]), _: &mut Vec<Self>) {
                ys.copy_from_slice(xs);
                change(ys);
            }
        }
    )+};
}

macro_rules! computed_in_f32 {
    ($($float:ty),+) => {$(
        impl Element for $float {
            type Wide = f32;

            fn map(xs: &[Self], ys: &mut [Self], change: impl FnOnce(&mut [f32]), scratch: &mut Vec<f32>) {
                scratch.resize(xs.len(), 0.0);
                xs.convert_to_f32_slice(scratch);
                change(scratch);
                ys.convert_from_f32_slice(scratch);
            }
        }
    )+};
}

computed_in_own_type!(f32, f64);
computed_in_f32!(bf16, f16);

/// The heads (D,) of a view (B, T, H, D) with contiguous rows, each changed by what `of_token` gives for its token,
/// from 0 to B · T; that is called with the number of the head and the row.
pub(crate) fn map_heads<E: Element, F: Fn(usize, &mut [E::Wide])>(
    xs: &[E],
    layout: &Layout,
    of_token: impl Fn(usize) -> F + Sync,
) -> Result<Vec<E>> {
    let (b, t, h, d) = layout.shape().dims4()?;
    let count = b * t * h * d;
    let mut ys = vec![E::default(); count];
    if count == 0 {
        return Ok(ys);
    }
    let stride = layout.stride();
    let one_token = |scratch: &mut Vec<E::Wide>, (token, ys): (usize, &mut [E])| {
        let change = of_token(token);
        let start = layout.start_offset() + token / t * stride[0] + token % t * stride[1];
        for (head, ys) in ys.chunks_exact_mut(d).enumerate() {
            let start = start + head * stride[2];
            E::map(&xs[start..start + d], ys, |row| change(head, row), scratch);
        }
    };
    if count <= TASK_ELEMENTS {
        let mut scratch = Vec::new();
        ys.chunks_mut(h * d).enumerate().for_each(|token| one_token(&mut scratch, token));
    } else {
        let least = TASK_ELEMENTS.div_ceil(h * d);
        ys.par_chunks_mut(h * d).enumerate().with_min_len(least).for_each_init(Vec::new, one_token);
    }
    Ok(ys)
}

/// A tensor (B, T, H, D) or (B, H, T, D) whose rows (D,) are contiguous: itself, or a copy.
pub(crate) fn with_contiguous_rows(tensor: &Tensor) -> Result<Tensor> {
    if tensor.dim(3)? <= 1 || tensor.stride()[3] == 1 { Ok(tensor.clone()) } else { tensor.contiguous() }
}
